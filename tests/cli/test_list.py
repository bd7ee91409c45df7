"""`fedsim list`, `fedsim schema`, `fedsim --version` and shell completion."""

from __future__ import annotations

import json
import re
from importlib import import_module
from typing import Any

import pytest

import fedsim
from experiments import Say
from fedsim.cli import PANELS, console
from fedsim.cli.components import KINDS, registered
from fedsim.cli.schema import experiment_schema


def registry_of(kind: str) -> Any:
    return getattr(import_module(KINDS[kind][0]), kind)


def test_the_version(say: Say) -> None:
    assert say("--version") == (0, f"fedsim {fedsim.__version__}\n", "")


@pytest.mark.parametrize("words", [("-h",), ("--help",), ("run", "-h"), ("list", "--help")])
def test_help_by_either_option(say: Say, words: tuple[str, ...]) -> None:
    code, text, _ = say(*words)
    assert code == 0
    assert "Usage: fedsim" in text


def test_help_has_every_command_once_in_a_panel(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, text, _ = say("--help")
    assert code == 0
    assert all(len(line) <= 80 for line in text.splitlines())
    panels = re.split(r"^╭─ (.+?) ─+╮$", text, flags=re.M)[1:]
    shown = {
        title: re.findall(r"^│ (\w+)  ", body, re.M)
        for title, body in zip(panels[::2], panels[1::2], strict=True)
    }
    del shown["Options"]
    assert shown == PANELS
    assert list(shown) == list(PANELS)
    assert next(iter(PANELS)) == "Run"


def test_list_alone_lists_the_kinds(say: Say) -> None:
    code, text, _ = say("list")
    assert code == 0
    assert re.findall(r"^fedsim list (\w+)", text, re.MULTILINE) == [*KINDS, "metrics"]


def test_a_component_is_shown_with_its_docstring_and_keys(say: Say) -> None:
    code, text, _ = say("list", "methods", "fedprox")
    assert code == 0
    assert text.startswith("fedprox (fedsim.methods.fedprox.FedProx)\n\nFedAvg whose clients")
    assert "Args:" not in text
    assert re.search(r"^mu +float ≥ 0 +0.01 +μ, strength of the proximal term", text, re.M)
    code, text, _ = say("list", "partitions", "dirichlet")
    assert re.search(r"^alpha +float > 0 +\(required\) +α, concentration", text, re.M)


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_names_everything_in_80_columns(
    say: Say, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(console.out, "_width", 80)
    code, text, _ = say("list", kind)
    assert code == 0
    assert all(len(line) <= 80 for line in text.splitlines())
    registry = registry_of(kind)
    names = registered(kind)
    assert names == [name for name, _ in registry.items()]
    for _, component in registry.items():
        assert component.__doc__.split()[0] in text
        assert all(key in text for key in component.model_fields.keys() - {registry.key})
    usual = [name for name, component in registry.items() if not component.niche]
    niche = [name for name in names if name not in usual]
    assert re.findall(r"^(\w+)  +\S", text, re.M) == ["name", *usual, *niche]
    after = text.partition("for certain problems or papers:\n")[2]
    assert re.findall(r"^(\w+)  +\S", after, re.M) == niche
    assert bool(niche) == bool(after)
    assert len(text.splitlines()) <= 6 * len(names) + 5


def test_what_is_usual() -> None:
    """Of methods, those that learn any network by any objective."""
    niche = {n for kind in KINDS for n, component in registry_of(kind).items() if component.niche}
    assert not niche & {"fedavg", "fedprox", "scaffold", "ditto", "mnist", "table", "folder"}
    assert not niche & {"digits", "cnn", "mlp", "dirichlet", "iid", "occlusion"}
    assert niche > {"fedrnl", "openfl_xai", "fedweit", "hetlora", "beer", "trec50", "own_tasks"}


def test_a_list_names_the_keys_and_their_defaults(say: Say) -> None:
    _, text, _ = say("list", "partitions")
    assert re.search(r"^ +test_fraction=0.0,.* clients, alpha, min_samples=\d+", text, re.M)
    assert re.search(r"^ +lam1=0.001, .*compat={…}", say("list", "methods")[1], re.M)


def test_so_is_one_of_the_users_own(say: Say) -> None:
    code, text, _ = say("list", "methods", "own_components:Only")
    assert code == 0
    assert "A cohort of one client." in text
    assert re.search(r"^client +int +0", text, re.MULTILINE)


@pytest.mark.parametrize("kind", KINDS)
def test_components_of_every_kind_can_be_shown(say: Say, kind: str) -> None:
    (*_, (name, component)) = registry_of(kind).items()
    code, text, _ = say("list", kind, name)
    assert code == 0
    assert {*re.findall(r"^(\w+)  ", text, re.MULTILINE)} >= {
        key for key in component.model_fields if key not in ("name", "kind")
    }


def test_json_for_scripts(say: Say) -> None:
    assert json.loads(say("list", "--json")[1])["methods"] == registered("methods")
    (first, *_) = json.loads(say("list", "partitions", "--json")[1])
    assert first["name"] == "aspects"
    assert first["description"]
    keys = json.loads(say("list", "methods", "fedprox", "--json")[1])["properties"]
    assert keys["mu"]["default"] == 0.01
    assert json.loads(say("schema")[1]) == json.loads(json.dumps(experiment_schema()))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fedsim re", {"resume", "report"}),
        ("fedsim run --pri", {"--print-config"}),
        ("fedsim list me", {"methods", "metrics"}),
        ("fedsim list methods fedavgm", {"fedavgm"}),
        ("fedsim explain runs --explainer oc", {"occlusion"}),
        ("fedsim verify runs", set()),  # the shell completes paths
    ],
)
def test_completion(
    say: Say, monkeypatch: pytest.MonkeyPatch, words: str, expected: set[str]
) -> None:
    monkeypatch.setenv("_FEDSIM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    code, text, _ = say()
    assert code == 0
    assert set(text.split()) == expected
