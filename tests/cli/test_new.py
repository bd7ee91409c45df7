"""What `fedsim new` writes works, and passes the tests that it writes."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from experiments import Say
from fedsim.cli.new import KINDS


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"experiment"}))
def test_a_component_passes_its_own_tests(
    kind: str, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"started_{kind}"
    code, text, complaint = say("new", kind, name)
    assert code == 0, complaint
    assert f"\nto run it:\n  fedsim run {name}.yaml\n" in text
    assert text.endswith(f"to test it:\n  python -m pytest test_{name}.py\n")
    monkeypatch.syspath_prepend(tmp_path)
    written = import_module(f"test_{name}")
    tests = [test for word, test in vars(written).items() if word.startswith("test_")]
    assert tests
    for number, test in enumerate(tests):
        takes_folder = "tmp_path" in inspect.signature(test).parameters
        test(*[tmp_path / f"runs-{number}"] * takes_folder)


def test_an_experiment_runs(say: Say) -> None:
    code, text, _ = say("new", "experiment", "first")
    assert code == 0
    assert text == "written: first.yaml\n\nto run it:\n  fedsim run first.yaml\n"
    code, text, complaint = say("run", "first.yaml", "engine.kind=local", "train.rounds=1")
    assert code == 0, complaint
    assert "run folder: runs/first/" in text


@pytest.mark.parametrize("there", ["mine.py", "mine.yaml", "test_mine.py"])
def test_nothing_is_overwritten(say: Say, there: str) -> None:
    Path(there).write_text("precious")
    code, _, said = say("new", "model", "mine")
    assert (code, said) == (2, f"error: {there}: exists; nothing was written\n")
    assert Path(there).read_text() == "precious"
    assert len(list(Path().iterdir())) == 1
