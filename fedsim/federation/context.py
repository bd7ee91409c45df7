"""Run specifications, and the network, data and device of a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.data import ClientSplits, Dataset, DataSpec
from fedsim.errors import in_one_line
from fedsim.federation.cohort import Without
from fedsim.federation.condition import Condition, Shape, trained_layers
from fedsim.federation.on_card import keep_on_card
from fedsim.federation.wire import to_arrays
from fedsim.models import ArrayModel, Arrays, Model
from fedsim.objectives import Batch, Metric, Objective, Totals, evaluate
from fedsim.objectives.objective import EVALUATION_BATCH, Context
from fedsim.objectives.slices import slices_of
from fedsim.support.memory import give_back_memory
from fedsim.support.rng import keyed_torch_rng
from fedsim.training import (
    FlatModel,
    Stack,
    Train,
    Trained,
    TrainingJob,
    lacks_memory,
    load_weights,
)
from fedsim.training import train as train_alone

T = TypeVar("T")

TEST_SHARD = 500  # examples of the central test set per shard, the unit of evaluation


@dataclass(frozen=True)
class Examples:
    """Inputs and labels or targets, as networks take them.

    Args:
        x: (n, ...) float32, or int32 token ids.
        y: (n,) int64 labels, or (n, ...) float32 targets.
        arrays: returns the same x and y as the data set has them, before scaling and
            normalisation.
        facts: what the objective needs of them beside (`Objective.facts`).
    """

    x: Tensor
    y: Tensor
    arrays: Callable[[], tuple[NDArray[Any], NDArray[Any]]] | None = None
    facts: Context = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.y)

    def at(self, rows: Tensor | slice) -> Examples:
        """Some of them."""
        facts = {name: fact[rows] for name, fact in self.facts.items()}
        return Examples(self.x[rows], self.y[rows], facts=facts)

    def losses(self, objective: Objective, network: nn.Module) -> Tensor:
        """(n,) the network's training losses, as it is; computed in batches."""
        starts = range(0, len(self), EVALUATION_BATCH)
        parts = [self.at(slice(start, start + EVALUATION_BATCH)) for start in starts]
        return torch.cat([objective.loss(network, p.x, p.y, p.facts) for p in parts])

    @property
    def table(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(n, F) inputs and (n,) targets of a table, in full precision."""
        assert self.arrays is not None, "only examples of the data set have raw arrays"
        x, y = (array.astype(np.float64, copy=False) for array in self.arrays())
        return x, y


@dataclass(frozen=True)
class RunSpec:
    """What a worker needs besides the examples. It is sent once, when the worker starts.

    Args:
        functions: the object whose methods are the client functions: the Method, which this
            package never imports.
        data: shape and kind of inputs.
        outputs: number of outputs of a network for one input.
        conditions: what happens between server and clients, in ascending order.
        columns, client_columns: columns of rounds.parquet and clients.parquet that conditions
            have, and whose they are; those of the experiment's sections even if not in use.
        size: number of a model's weights, including buffers; 0 if it has none.
        setup_bytes: what all clients together send and receive before the first round.
        without: clients that take no part, if any.
        adapt: changes a network that was built, such as freezing all but adapters.
        frozen: arrays of frozen parameters, which all processes of a node share.
        frozen_size: bytes of frozen parameters that each process has by itself.
    """

    model: Model
    objective: Objective
    train: Train
    seed: int
    functions: Any
    data: DataSpec
    outputs: int
    conditions: tuple[Condition, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    client_columns: Mapping[str, str] = field(default_factory=dict)
    size: int = 0
    setup_bytes: tuple[int, int] = (0, 0)
    without: Without | None = None
    adapt: Callable[[nn.Module], nn.Module] | None = None
    frozen: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    frozen_size: int = 0

    def shown(self, dataset: Dataset) -> tuple[Metric, ...]:
        """The metrics that the run records."""
        own = [metric for condition in self.conditions for metric in condition.metrics]
        return *self.objective.shown(dataset), *own

    def worker_bytes(self, clients_per_step: int | Literal["auto"]) -> float:
        """Approximate memory of a worker's arrays, without examples and activations.

        Per weight: the network, its gradient, received and sent weights (4 bytes each), the exact
        sum (16), and for each client of a stack weights, gradient and optimiser state (one client
        while the size of the stack is unknown). Besides, its frozen parameters.
        """
        V = 1 if clients_per_step == "auto" else clients_per_step
        optimizer = self.train.optimizer
        kept = 2 if optimizer.name != "sgd" else int(optimizer.momentum > 0)
        return 4.0 * self.size * (8 + (2 + kept) * V) + self.frozen_size

    @property
    def node_bytes(self) -> float:
        """Memory of the frozen parameters that the workers of a node share."""
        return float(sum(array.nbytes for array in self.frozen.values()))

    def build(self) -> nn.Module:
        """A network, from torch's current random state."""
        network = self.model.build_for(self.data, self.outputs)
        return network if self.adapt is None else self.adapt(network)

    def build_model(self) -> nn.Module:
        """The network with the run's initial weights, the same wherever it is built.

        Raises:
            ExperimentError: it does not accept the data's inputs.
            DataError: `train.initial_weights` do not fit the network.
        """
        with keyed_torch_rng(self.seed, "init"):
            return self.build_begun()

    def build_begun(self) -> nn.Module:
        """A network as a run begins with it, from torch's current random state.

        Only what is neither in `train.initial_weights` nor frozen below adapters is random.

        Raises:
            DataError: `train.initial_weights` do not fit the network.
        """
        network = self.build()
        if self.train.initial_weights is not None:
            load_weights(self.train.initial_weights, network)
        for name, array in self.frozen.items():
            network.get_parameter(name).data = torch.from_numpy(array)
        if self.frozen:
            give_back_memory()  # of what was built in their place
        return network


class WorkerContext:
    """A network and the data, in one process on one device, used by one client after another.

    Args:
        card_part: the worker's share of a GPU, 0 to 1; training examples may be kept there.

    Attributes:
        dataset: the data.
        notice: what the user should know of where the data are, if anything.
    """

    def __init__(
        self,
        spec: RunSpec,
        dataset: Dataset,
        splits: ClientSplits,
        device: torch.device,
        card_part: float = 0.0,
    ) -> None:
        self.spec, self.splits, self.device = spec, splits, device
        self.model = FlatModel(spec.build_model(), device)
        self.slices = slices_of(spec.objective, dataset, splits)
        self.dataset = dataset
        self._on_card, self.notice = keep_on_card(dataset, device, card_part)
        self._has_facts = type(spec.objective).facts is not Objective.facts
        self._networks: dict[str, FlatModel] = {}
        self._made: dict[str, Any] = {}

    @cached_property
    def layers(self) -> dict[int, list[Shape]]:
        """The shapes of the trained layers in vectors of weights; see `trained_layers`."""
        return trained_layers(self.model, self.spec.functions.sent_part(self.model))

    def splits_at(self, t: int) -> ClientSplits:
        """The examples that each client holds in round t."""
        return self.splits.at(t, self.spec.train.rounds)

    @cached_property
    def stack(self) -> Stack:
        """The network for several clients at once."""
        return Stack(self.model)

    @cached_property
    def why_not_stacked(self) -> str | None:
        """Why this network cannot be trained in stacks; None if it can."""
        if self.splits_at(0).labels is not None:
            return "clients learn different tasks"
        if self.model.num_parameters == 0:
            return "the model has no weights to train"
        few = self.examples(self.splits.train.values[:5])
        if len(few) < 5:
            return "there are too few examples to try it"
        try:
            loss = self.spec.objective.loss
            return self.stack.why_not(few.x, few.y, self.spec.train, loss, few.facts)
        except Exception as error:  # a user's network may raise anything
            if lacks_memory(error):
                raise
            return in_one_line(error)

    def train(self, job: TrainingJob) -> Trained:
        """Local training of one client."""
        return train_alone(self.model, job, self.spec.train)

    def as_network(self, own: Tensor | nn.Module | Mapping[str, Any]) -> nn.Module:
        """A model as a network: weights (size,) are loaded into the worker's own."""
        if isinstance(own, Mapping):
            assert isinstance(self.spec.model, ArrayModel)
            arrays: Arrays = to_arrays(dict(own))
            return self.spec.model.as_network(arrays)
        if isinstance(own, Tensor):
            self.model.load(own)
            return self.model.module
        return own

    def network(self, name: str, build: Callable[[], nn.Module]) -> FlatModel:
        """A further network, built on first use."""
        if name not in self._networks:
            with keyed_torch_rng(self.spec.seed, f"init/{name}"):
                self._networks[name] = FlatModel(build(), self.device)
        return self._networks[name]

    def examples(self, indices: NDArray[np.int64]) -> Examples:
        """Training examples by index."""
        data = self.dataset
        if self._on_card is None:
            found = self.prepare(data.x[indices], data.y[indices])
        else:
            x, y = self._on_card.rows(indices)
            found = self._scaled(x, y, lambda: (data.x[indices], data.y[indices]))
        if not self._has_facts:
            return found
        return replace(found, facts=self._facts(data.columns, indices))

    def test_examples(self, indices: NDArray[np.int64] | slice) -> Examples:
        """Examples of the central test set by index."""
        data = self.dataset
        found = self.prepare(data.test_x[indices], data.test_y[indices])
        if not self._has_facts:
            return found
        return replace(found, facts=self._facts(data.test_columns, indices))

    def test_batch(self, part: slice) -> Batch:
        """A part of the central test set to score models on, targets in full precision."""
        y = torch.tensor(self.dataset.test_y[part], device=self.device)
        examples = self.test_examples(part)
        return Batch(examples.x, y, facts={**self._truth(part), **examples.facts})

    def validation_batch(self, part: slice) -> Batch:
        """A part of the validation set to score models on, targets in full precision."""
        rows = self.splits.held_out[part]
        y = torch.tensor(self.dataset.y[rows], device=self.device)
        examples = self.examples(rows)
        return Batch(examples.x, y, facts=examples.facts)

    def validated(self, model: Any, t: int) -> Totals:
        """The totals on the validation set of a model that is loaded in round t.

        Kept for the next client, which may have the same model.
        """
        kept = self.once("validated", dict[str, Any])
        version = model._version if isinstance(model, Tensor) else t
        # Training writes to the model's own vector by its layers, which no version counts.
        shared = isinstance(model, Tensor) and model.data_ptr() == self.model.vector.data_ptr()
        if shared or kept.get("model") is not model or kept["version"] != version:
            with keyed_torch_rng(self.spec.seed, "validation/torch", t, device=self.device):
                batch = self.validation_batch(slice(None))
                totals = evaluate(self.spec.objective, self.as_network(model), batch)
            kept.update(model=model, version=version, totals=totals)
        found: Totals = kept["totals"]
        return found

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What is made once in this process, by name."""
        if name not in self._made:
            self._made[name] = make()
        made: T = self._made[name]
        return made

    def inputs(self, x: NDArray[Any]) -> Tensor:
        """(n, ...) raw inputs as networks take them."""
        return scaled(self.dataset, _tensor(x).to(self.device))

    @cached_property
    def central_batch(self) -> Batch:
        """The whole central test set to score clients' models on."""
        test = self.central_test
        return Batch(test.x, test.y, facts={**self._truth(slice(None)), **test.facts})

    def _truth(self, part: slice) -> dict[str, Tensor]:
        truth = self.dataset.truth
        return {name: torch.tensor(a[part], device=self.device) for name, a in truth.items()}

    def _facts(
        self, columns: Mapping[str, NDArray[Any]], rows: NDArray[np.int64] | slice
    ) -> dict[str, Tensor]:
        found = self.spec.objective.facts(columns, rows)
        return {name: torch.tensor(a, device=self.device) for name, a in found.items()}

    @cached_property
    def central_test(self) -> Examples:
        """The whole central test set, cached for all clients of this process."""
        return self.test_examples(slice(None))

    def prepare(self, x: NDArray[np.generic], y: NDArray[Any]) -> Examples:
        """Further examples, scaled and normalised like those of the data set."""
        inputs, labels = (_tensor(array).to(self.device) for array in (x, y))
        return self._scaled(inputs, labels, lambda: (x, y))

    def _scaled(
        self,
        inputs: Tensor,
        labels: Tensor,
        arrays: Callable[[], tuple[NDArray[Any], NDArray[Any]]],
    ) -> Examples:
        labels = labels.float() if labels.is_floating_point() else labels
        return Examples(scaled(self.dataset, inputs), labels, arrays)


def scaled(dataset: Dataset, inputs: Tensor) -> Tensor:
    """Inputs (n, ...) for networks: bytes scaled to [0, 1], and the data set's normalisation."""
    if inputs.dtype == torch.int32:  # token ids
        return inputs
    inputs = inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs.float()
    if dataset.mean:
        per_channel = (-1, *[1] * (inputs.dim() - 2))
        mean = torch.tensor(dataset.mean, device=inputs.device).view(per_channel)
        std = torch.tensor(dataset.std, device=inputs.device).view(per_channel)
        inputs = (inputs - mean) / std
    return inputs


def _tensor(array: NDArray[Any]) -> Tensor:
    """An array as a writable tensor, copied if it is a view."""
    return torch.tensor(array) if array.base is not None else torch.from_numpy(array)
