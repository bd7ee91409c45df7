"""Federations that some clients never joined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matrix import METHODS, model_of, sections

import fedsim
from experiments import FEW as DIGITS
from experiments import LATE, MECHANISMS, by_day, interrupt, small_experiment
from fedsim import Run, run
from fedsim.analysis.contributions.coalitions import Coalitions
from fedsim.analysis.replay import client_models
from fedsim.errors import BadInput
from fedsim.federation import Without, draw_cohort
from fedsim.launch.prepare import prepare
from fedsim.launch.without import common_rounds, experiment_without
from fedsim.results.folder import RunFolder

FEW: dict[str, Any] = {"rounds": 6, "participation": 0.3}
ALL = {"every": 1, "keep": "all"}  # checkpoints
CENTRES = {"name": "kernel_shap", "size": 4, "samples": 20, "baseline": {"clients": 2}}  # sent


def finished(out: Path, **given: Any) -> Run:
    return run(small_experiment(**{"data": DIGITS, **given}), out, progress=False)


def last_asked(done: Run) -> int:
    """The client that is the last to take part for the first time."""
    return int(max(first := first_asked(done), key=first.__getitem__))


def first_asked(done: Run) -> dict[int, int]:
    """The first round in which each client took part."""
    found: dict[int, int] = done.clients.groupby("client")["round"].min().to_dict()
    return found


# By day also those of rules, of tasks in turn, of texts, and whose server has all data.
ALSO = ("openfl_xai", "fedseit", "fedrnl", "centralised", "fedavg")


@pytest.mark.parametrize("method", by_day(METHODS, [*MECHANISMS, *ALSO]))
def test_who_never_took_part_makes_no_difference(tmp_path: Path, method: str) -> None:
    given = sections(method, model_of(method), "none")
    given["train"] = {**given["train"], "participation": 0.3}
    given["evaluate"] = {**given.get("evaluate", {}), "every": 2 if method in LATE else 1}
    done = finished(tmp_path, **given)
    if done.clients.empty:  # centralised: the server takes the data itself
        less = finished(tmp_path, **given, without=[0])
        assert less.result_hash != done.result_hash
        return
    took_part = set(done.clients["client"])
    for k in set(done.client_ids) - took_part:
        for replace in (False, True)[: 2 - (method == "fedbuff")]:
            same = finished(tmp_path, **given, without={"clients": [k], "replace": replace})
            assert same.result_hash == done.result_hash
        break
    k = min(took_part)
    less = finished(tmp_path, **given, without=[k])
    assert k not in set(less.clients.get("client", ()))
    assert less.result_hash != done.result_hash


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedsam", "moon"])
def test_without_all_others_it_is_local_training(tmp_path: Path, method: str) -> None:
    done = finished(tmp_path, method={"name": method}, train={"rounds": 3})
    one = fedsim.without(done, {*range(10)} - {2}, progress=False)
    for t in (1, 2, 3):
        models, again = client_models(one, [2], after=t)
        assert np.array_equal(again.state.weights, models[2].numpy())


def test_it_starts_where_they_first_take_part(tmp_path: Path) -> None:
    done = finished(tmp_path, train=FEW, checkpoint=ALL)
    for first, k in {first: k for k, first in first_asked(done).items()}.items():
        less = fedsim.without(done, int(k), progress=False)
        begun = less.manifest.get("continues", {"round": 0})["round"]
        assert begun == first - 1
        scratch = finished(tmp_path, train=FEW, checkpoint=ALL, without=[int(k)])
        assert less.result_hash == scratch.result_hash
        columns = less.rounds.columns.difference(["seconds"])
        assert less.rounds[columns].equals(scratch.rounds[columns])
    never = next(k for k in range(10) if k not in first_asked(done))
    same = fedsim.without(done, np.int64(never), progress=False)
    assert same.result_hash == done.result_hash
    assert same.manifest["continues"]["round"] == done.last_round


def test_it_is_made_once_and_resumed(tmp_path: Path) -> None:
    done = finished(tmp_path, train=FEW)
    k = next(iter(first_asked(done)))
    with pytest.raises(KeyboardInterrupt):
        fedsim.without(done, k, progress=interrupt(5))
    less = fedsim.without(done, k, progress=False)
    assert less.path == done.path / "without" / str(k)
    before = (less.path / "rounds.parquet").stat().st_mtime_ns
    again = fedsim.without(done, [k], progress=False)
    assert again.path == less.path
    assert (again.path / "rounds.parquet").stat().st_mtime_ns == before
    assert less.result_hash == finished(tmp_path, train=FEW, without=[k]).result_hash
    both = fedsim.without(less, 9 - k, progress=False)
    assert both.experiment.without == Without(clients=(k, 9 - k))
    assert fedsim.load(done.path).status == "finished"  # with runs below it


SECTIONS: dict[str, dict[str, Any]] = {
    "states": {"method": {"name": "scaffold"}},
    "tests": {"evaluate": {"clients": True}, "partition": {"test_fraction": 0.2}},
    "deadline": {"devices": {"speed": {"median": 60, "sigma": 1}, "deadline": 1.0}},
    "over-selection": {"devices": {"over_selection": 2.0, "deadline": 1.0}},
    "privacy": {"privacy": {"clip": 1.0, "noise_multiplier": 0.1}},
    "explained": {"explain": {"of": ["cohort", "global"], "inputs": 2}},
    "reference": {"explain": {"of": ["global"], "inputs": 2, "reference": "centralised"}},
    "baseline": {"explain": {"explainers": [CENTRES], "inputs": 2}},
    "median": {"aggregation": {"name": "median"}, "train": {**FEW, "participation": 0.6}},
    "masks": {"secure_aggregation": {}, "train": {**FEW, "participation": 0.6}},
    "codec": {"uplink": {"name": "topk", "fraction": 0.1}},
    "adversaries": {"adversaries": {"share": 0.3, "attack": {"name": "label_flip"}}},
}
# By day: kept states, who is drawn, what is made of all clients' data, adversaries.
BY_DAY = ("states", "over-selection", "baseline", "masks", "adversaries")


@pytest.mark.parametrize("of", by_day(SECTIONS, BY_DAY))
def test_a_beginning_is_shared_only_where_it_is_the_same(tmp_path: Path, of: str) -> None:
    given = {"train": FEW, "checkpoint": ALL, **SECTIONS[of]}
    done = finished(tmp_path, **given)
    k = last_asked(done)
    less = fedsim.without(done, k, progress=False)
    scratch = finished(tmp_path, **given, without=[k])
    assert less.result_hash == scratch.result_hash
    assert k not in set(less.clients["client"])


@pytest.mark.parametrize("fit", ["federated", "client"])
def test_scales_stay(tmp_path: Path, fit: str) -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(3, 2, (200, 3)), columns=["a", "b", "y"])
    table.to_csv(tmp_path / "table.csv", index=False)
    data = {"name": "table", "path": str(tmp_path / "table.csv"), "target": "y"}
    data |= {"fit": fit, "scale": "standard"}
    given = {"data": data, "train": {**FEW, "optimizer": {"lr": 0.01}}}
    given["partition"] = {"kind": "iid", "clients": 10}
    done = finished(tmp_path, **given)
    never = next(k for k in range(10) if k not in first_asked(done))
    assert fedsim.without(done, never, progress=False).result_hash == done.result_hash
    k = last_asked(done)
    less = fedsim.without(done, k, progress=False)
    assert less.result_hash == finished(tmp_path, **given, without=[k]).result_hash
    assert Coalitions(done)[set(range(10)) - {k}]["result_hash"] == less.result_hash


def test_a_run_that_fills_places_goes_on_doing_so(tmp_path: Path) -> None:
    done = finished(tmp_path, train=FEW, without={"clients": [0], "replace": True})
    assert fedsim.without(done, 1, progress=False).experiment.without == Without(
        clients=(0, 1), replace=True
    )
    with pytest.raises(BadInput, match=r"without.replace=true"):
        fedsim.influence(done, 0, progress=False)
    with pytest.raises(BadInput, match=r"without.replace=true"):
        fedsim.contributions(done, progress=False)


def test_stacks_stay_as_large(tmp_path: Path) -> None:
    """Also where they were measured, which may come out otherwise the next time."""
    done = finished(tmp_path, train=FEW, engine={"clients_per_step": "auto"})
    RunFolder.open(done.path).update(clients_per_step=3)
    less = fedsim.without(fedsim.load(done.path), 1, progress=False)
    assert less.manifest["clients_per_step"] == 3


def test_places_are_filled_by_others() -> None:
    seed, K = 3, 20
    draw = {t: set(draw_cohort(seed, 0.3, K, t).tolist()) for t in range(1, 30)}
    out = (2, 5, 7)
    for t, drawn in draw.items():
        left = draw_cohort(seed, 0.3, K, t, without=Without(clients=out))
        filled = draw_cohort(seed, 0.3, K, t, without=Without(clients=out, replace=True))
        assert set(left.tolist()) == drawn - set(out)
        assert set(left.tolist()) <= set(filled.tolist())
        assert len(filled) == len(drawn)
        assert not set(filled.tolist()) & set(out)
    most = Without(clients=tuple(range(1, K)), replace=True)
    assert draw_cohort(seed, 0.3, K, 1, without=most).tolist() == [0]


def test_common_rounds_of_other_sections_are_none(tmp_path: Path) -> None:
    done = finished(tmp_path, train=FEW)
    never = next(k for k in range(10) if k not in first_asked(done))
    for method, shared in (("fedavg", 6), ("ifca", 0), ("centralised", 0)):
        given = small_experiment(data=DIGITS, train=FEW, method={"name": method})
        experiment = experiment_without(given, never)
        _, splits, spec = prepare(experiment)
        base = finished(tmp_path, train=FEW, method={"name": method})
        assert common_rounds(base, experiment, splits, spec) == shared


@pytest.mark.night
def test_the_same_bits_on_actors(tmp_path: Path, own_ray: None, driver_here: None) -> None:
    hashes = set()
    for engine in ({"kind": "local"}, {"kind": "ray", "actors": 2}):
        done = finished(tmp_path, train=FEW, engine=engine, checkpoint=ALL)
        hashes.add(fedsim.without(done, last_asked(done), progress=False).result_hash)
    assert len(hashes) == 1
