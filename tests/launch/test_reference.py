"""Explanations of a run beside those of the centralised model, or of another run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy.stats import spearmanr

from experiments import (
    NUMBERS,
    READER,
    Finish,
    by_day,
    interrupted,
    refusal,
    small_experiment,
    with_method,
)
from fedsim import Run, extend, grid, resume, run
from fedsim.analysis.replay import replay
from fedsim.errors import Damaged, RunError
from fedsim.explain.section import SIMILARITIES
from fedsim.launch.prepare import prepare
from fedsim.results.folder import FINAL_WEIGHTS, REFERENCE
from fedsim.results.maps import similarity
from fedsim.results.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore:.*words get random vectors")

Sections = dict[str, Any]
TABLE: Sections = {
    "data": {"name": "synthetic", "shape": [4], "classes": 3, "samples": 80, "test_samples": 20},
    "partition": {"kind": "dirichlet", "clients": 5, "alpha": 1.0},
    "model": {"name": "mlp", "hidden": [4]},
    "train": {"rounds": 4, "batch_size": 8, "optimizer": {"lr": 0.1}},
}
IMAGES: Sections = {"data": {"name": "digits", "subset": 0.2}, "train": {"rounds": 2}}
DOCUMENTS: Sections = {
    "data": {
        **{"name": "planted_reviews", "reviews": 60, "test_reviews": 20, "fillers": 3},
        **{"dimension": 5, "length": 10},
    },
    "partition": {"kind": "aspects", "clients": 4},
    "model": READER,
    "train": {"rounds": 2, "batch_size": 8},
}
KINDS: dict[str, Sections] = {
    "table": TABLE,
    "validation": {**TABLE, "evaluate": {"validation": 0.2}},
    "images": {**IMAGES, "model": {"name": "cnn"}},
    "dropout": {**IMAGES, "model": {"name": "networks:regularised"}},
    "batch norm": {**IMAGES, "model": {"name": "networks:normalised"}},
    "adapters": {**IMAGES, "adapters": {"r": 4}},
    "documents": {**DOCUMENTS, "explain": {"explainers": ["occlusion"]}},
    "regression": {**NUMBERS, "model": {"name": "mlp", "hidden": [4]}, "train": {"rounds": 2}},
}
EXPLAIN: Sections = {
    **{"explainers": ["gradient", "random"], "scores": ["reference_agreement"]},
    **{"inputs": 4, "every": 2, "target": "label", "maps": True, "reference": "centralised"},
}


def explained(sections: Sections, **changed: Any) -> Sections:
    return {**sections, "explain": {**EXPLAIN, **sections.get("explain", {}), **changed}}


def alone(sections: Sections, method: str = "centralised") -> Sections:
    """The same experiment by a central method, whose maps are compared by hand."""
    made = {**sections, "method": {"name": method}}
    return explained(made, reference=None, scores=["sparseness"], of=["global"])


def shelf(done: Run) -> list[Path]:
    return sorted(done.path.parent.glob(".references/*/*"))


@pytest.mark.parametrize("kind", by_day(KINDS, {*KINDS} - {"validation", "batch norm"}))
def test_it_is_what_a_script_computes_from_two_runs(finish: Finish, kind: str) -> None:
    done, other = finish(**explained(KINDS[kind])), finish(**alone(KINDS[kind]))
    (weights,) = shelf(done)
    before, after = load_file(other.path / FINAL_WEIGHTS), load_file(weights)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    explainer = done.experiment.explain.explainers[0].name  # type: ignore[union-attr]
    last = done.rounds.iloc[-1]
    for how in SIMILARITIES:
        expected = similarity(done, other, explainer, how)
        assert last[f"{explainer}/reference_agreement_{how}"] == pytest.approx(expected, rel=1e-6)
    # Of clients, in a round before the last, with SciPy.
    reference = other.maps.query("explainer == @explainer").set_index("input")["relevance"]
    reference = reference.groupby("input").last()
    rows = done.explanations.query("explainer == @explainer and model == 'cohort'")
    assert len(rows)
    for row in rows.to_dict("records"):
        maps = done.maps.query(
            "explainer == @explainer and model == 'cohort'"
            f" and client == {row['client']} and round == {row['round']}"
        ).set_index("input")["relevance"]
        found = [spearmanr(maps[k], reference[k]).statistic for k in maps.index]
        expected = np.mean(np.nan_to_num(found))  # a constant map: chance
        assert row["reference_agreement_rank"] == pytest.approx(expected, abs=1e-6)
    about = done.manifest["reference"]
    metric = done.primary_metric.column
    assert about[metric] == pytest.approx(other.rounds[metric].iloc[-1])
    assert not list(verify(done.path)) or not any(wrong for _, wrong in verify(done.path))


def test_a_given_run_is_the_same_reference(finish: Finish) -> None:
    other = finish(**alone(TABLE))
    done, given = finish(**explained(TABLE)), finish(**explained(TABLE, reference=other.path))
    assert given.result_hash == done.result_hash
    assert given.manifest["reference"]["result_hash"] == other.result_hash


def test_the_control_is_at_chance(finish: Finish) -> None:
    """What is drawn for the reference is not what is drawn for the model after its last round."""
    data = {**TABLE["data"], "shape": [40]}
    done = finish(**explained({**TABLE, "data": data, "method": {"name": "centralised"}}))
    last = done.rounds.iloc[-1]
    assert last["gradient/reference_agreement_cosine"] == pytest.approx(1)
    assert abs(last["random/reference_agreement_cosine"]) < 0.4


def test_a_reference_that_says_nothing(tmp_path: Path) -> None:
    told: list[Any] = []
    sections = {**DOCUMENTS, "model": {"name": "rationale", "hidden": 4}, "train": {"rounds": 1}}
    explain = {"explainers": ["rationale"], "every": 1}
    done = run(small_experiment(**explained(sections, **explain)), tmp_path, told.append)
    said = "warning: of the reference, explainer rationale says nothing about 4 of 4 inputs, and "
    assert [line for line in told if str(line).startswith(said)]
    assert done.rounds["rationale/reference_agreement_rank"].iloc[-1] == 0


PERSONAL = {"of": ["cohort", "personal"]}
METHODS: dict[str, tuple[Sections, list[str]]] = {
    "scaffold": ({"share": {}}, ["", "client_", "shared_"]),
    "ditto": ({"of": ["global", "cohort", "personal"]}, ["", "client_", "personal_"]),
    "local": (PERSONAL, ["client_", "personal_"]),
    "ifca": (PERSONAL, ["client_", "personal_"]),
    "ffa_lora": ({}, ["", "client_"]),
    "fedex_lora": ({}, ["", "client_"]),
    "semifl": ({}, ["", "client_"]),
    "xpfl": ({}, ["", "client_"]),
    "centralised": ({}, [""]),
}


BY_DAY = ("scaffold", "ditto", "ifca", "ffa_lora", "semifl")


@pytest.mark.parametrize("method", by_day(METHODS, BY_DAY))
def test_methods(finish: Finish, method: str) -> None:
    """Also with personal models, without a global one, semi-supervised, and with adapters."""
    explain, prefixes = METHODS[method]
    sections = with_method(method, **{**IMAGES, "train": {"rounds": 2}})
    done = finish(**explained(sections, **explain))
    columns = [name for name in done.rounds if name.endswith("reference_agreement_rank")]
    assert [
        name.removeprefix("gradient/").removesuffix("reference_agreement_rank")
        for name in columns
        if name.startswith("gradient")
    ] == prefixes
    last = done.rounds[columns].iloc[-1]
    assert last.between(-1, 1).all()


@pytest.mark.parametrize("method", ["fedavg", "fedseit", "fedweit"])
def test_tasks_in_turn(finish: Finish, tmp_path: Path, method: str) -> None:
    path = tmp_path / "documents.txt"
    path.write_text(
        "\n".join(f"{'abcd'[i % 4]}\tone two {i % 4} three {i % 3}" for i in range(80))
    )
    sections = {
        **DOCUMENTS,
        "data": {"name": "text", "path": str(path), "dimension": 4},
        "partition": {
            "kind": "own_tasks",
            "tasks": [[["a", "b"], ["c", "d"]], [["c", "d"], ["a", "b"]]],
        },
        "method": {"name": method},
        "train": {"rounds": 2, "optimizer": {"name": "adam", "lr": 0.01}},
    }
    done = finish(**explained(sections, explainers=["occlusion"]))
    assert done.rounds["occlusion/client_reference_agreement_cosine"].notna().iloc[-1]


def test_rules_have_the_reference_of_a_run(finish: Finish) -> None:
    explain = {"explainers": ["rules"], "every": 1}
    model = {"name": "tsk", "rules": 2}
    rules = {**NUMBERS, "model": model, "train": {"rounds": 1}, "explain": explain}
    other = finish(**alone(rules, "centralised_rules"))
    done = finish(**explained({**rules, "method": {"name": "openfl_xai"}}, reference=other.path))
    assert 0 < done.rounds["rules/reference_agreement_rank"].iloc[-1] <= 1


def test_it_knows_nothing_of_the_federation(finish: Finish) -> None:
    """The reference is that of the experiment without these sections."""
    plain = finish(**explained(TABLE))
    before = load_file(plain.path / REFERENCE)
    for section in (
        {"adversaries": {"share": 0.4, "attack": {"name": "sign_flip"}}},
        {"adversaries": {"share": 0.4, "attack": {"name": "label_flip"}}},
        {"privacy": {"clip": 1.0, "noise_multiplier": 0.5}},
        {"uplink": {"name": "topk", "fraction": 0.1}},
        {"secure_aggregation": {}, "conditions": [{"name": "own_channel:Lossy"}]},
        {"evaluate": {"every": 2, "clients": False}},
    ):
        done = finish(**explained({**TABLE, **section}))
        after = load_file(done.path / REFERENCE)
        assert all(np.array_equal(before[name], after[name]) for name in before), section
        accuracy = [each.manifest["reference"]["accuracy"] for each in (plain, done)]
        assert accuracy[0] == accuracy[1]


def test_early_stopping_does_not_end_it(finish: Finish) -> None:
    stopping = {"validation": 0.2, "early_stopping": {"patience": 1, "min_delta": 10}}
    done = finish(**explained({**TABLE, "evaluate": stopping}, every=1))
    assert done.last_round < done.manifest["reference"]["rounds"] == 4


def test_runs_share_what_is_the_same(finish: Finish) -> None:
    """Whoever holds what, and however it is learnt; other seeds and settings do not."""
    made = [
        finish(**explained(TABLE)),
        finish(**explained({**TABLE, "method": {"name": "scaffold"}})),
        finish(**explained({**TABLE, "partition": {"kind": "iid", "clients": 3}}, inputs=3)),
        finish(**explained({**TABLE, "privacy": {"clip": 1.0, "noise_multiplier": 0.5}})),
    ]
    assert len(shelf(made[0])) == 1
    finish(**explained(TABLE), seed=1)
    finish(**explained({**TABLE, "train": {**TABLE["train"], "rounds": 2}}, every=1))
    finish(**explained({**TABLE, "partition": {**TABLE["partition"], "train_fraction": 0.8}}))
    assert len(shelf(made[0])) == 4


def test_a_grid_trains_it_once_a_seed(tmp_path: Path, own_ray: None) -> None:
    content = small_experiment(**explained(TABLE)).model_dump(mode="json")
    content["explain"] |= {"of": ["cohort"]}
    content["grid"] = {"axes": {"method.name": ["fedavg", "local"]}, "seeds": [0, 1]}
    found = grid(content, out=tmp_path)
    column = "gradient/client_reference_agreement_rank"
    last = found.rounds.query("round == 4")
    assert len(last) == 4
    assert last[column].notna().all()
    assert len([*found.path.glob(".references/*/*")]) == 2


@pytest.mark.parametrize("given", [False, True])
def test_a_run_is_whole_by_itself(finish: Finish, tmp_path: Path, given: bool) -> None:
    """It is resumed and replayed without the weights of the reference, or the other run."""
    other = finish(**alone(TABLE))
    reference = other.path if given else "centralised"
    sections = {**TABLE, "checkpoint": {"every": 1, "keep": "all"}}
    whole = finish(**explained(sections, reference=reference))
    folder = interrupted(
        small_experiment(**explained(sections, reference=reference)), tmp_path / "cut", 2
    )
    shutil.rmtree(other.path)
    for left in tmp_path.glob("*/*/.references"):
        shutil.rmtree(left)
    done = resume(folder, progress=False)
    assert done.result_hash == whole.result_hash
    assert not list(tmp_path.glob("*/*/.references"))
    for after in (1, 4):
        assert replay(done, after).after == after
    longer = extend(done, {"train.rounds": 6}, tmp_path / "more", progress=False)
    assert longer.manifest["reference"] == done.manifest["reference"]
    assert longer.rounds["gradient/reference_agreement_rank"].count() == 3
    assert replay(longer, 6).after == 6


def test_a_kill_before_the_first_checkpoint(finish: Finish, tmp_path: Path) -> None:
    whole = finish(**explained(TABLE))
    cut = small_experiment(**explained({**TABLE, "checkpoint": {"every": 0}}))
    folder = interrupted(cut, tmp_path / "cut", 2)
    (folder / REFERENCE).unlink()  # as if killed while it was written
    assert resume(folder, progress=False).result_hash == whole.result_hash


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"\0" * 9)])
def test_a_damaged_reference_is_made_again(finish: Finish, damage: Callable[[Path], Any]) -> None:
    done = finish(**explained(TABLE))
    expected, content = done.result_hash, (done.path / REFERENCE).read_bytes()
    damage(done.path / REFERENCE)
    with pytest.raises(Damaged, match=f"{REFERENCE}: is (missing|damaged)"):
        replay(Run.open(done.path), 2)
    assert any(REFERENCE in line for _, wrong in verify(done.path) for line in wrong)
    assert resume(done.path, progress=False).result_hash == expected
    assert (done.path / REFERENCE).read_bytes() == content


@pytest.mark.night  # by day test_a_grid_trains_it_once_a_seed, on Ray
def test_on_ray(finish: Finish, own_ray: None, driver_here: None) -> None:
    local = finish(**explained(TABLE))
    shutil.rmtree(local.path.parent / ".references")
    done = finish(**explained(TABLE), engine={"kind": "ray", "actors": 2})
    assert done.result_hash == local.result_hash


def changed(**sections: Any) -> Sections:
    return alone({**TABLE, **sections})


def told_of(reference: Path, sections: Sections = TABLE) -> str:
    """What is said of a run that cannot be the reference."""
    made = small_experiment(**explained(sections, reference=reference))
    return refusal(lambda: prepare(made)).removeprefix(f"explain.reference: {reference}: ")


@pytest.mark.parametrize(
    ("section", "content"),
    [
        ("model", {"name": "mlp", "hidden": [5]}),
        ("data", {**TABLE["data"], "samples": 90}),
        ("adapters", {"r": 2}),
    ],
)
def test_a_run_of_something_else(finish: Finish, section: str, content: Any) -> None:
    other = finish(**changed(**{section: content}))
    assert told_of(other.path) == (
        f"its section `{section}` is not this experiment's; take a run of the same data and model"
    )


def test_a_run_without_a_global_model(finish: Finish) -> None:
    other = finish(**{**TABLE, "method": {"name": "local"}})
    told = "method.name=local has no global model; take a run that has one"
    assert told_of(other.path) == told


def test_a_run_whose_file_changed(finish: Finish, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows = [f"{i % 7},{i % 5},{'ab'[i % 2]}" for i in range(90)]
    path.write_text("\n".join(["u,v,kind", *rows]))
    data = {"name": "table", "path": str(path), "label": "kind"}
    other = finish(**changed(data=data))
    path.write_text("\n".join(["u,v,kind", *rows[:-1], "9,9,b"]))
    assert told_of(other.path, {**TABLE, "data": data}) == "its data are others than these"


def test_a_run_without_result_or_weights(finish: Finish, tmp_path: Path) -> None:
    folder = interrupted(small_experiment(**TABLE), tmp_path, 1)
    assert told_of(folder) == "the run is not finished; it has no result yet"
    other = finish(**alone(TABLE))
    (other.path / FINAL_WEIGHTS).unlink()
    assert told_of(other.path) == "the run is not finished; it has no weights yet"


def test_a_reference_that_diverges(finish: Finish) -> None:
    train = {**TABLE["train"], "optimizer": {"lr": 1e30}}
    with pytest.raises(RunError) as failed:
        finish(**explained({**TABLE, "train": train}))
    told = str(failed.value)
    assert told.startswith("explain.reference=centralised: training diverged in round 1: ")
    assert "\n" not in told
