"""An experiment file as it is read: nested dicts, and where each key stands.

What does not fit the schema is refused with that place. Files, overrides and the cells of a grid
all pass through here on their way to an `Experiment`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import ValidationError

from fedsim.config.registry import Config, paths_from
from fedsim.errors import ExperimentError

Location = tuple[str, ...]  # of a key: its section, then the key within it
S = TypeVar("S", bound=Config)


def flat(content: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested sections by `section.key`; an empty section is left out."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        inner = flat(value, f"{above}{key}.") if isinstance(value, Mapping) else None
        found |= {f"{above}{key}": value} if inner is None else inner
    return found


@dataclass(frozen=True)
class RawConfig:
    """The content of an experiment file.

    Attributes:
        content: sections, as nested dicts.
        where: says for a key where it stands ("digits.yaml:7", "override train.rounds=3").
        changed_keys: those that were set over the file, by overrides or a grid.
        folder: which relative paths in it start from; by default the working directory.
    """

    content: Mapping[str, Any]
    where: Callable[[Location], str] = lambda _: "experiment"
    changed_keys: frozenset[Location] = frozenset()
    folder: Path = field(default_factory=Path.cwd)

    @classmethod
    def read(
        cls, path: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()
    ) -> RawConfig:
        """Read an experiment file.

        Args:
            path: a YAML file.
            overrides: `section.key=value`, or a dict of values by `section.key`, which win over
                the file.

        Raises:
            ExperimentError: it cannot be read, or an override is none.
        """
        path = Path(path)
        text = _text_of(path)
        try:
            content, lines = _parsed(text, str(path))
        except _NOT_YAML as error:
            raise ExperimentError(f"{path}: not YAML: {_in_one_line(error)}") from None
        if not isinstance(content, dict | None):
            raise ExperimentError(f"{path}: must be a mapping of sections, not a list or a word")

        def where(location: Location) -> str:
            for end in range(len(location), 0, -1):
                if location[:end] in lines:
                    return f"{path}:{lines[location[:end]]}"
            return str(path)

        return cls(content or {}, where).overridden(overrides)

    def overridden(self, overrides: Sequence[str] | Mapping[str, Any]) -> RawConfig:
        """The sheet with overrides, `section.key=value` or values by `section.key`.

        Raises:
            ExperimentError: an override is none.
        """
        sheet = self
        if isinstance(overrides, Mapping):
            for key, value in overrides.items():
                sheet = sheet.changed({key: value}, f"override {key}={value}")
            return sheet
        for override in overrides:
            key, equals, given = override.partition("=")
            if not equals or not key:
                raise ExperimentError(f"override '{override}': must read section.key=value")
            if not re.fullmatch(r"[^.\[\]\s]+(\.[^.\[\]\s]+)*", key):
                raise ExperimentError(f"override '{override}': '{key}' is not a section.key")
            try:
                value, _ = _parsed(given, f"override '{override}'")
            except _NOT_YAML as error:
                raise ExperimentError(f"override '{override}': {_in_one_line(error)}") from None
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

        return replace(
            self, content=content, where=where, changed_keys=self.changed_keys | changed
        )

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
            with paths_from(self.folder):
                return schema.model_validate(content)
        except ValidationError as error:
            raise ExperimentError("\n".join(_explain(error, self, above, content))) from None
        except ExperimentError as error:
            raise ExperimentError(f"{self.where(above)}: {error}") from None


MOST_BYTES = 500_000  # of an experiment file; more is another kind of file
MOST_NODES = 100_000  # keys and values, aliases expanded
MOST_LEVELS = 50
_TAG = "tag:yaml.org,2002:"
_FLOAT = f"{_TAG}float"
_NUMBERS = (f"{_TAG}int", _FLOAT)
_KINDS = (*_NUMBERS, *(_TAG + kind for kind in ("null", "bool", "str", "seq", "map")))
# A number of thousands of digits is a ValueError, and "!!bool maybe" a KeyError.
_NOT_YAML = (yaml.YAMLError, ValueError, LookupError)


def _text_of(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise ExperimentError(f"{path}: is not a regular file")
        if path.stat().st_size > MOST_BYTES:
            raise ExperimentError(
                f"{path}: is {path.stat().st_size / 1e6:.1f} MB long, too long for an experiment"
            )
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ExperimentError(f"{path}: cannot be read: {why}") from None


try:
    from yaml import CSafeDumper as SafeDumper
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # it is not in every build
    from yaml import SafeDumper, SafeLoader  # type: ignore[assignment]


class _Loader(SafeLoader):
    """Reads 1e5 and 1.5e3 as numbers, as YAML 1.2 does, and dates as words."""

    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: SafeLoader.yaml_constructors[tag] for tag in (*_KINDS, None)
    }


class _Dumper(SafeDumper):
    """Quotes words that the loader would read as numbers."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != f"{_TAG}timestamp"]
    for first, found in SafeLoader.yaml_implicit_resolvers.items()
}
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        _FLOAT,
        re.compile(r"[-+]?[0-9]+(_[0-9]+)*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def to_yaml(content: Mapping[str, Any]) -> str:
    """Nested dicts as a file that reads as the same.

    Raises:
        ExperimentError: a word, such as the name of a file, is no Unicode text.
    """
    try:
        return yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False)
    except UnicodeEncodeError as error:
        raise ExperimentError(f"{error.object!a} is no Unicode text") from None


def from_yaml(text: str | bytes) -> Any:
    """What a YAML document says.

    Raises:
        ExperimentError: it is none, or not of an experiment's kind.
    """
    try:
        return _parsed(text, "YAML")[0]
    except _NOT_YAML as error:
        raise ExperimentError(f"not YAML: {_in_one_line(error)}") from None


def _parsed(text: str | bytes, where: str) -> tuple[Any, dict[Location, int]]:
    """A YAML document, and the line of each of its keys."""
    level = 0
    for event in yaml.parse(text, _Loader):  # building it recurses, in C, and may end the process
        level += isinstance(event, yaml.CollectionStartEvent)
        level -= isinstance(event, yaml.CollectionEndEvent)
        if level > MOST_LEVELS:
            raise ExperimentError(f"{where}: has more than {MOST_LEVELS} levels")
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        lines = _lines(root, where)
        return None if root is None else _unshared(loader.construct_document(root)), lines
    finally:
        loader.dispose()


def _unshared(value: Any) -> Any:
    """Lists and dicts that stand in one place each, which aliases of YAML need not."""
    if isinstance(value, dict):
        return {key: _unshared(part) for key, part in value.items()}
    return [_unshared(part) for part in value] if isinstance(value, list) else value


def _in_one_line(error: BaseException) -> str:
    if isinstance(error, LookupError):
        return f"a value does not fit its tag: {error}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split()) or type(error).__name__


def _lines(root: yaml.Node | None, where: str) -> dict[Location, int]:
    """The line of each key of a YAML document, by its path.

    Raises:
        yaml.MarkedYAMLError: a key stands twice, or is no word or number.
        ExperimentError: aliases make it too large, or it has numbers to base 60: YAML reads 1:30
            as 90, and nobody means that.
    """
    lines: dict[Location, int] = {}
    stack: list[tuple[Location, int, yaml.Node]] = [] if root is None else [((), 1, root)]
    visited = 0
    while stack:
        path, level, node = stack.pop()
        visited += 1
        if visited > MOST_NODES:
            raise ExperimentError(f"{where}: has more than {MOST_NODES:,} values")
        if level > MOST_LEVELS + 1:  # aliases make more of them
            raise ExperimentError(f"{where}: has more than {MOST_LEVELS} levels")
        if isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                if problem := _problem_of_key(key, keys):
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                keys.add(key.value)
                below = (*path, key.value)
                lines[below] = key.start_mark.line + 1
                stack += [(below, level + 1, key), (below, level + 1, value)]
        elif isinstance(node, yaml.SequenceNode):
            stack += [(path, level + 1, part) for part in node.value]
        elif ":" in node.value and node.tag in _NUMBERS:
            name = ".".join(path) or "value"
            raise ExperimentError(
                f"{where}: {name}: YAML reads {node.value} as a number to base 60; write a plain "
                "number, or put it in quotes"
            )
    return lines


def _problem_of_key(key: yaml.Node, others: Collection[str]) -> str | None:
    if not isinstance(key, yaml.ScalarNode):
        return "found a key that is a list or a mapping"
    if key.tag in (f"{_TAG}bool", f"{_TAG}null"):
        kind = "nothing" if key.tag == f"{_TAG}null" else "true or false"
        return f"YAML reads the key '{key.value}' as {kind}; put it in quotes"
    return f"found duplicate key {key.value}" if key.value in others else None


_MUST_BE = "must be "
_WORDS = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be a word",
    "dict_type": "must be a mapping",
    "model_type": "must be a section of keys",
    "model_attributes_type": "must be a section of keys",
    "tuple_type": "must be a list",
    "too_long": "must be a shorter list",
    "too_short": "must not be empty",  # a least length is 1 here
    "string_too_short": "must not be empty",
    "missing": "missing",
}
_TYPE = re.compile(r"(constrained-)?(int|float|str|bool)|[A-Z]\w*[a-z]\w*|.*\[.*")


def _explain(error: ValidationError, sheet: RawConfig, above: Location, content: Any) -> list[str]:
    """A line for each thing that is wrong: where, what, and what would be right."""
    words_at: dict[Location, list[str]] = {}
    given_at: dict[Location, str] = {}
    for problem in error.errors():
        location = (*above, *_keys(problem["loc"], content))
        if problem["type"] == "unknown_key":
            about = _about_unknown_key(problem["ctx"]["within"], location, sheet)
            words_at.setdefault(location, []).append(about or problem["msg"])
            continue
        words = _WORDS.get(problem["type"], problem["msg"]).removeprefix("Value error, ")
        words = words.replace("Input should be ", _MUST_BE)
        others = words_at.setdefault(location, [])
        others.append(words.removeprefix(_MUST_BE) if others else words)
        # A message of our own says itself what was given.
        said = words == problem["msg"] or not words.startswith(_MUST_BE)
        if not said and isinstance(problem["input"], str | int | float):
            given_at[location] = f", not {problem['input']!r}"
    # A section that is given may be of another kind as well; what is wrong within it says more.
    within = {location[:depth] for location in words_at for depth in range(len(location))}
    return [
        f"{sheet.where(location)}: {'.'.join(location)}: {' or '.join(words)}"
        f"{given_at.get(location, '')}"
        for location, words in words_at.items()
        if location not in within
    ]


def _keys(location: Sequence[str | int], content: Any) -> Iterator[str]:
    """The keys of a problem's location, in which a union also names its branch by a type."""
    for part in location:
        given = dict(enumerate(content)) if isinstance(content, list) else content
        given = {str(k): v for k, v in given.items()} if isinstance(given, Mapping) else {}
        if str(part) in given:  # keys of dicts from Python need not be words
            content = given[str(part)]
        elif _TYPE.fullmatch(str(part)):
            continue
        yield str(part)


def _about_unknown_key(within: Sequence[str], location: Location, sheet: RawConfig) -> str | None:
    """What to do about a key of another section or component, if it is one.

    It is, if a section below has such a key, or if a change names another component and leaves
    this key of the former one in the section.

    Args:
        within: the path to the section below.
    """
    *above, key = location
    if within:
        return f"unknown key; did you mean '{'.'.join((*above, *within, key))}'?"
    if any(location[: len(c)] == c for c in sheet.changed_keys):
        return None
    for word in ("name", "kind"):
        naming = (*above, word)
        if naming in sheet.changed_keys:
            section: Any = sheet.content
            for part in above:
                section = section[part]
            by_override = sheet.where(naming).startswith("override ")
            whole = f"{'.'.join(above)}{'=' if by_override else ': '}{{{word}: {section[word]}}}"
            return f"is not a key of {section[word]}; to replace the whole section: '{whole}'"
    return None
