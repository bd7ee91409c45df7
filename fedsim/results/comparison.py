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

DASH = "–"  # where there is nothing: a setting that a run does not have, a figure not on record
# What changes nothing in a result: names, logs, where data and processes are.
_IGNORED = ("name", "seed", "loggers", "data.root", "data.download")


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
    return cell_label({axis: value for axis, value in values.items() if value != DASH})


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


def names_of(paths: Sequence[Path]) -> list[str]:
    """Folders by the last parts of their paths: two, or as many as it takes to tell them apart."""
    for parts in range(2, max((len(path.parts) for path in paths), default=2)):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def entries_of(folder: Folder, given: str) -> list[Entry]:
    """The runs of a run's or a grid's folder; none of a search's.

    Args:
        given: what the folder is called.

    Raises:
        RunFolderError: a grid's manifest does not say which there are.
    """
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
            # The row is of when the grid ended last; it may have been resumed since, so that the
            # run knows better. But one whose process was killed could not write that it failed.
            if entry.run is None or (entry.status, row["status"]) == ("running", "failed"):
                entry.error = error
                entry.status = row["status"] if entry.run else "missing"
            elif not entry.finished:
                entry.error = entry.error or error
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


def tell_apart(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """Say of each run what sets it apart.

    Within grids of the same axes it is these, and what differs between runs that are alike in
    them; otherwise whatever the experiments differ in, but for what does not change a result. Runs
    that are alike in all of it, seed included, are told apart by their names, or by their folders.

    Returns:
        The runs, without those that are copies of others, and the axes: what a cell has values of.
    """
    kinds = {tuple(entry.cell) for entry in entries}
    if len(kinds) == 1 and kinds != {()}:
        by_cell: dict[tuple[Value, ...], list[Mapping[str, Value]]] = {}
        for entry in entries:
            if entry.run is not None:
                by_cell.setdefault(tuple(entry.cell.values()), []).append(entry.settings)
        differing = [key for settings in by_cell.values() for key in _differing(settings)]
        for entry in entries:
            # A value of an axis may be a variant's label, which says nothing of the component.
            more = {f"{k}.name" if k in entry.cell else k: _setting(entry, k, entries)
                    for k in differing}  # fmt: skip
            entry.cell = {**entry.cell, **more}
    else:
        differing = _differing([entry.settings for entry in entries]) or ["method"]
        differing.sort(key=lambda axis: axis != "method")
        for entry in entries:
            entry.cell = {axis: entry.settings.get(axis, DASH) for axis in differing}
    keys = [(*e.cell.values(), e.seed, _setting(e, "name", entries)) for e in entries]
    there = {key for entry, key in zip(entries, keys, strict=True) if entry.run is not None}
    by_result: dict[tuple[Value, ...], Entry] = {}
    for entry, key in zip(entries, keys, strict=True):
        if entry.run is not None:
            key = (*key, entry.manifest.get("result_hash") or entry.place)
        elif key in there:  # missing from a copy of the grid alone
            continue
        by_result.setdefault(key, entry)
    found = list(by_result.values())
    for axis, values in (
        ("name", [_setting(entry, "name", entries) for entry in found]),
        ("folder", [entry.given for entry in found]),
        ("folder", [entry.place for entry in found]),
    ):
        alike = len({(*entry.cell.values(), entry.seed) for entry in found}) < len(found)
        if alike and len(set(values)) > 1:
            for entry, value in zip(found, values, strict=True):
                entry.cell[axis] = value
    return found, list(found[0].cell) if found else []


def _setting(entry: Entry, key: str, entries: Sequence[Entry]) -> Value:
    """A setting of a run; if the run is missing, what the others of its grid agree on."""
    if entry.run is None:
        agreed = {e.settings[key] for e in entries if e.given == entry.given and key in e.settings}
        return agreed.pop() if len(agreed) == 1 else DASH
    return entry.settings.get(key, DASH)


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
        and key not in _IGNORED
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
