"""Overview of the runs of a report, and their provenance."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.results.figures.charts import draw_label_counts
from fedsim.results.figures.look import Drawing
from fedsim.results.report.axes import key_label
from fedsim.results.report.comparison import DASH, ComparedCell, ReportData, label
from fedsim.results.report.curves import Plot
from fedsim.results.report.entries import Entry
from fedsim.results.report.page import (
    Column,
    Datum,
    PageTable,
    datum,
    distinct,
    entry_columns,
    listed,
    number,
)
from fedsim.results.summary import budgets
from fedsim.support.words import duration

_PARTITIONS = 6  # that are drawn
_CLIENTS = 60  # of which labels are drawn
_LABELS = 100  # that are drawn


def lead(compared: ReportData) -> str:
    if not any(entry.run for entry in compared.entries):
        return ""
    seeds = len({entry.seed for entry in compared.entries})
    rounds = listed(_settings(compared, "train.rounds"))
    return (
        f"{listed(_settings(compared, 'method'))} on {listed(_settings(compared, 'data'))}: "
        f"{listed(_facts(compared, 'clients'))} clients, "
        f"{rounds} round{'s' * (rounds != '1')}, "
        f"{seeds} seed{'s' * (seeds > 1)}."
    )


def overview(compared: ReportData) -> list[tuple[str, str]]:
    keys = {
        "Method": "method",
        "Data": "data",
        "Partition": "partition",
        "Model": "model",
        "Participation": "train.participation",
        "Rounds": "train.rounds",
        "Local epochs": "train.local_epochs",
        "Local steps": "train.local_steps",
        "Batch size": "train.batch_size",
        "Optimiser": "train.optimizer",
        "Learning rate": "train.optimizer.lr",
    }
    for axis in compared.axes:
        if axis not in ("name", "folder") and axis.removesuffix(".name") not in keys.values():
            called = compared.labels[axis]
            keys[axis if called == axis else f"{called} ({axis})"] = axis
    found = {name: _settings(compared, key) for name, key in keys.items()}
    found["Parameters"] = _parameters(compared)
    found["Clients"] = _facts(compared, "clients")
    for cell in compared.cells:
        for _, _, run in cell.runs:
            for name, words in budgets(run).items():
                known = found.setdefault(name.capitalize(), [])
                known += [words] * (words not in known)
    found["Seeds"] = sorted({entry.seed for entry in compared.entries})
    finished = sum(entry.finished for entry in compared.entries)
    found["Runs"] = [f"{finished} of {len(compared.entries)} finished"]
    started = sorted(map(datetime.fromisoformat, _facts(compared, "created")))
    found["Started"] = [f"{at:%Y-%m-%d %H:%M} {at.tzname() or ''}" for at in started[:1]]
    seconds = [entry.manifest.get("wall_seconds", 0) for entry in compared.entries]
    found["Time"] = [duration(sum(seconds)) + (", all runs together" if len(seconds) > 1 else "")]
    return [(name, listed(values)) for name, values in found.items() if values]


def _parameters(compared: ReportData) -> list[str]:
    counts: dict[Any, dict[str, None]] = {}  # by model, each once
    for cell in compared.cells:
        for entry in cell.entries:
            count = entry.run.num_parameters if entry.run is not None else None
            if count is not None:
                counts.setdefault(entry.settings.get("model"), {})[f"{count:,}"] = None
                break
    if len(counts) == 1:
        return [*next(iter(counts.values()))]
    return [f"{model}: {' or '.join(of_model)}" for model, of_model in counts.items()]


def hyper_parameters(compared: ReportData) -> PageTable:
    """The methods with their hyper-parameters; no rows if they have none."""
    by_method: dict[Any, list[Entry]] = {}
    for entry in compared.entries:
        if entry.run is not None:
            method = entry.cell.get("method", entry.settings.get("method"))
            by_method.setdefault(method, []).append(entry)
    rows = []
    for method, entries in by_method.items():
        keys = distinct(key for e in entries for key in e.settings if key.startswith("method."))
        words = []
        for key in keys:
            values = [v for e in entries if (v := e.settings.get(key, "null")) != "null"]
            called = key_label(key, entries)
            name = key.removeprefix("method.")
            shown = name if called in (name, name.rpartition(".")[2]) else f"{called} ({name})"
            if values:
                words.append(f"{shown} = {listed(distinct(values))}")
        if words:
            rows.append([datum(method), Datum("; ".join(words), None)])
    columns = [Column("method"), Column("hyper-parameters", prose=True)]
    return PageTable("Hyper-parameters of the methods", columns, rows)


def label_counts(compared: ReportData) -> list[Plot]:
    """Who holds which labels: a panel for each data and partition, by its first seed."""
    varied = [a for a in compared.axes if a.partition(".")[0] in ("data", "partition")]
    first: dict[str, tuple[ComparedCell, Entry]] = {}
    for cell in compared.cells:
        for entry in cell.entries[:1]:
            if entry.run is not None and len(entry.run.labels):
                hashes = [entry.manifest.get(f"{what}_hash") for what in ("partition", "data")]
                first.setdefault(str(hashes), (cell, entry))
    panels = []
    for cell, entry in list(first.values())[:_PARTITIONS]:
        assert entry.run is not None
        rows = entry.run.labels
        names = [str(name) for name in rows["label"].cat.categories]
        clients: int = entry.manifest["clients"]
        shown = rows[rows["client"] < min(clients, _CLIENTS)]
        table = np.zeros((min(clients, _CLIENTS), len(names)), dtype=np.int64)
        table[shown["client"], shown["label"].cat.codes] = shown["examples"]
        sizes = rows.groupby("client")["examples"].sum()
        words = label({axis: cell.values[axis] for axis in varied}, compared.labels)
        about = (
            f"{len(rows) / clients:.1f} of {len(names)} labels a client, "
            f"{sizes.min() if len(sizes) == clients else 0:,} to {sizes.max():,} examples"
        )
        some = f"the first {_CLIENTS} of {clients:,} clients" if clients > _CLIENTS else ""
        panel = "; ".join(filter(None, [words, about, some]))
        names = names[:_LABELS]
        draw = partial(
            draw_label_counts,
            counts=table[:, :_LABELS],
            names=names,
            axis=entry.run.label_axis,
            clients=entry.manifest.get("client_names", ()),
            heading=words or "Labels of the clients",
        )
        height = 84 + min(16.0 * max(len(names), 4), 320)
        panels.append((panel, Drawing(f"Who holds which labels: {panel}", height, draw)))
    heading = "Labels of the clients"
    if len(panels) == 1:  # which has no caption of its own
        heading, panels = f"{heading}: {panels[0][0]}", [("", panels[0][1])]
    return [Plot(heading, panels)] if panels else []


def experiments(compared: ReportData) -> list[tuple[str, str]]:
    return [
        (f"{cell.label}, seed {seed}", experiment(run.path))
        for cell in compared.cells
        for _, seed, run in cell.runs[:1]
    ]


def provenance(compared: ReportData) -> PageTable:
    entries = compared.entries
    columns = entry_columns(compared, entries)
    seconds = [entry.manifest.get("wall_seconds", np.nan) for entry in entries]
    columns.append((Column("time", True), [number(duration(s), s) for s in seconds]))
    for name in ("result_hash", "data_hash", "partition_hash", "experiment_hash"):
        data = [datum(entry.manifest.get(name, DASH)) for entry in entries]
        columns.append((Column(name.replace("_", " "), code=True), data))
    given = {entry.given for entry in entries}
    common = f"{given.pop()}/" if len(given) == 1 else ""
    places = [datum(entry.place.removeprefix(common)) for entry in entries]
    columns.append((Column("folder", code=True), places))
    return PageTable.of("Every run, with its hashes", columns)


def environments(compared: ReportData) -> list[tuple[int, list[tuple[str, str]]]]:
    """Versions and hardware, with how many runs had these."""
    manifests = [entry.manifest for entry in compared.entries if entry.run is not None]
    counts: Counter[tuple[tuple[str, str], ...]] = Counter()
    for manifest in manifests or [folder.manifest for folder in compared.searches]:
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
        counts[tuple((name, str(v)) for name, v in facts.items() if v is not None)] += 1
    return [(count, list(of)) for of, count in counts.items()]


def experiment(path: Path) -> str:
    return (path / "experiment.yaml").read_text(encoding="utf-8")


def _settings(compared: ReportData, key: str) -> list[Any]:
    return distinct(e.settings[key] for e in compared.entries if key in e.settings)


def _facts(compared: ReportData, key: str) -> list[Any]:
    return distinct(e.manifest[key] for e in compared.entries if key in e.manifest)
