"""Runs that break off say why, and how they go on; clients that fail can be left out."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from networks import regularised
from refusals import experiment

from experiments import Say, small_experiment
from fedsim import Run, load, run
from fedsim.errors import ExperimentError, MethodError
from fedsim.launch.prepare import prepare
from fedsim.methods.fedavg import FedAvg


@pytest.fixture(autouse=True)
def _small_experiment(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("small.yaml").write_text(experiment({}))


def the_run(out: str = "runs") -> Run:
    (path,) = Path(out).glob("*/*")
    return load(path)


PLACE = r"\(own_mistakes.py, line \d+\)"
OTHER_NAME = {
    4: r"client 2, round 1, local_update: sends vectors of these lengths: {'delta': 35}, client "
    r"0: {'weights': 35}",
    20: r"client 18, round 1, local_update: sends \['weights'\], but earlier clients sent "
    r"\['delta'\]",
}
SHORT = r"client 2, round 1, local_update: 'weights' has {} entries, expected 35, as the server .*"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", f"client 2, round 2, local_update: ValueError: made of cheese {PLACE}"),
        ("no update", "client 0, round 1, local_update: must return an Update, not Tensor"),
        (
            "keeps a word",
            "client 0, round 1, local_update: TypeError: client.state must be a dict, not str",
        ),
        ("complex", "client 0, round 1, local_update: 'weights' has complex numbers"),
        ("server raises", f"round 1: ValueError: made of cheese {PLACE}"),
        ("stateless", "round 1: round must return a State, not ndarray"),
        ("bare init", "init: init must return a State, not ndarray"),
        ("init raises", f"init: KeyError: 'cheese' {PLACE}"),
        ("strangers", f"round 1: IndexError: index 99 is out of bounds .* {PLACE}"),
        *((f"shorter, {clients}", SHORT.format(34)) for clients in (4, 20)),
        *((f"scalar, {clients}", SHORT.format(1)) for clients in (4, 20)),
        *((f"other name, {clients}", message) for clients, message in OTHER_NAME.items()),
    ],
)
def test_code_that_fails(say: Say, how: str, message: str) -> None:
    """With few clients, each has a block of its own; with many, they share blocks."""
    how, _, clients = how.partition(", ")
    code, _, told = say(
        *("run", "small.yaml", f"method={{name: 'own_mistakes:Fails', how: {how}}}"),
        *("train.rounds=2", f"partition.clients={clients or 4}", "checkpoint.every=1"),
    )
    assert code == 1
    error, ended, resume = told.splitlines()
    done = the_run()
    folder = done.path.relative_to(Path.cwd())
    assert re.fullmatch(f"error: {message}", error)
    assert re.fullmatch(
        rf"failed( after round 1)?; traceback in {folder}/log.txt; once fixed, continue with:",
        ended,
    )
    assert resume == f"  fedsim resume {folder}"
    assert done.manifest["status"] == "failed"
    if "round 2" in message:
        assert done.rounds["round"].tolist() == [1]
    assert "Traceback (most recent call last)" in (done.path / "log.txt").read_text()


def test_a_server_function_that_ends_the_process(say: Say) -> None:
    code, _, told = say(
        "run", "small.yaml", "method={name: 'own_mistakes:Fails', how: server exits}"
    )
    assert code == 1
    assert "error: code of the experiment has ended the process (sys.exit)\nfailed" in told


def test_scores_that_are_no_numbers(say: Say, tmp_path: Path) -> None:
    code, _, told = say("run", "small.yaml", "objective={name: own_mistakes:WordsForScores}")
    assert code == 1
    assert "error: round 1, evaluation: TypeError: scores: 'accuracy' is 'good', not a num" in told
    made = small_experiment(evaluate={"metrics": ["own_metrics:vector"]})
    with pytest.raises(MethodError, match="must return a number or a dict of numbers, not an"):
        run(made, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        ("train.optimizer.lr=1e38 train.batch_size=4", "NaN values in 'weights'"),
        ("train.optimizer.lr=1e9", r"values up to \S+ in 'weights'"),
    ],
)
def test_training_that_diverges(say: Say, overrides: str, what: str) -> None:
    code, _, told = say("run", "small.yaml", *overrides.split())
    assert code == 1
    assert re.fullmatch(  # and nothing of `fedsim resume`
        rf"error: training diverged in round 1: client 0: {what}; lower the learning rate\n", told
    )


@pytest.mark.parametrize("clients", [4, 20], ids=["own blocks", "shared blocks"])
def test_skipped_clients_are_recorded_and_left_out(say: Say, clients: int) -> None:
    weights = []
    for method in ("Poisoned", "Without"):
        code, _, told = say(
            *("run", "small.yaml", f"method.name=own_mistakes:{method}", "train.rounds=2"),
            *("train.on_client_error=skip", f"partition.clients={clients}", "--out", method),
        )
        assert (code, told) == (0, "")
        weights.append(the_run(method).weights())
    poisoned = the_run("Poisoned")
    assert poisoned.rounds["failed"].tolist() == [2, 2]
    assert poisoned.rounds["clients"].tolist() == [clients - 2] * 2
    failed = poisoned.clients[poisoned.clients["error"].notna()]
    assert failed["client"].tolist() == [0, 3, 0, 3]
    assert failed["error"].iloc[3].startswith("client 3, round 2, local_update: NaN values in 'o")
    for layer, tensor in weights[0].items():
        assert tensor.allclose(weights[1][layer], atol=1e-7)


def test_a_round_in_which_every_client_fails(say: Say) -> None:
    code, _, told = say(
        *("run", "small.yaml", "train.optimizer.lr=1e38", "train.batch_size=4"),
        "train.on_client_error=skip",
    )
    assert code == 1
    assert "error: round 1: the weights of the cohort's updates sum to 0" in told
    assert "NaN" in told  # nothing else says why: this round is not in the tables


def test_a_picture_that_cannot_be_drawn(say: Say) -> None:
    code, _, told = say("data", "small.yaml", "--picture", "small.yaml/x.png")
    assert (code, told) == (1, "error: small.yaml/x.png: cannot be written: Not a directory\n")


# what a notebook has defined


class Own(FedAvg):
    """As if a notebook had defined it."""


@pytest.mark.parametrize(
    ("section", "content"),
    [
        ("method", {"name": "__main__:Own"}),
        ("model", {"name": "__main__:regularised"}),
        ("method", Own()),
    ],
    ids=["method", "model", "object"],
)
def test_code_of_a_notebook_on_ray(
    section: str, content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = sys.modules["__main__"]
    monkeypatch.setattr(program, "Own", Own, raising=False)
    monkeypatch.setattr(program, "regularised", regularised, raising=False)
    monkeypatch.setattr(Own, "__module__", "__main__")
    made = {**small_experiment().model_dump(mode="json"), section: content}
    name = "regularised" if section == "model" else "Own"
    with pytest.raises(
        ExperimentError,
        match=f"^{section}: {name} is defined in a notebook or in the script that is running, .*; "
        r"put it into a file of its own, or use engine\.kind=local$",
    ):
        run({**made, "engine": {"kind": "ray"}}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    prepare(small_experiment(**{section: content}))


# what does not fit


def test_a_run_in_one_process_that_does_not_fit(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**7))
    code, _, told = say("run", "small.yaml", "model={name: mlp, hidden: [1000, 1000]}")
    assert code == 2
    assert told == (
        "error: engine.kind=local: training takes about 0.0 GB of memory, and 0.0 GB are free; "
        "use a smaller model or a smaller engine.clients_per_step\n"
    )
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("command", "section"),
    [
        ("run", ""),
        ("grid", "grid: {axes: {train.optimizer.lr: [0.1]}}"),
        ("tune", "search: {space: {train.optimizer.lr: [0.1]}, objectives: {accuracy: max}}"),
    ],
)
def test_checkpoints_that_the_disk_has_no_room_for(
    say: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, section: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (10**9, 10**9 - 1000, 1000))
    Path("small.yaml").write_text(experiment({}) + section)
    keep = "checkpoint={keep: all, every: 1}"
    code, _, told = say(command, "small.yaml", "train.rounds=50", keep)
    assert code == 2
    assert re.search(
        r"checkpoint: 51 times the weights, \S+ GB each, are \S+ GB, and 1e-06 GB are free below "
        rf"{tmp_path}\S*; raise checkpoint.every, or set checkpoint.keep=last$",
        told,
    )
    assert not Path("runs").exists()
