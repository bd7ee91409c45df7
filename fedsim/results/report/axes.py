"""Axes of a comparison: what papers call them, and which are the rows and columns of a pivot."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from fedsim.config.registry import Config, Registry, key_docs, nearest
from fedsim.errors import BadInput
from fedsim.experiment import Experiment
from fedsim.results.report.entries import Entry, Value

Cells = Sequence[Mapping[str, Value]]


def axis_labels(axes: Sequence[str], entries: Sequence[Entry]) -> dict[str, str]:
    """What papers call the axes: the symbol if there is one, else the last part of the key.

    The symbol of a key is documented with it, as in "mu: μ, strength of the proximal term".
    Axes that would be called the same keep their keys.
    """
    found = {axis: key_label(axis, entries) for axis in axes}
    names = list(found.values())
    return {axis: name if names.count(name) == 1 else axis for axis, name in found.items()}


def key_label(key: str, entries: Sequence[Entry]) -> str:
    """What papers call a key of experiments, `section.key`; see `axis_labels`."""
    section, _, key = key.partition(".")
    if not key or key in ("name", "kind"):
        return section
    schemas = [_schema(section, entry.settings.get(section)) for entry in entries]
    words = (key_docs(schema or Config).get(key, "") for schema in schemas)
    found = (re.match(r"([^\W\da-zA-Z_]\d?)[ ,.]", text) for text in words)
    symbols = {symbol[1] for symbol in found if symbol}
    return symbols.pop() if len(symbols) == 1 else key.rpartition(".")[2]


def _schema(section: str, component: Value | None) -> type[Config] | None:
    """What documents the keys of a section; None if nothing of fedsim does."""
    field = Experiment.model_fields.get(section)
    if field is None:
        return None
    for validator in field.metadata:
        registry = getattr(getattr(validator, "func", None), "__self__", None)
        if isinstance(registry, Registry):
            known: dict[str, type[Config]] = dict(registry.items())
            return known.get(str(component))
    kinds: tuple[Any, ...] = (field.annotation, *get_args(field.annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Config)), None)


# Sections that set the problem: scores of different ones are not comparable.
_PROBLEM = ("data", "partition", "objective", "evaluate", "privacy")


@dataclass(frozen=True)
class Layout:
    """The rows and columns of a pivot, and which cells compete with each other.

    The first axis of the rows names them. There is a pivot for each combination of the values of
    other axes, none without columns.
    """

    rows: tuple[str, ...]
    columns: str | None
    others: tuple[str, ...]

    @property
    def competing(self) -> tuple[str, ...]:
        """The axes whose values compete; none if all axes set the problem.

        They are those of the rows, unless these set the problem, as data and partitions do; then
        those of the columns or else of the first other axis, with the settings of its component.
        """
        columns = () if self.columns is None else (self.columns,)
        if found := tuple(axis for axis in self.rows if not _sets_problem(axis)):
            return found
        further = [axis for axis in (*columns, *self.others) if not _sets_problem(axis)]
        further.sort(key=lambda axis: axis not in (*columns, "method", "method.name"))
        own = further[0].removesuffix(".name") + "." if further else ""
        return tuple(axis for axis in further if axis == further[0] or axis.startswith(own))

    @property
    def alike(self) -> tuple[str, ...]:
        """The axes in which cells that compete with each other are equal."""
        columns = () if self.columns is None else (self.columns,)
        return tuple(a for a in (*self.rows, *columns, *self.others) if a not in self.competing)

    def rivals(self, cells: Iterable[Mapping[str, Value]]) -> list[list[int]]:
        """The numbers of the cells that compete with each other, group by group."""
        groups: dict[tuple[Value, ...], list[int]] = {}
        for k, cell in enumerate(cells):
            groups.setdefault(tuple(cell[axis] for axis in self.alike), []).append(k)
        return list(groups.values())


def _sets_problem(axis: str) -> bool:
    return axis.partition(".")[0] in _PROBLEM


def layout(
    labels: Mapping[str, str], cells: Cells, rows: str | None = None, columns: str | None = None
) -> Layout:
    """Choose the rows and the columns of a pivot; both may be named by key, label or last part.

    By default the rows are the method if it varies, else the first axis that does, and the columns
    the one other axis that varies, none of several.

    Raises:
        BadInput: there is no such axis, or it is named twice.
    """
    varied = [axis for axis in labels if len({cell[axis] for cell in cells}) > 1]
    across = None if columns is None else _find(columns, labels, "columns")
    free = [axis for axis in varied if axis != across]
    if rows is not None:
        first: str | None = _find(rows, labels, "rows")
        if first == across:
            raise BadInput(f"rows and columns are both '{first}'; name two axes")
    else:
        methods = [axis for axis in free if axis in ("method", "method.name")]
        first = next(iter([*methods, *free]), None)
    if first is None:
        if across is not None:
            raise BadInput(f"columns: the runs differ in nothing but '{across}'; leave it out")
        return Layout((), None, ())
    # Settings of the component that the rows name, and what follows from it, go with them.
    own = first.removesuffix(".name") + "."
    competing = [first] + [
        axis
        for axis in free
        if axis != first and (axis.startswith(own) or _follows(axis, first, cells))
    ]
    others = [axis for axis in free if axis not in competing]
    if columns is None:
        if leading := [a for a in others if all(_follows(b, a, cells) for b in others if b != a)]:
            across, others = leading[0], []
        elif rows is not None and others:
            raise BadInput(f"rows: name the columns, too: {', '.join(others)}")
    return Layout(tuple(competing), across, tuple(others))


def _follows(axis: str, other: str, cells: Cells) -> bool:
    pairs = {(cell[other], cell[axis]) for cell in cells}
    return len(pairs) == len({value for value, _ in pairs})


def _find(name: str, labels: Mapping[str, str], what: str) -> str:
    for axis, label in labels.items():
        if name in (axis, label):
            return axis
    ending = [axis for axis in labels if axis.rpartition(".")[2] == name]
    if len(ending) == 1:
        return ending[0]
    hint = nearest(name, labels) if labels else "; the runs differ in nothing but their seeds"
    raise BadInput(f"{what}: '{name}' is not an axis of these runs{hint}")
