"""Client drift over time: from a given round on, the inputs of some clients change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, field_validator

from fedsim.config.registry import check_named, nearest
from fedsim.data.dataset import Dataset, as_dtype
from fedsim.data.source import Wrapping, check_memory, datasets, load_dataset
from fedsim.data.splits import Change, ClientSplits, Indices, Ragged
from fedsim.data.stored import bounds
from fedsim.errors import DataError
from fedsim.support.rng import draw_clients, keyed_rng

Kind = Literal["shift", "shuffle", "noise", "invert"]
WITH_STRENGTH = ("shift", "noise")
# (inputs (n, ...) of a client, its random stream) -> these inputs once it has drifted
Drift = Callable[[NDArray[Any], np.random.Generator], NDArray[Any]]


@datasets.register
class Drifting(Wrapping):
    """Wraps a data set: from a given round on, the inputs of some clients change for good.

    All inputs of such a client change: its training, unlabelled and test examples. Labels, other
    clients, the central test set, and everything before that round stay the same. The manifest
    says which clients drift, and which features: `change: {round, clients, features}`.

    In tables, some columns change: with `shift` they increase by `strength` standard deviations of
    the training examples; with `shuffle` their values are permuted among all examples of the
    client, each column separately, so that they no longer carry information about the label. In
    images, `noise` adds Gaussian noise of `strength` standard deviations of all training pixels to
    every pixel, clipped to the minimum and maximum of these; `invert` turns dark pixels bright: x
    becomes minimum + maximum − x.

    Args:
        clients: share of the clients that drift; at least one drifts.
        round: first round with the changed inputs.
        kind: `shift` or `shuffle` for tables, `noise` or `invert` for images; by default the first
            of these.
        strength: strength of `shift` and `noise`, in standard deviations; by default 1.
        features: the columns of a table that change, by name; or their number, drawn with the seed
            from the columns that are not constant. By default one.
    """

    cannot: ClassVar[str] = "cannot drift"
    kinds: ClassVar[Mapping[str, Sequence[str]]] = {
        "tables": ("shift", "shuffle"),
        "images": ("noise", "invert"),
    }
    name: str = "drift"
    clients: float = Field(0.2, gt=0, le=1)
    round: PositiveInt
    kind: Kind | None = None
    strength: float | None = Field(None, gt=0)
    features: PositiveInt | tuple[str, ...] | None = None

    @field_validator("features")
    @classmethod
    def _are_some_and_differ(
        cls, features: int | tuple[str, ...] | None
    ) -> int | tuple[str, ...] | None:
        if isinstance(features, tuple):
            check_named(features, "must name a column, or give the number of columns")
        return features

    def load(self) -> Dataset:
        """The data set before any drift."""
        data = load_dataset(self.of)
        self._columns(data, 0)  # reject invalid columns now
        return data

    def for_clients(
        self, dataset: Dataset, splits: ClientSplits, seed: int
    ) -> tuple[Dataset, ClientSplits]:
        """Append changed copies of drifting clients' examples, used from `round` on."""
        if splits.sequence is not None:
            raise DataError(
                "data.name=drift: clients that learn a sequence of tasks cannot drift; use "
                "another partition"
            )
        drifting = self.drifting(len(splits), seed)
        parts = splits.train, splits.unlabelled, splits.test
        held = [np.concatenate([part[k] for part in parts]) for k in drifting]
        columns = self._columns(dataset, seed)
        if not dataset.copies:
            dataset = self._with_copies(dataset, columns, drifting, held, seed)
        later = [list(part) for part in parts]
        begin = dataset.num_loaded
        for k in drifting:
            for part in later:  # the copies are in this order
                count = len(part[k])
                part[k] = np.arange(begin, begin + count)
                begin += count
        train, unlabelled, test = map(Ragged.of, later)
        after = replace(splits, train=train, unlabelled=unlabelled, test=test)
        changed = tuple(dataset.feature_names[f] for f in columns)
        change = Change(self.round, tuple(drifting), changed, after)
        return dataset, replace(splits, change=change)

    def drifting(self, clients: int, seed: int) -> list[int]:
        """The ids of drifting clients, in ascending order, by the experiment's seed."""
        drawn = draw_clients(keyed_rng(seed, "drift clients"), clients, self.clients)
        return list(map(int, drawn))

    def _with_copies(
        self,
        data: Dataset,
        columns: list[int],
        drifting: list[int],
        held: list[Indices],
        seed: int,
    ) -> Dataset:
        rows = np.concatenate(held)
        check_memory(self, data.x.nbytes * (1 + len(rows) / len(data.y)))
        change = self._change(data, columns)
        changed = [
            change(data.x[own], keyed_rng(seed, "drift", client=k))
            for k, own in zip(drifting, held, strict=True)
        ]
        return replace(
            data,
            x=np.concatenate([data.x, *changed]),
            y=np.concatenate([data.y, data.y[rows]]),
            columns={k: np.concatenate([v, v[rows]]) for k, v in data.columns.items()},
            copies=len(rows),
        )

    def _change(self, data: Dataset, columns: list[int]) -> Drift:
        """The function that changes a drifting client's inputs."""
        kind, every = self._kind(data), np.asarray(data.x)
        parts = np.arange(data.shape[0]) if data.parts is None else data.parts
        entries = [np.flatnonzero(parts == f) for f in columns]  # of each feature that changes
        shifted = [int(own[0]) for own in entries]  # a number; where it is blank stays marked
        strength = self.strength or 1.0
        low, high = map(float, bounds(data.x)) if kind in ("noise", "invert") else (0.0, 0.0)
        if kind == "shift":
            by = strength * every[:, shifted].std(axis=0, dtype=np.float64)
        elif kind == "noise":
            by = strength * every.std(dtype=np.float64)

        def changed(x: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
            if kind == "shuffle":
                found = x.copy()
                for own in entries:  # those of a category move together
                    found[:, own] = rng.permutation(found[:, own])
                return found
            found = x.astype(np.float64)
            if kind == "shift":
                found[:, shifted] += by
            elif kind == "noise":
                found = np.clip(found + by * rng.standard_normal(x.shape), low, high)
            else:
                found = low + high - found
            return as_dtype(found, x.dtype)

        return changed

    def _columns(self, data: Dataset, seed: int) -> list[int]:
        """The features of a table that change, in ascending order; empty for images."""
        if (kind := self._kind(data)) in self.kinds["images"]:
            return []
        x, parts, names = np.asarray(data.x)[: data.num_loaded], data.parts, data.feature_names
        varies = np.flatnonzero((x != x[:1]).any(axis=0))
        varied = varies if parts is None else np.unique(parts[varies])
        if kind == "shift":  # numbers can
            fixed = {f.name for f in data.encoding if f.kind in ("ordinal", "one_hot")}
            varied = np.array([f for f in varied if names[f] not in fixed], np.int64)
            for name in fixed & {*(self.features if isinstance(self.features, tuple) else ())}:
                raise DataError(
                    f"data.features: '{name}' has categories, which cannot shift; set "
                    "data.kind=shuffle"
                )
        features = self.features or 1
        if isinstance(features, int):
            if features > len(varied):
                raise DataError(
                    f"data.features={features}: only {len(varied)} of {len(names)} columns "
                    "vary among training examples"
                )
            drawn = keyed_rng(seed, "drift features").permutation(varied)[:features]
            return sorted(drawn.tolist())
        for name in features:
            if name not in names:
                raise DataError(
                    f"data.features: there is no column '{name}'{nearest(name, names)}"
                )
            if names.index(name) not in varied:
                raise DataError(
                    f"data.features: column '{name}' is constant in training, so it cannot drift"
                )
        return sorted(names.index(name) for name in features)

    def _kind(self, data: Dataset) -> Kind:
        kind: Kind = self.kind_for(data, self.kind)
        if self.strength is not None and kind not in WITH_STRENGTH:
            raise DataError(
                f"data.strength={self.strength:g}: {kind} has no strength; leave it out"
            )
        if self.features is not None and kind in self.kinds["images"]:
            raise DataError("data.features: images have no columns; leave it out")
        return kind
