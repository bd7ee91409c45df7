"""Baselines: inputs that others are compared with when they are explained.

A baseline is one input, or several, the background, over which explanations are averaged. Centres
count as much as the inputs that are nearest to them.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from torch import Tensor

from fedsim.config.registry import Config
from fedsim.data import ClientSplits, Dataset
from fedsim.data.dataset import as_dtype
from fedsim.data.stored import AnyArray, StoredArray
from fedsim.errors import ExperimentError
from fedsim.explain.explainer import ExplainedData, ExplainedModel, FeatureExplainer
from fedsim.support.rng import keyed_rng
from fedsim.training import logits

BLUR = 0.1  # standard deviation, as a share of an image's longer side
COUNT = 8  # bytes of a centre's weight


class Reference(Config):
    """A row of the central test set.

    Args:
        reference: its number, counted from 0.
    """

    reference: int = Field(ge=0)


class TrainingRows(Config):
    """Training examples: the client's own for its model, all clients' for the global model.

    Args:
        train: m, how many; all of its own if a client has fewer.
    """

    train: int = Field(ge=1)


class Clients(Config):
    """Centres that clients send, merged by the server (Federated SHAP).

    Each client sends the centres of its training inputs by k-means, with the numbers of examples
    that are nearest to each; the server merges them by k-means with these weights. Each merged
    centre counts as much as the examples that it stands for. One centre is the mean.

    Args:
        clients: m, how many centres each client sends (of fewer examples, as many as these), and
            how many the server makes of them.

    Source: Ducange et al. (2026), with their k-means; fuzzy c-means is not here.
    """

    clients: int = Field(ge=1)


class Pooled(Clients):
    """As many centres of all training inputs together, which only a simulation has."""


_BY_KEY: Mapping[str, type[Config]] = {
    "reference": Reference,
    "train": TrainingRows,
    "clients": Clients,
}
_Name = Literal["zero", "mean", "median", "blur", "noise"]


def _by_key(value: Any) -> Any:
    """A section by its only key, so that complaints are about that kind alone."""
    if isinstance(value, Config) or value in get_args(_Name):
        return value
    if isinstance(value, Mapping) and len(value) == 1 and (key := next(iter(value))) in _BY_KEY:
        return _BY_KEY[key].model_validate(value)
    names = ", ".join(get_args(_Name))
    raise PydanticCustomError(
        "no_baseline",
        "must be one of {names}, or {reference: ROW}, {train: m}, {clients: m}",
        {"names": names},
    )


Baseline = Annotated[
    _Name | Reference | TrainingRows | Clients,
    BeforeValidator(_by_key, json_schema_input_type=_Name | Reference | TrainingRows | Clients),
]


class Rows(NamedTuple):
    """The raw inputs (m, ...) of a background, and their weights (m,), 1 on average."""

    inputs: NDArray[Any]
    weights: NDArray[np.float64]

    @classmethod
    def of(cls, inputs: NDArray[Any], weights: NDArray[np.float64] | None = None) -> Rows:
        """By default all weigh the same; weights may have any sum."""
        if weights is None:
            weights = np.ones(len(inputs))
        return cls(inputs, weights / weights.mean())


@dataclass(frozen=True)
class Background:
    """A background as the network takes it.

    Args:
        rows: (m, 1, ...), or (m, n, ...) of each input its own.
        weights: (m,), 1 on average.
    """

    rows: Tensor
    weights: NDArray[np.float64]

    @classmethod
    def zero(cls, x: Tensor) -> Background:
        """Zeros for all inputs (n, ...)."""
        return cls(torch.zeros_like(x[:1])[None], np.ones(1))

    @property
    def even(self) -> bool:
        """Whether all rows weigh the same."""
        return bool((self.weights == 1).all())

    def of(self, inputs: slice) -> Background:
        """That of some of the inputs."""
        return self if self.rows.shape[1] == 1 else Background(self.rows[:, inputs], self.weights)

    def each(self) -> Iterator[tuple[float, Tensor]]:
        """Each row with its weight."""
        return zip(self.weights.tolist(), self.rows, strict=True)

    def mean(self, values: Tensor) -> Tensor:
        """The weighted mean of values (m, ...) of the rows."""
        if self.even:  # a product would change the layout, and with it the order of the sum
            return values.mean(dim=0)
        weights = torch.from_numpy(self.weights).to(values)
        return (values * weights.view(-1, *[1] * (values.dim() - 1))).mean(dim=0)


class Compared(FeatureExplainer, ABC):
    """Base class of explainers that compare an input with others, the baseline.

    Attributes:
        baseline: `zero`; the `mean` or the `median` of the training inputs, entry by entry; the
            input itself with a `blur` (images), a standard deviation of a tenth of the longer
            side; `noise`, each entry uniform between the least and the greatest of the training
            inputs; a row of the central test set, `{reference: 12}`; a background of m training
            examples, `{train: 8}`, see `TrainingRows`; or of m centres that clients send,
            `{clients: 8}`, see `Clients`. Of documents `zero` alone: the document without a word,
            or zero vectors of words for what needs gradients.
    """

    baseline: Baseline = "zero"

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        super().check(model, data)
        if self.baseline == "blur" and not data.dataset.words:
            if len(data.dataset.shape) != 3:
                raise ExperimentError("baseline=blur: the inputs are no images; take mean")
            return
        if self.baseline == "zero":
            return
        rows_of(self.baseline, model, data)
        if isinstance(self.baseline, TrainingRows | Clients):
            ((key, m),) = dict(self.baseline).items()
            if m > (n := len(_training_rows(data))):
                raise ExperimentError(f"baseline.{key}={m}: there are {n} training inputs")

    def background(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor
    ) -> Background | None:
        """The baselines of inputs (n, ...); None for zero."""
        if self.baseline == "zero":
            return None
        if self.baseline == "blur":
            return Background(blurred(x)[None], np.ones(1))
        inputs, weights = rows_of(self.baseline, model, data)
        return Background(data.prepare(inputs).to(x)[:, None], weights)

    def endpoints(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """f(x) and the mean f of the background."""
        background = self.background(model, data, x) or Background.zero(x)
        network, values = model.as_network(), []
        for weight, one in background.each():
            outputs = torch.from_numpy(logits(network, one)).expand(len(x), -1)
            values.append(weight * self.explained(outputs, y.cpu()))
        return super().endpoints(model, data, x, y)[0], np.mean(values, axis=0)

    def pooled(self) -> Compared | None:
        """The explainer with the background that would be if clients' examples were pooled."""
        if not isinstance(self.baseline, Clients):
            return None
        return self.model_copy(update={"baseline": Pooled(clients=self.baseline.clients)})

    @property
    def at_vectors(self) -> bool:
        """Whether it compares documents at their words' vectors, and not without words."""
        return False

    def about_baseline(self, data: Dataset) -> str:
        if data.words and self.at_vectors:
            return "zero in each entry of the words' vectors"
        return in_words(self.baseline, data)

    @property
    def file(self) -> str:
        usual = self.baseline == type(self).model_fields["baseline"].default
        return self.label if usual else f"{self.label}-baseline-{label(self.baseline)}"


def label(choice: Baseline) -> str:
    """`mean`, `row-3`, `train-8`."""
    if isinstance(choice, str):
        return choice
    ((key, value),) = dict(choice).items()
    names: dict[type[Config], str] = {Reference: "row", Pooled: "pooled"}
    return f"{names.get(type(choice), key)}-{value}"


@dataclass(frozen=True)
class Backgrounds:
    """The baselines that models of a run have in common, and what clients sent for them.

    Args:
        rows: raw inputs and their weights by label.
        sent: bytes that all clients send.
        received: bytes that each client receives, if it explains its model.
        whole: the clients whose examples are centres, as there are no more of them.
    """

    rows: Mapping[str, Rows] = field(default_factory=dict)
    sent: int = 0
    received: int = 0
    whole: tuple[int, ...] = ()

    def joined(
        self, explainer: Compared, model: ExplainedModel, data: ExplainedData, pooled: bool
    ) -> Backgrounds:
        """With those of one more explainer, and those with which it is compared if `pooled`."""
        choice, other, rows = explainer.baseline, explainer.pooled(), dict(self.rows)
        if choice in ("zero", "blur") or label(choice) in rows:
            return self
        found = rows[label(choice)] = rows_of(choice, model, data)
        if other is None or data.splits is None or not isinstance(choice, Clients):
            return replace(self, rows=rows)
        if pooled:
            rows[label(other.baseline)] = rows_of(other.baseline, model, data)
        counts = [len(_distinct(data.dataset.x[own])[0]) for own in data.splits.train]
        centre = 4 * int(np.prod(found.inputs.shape[1:])) + COUNT
        m = choice.clients
        return Backgrounds(
            rows,
            self.sent + sum(min(m, n) * centre for n in counts),
            self.received + len(found.inputs) * centre,
            tuple(sorted({*self.whole, *(k for k, n in enumerate(counts) if 0 < n <= m)})),
        )


def rows_of(choice: Baseline, model: ExplainedModel, data: ExplainedData) -> Rows:
    """A baseline that does not depend on the input, nor is zero.

    Raises:
        ExperimentError: the data have no such baseline.
    """
    dataset = data.dataset
    if dataset.words:
        raise ExperimentError("baseline: documents have none but zero")
    if isinstance(choice, Reference):
        if choice.reference >= len(dataset.test_y):
            raise ExperimentError(
                f"baseline.reference={choice.reference}: the test set has "
                f"{len(dataset.test_y)} rows, counted from 0"
            )
        return Rows.of(dataset.test_x[[choice.reference]])
    own = data.own if isinstance(choice, TrainingRows) else None
    if own is not None and not len(own):
        own = None
    if own is None and label(choice) in data.backgrounds:
        return Rows(*data.backgrounds[label(choice)])
    if isinstance(choice, TrainingRows):
        client = -1 if own is None or model.client is None else model.client
        rng = keyed_rng(model.seed, "explain/background", client=client)
        held, rows = dataset.x, _training_rows(data)
        if own is not None:
            held, rows = own, np.arange(len(own))
        return Rows.of(np.asarray(held[np.sort(rng.permutation(rows)[: choice.train])]))
    found, weights = _made(choice, model.seed, dataset.x, _training_rows(data), data.splits)
    made = Rows(as_dtype(found, dataset.x.dtype), weights)
    data.backgrounds[label(choice)] = made
    return made


def _training_rows(data: ExplainedData) -> NDArray[np.int64]:
    if data.splits is not None:
        return np.unique(data.splits.train.values)
    return np.arange(data.dataset.num_loaded)


def _made(
    choice: Baseline, seed: int, x: AnyArray, rows: NDArray[np.int64], splits: ClientSplits | None
) -> Rows:
    if choice == "mean":
        return Rows.of(_mean(x, rows)[None])
    if choice == "noise":
        low, high = _range(x, rows)
        return Rows.of(keyed_rng(seed, "explain/noise").uniform(low, high)[None])
    if isinstance(x, StoredArray):
        told = choice if isinstance(choice, str) else "clients"
        raise ExperimentError(f"baseline={told}: the inputs stay in their files; take mean")
    if choice == "median":
        return Rows.of(np.median(x[rows], axis=0)[None])
    assert isinstance(choice, Clients)
    if isinstance(choice, Pooled):
        return Rows.of(*centres(x[rows], choice.clients, keyed_rng(seed, "explain/centres")))
    if splits is None:
        raise ExperimentError("baseline=clients: the clients are not known here; take mean")
    return Rows.of(*merged(sent_centres(choice.clients, seed, x, splits), choice.clients, seed))


Centres = tuple[NDArray[np.float32], NDArray[np.float64]]  # (c, ...) and the weights (c,)


def sent_centres(m: int, seed: int, x: NDArray[Any], splits: ClientSplits) -> list[Centres]:
    """What each client with examples sends."""
    return [
        centres(x[own], m, keyed_rng(seed, "explain/centres", client=k))
        for k, own in enumerate(splits.train)
        if len(own)
    ]


def merged(sent: Iterable[Centres], m: int, seed: int) -> Centres:
    """The server's m centres of what clients sent; fewer of fewer different ones."""
    found, weights = (np.concatenate(parts) for parts in zip(*sent, strict=True))
    return centres(found, m, keyed_rng(seed, "explain/centres"), weights)


def centres(
    x: NDArray[Any], m: int, rng: Generator, weights: NDArray[np.float64] | None = None
) -> Centres:
    """Centres (c, ...) of inputs (n, ...) by k-means, and the weight of those nearest to each.

    They do not depend on the order of the inputs.

    Args:
        m: how many; the inputs themselves, if no more than m differ.
        weights: (n,) of the inputs; by default 1 each.
    """
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    rows, place = _distinct(x)
    of_rows = np.bincount(place, weights)
    if len(rows) > m:
        means = KMeans(m, n_init=1, random_state=int(rng.integers(2**31)))
        with threadpool_limits(1):  # sums over several threads differ in the last bits
            nearest = means.fit_predict(rows, sample_weight=of_rows)
        rows, of_rows = means.cluster_centers_, np.bincount(nearest, of_rows, minlength=m)
    return rows.reshape(-1, *x.shape[1:]), of_rows.astype(np.float64)


def _distinct(x: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(d, W) the different ones of inputs (n, ...), and (n,) which each is."""
    flat = x.reshape(len(x), int(np.prod(x.shape[1:]))).astype(np.float32)
    rows, place = np.unique(flat, axis=0, return_inverse=True)
    return rows, place.ravel()


def blurred(x: Tensor) -> Tensor:
    """Images (n, C, H, W) after a Gaussian blur; weights at the borders sum to 1 as elsewhere."""
    H, W = x.shape[2:]
    sigma = BLUR * max(H, W)

    def weights(size: int) -> Tensor:
        at = torch.arange(size, dtype=torch.float64)
        near = torch.exp(-((at[:, None] - at) ** 2) / (2 * sigma**2))
        return (near / near.sum(dim=1, keepdim=True)).to(x.device)

    return (weights(H) @ x.double() @ weights(W).T).to(x)


def _mean(x: AnyArray, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    if not isinstance(x, StoredArray):
        return np.mean(x[rows], axis=0, dtype=np.float64)
    total = sum(part.sum(axis=0, dtype=np.float64) for part in x.chunks(rows))
    return np.asarray(total / len(rows))


def _range(x: AnyArray, rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The least and the greatest value of each entry."""
    parts = list(x.chunks(rows)) if isinstance(x, StoredArray) else [x[rows]]
    low, high = [part.min(axis=0) for part in parts], [part.max(axis=0) for part in parts]
    return np.min(low, axis=0), np.max(high, axis=0)


def in_words(choice: Baseline, data: Dataset) -> str:
    if isinstance(choice, Reference):
        return f"row {choice.reference} of the test set"
    if isinstance(choice, TrainingRows):
        return f"{choice.train} training example{'s' * (choice.train > 1)}"
    if isinstance(choice, Clients):
        return f"{choice.clients} centre{'s' * (choice.clients > 1)} of the clients' inputs"
    if choice == "blur":
        return "the blurred image"
    if choice == "noise":
        return "noise within the range of the training inputs"
    if choice != "zero":
        return f"the {choice} of the training inputs"
    if data.words:
        return "the document without the word"
    images = len(data.shape) == 3
    if data.mean:
        return f"zero, the mean {'pixel' if images else 'input'} of the data"
    if images:
        return "zero, a black image" if data.x.dtype == np.uint8 else "zero in every pixel"
    if data.scaling.zero:
        categories = " and no category" if data.parts is not None else ""
        return f"zero, {data.scaling.zero}{categories}"
    return "zero in every feature"
