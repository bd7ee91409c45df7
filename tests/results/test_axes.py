"""What axes are called, and which of them a pivot has as rows and columns."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fedsim.errors import BadInput
from fedsim.results.report.axes import Layout, axis_labels, layout
from fedsim.results.report.entries import Entry, Value


def entry(**settings: Value) -> Entry:
    return Entry(None, {}, 0, "", "", "finished", settings=dict(settings))


def test_axes_are_called_as_papers_do() -> None:
    methods = ("fedavg", "fedprox", "fedfed")
    entries = [entry(method=method, partition="dirichlet") for method in methods]
    labels = {
        **{"method.name": "method", "method.mu": "μ", "method.sigma2": "σ2"},
        "partition.alpha": "α",
        "partition.labelled_fraction": "γ",  # documented by the class that it extends
        **{"privacy.delta": "δ", "train.optimizer.lr": "lr", "nowhere.at_all": "at_all"},
        "skew": "skew",  # of named variants
    }
    assert axis_labels([*labels], entries) == labels


def test_what_would_be_called_the_same_keeps_its_key() -> None:
    entries = [entry(method="feddyn", partition="dirichlet")]
    keys = ["method.alpha", "partition.alpha"]
    assert axis_labels(keys, entries) == {key: key for key in keys}


def test_components_of_ones_own_are_not_imported() -> None:
    assert axis_labels(["method.mu"], [entry(method="no_such_module:Mine")]) == {"method.mu": "mu"}


def cells(**axes: tuple[Value, ...]) -> list[dict[str, Value]]:
    """All combinations."""
    keys = [key.replace("__", ".") for key in axes]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*axes.values())]


METHODS = {"method": ("fedavg", "fedprox")}
TWO = cells(partition__alpha=(0.1, 1.0), **METHODS)
THREE = cells(partition__alpha=(0.1, 1.0), data=("a", "b"), **METHODS)
# Settings that only some methods have, and what follows from another axis.
WITH_MU = [
    {**cell, "method": method, "method.mu": mu, "skew": f"skew {cell['partition.alpha']}"}
    for cell in cells(partition__alpha=(0.1, 1.0))
    for method, mu in (("fedavg", "–"), ("fedprox", 0.1), ("fedprox", 1.0))
]


@pytest.mark.parametrize(
    ("found", "given", "expected"),
    [
        (TWO, {}, Layout(("method",), "partition.alpha", ())),
        (TWO, {"rows": "α"}, Layout(("partition.alpha",), "method", ())),
        (TWO, {"columns": "method"}, Layout(("partition.alpha",), "method", ())),
        (TWO[:1], {}, Layout((), None, ())),
        (cells(**METHODS), {}, Layout(("method",), None, ())),
        (cells(a=(1, 2), b=(3, 4)), {}, Layout(("a",), "b", ())),
        (THREE, {}, Layout(("method",), None, ("partition.alpha", "data"))),
        (THREE, {"columns": "alpha"}, Layout(("method",), "partition.alpha", ("data",))),
        (WITH_MU, {}, Layout(("method", "method.mu"), "partition.alpha", ())),
    ],
)
def test_rows_and_columns(found: Any, given: dict[str, str], expected: Layout) -> None:
    labels = axis_labels(list(found[0]), [entry(method="fedprox", partition="dirichlet")])
    assert layout(labels, found, **given) == expected


def test_axes_that_there_are_not() -> None:
    asked: list[tuple[Any, dict[str, str], str]] = [
        (TWO, {"rows": "metod"}, r"rows: 'metod' is not an axis .*; did you mean 'method'\?"),
        (TWO, {"columns": "lr"}, "columns: 'lr' is not an axis .*; known: method, partition.alp"),
        (TWO, {"rows": "alpha", "columns": "partition.alpha"}, "both 'partition.alpha'; name two"),
        (THREE, {"rows": "method"}, "rows: name the columns, too: partition.alpha, data"),
        (cells(**METHODS), {"columns": "method"}, "in nothing but 'method'; leave it out"),
    ]
    for found, given, message in asked:
        with pytest.raises(BadInput, match=message):
            layout({axis: axis for axis in found[0]}, found, **given)


@pytest.mark.parametrize(
    ("layout", "competing", "alike"),
    [
        (Layout(("method",), "partition.alpha", ()), ("method",), ("partition.alpha",)),
        (Layout(("partition.alpha",), "method", ()), ("method",), ("partition.alpha",)),
        (
            Layout(("data",), "partition.alpha", ("train.lr", "method", "method.mu")),
            ("method", "method.mu"),
            ("data", "partition.alpha", "train.lr"),
        ),
        (Layout(("method", "partition.alpha"), None, ()), ("method",), ("partition.alpha",)),
        (Layout(("train.lr",), "method", ()), ("train.lr",), ("method",)),
        (Layout(("partition.alpha",), "data", ()), (), ("partition.alpha", "data")),
    ],
)
def test_what_competes_within_one_problem(
    layout: Layout, competing: tuple[str, ...], alike: tuple[str, ...]
) -> None:
    assert layout.competing == competing
    assert layout.alike == alike
