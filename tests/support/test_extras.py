"""Packages that not every installation has: what needs one says how to install it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fedsim
from experiments import Say, small_experiment
from fedsim.launch.prepare import prepare
from fedsim.support.extras import OPTIONAL

PACKAGE = Path(fedsim.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
PRIVACY = {"clip": 1.0, "noise_multiplier": 1.0}


def test_a_search_without_optuna(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fedsim.sweep.search", raising=False)
    monkeypatch.setitem(sys.modules, "optuna", None)
    Path("small.yaml").write_text(small_experiment().to_yaml())
    code, _, complaint = say("tune", "small.yaml")
    assert code == 2
    assert complaint == (
        "error: a search needs optuna, which is not installed: pip install 'fedsim[tune]'\n"
    )


def test_the_schema_needs_no_optuna(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("schema", "sweep.settings", "sweep.search"):
        monkeypatch.delitem(sys.modules, f"fedsim.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, text, _ = say("list", "methods", "fedprox")
    assert code == 0
    assert "mu" in text


def test_clipping_alone_needs_no_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    prepare(small_experiment(privacy={**PRIVACY, "noise_multiplier": 0}))


def extras_of(requirement: str) -> set[str]:
    """Of the form "fedsim[a,b]"."""
    found = re.fullmatch(r"fedsim\[(.*)\]", requirement)
    return set(found[1].split(",")) if found else set()


def name_of(requirement: str) -> str:
    return Requirement(requirement).name


def test_extras_are_those_of_the_project() -> None:
    extras = PROJECT["optional-dependencies"]
    for package, extra in OPTIONAL.values():
        assert package in map(name_of, extras[extra])
        assert package not in map(name_of, PROJECT["dependencies"])
    named = {extra for _, extra in OPTIONAL.values()}
    assert extras_of(extras["all"][0]) == named == extras.keys() - {"all", "dev", "docs"}
    assert extras_of(extras["dev"][0]) == named - {"wandb"} | {"docs"}


# Modules that are of one extra as a whole.
SEARCHES = {"sweep/search.py"}


def test_none_is_imported_before_it_is_needed() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            modules = [alias.name for alias in getattr(node, "names", [])]
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            elif not isinstance(node, ast.Import):
                continue
            place = str(path.relative_to(PACKAGE))
            found += [place for m in modules if m.partition(".")[0] in OPTIONAL]
    assert set(found) == SEARCHES
