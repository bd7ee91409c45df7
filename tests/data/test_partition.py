"""Partitions: what all of them must be, and what each kind is."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from experiments import WHOLE, small_experiment
from fedsim.data import ClientSplits, Dataset, Partition, Ragged, partitions
from fedsim.data.dataset import Scaling
from fedsim.data.labels import draw_labels, label_names, label_table
from fedsim.data.splits import take_stratified
from fedsim.data.task_sequence import TaskPartition
from fedsim.errors import DataError
from fedsim.testing import check_partition

Indices = NDArray[np.int64]

N, CLASSES = 240, 6
# What is needed of each registered kind; a new kind must be added here to be tested.
KINDS: dict[str, dict[str, Any]] = {
    "iid": {"clients": 7},
    "dirichlet": {"clients": 5, "alpha": 0.5},
    "pathological": {"clients": 8, "classes_per_client": 2},
    "quantile": {"clients": 7},
    "quantity": {"clients": 7},
    "natural": {"column": "writer", "clients": 5},
    "aspects": {"column": "writer", "clients": 11, "subsets": 2},
    "file": {"path": "rows.json"},
}
RANDOM = sorted(set(KINDS) - {"file"})
TASKS = ("classes", "target")
REFUSED = {("dirichlet", "target"), ("pathological", "target"), ("quantile", "classes")}
# Every registered kind, with each sort of data set that it deals.
IN_TIME = {kind for kind, found in partitions.items() if issubclass(found, TaskPartition)}
CASES = [
    (kind, task)
    for kind, _ in partitions.items()
    for task in TASKS
    if kind not in IN_TIME and (kind, task) not in REFUSED
]
SHARED = [(kind, task) for kind, task in CASES if kind != "file"]  # files assign all examples


def dataset(y: NDArray[np.int64], **columns: NDArray[Any]) -> Dataset:
    """Labels and columns are all that a partition looks at."""
    x = np.zeros((len(y), 1), dtype=np.float32)
    classes = tuple("abcdefghij"[: max(CLASSES, int(y.max()) + 1)])
    return Dataset(x, y, x[:1], y[:1], classes, columns=columns)


def labels(count: int = N, classes: int = CLASSES, seed: int = 0) -> NDArray[np.int64]:
    """Unbalanced, and every class there."""
    rng = np.random.default_rng(seed)
    skewed = np.minimum(rng.geometric(0.3, count - 4 * classes) - 1, classes - 1)
    return rng.permutation(np.concatenate([skewed, np.repeat(np.arange(classes), 4)]))


def regression(y: NDArray[np.float64], **columns: NDArray[Any]) -> Dataset:
    x = np.zeros((len(y), 1))
    return Dataset(x, y, x[:1], y[:1], (), columns=columns, target="rate")


def targets(count: int = N, seed: int = 0) -> NDArray[np.float64]:
    """Some of them more than once."""
    return np.random.default_rng(seed).normal(size=count).round(1)


def make(kind: str, **fields: Any) -> Partition:
    return partitions.find(kind).model_validate({"kind": kind, **KINDS[kind], **fields})


@pytest.fixture(autouse=True)
def _rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [part.tolist() for part in np.array_split(np.random.default_rng(1).permutation(N), 6)]
    Path("rows.json").write_text(json.dumps(rows))


@pytest.fixture
def data(request: pytest.FixtureRequest) -> Dataset:
    """With classes, or with a target where the test asks for it."""
    writer = np.array([f"writer {k % 11}" for k in range(N)])
    if getattr(request, "param", "classes") == "target":
        return regression(targets(), writer=writer)
    return dataset(labels(), writer=writer)


def test_every_kind_is_tested() -> None:
    spatial = {kind for kind, _ in partitions.items()} - IN_TIME
    assert set(KINDS) == spatial == {kind for kind, _ in CASES}


@pytest.mark.parametrize(("kind", "data"), CASES, indirect=["data"])
def test_every_kind(kind: str, data: Dataset) -> None:
    check_partition(make(kind), data, random=kind in RANDOM)
    splits = make(kind).deal(data, seed=0)
    assert splits.train.values.dtype == np.int64
    assert len(splits) == len(splits.unlabelled) == len(splits.test)
    for nobodys in (splits.unlabelled.values, splits.test.values, splits.server):
        assert len(nobodys) == 0
    with pytest.raises(DataError, match=r"^client \d+ holds \d+ examples?, too few for part"):
        make(kind, test_fraction=0.999).deal(data, 0)
    if "clients" in KINDS[kind]:
        with pytest.raises(DataError, match=f"{N + 1}"):
            make(kind, clients=N + 1).deal(data, 0)


@pytest.mark.parametrize(("kind", "data"), SHARED, indirect=["data"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_of_the_share_that_takes_part_each_has_its_own(
    data: Dataset, kind: str, share: float
) -> None:
    """The server too, and both shares have each class in proportion."""
    fractions = {"server_fraction": 0.25, "test_fraction": 0.2, "labelled_fraction": 0.5}
    partition = make(kind, train_fraction=share, **fractions)
    first, again, other = (partition.deal(data, seed) for seed in (0, 0, 1))

    def everyone(splits: ClientSplits) -> Indices:
        parts = (splits.train, splits.unlabelled, splits.test)
        return np.concatenate([splits.server, *(part.values for part in parts)])

    dealt = everyone(first)
    assert len(np.unique(dealt)) == len(dealt) <= N * share
    assert len(first.server) == round(0.25 * N * share)
    in_proportion = [(first.server, 0.25 * share)]
    if len(make(kind).deal(data, 0).train.values) == N:  # kinds that deal out all there is
        assert len(dealt) == N * share
        in_proportion.append((dealt, share))
    for rows, fraction in in_proportion:
        counts = np.bincount(data.strata[rows], minlength=CLASSES)
        due = fraction * np.bincount(data.strata, minlength=CLASSES)
        assert np.abs(counts - due).max() <= 1
    assert everyone(again).tolist() == dealt.tolist()
    assert set(other.server.tolist()) != set(first.server.tolist())
    assert share == 1 or set(everyone(other).tolist()) != set(dealt.tolist())


def test_what_is_too_skewed_is_not_drawn_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsim.data.partition.MAX_DRAWN", 20 * 5 * CLASSES)
    made = make("dirichlet", alpha=0.01, min_samples=N // 5)
    with pytest.raises(DataError, match=r"in 20 draws of Dir\(0.01\) among 5 clients, none"):
        made.deal(dataset(labels()), 0)


@given(clients=st.integers(1, 40), count=st.integers(40, 80), seed=st.integers(0, 1000))
def test_iid_and_quantile_deal_all_evenly_quantile_by_target(
    clients: int, count: int, seed: int
) -> None:
    data = regression(targets(count, seed))
    for kind in ("iid", "quantile"):
        shares = make(kind, clients=clients).split(data, np.random.default_rng(0))
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert sorted(np.concatenate(shares)) == list(range(count))
    assert data.y[np.concatenate(shares)].tolist() == sorted(data.y)


@given(
    seed=st.integers(0, 2**32),
    clients=st.integers(1, 6),
    alpha=st.floats(0.2, 1000),
    min_samples=st.integers(1, 12),
)
def test_dirichlet_is_the_formula(seed: int, clients: int, alpha: float, min_samples: int) -> None:
    """Of class c: q_c ~ Dir(α·1_K), examples cut at cumsum(q_c)·n_c; until all have enough."""
    data = dataset(labels(120, seed=seed))
    partition = make("dirichlet", clients=clients, alpha=alpha, min_samples=min_samples)
    shares = partition.split(data, np.random.default_rng(seed))
    rng, of_class = np.random.default_rng(seed), [np.flatnonzero(data.y == c) for c in range(6)]
    held = np.zeros(clients)
    while held.min() < min_samples:
        shares_of = [rng.dirichlet([alpha] * clients).cumsum()[:-1] for _ in of_class]
        cuts = [(q * len(m)).astype(int) for q, m in zip(shares_of, of_class, strict=True)]
        held = sum(np.diff([0, *cut, len(m)]) for cut, m in zip(cuts, of_class, strict=True))
    dealt = [np.split(rng.permutation(m), cut) for m, cut in zip(of_class, cuts, strict=True)]
    for share, pieces in zip(shares, zip(*dealt, strict=True), strict=True):
        assert share.tolist() == np.concatenate(pieces).tolist()
        assert len(share) >= min_samples
    assert sorted(np.concatenate(shares)) == list(range(120))


FLOWER_S = {  # of the digits, by seed: α, clients, least, and the first client's classes
    0: (5, 30, 10, [4, 3, 4, 6, 10, 1, 9, 3, 9, 5]),
    1: (0.5, 10, 20, [5, 22, 26, 0, 9, 10, 17, 7, 1, 51]),
}


@pytest.mark.parametrize("seed", FLOWER_S)
def test_dirichlet_gives_the_first_client_what_flower_datasets_0_6_1_gives_it(seed: int) -> None:
    alpha, clients, least, first = FLOWER_S[seed]
    digits = small_experiment(data=WHOLE).data.load()
    partition = make("dirichlet", clients=clients, alpha=alpha, min_samples=least)
    share, *_ = partition.split(digits, np.random.default_rng(seed))
    assert np.bincount(digits.y[share], minlength=10).tolist() == first


@given(
    clients=st.integers(1, 24),
    classes_per_client=st.integers(1, CLASSES),
    seed=st.integers(0, 1000),
)
def test_pathological_holds_few_classes(clients: int, classes_per_client: int, seed: int) -> None:
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(CLASSES), 30))
    data = dataset(y)
    partition = make("pathological", clients=clients, classes_per_client=classes_per_client)
    table = label_table(data, partition.deal(data, seed))
    assert ((table > 0).sum(axis=1) == classes_per_client).all()
    holders = (table > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    for c in range(CLASSES):
        pieces = table[table[:, c] > 0, c]
        assert pieces.sum() in (0, 30)  # a class that is held is dealt out whole
        assert len(pieces) == 0 or pieces.max() - pieces.min() <= 1


def test_pathological_needs_an_example_for_each_holder() -> None:
    data = dataset(np.array([0] * 20 + [1] * 20 + [2] * 20 + [3] * 20 + [4] * 20 + [5]))
    with pytest.raises(DataError, match="class 'f' has 1 training examples for 4 clients; lower"):
        make("pathological", clients=12, classes_per_client=2).deal(data, 0)


def test_quantile_deals_equal_targets_at_random() -> None:
    data = regression(np.repeat([1.0, 0.0], 20))
    times = np.zeros(40)
    for seed in range(400):
        times[make("quantile", clients=4).deal(data, seed).train[0]] += 1
    assert (times[:20] == 0).all()
    assert times[20:] / 400 == pytest.approx(0.5, abs=0.07)


@given(
    clients=st.integers(1, 30),
    sigma=st.floats(0, 5) | st.sampled_from([500.0, 1e6]),
    min_samples=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_quantity_is_lognormal(clients: int, sigma: float, min_samples: int, seed: int) -> None:
    """What is left of all examples is cut in proportion to exp(σ·N(0, 1))."""
    partition = make("quantity", clients=clients, sigma=sigma, min_samples=min_samples)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a very wide law overflows easily
        shares = partition.split(dataset(labels()), np.random.default_rng(seed))
    assert sorted(np.concatenate(shares)) == list(range(N))
    logs = [sigma * z for z in np.random.default_rng(seed).standard_normal(clients)]
    weights = [math.exp(log - max(logs)) for log in logs]
    spare = N - clients * min_samples
    for k, share in enumerate(shares):
        due = sum(weights[: k + 1]) / sum(weights) * spare
        held = sum(map(len, shares[: k + 1])) - (k + 1) * min_samples
        assert len(share) >= min_samples
        assert due - 1 - 1e-9 < held <= due + 1e-9


@given(
    count=st.integers(4 * CLASSES, 80),
    kinds=st.integers(1, 5),
    min_samples=st.integers(1, 4),
    pick=st.none() | st.integers(1, 5),
)
def test_natural_is_a_client_for_each_value(
    count: int, kinds: int, min_samples: int, pick: int | None
) -> None:
    column = np.random.default_rng(count).choice(list("abcde"[:kinds]), count)
    values = column.tolist()
    often = {v for v in values if values.count(v) >= min_samples}
    wanted = pick and min(pick, len(often))
    partition = make("natural", clients=wanted, min_samples=min_samples)
    shares = partition.split(dataset(labels(len(values)), writer=column), np.random.default_rng(0))
    held = [column[share[0]] for share in shares]
    assert len(set(held)) == len(held) == (wanted or len(often))
    assert often.issuperset(held)
    for value, share in zip(held, shares, strict=True):
        assert sorted(share) == np.flatnonzero(column == value).tolist()


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["12", "3", "12"], ("hospital 12", "hospital 3")),
        ([1.5, -2.0, 1.5], ("hospital 1.5", "hospital -2.0")),
        (["Kiel", "Ulm", "Kiel"], ("Kiel", "Ulm")),
    ],
)
def test_a_client_named_by_a_number_has_the_columns_name(
    data: Dataset, values: list[Any], names: tuple[str, ...]
) -> None:
    sites = replace(data, columns={"hospital": np.array(values)})
    shares = [np.array([0, 2]), np.array([1])]
    assert make("natural", column="hospital").client_names(sites, shares) == names


def test_files_assign_what_they_say(data: Dataset) -> None:
    Path("own.json").write_text("[[3, 1], [2], [239, 0, 7]]")
    shares = make("file", path="own.json").deal(data, 0).train
    assert [share.tolist() for share in shares] == [[3, 1], [2], [239, 0, 7]]
    names = ["10", "2", "b", "0", "a"]  # numbers are sorted as such
    np.savez("own.npz", **{name: np.array([k], np.uint8) for k, name in enumerate(names)})
    shares = make("file", path="own.npz").deal(data, 0).train
    assert shares.values.tolist() == [names.index(name) for name in ("0", "2", "10", "a", "b")]


@given(
    y=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    hundredths=st.integers(0, 100),
    seed=st.integers(0, 1000),
)
def test_stratified_draws(y: list[int], hundredths: int, seed: int) -> None:
    everyone = np.array([9, 9, *y])  # the two at the front are not of the share
    share = np.random.default_rng(seed).permutation(np.arange(2, len(everyone)))
    fraction = hundredths / 100
    rng = np.random.default_rng(seed)
    taken, rest = take_stratified(share, everyone, fraction, rng)
    assert sorted([*taken, *rest]) == list(range(2, len(everyone)))
    assert taken.tolist() == sorted(taken)
    assert rest.tolist() == sorted(rest)
    assert len(taken) == round(fraction * len(y))
    # Largest remainders: all get the whole part of their due; those with the most left, one more.
    due = {c: Fraction(hundredths, 100) * y.count(c) for c in set(y)}
    got = {c: int((everyone[taken] == c).sum()) for c in due}
    more = {c for c in due if got[c] == math.floor(due[c]) + 1}
    assert all(got[c] == math.floor(due[c]) for c in due.keys() - more)
    least = min((due[c] % 1 for c in more), default=Fraction(1))
    assert all(due[c] % 1 <= least for c in due.keys() - more)


def test_stratified_draws_are_uniform_within_a_class() -> None:
    y = np.repeat([0, 1], 5)
    rng = np.random.default_rng(0)
    times = np.zeros(10)
    for _ in range(2000):
        times[take_stratified(np.arange(10), y, 0.4, rng)[0]] += 1
    assert times / 2000 == pytest.approx(0.4, abs=0.05)


def test_shares_of_a_regression_are_cut_at_random() -> None:
    """Neither the first examples nor the lowest targets: each part is like the whole."""
    N = 4000
    y = np.random.default_rng(0).permutation(N).astype(np.float64)
    fractions = {"test_fraction": 0.3, "labelled_fraction": 0.5, "server_fraction": 0.2}
    splits = make("iid", clients=1, **fractions).deal(regression(y), 0)
    held = [splits.server, splits.train[0], splits.unlabelled[0], splits.test[0]]
    assert [len(part) for part in held] == [800, 1120, 1120, 960]
    for part in held:
        for values in (part, y[part]):  # quarters of all indices, and of all targets
            quarters = np.histogram(values, 4, (0, N))[0] / len(part)
            assert quarters == pytest.approx(0.25, abs=0.06)


@pytest.mark.parametrize(
    ("kind", "data"), [("dirichlet", "classes"), ("quantile", "target")], indirect=["data"]
)
def test_label_table(kind: str, data: Dataset) -> None:
    splits = make(kind, test_fraction=0.3, labelled_fraction=0.5).deal(data, 0)
    bins, ends = (CLASSES, (0, CLASSES)) if data.classes else (10, (data.y.min(), data.y.max()))
    expected = np.zeros((len(splits), bins), dtype=np.int64)
    for part in (splits.train, splits.unlabelled, splits.test):
        for k in range(len(splits)):
            expected[k] += np.histogram(data.y[part[k]], bins, ends)[0]
    table = label_table(data, splits)
    assert table.tolist() == expected.tolist()
    assert table.sum() == N
    assert table.shape[1] == len(label_names(data))
    assert not data.classes or label_names(data) == data.classes


@pytest.mark.parametrize(
    ("low", "high", "first", "last"),
    [
        (0, 1, "0.0-0.1", "0.9-1.0"),
        (0.7, 1.7, "0.7-0.8", "1.6-1.7"),
        (3.02, 17.15, "3.0-4.4", "15.7-17.1"),
        (0, 0.3, "0.00-0.03", "0.27-0.30"),
        (1900, 2000, "1900-1910", "1990-2000"),
        (0, 500_000, "0-50000", "450000-500000"),
        (-1, 1, "-1.0 to -0.8", "0.8 to 1.0"),
        (-1e-12, 1, "0.0-0.1", "0.9-1.0"),
        (0, 1e9, "0-1e+08", "9e+08-1e+09"),
        (1e-9, 3e-8, "1e-09 to 3.9e-09", "2.71e-08 to 3e-08"),
    ],
)
def test_bins_have_readable_names(low: float, high: float, first: str, last: str) -> None:
    names = label_names(regression(np.array([high, low])))
    assert (len(names), names[0], names[-1]) == (10, first, last)


def test_bins_are_in_the_target_s_own_units() -> None:
    y = np.array([77.0, 100, 143, 90])
    scaling = Scaling.minmax(y)
    data = replace(regression(scaling(y)), target_scaling=scaling)
    assert label_names(data) == label_names(regression(y))
    splits = make("iid", clients=2).deal(data, 0)
    np.testing.assert_array_equal(label_table(data, splits), label_table(regression(y), splits))


@given(y=st.lists(st.floats(-1e100, 1e100), min_size=1, max_size=20))
def test_bins_of_any_targets(y: list[float]) -> None:
    data = regression(np.array(y))
    names = label_names(data)
    assert len(set(names)) == len(names)
    assert max(len(name) for name in names) < 60
    nothing = Ragged.of([np.empty(0, dtype=np.int64)])
    everything = ClientSplits(Ragged.of([np.arange(len(y))]), nothing, nothing)
    (counts,) = label_table(data, everything)
    assert len(counts) == len(names)
    assert counts.sum() == len(y)
    assert counts[0] > 0
    assert counts[-1] > 0


@pytest.mark.parametrize(
    ("y", "name"),
    [
        ([2.5] * 3, "2.5"),
        ([0.0, -0.0], "0"),
        ([1.0, 1.0000000000000002], "1.0 to 1.0000000000000002"),
    ],
)
def test_targets_that_are_all_but_the_same_are_one_bin(y: list[float], name: str) -> None:
    data = regression(np.array(y))
    assert label_names(data) == (name,)
    splits = make("iid", clients=2).deal(data, 0)
    assert label_table(data, splits).sum(axis=1).tolist() == splits.train.lengths.tolist()


def test_labels_are_drawn(data: Dataset, tmp_path: Path) -> None:
    from matplotlib.image import imread

    table = label_table(data, make("dirichlet").deal(data, 0))
    path = tmp_path / "labels.png"
    draw_labels(table, data.classes, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    drawn = path.read_bytes()
    assert imread(path).shape[:2] == (600, 1200)
    draw_labels(table[::-1].copy(), data.classes, path)
    assert path.read_bytes() != drawn
    draw_labels(table, data.classes, path, axis="target")
    assert path.read_bytes() != drawn
