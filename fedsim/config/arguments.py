"""Checks of the arguments of public functions, by their annotations."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")
# What an annotation takes besides; flags are no numbers.
WIDER = {int: Integral, float: Real, bool: bool | np.bool_, Path: os.PathLike}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: arguments of another type than annotated are a TypeError that names them.

    NumPy's numbers and arrays count as numbers and sequences. What an iterator yields, and a
    name that is imported only for type checks, is not checked.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **keywords)
        except TypeError as error:
            raise TypeError(f"{function.__name__}: {error}") from None
        for name, value in bound.arguments.items():
            parameter = signature.parameters[name]
            try:
                expected = eval(parameter.annotation, function.__globals__)
            except (NameError, TypeError):  # of `self` and `cls`, too
                continue
            several = parameter.kind is parameter.VAR_POSITIONAL
            for one in value if several else [value]:
                if not _fits(one, expected):
                    where = f"{function.__name__}: {name} must be {parameter.annotation}"
                    raise TypeError(f"{where}, not {one!r:.80}")
        return function(*args, **keywords)

    return call


def _fits(value: Any, expected: Any) -> bool:
    origin, args = get_origin(expected), get_args(expected)
    if expected is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in args)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in args)
    if origin is Callable:
        return callable(value)
    if origin is np.ndarray:
        return isinstance(value, np.ndarray)
    if origin is not None and not issubclass(origin, Mapping):  # a sequence
        if isinstance(value, str | bytes | Mapping):
            return False
        if not isinstance(value, Collection):
            return isinstance(value, origin)
        return all(_fits(one, args[0]) for one in value)
    if expected in (int, float) and isinstance(value, bool | np.bool_):
        return False
    kind: Any = WIDER.get(expected, origin or expected)
    return isinstance(value, kind)
