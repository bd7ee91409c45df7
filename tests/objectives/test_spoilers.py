"""Code of a user's own cannot change what other code is given."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments import Finish, Say
from fedsim.errors import FedsimError

READ_ONLY = r"ValueError: .*read-only \(own_spoilers.py, line \d+\)"


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_metric_that_writes_through_torch(finish: Finish) -> None:
    """Torch does not know of read-only arrays; the copy is the metric's own."""
    metrics = ["own_spoilers:through_torch", "own_spoilers:right", "macro_f1"]
    rounds = finish(evaluate={"metrics": metrics}).rounds
    np.testing.assert_array_equal(rounds["right"], rounds["accuracy"])
    assert rounds["macro_f1"].iloc[-1] > 0.1


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        *(
            ({"evaluate": {"metrics": [f"own_spoilers:{name}"]}}, f"^metric own_spoilers:{name}: ")
            for name in ("writes_outputs", "writes_targets", "sorts")
        ),
        (
            {
                "objective": {"name": "own_spoilers:WritesTotals"},
                "evaluate": {"metrics": ["macro_f1"]},
            },
            READ_ONLY,
        ),
        (
            {"objective": {"name": "own_spoilers:WritesBatch"}},
            r"totals changes its batch in place; copy it first: y = batch\.y\.clone\(\)",
        ),
        (
            {"explain": {"explainers": ["own_spoilers:WritesData"], "every": 1}},
            rf"explainer own_spoilers:WritesData, .*: {READ_ONLY}",
        ),
        ({"partition": {"kind": "own_spoilers:WritesLabels"}}, READ_ONLY),
        (
            {"model": {"name": "own_spoilers:InPlace"}},
            r"model\.name=own_spoilers:InPlace changes its inputs in place, .* copy them first",
        ),
    ],
)
def test_other_code_that_writes(finish: Finish, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(FedsimError, match=message) as caught:
        finish(**sections)
    assert "\n" not in str(caught.value)
    assert "metrics" not in str(sections) or re.search(READ_ONLY, str(caught.value))


def test_an_explainer_that_writes_into_inputs(finish: Finish) -> None:
    """They are its own copies."""
    others = ["own_relevances:Slopes"]
    found, accuracies = [], []
    for spoilers in ([], ["own_spoilers:WritesInputs"]):
        done = finish(
            data={"name": "synthetic", "samples": 200},
            train={"rounds": 2},
            explain={
                "explainers": [*spoilers, *others],
                "scores": ["sparseness", "repeatability"],
            },
        )
        rows = done.explanations
        found.append(rows[rows["explainer"] == others[0]].filter(regex="^(?!seconds)"))
        accuracies.append(done.rounds["accuracy"].tolist())
    assert len(found[0])
    pd.testing.assert_frame_equal(*(rows.reset_index(drop=True) for rows in found))
    assert accuracies[0] == accuracies[1]


def test_an_explainer_of_a_finished_run(finish: Finish, say: Say) -> None:
    run = finish(train={"rounds": 1})
    code, _, complaints = say("explain", str(run.path), "--explainer", "own_spoilers:WritesData")
    assert code == 1
    assert "error: explainer own_spoilers:WritesData: ValueError: " in complaints
    assert complaints.count("\n") < 4
