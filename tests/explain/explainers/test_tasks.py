"""`fedsim explain` of clients that learn tasks in turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments import Say, small_experiment
from fedsim import Run, run
from fedsim.analysis.replay import explain_run
from fedsim.explain.explainers.tasks import TasksExplainer, transfer_table
from fedsim.objectives.continual import continual

pytestmark = pytest.mark.filterwarnings("ignore:.*words get random vectors")

TASKS = [[["a", "b"], ["c", "d"]], [["b", "c"], ["a", "d"]], [["c", "d"], ["a", "b"]]]


def test_attention_by_who_learns_and_from_whom() -> None:
    rows = pd.DataFrame(
        {
            "client": [0, 0, 10],
            "task": [1, 1, 1],
            "from_client": [2, 10, 2],
            "from_task": [0, 0, 0],
            "attention": [0.5, 0.25, 1.0],
        }
    )
    receivers, sources, table = transfer_table(rows)
    assert (receivers, sources) == (["0/1", "10/1"], ["2/0", "10/0"])
    np.testing.assert_array_equal(table, [[0.5, 0.25], [1.0, math.nan]])


@pytest.fixture
def transferred(tmp_path: Path) -> Run:
    documents = tmp_path / "documents.txt"
    words = {"a": "one two three", "b": "four five six", "c": "one two four", "d": "three six"}
    lines = [f"{label}\t{text} {k % 7}" for label, text in words.items() for k in range(24)]
    documents.write_text("\n".join(lines))
    made = small_experiment(
        data={"name": "text", "path": str(documents), "dimension": 5},
        partition={"kind": "own_tasks", "tasks": TASKS},
        model={"name": "text_cnn", "kernels": [1, 2], "filters": 2, "hidden": 3},
        method={"name": "fedseit", "top_k": 2},
        train={"rounds": 2, "optimizer": {"name": "adam", "lr": 0.01}},
    )
    return run(made, tmp_path / "runs")


def test_the_command_says_who_learns_from_whom(transferred: Run, say: Say) -> None:
    code, said, _ = say("explain", str(transferred.path))
    assert code == 0
    measures = continual(transferred.tasks)
    assert f"accuracy over all tasks of all clients: {measures.tta:.4f}" in said
    assert "forward transfer" not in said  # of which nothing is known
    (first, *_) = transferred.explanations.to_dict("records")
    assert f"{first['client']}/{first['task']}" in said
    assert f"{first['attention']:.4f}" in said
    for name in ("tasks", "transfer"):
        picture = transferred.path / "explanations" / f"{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_transfer_there_are_curves_alone(finish: Callable[..., Run], say: Say) -> None:
    done = finish(
        partition={"kind": "own_tasks", "tasks": [[["0", "1"], ["2", "3"]]]},
        train={"rounds": 2},
    )
    code, said, _ = say("explain", str(done.path))
    assert code == 0
    assert "forward transfer" in said
    assert [p.name for p in (done.path / "explanations").iterdir()] == ["tasks.png"]
    rows = explain_run(done, TasksExplainer()).rows()
    assert [(row["client"], row["task"]) for row in rows] == [(0, 0), (0, 1)]
    code, text, _ = say("explain", str(done.path), "--client", "0", "--row", "4")
    assert code == 0
    title = "client 0's model after round 2, for its task 1 (2, 3), integrated_gradients:"
    assert text.startswith(f"{title}\n(baseline: zero in every pixel)\n\nrow 4: ")
    code, _, complaint = say("explain", str(done.path), "--client", "0", "--text", "lovely")
    assert code == 2
    assert "the data are not documents, so the model cannot read texts" in complaint
