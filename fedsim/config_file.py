"""An experiment file as it is read: nested dicts, and where each key stands.

What does not fit the schema is refused with that place. Files, overrides and the cells of a grid
all pass through here on their way to an `Experiment`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from fedsim.errors import ExperimentError
from fedsim.registry import Config

Location = tuple[str, ...]  # of a key: its section, then the key within it
S = TypeVar("S", bound=Config)


@dataclass(frozen=True)
class RawConfig:
    """The content of an experiment file.

    Attributes:
        content: sections, as nested dicts.
        where: says for a key where it stands («digits.yaml:7», «override train.rounds=3»).
    """

    content: Mapping[str, Any]
    where: Callable[[Location], str] = lambda _: "experiment"

    @classmethod
    def read(cls, path: str | Path, overrides: Sequence[str] = ()) -> RawConfig:
        """Read an experiment file.

        Args:
            path: a YAML file.
            overrides: `section.key=value`, which win over the file.

        Raises:
            ExperimentError: it cannot be read, or an override is none.
        """
        path = Path(path)
        if path.is_fifo():
            raise ExperimentError(f"{path}: is a pipe, not a file; write it to a file first")
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
        lines = dict(_lines(root)) if root is not None else {}

        def where(location: Location) -> str:
            for end in range(len(location), 0, -1):
                if location[:end] in lines:
                    return f"{path}:{lines[location[:end]]}"
            return str(path)

        # No interpolation: «${...}» is text like any other.
        sheet = cls(OmegaConf.to_container(content, resolve=False), where)
        for override in overrides:
            key, equals, _ = override.partition("=")
            if not equals or not key:
                raise ExperimentError(f"override '{override}': must read section.key=value")
            try:
                value = OmegaConf.to_container(OmegaConf.from_dotlist([override]), resolve=False)
                for part in key.split("."):
                    value = value[part]
            except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
                raise ExperimentError(f"override '{override}': {error}") from error
            sheet = sheet.changed({key: value}, f"override {override}")
        return sheet

    def changed(self, changes: Mapping[str, Any], by: str) -> RawConfig:
        """The sheet with other values at some keys; what stood there is replaced, not merged.

        Args:
            changes: `section.key`, or a section's name, and what is to stand there.
            by: what asked for it, which `where` then answers.
        """
        content: dict[str, Any] = copy.deepcopy(dict(self.content))
        changed: set[Location] = set()
        for key, value in changes.items():
            *above, last = location = tuple(key.split("."))
            section = content
            for part in above:
                if not isinstance(section.get(part), dict):
                    section[part] = {}
                section = section[part]
            section[last] = copy.deepcopy(value)
            changed.add(location)

        def where(location: Location) -> str:
            # Within what was changed, or a section that only the change speaks of.
            if any(location[: len(c)] == c for c in changed):
                return by
            before = self.where(location)
            only_here = before == self.where(()) and location
            return (
                by
                if only_here and any(c[: len(location)] == location for c in changed)
                else before
            )

        return replace(self, content=content, where=where)

    def take(self, key: str) -> tuple[Any, RawConfig]:
        """What stands in one section, None if it is not there, and the sheet without it."""
        rest = {k: v for k, v in self.content.items() if k != key}
        return self.content.get(key), replace(self, content=rest)

    def build(self, schema: type[S], section: str | None = None) -> S:
        """The typed content of the sheet, or of one section.

        Raises:
            ExperimentError: a line for each thing that is wrong, with where it stands.
        """
        above = (section,) if section else ()
        content = self.content.get(section) if section else dict(self.content)
        try:
            return schema.model_validate(content)
        except ValidationError as error:
            raise ExperimentError("\n".join(_explain(error, self.where, above))) from None
        except ExperimentError as error:
            raise ExperimentError(f"{self.where(above)}: {error}") from None


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
    "tuple_type": "a list",
    "missing": "missing",
}


def _explain(
    error: ValidationError, where: Callable[[Location], str], above: Location
) -> list[str]:
    """A line for each thing that is wrong: where, what, and what would be right."""
    words_at: dict[Location, list[str]] = {}
    given_at: dict[Location, str] = {}
    for problem in error.errors():
        # A union («a whole number or auto») reports each branch, named by its type.
        within = (str(p) for p in problem["loc"] if not re.search(r"\bint\b|\[", str(p)))
        location = (*above, *within)
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
