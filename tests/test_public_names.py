"""What `dir()` shows of documented classes and their objects is documented, name by name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import fedsim
from experiments import small_experiment
from fedsim.analysis.replay import ModelSnapshot

REFERENCE = Path(fedsim.__file__).parents[1] / "docs" / "reference"


def found(path: str) -> Any:
    """What is at a dotted path of the reference."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), name)


def documented_classes() -> list[type]:
    """Those of the reference, and those that `fedsim` exports."""
    paths = [f"fedsim.{name}" for name in fedsim.__all__]
    for page in sorted(REFERENCE.glob("api*.md")):
        paths += re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.M)
    return list(dict.fromkeys(one for one in map(found, paths) if isinstance(one, type)))


def public_names(one: type) -> set[str]:
    """Of a class and its objects, without those of classes that are not fedsim's."""
    names: set[str] = set()
    for base in one.__mro__:
        if base.__module__.startswith("fedsim."):
            names |= {*vars(base), *inspect.get_annotations(base)}
            init = vars(base).get("__init__")
            if inspect.isfunction(init) and not dataclasses.is_dataclass(base):
                names |= set(re.findall(r"self\.(\w+)\b[^=\n]* = ", inspect.getsource(init)))
    return {name for name in names if not name.startswith("_")} - {"model_config"}


def explained_names(one: type) -> set[str]:
    """What has a docstring, or is listed in that of a class."""
    names: set[str] = set()
    for base in one.__mro__:
        text = inspect.cleandoc(vars(base).get("__doc__") or "")
        for block in re.findall(r"^(?:Args|Attributes):\n((?: .*\n?|\n)*)", text, re.M):
            for entry in re.findall(r"^ {4}([\w, ]+): ", block, re.M):
                names |= set(entry.split(", "))
        for name, value in vars(base).items():
            if isinstance(value, property | cached_property | staticmethod | classmethod):
                documented = bool(value.__doc__)
            else:
                documented = inspect.isfunction(value) and bool(value.__doc__)
            names |= {name} if documented else set()
    return names | {"name"}  # of a component


@pytest.mark.parametrize("one", documented_classes(), ids=lambda one: one.__qualname__)
def test_every_public_name_is_documented(one: type) -> None:
    assert not public_names(one) - explained_names(one)


def test_so_is_what_objects_have(tmp_path: Path) -> None:
    run = fedsim.run(small_experiment(train={"rounds": 1}), tmp_path, progress=False)
    snapshot = ModelSnapshot.of(run)
    of_rows = fedsim.explanations(run, "gradient", row=[0])
    for each in (run, snapshot, snapshot.again, of_rows, of_rows[0]):
        shown = {name for name in dir(each) if not name.startswith("_")}
        assert shown <= public_names(type(each)), type(each)
        assert shown <= explained_names(type(each)), type(each)
