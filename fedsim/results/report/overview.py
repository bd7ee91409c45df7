"""What was run."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from fedsim.results.report.comparison import Comparison
from fedsim.results.report.page import distinct, duration, listed


def lead(compared: Comparison) -> str:
    """What was run, in a sentence."""
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


def overview(compared: Comparison) -> list[tuple[str, str]]:
    """What was run, as names and values."""
    keys = {
        "Method": "method",
        "Data": "data",
        "Partition": "partition",
        "Model": "model",
        "Participation": "train.participation",
        "Rounds": "train.rounds",
        "Local epochs": "train.local_epochs",
        "Batch size": "train.batch_size",
        "Optimiser": "train.optimizer",
        "Learning rate": "train.optimizer.lr",
    }
    for axis in compared.axes:
        if axis not in ("name", "folder") and axis.removesuffix(".name") not in keys.values():
            keys[axis] = axis
    found = {name: _settings(compared, key) for name, key in keys.items()}
    found["Clients"] = _facts(compared, "clients")
    found["Seeds"] = sorted({entry.seed for entry in compared.entries})
    finished = sum(entry.finished for entry in compared.entries)
    found["Runs"] = [f"{finished} of {len(compared.entries)} finished"]
    started = sorted(map(datetime.fromisoformat, _facts(compared, "created")))
    found["Started"] = [f"{at:%Y-%m-%d %H:%M} {at.tzname() or ''}" for at in started[:1]]
    seconds = [entry.manifest.get("wall_seconds", 0) for entry in compared.entries]
    found["Time"] = [duration(sum(seconds)) + (", all runs together" if len(seconds) > 1 else "")]
    return [(name, listed(values)) for name, values in found.items() if values]


def _settings(compared: Comparison, key: str) -> list[Any]:
    return distinct(e.settings[key] for e in compared.entries if key in e.settings)


def _facts(compared: Comparison, key: str) -> list[Any]:
    return distinct(e.manifest[key] for e in compared.entries if key in e.manifest)
