"""Sections of an experiment file, and the named components that fill some of them.

A *section* is a frozen pydantic model. A *component* is a section that also does the work: a
method, a partition, a data set, a model. Its fields are its parameters, so a component's class is
its schema, its documentation and its code in one place. A `Registry` finds components by name;
`package.module:Name` finds the user's own.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError

LARGEST = 3.4e38  # of numbers of 32 bits
OWN = r"^[\w.]+:\w+$"  # the name of a component of the user's own, as a JSON schema has it


def nearest(word: object, known: Iterable[str]) -> str:
    """« — did you mean 'x'?» for a near miss, else «; known: a, b, c»."""
    names = sorted(known)
    close = difflib.get_close_matches(str(word), names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(names)}" if names else ""


def located(title: str, key: str, problem: PydanticCustomError, given: Any) -> ValidationError:
    """A problem as pydantic reports it, at one key of a section."""
    details = InitErrorDetails(type=problem, loc=(key,), input=given)
    return ValidationError.from_exception_data(title, [details])


class Config(BaseModel):
    """A part of an experiment: typed, frozen, closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        defer_build=True,  # actors, which read no experiment files, start the sooner
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        if cls.model_config.get("extra") == "forbid" and isinstance(values, Mapping):
            unknown = [key for key in values if key not in cls.model_fields]
            if unknown:
                key = unknown[0]
                hint = nearest(key, cls.model_fields)
                about = {"hint": hint, "within": _sections_with(key, cls)}
                problem = PydanticCustomError("unknown_key", "unknown key{hint}", about)
                raise located(cls.__name__, str(key), problem, values[key])
        return values

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_strange_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Flags, which pydantic reads as 0 and 1, and what overflows in the arithmetic of 32 bits.

        Such numbers are nobody's meaning, and every library ends otherwise with them.
        """
        annotation = cls.model_fields[str(info.field_name)].annotation
        for leaf in _leaves(value):
            if isinstance(leaf, bool) and not _admits_flags(annotation):
                raise PydanticKnownError("float_type" if annotation is float else "int_type")
            # Nothing calculates with seeds.
            most = 2**64 if info.field_name == "seed" else 2**63 - 1
            whole = isinstance(leaf, int) and not -(2**63) <= leaf <= most
            if whole or (isinstance(leaf, float) and LARGEST < abs(leaf) < math.inf):
                raise PydanticCustomError("too_large", "is larger than any number should be")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _make_paths_absolute(cls, value: Any) -> Any:
        """So that a run can be resumed from another folder."""
        if not isinstance(value, Path):
            return value
        try:
            return value.expanduser().absolute()
        except RuntimeError as error:  # «~somebody» who is not there
            raise ValueError(f"'{value}': {error}") from error


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _admits_flags(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(map(_admits_flags, get_args(annotation)))


def _sections_with(key: object, config: type[Config]) -> list[str]:
    """The path to the section within a config that has such a key; empty if none has."""
    for name, field in config.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Config):
            if key in inner.model_fields:
                return [name]
            below = _sections_with(key, inner)
            if below:
                return [name, *below]
    return []


C = TypeVar("C", bound=Config)
D = TypeVar("D", bound=Config)


class Registry(Generic[C]):
    """The components of one sort, found by name.

    Args:
        what: the sort in words, for messages («method»).
        base: the class that every component of the sort extends.
        key: the field that holds the name in an experiment file.
    """

    def __init__(self, what: str, base: type[C], key: str = "name") -> None:
        self.what, self.base, self.key = what, base, key
        self._known: dict[str, type[C]] = {}

    def register(self, component: type[D]) -> type[D]:
        """Class decorator: file the class under the default of its name field."""
        self._known[component.model_fields[self.key].default] = component  # type: ignore
        return component

    def items(self) -> list[tuple[str, type[C]]]:
        """Names and components, in order."""
        return sorted(self._known.items())

    def find(self, name: str) -> type[C]:
        """The component of that name, or the user's own at `package.module:Name`.

        Raises:
            PydanticCustomError: there is none; the message names the nearest.
        """
        if name in self._known:
            return self._known[name]
        if ":" in name:
            return self._import(name)
        raise PydanticCustomError(
            "unknown_name",
            "unknown {what} '{name}'{hint}",
            {"what": self.what, "name": name, "hint": nearest(name, self._known)},
        )

    def _import(self, name: str) -> type[C]:
        found = import_object(name, self.what)
        if not (isinstance(found, type) and issubclass(found, self.base)) or found is self.base:
            raise PydanticCustomError(
                "not_a_component",
                "'{name}' is not a {what}: it must be a class that extends {base}",
                {"name": name, "what": self.what, "base": self.base.__name__},
            )
        if inspect.isabstract(found):
            raise PydanticCustomError(
                "incomplete",
                "{what} '{name}' lacks {methods}",
                {
                    "what": self.what,
                    "name": name,
                    "methods": ", ".join(sorted(found.__abstractmethods__)),
                },
            )
        return found

    def parse(self, value: Any) -> Any:
        """A component from what an experiment file holds, or the component itself."""
        if isinstance(value, self.base) or not isinstance(value, Mapping):
            return value
        name = value.get(self.key)
        try:
            if name is None:
                raise PydanticCustomError(
                    "missing_name",
                    "missing; known: {known}",
                    {"known": ", ".join(sorted(self._known))},
                )
            component = self.find(str(name))
        except PydanticCustomError as error:
            raise located(self.what, self.key, error, name) from None
        return component.model_validate(dict(value))


_may_import: ContextVar[bool] = ContextVar("may_import", default=True)


@contextmanager
def importing(allowed: bool) -> Iterator[None]:
    """Whether, within, an experiment may name code that is not fedsim's own."""
    token = _may_import.set(allowed)
    try:
        yield
    finally:
        _may_import.reset(token)


def import_object(name: str, what: str) -> Any:
    """The object at `package.module:attribute`.

    Raises:
        PydanticCustomError: the module or the attribute is not there, or nothing may be imported.
    """
    module, _, attribute = name.partition(":")
    if not _may_import.get():
        raise PydanticCustomError(
            "not_trusted",
            "{what} '{name}' is code of the author's, and this folder was made elsewhere; if you "
            "trust them: --trust",
            {"what": what, "name": name},
        )
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise PydanticCustomError(
            "not_own",
            "{what} '{name}' is of Python's own library, which has none",
            {"what": what, "name": name},
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the module raises
        words = str(error).strip().partition("\n")[0] or type(error).__name__
        raise PydanticCustomError(
            "import_failed",
            "{what} '{name}' cannot be imported: {error}",
            {
                "what": what,
                "name": name,
                "error": f"it exits ({words})" if isinstance(error, SystemExit) else words,
            },
        ) from error


def first_line(documented: Callable[..., Any]) -> str:
    """The first line of a docstring: what the thing is, for lists."""
    return (documented.__doc__ or "").strip().partition("\n")[0]


def summary(documented: type) -> str:
    """A docstring without what it says of arguments, errors and use: what the thing is."""
    text = inspect.cleandoc(documented.__dict__.get("__doc__") or "")
    sections = r"^(?:Args|Attributes|Example|Raises):\n(?: .*(?:\n|$)|\n)*"
    return re.sub(sections, "", text, flags=re.M).strip()


def key_docs(section: type[BaseModel]) -> dict[str, str]:
    """What the docstrings of a section and of the classes it extends say of its keys (`Args:`)."""
    found: dict[str, str] = {}
    for documented in reversed(section.__mro__):
        text = inspect.cleandoc(documented.__dict__.get("__doc__") or "")
        args = re.search(r"^Args:\n((?: .*\n?|\n)*)", text, re.M)
        if args:
            entries = re.findall(
                r"^    (\w+(?:, \w+)*): (.*(?:\n     .*)*)", args[1], re.M
            )  # a key, or several, and lines that are indented further
            for keys, words in entries:
                for key in keys.split(", "):
                    if key in section.model_fields:
                        found[key] = " ".join(words.split())
    return found
