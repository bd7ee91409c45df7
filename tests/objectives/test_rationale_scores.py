"""Scores of rationales, and the loss that brings them about, wherever models are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix import TASKS

from experiments import CHOOSER, REVIEWS, server_states, small_experiment
from fedsim import run

CHOICES: dict[str, Any] = {
    **{**REVIEWS, "model": CHOOSER},
    "train": {"rounds": 2, "optimizer": {"lr": 0.02}},
}
COLUMNS = {"loss", "accuracy", "balanced_accuracy", "chosen", "comprehensiveness", "sufficiency"}
MARKED = {"rationale_precision", "rationale_recall", "rationale_f1", "chance_f1"}


def test_local_models_have_them(tmp_path: Path) -> None:
    done = run(small_experiment(**CHOICES, method={"name": "local"}), tmp_path)
    assert set(done.rounds) >= COLUMNS | MARKED
    aspects = {name.partition("/")[2] for name in done.rounds if name.startswith("rationale_f1/")}
    assert len(aspects) > 1


def test_clients_own_tests_have_them(tmp_path: Path) -> None:
    partition = {"kind": "iid", "clients": 4, "test_fraction": 0.3}
    made = small_experiment(**{**CHOICES, "partition": partition}, evaluate={"clients": True})
    clients = run(made, tmp_path).clients
    assert {f"test_{name}" for name in COLUMNS} <= set(clients)
    assert clients["test_chosen"].between(0, 1.5).all()


@pytest.mark.filterwarnings("ignore:.*words get random vectors")
def test_tasks_in_turn_have_them(tmp_path: Path) -> None:
    made = {**TASKS, "model": CHOOSER, "train": {"rounds": 2}}
    for method in ("fedavg", "local"):
        done = run(small_experiment(**made, method={"name": method}), tmp_path)
        assert set(done.tasks) >= COLUMNS
        assert set(done.rounds) >= COLUMNS
        last = done.tasks[(done.tasks["round"] == 2) & done.tasks["seen"]]
        for name in COLUMNS:
            assert done.rounds[name].iloc[-1] == pytest.approx(last[name].mean())


@pytest.mark.night
def test_fedgen_minimises_sparsity_and_continuity_as_well() -> None:
    """Without its own two terms it is FedAvg, whatever the model's loss."""
    partition = {"kind": "iid", "clients": 3}
    sections = {**CHOICES, "partition": partition}
    plain = server_states(small_experiment(**sections))
    generator = {"name": "fedgen", "a": 0.0, "b": 0.0, "generator_steps": 1}
    without = server_states(small_experiment(**sections, method=generator))
    moved = [float(np.abs(state.weights - plain[0].weights).max()) for state in plain]
    for one, other, step in zip(plain[1:], without[1:], moved[1:], strict=True):
        assert np.abs(one.weights - other.weights).max() < 1e-3 * step
