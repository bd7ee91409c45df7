"""The runs in folders of runs and grids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsim.config.file import RawConfig, flat
from fedsim.errors import RunFolderError
from fedsim.results.folder import GridFolder, ResultsFolder, RunFolder
from fedsim.results.manifest import runs_below
from fedsim.results.run import Run

Value = str | int | float  # of an axis


@dataclass
class Entry:
    """One run of those that are compared; without a `run` there is nothing of it on disk.

    Attributes:
        cell: what sets it apart from the others, seed aside.
        place: its folder, as short as it can be named; `given` is that of its grid, if it has one.
        status: `finished`, or what became of it.
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
        return 0 if self.run is None else len(self.run.rounds)

    @property
    def progress(self) -> str:
        return f"{self.rounds} of {self.settings.get('train.rounds', '?')} rounds"

    @property
    def manifest(self) -> dict[str, Any]:
        return {} if self.run is None else self.run.manifest


def names_of(paths: Sequence[Path]) -> list[str]:
    """Folders by the last parts of their paths: two, or as many as it takes to tell them apart."""
    for parts in range(2, max((len(path.parts) for path in paths), default=2)):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def differing(settings: Sequence[Mapping[str, Any]], absent: bool = True) -> list[str]:
    """The keys whose values are not all the same.

    Args:
        absent: that some lack a key makes a difference.
    """
    keys = dict.fromkeys(key for each in settings for key in each)
    values = {k: [repr(each.get(k)) for each in settings if absent or k in each] for k in keys}
    return [key for key in keys if len(set(values[key])) > 1]


def entries_of(folder: ResultsFolder, given: str) -> list[Entry]:
    """The runs of a run's or a grid's folder; none of a search's."""
    if isinstance(folder, RunFolder):
        return [_entry(folder, given, given)]
    if not isinstance(folder, GridFolder):
        return []
    if not folder.manifest.get("cells"):  # it goes on, or was killed
        runs = [RunFolder.open(path) for path in runs_below(folder.path)]
        places = [f"{given}/{run.path.relative_to(folder.path)}" for run in runs]
        return [_entry(run, place, given) for run, place in zip(runs, places, strict=True)]
    entries = []
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
    return entries


def _entry(folder: RunFolder, place: str, given: str) -> Entry:
    manifest = folder.manifest
    # Reading the experiment runs no code.
    content = flat(RawConfig.read(folder.path / "experiment.yaml").content)
    settings = {
        key.removesuffix(".name").removesuffix(".kind"): word(v) for key, v in content.items()
    }
    status, error = manifest["status"], manifest.get("error") or ""
    return Entry(Run(folder), {}, manifest["seed"], place, given, status, error, settings)


def name_sections(entries: Iterable[Entry]) -> None:
    """Write settings that list sections, such as explainers, by the names of these sections.

    Where sections of one name differ, the settings in which they do follow the name:
    `occlusion (size 2) + random`.
    """
    settings = [entry.settings for entry in entries]
    for key in dict.fromkeys(key for each in settings for key in each):
        lists = {(text := str(each[key])): _sections(text) for each in settings if key in each}
        by_name: dict[str, list[dict[str, Any]]] = {}
        for section in (section for sections in lists.values() for section in sections):
            by_name.setdefault(section["name"], []).append(section)
        apart = {name: differing(sections) for name, sections in by_name.items()}
        for each in settings:
            if sections := lists.get(str(each.get(key))):
                each[key] = " + ".join(_called(section, apart) for section in sections)


def _sections(value: str) -> list[dict[str, Any]]:
    """The sections that a setting lists, as `word` writes it; none if it is anything else."""
    listed = json.loads(value) if value.startswith("[{") else []
    return listed if all("name" in one for one in listed) else []


def _called(section: Mapping[str, Any], apart: Mapping[str, Sequence[str]]) -> str:
    told = ", ".join(f"{k} {section[k]}" for k in apart[section["name"]] if k in section)
    return f"{section['name']} ({told})" if told else str(section["name"])


def word(value: Any) -> Value:
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return value if plain else json.dumps(value)
