"""The core knows no resident, and no import runs upward."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import fedsim
from experiments import federation, small_experiment
from fedsim.conditions.adversaries import attacks
from fedsim.conditions.aggregators import aggregators
from fedsim.data import datasets, partitions
from fedsim.experiment import Experiment
from fedsim.explain.explainers.attribution import attributions
from fedsim.federation import Federation
from fedsim.methods import methods
from fedsim.models import models
from fedsim.objectives import objectives
from fedsim.simulate import initial_state

PACKAGE = Path(fedsim.__file__).parent

# What every run goes through, whatever it learns.
CORE = sorted(
    [
        *(PACKAGE / name for name in ("simulate.py", "experiment.py", "results/records.py")),
        *(PACKAGE / "launch" / name for name in ("prepare.py", "run.py")),
        *(PACKAGE / "methods" / name for name in ("method.py", "learns.py")),
        *(PACKAGE / "objectives" / name for name in ("objective.py", "slices.py")),
        *(PACKAGE / "federation").glob("*.py"),
        *(PACKAGE / "training").glob("*.py"),
    ]
)
# Modules that hold residents; their contracts are in others.
RESIDENTS = {
    *(f"fedsim.methods.{name}" for name in ("fedavg", "fedxds", "xpfl", "fedweit", "openfl_xai")),
    *(f"fedsim.models.{name}" for name in ("networks", "rationale", "text", "tsk", "tree_rules")),
    *("fedsim.data.sources", "fedsim.data.text", "fedsim.explain.explainers"),
    *(f"fedsim.objectives.{name}" for name in ("classification", "regression", "rationales")),
}
# Names of residents that are words of the field as well.
WORDS = {"local", "tasks", "gradient", "text", "random", "rules", "column", "natural", "iid"}
WORDS |= {"file", "folder", "table", "Table", "Gradient", "shapes"}
# Kinds of data.
KINDS = {"document", "documents", "image", "images", "pixels", "rationale", "token", "tokens"}
KINDS |= {"concept", "concepts"}

# From the bottom: a package imports only those before it, and itself.
LAYERS = [
    *("errors", "support", "config", "data", "objectives", "models", "training", "explain"),
    *("cluster", "federation", "conditions", "methods", "experiment", "results", "simulate"),
    *("launch", "analysis", "sweep", "viewer", "testing", "__init__", "cli", "__main__"),
]


def names_in(tree: ast.Module) -> dict[str, int]:
    """Identifiers and strings, but for docstrings, and the line of each."""
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found[node.id] = node.lineno
        elif isinstance(node, ast.Attribute):
            found[node.attr] = node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node.lineno
        elif isinstance(node, ast.arg):
            found[node.arg] = node.lineno
        elif isinstance(node, ast.alias):
            found[node.name.rpartition(".")[2]] = 0
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None  # a docstring
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found[node.value] = node.lineno
    return found


def imports_of(tree: ast.Module) -> set[str]:
    """Modules of the package that are imported anywhere in the file, for types alone or not."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {module for module in found if module.startswith("fedsim.")}


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_core_names_no_resident(path: Path) -> None:
    registries = (methods, models, datasets, partitions, attributions, objectives)
    registries += (aggregators, attacks)
    components = [item for registry in registries for item in registry.items()]
    residents = {name for name, _ in components} | {kind.__name__ for _, kind in components}
    tree = ast.parse(path.read_text())
    found = names_in(tree)
    named = {name: line for name, line in found.items() if name in residents - WORDS}
    assert not named, f"{path}: names of residents, and their lines: {named}"
    kinds = {name: line for name, line in found.items() if KINDS & set(name.lower().split("_"))}
    assert not kinds, f"{path}: kinds of data, and their lines: {kinds}"
    imported = imports_of(tree)
    wrong = {m for m in imported if any(m == r or m.startswith(r + ".") for r in RESIDENTS)}
    assert not wrong, f"{path}: imports {wrong}"


def module_of(path: Path) -> str:
    return ".".join(("fedsim", *path.relative_to(PACKAGE).with_suffix("").parts))


MODULES = {module_of(path).removesuffix(".__init__"): path for path in PACKAGE.rglob("*.py")}


def modules_imported(path: Path) -> set[str]:
    """As `imports_of`, with the module that a name comes from where it is one."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in MODULES else node.module for name in names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    if module_of(path) == "fedsim.methods.__init__":  # imports all of them by their files
        found.update(name for name in MODULES if name.rpartition(".")[0] == "fedsim.methods")
    return found & MODULES.keys()


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """What each module of fedsim imports of fedsim."""
    return {module: modules_imported(path) for module, path in MODULES.items()}


def layer(module: str) -> int:
    return LAYERS.index(module.split(".")[1] if "." in module else "__init__")


def test_no_import_runs_upward(imports: dict[str, set[str]]) -> None:
    """Imports inside functions and for types alone included."""
    assert [
        f"{module} imports {other}"
        for module, imported in sorted(imports.items())
        for other in sorted(imported)
        if layer(other) > layer(module)
    ] == []


def test_no_imports_in_a_circle(imports: dict[str, set[str]]) -> None:
    assert circles(imports) == []


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Those who import each other, directly or through others."""
    reached = {name: set(others) for name, others in imports.items()}
    for through in imports:
        for others in reached.values():
            if through in others:
                others |= reached[through]
    alike = {frozenset(o for o in reached[n] if n in reached[o]) for n in imports}
    return sorted(sorted(names) for names in alike if names)


def test_loose_modules() -> None:
    """What has no package of its own is what a newcomer should meet first."""
    loose = {path.stem for path in PACKAGE.glob("*.py")}
    assert loose == {"__init__", "__main__", "errors", "experiment", "simulate", "testing"}


def test_a_method_asks_for_few_things() -> None:
    """What a method's author has to know of the federation, and read of the package."""
    names = [name for name in vars(Federation) if not name.startswith("_")]
    assert len({*names, "server"}) <= 16
    path = ("simulate.py", "methods/fedavg.py", "methods/method.py", "federation/federation.py")
    lines = {name: len((PACKAGE / name).read_text().splitlines()) for name in path}
    assert lines["federation/federation.py"] <= 350
    assert sum(lines.values()) <= 800


def test_the_federation_has_no_condition() -> None:
    """It imports none, and has no attribute, key or name of a section that is one."""
    # `explain` is also what methods do with explanations of their own, `adversaries` a column.
    sections = {"devices", "uplink", "downlink", "aggregation", "privacy", "secure_aggregation"}
    assert sections < Experiment.model_fields.keys()
    for path in sorted((PACKAGE / "federation").glob("*.py")):
        tree = ast.parse(path.read_text())
        assert not {m for m in imports_of(tree) if m.startswith("fedsim.conditions")}, path
        found = {name: line for name, line in names_in(tree).items() if name in sections}
        assert not found, f"{path}: {found}"


def calls_of_a_client(**sections: Any) -> Counter[str]:
    """Calls of fedsim's functions that one more client in a cohort of FedAvg takes."""
    experiment = small_experiment(train={"batch_size": 10_000}, **sections)
    fed, found = federation(experiment), []
    state = initial_state(fed.runner, experiment)
    for cohort in (range(4), range(9)):
        calls = Counter[str]()

        def note(frame: FrameType, event: str, argument: Any, calls: Counter[str] = calls) -> None:
            path = Path(frame.f_code.co_filename)
            if event == "call" and path.is_relative_to(PACKAGE):
                calls[f"{path.relative_to(PACKAGE)}:{frame.f_code.co_qualname}"] += 1

        fed.runner.begin(1)
        sys.setprofile(note)
        try:
            fed.mean(experiment.method.local_update, cohort, weights=state.weights)
        finally:
            sys.setprofile(None)
        found.append(calls)
    few, many = found
    further = many - few
    assert not [name for name, count in further.items() if count % 5]
    return Counter({name: count // 5 for name, count in further.items()})


def test_no_condition_is_called_where_none_is_set() -> None:
    plain = calls_of_a_client()
    assert not [name for name in plain if name.startswith("conditions/")]
    assert sum(plain.values()) <= 140  # a client of one step in all; fewer are welcome
    masked = calls_of_a_client(secure_aggregation={})
    assert any(name.startswith("conditions/secure.py") for name in masked)


def test_the_architecture_page_has_every_package_in_its_place() -> None:
    """From the top, as here."""
    page = (PACKAGE.parent / "docs" / "concepts" / "architecture.md").read_text()
    listed = re.findall(r"^\| `fedsim\.(\w+)` \|", page, re.MULTILINE)
    unlisted = {"__init__", "__main__"}
    assert listed == [name for name in reversed(LAYERS) if name not in unlisted]
