"""The core knows no resident, and no import runs upward."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fedsim
from fedsim.adversaries import attacks
from fedsim.aggregators import aggregators
from fedsim.data import datasets, partitions
from fedsim.explain.attribution import attributions
from fedsim.methods import methods
from fedsim.models import models
from fedsim.objectives import objectives

PACKAGE = Path(fedsim.__file__).parent

# What every run goes through, whatever it learns.
CORE = sorted(
    [
        *(PACKAGE / name for name in ("simulate.py", "prepare.py", "records.py", "experiment.py")),
        *(PACKAGE / name for name in ("launch.py", "methods/method.py", "methods/learns.py")),
        *(PACKAGE / "objectives" / name for name in ("objective.py", "slices.py")),
        *(PACKAGE / "federation").glob("*.py"),
        *(PACKAGE / "training").glob("*.py"),
    ]
)
# Modules that hold residents; their contracts are in others.
RESIDENTS = {
    *(f"fedsim.methods.{name}" for name in ("fedavg", "fedxds", "xpfl", "fedweit", "openfl_xai")),
    *(f"fedsim.models.{name}" for name in ("networks", "rationale", "text", "tsk", "tree_rules")),
    *(f"fedsim.data.{name}" for name in ("sources", "text_sources", "reviews", "text", "files")),
    *(f"fedsim.objectives.{name}" for name in ("classification", "regression", "rationales")),
    *(f"fedsim.explain.{name}" for name in ("attribution", "mimic", "rules", "tasks", "tree")),
}
# Names of residents that are words of the field as well.
WORDS = {"local", "tasks", "gradient", "text", "random", "rules", "column", "natural", "iid"}
WORDS |= {"file", "folder", "table", "Table", "Gradient"}
# Kinds of data.
KINDS = {"document", "documents", "image", "images", "pixels", "rationale", "token", "tokens"}

# From the bottom: a package may import those before it, and itself.
LAYERS = [
    {"arguments", "errors", "atomic", "extras", "hardware", "modules", "registry", "rng", "words"}
    | {"_torchvision"},
    {"config_file", "data"},
    {"objectives"},
    {"models"},
    {"training"},
    {"devices", "privacy", "explain", "codecs", "aggregators", "adversaries"},
    {"cluster"},
    {"federation"},
    {"methods"},
    {"experiment"},
    {"results"},
    {"prepare", "progress", "records"},
    {"simulate"},
    {"launch"},
    {"analysis", "extend"},
    {"sweep"},
    {"schema", "testing"},
    {"cli"},
]
LEVEL = {name: k for k, layer in enumerate(LAYERS) for name in layer}


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


def test_the_architecture_page_has_every_package_in_its_place() -> None:
    """A row's packages are above those below it; within a row, left of what they import."""
    page = (PACKAGE.parent / "docs" / "concepts" / "architecture.md").read_text()
    rows = [re.findall(r"`fedsim\.(\w+)`", line.split("|")[1]) for line in page.splitlines()
            if line.startswith("| `fedsim.")]  # fmt: skip
    listed = [name for row in rows for name in row]
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= set(listed)
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for module in imports_of(ast.parse(path.read_text())) if own in listed else ():
            other = module.split(".")[1]
            if other in listed and listed.index(other) < listed.index(own):
                wrong.append(f"{path} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_no_import_runs_upward() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        own = relative.parts[0].removesuffix(".py")
        if own in ("__init__", "__main__"):
            continue
        assert own in LEVEL, f"{relative} is in no layer"
        for module in imports_of(ast.parse(path.read_text())):
            other = module.split(".")[1]
            if LEVEL[other] > LEVEL[own]:
                wrong.append(f"{relative} imports {module}")
    assert not wrong, "\n".join(wrong)
