"""What a person sees on the terminal."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from own_components import TAGS
from rich.console import Console

from experiments import FOUR, NUMBERS, Finish, Say, grid_in_process, small_experiment
from fedsim import Grid, load
from fedsim.cli import console, look, runs
from fedsim.cli.console import short
from fedsim.results.summary import mean_std


@pytest.fixture(autouse=True)
def small(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(small_experiment(train={"rounds": 3}).to_yaml())


def test_run_prints_rounds_and_a_summary(say: Say) -> None:
    code, text, _ = say("run", "small.yaml", "--out", "here", "--name", "other", "train.rounds=4")
    assert code == 0
    assert re.search(
        r"^round 4/4  accuracy 0\.\d{4}  [\d.]+ kB sent  [\d.]+ rounds/s$", text, re.M
    )
    found = re.search(r"^run folder +(here/other/\S+)", text, re.MULTILINE)
    assert found
    done = load(found[1])
    assert re.search(rf"^result hash +{done.result_hash}$", text, re.MULTILINE)
    last = f"{done.rounds.accuracy.iloc[-1]:.4f}"
    assert re.search(rf"^accuracy, last round +{last}$", text, re.MULTILINE)


def test_scores_of_explanations_are_a_small_table(say: Say) -> None:
    explain = "explain={explainers: [random, gradient], inputs: 2}"
    code, text, _ = say("run", "small.yaml", "train.rounds=1", explain)
    assert code == 0
    table, facts = re.split(r"\n\n", text.partition("explainer ")[2])
    assert "accuracy, last round" in facts
    assert " by random" not in facts
    head, *rows, where = table.splitlines()
    assert head.split("  ")[-1] == "global agreement"
    assert [row.split()[:2] for row in rows] == [
        [name, model] for name in ("random", "gradient") for model in ("global", "cohort")
    ]
    (path,) = Path("runs/small").iterdir()
    last = load(path).rounds.iloc[-1]
    assert rows[1].split()[2:] == [
        f"{last[f'random/client_{score}']:.4f}"
        for score in ("deletion", "insertion", "agreement_rank", "global_agreement_rank")
    ]
    assert max(map(len, rows)) <= 100
    assert where == "all scores: fedsim report, or run.explanations in Python"


def test_a_private_run_says_what_it_has_spent(say: Say) -> None:
    private = "privacy={clip: 1.0, noise_multiplier: 2.0, delta: 1.0e-4}"
    code, text, _ = say("run", "small.yaml", "train.rounds=2", "train.participation=0.5", private)
    assert code == 0
    (path,) = Path("runs/small").iterdir()
    spent = [f"{epsilon:.3g}" for epsilon in load(path).rounds["epsilon"]]
    assert re.findall(r"^round \d/2 .* sent  ε ([\d.]+)\b", text, re.M) == spent
    assert re.search(rf"^privacy +ε {spent[-1]}, δ 0.0001 *$", text, re.M)


def test_a_regression_is_judged_by_r2(say: Say) -> None:
    made = small_experiment(**NUMBERS, train={"rounds": 3, "optimizer": {"lr": 0.01}})
    Path("numbers.yaml").write_text(made.to_yaml())
    code, text, _ = say("run", "numbers.yaml")
    assert code == 0
    (path,) = Path("runs/small").iterdir()
    r2 = load(path).rounds["r2"]
    assert re.search(rf"^round 1/3  R² {r2[0]:.4f}  [\d.]+ kB sent", text, re.M)
    assert re.search(rf"^R², last round +{r2[2]:.4f} *$", text, re.M)
    assert "mean of last" not in text  # of three evaluated rounds
    assert re.search(rf"^R², best +{r2.max():.4f} \(round {r2.idxmax() + 1}\) *$", text, re.M)
    assert "accuracy" not in text


def test_what_is_no_number_or_a_large_one(
    finish: Finish, capsys: pytest.CaptureFixture[str]
) -> None:
    """As R² is where the targets are all the same, or all but the same."""
    done = finish(**NUMBERS, train={"rounds": 3})
    screen = runs._Screen()
    screen.start(done)
    rows: Any = done.rounds.to_dict("records")
    screen.show({**rows[0], "r2": -12345.678})
    screen.show({**rows[2], "r2": math.nan})
    text = capsys.readouterr().out
    assert re.search(r"^round 1/3  R² -12345\.7  [\d.]+ kB sent$", text, re.M)
    assert re.search(r"^round 3/3  [\d.]+ kB sent", text, re.M)


def test_a_grid_of_regressions_is_judged_by_r2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"name": "friedman", "samples": 400, "noise": 0}
    train = {"rounds": 4, "local_epochs": 5, "optimizer": {"name": "adam", "lr": 0.02}}
    content = small_experiment(data=data, partition=FOUR, train=train).model_dump(mode="json")
    content["grid"] = {"axes": {"train.batch_size": [32]}, "seeds": [0, 1], "target": 0.01}
    done = load(grid_in_process(content, tmp_path))
    assert isinstance(done, Grid)
    runs._grid_summary(done)
    text = capsys.readouterr().out
    last = [run.rounds["r2"].iloc[-1] for run in done.runs]
    assert "R²: mean ± standard deviation over seeds" in text
    assert mean_std([np.mean(last)], [np.std(last, ddof=1)])[0] in text
    assert "(2/2)" in text
    assert "accuracy" not in text


def test_the_folder_of_a_run_is_never_cut_off(
    finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = finish(train={"rounds": 1}, name="n" * 90)
    screen = io.StringIO()
    monkeypatch.setattr(console, "out", Console(file=screen, width=80, soft_wrap=True))
    runs._summary(done)
    assert short(done.path) in re.sub(r"\s", "", screen.getvalue())
    assert done.result_hash in screen.getvalue()


def test_a_terminal_gets_one_live_line(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=100)
    for module in (console, runs):
        monkeypatch.setattr(module, "out", terminal)
    code, _, _ = say("run", "small.yaml")
    assert code == 0
    text = screen.getvalue()
    assert "round 3/3" in re.sub(r"\x1b\[[\d;?]*\w", "", text)
    assert "\x1b[2K" in text  # the line is drawn anew, not printed again
    assert "result hash" in text


def test_data_prints_and_draws_who_holds_what(say: Say) -> None:
    words = ("data", "small.yaml", "data.subset=1437", "partition.clients=40")
    code, text, _ = say(*words, "partition.min_samples=5", "partition.test_fraction=0.2")
    assert code == 0
    assert "… and 10 more clients" in text
    assert "40 clients, 1,437 of 1,437 training examples" in text
    assert Path("small-labels.png").read_bytes().startswith(b"\x89PNG")
    row = next(line for line in text.splitlines() if line.split()[:1] == ["0"])
    cells = [0 if cell == "·" else int(cell) for cell in row.split()]
    assert sum(cells[1:11]) == cells[11] == cells[12] + cells[13]


def test_data_of_a_regression_are_counted_by_parts_of_the_range(say: Say) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.random(200), "b": rng.random(200)})
    frame.assign(y=np.linspace(0, 1, 200)).to_csv("numbers.csv", index=False)
    words = ("data", "small.yaml", "data={name: table, path: numbers.csv, target: y}")
    code, text, complaint = say(*words, "partition={kind: quantile, clients: 8}")
    assert code == 0, complaint
    assert text.splitlines()[0] == "features: a, b"
    starts, ends = (line.split() for line in text.splitlines()[2:4])
    assert starts[:2] == ["0.0-", "0.1-"]
    assert ends[:3] == ["client", "0.1", "0.2"]
    assert re.search(r"and [12]\.\d of 10 parts of the target's range on average$", text, re.M)
    assert Path("small-labels.png").read_bytes().startswith(b"\x89PNG")


def test_data_of_many_classes_names_the_most_frequent(say: Say) -> None:
    labels = [f"c{k}" for k in np.repeat(np.arange(40), [10] * 38 + [40, 60])]
    pd.DataFrame({"a": np.arange(len(labels)), "y": labels}).to_csv("many.csv", index=False)
    words = ("data", "small.yaml", "data={name: table, path: many.csv, label: y}")
    code, text, complaint = say(*words, "partition={kind: iid, clients: 1}")
    assert code == 0, complaint
    header, row = (" ".join(line.split()) for line in text.splitlines()[2:4])
    assert header == "client most frequent classes all"
    assert row == "0 c39: 48, c38: 32, c0: 8 40 384"


def test_data_says_how_clients_differ(say: Say) -> None:
    Path("sites").mkdir()
    long = "south-with-a-name-of-thirty-chars"
    for site, age, label in (("north", 0, "yes"), (long, 5, "a class with a long name")):
        table = pd.DataFrame({"age": age + np.arange(20) % 7, "fit": [0, 1] * 10})
        table.assign(y=["no", label] * 10).to_csv(f"sites/{site}.csv", index=False)
    by_site = "partition={kind: natural, column: file}"
    for of in ("label: y", "target: age, features: [fit], scale: standard"):
        data = f"data={{name: table, path: 'sites/*.csv', {of}}}"
        code, text, complaint = say("data", "small.yaml", data, by_site)
        assert code == 0, complaint
        tables = [line for line in text.splitlines() if "a client holds" not in line]
        assert max(map(len, tables)) <= 100
        last = text.partition("how clients differ")[2]
        emd = re.search(r": earth mover's distance \(.*\) +([\d.]+) +([\d.]+)  (.*)$", last, re.M)
        assert emd is not None
        if "label" in of:
            assert emd[3] in ("file north", "north", long)
            assert float(emd[2]) == pytest.approx(0.5, abs=0.1)
            assert re.search(r"^features: standardised mean difference .*, age$", last, re.M)
        else:
            assert "(in units of age)" in emd[0]
            assert 2 < float(emd[2]) < 3  # half the distance of the clients


def test_data_of_several_targets(say: Say) -> None:
    code, text, complaint = say(
        "data", "small.yaml", "data={name: 'own_components:Tagged'}", "partition={kind: iid, "
        "clients: 3}", "objective={name: 'own_components:MultiLabel'}",
    )  # fmt: skip
    assert code == 0, complaint
    assert text.splitlines()[0].split() == ["client", "all"]
    assert re.search(r"^features: standardised mean difference +0\.\d+ ", text, re.M)
    assert text.endswith(f"not drawn, nor compared: labels, as there are {len(TAGS)} targets\n")


class TestDataOfSeveralExperiments:
    def section(self, say: Say, text: str) -> str:
        with Path("small.yaml").open("a") as file:
            file.write(text)
        code, shown, complaint = say("data", "small.yaml", "partition.clients=3")
        assert (code, complaint) == (0, "")
        return shown

    def test_of_a_grid_each_partition_once(self, say: Say) -> None:
        text = self.section(
            say,
            "grid:\n  seeds: [4, 5]\n  axes:\n    train.local_epochs: [1, 2]\n"
            "    partition.alpha: [0.1, 1.0]\n",
        )
        found = re.findall(r"^(partition.*):$", text, re.M)
        assert found == [f"partition.alpha={alpha}" for alpha in (0.1, 1.0)]
        drawn = re.findall(r"^drawn: (\S+)$", text, re.M)
        assert drawn == [f"small-labels-{k}.png" for k in (1, 2)]
        assert all(Path(name).stat().st_size for name in drawn)
        assert text.endswith("partitioned with seed 4, the first of 2\n")

    def test_of_a_grid_that_leaves_the_data_alone_there_is_one(self, say: Say) -> None:
        text = self.section(say, "grid: {axes: {train.local_epochs: [1, 2]}}\n")
        assert text.startswith("client ")
        assert text.endswith("drawn: small-labels.png\n")

    def test_of_a_search_the_bounds(self, say: Say) -> None:
        text = self.section(
            say,
            "search:\n  objectives: {accuracy: max}\n"
            "  space: {partition.alpha: {type: float, low: 0.5, high: 2.0}}\n",
        )
        found = re.findall(r"^(partition.*):$", text, re.M)
        assert found == [f"partition.alpha={alpha}" for alpha in (0.5, 2.0)]

    def test_of_many_the_first(self, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(look, "MOST_VARIANTS", 1)
        text = self.section(say, "grid: {axes: {partition.alpha: [0.5, 1.0, 2.0]}}\n")
        assert "… and 2 more variants: partition.alpha=1.0; partition.alpha=2.0\n" in text
        assert text.count("drawn: ") == 1


def test_doctor_says_what_an_experiment_would_get(say: Say) -> None:
    code, text, complaint = say("doctor", "small.yaml", "engine.kind=ray", "engine.actors=2")
    assert code == 0, complaint
    assert re.search(r"Ray at \S+: 1 node\(s\)", text)
    assert "2 client actor(s) of 1 CPU(s) and 0 GPU(s)" in text
    assert re.search(r"GB of object store; if each client keeps .* 96.4 kB of it$", text, re.M)
    assert "10 blocks of clients a round, about 5.0 clients an actor" in text
    code, text, complaint = say(
        "doctor", "small.yaml", "engine.kind=ray", "engine.gpus_per_actor=1"
    )
    assert code == 2
    assert "GPUs" in text
    assert "error: no node can hold a client actor of 1 CPU(s) and 1 GPU(s)" in complaint


def test_the_summary_of_a_run_as_json(say: Say) -> None:
    code, text, _ = say("run", "small.yaml", "--json")
    assert code == 0
    found = json.loads(text)
    done = load(found["folder"])
    assert (found["status"], found["rounds"]) == ("finished", 3)
    assert found["result_hash"] == done.result_hash
    assert found["accuracy"] == done.rounds["accuracy"].iloc[-1]
