"""Python refuses what the command would refuse: in one line that names what was given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

import fedsim
from fedsim import Dataset, Run
from fedsim.config.arguments import _fits
from fedsim.data import Source, load_dataset
from fedsim.errors import DataError, FedsimError

CONTENT = {
    "data": {"name": "synthetic", "samples": 60, "test_samples": 20, "shape": [4], "classes": 3},
    "partition": {"kind": "iid", "clients": 3},
    "model": {"name": "mlp", "hidden": [4]},
    "method": {"name": "fedavg"},
    "train": {"rounds": 2},
    "engine": {"kind": "local"},
}
OF_EXPERIMENTS = ("run", "grid", "tune")
OF_RESULTS = ("resume", "load", "predictions", "explanations", "clusters", "audit", "compare")
OF_RESULTS += ("contributions", "drifts", "influence", "report", "view")
FUNCTIONS = (*OF_EXPERIMENTS, *OF_RESULTS, "replay", "extend", "without", "unlearn")
NONSENSE = [None, {}, [], 3, object(), b"x", float("nan"), True]
# What an argument is not that names clients or a round, that counts, that is told of progress.
NOBODY = ["a", {}, 1.5, True, -1, 99]
UNCOUNTED = ["a", 0, 1.5, None, True]
UNTOLD = {"progress": [3, "a", None]}
UNEXPLAINED = {"explainer": [3, {}, "nope"]}
SHADOWS = {"shadows": [-1, 1, "a", 1.5, None, True]}
# Of one argument after the first: what it is not.
WRONG: dict[str, dict[str, list[Any]]] = {
    "predictions": {key: [*NOBODY, [], np.nan] for key in ("client", "after")},
    "replay": {"after": NOBODY, "dataset": [3, {}]},
    "explanations": {
        **{**UNEXPLAINED, **UNTOLD, "client": [*NOBODY, [[1]]], "after": [*NOBODY, ["a"]]},
        **{"row": [*NOBODY, [1.5]], "input": [3, {}, "nowhere"], "text": [3]},
        "settings": [3, [], {"nope": 1}],
    },
    "clusters": {
        **{**UNEXPLAINED, **UNTOLD, "after": [*NOBODY, [1]], "of": ["a", 3, []]},
        **{"inputs": UNCOUNTED, "most": [*UNCOUNTED, 1]},
    },
    "contributions": {
        **{**UNTOLD, "score": [3, {}, "nope"], "how": ["a", 3, []], "budget": UNCOUNTED},
        **{"permutations": [*UNCOUNTED, 1], "tolerance": ["a", -1, np.nan, None]},
    },
    "drifts": {**UNEXPLAINED, **UNTOLD, "inputs": UNCOUNTED},
    "influence": {
        **{**UNEXPLAINED, **UNTOLD, "row": [*NOBODY, None, [1]], "estimate": [3, "a", None]},
    },
    "unlearn": {
        **{**UNEXPLAINED, **UNTOLD, **SHADOWS},
        "clients": [*NOBODY, [], None, [[1]], ["a"], range(3)],
        "method": [3, None, "nope", {}, {"name": "nope"}, {"name": "fine_tune", "rounds": "a"}],
    },
    "audit": {
        **{**SHADOWS, "explainers": [3, {}, "nope", [3]], "progress": [3, None]},
        "noise": ["a", -1, np.nan, {}, ["a"]],
    },
    "report": {
        key: [3, {}] for key in ("out", "latex", "csv", "figures", "figure", "rows", "columns")
    },
    "view": {
        **{"port": ["a", -1, 65536, 1.5, None, True], "height": UNCOUNTED},
        "trust": [3, "a", None],
    },
    "extend": {"overrides": [None, 3, {}, [3], b"x", "a", "train.rounds=9"], "out": [3, None]},
    "without": {
        **{"clients": [*NOBODY, [], None, [[1]], ["a"]], "replace": [3, "a"]},
        **{"out": [3, {}], "progress": [3, None]},
    },
    "run": {"out": [3, None, {}], "progress": [3, None], "on_start": [3, None]},
}
NEEDED: dict[str, dict[str, Any]] = {
    "extend": {"overrides": {"train.rounds": 3}},
    "influence": {"row": 0},
    **{name: {"clients": 0} for name in ("without", "unlearn")},
}
CASES = [
    *((name, (nonsense,), {}) for name in FUNCTIONS for nonsense in NONSENSE),
    *(
        (name, None, {key: value})
        for name, keys in WRONG.items()
        for key, values in keys.items()
        for value in values
    ),
    *((name, (), {}) for name in ("compare", "report")),
]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fedsim.run(CONTENT, tmp_path_factory.mktemp("runs"), progress=False)


def refusal(call: Callable[[], object]) -> str:
    """The line that a call is refused with."""
    with pytest.raises((FedsimError, TypeError, ValueError)) as raised:
        call()
    frames = raised.traceback
    ours = str(frames[-1].path).startswith(str(Path(inspect.getfile(fedsim)).parent))
    assert ours or isinstance(raised.value, FedsimError), raised.value
    return str(raised.value)


@pytest.mark.parametrize(
    ("value", "expected", "fits"),
    [
        (np.ones(3), NDArray[np.float64], True),
        ([1.0], NDArray[np.float64], False),
        (np.ones(3), Sequence[float], True),
        (np.ones(3), Sequence[str], False),
        (iter([1, 2]), Iterable[int], True),
        ((k for k in range(3)), Iterable[int], True),
        ((k for k in range(3)), Sequence[int], False),
        ([1, "a"], Iterable[int], False),
        ("ab", Iterable[str], False),
        (3, Iterable[int], False),
        (None, int | None, True),
        (True, int | None, False),
    ],
)
def test_what_fits_an_annotation(value: Any, expected: Any, fits: bool) -> None:
    assert _fits(value, expected) is fits
    if isinstance(value, Iterator) and fits:
        assert list(value)  # nothing was taken from it


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: fedsim.run(), "run: missing a required argument: 'experiment'"),
        (lambda: fedsim.load("a", b=1), "load: got an unexpected keyword argument 'b'"),
        (lambda: fedsim.load("a", "b"), "load: too many positional arguments"),
    ],
)
def test_arguments_too_few_or_too_many(call: Callable[[], object], line: str) -> None:
    assert refusal(call) == line


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "no/such", "x" * 300])
@pytest.mark.parametrize("function", ["load", "compare", "report", "replay", "resume"])
def test_no_folder_can_have_such_a_name(function: str, name: str) -> None:
    with pytest.raises(FedsimError, match="there is no such folder"):
        getattr(fedsim, function)(name)


def test_all_public_functions_are_covered() -> None:
    public = {name for name in fedsim.__all__ if inspect.isfunction(getattr(fedsim, name))}
    assert public == {*FUNCTIONS}


@pytest.mark.parametrize(("name", "given", "keywords"), CASES)
def test_functions(
    name: str,
    given: tuple[Any, ...] | None,
    keywords: dict[str, Any],
    done: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if given is None:
        given = (CONTENT,) if name == "run" else (done.path,) if name == "report" else (done,)
    keywords = {**NEEDED.get(name, {}), **keywords}
    line = refusal(lambda: getattr(fedsim, name)(*given, **keywords))
    for key, value in keywords.items():
        if not isinstance(value, dict | int | list):
            assert key in line or str(value) in line
    assert not list(tmp_path.iterdir())


def test_numbers_and_arrays_of_numpy_are_numbers_and_sequences(done: Run) -> None:
    table = fedsim.predictions(done, np.int64(1), np.int32(2))
    assert len(table) == 20
    found = fedsim.explanations(
        done, "occlusion", row=np.arange(2), client=pd.Series([0, 1]).to_numpy()
    )
    assert len(found) == 2


def test_data_sets_of_own_sources_too() -> None:
    class Own(Source):
        name: str = "own"

        def load(self) -> Dataset:
            x, y = np.zeros((30, 4)), np.arange(30) % 2
            return Dataset(x, y, x, y, ("a", "b"), columns={"h": y[:5]})

    with pytest.raises(DataError, match=r"^data\.name=own: columns\['h'\] of shape \(5,\) must"):
        load_dataset(Own())
