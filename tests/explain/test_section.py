"""The `explain` section: what it refuses and in which words, and what it chooses."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from own_relevances import Slopes

from experiments import KINDS, ran, small_experiment
from fedsim import Experiment, resume, run
from fedsim.config.file import RawConfig
from fedsim.data import Dataset, datasets, load_dataset
from fedsim.errors import RunError
from fedsim.explain.explainers.occlusion import Occlusion
from fedsim.explain.section import SCORES, SIMILARITIES, Explain
from fedsim.launch.prepare import prepare
from fedsim.simulate import Progress

Sections = dict[str, Any]

TABLE: Sections = {**KINDS["table"], "train": {"rounds": 3, "batch_size": 15}}


@cache
def loaded(sort: str) -> Dataset:
    return load_dataset(datasets.parse(KINDS[sort]["data"]))


def images(*truth: str) -> Dataset:
    """Twelve of two channels, and which of their pixels are of some kinds."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (12, 2, 4, 5), dtype=np.uint8), np.arange(12) % 2
    kinds = {kind: rng.random((12, 4, 5)) < 0.3 for kind in truth}
    return Dataset(x, y, x[::-1], y[::-1], ("cat", "dog"), truth=kinds)


def resolved(sections: Sections, dataset: Dataset, **explain: Any) -> Explain:
    """The section as a run has it."""
    usual = {"explainers": ["random"], "inputs": 3, "every": 1}
    made = small_experiment(**sections, explain={**usual, **explain})
    (condition,) = prepare(made, dataset)[2].conditions
    return condition.section


def built(**explain: Any) -> Explain:
    return RawConfig({"explainers": ["gradient"], **explain}).build(Explain)


# what it leaves open; for what it refuses see tests/refusals.yaml


def test_where_clients_train_nothing_the_global_model_alone_is_explained(tmp_path: Path) -> None:
    explain = {"explainers": ["random"], "inputs": 3, "scores": ["deletion", "agreement"]}
    lines: list[Progress] = []
    one = small_experiment(**TABLE, method={"name": "centralised"}, explain=explain)
    done = run(one, tmp_path, lines.append)
    assert [metric.column for metric in done.explained] == ["random/deletion"]
    assert done.rounds["random/deletion"].notna().any()
    assert lines[0] == "clients do not train models with method.name=centralised"


USUAL = {"deletion", "insertion", "comprehensiveness", "sufficiency"} | {
    *("sparseness", "effective_parts", "agreement", "global_agreement", "drift")
}
AGREEING = {"agreement", "global_agreement"}
LOCATED = {"relevance_mass", "relevance_rank", "pointing_game"}
LOCAL: Sections = {**TABLE, "method": {"name": "local"}}


class TestDefaults:
    @pytest.mark.parametrize(
        ("sections", "data", "explain", "of", "lacking"),
        [
            (TABLE, "table", {}, "both", LOCATED),
            (KINDS["numbers"], "numbers", {}, "both", LOCATED),
            (TABLE, (), {}, "both", LOCATED),
            (TABLE, ("signal", "shortcut"), {}, "both", set()),
            (KINDS["documents"], "documents", {}, "both", set()),
            (TABLE, ("signal",), {"of": ["global"]}, "global", AGREEING),
            (TABLE, ("signal",), {"of": ["cohort"]}, "cohort", {"global_agreement"}),
            (TABLE, ("signal",), {"inputs_from": "own"}, "cohort", AGREEING | LOCATED),
            (TABLE, ("signal",), {"clients": 1}, "both", {"agreement"}),
            (LOCAL, ("signal",), {}, "cohort", {"global_agreement"}),
            (LOCAL, ("signal",), {"reference": "centralised"}, "cohort", {"global_agreement"}),
            (LOCAL, ("signal",), {"inputs_from": "own"}, "cohort", AGREEING | LOCATED),
        ],
    )
    def test_whose_and_which_scores(
        self, sections: Sections, data: Any, explain: Sections, of: str, lacking: set[str]
    ) -> None:
        dataset = loaded(data) if isinstance(data, str) else images(*data)
        found = resolved(sections, dataset, **explain)
        assert found.of == (("global", "cohort") if of == "both" else (of,))
        beside = {"reference_agreement"} if "reference" in explain else set()
        possible = (USUAL | LOCATED | beside) - lacking
        assert found.scores == tuple(name for name in SCORES if name in possible)

    def test_what_is_asked_for_stays(self) -> None:
        asked = {"of": ("personal",), "scores": ("repeatability", "deletion")}
        found = resolved(LOCAL, loaded("table"), **asked)
        assert (found.of, found.scores) == (*asked.values(),)

    def test_due_at_multiples_and_at_the_end(self) -> None:
        assert [t for t in range(1, 12) if built(every=4).due(t, 11)] == [4, 8, 11]
        assert [t for t in range(1, 4) if built(every=5).due(t, 3)] == [3]

    def test_columns(self) -> None:
        data = images("signal", "shortcut")
        found = resolved(TABLE, data, scores=["deletion", "pointing_game", "agreement", "drift"])
        alone = {"deletion": "min", "pointing_game_signal": "max", "pointing_game_shortcut": "min"}
        drift = {f"drift_{how}": "min" for how in SIMILARITIES}
        agreement = {f"agreement_{how}": "max" for how in SIMILARITIES}
        assert [(m.column, m.best) for m in found.metrics(data)] == [
            *((f"random/{name}", best) for name, best in (alone | drift).items()),
            *((f"random/client_{name}", b) for name, b in (alone | agreement | drift).items()),
        ]


class TestInputs:
    def test_depend_on_the_seed_alone(self) -> None:
        data = loaded("table")
        first = built(inputs=6).rows(data, seed=3)
        again = built(inputs=6, explainers=["random"], every=2, clients=1).rows(data, seed=3)
        np.testing.assert_array_equal(first, again)
        assert len(set(first.tolist())) == 6
        assert (np.diff(first) > 0).all()
        assert set(first.tolist()) <= set(range(30))
        assert not np.array_equal(first, built(inputs=6).rows(data, seed=4))

        assert built(inputs=30).rows(data, 0).tolist() == list(range(30))

    def test_of_a_slice(self) -> None:
        data = loaded("documents")
        found = built(inputs=4, slice="aroma").rows(data, 0)
        assert set(data.test_columns["aspect"][found]) == {"aroma"}
        assert len(set(found.tolist())) == 4

    def test_of_a_clients_own(self) -> None:
        """Of whose see test_explained_runs.py."""
        _, splits, _ = prepare(small_experiment(**TABLE), loaded("table"))
        for k in range(4):
            few, all_of_them = (
                built(inputs=n, inputs_from="own").own_rows(splits, k, seed=0) for n in (4, 1000)
            )
            assert sorted(all_of_them) == sorted(splits.train[k])
            np.testing.assert_array_equal(all_of_them[:4], few)


@given(
    st.integers(1, 12).flatmap(
        lambda K: st.tuples(st.just(K), st.sets(st.integers(0, K - 1)), st.integers(1, 13))
    ),
    st.integers(0, 5),
    st.randoms(),
)
def test_clients_are_the_first_of_one_order(
    about: tuple[int, set[int], int], seed: int, random: Any
) -> None:
    K, cohort, number = about
    section = built(clients=number)
    # Chosen among all with ever more places, they come in one order.
    order: list[int] = []
    for n in range(1, K + 1):
        (new,) = set(built(clients=n).choose(range(K), K, seed)) - set(order)
        order.append(new)
    expected = sorted([k for k in order if k in cohort][:number])
    shuffled = [*cohort]
    random.shuffle(shuffled)
    assert section.choose(shuffled, K, seed) == expected


def test_a_round_trip_through_yaml(tmp_path: Path) -> None:
    listed = ["gradient", {"name": "occlusion", "size": 2}, "own_relevances:Slopes"]
    made = small_experiment(**TABLE, explain={"explainers": listed, "scores": ["drift"]})
    assert made.explain.explainers[1:] == (Occlusion(size=2), Slopes())
    (tmp_path / "whole.yaml").write_text(made.to_yaml())
    assert Experiment.load(tmp_path / "whole.yaml") == made
    assert Experiment.from_dict(made.model_dump(mode="json")) == made
    changed = Experiment.load(tmp_path / "whole.yaml", ["explain.every=2", "explain.scores=null"])
    assert (changed.explain.every, changed.explain.scores) == (2, None)


def test_one_of_ones_own_is_as_good_as_any() -> None:
    name = "own_relevances:Slopes"
    explain = {"explainers": ["gradient", name], "inputs": 4, "every": 2}
    done = ran(**TABLE, explain={**explain, "scores": ["deletion", "drift", "agreement"]})
    found = [
        frame.drop(columns="explainer").reset_index(drop=True)
        for _, frame in done.explanations.groupby("explainer")
    ]
    assert set(done.explanations["explainer"]) == {"gradient", name}
    assert found[0].equals(found[1])
    assert done.rounds[f"{name}/deletion"].equals(done.rounds["gradient/deletion"])


def test_one_that_fails_ends_the_run_which_can_go_on(tmp_path: Path) -> None:
    (tmp_path / "wrong").touch()
    raises = {"name": "own_relevances:Raises", "file": str(tmp_path / "wrong")}
    explain = {"explainers": [raises], "inputs": 4, "every": 2}
    # Whoever is left out when it fails itself, it is not for what explains it.
    train = {**TABLE["train"], "on_client_error": "skip"}
    made = small_experiment(**{**TABLE, "train": train}, explain=explain, checkpoint={"every": 1})
    line = (
        r"^round 2: explainer own_relevances:Raises, client \d's model: ZeroDivisionError: too "
        r"little \(own_relevances\.py, line \d+\)$"
    )
    with pytest.raises(RunError, match=line):
        run(made, tmp_path / "runs")
    (folder,) = (tmp_path / "runs" / "small").iterdir()
    (tmp_path / "wrong").unlink()
    lines: list[Any] = []
    again = resume(folder, lines.append)
    assert lines[0] == "continuing after round 1"
    assert again.result_hash == run(made, tmp_path / "runs").result_hash


def test_one_that_gives_other_numbers_than_asked_for(tmp_path: Path) -> None:
    explain = {"explainers": ["own_relevances:OneForEach"], "inputs": 4, "every": 1}
    line = r"explainer own_relevances:OneForEach, .*: relevances must have the shape \(4, 6\), not"
    with pytest.raises(RunError, match=line):
        run(small_experiment(**TABLE, explain=explain), tmp_path / "runs")
