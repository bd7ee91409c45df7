"""The experiment: the only configuration type, and how a file becomes one.

YAML files, command-line overrides and Python all build an `Experiment`. Whatever does not fit the
schema is refused here, with the place in the file and the nearest known name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError, model_validator

from fedsim.component import Section
from fedsim.data import Partition, Source, datasets, partitions
from fedsim.errors import ExperimentError
from fedsim.federation import EngineSettings
from fedsim.methods import Method, methods
from fedsim.models import Model, models
from fedsim.training import Train

Location = tuple[str, ...]  # of a key: its section, then the key within it


class Evaluate(Section):
    """When models are evaluated; the last round always is.

    Args:
        every: rounds from one evaluation on the central test set to the next.
        clients: evaluate on every client's own test examples as well (needs
            `partition.test_fraction`).
    """

    every: int = Field(1, ge=1)
    clients: bool = False


class Checkpoint(Section):
    """When the run is saved so that it can go on from there.

    Args:
        every: rounds from one checkpoint to the next; 0 makes none before the end.
    """

    every: int = Field(5, ge=0)


class Experiment(Section):
    """Everything that decides a run's result, and where it is computed."""

    name: str = Field("experiment", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(0, ge=0)
    data: Annotated[SerializeAsAny[Source], BeforeValidator(datasets.parse)]
    partition: Annotated[SerializeAsAny[Partition], BeforeValidator(partitions.parse)]
    model: Annotated[SerializeAsAny[Model], BeforeValidator(models.parse)]
    method: Annotated[SerializeAsAny[Method], BeforeValidator(methods.parse)]  # type: ignore[type-arg]
    train: Train = Train()
    engine: EngineSettings = EngineSettings()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()

    @model_validator(mode="after")
    def _fits_together(self) -> Experiment:
        self.method.check(self.train)
        if self.evaluate.clients and self.partition.test_fraction == 0:
            raise ExperimentError(
                "evaluate.clients=true needs partition.test_fraction above 0: "
                "clients have no test examples of their own"
            )
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
        """Read an experiment file.

        Args:
            path: a YAML file.
            overrides: `section.key=value`, which win over the file.

        Raises:
            ExperimentError: a line for each thing that is wrong, with where it stands.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ExperimentError(f"{path}: cannot be read: {error}") from error
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            content = OmegaConf.create(text) if text.strip() else OmegaConf.create({})
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise ExperimentError(f"{path}: not YAML: {error}") from error
        if not isinstance(content, DictConfig):
            raise ExperimentError(f"{path}: must be a mapping of sections, not a list or a word")
        given = {}
        for override in overrides:
            key, equals, _ = override.partition("=")
            if not equals or not key:
                raise ExperimentError(f"override '{override}': must read section.key=value")
            try:
                # What stands at the key is replaced, a whole section too, not merged.
                new = OmegaConf.to_container(OmegaConf.from_dotlist([override]), resolve=False)
                for part in key.split("."):
                    new = new[part]
                OmegaConf.update(content, key, new, merge=False)
            except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
                raise ExperimentError(f"override '{override}': {error}") from error
            for location in _within(tuple(key.split(".")), new):
                given[location] = override
        lines = dict(_lines(root)) if root is not None else {}

        def where(location: Location) -> str:
            for end in range(len(location), 0, -1):
                if location[:end] in given:
                    return f"override {given[location[:end]]}"
                if location[:end] in lines:
                    return f"{path}:{lines[location[:end]]}"
                # A section that only an override speaks of.
                for known, override in given.items():
                    if known[:end] == location[:end]:
                        return f"override {override}"
            return str(path)

        # No interpolation: «${...}» is text like any other.
        return cls._build(OmegaConf.to_container(content, resolve=False), where)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Experiment:
        """An experiment from nested dicts, as a file would hold them.

        Raises:
            ExperimentError: a line for each thing that is wrong.
        """
        return cls._build(dict(content), lambda _: "experiment")

    @classmethod
    def _build(cls, content: Any, where: Callable[[Location], str]) -> Experiment:
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise ExperimentError("\n".join(_explain(error, where))) from None
        except ExperimentError as error:
            raise ExperimentError(f"{where(())}: {error}") from None

    def to_yaml(self) -> str:
        """The complete experiment, every default written out, as a file to run again."""
        return yaml.dump(self.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Quotes words that OmegaConf would read as numbers, and PyYAML would not («1e5»)."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _within(location: Location, value: Any) -> Iterator[Location]:
    """The location of a value, and of all that is in it."""
    yield location
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _within((*location, str(key)), part)


def _lines(node: yaml.Node, above: Location = ()) -> Iterator[tuple[Location, int]]:
    """The line of each key of a YAML document, by its path."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*above, str(key.value))
            yield path, key.start_mark.line + 1
            yield from _lines(value, path)


_WORDS = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "a word",
    "model_type": "a section of keys",
    "missing": "missing",
}


def _explain(error: ValidationError, where: Callable[[Location], str]) -> list[str]:
    """A line for each thing that is wrong: where, what, and what would be right."""
    words_at: dict[Location, list[str]] = {}
    given_at: dict[Location, str] = {}
    for problem in error.errors():
        # A union («a whole number or auto») reports each branch, named by its type.
        location = tuple(str(p) for p in problem["loc"] if not re.search(r"\bint\b|\[", str(p)))
        words = _WORDS.get(problem["type"], problem["msg"])
        words = words.removeprefix("Value error, ").removeprefix("Input should be ")
        words_at.setdefault(location, []).append(words)
        a_value = isinstance(problem["input"], str | int | float)
        if words not in (problem["msg"], "missing"):  # a message of our own is complete as it is
            words_at[location][0] = "must be " + words_at[location][0].removeprefix("must be ")
            if a_value:
                given_at[location] = f", not {problem['input']!r}"
    return [
        f"{where(location)}: {'.'.join(location)}: {' or '.join(words)}"
        f"{given_at.get(location, '')}"
        for location, words in words_at.items()
    ]
