"""Runs side by side: which of them belong together, and what sets the others apart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fedsim.errors import RunFolderError
from fedsim.results.folder import Folder, RunFolder
from fedsim.results.run import Run
from fedsim.results.summary import cell_label

Value = str | int | float  # of an axis

ABSENT = "–"  # stands for a setting that a run does not have


class _Grid(Folder):
    kind = "grid"


class _Search(Folder):
    kind = "search"


@dataclass
class Entry:
    """One run of those that are compared.

    Attributes:
        run: None if there is nothing of it on disk.
        cell: what sets it apart from the others, seed aside.
        place: its folder, as short as it can be named.
        given: its folder, or its grid's, likewise.
        status: `finished`, or what became of it.
        error: why it is not finished, if that is known.
        settings: its resolved experiment, as `section.key`; a component's name is its section's.
    """

    run: Run | None
    cell: dict[str, Value]
    seed: int
    place: str
    given: str
    status: str
    error: str = ""
    settings: dict[str, Value] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def rounds(self) -> int:
        """How many are on disk."""
        return 0 if self.run is None else len(self.run.rounds)

    @property
    def progress(self) -> str:
        """How far it has come."""
        return f"{self.rounds} of {self.settings.get('train.rounds', '?')} rounds"

    @property
    def manifest(self) -> dict[str, Any]:
        return {} if self.run is None else self.run.manifest


@dataclass
class Cell:
    """Runs that differ in nothing but their seeds.

    Attributes:
        entries: the finished ones; all, if none is: half a run says little beside whole ones.
        panel: which of the figures it is drawn in, where there are several.
        line: what its line is called there.
        style: which of the styles its line has; None among lines too many to be told apart.
    """

    values: dict[str, Value]
    entries: list[Entry]
    panel: str = ""
    line: str = ""
    style: int | None = None

    @property
    def label(self) -> str:
        return label(self.values)

    @property
    def runs(self) -> list[tuple[Mapping[str, Any], int, Run]]:
        """As `tidy` takes them."""
        return [(self.values, e.seed, e.run) for e in self.entries if e.run is not None]


def label(values: Mapping[str, Value]) -> str:
    """A cell in a few words, without the settings that it does not have."""
    return cell_label({axis: value for axis, value in values.items() if value != ABSENT})


def open_folder(path: Path) -> Folder:
    """Open the folder of a run, a grid or a search.

    Raises:
        RunFolderError: it is none of these.
    """
    kinds: dict[str, type[Folder]] = {f.kind: f for f in (RunFolder, _Grid, _Search)}
    if not path.is_dir():
        raise RunFolderError(f"{path}: there is no such folder")
    try:
        kind = kinds[json.loads((path / "manifest.json").read_text()).get("kind", "run")]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        below = [p.parent for p in sorted(path.glob("*/manifest.json"))]
        hint = f"; did you mean {below[-1]}?" if below else ""
        raise RunFolderError(
            f"{path}: not the folder of a run, a grid or a search (no readable manifest.json in "
            f"it){hint}"
        ) from error
    return kind.open(path)


def entries_of(folder: Folder) -> list[Entry]:
    """The runs of a run's or a grid's folder; none of a search's.

    Raises:
        RunFolderError: a grid's manifest does not say which there are.
    """
    given = f"{folder.path.parent.name}/{folder.path.name}"
    if isinstance(folder, RunFolder):
        return [_entry(folder, given, given)]
    if not isinstance(folder, _Grid):
        return []
    if not folder.manifest.get("cells"):  # it goes on, or was killed
        found = sorted(folder.path.glob("cells/*/*/manifest.json"))
        runs = [RunFolder.open(manifest.parent) for manifest in found]
        places = [f"{given}/{run.path.relative_to(folder.path)}" for run in runs]
        return [_entry(run, place, given) for run, place in zip(runs, places, strict=True)]
    entries = []
    try:
        for row in folder.manifest["cells"]:
            cell = {axis: word(value) for axis, value in row["cell"].items()}
            place, error = f"{given}/{row['folder']}", row.get("error") or ""
            try:
                entry = _entry(RunFolder.open(folder.path / row["folder"]), place, given)
            except RunFolderError as missing:
                entry = Entry(None, {}, row["seed"], place, given, "missing", settings={**cell})
                error = error or (str(missing) if row["status"] == "finished" else "")
            entry.cell = cell
            if not entry.finished:
                entry.status = row["status"] if entry.run else "missing"
                entry.error = error
            entries.append(entry)
    except (KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{folder.path}: its manifest.json does not say which cells there are"
        ) from error
    return entries


def _entry(folder: RunFolder, place: str, given: str) -> Entry:
    manifest = folder.manifest
    return Entry(
        Run(folder),
        {},
        manifest["seed"],
        place,
        given,
        manifest["status"],
        manifest.get("error") or "",
        _settings(folder.path),
    )


def tell_apart(entries: Sequence[Entry]) -> list[str]:
    """Say of each run what sets it apart, and return the axes: what that is a value of.

    Within grids of the same axes it is these; otherwise whatever the experiments differ in, but
    for what does not change a result. Runs that are alike in all of it, seed included, are told
    apart by their names, or by their folders.
    """
    kinds = {tuple(entry.cell) for entry in entries}
    if len(kinds) != 1 or kinds == {()}:
        differing = _differing([entry.settings for entry in entries]) or ["method"]
        differing.sort(key=lambda axis: axis != "method")
        for entry in entries:
            entry.cell = {axis: entry.settings.get(axis, ABSENT) for axis in differing}
    for axis in ("name", "folder"):
        known = [(*entry.cell.values(), entry.seed) for entry in entries]
        if len(set(known)) < len(known):
            names = [e.settings.get("name", "") if axis == "name" else e.given for e in entries]
            if len(set(names)) > 1:
                for entry, name in zip(entries, names, strict=True):
                    entry.cell[axis] = name
    return list(entries[0].cell) if entries else []


def cells_of(entries: Sequence[Entry]) -> list[Cell]:
    """The cells, in the order of their first runs."""
    by_values: dict[tuple[Value, ...], list[Entry]] = {}
    for entry in entries:
        by_values.setdefault(tuple(entry.cell.values()), []).append(entry)
    return [
        Cell(of_cell[0].cell, [e for e in of_cell if e.finished] or of_cell)
        for of_cell in by_values.values()
    ]


def _differing(settings: Sequence[Mapping[str, Value]]) -> list[str]:
    """Keys with several values. One that only some have came with another component."""
    values: dict[str, set[Value]] = {}
    for one in settings:
        for key, value in one.items():
            values.setdefault(key, set()).add(value)
    return [
        key
        for key, found in values.items()
        if len(found) > 1
        and key not in ("name", "seed")
        and (key == "engine.clients_per_step" or not key.startswith(("engine", "checkpoint.")))
    ]


def _settings(path: Path) -> dict[str, Value]:
    """The resolved experiment of a run's folder. Reading it runs no code."""
    return dict(_flat(yaml.safe_load((path / "experiment.yaml").read_text(encoding="utf-8"))))


def _flat(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Value]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        elif above and key in ("name", "kind"):
            yield above.removesuffix("."), word(value)
        else:
            yield f"{above}{key}", word(value)


def word(value: Any) -> Value:
    """A value of an axis, as one that tables can be grouped by."""
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return value if plain else json.dumps(value)
