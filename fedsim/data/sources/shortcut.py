"""Planted shortcuts: features that correlate with the label in training without causing it."""

from __future__ import annotations

import colorsys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, field_validator

from fedsim.config.registry import check_named
from fedsim.data import tokens
from fedsim.data.dataset import Dataset, as_dtype
from fedsim.data.encoding import UNSCALED, Feature, Scaling
from fedsim.data.source import Wrapping, check_memory, datasets, load_dataset
from fedsim.data.splits import ClientSplits, Indices
from fedsim.data.stored import bounds
from fedsim.data.text import PADDING, SPECIAL, random_vectors
from fedsim.errors import DataError
from fedsim.support.rng import draw_clients, keyed_rng

NAME = "shortcut"  # of columns, the feature, words, and annotations of test examples
TINT = 0.3  # share of a colour cast in a pixel
TEST_SEED = 0  # of test sets, the same for all runs

Kind = Literal["patch", "border", "colour", "feature", "token"]
Variant = Literal["aligned", "absent", "random", "against"]
# (inputs (n, ...), the class or target (n,) whose shortcut each gets, positions (n,) in [0, 1))
# -> the inputs with it, and which parts of them it is
Planted = tuple[NDArray[Any], NDArray[np.bool_]]
Plant = Callable[[NDArray[Any], NDArray[Any], NDArray[np.float64]], Planted]


@datasets.register
class Shortcut(Wrapping):
    """Wraps a data set: some clients' examples carry a shortcut to their label.

    The shortcut depends on the class c of C: `patch` is a bright square at a class-specific place
    along the edge of an image; `border` a frame of class-specific brightness, or colour if there
    are three channels; `colour` a tint of the whole image; `token` a word `shortcut-<class>` at a
    random place of a document; `feature` a further column `shortcut` of a table with the value (c
    + 1)/C, or (1 + t)/2 for the target t scaled to [0, 1] by the minimum and maximum in training.
    The value is never 0, which explainers treat as a missing value. Where the feature is absent,
    its value is that of a random training example and carries no information.

    The test set contains every example once per variant, whose name is in the column `shortcut`;
    scores are recorded for the whole test set and for each variant. `Dataset.truth` marks the
    parts of each test input that are `shortcut`, and those that are `signal`: the data set's own
    ground truth if it has one, else everything but the shortcut and padding. A tint covers the
    whole image. Once distributed, training examples have a column `shortcut` that says which of
    them carry it.

    Args:
        kind: `patch`, `border` or `colour` for images, `feature` for tables, `token` for
            documents; by default the first of these.
        clients: share of the clients that hold the shortcut; at least one if above 0. Their test
            and unlabelled examples are treated like their training examples.
        strength: probability that an example of such a client carries the shortcut of its class;
            otherwise it carries none.
        size: side of the patch or width of the border, in pixels; by default an eighth of the
            image.
        test: variants of the test set: with the shortcut of the example's class (`aligned`), of a
            random class (`random`), of another class (`against`; for a target, the value mirrored
            within the range), or with none (`absent`).
    """

    cannot: ClassVar[str] = "cannot carry a shortcut"
    kinds: ClassVar[Mapping[str, Sequence[str]]] = {
        "documents": ("token",),
        "tables": ("feature",),
        "images": ("patch", "border", "colour"),
    }
    name: str = "shortcut"
    kind: Kind | None = None
    clients: float = Field(0.2, ge=0, le=1)
    strength: float = Field(0.95, ge=0, le=1)
    size: PositiveInt | None = None
    test: tuple[Variant, ...] = ("aligned", "absent", "against")

    @field_validator("test")
    @classmethod
    def _are_some_and_differ(cls, test: tuple[Variant, ...]) -> tuple[Variant, ...]:
        check_named(test, "must name a variant; absent is the data as it is")
        return test

    def load(self) -> Dataset:
        """x is as in the data set, with room for the feature or word, which is added later."""
        data = load_dataset(self.of)
        kind = self._kind(data)
        count = len(self.test)
        check_memory(self, data.x.nbytes + 4 * count * data.test_x.nbytes)
        data = _with_room(data, kind)
        plant = self._plant(data, kind)
        x, truth = zip(*(_variant(data, kind, plant, name) for name in self.test), strict=True)
        columns = {name: np.tile(values, count) for name, values in data.test_columns.items()}
        return replace(
            data,
            test_x=np.concatenate(x),
            test_y=np.tile(data.test_y, count),
            test_columns={**columns, NAME: np.repeat(self.test, len(data.test_y))},
            sliced_by=NAME if count > 1 else data.sliced_by,
            truth={name: np.concatenate([own[name] for own in truth]) for name in truth[0]},
        )

    def for_clients(
        self, dataset: Dataset, splits: ClientSplits, seed: int
    ) -> tuple[Dataset, ClientSplits]:
        """Plant the shortcut in the examples of clients that hold it.

        An example's random draw depends only on the seed and its index.
        """
        if NAME in dataset.columns:  # planted already
            return dataset, splits
        if splits.sequence is not None and len(self.test) > 1:
            raise DataError(
                "data.test: a stream of tasks is scored by task, not by variant; name one variant"
            )
        N = len(dataset.y)
        drawn = keyed_rng(seed, "shortcut strength").random(N)
        carry = self._held(splits, N, seed) & (drawn < self.strength)
        at = keyed_rng(seed, "shortcut place").random(N)[carry]
        x = np.array(dataset.x)
        x[carry], _ = self._plant(dataset, self._kind(dataset))(x[carry], dataset.y[carry], at)
        return replace(dataset, x=x, columns={**dataset.columns, NAME: carry}), splits

    def holders(self, clients: int, seed: int) -> Indices:
        """The ids of the clients with the shortcut, in ascending order, by the run's seed."""
        return draw_clients(keyed_rng(seed, "shortcut holders"), clients, self.clients)

    def _held(self, splits: ClientSplits, N: int, seed: int) -> NDArray[np.bool_]:
        """(N,) whether a client with the shortcut holds each training example."""
        K = len(splits)
        holds = np.zeros(K, np.bool_)
        holds[self.holders(K, seed)] = True
        parts = [splits.train, splits.unlabelled]
        if not splits.test_is_central:
            parts.append(splits.test)
        if splits.sequence is not None:
            parts.append(splits.sequence.validation)
        held, clear = np.zeros((2, N), np.bool_)
        for part in parts:  # K arrays, or several for each client
            of_holder = np.repeat(holds[np.arange(len(part)) * K // len(part)], part.lengths)
            held[part.values[of_holder]] = True
            clear[part.values[~of_holder]] = True
        both = np.flatnonzero(held & clear)
        if len(both):
            raise DataError(
                f"data.clients={self.clients}: training example {both[0]} is held by a client "
                "with the shortcut and by one without; use another partition, or clients=1"
            )
        return held

    def _kind(self, data: Dataset) -> Kind:
        kind: Kind = self.kind_for(data, self.kind)
        if kind == "colour" and data.shape[0] != 3:
            raise DataError(
                "data.kind=colour: needs images with 3 channels, and these have "
                f"{data.shape[0]}; use patch or border"
            )
        if self.size is not None and kind not in ("patch", "border"):
            raise DataError(f"data.size={self.size}: a {kind} has no size; leave it out")
        if kind != "feature" and not data.classes:
            raise DataError(f"data.kind={kind}: needs classes, and the target here is a number")
        if len(data.classes) == 1:
            raise DataError(
                f"data.of: a shortcut needs two classes, and there is only '{data.classes[0]}'"
            )
        return kind

    def _plant(self, data: Dataset, kind: Kind) -> Plant:
        """The function that plants it in these data, which have room for it."""
        if kind == "token":
            around = tokens.around(data.tokenizer) if data.tokenizer else (0, 0)
            return partial(_insert, len(data.words) - len(data.classes), around)
        if kind == "feature":
            return partial(_fill, _levels(data), len(data.feature_names))
        return partial(_paint, *_figures(data, kind, self.size or _usual_size(data)))


def patched(data: Dataset, x: NDArray[Any], label: int, size: int | None) -> NDArray[Any]:
    """Copies of images (n, channels, height, width) with the patch of a class, as of kind `patch`.

    Its side is by default an eighth of the image.
    """
    (channels, H, W), C = data.shape, len(data.classes)
    mask = _squares(C, H, W, size or _usual_size(data))[label]
    colours = np.full((1, channels), _range(data)[1], np.float64)
    found, _ = _paint(mask[None], colours, 1.0, x, np.zeros(len(x), np.int64), np.zeros(0))
    return found


def _variant(
    data: Dataset, kind: Kind, plant: Plant, name: Variant
) -> tuple[NDArray[Any], dict[str, NDArray[np.bool_]]]:
    """The inputs of a variant of the test set, and their annotations."""
    x, truth, M = np.asarray(data.test_x), data.truth, len(data.test_y)
    if name == "absent":
        parts = (len(data.feature_names),) if kind == "feature" else data.shape[-2:]
        shortcut = np.zeros((M, *parts), np.bool_)
    else:
        at = keyed_rng(TEST_SEED, "shortcut test place").random(M)  # the same in all variants
        x, shortcut = plant(x, _whose(data, name), at)
        if kind == "token":
            truth = {what: _moved(own, shortcut) & ~shortcut for what, own in truth.items()}
    signal = truth.get("signal")
    if signal is None:
        signal = ~shortcut
        if kind == "token":
            signal &= x != PADDING
        elif kind == "feature":
            signal[:, -1] = False  # even where it is absent
    elif kind != "colour":  # a tint hides nothing
        signal = signal & ~shortcut
    return x, {**truth, NAME: shortcut, "signal": signal}


def _whose(data: Dataset, name: Variant) -> NDArray[Any]:
    """(M,) the class or target whose shortcut each test example has in a variant."""
    y, C = data.test_y, len(data.classes)
    drawn = keyed_rng(TEST_SEED, f"shortcut test {name}").random(len(y))
    if name == "aligned":
        return y
    if not C:
        return _some_of(data.y, drawn) if name == "random" else data.y.min() + data.y.max() - y
    if name == "random":
        return _some_of(np.arange(C), drawn)
    return (y + 1 + _some_of(np.arange(C - 1), drawn)) % C


def _some_of(values: NDArray[Any], drawn: NDArray[np.float64]) -> NDArray[Any]:
    """Values chosen uniformly by numbers drawn from [0, 1)."""
    return values[(drawn * len(values)).astype(np.int64)]


def _with_room(data: Dataset, kind: Kind) -> Dataset:
    """The data with an uninformative feature, or with further words and a position for one."""
    words = tuple(f"{NAME}-{name}" for name in data.classes) if kind == "token" else ()
    names = {*data.columns, *data.test_columns, *data.truth, *data.features}
    for name in (NAME, *words):
        if name in names or name in data.words:
            raise DataError(f"data.of: already has '{name}', the shortcut's name")
    if kind not in ("feature", "token"):
        return data
    own_names, own = data.feature_names, data.encoding
    wider = ((0, 0), (0, 1))
    x, test_x = (np.pad(part, wider) for part in (data.x, data.test_x))
    truth = {name: np.pad(own, wider) for name, own in data.truth.items()}
    data = replace(data, x=x, test_x=test_x, truth=truth)
    if kind == "token":
        vectors, known = random_vectors((*SPECIAL, *words), data.vectors.shape[1])
        usual = np.linalg.norm(data.vectors[data.known], axis=1).mean()  # of these vectors: 1
        added = (vectors * usual)[len(SPECIAL) :].astype(np.float32)
        return replace(
            data,
            words=(*data.words, *words),
            vectors=np.concatenate([data.vectors, added]),
            known=np.concatenate([data.known, known[len(SPECIAL) :]]),
        )
    levels = _levels(data)
    for part, which in ((x, "train"), (test_x, "test")):
        drawn = keyed_rng(TEST_SEED, f"shortcut absent {which}").random(len(part))
        part[:, -1] = levels(_some_of(data.y, drawn))
    if data.preprocessing is not None or own:  # its own values are not scaled
        own = (*(own or map(Feature, own_names)), Feature(NAME, scaled=False))
    scaling = data.scaling
    if scaling is not UNSCALED:
        W = data.shape[0] - 1
        low, span = (np.broadcast_to(v, W) for v in (scaling.low, scaling.span))
        scaling = Scaling(np.append(low, 0.0), np.append(span, 1.0))
    return replace(data, features=(*own_names, NAME), encoding=own, scaling=scaling)


def _levels(data: Dataset) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """The values of the feature for classes or targets, in the type of `x`."""
    C = len(data.classes)
    scaling = Scaling(-1.0, C) if C else Scaling.minmax(data.y)

    def levels(of: NDArray[Any]) -> NDArray[Any]:
        values: NDArray[Any] = scaling(of.astype(np.float64))
        values = values if C else (1 + values) / 2
        return as_dtype(values * 255 if data.x.dtype == np.uint8 else values, data.x.dtype)

    return levels


def _fill(
    levels: Callable[[NDArray[Any]], NDArray[Any]],
    features: int,
    x: NDArray[Any],
    of: NDArray[Any],
    at: Any,
) -> Planted:
    """Rows of a table whose last feature is the shortcut; see `Plant`."""
    x = x.copy()
    x[:, -1] = levels(of)
    mask = np.zeros((len(x), features), np.bool_)
    mask[:, -1] = True
    return x, mask


def _insert(
    first: int, around: tuple[int, int], x: NDArray[Any], of: NDArray[Any], at: NDArray[np.float64]
) -> Planted:
    """Documents (n, L), padded at the end, with a further word; see `Plant`.

    `first` is the word of class 0; `around` are the numbers of a tokenizer's own tokens before and
    after each text.
    """
    before, after = around
    lengths = np.maximum((x != PADDING).sum(axis=1) - before - after, 0)
    place = before + (at * (lengths + 1)).astype(np.int64)[:, None]
    here = np.arange(x.shape[1]) == place
    words = (first + of).astype(x.dtype)[:, None]
    return np.where(here, words, _moved(x, here)), here


def _moved(values: NDArray[Any], here: NDArray[np.bool_]) -> NDArray[Any]:
    """(n, L) with what comes after a position in each row one further to the right."""
    before = np.arange(here.shape[1]) - (here.cumsum(axis=1) - here)
    return np.take_along_axis(values, before, axis=1)


def _paint(
    masks: NDArray[np.bool_],
    colours: NDArray[np.float64],
    opacity: float,
    x: NDArray[Any],
    of: NDArray[Any],
    at: Any,
) -> Planted:
    """Images with a figure painted on them; see `Plant`.

    `masks` (C, height, width) are the figures of each class, `colours` (C, channels) theirs.
    """
    x = x.copy()
    for c in np.unique(of):
        own = x[of == c]
        inside = own[:, :, masks[c]]
        painted = (1 - opacity) * inside + opacity * colours[c][:, None]
        own[:, :, masks[c]] = as_dtype(painted, x.dtype)
        x[of == c] = own
    return x, masks[of]


def _figures(
    data: Dataset, kind: Kind, size: int
) -> tuple[NDArray[np.bool_], NDArray[np.float64], float]:
    """The figures and colours of each class; see `_paint`."""
    C, (channels, H, W) = len(data.classes), data.shape
    low, high = _range(data)
    if kind == "patch":
        return _squares_apart(C, H, W, size), np.full((C, channels), high, np.float64), 1.0
    mask = np.ones((H, W), np.bool_)
    if kind == "border":
        if 2 * size >= min(H, W):
            raise DataError(
                f"data.size={size}: a border of that width covers images of {H}×{W} completely; "
                f"{(min(H, W) - 1) // 2} is the maximum"
            )
        mask[size:-size, size:-size] = False
    if channels == 3:
        shades = np.array([colorsys.hsv_to_rgb(c / C, 1, 1) for c in range(C)])
    else:
        shades = np.repeat((np.arange(C)[:, None] + 1) / C, channels, axis=1)
    colours = low + (high - low) * shades
    if len(np.unique(as_dtype(colours, data.x.dtype), axis=0)) < C:
        raise DataError(f"data.kind={kind}: the images have too few levels for {C} classes")
    return np.repeat(mask[None], C, axis=0), colours, 1.0 if kind == "border" else TINT


def _usual_size(data: Dataset) -> int:
    """The side of a patch or the width of a border, in pixels."""
    return max(1, min(data.shape[1:]) // 8)


def _range(data: Dataset) -> tuple[float, float]:
    """The darkest and the brightest that pixels can be."""
    return (0, 255) if data.x.dtype == np.uint8 else bounds(data.x)


def _squares_apart(C: int, H: int, W: int, side: int) -> NDArray[np.bool_]:
    """(C, H, W) a square for each class."""
    if side > min(H, W):
        raise DataError(f"data.size={side}: the patch is larger than images of {H}×{W}")
    fitting = [s for s in range(1, side + 1) if (_squares(C, H, W, s).sum(axis=0) <= 1).all()]
    if side in fitting:
        return _squares(C, H, W, side)
    hint = f"data.size={max(fitting)} fits" if fitting else "use another data.kind"
    raise DataError(
        f"data.kind=patch: {C} squares of {side}×{side} pixels overlap along the edge of images "
        f"of {H}×{W}; {hint}"
    )


def _squares(C: int, H: int, W: int, side: int) -> NDArray[np.bool_]:
    """(C, H, W) squares spread evenly along the edge, clockwise from the top left corner."""
    bottom, right = H - side, W - side
    edge = [
        *((0, j) for j in range(right)),
        *((i, right) for i in range(bottom)),
        *((bottom, j) for j in range(right, 0, -1)),
        *((i, 0) for i in range(bottom, 0, -1)),
    ] or [(0, 0)]
    squares = np.zeros((C, H, W), np.bool_)
    for c, own in enumerate(squares):
        i, j = edge[c * len(edge) // C]
        own[i : i + side, j : j + side] = True
    return squares
