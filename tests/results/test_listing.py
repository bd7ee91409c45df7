"""`fedsim ls` lists what is there, in order."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments import Say, change_manifest, grid_in_process, small_experiment
from fedsim import Run, run
from fedsim.experiment import to_yaml
from fedsim.results.listing import list_results
from fedsim.results.sweeps import Search


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Two finished runs, one that goes on, and one that is damaged."""
    out = tmp_path_factory.mktemp("listed") / "runs"
    good = run(small_experiment(name="good", train={"rounds": 4}), out)
    poor = run(small_experiment(name="poor", train={"rounds": 1}, method={"name": "fedavgm"}), out)
    going_on = run(small_experiment(name="going-on", train={"rounds": 1}), out)
    damaged = run(small_experiment(name="damaged", train={"rounds": 1}), out)
    for day, one in enumerate((good, poor, going_on), 1):
        facts = {"status": "running"} if one is going_on else {}
        change_manifest(one.path, created=f"2026-01-0{day}T12:00:00+0000", **facts)
    for name in ("manifest.json", "manifest.copy.json"):
        (damaged.path / name).write_text("{")
    return {"good": good, "poor": poor, "going-on": going_on, "damaged": damaged}


@pytest.fixture(scope="module")
def out(runs: dict[str, Run]) -> Path:
    return runs["good"].path.parents[1]


def test_of_each_run_what_matters(runs: dict[str, Run], out: Path) -> None:
    found = {row.folder.parts[0]: row for row in list_results(out)}
    good = found["good"]
    assert out / good.folder == runs["good"].path
    assert (good.kind, good.name, good.method, good.status) == (
        *("run", "good", "fedavg", "finished"),
    )
    assert (good.done, good.of, good.metric) == (4, 4, "accuracy")
    assert good.score == runs["good"].rounds["accuracy"].iloc[-1]
    assert good.result_hash == runs["good"].result_hash
    assert found["going-on"].status == "running"
    assert found["damaged"].status == "damaged"


def test_the_latest_comes_first(out: Path) -> None:
    names = [row.folder.parts[0] for row in list_results(out)]
    assert names == ["going-on", "poor", "good", "damaged"]


def test_a_grid_is_one_row(tmp_path: Path) -> None:
    content = small_experiment(train={"rounds": 1}).model_dump(mode="json")
    content["grid"] = {"axes": {"partition.alpha": [0.1, 1.0]}}
    grid_in_process(content, tmp_path)
    (row,) = list_results(tmp_path)
    assert (row.kind, row.name, row.method, row.status) == ("grid", "small", "fedavg", "finished")
    assert (row.done, row.of, row.score) == (2, 2, None)


def test_so_is_a_search(tmp_path: Path) -> None:
    content = small_experiment(train={"rounds": 1}).model_dump(mode="json")
    content["search"] = {"space": {"method.name": ["fedavg", "fedavgm"]}, "trials": 3}
    facts = {"name": "s", "objectives": {"accuracy": "max"}, "space": ["method.name"]}
    folder = Search.make(tmp_path / "s" / "1", to_yaml(content), facts)
    done = run(small_experiment(train={"rounds": 1}), tmp_path / "elsewhere")
    done.path.rename(folder.path / "trials")
    rows = {row.kind: row for row in list_results(tmp_path)}
    assert list(rows) == ["search"]
    row = rows["search"]
    assert (row.name, row.method, row.status) == ("s", "", "running")  # its method varies
    assert (row.done, row.of) == (1, 3)


def names_in(text: str) -> list[str]:
    return re.findall(r"^\S*/([\w-]+)/[\w-]+  ", text, re.MULTILINE)


def test_the_command(out: Path, runs: dict[str, Run], say: Say) -> None:
    code, text, _ = say("ls", str(out))
    assert code == 0
    assert names_in(text) == ["going-on", "poor", "good", "damaged"]
    score = runs["good"].rounds["accuracy"].iloc[-1]
    assert re.search(
        rf"good/\S+ +run +fedavg +finished +4/4 rounds +accuracy {score:.4f} +2026-01-01 12:00 "
        rf"+{runs['good'].result_hash}",
        text,
    )


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--sort", "name"), ["damaged", "going-on", "good", "poor"]),
        (("--sort", "score", "--status", "finished"), ["good", "poor"]),
        (("--method", "fedavgm"), ["poor"]),
        (("--status", "damaged"), ["damaged"]),
    ],
)
def test_sorted_and_filtered(out: Path, say: Say, words: list[str], names: list[str]) -> None:
    code, text, _ = say("ls", str(out), *words)
    assert code == 0
    assert names_in(text) == names


def test_json(out: Path, runs: dict[str, Run], say: Say) -> None:
    rows = json.loads(say("ls", str(out), "--json")[1])
    assert [row["name"] for row in rows[:3]] == ["going-on", "poor", "good"]
    assert rows[2]["folder"] == str(runs["good"].path)
    assert rows[2]["result_hash"] == runs["good"].result_hash
    assert rows[3]["score"] is None


def test_nothing_to_list(out: Path, say: Say) -> None:
    code, _, complaint = say("ls")
    assert (code, complaint) == (2, "error: runs: there is no such folder\n")
    code, _, complaint = say("ls", str(out), "--sort", "scores")
    assert (code, complaint) == (
        2,
        "error: --sort: there is no order 'scores'; did you mean 'score'?\n",
    )
    code, text, _ = say("ls", str(out), "--status", "failed")
    assert code == 0
    assert "nothing to list" in text


def test_an_odd_folder_is_listed_with_the_others(tmp_path: Path, say: Say) -> None:
    made = small_experiment(train={"rounds": 1})
    good = run(made, tmp_path / "runs" / "[bold]").path
    content = {**made.model_dump(mode="json"), "grid": {"axes": {"partition.alpha": [0.1]}}}
    odd = grid_in_process(content, tmp_path / "runs")
    (odd / "experiment.yaml").unlink()
    (odd / "experiment.yaml").mkdir()
    found = {tmp_path / "runs" / row.folder: row.status for row in list_results(tmp_path / "runs")}
    assert found == {odd: "damaged", good: "finished"}
    _, text, _ = say("ls", str(tmp_path / "runs"))
    assert "[bold]" in re.sub(r"\s", "", text)
