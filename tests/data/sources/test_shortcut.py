"""Planted shortcuts: who carries them, where they are, and what models make of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from experiments import examples, small_experiment
from fedsim import Run, replay
from fedsim.analysis.replay import client_models
from fedsim.data import ClientSplits, Dataset, Ragged, datasets, partitions
from fedsim.data.sources.shortcut import TINT, Shortcut
from fedsim.errors import DataError
from fedsim.explain.inputs import Inputs
from fedsim.launch import run as launch
from fedsim.launch.prepare import prepare
from fedsim.launch.run import drive

pytestmark = pytest.mark.filterwarnings("ignore:.*words get random vectors")

VARIANTS = ["aligned", "absent", "random", "against"]
IMAGES = ("patch", "border", "colour")
KEPT = tempfile.TemporaryDirectory(prefix="fedsim-shortcuts-")  # until this process ends
FOLDER = Path(KEPT.name)


def files() -> None:
    """Data in files: photographs, bytes in a table, numbers to scale, documents."""
    rng = np.random.default_rng(0)
    y = np.arange(120) % 3
    np.savez(FOLDER / "photos.npz", x=rng.integers(0, 256, (120, 3, 9, 12), np.uint8), y=y)
    np.savez(FOLDER / "bytes.npz", x=rng.integers(0, 256, (120, 5), np.uint8), y=y)
    rows = [f"{a:.3f},{b:.3f},{['no', 'yes'][c]}" for (a, b), c in zip(
        rng.normal(50, 9, (120, 2)), y % 2, strict=True)]  # fmt: skip
    (FOLDER / "table.csv").write_text("\n".join(["age,weight,ill", *rows]))
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    texts = [" ".join(rng.choice(words, rng.integers(0, 8))) for _ in y]
    lines = [f"{'abc'[c]}\t{text or 'eight'}" for c, text in zip(y, texts, strict=True)]
    (FOLDER / "documents.txt").write_text("\n".join(lines))


files()
DIGITS = {"name": "digits"}
PHOTOS = {"name": "npz", "path": str(FOLDER / "photos.npz")}
BYTES = {"name": "npz", "path": str(FOLDER / "bytes.npz")}
TABLE = {"name": "table", "path": str(FOLDER / "table.csv"), "label": "ill", "scale": "minmax"}
DOCUMENTS = {"name": "text", "path": str(FOLDER / "documents.txt"), "dimension": 6}
REVIEWS = {"name": "planted_reviews", "reviews": 20, "test_reviews": 15, "dimension": 4}
SMALL = {"samples": 200, "test_samples": 60}
CLUSTERS = {"name": "synthetic", **SMALL, "classes": 4}
NOISE = {"name": "synthetic", **SMALL, "shape": [1, 12, 12], "classes": 5, "noise": 4}
FRIEDMAN = {"name": "friedman", **SMALL}

PLANTED: list[tuple[dict[str, Any], str]] = [
    *((data, "patch") for data in (DIGITS, PHOTOS, NOISE)),
    *((data, "border") for data in (DIGITS, PHOTOS, NOISE)),
    (PHOTOS, "colour"),
    *((data, "feature") for data in (CLUSTERS, BYTES, TABLE, FRIEDMAN)),
    *((data, "token") for data in (DOCUMENTS, REVIEWS)),
]


def named(value: Any) -> str:
    return str(value["name"] if isinstance(value, dict) else value)


@cache
def loaded(number: int) -> Dataset:
    """The data without a shortcut."""
    return datasets.parse(PLANTED[number][0]).load()


def source(of: dict[str, Any], **fields: Any) -> Shortcut:
    found = datasets.parse({"name": "shortcut", "of": of, **fields})
    assert isinstance(found, Shortcut)
    return found


def planted(of: dict[str, Any], **fields: Any) -> Dataset:
    return source(of, **fields).load()


def part(data: Dataset, name: str) -> Dataset:
    """One variant of the test set."""
    rows = data.test_columns["shortcut"] == name
    return replace(
        data,
        test_x=data.test_x[rows],
        test_y=data.test_y[rows],
        truth={n: own[rows] for n, own in data.truth.items()},
    )


def without(x: NDArray[Any], mask: NDArray[np.bool_], kind: str) -> NDArray[Any]:
    """Inputs without what is inside the mask: pixels are 0, features and words cut out."""
    if kind in IMAGES:
        return np.asarray(np.where(mask[:, None], 0, x))
    if kind == "feature":
        return x[:, :-1]
    return np.stack([row[~own][: len(row) - 1] for row, own in zip(x, mask, strict=True)])


def shown(x: NDArray[Any], mask: NDArray[np.bool_], kind: str, before: NDArray[Any]) -> list[Any]:
    """What the shortcut of each input looks like."""
    if kind == "feature":
        return list(x[:, -1].tolist())
    if kind == "token":
        return list(x[mask].tolist())
    if kind == "colour":  # what was blended in, but for rounding
        tint = ((x - (1 - TINT) * before.astype(float)) / TINT).mean(axis=(2, 3))
        return [tuple(own) for own in np.rint(tint / 51).tolist()]
    return [(m.tobytes(), own[:, m].tobytes()) for own, m in zip(x, mask, strict=True)]


@examples(30)
@given(
    st.sampled_from(range(len(PLANTED))),
    st.lists(st.sampled_from(VARIANTS), min_size=1, unique=True),
)
def test_variants_differ_inside_of_the_masks_alone(number: int, test: list[str]) -> None:
    (of, kind), base = PLANTED[number], loaded(number)
    data = planted(of, kind=kind, test=test)
    M = len(base.test_y)
    assert data.test_columns["shortcut"].tolist() == np.repeat(test, M).tolist()
    assert data.sliced_by == ("shortcut" if len(test) > 1 else base.sliced_by)
    np.testing.assert_array_equal(data.test_y, np.tile(base.test_y, len(test)))
    for name, column in base.test_columns.items():
        np.testing.assert_array_equal(data.test_columns[name], np.tile(column, len(test)))
    assert data.x.dtype == data.test_x.dtype == base.x.dtype
    assert "shortcut" not in data.columns
    for name in test:
        own = part(data, name)
        mask = own.truth["shortcut"]
        assert mask.shape == own.truth["signal"].shape == (M, *data.shape[-2:])
        expected = without(base.test_x, mask, kind) if kind in IMAGES else base.test_x
        np.testing.assert_array_equal(without(own.test_x, mask, kind), expected)
        if name == "absent":
            assert not mask.any()
        elif kind in ("feature", "token"):
            assert mask.sum(axis=1).tolist() == [1] * M
        else:
            assert mask.any(axis=(1, 2)).all()


@pytest.mark.parametrize(("of", "kind"), PLANTED, ids=named)
def test_whose_shortcut_a_variant_has(of: dict[str, Any], kind: str) -> None:
    data = planted(of, kind=kind, test=VARIANTS)
    base = loaded(PLANTED.index((of, kind))).test_x
    looks = {
        name: shown(own.test_x, own.truth["shortcut"], kind, base)
        for name in ("aligned", "random", "against")
        for own in [part(data, name)]
    }
    y = part(data, "aligned").test_y
    if not data.classes:
        low, high = data.y.min(), data.y.max()
        np.testing.assert_allclose(looks["aligned"], (1 + (y - low) / (high - low)) / 2)
        np.testing.assert_allclose(looks["against"], 1.5 - np.array(looks["aligned"]))
        assert 0.5 <= min(looks["random"]) < max(looks["random"]) <= 1
        assert abs(np.corrcoef(looks["random"], y)[0, 1]) < 0.3
        return
    of_class = dict(zip(y.tolist(), looks["aligned"], strict=True))
    assert len(set(of_class.values())) == len(data.classes)  # each looks different
    class_of = {look: c for c, look in of_class.items()}
    assert [class_of[look] for look in looks["aligned"]] == y.tolist()
    against = np.array([class_of[look] for look in looks["against"]])
    assert (against != y).all()
    assert set(against) == set(range(len(data.classes)))
    drawn = np.array([class_of[look] for look in looks["random"]])
    assert set(drawn) == set(range(len(data.classes)))
    assert 0 < (drawn == y).mean() < 2.5 / len(data.classes)


def test_signal_is_the_rest_unless_the_data_know_better() -> None:
    own = part(planted(DIGITS, kind="border"), "aligned")
    np.testing.assert_array_equal(own.truth["signal"], ~own.truth["shortcut"])
    assert own.truth["shortcut"][0].sum() == 64 - 36
    base, data = loaded(len(PLANTED) - 1), planted(REVIEWS)
    for name in ("aligned", "absent"):  # the feature is no signal where it says nothing, either
        own = part(planted(CLUSTERS), name)
        np.testing.assert_array_equal(own.truth["signal"], np.tile([True] * 16 + [False], (60, 1)))
        own = part(planted(DOCUMENTS), name)
        words = own.test_x != 0
        np.testing.assert_array_equal(own.truth["signal"], words & ~own.truth["shortcut"])
        own = part(data, name)
        marked = [
            x[marks].tolist() for x, marks in zip(own.test_x, own.truth["signal"], strict=True)
        ]
        marks = zip(base.test_x, base.truth["signal"], strict=True)
        assert marked == [x[words].tolist() for x, words in marks]
    inputs = Inputs.of_rows(data, [0, 1])
    for words, shown, before in zip(
        inputs.words, inputs.marks, base.truth["signal"], strict=False
    ):
        assert len(words) == len(shown)
        assert words.count("shortcut-negative") + words.count("shortcut-positive") == 1
        assert sum(shown) == before.sum()


def test_what_hides_a_marked_pixel_takes_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(datasets.parse(PHOTOS).load().test_y)
    of = other(monkeypatch, PHOTOS, truth={"signal": np.ones((count, 9, 12), np.bool_)})
    for kind in ("patch", "border", "colour"):
        truth = part(source(of, kind=kind).load(), "aligned").truth  # type: ignore[arg-type]
        assert truth["shortcut"].any()
        hidden = np.zeros_like(truth["shortcut"]) if kind == "colour" else truth["shortcut"]
        np.testing.assert_array_equal(truth["signal"], ~hidden)


def test_figures() -> None:
    data, base = planted(DIGITS), loaded(0)  # squares of 1×1, on the edge, bright
    assert (data.mean, data.std) == (base.mean, base.std)
    own = part(data, "aligned")
    mask = own.truth["shortcut"]
    assert mask.sum() == len(mask)
    assert not mask[:, 1:-1, 1:-1].any()
    assert (own.test_x[:, 0][mask] == 1).all()
    larger = part(planted(PHOTOS, size=3), "aligned")
    mask = larger.truth["shortcut"]
    assert (mask.sum(axis=(1, 2)) == 9).all()
    assert (larger.test_x.swapaxes(0, 1)[:, mask] == 255).all()
    framed = part(planted(NOISE, kind="border", size=2), "aligned")
    mask = framed.truth["shortcut"]
    assert (mask.sum(axis=(1, 2)) == 144 - 64).all()
    grey = framed.test_x[:, 0, 0, 0]
    assert (framed.test_x[:, 0][mask].reshape(60, -1) == grey[:, None]).all()
    shades = sorted(set(grey.tolist()))
    np.testing.assert_allclose(np.diff(shades), shades[1] - shades[0], rtol=1e-5)
    assert shades[-1] == np.asarray(framed.x).max()


def test_words() -> None:
    base, data = loaded(len(PLANTED) - 2), planted(DOCUMENTS)
    assert data.words == (*base.words, "shortcut-a", "shortcut-b", "shortcut-c")
    np.testing.assert_array_equal(data.vectors[: len(base.words)], base.vectors)
    assert data.vectors.dtype == np.float32
    lengths = np.linalg.norm(data.vectors[data.known], axis=1)
    assert lengths[-3:].mean() == pytest.approx(lengths[:-3].mean(), rel=0.6)
    assert data.known[-3:].all()
    assert data.shape == (base.shape[0] + 1,)
    places = {int(row.argmax()) for row in data.truth["shortcut"] if row.any()}
    assert len(places) > 3
    aligned, against = part(data, "aligned"), part(data, "against")
    np.testing.assert_array_equal(aligned.truth["shortcut"], against.truth["shortcut"])


@pytest.mark.parametrize("of", [TABLE, {**TABLE, "scale": "none"}, FRIEDMAN, CLUSTERS, BYTES])
def test_features_in_files_as_in_the_data(of: dict[str, Any], tmp_path: Path) -> None:
    data, base = planted(of), datasets.parse(of).load()
    assert data.features[-1] == "shortcut"
    assert len(data.features) == data.shape[0] == base.shape[0] + 1
    assert not base.features or data.features[:-1] == base.features
    rows = data.scaling.undo(data.test_x.astype(float))
    lines = [",".join(data.features), *(",".join(map(repr, row)) for row in rows.tolist())]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    found = Inputs.of_file(data, tmp_path / "rows.csv")
    np.testing.assert_allclose(found.x, data.test_x, rtol=1e-5, atol=1e-6)
    values = set(part(data, "aligned").test_x[:, -1].tolist())
    if data.classes:  # the same values, whether it means something or not
        most = 255 if data.x.dtype == np.uint8 else 1
        assert max(values) == most
        assert values == set(part(data, "absent").test_x[:, -1].tolist())
        assert values == set(data.x[:, -1].tolist())
    absent = part(data, "absent")
    assert abs(np.corrcoef(absent.test_x[:, -1].astype(float), absent.test_y)[0, 1]) < 0.4


def deal(made: Shortcut, kind: str, seed: int = 0, **fields: Any) -> tuple[Dataset, ClientSplits]:
    data = made.load()
    splits = partitions.parse({"kind": kind, **fields}).deal(data, seed)
    return made.for_clients(data, splits, seed)


@examples(30)
@given(
    st.sampled_from(range(len(PLANTED))),
    st.integers(1, 12),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 2**64),
)
def test_examples_of_holders_carry_it_as_often_as_asked_for(
    number: int, K: int, share: float, strength: float, seed: int
) -> None:
    (of, kind), base = PLANTED[number], loaded(number)
    made = source(of, kind=kind, clients=share, strength=strength, test=["absent"])
    data, splits = deal(made, "iid", seed, clients=K)
    carry = data.columns["shortcut"]
    assert carry.shape == data.y.shape
    holders = made.holders(K, seed).tolist()
    assert len(holders) == (max(1, round(share * K)) if share else 0)
    assert holders == sorted(set(holders))
    assert set(holders) <= set(range(K))
    for k in range(K):
        if k not in holders:
            assert not carry[splits.train[k]].any()
    held = np.concatenate([splits.train[k] for k in holders]) if holders else np.zeros(0, int)
    spread = np.sqrt(len(held) * strength * (1 - strength))
    assert abs(carry[held].sum() - len(held) * strength) <= 6 * spread + 3
    # Those that carry it are as they are if all do, others as they are if nobody does.
    everywhere = source(of, kind=kind, clients=1, strength=1, test=["absent"])
    full, _ = deal(everywhere, "iid", seed, clients=1)
    room = source(of, kind=kind, test=["absent"]).load()
    np.testing.assert_array_equal(data.x[carry], full.x[carry])
    np.testing.assert_array_equal(data.x[~carry], room.x[~carry])
    np.testing.assert_array_equal(data.y, base.y)
    np.testing.assert_array_equal(data.test_x, room.test_x)


@pytest.mark.parametrize(("of", "kind"), PLANTED, ids=named)
def test_training_examples_carry_that_of_their_own_class(of: dict[str, Any], kind: str) -> None:
    """Those in training look as aligned ones of the test set do."""
    base = loaded(PLANTED.index((of, kind)))
    made = source(of, kind=kind, clients=1, strength=1, test=["aligned"])
    data, _ = deal(made, "iid", clients=3)
    assert data.columns["shortcut"].all()
    of_class = dict(zip(data.test_y.tolist(), data.truth["shortcut"], strict=True))
    if kind == "feature":
        mask, most = np.zeros(0, np.bool_), 255 if base.x.dtype == np.uint8 else 1
        low, high = data.y.min(), data.y.max()
        of_number = (1 + (data.y - low) / (high - low)) / 2
        expected = (data.y + 1) / len(data.classes) if data.classes else of_number
        np.testing.assert_allclose(data.x[:, -1] / most, expected, atol=3e-3)
    elif kind == "token":
        mask = np.char.startswith(np.array(data.words)[data.x], "shortcut-")
        names = [data.words[token] for token in data.x[mask]]
        assert names == [f"shortcut-{data.classes[c]}" for c in data.y]
    else:
        mask = np.stack([of_class[c] for c in data.y.tolist()])
    expected = without(base.x, mask, kind) if kind in IMAGES else base.x
    np.testing.assert_array_equal(without(data.x, mask, kind), expected)
    if data.classes:
        here = shown(data.x, mask, kind, base.x)
        there = shown(data.test_x, data.truth["shortcut"], kind, base.test_x)
        looks = dict(zip(data.y.tolist(), here, strict=True))
        assert looks == dict(zip(data.test_y.tolist(), there, strict=True))
        assert len(set(here)) == len(data.classes)


def test_all_that_a_client_has_is_treated_alike() -> None:
    made = source(DIGITS, clients=0.5, strength=1)
    own = {"test_fraction": 0.3, "labelled_fraction": 0.5, "server_fraction": 0.1}
    data, splits = deal(made, "iid", clients=6, **own)
    carry, holders = data.columns["shortcut"], made.holders(6, 0)
    assert len(holders) == 3
    for rows in (splits.train, splits.unlabelled, splits.test):
        for k in range(6):
            assert (carry[rows[k]] == (k in holders)).all()
    assert not carry[splits.server].any()
    central = replace(splits, test=Ragged.of([np.arange(3)] * 6), test_is_central=True)
    carried = made.for_clients(made.load(), central, 0)[0].columns["shortcut"]
    assert carried.sum() == carry.sum() - sum(len(splits.test[k]) for k in holders)


def test_draws_depend_on_the_seed_and_the_example_alone() -> None:
    made = source(DOCUMENTS, clients=1, strength=0.6)
    a, b = (deal(made, "iid", clients=K)[0] for K in (2, 9))
    c, _ = deal(made, "iid", seed=1, clients=2)
    np.testing.assert_array_equal(a.x, b.x)
    assert (a.columns["shortcut"] != c.columns["shortcut"]).any()
    np.testing.assert_array_equal(a.test_x, c.test_x)  # the same for all runs
    few, more = source(DIGITS, clients=0.3), source(DIGITS, clients=0.8)
    assert set(few.holders(10, 0)) < set(more.holders(10, 0))
    assert few.holders(10, 0).tolist() != few.holders(10, 1).tolist()


def test_it_is_planted_once_and_what_was_loaded_stays() -> None:
    made = source(DIGITS, clients=1, strength=1)
    data = made.load()
    before = np.array(data.x)
    splits = partitions.parse({"kind": "iid", "clients": 2}).deal(data, 0)
    again, _ = made.for_clients(data, splits, 0)
    np.testing.assert_array_equal(data.x, before)
    assert made.for_clients(again, splits, 0)[0] is again
    plain = datasets.parse(DIGITS)
    assert plain.for_clients(data, splits, 0) == (data, splits)


def test_streams_of_tasks() -> None:
    tasks = [[["a", "b"], ["a", "c"]], [["b", "c"], ["a", "b"]]]
    sections: dict[str, Any] = {
        "partition": {"kind": "own_tasks", "tasks": tasks},
        "model": {"name": "text_cnn", "kernels": [1], "filters": 2},
        "train": {"rounds": 2},
    }
    data = {"name": "shortcut", "of": DOCUMENTS, "clients": 0.5, "strength": 1, "test": ["absent"]}
    made = small_experiment(data=data, **sections)
    found, splits, _ = prepare(made)
    assert isinstance(made.data, Shortcut)
    assert splits.sequence is not None
    (holder,) = made.data.holders(2, 0)
    rows = [r for own in (splits.sequence.train, splits.sequence.validation) for r in list(own)]
    carried = [found.columns["shortcut"][own].all() for own in rows]
    assert carried == [k // 2 == holder for k in range(4)] * 2
    with pytest.raises(DataError, match=r"data\.test: a stream of tasks is scored by task"):
        prepare(small_experiment(data={**data, "test": VARIANTS}, **sections))


RUN: dict[str, Any] = {
    "data": {"name": "shortcut", "of": NOISE, "clients": 1, "strength": 1},
    "partition": {"kind": "iid", "clients": 4},
    "train": {"rounds": 4},
}


def test_a_model_learns_the_shortcut_and_scores_tell(finish: Callable[..., Run]) -> None:
    last = finish(**RUN).rounds.iloc[-1]
    assert last["accuracy/aligned"] > 0.9
    assert last["accuracy/against"] < 0.3
    assert last["accuracy/against"] < last["accuracy/absent"] < last["accuracy/aligned"]
    shares = [last[f"accuracy/{name}"] for name in ("aligned", "absent", "against")]
    assert last["accuracy"] == pytest.approx(np.mean(shares))


def test_the_same_bits_every_time(finish: Callable[..., Run]) -> None:
    data = {**RUN["data"], "clients": 0.5, "strength": 0.7}
    done, again = (finish(**{**RUN, "data": data, "train": {"rounds": 2}}) for _ in range(2))
    assert done.result_hash == again.result_hash
    assert done.manifest["data_hash"] == again.manifest["data_hash"]
    assert replay(done).after == 2
    models, at = client_models(done, [0, 3])  # which makes the data ready twice
    assert set(models) == {0, 3}
    assert at.dataset.columns["shortcut"].any()


def test_actors_read_what_was_planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a grid or a search, for which the data are loaded once."""
    sent: list[Any] = []

    def carry_out(folder: Any, spec: Any, actors: int, data: list[Any]) -> Any:
        sent.extend(data)
        return launch._locally(folder, *data, spec)

    for name in ("get", "put"):
        monkeypatch.setattr(ray, name, lambda value: value)
    monkeypatch.setattr(launch, "_with_actors", carry_out)
    sections = {**RUN, "train": {"rounds": 1}}
    made = small_experiment(**sections, engine={"kind": "ray"})
    done = drive(made, tmp_path / "trial", 1, made.data.load(), lambda _: None)
    assert sent[0].columns["shortcut"].all()
    own = launch.run(small_experiment(**sections), tmp_path)
    assert done.result_hash == own.result_hash
    plain = small_experiment(**{**sections, "data": NOISE}, engine={"kind": "ray"})
    data = plain.data.load()
    drive(plain, tmp_path / "plain", 1, data, lambda _: None)
    assert sent[2] is data


HAS_ONE = r"data\.of: already has 'shortcut"


def other(monkeypatch: pytest.MonkeyPatch, of: dict[str, Any], **changes: Any) -> Any:
    """A source of the data with something else about them."""
    found = datasets.parse(of)
    load = type(found).load

    def changed(self: Any) -> Dataset:
        data = load(self)
        return replace(data, **{k: v(data) if callable(v) else v for k, v in changes.items()})

    monkeypatch.setattr(type(found), "load", changed)
    return found


BYTES_OF_IMAGES, MANY = np.zeros((3, 1, 9, 9), np.uint8), np.arange(3)
SHADES = {"classes": tuple(map(str, range(300))), "x": BYTES_OF_IMAGES, "y": MANY}
SHADES |= {"test_x": BYTES_OF_IMAGES, "test_y": MANY}


@pytest.mark.parametrize(
    ("of", "kind", "changes", "message"),
    [
        (NOISE, None, {"classes": ()}, r"data\.kind=patch: needs classes"),
        (NOISE, None, {"classes": ("one",)}, r"data\.of: .* needs two classes, and there is only"),
        (CLUSTERS, None, {"features": (*map(str, range(15)), "shortcut")}, HAS_ONE),
        (CLUSTERS, None, {"test_columns": lambda data: {"shortcut": data.test_y}}, HAS_ONE),
        (REVIEWS, None, {"words": lambda data: (*data.words[:-1], "shortcut-positive")}, HAS_ONE),
        (PHOTOS, "border", SHADES, r"data\.kind=border: .* too few levels for 300 classes"),
    ],
)
def test_data_that_cannot_have_one(
    monkeypatch: pytest.MonkeyPatch, of: dict[str, Any], kind: Any, changes: Any, message: str
) -> None:
    of_own = other(monkeypatch, of, **changes)
    with pytest.raises(DataError, match=message):
        source(of_own, kind=kind).load()


def test_an_example_of_two_clients_can_carry_it_only_if_both_hold_it() -> None:
    made = source(DIGITS, clients=0.5)
    data = made.load()
    shared = Ragged.of([np.arange(5), np.arange(4, 9)])
    splits = ClientSplits(shared, Ragged.of([[], []]), Ragged.of([[], []]))
    with pytest.raises(DataError, match=r"data\.clients=0\.5: training example 4 is held"):
        made.for_clients(data, splits, 0)
    both, _ = source(DIGITS, clients=1, strength=1).for_clients(data, splits, 0)
    assert np.flatnonzero(both.columns["shortcut"]).tolist() == list(range(9))
