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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError

LARGEST = 3.4e38  # float32
MAIN = "__main__"  # module of notebooks and scripts
OWN = (
    r"^[\w.]+:[\w.]+$"  # the name of the user's own component, or of a library's, in a JSON schema
)
YOUR_OWN = "; write your own as module:Class"


def nearest(word: object, known: Iterable[str]) -> str:
    """A hint: "; did you mean 'x'?" for a near miss or part of a name, else "; known: a, b, c"."""
    names = sorted(known)
    found = _closest(str(word).lower(), {name.lower(): name for name in names})
    if found:
        return f"; did you mean '{found}'?"
    return f"; known: {', '.join(names)}" if names else ""


def _closest(word: str, names: Mapping[str, str]) -> str | None:
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.65)
    containing = [name for name in names if word in name.split("_")]  # "f1" of macro_f1
    found = close or containing
    return names[found[0]] if found else None


def located(title: str, key: str, problem: PydanticCustomError, given: Any) -> ValidationError:
    """A problem as pydantic reports it, at one key of a section."""
    details = InitErrorDetails(type=problem, loc=(key,), input=given)
    return ValidationError.from_exception_data(title, [details])


def unfit(problem: str) -> PydanticCustomError:
    """The error for values that do not fit; pydantic adds the section or key where they are."""
    return PydanticCustomError("unfit", "{problem}", {"problem": problem})


def refuse_twice(name: str, names: Sequence[str]) -> None:
    """Refuse a name that is given more than once."""
    if names.count(name) > 1:
        raise PydanticCustomError("twice", "'{name}' is named twice", {"name": name})


def check_named(names: Sequence[str], nothing: str) -> None:
    """Refuse an empty list of names, with that message, or a name that is given twice."""
    if not names:
        raise PydanticCustomError("empty", nothing)
    for name in names:
        refuse_twice(name, names)


class Config(BaseModel):
    """A part of an experiment: typed, frozen, closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        defer_build=True,  # faster start of actors, which do not validate
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        if cls.model_config.get("extra") == "forbid" and isinstance(values, Mapping):
            unknown = [key for key in values if key not in cls.model_fields]
            if unknown:
                key = unknown[0]
                hint = _missing_space(key, values[key]) or nearest(key, cls.model_fields)
                about = {"hint": hint, "within": _sections_with(key, cls)}
                problem = PydanticCustomError("unknown_key", "unknown key{hint}", about)
                raise located(cls.__name__, str(key), problem, values[key])
        return values

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_strange_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Flags, which pydantic reads as 0 and 1, and what overflows in the arithmetic of 32 bits.

        Such numbers are mistakes, which libraries treat differently.
        """
        annotation = cls.model_fields[str(info.field_name)].annotation
        for leaf in _leaves(value):
            if isinstance(leaf, bool) and not _admits_flags(annotation):
                raise PydanticKnownError("float_type" if annotation is float else "int_type")
            # Seeds are not used in arithmetic.
            most = 2**64 if info.field_name == "seed" else 2**63 - 1
            whole = isinstance(leaf, int) and not -(2**63) <= leaf <= most
            if whole or (isinstance(leaf, float) and LARGEST < abs(leaf) < math.inf):
                raise PydanticCustomError("too_large", "is too large")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _make_paths_absolute(cls, value: Any) -> Any:
        """So that a run can be resumed from another folder; see `paths_from`."""
        return absolute(value)


def absolute(value: Any) -> Any:
    """A path, and those in a list, a tuple or a dict, from the folder of `paths_from`."""
    if isinstance(value, Path):
        try:
            return (_base.get() or Path.cwd()) / value.expanduser()
        except RuntimeError as error:  # unknown user in "~user"
            raise ValueError(f"'{value}': {error}") from error
    if type(value) is dict:
        return {key: absolute(part) for key, part in value.items()}
    return type(value)(map(absolute, value)) if type(value) in (list, tuple) else value


_base: ContextVar[Path | None] = ContextVar("base", default=None)


@contextmanager
def paths_from(folder: Path) -> Iterator[None]:
    """Context that sets the folder of relative paths; by default the working directory."""
    token = _base.set(folder)
    try:
        yield
    finally:
        _base.reset(token)


def _missing_space(key: object, value: Any) -> str:
    """What to write for `{name:fedavg}`, which YAML reads as a key without a value."""
    name, colon, word = str(key).partition(":")
    if value is not None or not colon or not word:
        return ""
    return f"; write '{name}: {word}', with a space after the colon"


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _admits_flags(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(map(_admits_flags, get_args(annotation)))


class Component(Config):
    """A section that also does the work, and that experiments refer to by name.

    A class whose name field has no default is named by its location, `package.module:Name`.

    Attributes:
        name_key: the key that holds its name.
        niche: whether it serves certain problems or papers only; lists have it last.
    """

    name_key: ClassVar[str] = "name"
    niche: ClassVar[bool] = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        key, own = cls.name_key, inspect.get_annotations(cls)
        if key not in own:
            cls.__annotations__ = {**own, key: str}
            setattr(cls, key, f"{cls.__module__}:{cls.__qualname__}")


def _sections_with(key: object, config: type[Config]) -> list[str]:
    """The path to the section of a config that has a key; empty if none has."""
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
    """The components of one kind, found by name.

    Args:
        what: the kind, for messages ("method").
        base: the base class of all components of this kind.
        key: the field that holds the name in an experiment file.
    """

    def __init__(self, what: str, base: type[C], key: str = "name") -> None:
        self.what, self.base, self.key = what, base, key
        self._known: dict[str, type[C]] = {}

    def register(self, component: type[D]) -> type[D]:
        """Class decorator: register the class under the default of its name field."""
        self._known[component.model_fields[self.key].default] = component  # type: ignore
        return component

    def items(self) -> list[tuple[str, type[C]]]:
        """Names and components, in order."""
        return sorted(self._known.items())

    def find(self, name: str) -> type[C]:
        """The component of a name, or the user's at `package.module:Name`.

        Raises:
            PydanticCustomError: there is none; the message names the nearest.
        """
        if name in self._known:
            return self._known[name]
        if ":" in name:
            return self._import(name)
        raise unknown_name(self.what, name, self._known)

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
        """A component from the content of an experiment file, or from an object; see `section`."""
        if isinstance(value, self.base):
            return self._named(value)
        value = self.section(value)
        if isinstance(value, str):
            raise PydanticCustomError(
                "not_a_section",
                "must be a section of keys; write {section}",
                {"section": f"{{{self.key}: {value}}}"},
            )
        if not isinstance(value, Mapping):
            return value
        name = value.get(self.key)
        try:
            if name is None:
                hints = (_missing_space(key, value[key]) for key in value)
                hint = next(filter(None, hints), nearest("", self._known) or YOUR_OWN)
                raise PydanticCustomError("missing_name", "missing{hint}", {"hint": hint})
            component = self.find(str(name))
        except PydanticCustomError as error:
            raise located(self.what, self.key, error, name) from None
        return component.model_validate(dict(value))

    def section(self, given: Any) -> Any:
        """The content of an experiment file for an object: a component, or its class.

        Anything else is returned unchanged.

        Raises:
            PydanticCustomError: other processes could not import its class.
        """
        if isinstance(given, self.base):
            return self._named(given).model_dump(mode="json")
        if isinstance(given, type) and issubclass(given, self.base):
            return {self.key: self._name_of(given)}
        return given

    def _named(self, component: C) -> C:
        """The component with an importable name of its class.

        Raises:
            PydanticCustomError: there is none.
        """
        name = self._name_of(type(component), getattr(component, self.key))
        if name == getattr(component, self.key):
            return component
        return component.model_copy(update={self.key: name})

    def _name_of(self, component: type[C], name: str | None = None) -> str:
        """The name of a class, the one that it has if it is found by it."""
        name = name or component.model_fields[self.key].default
        if self._known.get(str(name)) is component:
            return str(name)
        return importable_name(component, self.what)


def unknown_name(what: str, name: str, known: Iterable[str]) -> PydanticCustomError:
    """The error for an unknown name."""
    module, dot, own = name.rpartition(".")
    hint = nearest(name, known) or YOUR_OWN
    if dot:
        hint = f"; write your own with a colon: {module}:{own}"
    return PydanticCustomError(
        "unknown_name",
        "unknown {what} '{name}'{hint}",
        {"what": what, "name": name, "hint": hint},
    )


_may_import: ContextVar[bool] = ContextVar("may_import", default=True)


@contextmanager
def importing(allowed: bool) -> Iterator[None]:
    """Context that sets whether experiments may import code other than fedsim's."""
    token = _may_import.set(allowed)
    try:
        yield
    finally:
        _may_import.reset(token)


def import_object(name: str, what: str) -> Any:
    """The object at `package.module:attribute`.

    Raises:
        PydanticCustomError: the module or the attribute does not exist, or imports are not
            allowed.
    """
    module, _, attribute = name.partition(":")
    if not _may_import.get():
        raise PydanticCustomError(
            "not_trusted",
            "{what} '{name}' is code of the folder's author, and the folder was made elsewhere; "
            "if you trust them, add --trust, or in Python: fedsim.load(folder).trust()",
            {"what": what, "name": name},
        )
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise PydanticCustomError(
            "not_own",
            "{what} '{name}' is of Python's own library, which has none",
            {"what": what, "name": name},
        )
    try:
        found = importlib.import_module(module)
        return attrgetter(attribute)(found)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may raise anything
        if module == MAIN:
            raise PydanticCustomError(
                "import_failed",
                "{what} '{name}' was defined in a notebook or a script, which other processes "
                "cannot import; put it into a separate module",
                {"what": what, "name": attribute},
            ) from error
        words = str(error).strip().partition("\n")[0] or type(error).__name__
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            folders = _own_folders()
            modules = {path.stem for folder in folders for path in folder.glob("*.py")}
            close = _closest(module, {name: name for name in modules})
            hint = f"did you mean '{close}:{attribute}'?" if close else ""
            searched = ", ".join(map(str, folders))
            words = f"no module '{error.name}' in {searched}, nor installed"
            words = "; ".join(filter(None, (words, hint)))
        elif isinstance(error, AttributeError) and (own := _own_names(module, attribute)):
            words = f"{module} has no '{attribute}'{nearest(attribute, own)}"
        raise PydanticCustomError(
            "import_failed",
            "{what} '{name}' cannot be imported: {error}",
            {
                "what": what,
                "name": name,
                "error": f"it exits ({words})" if isinstance(error, SystemExit) else words,
            },
        ) from error


def _own_folders() -> list[Path]:
    """The folders of modules, except those of Python and of packages."""
    python = (sys.prefix, sys.base_prefix)
    folders = [Path(entry).absolute() for entry in sys.path if not entry.startswith(python)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _own_names(module: str, attribute: str) -> list[str]:
    """Names that a module itself defines; empty if it was not imported or has the attribute."""
    found = sys.modules.get(module)
    if found is None or hasattr(found, attribute):
        return []
    return [
        name
        for name, value in vars(found).items()
        if getattr(value, "__module__", None) == module and not name.startswith("_")
    ]


def importable_name(found: Any, what: str) -> str:
    """The importable name `package.module:Name` of a class or function.

    Args:
        what: it is, in words.

    Raises:
        PydanticCustomError: it cannot be imported, or the name has another object.
    """
    module, inner = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if module is None or inner is None:
        raise PydanticCustomError(
            "no_name",
            "{what}: {found} has no importable name; pass a class or a function of a module",
            {"what": what, "found": repr(found)},
        )
    if "<" in inner:  # of <lambda>, or in the <locals> of a function
        raise PydanticCustomError(
            "not_importable",
            "{what} '{name}' is defined within a function, or is a lambda: no other process can "
            "import it, nor can this run's folder be loaded; define it at the top of a module",
            {"what": what, "name": inner},
        )
    name = f"{module}:{inner}"
    if import_object(name, what) is not found:
        raise PydanticCustomError(
            "redefined",
            "{what} '{name}' was redefined in its module; create the object again",
            {"what": what, "name": name},
        )
    return name


def called(given: Any, what: str, key: str) -> dict[str, Any] | None:
    """The section of a factory function; a `functools.partial` adds keywords.

    Returns:
        None if it is not a function.

    Raises:
        PydanticCustomError: it cannot be imported, or the partial has positional arguments.
    """
    keywords: dict[str, Any] = {}
    if isinstance(given, partial):
        if given.args:
            raise PydanticCustomError(
                "arguments",
                "{what} {name}: a partial may have only keyword arguments, which are the "
                "section's keys",
                {"what": what, "name": getattr(given.func, "__name__", repr(given.func))},
            )
        given, keywords = given.func, dict(given.keywords)
        return {key: importable_name(given, what), **keywords}
    return {key: importable_name(given, what)} if inspect.isfunction(given) else None


def check_keywords(
    function: Callable[..., Any],
    name: str,
    given: Sequence[str],
    keywords: Mapping[str, Any] | None,
) -> None:
    """Reject keywords that a function does not take.

    Args:
        given: the arguments that it is called with besides, in words.

    Raises:
        ValidationError: it takes no such keyword; the message names the nearest.
        PydanticCustomError: it cannot be called with these.
    """
    parameters = list(inspect.signature(function).parameters.values())
    known = [p.name for p in parameters[len(given) :]]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key in keywords or {}:
            if key not in known:
                about = {"name": name, "key": key, "hint": nearest(key, known)}
                problem = "{name} takes no '{key}'{hint}"
                error = PydanticCustomError("unknown_keyword", problem, about)
                raise located(name, key, error, (keywords or {})[key])
    try:
        inspect.signature(function).bind(*given, **(keywords or {}))
    except TypeError as error:
        raise PydanticCustomError(
            "signature",
            "{name} cannot be called as {call}: {error}",
            {
                "name": name,
                "call": f"f({', '.join((*given, *(f'{key}=...' for key in keywords or {})))})",
                "error": str(error),
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
