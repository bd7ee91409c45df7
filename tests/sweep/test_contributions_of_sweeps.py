"""What clients contribute, as columns of grids and objectives of searches."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

import fedsim
from experiments import NETWORK_METHODS, by_day, ran, small_experiment, with_method
from fedsim import Contributions, Grid, Run
from fedsim.analysis.contributions.settings import ContributionSettings
from fedsim.analysis.replay import replay
from fedsim.data import load_dataset
from fedsim.errors import BadInput, FedsimError
from fedsim.launch.prepare import prepare
from fedsim.results.folder import GridFolder, RunFolder
from fedsim.results.summary import on_record

FEW: dict[str, Any] = {
    "data": {"name": "digits", "subset": 0.2},
    "partition": {"kind": "dirichlet", "clients": 5, "alpha": 1.0},
    "train": {"rounds": 2},
}
BAD = {"adversaries": {"share": 0.2, "attack": {"name": "label_flip"}}}
WAYS = ["gtg_shapley", "cosine", "leave_one_out"]


def content(kind: str, section: Any, **sections: Any) -> dict[str, Any]:
    whole = small_experiment(**{**FEW, **sections}).model_dump(mode="json")
    return {**whole, kind: section}


def asking(out: Path, asked: Any, progress: Any = False, **sections: Any) -> Grid:
    """A grid of one axis that asks for contributions."""
    section = {"axes": {"train.local_epochs": [1, 2]}, "contributions": asked}
    return fedsim.grid(content("grid", section, **sections), out=out, progress=progress)


def found(run: Run, how: str) -> dict[str, float]:
    """The columns of one way, as asked of the run itself."""
    own = fedsim.contributions(run, how=how, progress=False).summary
    return {f"contributions/{how}/{figure}": value for figure, value in own.items()}


class TestOnRay:
    @pytest.fixture(scope="class")
    @staticmethod
    def grid(tmp_path_factory: pytest.TempPathFactory, own_ray: None) -> Grid:
        lines = list[str]()
        grid = asking(tmp_path_factory.mktemp("grid"), {"how": WAYS}, lines.append, **BAD)
        assert not [line for line in lines if line.startswith("warning")]
        return grid

    def test_a_grid_has_them_in_its_tables(self, grid: Grid, tmp_path: Path) -> None:
        for epochs, run in zip((1, 2), grid.runs, strict=True):
            train = {"rounds": 2, "local_epochs": epochs}
            alone = fedsim.run(
                small_experiment(**{**FEW, **BAD, "train": train}), tmp_path, progress=False
            )
            assert run.result_hash == alone.result_hash
            assert len(run.contributions) == 5 * len(WAYS)
            expected = {k: v for how in WAYS for k, v in found(alone, how).items()}
            last = run.rounds.iloc[-1]
            assert {name: last[name] for name in expected} == expected
            assert run.rounds[[*expected]].iloc[:-1].isna().all(axis=None)
            cell = grid.cells.iloc[epochs - 1]
            assert {name: cell[f"{name}/last"] for name in expected} == expected
            replay(run, 0).next_round()
            compared = fedsim.compare(run, alone).results
            assert compared["differs_from_round"].isna().all()
            assert found(run, "cosine") == found(alone, "cosine")
            less = fedsim.without(run, 0, progress=False)
            assert not less.rounds.filter(like="contributions/").columns.size
        assert "contributions/cosine/auc/last_mean" in grid.summary
        assert "contributions/cosine/auc" in grid.rounds
        best = {column: metric.best for column, metric in on_record(grid.runs[0]).items()}
        assert best["contributions/cosine/spread"] == "min"
        assert best["contributions/cosine/lowest"] == best["contributions/cosine/auc"] == "max"

    def test_resumed_it_asks_again(self, grid: Grid) -> None:
        """A process that is lost between the last round and the answer leaves a finished run."""
        first, second = grid.runs
        before = first.manifest["contributions"]
        folder = RunFolder.open(first.path)
        folder.manifest.pop("contributions")
        folder.update()
        GridFolder.open(grid.path).update(status="interrupted")
        made = (second.path / "manifest.json").stat().st_mtime_ns
        again = fedsim.resume(grid.path, progress=False)
        assert isinstance(again, Grid)
        assert again.runs[0].manifest["contributions"] == before
        assert (second.path / "manifest.json").stat().st_mtime_ns == made
        assert again.status == "finished"
        assert again.summary.equals(grid.summary)

    def test_what_cannot_be_answered_fails(self, tmp_path: Path, own_ray: None) -> None:
        grid = asking(tmp_path, {"how": "leave_one_out", "score": "of_the_method"})
        assert grid.status == "failed"
        assert set(grid.cells["status"]) == {"failed"}
        for error in grid.cells["error"]:
            assert error.startswith("contributions: score=of_the_method: the run's rounds have no")

    def test_a_search_takes_them_as_objectives(self, tmp_path: Path, own_ray: None) -> None:
        section = {
            "space": {"train.optimizer.lr": [0.05, 0.2]},
            "objectives": {"contributions/gtg_shapley/lowest": "max", "accuracy": "max"},
            "contributions": {"how": "gtg_shapley"},
            "trials": 3,
            "sampler": "random",
        }
        lines = list[str]()
        search = fedsim.tune(content("search", section), out=tmp_path, progress=lines.append)
        warned = [line for line in lines if line.startswith("warning")]
        assert "as search.contributions.score a column that begins with validation_" in warned[1]
        assert search.status == "finished"
        for row in search.trials.to_dict("records"):
            run = fedsim.load(search.path / row["folder"])
            assert (
                row["contributions/gtg_shapley/lowest"]
                == found(run, "gtg_shapley")["contributions/gtg_shapley/lowest"]
            )
        assert len(search.pareto) >= 1

    @pytest.mark.night  # by day for single runs, in analysis/test_contributions.py
    def test_the_same_bits_on_any_number_of_actors(self, tmp_path: Path, own_ray: None) -> None:
        tables = []
        for engine in ({"kind": "local"}, {"kind": "ray", "actors": 2}):
            asked = {"how": ["shapley", "multi_rounds"], "score": "loss"}
            grid = asking(tmp_path, asked, engine=engine, partition={"kind": "iid", "clients": 3})
            tables.append(grid.cells.filter(like="contributions/"))
        assert tables[0].shape == (2, 12)
        assert tables[0].equals(tables[1])


# -- before the start ----------------------------------------------------------------------------

VALID = {"evaluate": {"validation": 0.2}}
LATER = {"fedbuff", "fedfed", "fedxds"}  # need other settings than these, or begin otherwise

OF_METHODS = {
    name: with_method(name, **{**FEW, "train": {"rounds": 3}})
    for name in NETWORK_METHODS
    if name not in LATER
}
# Sections that change updates, or what is known of them.
OF_SECTIONS: dict[str, dict[str, Any]] = {
    "uplink": {"uplink": {"name": "int8"}},
    "downlink": {"downlink": {"name": "int8"}},
    "median": {"aggregation": {"name": "median"}},
    "forged": {"adversaries": {"share": 0.2, "attack": {"name": "sign_flip"}}},
    "poisoned": BAD,
    "private": {"privacy": {"clip": 1.0, "noise_multiplier": 0.1}},
    "of examples": {"privacy": {"level": "example", "clip": 1.0, "noise_multiplier": 0.1}},
    "masked": {"secure_aggregation": {}},
    "late": {"devices": {"speed": {"median": 60, "sigma": 1}, "deadline": 1.0}},
    "explained": {"explain": {"of": ["cohort", "global"], "inputs": 2}},
}
CASES = {**OF_METHODS, **{name: {**FEW, **given} for name, given in OF_SECTIONS.items()}}
# By day methods of unlike steps, kept states, messages, and no global model.
BY_DAY = {*OF_SECTIONS, "fednova", "scaffold", "fedaux", "ifca"}


@pytest.mark.parametrize("case", by_day(CASES, BY_DAY))
@pytest.mark.filterwarnings("ignore")
def test_what_is_refused_before_is_what_would_be_refused_after(tmp_path: Path, case: str) -> None:
    experiment = small_experiment(**CASES[case])
    loaded = load_dataset(experiment.data)

    def before() -> None:
        prepared = prepare(experiment, loaded)
        ContributionSettings(how=("cosine",)).check(experiment, prepared, loaded)

    done = fedsim.run(experiment, tmp_path, progress=False)
    refused = []
    after = partial(fedsim.contributions, done, how="cosine", progress=False)
    for ask, refusal in ((before, BadInput), (after, FedsimError)):
        try:
            ask()
        except refusal as error:
            refused.append(error)
    assert len(refused) in (0, 2), refused


@pytest.mark.parametrize("left_out", ["the adversary", "all others", "nobody"])
def test_no_auc_without_adversaries_and_others(tmp_path: Path, left_out: str) -> None:
    prepared = prepare(small_experiment(**{**FEW, **BAD}))
    (bad,) = prepared[1].adversaries
    who = {"the adversary": [bad], "all others": [*({*range(5)} - {bad})], "nobody": []}[left_out]
    sections = {**BAD, **({"without": {"clients": who}} if who else {})}
    asked = {
        "space": {"train.optimizer.lr": [0.1, 0.2]},
        "contributions": {"how": "leave_one_out"},
        "objectives": {"contributions/leave_one_out/auc": "max"},
    }
    if who:
        with pytest.raises(BadInput, match="leave_one_out/auc: is not recorded"):
            fedsim.tune(content("search", asked, **sections), out=tmp_path, progress=False)
    experiment = small_experiment(**{**FEW, **sections})
    run = fedsim.run(experiment, tmp_path, progress=False)
    columns = ContributionSettings(how=("leave_one_out",)).columns(experiment, prepare(experiment))
    assert set(columns) == found(run, "leave_one_out").keys()


def test_a_budget_counts_who_is_ever_drawn(tmp_path: Path) -> None:
    """With few rounds of few clients, fewer coalitions differ than there are."""
    experiment = small_experiment(**{**FEW, "train": {"rounds": 1, "participation": 0.4}})
    loaded = load_dataset(experiment.data)
    prepared = prepare(experiment, loaded)
    ContributionSettings(how=("shapley",), budget=4).check(experiment, prepared, loaded)
    with pytest.raises(BadInput, match="how=shapley: 4 federations of some of the 2 clients"):
        ContributionSettings(how=("shapley",), budget=3).check(experiment, prepared, loaded)


def test_a_validation_set_is_asked_about(tmp_path: Path) -> None:
    experiment = small_experiment(**{**FEW, **VALID})
    loaded = load_dataset(experiment.data)
    for how in ("leave_one_out", "gtg_shapley"):
        asked = ContributionSettings(how=(how,), score="validation_accuracy")
        asked.check(experiment, prepare(experiment, loaded), loaded)
        assert not asked.judges([f"contributions/{how}/lowest"], {"accuracy"})
        assert ContributionSettings(how=(how,)).judges(
            [f"contributions/{how}/lowest"], {"accuracy"}
        )
    columns = ["contributions/leave_one_out/lowest", "contributions/gtg_shapley/lowest"]
    assert not ContributionSettings(how=("cosine",)).judges(columns, {"accuracy"})


# -- what they come to ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "score", "sign"),
    [
        ("shapley", "accuracy", 1),
        ("shapley", "loss", -1),
        ("gtg_shapley", "validation_loss", -1),
        ("cosine", "loss", 1),
        ("leave_one_out", "bytes_up", 1),
    ],
)
def test_the_summary_by_hand(how: str, score: str, sign: int) -> None:
    run = fedsim.load(ran(**FEW, **BAD, **VALID).path)
    values = np.array([0.5, -0.25, 0.125, 0.0, 0.25])
    table = pd.DataFrame({"client": range(5), "value": values})
    own = Contributions(run, how, score, table, math.nan, math.nan, 1).summary
    bad = np.isin(range(5), run.manifest["adversaries"])
    assert own["lowest"] == (sign * values).min()
    assert own["spread"] == pytest.approx(np.sqrt(np.mean((values - values.mean()) ** 2)))
    assert own["auc"] == pytest.approx(roc_auc_score(bad, -sign * values))
    run.manifest.pop("adversaries")
    without = Contributions(run, how, score, table, math.nan, math.nan, 1).summary
    assert without == {"lowest": own["lowest"], "spread": own["spread"]}
