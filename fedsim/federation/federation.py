"""The federation, as methods see it: sample a cohort, run a client function, collect results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from fedsim.errors import RunError
from fedsim.federation.client import plain
from fedsim.federation.cohort import Cohort
from fedsim.federation.condition import Clock
from fedsim.federation.reduction import (
    Discard,
    Gather,
    Mean,
    Reduction,
    Update,
    Vector,
    WeightedMean,
)
from fedsim.federation.runner import RoundRunner
from fedsim.federation.server import Server
from fedsim.training import Train


class Federation:
    """The clients, as a method sees them.

    A method's client functions are its own methods `f(self, client, **arguments)`. They usually
    run in another process. Their arguments, except for `PerClient` ones, are shared by all clients
    and must not be changed. State that a client keeps goes into `client.state`.

    Args:
        runner: carries out what the method asks for.

    Attributes:
        server: the server's own data, networks and knowledge of the clients.
    """

    def __init__(self, runner: RoundRunner) -> None:
        self._runner = runner
        self.server = Server(runner)

    @property
    def num_clients(self) -> int:
        """K, the number of clients."""
        return self._runner.num_clients

    @property
    def settings(self) -> Train:
        """The experiment's `train` section."""
        return self._runner.settings

    @property
    def round(self) -> int:
        """t, the number of the round; 0 before the first."""
        return self._runner.t

    def initial_weights(self) -> Vector:
        """(size,) the run's initial weights, the same for every method with the same seed."""
        return self._runner.initial_weights.copy()

    def rng(self, purpose: str) -> np.random.Generator:
        """The server's random stream for one purpose in this round."""
        return self._runner.round.rng(purpose)

    @property
    def time(self) -> Clock:
        """Simulated time, for methods that do not wait for the slowest client.

        Raises:
            RunError: no condition of the experiment simulates it.
        """
        for condition in self._runner.conditions:
            if (clock := condition.clock(self._runner.round)) is not None:
                return clock
        raise RunError("no section of the experiment simulates time; set devices")

    def sample(self, t: int) -> Cohort:
        """The clients of round t, drawn without replacement, or chosen by a condition.

        With `privacy` each client is drawn independently, so their number varies. With `devices`
        only clients that are online are drawn, and those are left out that drop out, miss the
        deadline, or are surplus.

        Raises:
            NobodyAnswers: no client is left, so the round changes nothing.
        """
        return self._runner.sample(t)

    def mean(
        self, function: Callable[..., Update], cohort: Sequence[int] | Cohort, **arguments: Any
    ) -> Mean:
        """Run a client function on a cohort and average the updates: Σ weight·vector / Σ weight.

        The result is the same to the bit in any order; see `WeightedMean`. Conditions of the
        experiment may make another mean of it: with noise, by a robust rule, of forged updates.
        For the arguments see `reduce`.

        Raises:
            ClientError: a client failed (`train.on_client_error: stop`).
            RunError: every client of the cohort was skipped, or their weights sum to 0.
        """
        mean: Mean = self._runner.reduce(function, cohort, WeightedMean(), arguments)
        return mean

    def gather(
        self, function: Callable[..., Any], cohort: Sequence[int] | Cohort, **arguments: Any
    ) -> dict[int, Any]:
        """Run a client function on a cohort and return each client's own message, by client.

        Messages are arrays, tensors or numbers, or dicts and lists of them, or an `Update`, of
        which the vectors come back by name; tensors come back as arrays. Clients are in ascending
        order; skipped clients are missing.
        """
        name = function.__name__
        self._runner.check_asked("messages", f"gathers each client's message ({name})")
        messages: dict[int, Any] = self._runner.reduce(function, cohort, Gather(), arguments)
        return messages

    def each(
        self, function: Callable[..., None], cohort: Sequence[int] | Cohort, **arguments: Any
    ) -> None:
        """Run a client function that sends nothing back: it keeps state, or reports scalars."""
        self._runner.reduce(function, cohort, Discard(), arguments)

    def reduce(
        self,
        function: Callable[..., Any],
        cohort: Sequence[int] | Cohort,
        reduction: Reduction,
        **arguments: Any,
    ) -> Any:
        """Run a client function on a cohort and reduce the clients' messages.

        Args:
            function: a method of the running Method, which takes a client and the arguments.
            cohort: client ids.
            reduction: how the messages are reduced.
            arguments: values that the server sends to every client of the cohort, or a part to
                each client (`PerClient`); counted as downlink unless wrapped in `NotCounted`.
                Arrays arrive as tensors on the client's device.

        Raises:
            ClientError: a client failed (`train.on_client_error: stop`).
            RunError: the reduction needs messages (`NothingToReduce`), and every client was
                skipped.
        """
        name = function.__name__
        self._runner.check_asked("messages", f"receives what each client sends ({name})")
        return self._runner.reduce(function, cohort, reduction, arguments)

    def setup_traffic(self) -> AbstractContextManager[None]:
        """Context in which traffic is also recorded separately, as sent only once per run."""
        return self._runner.setup_traffic()

    def evaluate(self, model: Vector | Mapping[str, Any]) -> dict[str, float]:
        """The scores of a model on the central test set, by the run's objective.

        If there is a validation set, also the scores on it, as `validation_<score>`. The sets are
        cut into shards of a fixed size, which the engine distributes. In continual learning, the
        scores of each task are also recorded in tasks.parquet.

        Args:
            model: weights (size,), or the arrays of a model of arrays.
        """
        return self._runner.evaluate(model)

    def log(self, **scalars: float | int | str) -> None:
        """Record scalars of this round in rounds.parquet.

        Raises:
            ValueError: a name is reserved for what is recorded for every round.
        """
        self._runner.log(**scalars)

    def explain(
        self, explainer: str, rows: Iterable[Mapping[str, float | int | str | None]]
    ) -> None:
        """Record explanations of this round in explanations.parquet.

        Args:
            explainer: name of the explainer; a column, like `round`.
            rows: the columns of each explanation, as numbers and text.

        Raises:
            ValueError: a name is reserved, or a value is neither.
        """
        rows = (plain(row, {"round", "explainer", "model"}) for row in rows)
        self._runner.record("explanations", ({"explainer": explainer, **row} for row in rows))


def federation_of(runner: RoundRunner) -> Federation:
    """The federation that a run's method sees: the same one in all its rounds."""
    federation: Federation = runner.once("federation", lambda: Federation(runner))
    return federation
