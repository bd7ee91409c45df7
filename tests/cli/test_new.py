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


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("torch", "'torch' is the name of an installed module; choose another one"),
        ("MyMethod", "'MyMethod' cannot be the name of a Python module"),
        ("MyMethod", "lower-case letters, digits and _; for example my_method"),
        ("my method", "for example my_method"),
        ("2nd", "for example my_2nd"),
        ("class", "for example my_class"),
        ("../elsewhere", "for example elsewhere"),
        ("é", "for example my"),
    ],
)
def test_names_that_cannot_be_imported(say: Say, name: str, complaint: str) -> None:
    code, _, said = say("new", "method", name)
    assert code == 2
    assert complaint in said
    assert not list(Path().iterdir())


@pytest.mark.parametrize("there", ["mine.py", "mine.yaml", "test_mine.py"])
def test_nothing_is_overwritten(say: Say, there: str) -> None:
    Path(there).write_text("precious")
    code, _, said = say("new", "model", "mine")
    assert (code, said) == (2, f"error: {there}: exists; nothing was written\n")
    assert Path(there).read_text() == "precious"
    assert len(list(Path().iterdir())) == 1


def test_kinds_are_named(say: Say) -> None:
    code, _, said = say("new", "metod", "mine")
    assert (code, said) == (2, "error: there is no template 'metod'; did you mean 'method'?\n")
