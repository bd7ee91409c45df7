"""Partitions of a data set among clients."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import ClassVar
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedsim.config.registry import Component, Registry, nearest, unfit
from fedsim.data.dataset import Dataset
from fedsim.data.splits import NONE, ClientSplits, Indices, Ragged, take_stratified
from fedsim.errors import DataError, FedsimError, in_own_code
from fedsim.support.rng import keyed_rng

MAX_DRAWN = 10**8  # random numbers for a Dirichlet partition, which take a few seconds
MOST_CLIENTS = 100_000_000  # more would not fit into memory


class Partition(Component):
    """How examples are distributed to clients: a component of the `partition` section.

    Args:
        kind: its name.
        test_fraction: share of each client's examples that becomes its own test set, stratified.
        labelled_fraction: γ, share of each client's remaining examples whose label it may use,
            stratified and fixed by the seed.
        server_fraction: share of all training examples that the server holds, stratified; only the
            rest is distributed to clients (FedDF's and FedAUX's auxiliary images, SemiFL's
            labelled set).
        train_fraction: share of the training examples that is used at all, stratified and fixed by
            the seed.

    Attributes:
        overview: name of the explainer of the run as a whole, if there is one.
    """

    name_key: ClassVar[str] = "kind"
    kind: str
    overview: ClassVar[str | None] = None
    test_fraction: float = Field(0.0, ge=0, lt=1)
    labelled_fraction: float = Field(1.0, gt=0, le=1)
    server_fraction: float = Field(0.0, ge=0, lt=1)
    train_fraction: float = Field(1.0, gt=0, le=1)

    @property
    def tests_clients(self) -> bool:
        """Whether clients have their own test examples."""
        return self.test_fraction > 0

    def split(self, data: Dataset, rng: np.random.Generator) -> list[Indices]:
        """Divide the examples among clients: one array of indices into `data.x` for each.

        Raises:
            DataError: the data set cannot be split in this way.
        """
        raise NotImplementedError

    def deal(self, data: Dataset, seed: int, held_out: Indices = NONE) -> ClientSplits:
        """Split, then divide each client's share into training, unlabelled and test examples.

        Args:
            seed: the experiment's seed.
            held_out: training examples kept for validation, which no client gets.

        Raises:
            DataError: the data set cannot be split in this way, or a client is left without a
                training example.
        """
        strata = data.strata
        rest, server = self.taking_part(data, seed, held_out), NONE
        if self.server_fraction:
            rng = keyed_rng(seed, "server share")
            server, rest = take_stratified(rest, strata, self.server_fraction, rng)
        if len(rest) < len(data.y):
            data = data.taking(rest)
        try:
            dealt = self.split(data.frozen(), keyed_rng(seed, "partition"))
        except FedsimError:
            raise
        except Exception as error:  # of the user's own code
            raise DataError(f"partition.kind={self.kind}: {in_own_code(error)}") from error
        shares = [rest[s] for s in dealt]
        for client, share in enumerate(shares):
            if len(share) == 0:
                raise DataError(f"partition: client {client} gets no examples")
        divided = self.test_fraction > 0 or self.labelled_fraction < 1
        train, unlabelled, test = [*shares], [NONE] * len(shares), [NONE] * len(shares)
        for client, share in enumerate(shares if divided else ()):
            rng = keyed_rng(seed, "split", client=client)
            test[client], rest = take_stratified(share, strata, self.test_fraction, rng)
            train[client], unlabelled[client] = take_stratified(
                rest, strata, self.labelled_fraction, rng
            )
            if len(train[client]) == 0:
                raise DataError(
                    f"client {client} holds {len(share)} examples, too few for "
                    f"partition.test_fraction={self.test_fraction} and "
                    f"partition.labelled_fraction={self.labelled_fraction}: "
                    "no labelled training example is left"
                )
        parts = Ragged.of(train), Ragged.of(unlabelled), Ragged.of(test)
        return ClientSplits(*parts, server, held_out, names=self.client_names(data, dealt))

    def client_names(self, data: Dataset, shares: list[Indices]) -> tuple[str, ...]:
        """The clients' names in the data, of the shares that `split` returned; empty for none."""
        return ()

    def taking_part(self, data: Dataset, seed: int, held_out: Indices = NONE) -> Indices:
        """The examples that are distributed to clients, sorted."""
        everything = np.setdiff1d(np.arange(data.num_loaded), held_out)
        if self.train_fraction == 1:
            return everything
        rng = keyed_rng(seed, "train share")
        return take_stratified(everything, data.strata, self.train_fraction, rng)[0]


partitions: Registry[Partition] = Registry("partition", Partition, key="kind")


class _AmongClients(Partition):
    """A partition among so many clients.

    Args:
        clients: number of clients.
    """

    clients: int = Field(ge=1, le=MOST_CLIENTS)


def _by_class(data: Dataset, kind: str) -> None:
    if not data.classes:
        raise DataError(
            f"partition.kind={kind} divides examples by class, and the target here is a number; "
            "use quantile, iid, quantity or natural"
        )


def _by_column(data: Dataset, column: str) -> list[Indices]:
    """The examples of each value of a column, both in ascending order."""
    if column in data.unread_columns:
        columns = ", ".join([*data.columns, column])
        raise DataError(
            f"partition.column='{column}': the column has not been loaded; add "
            f"data.columns=[{columns}]"
        )
    if column not in data.columns:
        raise DataError(
            f"partition.column='{column}': the data set has no such column"
            f"{nearest(column, (*data.columns, *data.unread_columns))}"
        )
    values = data.columns[column]
    if values.dtype.kind == "f" and (missing := np.flatnonzero(np.isnan(values))).size:
        raise DataError(
            f"partition.column='{column}': has no value for training example {missing[0]}"
        )
    _, inverse = np.unique(values, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    return np.split(order, np.cumsum(np.bincount(inverse))[:-1])


def _enough(data: Dataset, clients: int, each: int = 1) -> None:
    if clients > len(data.y):
        raise DataError(
            f"partition.clients={clients}: the data set has {len(data.y)} training examples, too "
            "few for the clients"
        )
    if clients * each > len(data.y):
        raise DataError(
            f"partition.clients={clients} with partition.min_samples={each} asks for "
            f"{clients * each} training examples; the data set has {len(data.y)}"
        )


@partitions.register
class Iid(_AmongClients):
    """Examples are shuffled and distributed evenly."""

    kind: str = "iid"

    def split(self, data: Dataset, rng: np.random.Generator) -> list[Indices]:
        _enough(data, self.clients)
        return np.array_split(rng.permutation(len(data.y)), self.clients)


@partitions.register
class Dirichlet(_AmongClients):
    """Label skew: the clients' shares of each class are drawn from Dir(α).

    For each class c: q_c ~ Dir(α·1_K), and the shuffled examples of c are cut at
    cumsum(q_c)·n_c. Drawn again until every client holds `min_samples` (Hsu et al. 2019; the
    minimum as in MOON, Li et al. 2021).

    Args:
        alpha: α, concentration: the smaller, the more the clients' labels differ.
        min_samples: smallest number of training examples of a client.
    """

    kind: str = "dirichlet"
    alpha: float = Field(gt=0)
    min_samples: int = Field(10, ge=1)

    def split(self, data: Dataset, rng: np.random.Generator) -> list[Indices]:
        _by_class(data, self.kind)
        _enough(data, self.clients, self.min_samples)
        per_class = np.bincount(data.y, minlength=len(data.classes))
        draws = min(50_000, MAX_DRAWN // (self.clients * len(per_class)))
        for _ in range(draws):
            shares = rng.dirichlet(np.full(self.clients, self.alpha), size=len(per_class))
            # With rounding, the last sum may be just under 1, or (with a tiny α) NaN.
            ends = np.cumsum(shares, axis=1)
            cuts = (ends * per_class[:, None]).astype(np.int64)
            cuts[:, -1] = per_class
            sizes = np.diff(cuts, axis=1, prepend=0).sum(axis=0)
            if sizes.min() >= self.min_samples and not np.isnan(shares).any():
                break
        else:
            raise DataError(
                f"partition: in {draws} draws of Dir({self.alpha}) among {self.clients} "
                f"clients, none left every client with {self.min_samples} examples; raise "
                "partition.alpha, or lower partition.min_samples or partition.clients"
            )
        shares_of: list[list[Indices]] = [[] for _ in range(self.clients)]
        for c in range(len(per_class)):
            shuffled = rng.permutation(np.flatnonzero(data.y == c))
            for client, piece in enumerate(np.split(shuffled, cuts[c, :-1])):
                shares_of[client].append(piece)
        return [np.concatenate(pieces) for pieces in shares_of]


@partitions.register
class Pathological(_AmongClients):
    """Each client holds examples of a few classes only (McMahan et al. 2017).

    Every client gets exactly `classes_per_client` different classes, every class goes to the same
    number of clients as far as possible, and its examples are divided evenly among them.

    Args:
        classes_per_client: number of different classes that each client holds.
    """

    kind: str = "pathological"
    classes_per_client: int = Field(2, ge=1)

    def split(self, data: Dataset, rng: np.random.Generator) -> list[Indices]:
        _by_class(data, self.kind)
        _enough(data, self.clients)
        num_classes = len(data.classes)
        if self.classes_per_client > num_classes:
            raise DataError(
                f"partition.classes_per_client={self.classes_per_client}: "
                f"the data set has {num_classes} classes"
            )
        holders: list[list[int]] = [[] for _ in range(num_classes)]
        for client in range(self.clients):
            # The classes with the fewest clients so far, ties at random.
            order = np.lexsort((rng.random(num_classes), np.array([len(h) for h in holders])))
            for c in order[: self.classes_per_client]:
                holders[c].append(client)
        shares_of: list[list[Indices]] = [[] for _ in range(self.clients)]
        for c, clients in enumerate(holders):
            of_class = rng.permutation(np.flatnonzero(data.y == c))
            if clients and len(of_class) < len(clients):
                raise DataError(
                    f"partition: class '{data.classes[c]}' has {len(of_class)} training examples "
                    f"for {len(clients)} clients; lower partition.clients or "
                    "partition.classes_per_client"
                )
            pieces = np.array_split(of_class, max(len(clients), 1))
            for client, piece in zip(clients, pieces, strict=False):
                shares_of[client].append(piece)
        return [np.concatenate(pieces) for pieces in shares_of]


@partitions.register
class Quantile(_AmongClients):
    """Target skew for regression: each client holds the examples of one range of targets.

    Examples are sorted by target (ties in random order) and cut into parts of nearly equal size;
    client 0 holds the lowest targets.
    """

    kind: str = "quantile"

    def split(self, data: Dataset, rng: np.random.Generator) -> list[Indices]:
        if data.classes:
            raise DataError(
                f"partition.kind={self.kind} divides examples by a numeric target, and the data "
                f"set has {len(data.classes)} classes; use dirichlet or pathological"
            )
        _enough(data, self.clients)
        order = np.lexsort((rng.random(len(data.y)), data.y))
        return np.array_split(order, self.clients)


@partitions.register
class Quantity(_AmongClients):
    """Quantity skew: client sizes follow a log-normal distribution, labels are iid.

    Size shares ∝ exp(σ·N(0, 1)); every client holds at least `min_samples`.

    Args:
        sigma: σ, spread of the sizes; 0 makes all clients equally large.
        min_samples: smallest number of training examples of a client.
    """

    kind: str = "quantity"
    sigma: float = Field(1.0, ge=0)
    min_samples: int = Field(1, ge=1)

    def split(self, data: Dataset, rng: np.random.Generator) -> list[Indices]:
        _enough(data, self.clients, self.min_samples)
        spare = len(data.y) - self.clients * self.min_samples
        logs = self.sigma * rng.standard_normal(self.clients)
        raw = np.exp(logs - logs.max())  # the largest is 1, which avoids overflow
        ends = np.cumsum(raw / raw.sum())
        ends[-1] = 1.0
        sizes = np.diff((ends * spare).astype(np.int64), prepend=0) + self.min_samples
        return np.split(rng.permutation(len(data.y)), np.cumsum(sizes)[:-1])


@partitions.register
class Natural(Partition):
    """One client for each value of a column of the data set (a writer, a hospital, ...).

    Args:
        column: the column's name; by default the data set's `client_column`.
        clients: number of values to keep, drawn with the seed; by default all.
        min_samples: values with fewer examples are left out.
    """

    kind: str = "natural"
    column: str | None = Field(None, min_length=1)
    clients: int | None = Field(None, ge=1, le=MOST_CLIENTS)
    min_samples: int = Field(1, ge=1)

    def split(self, data: Dataset, rng: np.random.Generator) -> list[Indices]:
        column = self._column(data)
        groups = _by_column(data, column)
        groups = [group for group in groups if len(group) >= self.min_samples]
        wanted = len(groups) if self.clients is None else self.clients
        if wanted > len(groups) or not groups:
            raise DataError(
                f"partition: column '{column}' has {len(groups)} values with "
                f"{self.min_samples} or more examples, but {max(wanted, 1)} clients are needed"
            )
        if wanted < len(groups):
            kept = np.sort(rng.choice(len(groups), size=wanted, replace=False))
            groups = [groups[k] for k in kept]
        return groups

    def client_names(self, data: Dataset, shares: list[Indices]) -> tuple[str, ...]:
        column = self._column(data)
        names = [str(data.columns[column][share[0]]) for share in shares]
        if any(re.fullmatch(r"[-+.\d]+", name) for name in names):  # a bare number says nothing
            names = [f"{column} {name}" for name in names]
        return tuple(names)

    def _column(self, data: Dataset) -> str:
        column = self.column or data.client_column
        if not column:
            raise DataError(
                "partition.column: name a column of the data set, whose values are the clients"
            )
        return column


@partitions.register
class Aspects(Partition):
    """Each client holds a subset of the examples of one value of a column (an aspect of reviews).

    The examples of each aspect are cut into `subsets` subsets, stratified by class. Clients take
    them in turn, aspect by aspect: with A aspects, client k has subset k // A of aspect k mod A.
    FedRNL's clients hold a tenth of an aspect each.

    Args:
        column: the column's name.
        clients: a multiple of A, and at most A·subsets; subsets that no client takes are left out.
        subsets: number of subsets of each aspect.
    """

    niche: ClassVar[bool] = True
    kind: str = "aspects"
    column: str = "aspect"
    clients: int = Field(ge=1, le=MOST_CLIENTS)
    subsets: int = Field(10, ge=1)

    def split(self, data: Dataset, rng: np.random.Generator) -> list[Indices]:
        aspects = _by_column(data, self.column)
        A = len(aspects)
        if self.clients % A or self.clients > A * self.subsets:
            raise DataError(
                f"partition.clients={self.clients}: must be a multiple of the {A} values of "
                f"'{self.column}', and {A * self.subsets} at most, for {self.subsets} subsets of "
                "each"
            )
        cut = []
        for aspect in aspects:
            rows = rng.permutation(aspect)
            rows = rows[np.argsort(data.strata[rows], kind="stable")]  # sorted by class
            cut.append([np.sort(rows[i :: self.subsets]) for i in range(self.subsets)])
        return [cut[k % A][k // A] for k in range(self.clients)]


@partitions.register
class File(Partition):
    """Your own index arrays: a JSON list of lists, or an .npz file with one array per client.

    Arrays of an .npz file are taken in the order of their names; numeric names sort as numbers.

    Args:
        path: the .json or .npz file.
    """

    kind: str = "file"
    path: Path

    @model_validator(mode="after")
    def _deals_all(self) -> File:
        if self.server_fraction or self.train_fraction < 1:
            raise unfit(
                "a file assigns all examples; server_fraction must be 0 and train_fraction 1"
            )
        return self

    def deal(self, data: Dataset, seed: int, held_out: Indices = NONE) -> ClientSplits:
        if len(held_out):
            raise DataError(
                "evaluate.validation: partition.kind=file assigns all examples, so none can be "
                "held out; leave it out"
            )
        return super().deal(data, seed)

    def split(self, data: Dataset, rng: np.random.Generator) -> list[Indices]:
        if not self.path.is_file():
            raise DataError(f"partition.path: there is no file {self.path.absolute()}")
        arrays = self._read()
        if not arrays:
            raise DataError(f"{self.path}: contains no clients")
        for client, array in enumerate(arrays):
            self._check(client, array, len(data.y))
        return [array.astype(np.int64) for array in arrays]

    def _read(self) -> list[NDArray[np.generic]]:
        try:
            if self.path.suffix == ".json":
                rows = json.loads(self.path.read_text())
                if not isinstance(rows, list):
                    raise ValueError("not a list of lists")
                return [np.asarray(row) for row in rows]
            with np.load(self.path, allow_pickle=False) as arrays:
                by_number = sorted(
                    arrays.files, key=lambda n: (not n.isdecimal(), int(n) if n.isdecimal() else n)
                )
                return [arrays[name] for name in by_number]
        except (OSError, ValueError, TypeError, EOFError, RecursionError, BadZipFile) as error:
            raise DataError(f"{self.path}: not a partition file: {error}") from error

    def _check(self, client: int, array: NDArray[np.generic], num_samples: int) -> None:
        where = f"{self.path}: client {client}"
        if array.ndim != 1 or len(array) == 0 or array.dtype.kind not in "iu":
            raise DataError(
                f"{where}: must be a list of one or more whole numbers; it has shape "
                f"{array.shape} and type {array.dtype}"
            )
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= num_samples:
            raise DataError(
                f"{where}: index {low if low < 0 else high} is outside the data set's "
                f"{num_samples} training examples (0 to {num_samples - 1})"
            )
        if len(np.unique(array)) < len(array):
            raise DataError(f"{where}: contains an index twice")
