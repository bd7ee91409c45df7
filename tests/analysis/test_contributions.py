"""Outcomes of coalitions of clients, and what each client contributes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedsim
from experiments import small_experiment
from fedsim import Run, run
from fedsim.analysis.contributions import shapley as exact
from fedsim.analysis.contributions.coalitions import Coalitions
from fedsim.errors import BadInput, RunError

FEW: dict[str, Any] = {
    "train": {"rounds": 4, "participation": 0.5},
    "partition": {"kind": "iid", "clients": 4},
    "data": {"name": "digits", "subset": 0.2},
}


def finished(out: Path, **given: Any) -> Run:
    return run(small_experiment(**{**FEW, **given}), out, progress=False)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(tmp_path_factory.mktemp("runs"))


def subsets(clients: Iterable[int]) -> list[frozenset[int]]:
    return list(exact.subsets(sorted(clients)))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"method": {"name": "scaffold"}},
        {"method": {"name": "ditto"}},
        {"method": {"name": "afl"}, "train": {"rounds": 3, "participation": 0.5}},
        {"method": {"name": "fedxds", "warmup_rounds": 1}, "train": {"rounds": 3}},
        {"method": {"name": "centralised"}},
        {"evaluate": {"every": 3}, "train": {"rounds": 5, "participation": 0.25}},
        {"evaluate": {"validation": 0.1, "early_stopping": {"patience": 1}}},
        {"uplink": {"name": "topk", "fraction": 0.1}},
        {"devices": {"speed": {"median": 60, "sigma": 1}, "deadline": 1.0}},
        {"explain": {"of": ["global"], "inputs": 2}, "train": {"rounds": 2}},
        {"model": {"name": "cnn"}, "engine": {"clients_per_step": 2}, "train": {"rounds": 2}},
    ],
    ids=lambda given: "-".join(f"{key}" for key in given) or "plain",
)
def test_an_outcome_is_that_of_a_run_without_the_others(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    whole = finished(tmp_path, **sections)
    of = Coalitions(whole)
    some = [{1}, {0, 1}, {0, 3}, {1, 2, 3}, {2, 3}, {0, 1, 2}]
    of.compute(some)
    for own in some:
        others = [k for k in range(4) if k not in own]
        alone = finished(tmp_path, **sections, without=others)
        assert of[own]["result_hash"] == alone.result_hash
        numbers = alone.rounds.select_dtypes("number")
        last = numbers.iloc[-1].drop(["seconds", "explain_seconds"], errors="ignore").dropna()
        assert {name: of[own][name] for name in last.index} == last.to_dict()
    assert of[range(4)]["result_hash"] == whole.result_hash


def test_shapley_values_by_hand(done: Run) -> None:
    found = fedsim.contributions(done, progress=False)
    of = Coalitions(done)
    value = {own: of[own]["accuracy"] for own in subsets(range(4))}
    for k in range(4):
        marginal = []
        for order in itertools.permutations(range(4)):
            before = frozenset(order[: order.index(k)])
            marginal.append(value[before | {k}] - value[before])
        assert found.values[k] == pytest.approx(np.mean(marginal), abs=1e-12)
    total = math.fsum(found.values.values())
    assert abs(total - (found.everybody - found.nobody)) < 1e-12
    assert found.everybody == done.rounds["accuracy"].iloc[-1]
    assert found.coalitions == 2 ** len(of.active)
    left = fedsim.contributions(done, how="leave_one_out", progress=False)
    for k in range(4):
        others = frozenset(range(4)) - {k}
        assert left.values[k] == value[frozenset(range(4))] - value[others]
    kept = pd.read_parquet(done.path / "contributions.parquet")
    assert set(kept["how"]) == {"shapley", "leave_one_out"}
    fedsim.contributions(done, "loss", progress=False)
    fedsim.contributions(done, progress=False)
    kept = pd.read_parquet(done.path / "contributions.parquet")
    assert not kept.duplicated(["how", "score", "client"]).any()


Game = Mapping[frozenset[int], float]
SIZE = 4
WORTH = st.lists(st.floats(-10, 10), min_size=2**SIZE, max_size=2**SIZE).map(
    lambda values: dict(zip(subsets(range(SIZE)), values, strict=True))
)


@given(first=WORTH, second=WORTH)
def test_axioms(first: Game, second: Game) -> None:
    clients, both = range(SIZE), frozenset(range(SIZE))
    found = exact.shapley(clients, first.__getitem__)
    assert math.fsum(found.values()) == pytest.approx(first[both] - first[frozenset()], abs=1e-9)
    other = exact.shapley(clients, second.__getitem__)
    added = exact.shapley(clients, lambda own: first[own] + second[own])
    assert [added[k] for k in clients] == pytest.approx([found[k] + other[k] for k in clients])
    # Twins 0 and 1, and a client 3 that adds nothing.
    alike = exact.shapley(
        clients, lambda own: first[frozenset({len(own & {0, 1}) + 4, *(own & {2})}) & both]
    )
    assert alike[0] == pytest.approx(alike[1])
    assert alike[3] == pytest.approx(0, abs=1e-12)


def test_a_twin_and_a_client_without_a_say(tmp_path: Path) -> None:
    train = {"rounds": 3, "participation": 0.25}
    whole = finished(tmp_path, train=train)
    never = set(range(4)) - set(whole.clients["client"])
    found = fedsim.contributions(whole, progress=False)
    assert never
    for k in never:
        assert found.values[k] == 0.0
    assert found.coalitions == 2 ** (4 - len(never))


def test_permutations_come_close(done: Run) -> None:
    truth = fedsim.contributions(done, how="shapley", progress=False)
    found = fedsim.contributions(done, how="permutations", permutations=60, progress=False)
    again = fedsim.contributions(done, how="permutations", permutations=60, progress=False)
    assert found.clients.equals(again.clients)
    total = math.fsum(found.values.values())
    assert total == pytest.approx(truth.everybody - truth.nobody)
    errors = found.clients.set_index("client")["standard_error"]
    for k, value in truth.values.items():
        assert abs(found.values[k] - value) < 4 * errors[k] + 1e-12
    cut = fedsim.contributions(
        done, how="permutations", permutations=60, tolerance=10.0, progress=False
    )
    assert cut.coalitions <= 2 + 4  # the empty one, all, and the first of each order


def test_it_continues_where_it_was_interrupted(tmp_path: Path) -> None:
    whole, lines = finished(tmp_path), list[str]()

    class Stop(Exception):
        pass

    def stop(line: str) -> None:
        lines.append(line)
        raise Stop

    with pytest.raises(Stop):
        fedsim.contributions(whole, progress=stop)
    lines.clear()
    found = fedsim.contributions(whole, progress=lines.append)
    assert lines == ["[7/7] coalitions"]  # of 15, of which a piece of 8 was done
    other = finished(tmp_path)
    assert found.clients.equals(fedsim.contributions(other, progress=False).clients)


def test_the_same_on_ray(tmp_path: Path) -> None:
    tables = []
    for engine in ({"kind": "local"}, {"kind": "ray", "actors": 1}, {"kind": "ray", "actors": 3}):
        whole = finished(tmp_path, engine=engine)
        fedsim.contributions(whole, progress=False)
        of = Coalitions(whole)
        tables.append([of[own]["result_hash"] for own in subsets(range(4))])
    assert tables[0] == tables[1] == tables[2]


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"score": "acuracy"}, "score=acuracy: ... did you mean 'accuracy'?"),
        ({"permutations": 1}, "permutations=1: must be at least 2"),
        ({"tolerance": -1.0}, "tolerance=-1: must be at least 0"),
        (
            {"how": "shapley", "budget": 3},
            "how=shapley: 16 federations of some of the 4 clients would be played, about ... by "
            "one process, and budget=3; raise it, or take how=permutations",
        ),
    ],
)
def test_refusals(tmp_path: Path, keywords: dict[str, Any], said: str) -> None:
    whole = finished(tmp_path)
    with pytest.raises(BadInput) as refusal:
        fedsim.contributions(whole, progress=False, **keywords)
    for part in said.split("..."):
        assert part.strip() in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (whole.path / "coalitions.parquet").exists()


def test_what_cannot_do_without_clients_is_refused_before_the_start(tmp_path: Path) -> None:
    whole = finished(tmp_path, secure_aggregation={})
    with pytest.raises(BadInput, match=r"^clients \d alone: without.clients: leaves one client"):
        fedsim.contributions(whole, progress=False)
    mean = finished(tmp_path, method={"name": "local"})
    with pytest.raises(BadInput, match="there is no accuracy without any client"):
        fedsim.contributions(mean, progress=False)
    assert len(fedsim.contributions(mean, how="leave_one_out", progress=False).values) == 4


def test_a_damaged_file_and_that_of_another_run(tmp_path: Path) -> None:
    whole, other = finished(tmp_path), finished(tmp_path, seed=1)
    fedsim.contributions(whole, how="leave_one_out", progress=False)
    file = whole.path / "coalitions.parquet"
    (other.path / "coalitions.parquet").write_bytes(file.read_bytes())
    with pytest.raises(BadInput, match="is of another run; remove it"):
        fedsim.contributions(other, progress=False)
    file.write_bytes(b"no table")
    with pytest.raises(BadInput, match="is damaged; remove it to compute it again"):
        fedsim.contributions(whole, progress=False)


def test_a_coalition_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = finished(tmp_path)

    def broken(*_: Any) -> Any:
        raise RunError("round 1: it broke")
        yield

    monkeypatch.setattr("fedsim.analysis.contributions.coalitions.carry_on", broken)
    with pytest.raises(RunError, match=r"^without any client: round 1: it broke"):
        fedsim.contributions(whole, progress=False)
