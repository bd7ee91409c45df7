"""The server, as methods see it: its data and networks, and what it knows of the clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedsim.data import ClientSplits, Dataset
from fedsim.errors import Diverged, RunError
from fedsim.federation.context import Examples
from fedsim.federation.reduction import Vector
from fedsim.federation.runner import RoundRunner
from fedsim.federation.sums import ExactSum, check_block
from fedsim.models import Model
from fedsim.objectives import Objective
from fedsim.training import FlatModel

T = TypeVar("T")


class Server:
    """What a method may use on the server.

    What an experiment hides from the server (`privacy`, `secure_aggregation`) raises a RunError
    where a method reads it.

    Args:
        runner: the rounds of the run.

    Attributes:
        model: the network in this process, for its layout and for training on the server.
        device: the device of `model` and of the server's examples.
        objective: the training loss and the scores.
        learner: the experiment's `model` section, which builds networks or learns rules.
    """

    def __init__(self, runner: RoundRunner) -> None:
        self._runner, self._context = runner, runner.context
        self.model: FlatModel = self._context.model
        self.device: torch.device = self._context.device
        self.objective: Objective = self._context.spec.objective
        self.learner: Model = self._context.spec.model

    # -- data ----------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self._context.dataset.shape

    @property
    def num_classes(self) -> int:
        """C, the number of classes; 0 for regression."""
        return len(self._context.dataset.classes)

    @property
    def parts(self) -> NDArray[np.int64] | None:
        """(W,) the feature of each entry of a table's row, if features take several."""
        return self._context.spec.data.parts

    @property
    def data(self) -> Dataset:
        """The data set: its test set, the names of its classes and features, and all examples."""
        self._runner.check_asked("data", "reads the data set")
        return self._context.dataset

    @property
    def own_data(self) -> Examples:
        """The server's own examples (`partition.server_fraction`)."""
        return self._context.examples(self._runner.splits.server)

    @property
    def labelled_data(self) -> Examples:
        """All clients' labelled examples together, for baselines beyond any real federation."""
        self._runner.check_asked("data", "reads the clients' examples")
        held = self._context.splits.held(self._runner.t)
        return self._context.examples(np.sort(held.training_rows))

    @property
    def test_data(self) -> Examples:
        """The central test set."""
        return self._context.central_test

    @property
    def validation_data(self) -> Examples:
        """The validation set, held out of the training examples (`evaluate.validation`)."""
        return self._context.examples(self._runner.splits.held_out)

    def prepare(self, x: NDArray[np.generic], y: NDArray[np.int64]) -> Examples:
        """Scale and normalise further examples (of another data set) like the run's data."""
        return self._context.prepare(x, y)

    def tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        """Copy an array to a tensor on the server's device."""
        return torch.tensor(array, device=self.device)

    @property
    def seed(self) -> int:
        """The experiment's seed."""
        return self._runner.seed

    def network(self, name: str, build: Callable[[], nn.Module]) -> FlatModel:
        """A further network on the server, such as a generator, initialised with the run's seed.

        It keeps the weights that were left in it; store what a round trains in the state.
        """
        return self._context.network(name, build)

    def build(self) -> nn.Module:
        """A network of the experiment with other initial weights, such as for `network`."""
        return self._context.spec.build()

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What a method makes once in a run, of what does not change; by name."""
        return self._context.once(f"method/{name}", make)

    # -- clients -------------------------------------------------------------------------------

    @property
    def splits(self) -> ClientSplits:
        """The examples that each client holds in this round; a real server would not know them."""
        self._runner.check_asked("data", "reads the clients' splits")
        return self._runner.splits

    @property
    def num_samples(self) -> NDArray[np.int64]:
        """(K,) n_k, the number of labelled training examples of each client."""
        self._runner.check_asked("sizes", "reads each client's number of examples")
        return self._runner.num_samples

    @property
    def num_unlabelled(self) -> NDArray[np.int64]:
        """(K,) the number of examples of each client whose labels it does not know."""
        self._runner.check_asked("sizes", "reads each client's number of examples")
        return self._runner.splits.unlabelled.lengths

    @property
    def loses_clients(self) -> bool:
        """Whether clients, possibly all, may drop out of a round without an error."""
        return self._runner.loses_clients

    def average(
        self, models: Mapping[int, Vector], factors: Mapping[int, float] | None = None
    ) -> Vector:
        """Σ_k n_k·w_k / Σ_k n_k of gathered models by client, as `Federation.mean` computes it.

        Equal to the bit if each block has one client, otherwise up to rounding.

        Args:
            factors: factor of each n_k, by client.

        Raises:
            RunError: there are no models, because every client was skipped.
            Diverged: a model is out of range.
        """
        self._runner.check_asked("sizes", "averages models by each client's number of examples")
        t = self._runner.t
        if not models:
            raise RunError(f"round {t}: no client of the cohort sent a model")
        total = ExactSum.zeros(self.model.size)
        n = self._runner.num_samples
        counted = {k: n[k] * (factors[k] if factors else 1) for k in models}
        for k, w in models.items():
            try:
                block = counted[k] * w.astype(np.float64)
                check_block(block)
            except OverflowError:
                what = f"the weights of client {k}'s model are out of range"
                raise Diverged(t, what) from None
            total.add(block)
        weight = math.fsum(counted.values())
        mean: Vector = (total.value() / weight).astype(np.float32)
        return mean

    # -- records -------------------------------------------------------------------------------

    def recorded(self, table: str) -> list[dict[str, Any]]:
        """The rows of a further table recorded in this round so far."""
        self._runner.check_asked("messages", "reads clients' records")
        return self._runner.recorded(table)

    def replay(self, t: int) -> None:
        """Go back to round t of a finished run, for its random streams and examples.

        Raises:
            RunError: a round is running.
        """
        if self._runner.round.running:
            raise RunError(f"round {self._runner.t}: a method cannot go to another round")
        self._runner.begin(t)

    def notice(self, line: str) -> None:
        """Show the user a line, once per run."""
        self._runner.notice(line)
