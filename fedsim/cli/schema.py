"""The JSON schema of experiment files, for completion and checks in editors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from fedsim.conditions.adversaries import attacks
from fedsim.conditions.aggregators import aggregators
from fedsim.conditions.codecs import codecs
from fedsim.config.registry import OWN, Config, Registry, key_docs, summary
from fedsim.data import datasets, partitions
from fedsim.experiment import Experiment
from fedsim.explain.explainer import FeatureExplainer
from fedsim.explain.explainers import explainers
from fedsim.explain.explainers.attribution import attributions
from fedsim.federation import conditions
from fedsim.methods import methods
from fedsim.models import models
from fedsim.objectives import objectives
from fedsim.sweep.grid import GridSettings
from fedsim.sweep.settings import SearchSettings, ranges

REGISTRIES: tuple[Registry[Any], ...] = (
    *(datasets, partitions, models, methods, objectives, explainers, attributions, codecs, ranges),
    *(aggregators, attacks, conditions),
)
# Classes that stand for any component that extends them.
BASES: dict[type[Config], Registry[Any]] = {
    **{registry.base: registry for registry in REGISTRIES},
    FeatureExplainer: explainers,
}


class _File(Experiment):
    """A fedsim experiment file.

    Args:
        grid: run all combinations of some values (`fedsim grid`).
        search: tune hyper-parameters (`fedsim tune`).
    """

    grid: GridSettings | None = None
    search: SearchSettings | None = None


def experiment_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of experiment files, including grids and searches.

    A section that names a component is one of several alternatives, distinguished by this name:
    fedsim's own components with their keys, defaults and ranges, or `package.module:Name` with any
    keys.

    Example:
        >>> from fedsim.cli.schema import experiment_schema
        >>> train = experiment_schema()["$defs"]["Train"]
        >>> train["properties"]["rounds"]["minimum"]
        1
    """
    root, definitions = _schemas(_File)
    schema = {"$schema": GenerateJsonSchema.schema_dialect, "title": "fedsim experiment", **root}
    # The axes of a grid or a search may bring what the file itself leaves out.
    many = [
        {"required": [section], "properties": {section: {"type": "object"}}}
        for section in ("grid", "search")
    ]
    schema["if"] = {"not": {"anyOf": many}}
    schema["then"] = {"required": schema.pop("required")}
    return {**schema, "$defs": definitions}


def component_schema(component: type[Config]) -> dict[str, Any]:
    root, definitions = _schemas(component)
    return {**root, "$defs": definitions}


def _schemas(model: type[Config]) -> tuple[JsonSchemaValue, dict[str, JsonSchemaValue]]:
    components = [c for registry in REGISTRIES for _, c in registry.items()]
    every = dict.fromkeys([model, *components, *BASES])
    references, generated = models_json_schema(
        [(one, "validation") for one in every], schema_generator=_Generator
    )
    definitions: dict[str, JsonSchemaValue] = generated["$defs"]
    names = {one: references[one, "validation"]["$ref"].rpartition("/")[2] for one in every}
    for base, registry in BASES.items():
        choices = [c for _, c in registry.items() if issubclass(c, base)]
        definitions[names[base]] = {
            "description": summary(base),
            "oneOf": [*(references[c, "validation"] for c in choices), _own(registry)],
        }
    return definitions.pop(names[model]), definitions


def _own(registry: Registry[Any]) -> JsonSchemaValue:
    where = {
        "type": "string",
        "pattern": OWN,
        "description": f"Where your own {registry.what} is: package.module:Name.",
    }
    return {
        "type": "object",
        "description": f"Your own {registry.what}.",
        "properties": {registry.key: where},
        "required": [registry.key],
    }


class _Generator(GenerateJsonSchema):
    """Adds what docstrings say of keys, and requires the name of a component."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        model = schema["cls"]
        found = super().model_schema(schema)
        found["description"] = summary(model)
        found.pop("title", None)
        properties = found.get("properties", {})
        for key, text in key_docs(model).items():
            properties[key]["description"] = text
        for key, field in model.model_fields.items():
            if _is_section(field.default):  # its keys have defaults of their own
                properties[key].pop("default", None)
        for registry in REGISTRIES:
            if issubclass(model, registry.base):
                name = model.model_fields[registry.key].default
                properties[registry.key] = {"const": name, "description": f"The {registry.what}."}
                required = [registry.key, *found.get("required", [])]
                found["required"] = list(dict.fromkeys(required))  # it may be of two sorts
        return found

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # it would repeat the key


def _is_section(value: Any) -> bool:
    return isinstance(value, Config) and not any(isinstance(value, r.base) for r in REGISTRIES)


def type_in_words(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """What a key takes, in words: "int ≥ 1", "sgd | adam | adamw", "mapping to list of str"."""
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        return "component" if "oneOf" in target else "section"
    for union in ("anyOf", "oneOf"):
        if union in node and "type" not in node:
            words = (type_in_words(one, definitions) for one in node[union])
            return " | ".join(dict.fromkeys(word for word in words if word != "null"))
    if "enum" in node or "const" in node:
        return " | ".join(str(value) for value in node.get("enum") or [node["const"]])
    kind = node.get("type")
    if kind == "array":
        if "prefixItems" in node:
            parts = (type_in_words(part, definitions) for part in node["prefixItems"])
            return f"[{', '.join(parts)}]"
        return f"list of {type_in_words(node.get('items', {}), definitions)}"
    if kind == "object":
        values = node.get("additionalProperties")
        to = f" to {type_in_words(values, definitions)}" if isinstance(values, Mapping) else ""
        return f"mapping{to}"
    names = {"integer": "int", "number": "float", "string": "str", "boolean": "bool"}
    word = "path" if node.get("format") == "path" else names.get(str(kind), kind or "any")
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    # Bounds that only guard against absurd numbers are left out.
    met = {key: sign for key, sign in signs.items() if node.get(key, math.inf) < 10_000}
    bounds = [f"{sign} {node[key]:g}" for key, sign in met.items()]
    return " ".join([word, ", ".join(bounds)]).strip()
