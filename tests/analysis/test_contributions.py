"""Outcomes of coalitions of clients, and what each client contributes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from by_hand import shapley

import fedsim
from experiments import KINDS, by_day, ran, refusal, small_experiment
from fedsim import Run, run
from fedsim.analysis.contributions import games
from fedsim.analysis.contributions.coalitions import Coalitions
from fedsim.analysis.contributions.gtg_shapley import gtg_shapley
from fedsim.analysis.contributions.updates import RoundUpdates, updates_of
from fedsim.analysis.replay import ModelSnapshot
from fedsim.errors import RunError

FEW: dict[str, Any] = {
    "train": {"rounds": 4, "participation": 0.5},
    "partition": {"kind": "iid", "clients": 4},
    "data": {"name": "digits", "subset": 0.2},
}


def finished(out: Path | None = None, **given: Any) -> Run:
    """One of the test's own, to write to, or else one that others use as well."""
    sections = {**FEW, **given}
    return run(small_experiment(**sections), out, progress=False) if out else ran(**sections)


@pytest.fixture(scope="module")
def done() -> Run:
    return finished()


def subsets(clients: Iterable[int]) -> list[frozenset[int]]:
    return list(games.subsets(sorted(clients)))


STOPS = {"validation": 0.1, "early_stopping": {"patience": 1}}
SECTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaffold": {"method": {"name": "scaffold"}},
    "ditto": {"method": {"name": "ditto"}},
    "afl": {"method": {"name": "afl"}, "train": {"rounds": 3, "participation": 0.5}},
    "fedxds": {"method": {"name": "fedxds", "warmup_rounds": 1}, "train": {"rounds": 3}},
    "centralised": {"method": {"name": "centralised"}},
    "every": {"evaluate": {"every": 3}, "train": {"rounds": 5, "participation": 0.25}},
    "stops": {"evaluate": STOPS},
    "stops late": {
        "train": {"rounds": 8, "participation": 0.25, "optimizer": {"lr": 0.3}},
        **{"evaluate": STOPS, "seed": 8},
    },
    "uplink": {"uplink": {"name": "topk", "fraction": 0.1}},
    "devices": {"devices": {"speed": {"median": 60, "sigma": 1}, "deadline": 1.0}},
    "explained": {"explain": {"of": ["global"], "inputs": 2}, "train": {"rounds": 2}},
    "reference": {
        "explain": {"of": ["global", "personal"], "inputs": 2, "reference": "centralised"},
        **{"method": {"name": "ditto"}, "train": {"rounds": 2}},
    },
    "stacks": {"model": {"name": "cnn"}, "engine": {"clients_per_step": 2}},
}
BY_DAY = ("plain", "scaffold", "fedxds", "every", "stops late", "devices", "reference")


@pytest.mark.parametrize("name", by_day(SECTIONS, BY_DAY))
def test_an_outcome_is_that_of_a_run_without_the_others(name: str) -> None:
    sections = SECTIONS[name]
    whole = finished(**sections)
    of = Coalitions(whole)
    some = [{1}, {0, 3}, {0, 1, 2}, *([] if sections else [{0, 1}, {1, 2, 3}, {2, 3}])]
    of.compute(some)
    for own in some:
        others = [k for k in range(4) if k not in own]
        alone = finished(**sections, without=others)
        assert of[own]["result_hash"] == alone.result_hash
        numbers = alone.rounds.select_dtypes("number")
        last = numbers.iloc[-1].drop(["seconds", "explain_seconds"], errors="ignore").dropna()
        assert {name: of[own][name] for name in last.index} == last.to_dict()
    assert of[range(4)]["result_hash"] == whole.result_hash


def test_shapley_values_by_hand(done: Run) -> None:
    found = fedsim.contributions(done, progress=False)
    of = Coalitions(done)
    value = {own: of[own]["accuracy"] for own in subsets(range(4))}
    expected = shapley(lambda there: value[frozenset(there)], 4)
    assert [found.values[k] for k in range(4)] == pytest.approx(expected, abs=1e-12)
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


def test_a_twin_and_a_client_without_a_say() -> None:
    whole = finished(train={"rounds": 3, "participation": 0.25})
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
        if len(lines) > 1:  # the first is of the federation without any client
            raise Stop

    with pytest.raises(Stop):
        fedsim.contributions(whole, progress=stop)
    lines.clear()
    found = fedsim.contributions(whole, progress=lines.append)
    assert lines == ["[6/6] coalitions"]  # of 14, of which a piece of 8 was done
    other = finished(tmp_path)
    assert found.clients.equals(fedsim.contributions(other, progress=False).clients)


@pytest.mark.usefixtures("own_ray", "driver_here")
def test_the_same_on_ray(tmp_path: Path) -> None:
    tables = []
    for engine in ({"kind": "local"}, {"kind": "ray", "actors": 3}):
        whole = finished(tmp_path, engine=engine)
        fedsim.contributions(whole, progress=False)
        of = Coalitions(whole)
        tables.append([of[own]["result_hash"] for own in subsets(range(4))])
    assert tables[0] == tables[1]


def test_what_cannot_do_without_clients_is_refused_before_the_start() -> None:
    whole = finished(secure_aggregation={})
    told = refusal(lambda: fedsim.contributions(whole, progress=False))
    assert re.match(r"clients \d alone: without.clients: leaves one client", told)
    mean = finished(method={"name": "local"})
    told = refusal(lambda: fedsim.contributions(mean, progress=False))
    assert "there is no accuracy without any client" in told
    assert len(pd.read_parquet(mean.path / "coalitions.parquet")) == 2  # no more was played
    assert len(fedsim.contributions(mean, how="leave_one_out", progress=False).values) == 4


def test_a_client_that_lacks_a_feature(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(rng.normal(size=(90, 2)), columns=["dose", "age"])
    rows["ill"], rows["site"] = rng.integers(0, 2, 90), np.arange(90) % 3
    rows.loc[rows["site"] == 1, "dose"] = np.nan
    rows.to_csv(tmp_path / "rows.csv", index=False)
    table = {"name": "table", "path": str(tmp_path / "rows.csv"), "label": "ill"}
    table |= {"client_column": "site", "missing": "mean", "fit": "federated"}
    whole = finished(data=table, partition={"kind": "natural"}, train={"rounds": 1})
    # Alone it has no scale for it, but scales are those of all clients.
    assert len(fedsim.contributions(whole, how="shapley", progress=False).values) == 3


def test_a_damaged_file_and_that_of_another_run(tmp_path: Path) -> None:
    whole, other = finished(tmp_path), finished(tmp_path, seed=1)
    fedsim.contributions(whole, how="leave_one_out", progress=False)
    file = whole.path / "coalitions.parquet"
    (other.path / "coalitions.parquet").write_bytes(file.read_bytes())
    told = refusal(lambda: fedsim.contributions(other, progress=False))
    assert "is of another run; remove it" in told
    file.write_bytes(b"no table")
    told = refusal(lambda: fedsim.contributions(whole, progress=False))
    assert "is damaged; remove it to compute it again" in told
    pd.DataFrame({"client": [0], "value": [1.0]}).to_parquet(whole.path / "contributions.parquet")
    told = refusal(lambda: fedsim.load(whole.path).contributions)
    assert "contributions.parquet: is damaged: it has no column" in told


def test_a_coalition_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = finished(tmp_path)

    def broken(*_: Any) -> Any:
        raise RunError("round 1: it broke")
        yield

    monkeypatch.setattr("fedsim.analysis.contributions.coalitions.carry_on", broken)
    with pytest.raises(RunError, match=r"^without any client: round 1: it broke"):
        fedsim.contributions(whole, progress=False)


# Estimates from the updates of one run.


@pytest.fixture(scope="module")
def short() -> Run:
    return finished(train={"rounds": 2, "participation": 1.0})


def test_one_round_is_exact() -> None:
    """After one round, models of some clients are those that they would have trained."""
    once = finished(train={"rounds": 1, "participation": 1.0})
    truth = fedsim.contributions(once, how="shapley", progress=False)
    found = fedsim.contributions(once, how="multi_rounds", progress=False)
    for k, value in truth.values.items():
        assert found.values[k] == pytest.approx(value, abs=1e-9)


def test_multi_rounds_and_gtg(short: Run) -> None:
    found = fedsim.contributions(short, how="multi_rounds", progress=False)
    total = math.fsum(found.values.values())
    assert total == pytest.approx(found.everybody - found.nobody, abs=1e-9)
    sampled = fedsim.contributions(short, how="gtg_shapley", progress=False)
    assert np.corrcoef(list(found.values.values()), list(sampled.values.values()))[0, 1] > 0.5
    again = fedsim.contributions(short, how="gtg_shapley", progress=False)
    assert again.clients.equals(sampled.clients)


def test_gtg_by_hand() -> None:
    """With all orders' marginals alike, an additive game, its samples are exact."""
    changes, samples = dict(enumerate(np.eye(3))), dict.fromkeys(range(3), 1)
    round = RoundUpdates(1, *np.full((2, 3), [[0], [1 / 3]], np.float32), changes, samples, {})

    def worth(weights: Any) -> float:  # how many have taken part
        return float((weights > 0).sum())

    rng, like = np.random.default_rng(0), np.random.default_rng(0)
    found = gtg_shapley(iter([round]), worth, rng)
    assert {k: own["value"] for k, own in found.items()} == {0: 1.0, 1: 1.0, 2: 1.0}
    like.permuted(np.zeros((6, 2)), axis=1)  # two sweeps of three: the second changes nothing
    assert gtg_shapley(iter([round]), lambda weights: 1.0, rng) == {}  # nothing changes: left out
    assert rng.random() == like.random()


def cosine(own: Any, whole: Any) -> float:
    return float(own @ whole / np.linalg.norm(own) / np.linalg.norm(whole))


def test_cosine_and_shapfed_by_hand(short: Run) -> None:
    wanted, by_class = list[Any](), list[Any]()
    for round, again in updates_of(short):
        n = np.array([round.samples[k] for k in range(4)])
        changes = np.stack([round.changes[k] for k in range(4)])
        mean = np.average(changes, axis=0, weights=n)
        wanted.append([cosine(own, mean) for own in changes])
        size, shares = again.fed.server.model.num_parameters, []
        rows, bias = size - 10 * 32 - 10, size - 10
        for c in range(10):
            at = [*range(rows + 32 * c, rows + 32 * (c + 1)), bias + c]
            parts = n[:, None] * changes[:, at]

            def value(some: Iterable[int], parts: Any = parts) -> float:
                return cosine(parts[[*some]].sum(axis=0), parts.sum(axis=0)) if some else 0.0

            shares.append(shapley(value, 4))
        by_class.append(shares)
    found = fedsim.contributions(short, how="cosine", progress=False)
    told = fedsim.contributions(short, how="shapfed", progress=False).clients.set_index("client")
    assert [found.values[k] for k in range(4)] == pytest.approx(np.mean(wanted, axis=0))
    of_classes = np.mean(by_class, axis=0)
    assert told["value"][range(4)].tolist() == pytest.approx(of_classes.mean(axis=0))
    assert told["value/3"][range(4)].tolist() == pytest.approx(of_classes[3])


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"method": {"name": "fedadam"}}, "did not average"),
        ({"method": {"name": "local"}}, "which method.name=local has not"),
        ({"aggregation": {"name": "median"}, "train": {"rounds": 2}}, "did not average"),
        ({"uplink": {"name": "topk", "fraction": 0.01}}, "did not average"),
        (
            {"partition": {"kind": "iid", "clients": 13}, "train": {"rounds": 1}},
            "how=multi_rounds: evaluates all subsets of a cohort, and round 1 has 13 clients",
        ),
    ],
)
def test_what_estimates_refuse(sections: dict[str, Any], said: str) -> None:
    whole = finished(**sections)
    by = {"how": "multi_rounds", "progress": False}
    assert said in refusal(lambda: fedsim.contributions(whole, **by))


@pytest.mark.parametrize("method", ["fedprox", "moon", "fedsam", "fedbabu", "scaffold"])
def test_estimates_of_methods_that_average(method: str) -> None:
    whole = finished(method={"name": method})
    assert len(fedsim.contributions(whole, how="gtg_shapley", progress=False).values) == 4


# Influence on one decision.


SHORT = {"name": "planted_reviews", "reviews": 60, "length": 10}
INFLUENCED: dict[str, dict[str, Any]] = {
    "images": {},
    "not averaged": {"method": {"name": "fedadam"}},
    "numbers": KINDS["numbers"],
    "documents": {**KINDS["documents"], "data": SHORT},
}


@pytest.mark.parametrize("kind", by_day(INFLUENCED, ("not averaged", "documents")))
def test_influence(tmp_path: Path, kind: str) -> None:
    sections = INFLUENCED[kind]
    whole = finished(**sections, train={"rounds": 2})
    lines = list[str]()
    found = fedsim.influence(whole, 3, progress=lines.append)
    table = found.clients.set_index("client")
    model = ModelSnapshot.of(whole)
    x = model.data().prepare(model.dataset.test_x[3:4])
    output = model.network()(x)[0].detach().reshape(-1)
    c = int(output.argmax())
    assert found.output == output[c]
    assert found.decision == (model.dataset.classes[c] if model.dataset.classes else "")
    for k in range(4):
        less = ModelSnapshot.of(fedsim.without(whole, k, progress=False))
        other = less.network()(x)[0].detach().reshape(-1)[c]
        assert table["influence"][k] == found.output - other
        assert -1 <= table["agreement"][k] <= 1
    assert found.heaviest == table["influence"].abs().idxmax()
    averages = kind != "not averaged"
    assert ("estimate" in table) == averages
    assert any("no estimate: " in line for line in lines) != averages
    if averages:  # of the same size and direction, on the whole
        assert table["influence"].corr(table["estimate"]) > 0.5
    assert f"row 3: {found.decision or 'output'}" in found.text()
    (path,) = found.save(tmp_path / "drawn.svg")
    drawn = path.read_text()
    assert f"without client {found.heaviest}" in drawn
    assert all(f"client {k}" in drawn for k in range(4))
    assert found.save()[0].parent == whole.path / "explanations"


def test_the_slope_of_an_output() -> None:
    """The estimate of one small step of one client, beside the change that it makes."""
    whole = finished(train={"rounds": 1, "optimizer": {"lr": 1e-3}})
    table = fedsim.influence(whole, 1, progress=False).clients
    assert np.allclose(table["influence"], table["estimate"], rtol=0.05, atol=1e-5)


def test_models_of_no_network_have_no_influence() -> None:
    whole = finished(train={"rounds": 1}, method={"name": "local"})
    told = refusal(lambda: fedsim.influence(whole, 0, progress=False))
    assert "method.name=local has no global network" in told
    assert not (whole.path / "without").exists()


# In the report.


def test_the_report_draws_what_is_known(tmp_path: Path) -> None:
    whole = finished(tmp_path)
    assert "contributes to" not in fedsim.report(whole.path, out=tmp_path / "a.html").read_text()
    fedsim.contributions(whole, progress=False)
    fedsim.contributions(whole, how="permutations", permutations=4, progress=False)
    fedsim.contributions(whole, how="cosine", progress=False)
    page = fedsim.report(whole.path, out=tmp_path / "b.html", figures=tmp_path / "drawn")
    text = page.read_text()
    assert "What each client contributes to accuracy" in text
    for k, value in fedsim.contributions(whole, progress=False).values.items():
        held = whole.labels.groupby("client")["examples"].sum()[k]
        assert f"client {k}, {held} examples: {value:+.4f}" in text
    assert "Shapley, sampled" in text
    assert "cosine" not in text  # in other units
    assert (tmp_path / "drawn" / "what-each-client-contributes-to-accuracy.pdf").exists()
