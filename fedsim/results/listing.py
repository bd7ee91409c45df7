"""The runs, grids and searches below a folder, a line each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedsim.config.file import from_yaml
from fedsim.errors import FedsimError, RunFolderError
from fedsim.results import manifest as manifests
from fedsim.results.folder import ResultsFolder, RunFolder, open_folder
from fedsim.results.run import Run


@dataclass(frozen=True)
class Listed:
    """What a list shows of one folder of results. Empty words where nothing is known.

    Attributes:
        folder: its path, below the folder that was searched.
        status: `finished`, or what became of it; `damaged` if it cannot be read.
        done: rounds of a run, or finished runs of a grid or a search.
        of: how many it is to have; None if that is not known.
        score: of the primary metric in the last evaluated round; None if there is none.
    """

    folder: Path
    kind: str
    status: str
    name: str = ""
    method: str = ""
    done: int = 0
    of: int | None = None
    metric: str = ""
    score: float | None = None
    created: str = ""
    result_hash: str = ""
    best: Literal["max", "min"] = "max"


def list_results(folder: Path) -> list[Listed]:
    """The folders of results below a folder, the latest first; runs of a grid are not apart."""
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: there is no such folder")
    found = [listed(path, folder) for path in folders(folder)]
    return sorted(found, key=lambda listed: (listed.created, str(listed.folder)), reverse=True)


def folders(above: Path) -> Iterator[Path]:
    """The folders of results below a folder; those within a grid or a search are not apart."""
    if manifests.is_at(above):
        yield above
        return
    try:
        with os.scandir(above) as entries:
            below = [Path(each.path) for each in entries if each.is_dir(follow_symlinks=False)]
    except PermissionError:  # nothing in it can be ours
        return
    for path in sorted(below):
        yield from folders(path)


def listed(path: Path, above: Path) -> Listed:
    """What a list shows of one folder of results below another one."""
    place = path.relative_to(above)
    try:
        folder = open_folder(path)
        # Reading it runs no code.
        content = from_yaml((folder.path / "experiment.yaml").read_bytes())
        facts = _of_run(folder, content) if folder.kind == "run" else _of_many(folder, content)
        created = folder.manifest.get("created", "")
        return Listed(place, folder.kind, folder.manifest["status"], created=created, **facts)
    except (FedsimError, OSError, AttributeError, TypeError):  # files by other hands
        return Listed(place, manifests.kind_of(path) or "", "damaged")


def _of_run(folder: ResultsFolder, content: dict[str, Any]) -> dict[str, Any]:
    assert isinstance(folder, RunFolder)
    run = Run(folder)
    rounds, primary = run.rounds, run.primary_metric
    known = primary.column in rounds
    scores: list[float] = rounds[primary.column].dropna().tolist() if known else []
    return {
        "name": content.get("name", ""),
        "method": str(content.get("method", {}).get("name", "")),
        "done": len(rounds),
        "of": content.get("train", {}).get("rounds"),
        "metric": primary.column,
        "score": float(scores[-1]) if scores else None,
        "result_hash": folder.manifest.get("result_hash", ""),
        "best": primary.best,
    }


def _of_many(folder: ResultsFolder, content: dict[str, Any]) -> dict[str, Any]:
    done = 0
    for path in manifests.runs_below(folder.path):
        with suppress(RunFolderError):  # damaged
            read, _ = manifests.read(path, "run", manifests.RunManifest)
            done += read["status"] == "finished"
    axes = content.get("grid", {}).get("axes", {})
    varied = {*axes, *content.get("search", {}).get("space", {})}
    for variants in axes.values():
        if isinstance(variants, dict):
            varied |= {key for sets in variants.values() for key in sets}
    method = content.get("method", {}).get("name", "")
    cells = folder.manifest.get("cells")
    return {
        "name": folder.manifest["name"],
        "method": "" if varied & {"method", "method.name"} else str(method),
        "done": done,
        "of": len(cells) if cells else content.get("search", {}).get("trials"),
    }
