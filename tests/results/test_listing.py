"""`fedsim ls` lists what is there, in order."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from made import Cell, classification, made_grid

from experiments import Say, small_experiment
from fedsim import Run
from fedsim.config.file import to_yaml
from fedsim.results.folder import SearchFolder
from fedsim.results.listing import list_results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Two finished runs, one that goes on, and one that is damaged."""
    out = tmp_path_factory.mktemp("listed") / "runs"
    found = {}
    for day, name in enumerate(("good", "poor", "going-on", "damaged"), 1):
        facts = {"created": f"2026-01-0{day}T12:00:00+0000"}
        facts |= {"status": "running"} if name == "going-on" else {}
        method = {"name": "fedavgm" if name == "poor" else "fedavg"}
        path = classification(
            out / name / "one", 1 / (day + 1), name=name, method=method, facts=facts,
            train={"rounds": 6},
        )  # fmt: skip
        found[name] = Run.open(path)
    for name in ("manifest.json", "manifest.copy.json"):
        (found["damaged"].path / name).write_text("{")
    return found


@pytest.fixture(scope="module")
def out(runs: dict[str, Run]) -> Path:
    return runs["good"].path.parents[1]


def test_of_each_run_what_matters_the_latest_first(runs: dict[str, Run], out: Path) -> None:
    rows = list_results(out)
    assert [row.folder.parts[0] for row in rows] == ["going-on", "poor", "good", "damaged"]
    assert [row.status for row in rows] == ["running", "finished", "finished", "damaged"]
    good = rows[2]
    assert out / good.folder == runs["good"].path
    assert (good.kind, good.name, good.method) == ("run", "good", "fedavg")
    assert (good.done, good.of, good.metric, good.score) == (6, 6, "accuracy", 0.5)
    assert good.result_hash == runs["good"].result_hash


def test_a_grid_and_a_search_are_one_row_each(tmp_path: Path, runs: dict[str, Run]) -> None:
    good = runs["good"].path
    cells: list[Cell] = [({"partition.alpha": alpha}, 0, good) for alpha in (0.1, 1.0)]
    made_grid(tmp_path / "g" / "2", cells, content=small_experiment().to_yaml())
    content = small_experiment(train={"rounds": 1}).model_dump(mode="json")
    content["search"] = {"space": {"method.name": ["fedavg", "fedavgm"]}, "trials": 3}
    facts = {"name": "s", "objectives": {"accuracy": "max"}, "space": ["method.name"]}
    search = SearchFolder.make(tmp_path / "s" / "1", to_yaml(content), facts)
    shutil.copytree(good, search.path / "trials" / "one")
    rows = {row.kind: row for row in list_results(tmp_path)}
    assert {row.folder.parts[0] for row in rows.values()} == {"g", "s"}
    told = {
        kind: (row.name, row.method, row.status, row.score, row.done, row.of)
        for kind, row in rows.items()
    }
    assert told["grid"] == ("g", "fedavg", "finished", None, 2, 2)
    assert told["search"] == ("s", "", "running", None, 1, 3)  # its method varies


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ((), ["going-on", "poor", "good", "damaged"]),
        (("--sort", "name"), ["damaged", "going-on", "good", "poor"]),
        (("--sort", "score", "--status", "finished"), ["good", "poor"]),
        (("--method", "fedavgm"), ["poor"]),
        (("--status", "damaged"), ["damaged"]),
    ],
)
def test_sorted_and_filtered(
    out: Path, runs: dict[str, Run], say: Say, words: list[str], names: list[str]
) -> None:
    text = say.printed("ls", str(out), *words)
    assert re.findall(r"^\S*/([\w-]+)/[\w-]+  ", text, re.MULTILINE) == names
    assert ("good" in names) == bool(
        re.search(
            r"good/\S+ +run +fedavg +finished +6/6 rounds +accuracy 0.5000 +2026-01-01 12:00 "
            rf"+{runs['good'].result_hash}",
            text,
        )
    )
    rows = json.loads(say("ls", str(out), *words, "--json")[1])
    found = {row["name"]: (row["folder"], row["score"], row["result_hash"]) for row in rows}
    if "good" in names:
        assert found["good"] == (str(runs["good"].path), 0.5, runs["good"].result_hash)
    if "damaged" in names:
        assert rows[names.index("damaged")]["score"] is None


def test_nothing_to_list(out: Path, say: Say) -> None:
    assert "nothing to list" in say.printed("ls", str(out), "--status", "failed")


def test_an_odd_folder_is_listed_with_the_others(
    tmp_path: Path, runs: dict[str, Run], say: Say
) -> None:
    good = shutil.copytree(runs["good"].path, tmp_path / "runs" / "[bold]" / "small" / "1")
    odd = made_grid(tmp_path / "runs" / "odd" / "1", [({"alpha": 0.1}, 0, good)])
    (odd / "experiment.yaml").unlink()
    (odd / "experiment.yaml").mkdir()
    found = {tmp_path / "runs" / row.folder: row.status for row in list_results(tmp_path / "runs")}
    assert found == {odd: "damaged", good: "finished"}
    _, text, _ = say("ls", str(tmp_path / "runs"))
    assert "[bold]" in re.sub(r"\s", "", text)
