"""Provenance of results: experiments, hashes, versions and hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.results.report.comparison import DASH, ReportData
from fedsim.results.report.page import (
    Column,
    PageTable,
    axis_columns,
    datum,
    number,
)
from fedsim.support.words import duration


def grids(compared: ReportData) -> list[tuple[str, str]]:
    """The files of the grids, by their folders' names."""
    return [(grid.path.name, _experiment(grid.path)) for grid in compared.grids]


def experiments(compared: ReportData) -> list[tuple[str, str]]:
    """The resolved experiment of each cell's first run."""
    return [
        (f"{cell.label}, seed {seed}", _experiment(run.path))
        for cell in compared.cells
        for _, seed, run in cell.runs[:1]
    ]


def provenance(compared: ReportData) -> PageTable:
    """Status, time and hashes of each run."""
    hashes = ("result_hash", "data_hash", "partition_hash", "experiment_hash")
    columns = [
        *axis_columns(compared),
        *(Column("seed", True), Column("status"), Column("time", True)),
        *(Column(name.replace("_", " "), code=True) for name in hashes),
        Column("folder", code=True),
    ]
    rows = []
    given = {entry.given for entry in compared.entries}
    common = f"{given.pop()}/" if len(given) == 1 else ""
    for entry in compared.entries:
        seconds = entry.manifest.get("wall_seconds", np.nan)
        rows.append(
            [
                *(datum(entry.cell[axis]) for axis in compared.axes),
                datum(entry.seed),
                datum(entry.status),
                number(duration(seconds), seconds),
                *(datum(entry.manifest.get(name, DASH)) for name in hashes),
                datum(entry.place.removeprefix(common)),
            ]
        )
    return PageTable("Every run, with its hashes", columns, rows)


def environments(compared: ReportData) -> list[tuple[int, list[tuple[str, str]]]]:
    """Versions and hardware, with how many runs had these."""
    manifests = [entry.manifest for entry in compared.entries if entry.run is not None]
    counts = Counter(
        tuple(_environment(manifest))
        for manifest in manifests or [folder.manifest for folder in compared.searches]
    )
    return [(count, list(facts)) for facts, count in counts.items()]


def _experiment(path: Path) -> str:
    return (path / "experiment.yaml").read_text(encoding="utf-8")


def _environment(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    hardware = manifest.get("hardware", {})
    facts = {
        **manifest.get("packages", {}),
        "python": manifest.get("python"),
        "git revision": manifest.get("git_revision"),
        "processor": hardware.get("machine"),
        "CPUs": hardware.get("cpus"),
        "GPUs": ", ".join(hardware.get("gpus", [])) or "none",
        "client actors": manifest.get("actors"),
        "clients per step": manifest.get("clients_per_step"),
        "device of the server": manifest.get("server_device"),
    }
    return [(name, str(value)) for name, value in facts.items() if value is not None]
