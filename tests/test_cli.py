"""What a person sees on the terminal."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small import small_experiment

from fedsim import cli, load
from fedsim._torchvision import import_torchvision
from fedsim.data import datasets, partitions
from fedsim.methods import methods
from fedsim.models import models

Say = Callable[..., tuple[object, str, str]]  # exit code, stdout, stderr


@pytest.fixture
def say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Say:
    """Run the command line, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(small_experiment(train={"rounds": 3}).to_yaml())

    def say(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedsim", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (ended.value.code, *capsys.readouterr())

    return say


@pytest.mark.parametrize(
    ("sort", "registry"),
    [("methods", methods), ("datasets", datasets), ("models", models), ("partitions", partitions)],
)
def test_list_names_everything_with_keys_and_first_lines(
    say: Say, sort: str, registry: Any
) -> None:
    code, text, _ = say("list", sort)
    assert code == 0
    for name, component in registry.items():
        assert re.search(rf"^{name}\b", text, re.MULTILINE)
        assert component.__doc__.split()[0] in text
        for key in component.model_fields.keys() - {registry.key}:
            assert key in text


def test_list_of_something_unknown(say: Say) -> None:
    code, _, complaint = say("list", "optimizers")
    assert code == 2
    assert "methods" in complaint


def test_run_prints_rounds_and_a_summary(say: Say) -> None:
    code, text, _ = say("run", "small.yaml", "--out", "here", "--name", "other", "train.rounds=4")
    assert code == 0
    assert re.search(
        r"^round 4/4  accuracy 0\.\d{4}  [\d.]+ kB sent  [\d.]+ rounds/s$", text, re.M
    )
    found = re.search(r"^run folder +(here/other/\S+)", text, re.MULTILINE)
    assert found
    done = load(found[1])
    assert f"result hash               {done.result_hash}" in text
    assert f"accuracy, last round      {done.rounds.accuracy.iloc[-1]:.4f}" in text


def test_a_terminal_gets_one_live_line(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(cli, "out", Console(file=screen, force_terminal=True, width=100))
    code, _, _ = say("run", "small.yaml")
    assert code == 0
    text = screen.getvalue()
    assert "round 3/3" in text
    assert "\x1b[2K" in text  # the line is drawn anew, not printed again
    assert "result hash" in text


def test_data_prints_and_draws_who_holds_what(say: Say) -> None:
    words = ("data", "small.yaml", "partition.clients=40", "partition.min_samples=5")
    code, text, _ = say(*words, "partition.test_fraction=0.2")
    assert code == 0
    assert "… and 10 clients more" in text
    assert "40 clients, 1,437 of 1,437 training examples" in text
    assert Path("small-labels.png").read_bytes().startswith(b"\x89PNG")
    row = next(line for line in text.splitlines() if line.split()[:1] == ["0"])
    cells = [0 if cell == "·" else int(cell) for cell in row.split()]
    assert sum(cells[1:11]) == cells[11] == cells[12] + cells[14]


def test_doctor_says_what_an_experiment_would_get(say: Say) -> None:
    code, text, _ = say("doctor", "small.yaml", "engine.kind=ray", "engine.actors=2")
    assert code == 0
    assert re.search(r"Ray at \S+: 1 node\(s\)", text)
    assert "2 client actor(s) of 1 CPU(s) and 0 GPU(s)" in text
    assert "10 blocks of clients a round, about 5.0 clients an actor" in text


def test_doctor_says_what_does_not_fit(say: Say) -> None:
    code, text, complaint = say(
        "doctor", "small.yaml", "engine.kind=ray", "engine.gpus_per_actor=1"
    )
    assert code == 2
    assert "GPUs" in text
    assert "error: no node can hold a client actor of 1 CPU(s) and 1 GPU(s)" in complaint


def test_torchvision_and_zennit_import_beside_any_torch() -> None:
    assert import_torchvision("torchvision.datasets").MNIST
    assert import_torchvision("zennit.composites").EpsilonPlusFlat
