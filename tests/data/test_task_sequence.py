"""Streams of tasks: the published sequences, how examples are cut, and what is refused."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from experiments import examples
from fedsim.data import ClientSplits, Dataset, TaskSequence, datasets, partitions
from fedsim.data.splits import take_stratified
from fedsim.errors import DataError
from fedsim.support.rng import keyed_rng

REAL = Path(os.environ.get("FEDSIM_DATA", "/nowhere"))

# The 15 tasks that FedSeIT's released code draws, by the number of classes.
DRAWN = {
    8: "4356 3654 0213 2706 4732 5372 5421 4673 1065 7025 2351 7120 6721 4106 3752",
    7: "0154 1432 2601 4205 1253 4126 6430 1425 2403 3605 4162 6325 3264 1304 5612",
    6: "5302 3214 4035 2401 3452 2345 0215 3245 4205 1053 2341 0142 1425 3102 0342",
}
TASKS = {
    n: [[int(label) for label in task] for task in drawn.split()] for n, drawn in DRAWN.items()
}
ALLOCATED = {
    1: [[10, 11, 8, 7, 9], [14, 3, 6, 5, 13], [2, 12, 4, 1, 0]],
    2: [[10, 11, 8, 7, 9], [2, 6, 12, 4, 3], [1, 14, 0, 5, 13]],
}


def dataset(
    y: Any, classes: Any = "abcdefghij", tested: Any = None, size: int | None = None
) -> Dataset:
    """Labels and names are all that a stream looks at."""
    y = np.asarray(y, dtype=np.int64)
    classes = tuple(classes)[: size or int(y.max()) + 1]
    tested = np.arange(len(classes)) if tested is None else np.asarray(tested, dtype=np.int64)
    x = np.zeros((len(y), 1), dtype=np.float32)
    return Dataset(x, y, np.zeros((len(tested), 1), dtype=np.float32), tested, classes)


def shuffled(classes: int, of_each: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), of_each))


def deal(data: Dataset, seed: int = 0, kind: str = "tasks", **fields: Any) -> ClientSplits:
    splits: ClientSplits = partitions.parse({"kind": kind, **fields}).deal(data, seed)
    return splits


def own(data: Dataset, tasks: Any, seed: int = 0, **fields: Any) -> ClientSplits:
    return deal(data, seed, kind="own_tasks", tasks=tasks, **fields)


def stream(splits: ClientSplits) -> TaskSequence:
    assert splits.sequence is not None
    return splits.sequence


def shares(splits: ClientSplits) -> list[list[int]]:
    """What each task was dealt, in training and for validation, client by client."""
    of = stream(splits)
    pairs = zip(of.train, of.validation, strict=True)
    return [sorted([*train.tolist(), *aside.tolist()]) for train, aside in pairs]


def slowly(y: Any, rows: Any, tasks: list[list[int]]) -> list[list[int]]:
    """Each task's examples, cut class by class as the text says."""
    found: list[list[int]] = [[] for _ in tasks]
    for label in {label for task in tasks for label in task}:
        users = [i for i, task in enumerate(tasks) if label in task]
        examples = [row for row in rows if y[row] == label]
        size = len(examples) // len(users)
        for place, i in enumerate(users):
            last = place == len(users) - 1
            found[i] += examples[place * size : None if last else (place + 1) * size]
    return [sorted(examples) for examples in found]


def published(classes: int, seed: int) -> list[list[list[int]]]:
    """The tasks of each client."""
    return [[TASKS[classes][i] for i in allocated] for allocated in ALLOCATED[seed]]


def drawn(splits: ClientSplits) -> list[list[list[int]]]:
    return [[list(task) for task in client] for client in stream(splits).order]


def in_order(splits: ClientSplits, seed: int) -> list[list[int]]:
    """What each of the 15 tasks was dealt, by the number of the task."""
    numbers = [i for allocated in ALLOCATED[seed] for i in allocated]
    found = dict(zip(numbers, shares(splits), strict=True))
    return [found[i] for i in range(15)]


@pytest.mark.parametrize("seed", ALLOCATED)
@pytest.mark.parametrize("classes", TASKS)
def test_tasks_and_allocations_are_those_of_the_released_code(classes: int, seed: int) -> None:
    splits = deal(dataset(shuffled(classes, 60)), seed)
    of, expected = stream(splits), published(classes, seed)
    assert drawn(splits) == expected
    assert [[sorted(task) for task in client] for client in expected] == [
        [list(task) for task in client] for client in of.labels
    ]
    assert (of.num_tasks, len(of.train), len(of.validation)) == (5, 15, 15)


@pytest.mark.night
@pytest.mark.filterwarnings("ignore:.*words get random vectors:UserWarning")
@pytest.mark.parametrize("name", ["r8", "tmn", "trec6"])
def test_published_streams_of_real_documents(name: str) -> None:
    if not (REAL / name.removesuffix("6")).is_dir():
        pytest.skip(f"{name} is not in FEDSIM_DATA")
    data = datasets.parse({"name": name, "root": REAL, "dimension": 1}).load()
    classes = len(data.classes)
    for seed in ALLOCATED:
        splits = deal(data, seed)
        assert drawn(splits) == published(classes, seed)
        assert in_order(splits, seed) == slowly(data.y, range(len(data.y)), TASKS[classes])
        of = stream(splits)
        for train, aside in zip(of.train, of.validation, strict=True):
            assert len(aside) == np.ceil((len(train) + len(aside)) / 8)


@given(
    clients=st.integers(1, 4), tasks=st.integers(1, 4), classes=st.integers(2, 5), data=st.data()
)
@examples(25)
def test_other_numbers_of_tasks_are_drawn_by_the_same_rule(
    clients: int, tasks: int, classes: int, data: st.DataObject
) -> None:
    C = data.draw(st.integers(classes, 9))
    seed = data.draw(st.integers(0, 2**31))
    labels = list(range(C))
    random.Random(42).shuffle(labels)
    T = clients * tasks
    drawn = [random.Random(42 + i).sample(labels, classes) for i in range(T)]
    names, taken, expected = sorted(str(i) for i in range(T)), [], []
    for k in range(clients):
        order = names.copy()
        random.Random(k * seed + 5).shuffle(order)
        order = [name for name in order if name not in taken][:tasks]
        taken += order
        expected.append([tuple(drawn[int(name)]) for name in order])
    fields: dict[str, Any] = {"clients": clients, "tasks": tasks, "classes": classes}
    found = stream(deal(dataset(shuffled(C, 2 * T)), seed, **fields)).order
    assert [list(client) for client in found] == expected  # client 0 has the same for all seeds


def test_classes_are_shuffled_in_the_order_of_their_names() -> None:
    """However the data set numbers them."""
    y = shuffled(6, 60)
    named = stream(deal(dataset(y, "abcdef"), 1))
    backwards = stream(deal(dataset(y, "fedcba"), 1))
    assert backwards.order == tuple(
        tuple(tuple(5 - label for label in task) for task in client) for client in named.order
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Dataset, list[list[list[str]]]]:
    K, T, C = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    names = "vwxyz"[:C]
    task = st.lists(st.sampled_from(names), min_size=1, max_size=C, unique=True)
    client = st.lists(task, min_size=T, max_size=T)
    tasks = draw(st.lists(client, min_size=K, max_size=K))
    counts = draw(st.lists(st.integers(K * T, 20), min_size=C, max_size=C))
    y = draw(st.permutations([label for label in range(C) for _ in range(counts[label])]))
    return dataset(y, names), tasks


@given(
    case=cases(),
    fraction=st.sampled_from([0.0, 0.125, 0.3]),
    taking_part=st.sampled_from([1.0, 0.9]),
    seed=st.integers(0, 9),
)
@examples(60)
def test_any_stream_deals_as_written_out(
    case: tuple[Dataset, list[list[list[str]]]], fraction: float, taking_part: float, seed: int
) -> None:
    data, tasks = case
    fields = {"validation_fraction": fraction, "train_fraction": taking_part}
    rows = np.arange(len(data.y))
    if taking_part < 1:
        rng = keyed_rng(seed, "train share")
        rows = take_stratified(rows, data.y, taking_part, rng)[0]
    flat = [[data.classes.index(name) for name in task] for client in tasks for task in client]
    uses = Counter(label for task in flat for label in task)
    few = [label for label, n in uses.items() if (data.y[rows] == label).sum() < n]
    if few:
        with pytest.raises(DataError, match=f"class '[{''.join('vwxyz'[i] for i in few)}]' has"):
            own(data, tasks, seed, **fields)
        return
    splits = own(data, tasks, seed, **fields)
    of = stream(splits)
    assert shares(splits) == slowly(data.y, rows.tolist(), flat)
    for i, task in enumerate(flat):
        train, aside = of.train[i].tolist(), of.validation[i].tolist()
        assert train
        assert train == sorted(train)
        assert aside == sorted(aside)
        n = len(train) + len(aside)
        assert len(aside) == (int(np.ceil(fraction * n)) if n > 1 else 0)
        assert of.labels[i // of.num_tasks][i % of.num_tasks] == tuple(sorted(task))
        assert of.order[i // of.num_tasks][i % of.num_tasks] == tuple(task)
        assert set(data.y[train]) | set(data.y[aside]) == set(task)
    for k, everything in enumerate(splits.train):
        parts = [of.train[k * of.num_tasks + i] for i in range(of.num_tasks)]
        assert sorted(everything) == sorted(np.concatenate(parts))
        for i, part in enumerate(parts):
            assert np.array_equal(splits.at(1 + i, of.num_tasks).train[k], part)
    assert not len(splits.unlabelled.values) + len(splits.test.values) + len(splits.server)


def test_a_stream_is_the_same_for_one_seed_and_another_for_another() -> None:
    data = dataset(shuffled(8, 60))
    first, again, other = (stream(deal(data, seed)) for seed in (1, 1, 2))
    assert np.array_equal(first.validation.values, again.validation.values)
    assert np.array_equal(first.train.values, again.train.values)
    # Client 0 learns the same examples, but for what is kept aside.
    assert shares(deal(data, 1))[:5] == shares(deal(data, 2))[:5]
    assert first.validation[0].tolist() != other.validation[0].tolist()


@pytest.mark.parametrize(("T", "rounds"), [(1, 4), (2, 2), (3, 12), (5, 50)])
def test_each_task_takes_as_many_rounds(T: int, rounds: int) -> None:
    of = stream(own(dataset([0] * 10 + [1] * 10), [[["a", "b"]] * T]))
    under_way = [of.task(t, rounds) for t in range(rounds + 1)]
    assert under_way == [0, *(i for i in range(T) for _ in range(rounds // T))]


def test_kinds_are_the_sets_of_classes_each_once() -> None:
    of = stream(own(dataset([0, 1, 2] * 9), [[["b", "a"], ["c"]], [["a", "b"], ["a", "c"]]]))
    assert of.label_sets == [(0, 1), (0, 2), (2,)]


@pytest.mark.parametrize(
    ("counts", "stratified"),
    [
        ([20, 10, 2], True),  # two documents are enough
        ([20, 11, 1], False),  # one cannot be on both sides
        ([9, 9, 9, 9], True),  # five for four classes
        ([5, 5, 5, 5], False),  # three for four
    ],
)
def test_validation_is_stratified_where_it_can_be(counts: list[int], stratified: bool) -> None:
    y = np.repeat(np.arange(len(counts)), counts)
    data = dataset(y)
    found = []
    for seed in range(40):
        of = stream(own(data, [[list(data.classes)]], seed))
        assert len(of.validation[0]) == np.ceil(len(y) / 8)
        assert sorted([*of.train[0], *of.validation[0]]) == list(range(len(y)))
        found.append(np.bincount(y[of.validation[0]], minlength=len(counts)))
    exact = np.array(counts) * np.ceil(len(y) / 8) / len(y)
    assert (np.abs(np.array(found) - exact).max() < 1) == stratified


def test_each_client_and_task_draws_its_own() -> None:
    """A slice of the same length is not cut at the same places."""
    of = stream(own(dataset([0] * 400), [[["a"], ["a"]], [["a"], ["a"]]]))
    places = {
        tuple(np.searchsorted(np.sort([*t, *v]), v))
        for t, v in zip(of.train, of.validation, strict=True)
    }
    assert len(places) == 4


def test_scarce_classes_are_left_out_and_tasks_drawn_again() -> None:
    """As if they were none of the data set's."""
    with_scarce = np.concatenate([shuffled(8, 40), [8, 8]])
    found = stream(deal(dataset(with_scarce, "abcdefghi"), 1))
    assert found.order == stream(deal(dataset(shuffled(8, 40)), 1)).order
    # And wherever its name is among the others.
    moved = stream(deal(dataset(with_scarce, "bcdefghia"), 1))
    assert moved.order == found.order


def test_what_becomes_scarce_when_tasks_are_drawn_again_is_left_out_too() -> None:
    y = np.concatenate([shuffled(6, 40), [6] * 2, [7] * 9])
    found = stream(deal(dataset(y), 1))
    uses = Counter(label for client in found.labels for task in client for label in task)
    assert all(uses[label] <= (y == label).sum() for label in uses)
    assert 6 not in uses


def test_classes_without_test_or_training_examples_are_not_drawn() -> None:
    y = np.concatenate([shuffled(6, 60), [6] * 60])
    untested = deal(dataset(y, tested=range(6)), 2)
    untrained = deal(dataset(shuffled(6, 60), size=8, tested=range(8)), 2)
    assert drawn(untested) == drawn(untrained) == published(6, 2)
