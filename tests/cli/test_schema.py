"""The JSON schema says yes to every experiment file of the repository, and no to typos."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import fedsim
from fedsim.cli.schema import REGISTRIES, experiment_schema, type_in_words
from fedsim.config.file import RawConfig
from fedsim.errors import ExperimentError

FOLDER = Path(fedsim.__file__).parents[1] / "experiments"
schema = cache(experiment_schema)
check = cache(lambda: jsonschema.Draft202012Validator(schema()))
FILES = {str(path.relative_to(FOLDER)): path for path in sorted(FOLDER.rglob("*.yaml"))}

SMALL: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"kind": "dirichlet", "clients": 10, "alpha": 0.5},
    "model": {"name": "mlp", "hidden": [32]},
    "method": {"name": "fedprox", "mu": 0.1},
    "train": {"rounds": 3, "optimizer": {"lr": 0.1}},
}


def with_value(key: str, value: Any) -> dict[str, Any]:
    return dict(RawConfig(copy.deepcopy(SMALL)).changed({key: value}, "the test").content)


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("name", FILES)
def test_it_admits_the_experiments_of_the_repository(name: str) -> None:
    check().validate(RawConfig.read(FILES[name]).content)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("method.name", "own.module:Mine"),
        ("method", {"name": "own_module:Mine", "anything": 1}),
        ("explain", {"explainers": ["gradient", {"name": "occlusion", "size": 2}]}),
        ("explain", {"explainers": ["own_module:Mine"]}),
        ("search", {"space": {"method.mu": [0.1, 1]}, "objectives": {"accuracy": "max"}}),
        ("engine.actors", "auto"),
        ("engine.actors", 2),
        ("objective", None),
    ],
)
def test_it_admits(key: str, value: Any) -> None:
    check().validate(with_value(key, value))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trian", {"rounds": 3}),
        ("train.round", 3),
        ("train.rounds", 0),
        ("train.rounds", "many"),
        ("train.optimizer.learning_rate", 0.1),
        ("train.optimizer.name", "sdg"),
        ("method.name", "fedprxo"),
        ("method.nu", 0.1),
        ("partition.alhpa", 0.1),
        ("partition", {"kind": "dirichlet", "clients": 10}),
        ("model.name", "own model"),
        ("explain", {"explainers": [{"name": "occlusion", "sise": 2}]}),
        ("explain", {"explainers": ["oclusion"]}),
        ("explain", {"explainers": ["tasks"]}),  # gives no relevances
        ("grid", {"axis": {"seed": [1]}}),
        ("search", {"space": {}, "objectives": {"accuracy": "highest"}}),
        ("loggers", ["tensorbord"]),
    ],
)
def test_it_refuses_what_fedsim_refuses(key: str, value: Any) -> None:
    content = with_value(key, value)
    assert not check().is_valid(content)
    if key not in ("grid", "search"):  # which have loaders of their own
        with pytest.raises(ExperimentError):
            fedsim.Experiment.from_dict(content)


def test_a_section_is_missing_unless_axes_may_bring_it() -> None:
    content = {key: section for key, section in SMALL.items() if key != "method"}
    assert not check().is_valid(content)
    variants = {"avg": {"method.name": "fedavg"}, "prox": {"method.name": "fedprox"}}
    check().validate({**content, "grid": {"axes": {"method": variants}}})


def test_every_key_and_section_has_a_description() -> None:
    lacking = []
    for name, section in {"": schema(), **schema()["$defs"]}.items():
        if not section.get("description"):
            lacking.append(name)
        keys = section.get("properties", {}).items()
        lacking += [f"{name}.{key}" for key, node in keys if not node.get("description")]
    assert not lacking


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.what)
def test_every_component_is_an_alternative(registry: Any) -> None:
    names = {
        node["properties"][registry.key]["const"]
        for node in schema()["$defs"].values()
        if "const" in node.get("properties", {}).get(registry.key, {})
    }
    assert {name for name, _ in registry.items()} <= names


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        ("Train", "rounds", "int ≥ 1"),
        ("FedProx", "mu", "float ≥ 0"),
        ("Optimizer", "name", "sgd | adam | adamw"),
        ("Optimizer", "betas", "[float, float]"),
        ("Mlp", "hidden", "list of int ≥ 1"),
        ("FedXDS", "attribution", "component"),
        ("Explain", "explainers", "list of str | component"),
        ("EngineSettings", "actors", "int ≥ 1 | auto"),
        ("SearchSettings", "objectives", "mapping to max | min"),
        ("Evaluate", "metrics", "list of str"),
    ],
)
def test_types_are_said_in_words(section: str, key: str, words: str) -> None:
    definitions: dict[str, Any] = schema()["$defs"]
    assert type_in_words(definitions[section]["properties"][key], definitions) == words
