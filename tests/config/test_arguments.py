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
from fedsim import Dataset, Experiment, Run
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
# Of one argument after the first: what it is not.
WRONG = {
    "predictions": {
        "client": ["a", {}, [], 1.5, True, np.nan, -1, 99],
        "after": ["a", {}, [], 1.5, True, np.nan, -1, 99],
    },
    "replay": {"after": ["a", {}, 1.5, True, -1, 99], "dataset": [3, {}]},
    "explanations": {
        "explainer": [3, {}, "nope"],
        "client": ["a", {}, 1.5, True, [[1]], -1, 99],
        "after": ["a", {}, 1.5, True, ["a"], -1, 99],
        "row": ["a", {}, 1.5, True, [1.5], -1, 99],
        "input": [3, {}, "nowhere"],
        "text": [3],
        "settings": [3, [], {"nope": 1}],
        "progress": [3, "a", None],
    },
    "clusters": {
        "explainer": [3, {}, "nope"],
        "after": ["a", {}, 1.5, True, [1], -1, 99],
        "of": ["a", 3, []],
        "inputs": ["a", 0, 1.5, None, True],
        "most": ["a", 1, 1.5, None, True],
        "progress": [3, "a", None],
    },
    "contributions": {
        "score": [3, {}, "nope"],
        "how": ["a", 3, []],
        "permutations": ["a", 1, 1.5, None, True],
        "tolerance": ["a", -1, np.nan, None],
        "budget": ["a", 0, 1.5, None, True],
        "progress": [3, "a", None],
    },
    "drifts": {
        "explainer": [3, {}, "nope"],
        "inputs": ["a", 0, 1.5, None, True],
        "progress": [3, "a", None],
    },
    "influence": {
        "row": ["a", {}, 1.5, True, None, [1], -1, 99],
        "explainer": [3, {}, "nope"],
        "estimate": [3, "a", None],
        "progress": [3, "a", None],
    },
    "unlearn": {
        "clients": ["a", {}, [], 1.5, True, None, [[1]], ["a"], -1, 99, range(3)],
        "method": [3, None, "nope", {}, {"name": "nope"}, {"name": "fine_tune", "rounds": "a"}],
        "explainer": [3, {}, "nope"],
        "shadows": [-1, 1, "a", 1.5, None, True],
        "progress": [3, "a", None],
    },
    "audit": {
        "explainers": [3, {}, "nope", [3]],
        "shadows": [-1, 1, "a", 1.5, None, True],
        "noise": ["a", -1, np.nan, {}, ["a"]],
        "progress": [3, None],
    },
    "report": {
        key: [3, {}] for key in ("out", "latex", "csv", "figures", "figure", "rows", "columns")
    },
    "view": {
        "port": ["a", -1, 65536, 1.5, None, True],
        "height": ["a", 0, 1.5, None, True],
        "trust": [3, "a", None],
    },
    "extend": {"overrides": [None, 3, {}, [3], b"x", "a", "train.rounds=9"], "out": [3, None]},
    "without": {
        "clients": ["a", {}, [], 1.5, True, None, [[1]], ["a"], -1, 99],
        "replace": [3, "a"],
        "out": [3, {}],
        "progress": [3, None],
    },
    "run": {"out": [3, None, {}], "progress": [3, None], "on_start": [3, None]},
    "compare": {},
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
    if name == "extend" and "overrides" not in keywords:
        keywords = {"overrides": {"train.rounds": 3}, **keywords}
    if name == "influence" and "row" not in keywords:
        keywords = {"row": 0, **keywords}
    if name in ("without", "unlearn") and "clients" not in keywords:
        keywords = {"clients": 0, **keywords}
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


N = 30
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
Y = np.arange(N) % 2
MASKED = np.arange(N) < 3
SOUND: dict[str, Any] = {"x": X, "y": Y, "test_x": X[:9], "test_y": Y[:9], "classes": ("a", "b")}
UNSOUND: list[tuple[dict[str, Any], str]] = [
    ({"columns": {"h": np.arange(29)}}, r"columns\['h'\] of shape \(29,\) must be \(30,\)"),
    ({"columns": {"h": np.zeros((N, 2))}}, r"columns\['h'\] of shape \(30, 2\) must be \(30,\)"),
    ({"columns": {"h": 3}}, r"columns\['h'\] of shape \(\) must be"),
    ({"columns": [1]}, "columns must be a dict of arrays"),
    ({"test_columns": {"h": Y}}, r"test_columns\['h'\] of shape \(30,\) must be \(9,\)"),
    ({"truth": {"signal": np.zeros((3, 4), bool)}}, r"truth\['signal'\] of shape \(3, 4\)"),
    ({"sliced_by": "h"}, "sliced_by='h' is not one of test_columns"),
    ({"y": np.ma.masked_array(Y, MASKED)}, "y has masked values"),
    ({"x": np.ma.masked_array(X, X > 1)}, "x has masked values"),
    ({"columns": {"h": np.ma.masked_array(Y, MASKED)}}, r"columns\['h'\] has masked values"),
    ({"classes": ("a", "a")}, "classes has 'a' twice"),
    ({"classes": "ab"}, "classes must be a tuple, not 'ab'"),
    ({"classes": None}, "classes must be a tuple, not None"),
    ({"y": np.where(Y == 0, np.nan, 1.0)}, "y has NaN or infinite values"),
    ({"y": Y.astype(float)}, "y must be class indices from 0 to 1"),
    ({"y": Y + 1}, "y must be class indices from 0 to 1"),
    ({"y": Y[:5]}, r"x of shape \(30, 4\) and y of \(5,\) do not go together"),
    ({"y": None}, r"x of shape \(30, 4\) and y of \(\) do not go together"),
    ({"x": [[1], [1, 2]]}, "x is no array"),
    ({"x": X.astype(complex)}, "x must hold numbers, not complex"),
    ({"features": ("a",)}, "1 features for inputs of shape"),
    ({"features": ("a", "a", "b", "c")}, "features has 'a' twice"),
    ({"mean": (0.5,)}, "mean=.* must be one number each or one per channel"),
    ({"mean": (0.5,), "std": (0.0,)}, "std above 0"),
    ({"mean": (1, 2), "std": (1, 2)}, "must be one number each"),
    ({"mean": (np.nan,), "std": (1.0,)}, "finite"),
    ({"copies": 31}, "copies=31 of 30 training examples"),
    ({"words": ("", "<unknown>")}, "2 words, 0 vectors and 0 of known"),
    ({"scaling": 3}, "scaling must be a Scaling, not 3"),
    ({"note": None}, "note must be a str, not None"),
]


@pytest.mark.parametrize(("parts", "words"), UNSOUND)
def test_data_sets(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=rf"^data: .*{words}") as raised:
        Experiment.from_dict({**CONTENT, "data": Dataset(**{**SOUND, **parts})})
    assert "\n" not in str(raised.value)


def test_data_sets_of_own_sources_too() -> None:
    class Own(Source):
        name: str = "own"

        def load(self) -> Dataset:
            return Dataset(**SOUND, columns={"h": Y[:5]})

    with pytest.raises(DataError, match=r"^data\.name=own: columns\['h'\] of shape \(5,\) must"):
        load_dataset(Own())


def _of(**keywords: Any) -> Dataset:
    return Dataset.of(keywords.pop("x", X), keywords.pop("y", Y), **keywords)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"y": np.ma.masked_array(Y, MASKED)}, "y has masked values"),
        ({"h": np.ma.masked_array(Y, MASKED)}, "h has masked values"),
        ({"h": Y[:3]}, "'h' has shape"),
        ({"y": Y[:5]}, "'y' has 5 labels for 30 inputs"),
        ({"y": np.where(Y == 0, np.nan, 1.0)}, "'y' is float64"),
        ({"x": None}, "'x' is object of shape"),
        *(
            ({"test_fraction": f}, "test_fraction=.* must be between 0 and 1")
            for f in (2, "a", 0.0)
        ),
    ],
)
def test_data_sets_of_arrays(keywords: dict[str, NDArray[Any]], words: str) -> None:
    with pytest.raises(DataError, match=f"^data: {words}"):
        _of(**keywords)
