"""`fedsim explain` of clients that learn tasks in turn."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from matrix import MODELS

from experiments import Say, ran
from fedsim import Run
from fedsim.analysis.replay import explain_run
from fedsim.explain.explainers.tasks import TasksExplainer, transfer_table
from fedsim.objectives.continual import continual

pytestmark = pytest.mark.filterwarnings("ignore:.*words get random vectors")


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
def transferred() -> Run:
    train = {"rounds": 2, "optimizer": {"name": "adam", "lr": 0.01}}
    return ran(**{**MODELS["tasks"], "method": {"name": "fedseit", "top_k": 2}, "train": train})


def test_the_command_says_who_learns_from_whom(transferred: Run, say: Say) -> None:
    said = say.printed("explain", str(transferred.path))
    measures = continual(transferred.tasks)
    assert f"accuracy over all tasks of all clients: {measures.tta:.4f}" in said
    assert "forward transfer" not in said  # of which nothing is known
    (first, *_) = transferred.explanations.to_dict("records")
    assert f"{first['client']}/{first['task']}" in said
    assert f"{first['attention']:.4f}" in said
    for name in ("tasks", "transfer"):
        picture = transferred.path / "explanations" / f"{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_transfer_there_are_curves_alone(say: Say) -> None:
    done = ran(
        partition={"kind": "own_tasks", "tasks": [[["0", "1"], ["2", "3"]]]},
        train={"rounds": 2},
    )
    said = say.printed("explain", str(done.path))
    assert "forward transfer" in said
    assert [p.name for p in (done.path / "explanations").iterdir()] == ["tasks.png"]
    rows = explain_run(done, TasksExplainer()).rows()
    assert [(row["client"], row["task"]) for row in rows] == [(0, 0), (0, 1)]
    text = say.printed("explain", str(done.path), "--client", "0", "--row", "4")
    title = "client 0's model after round 2, for its task 1 (2, 3), integrated_gradients:"
    assert text.startswith(f"{title}\n(baseline: zero in every pixel)\n\nrow 4: ")
    complaint = say.refused("explain", str(done.path), "--client", "0", "--text", "lovely")
    assert "the data are not documents, so the model cannot read texts" in complaint
