"""The base class of unlearning methods, and the finished run that they work on.

A method starts from what a real server would have at the end of a run: the weights, and the
updates that it stored. Here nothing is stored: a finished run can be played again to the bit, so
updates are computed again when a method asks for them, and counted as stored.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from numpy.typing import NDArray

from fedsim.analysis.replay import Replay, replay, trained_models
from fedsim.conditions.explaining import Explanations
from fedsim.config.registry import Component, Registry
from fedsim.errors import RunError, RunFolderError
from fedsim.federation import (
    Asked,
    Engine,
    Federation,
    LocalEngine,
    RoundRunner,
    RunSpec,
    Vector,
    Without,
    limit_threads,
)
from fedsim.methods import Method, State
from fedsim.methods.shared.pool import SharesImages
from fedsim.results.manifest import clients_per_step
from fedsim.results.records import new_ledger
from fedsim.results.run import Run
from fedsim.simulate import initial_state, on_record, one_round
from fedsim.support.words import in_short
from fedsim.training import FlatModel

if TYPE_CHECKING:
    import pandas as pd


class Unlearning(Component, ABC):
    """A way to make a finished run forget clients.

    Its fields are its hyper-parameters. It has client functions like a method of federated
    learning, which are its own methods, and a `round` that calls them.

    Attributes:
        continues: whether clients go on, with what the run has left; not where it begins anew.
        asks: what of clients the server has to see; see `fedsim.methods.Learns`.
        trains_alike: whether its own client functions train the whole model on labelled examples,
            which the run's method must do as well.
        has_global_model: that it leaves one, for conditions, as of a method.
    """

    name: str
    continues: ClassVar[bool] = True
    asks: ClassVar[tuple[Asked, ...]] = ()
    trains_alike: ClassVar[bool] = False
    has_global_model: ClassVar[bool] = True

    @abstractmethod
    def forget(self, task: Forgetting) -> Vector:
        """(size,) the weights that are to be as if the clients had never taken part."""

    def round(self, fed: Federation, state: Any, t: int) -> Any:
        """A round of its own client functions; see `Method.round` and `Forgetting.play`."""
        raise NotImplementedError

    @property
    def further_rounds(self) -> int:
        """How many rounds it adds to the run's; learning rates decay until then."""
        return 0

    def sent_part(self, model: FlatModel) -> NDArray[Any] | None:
        """Which weights clients send: all."""
        return None

    def check(self, task: Forgetting) -> None:
        """Reject runs that it is not for.

        Raises:
            BadInput: it is not; the message says why.
        """
        if not self.continues:
            return
        run, experiment, method = task.run, task.run.experiment, task.run.experiment.method
        why = ""
        if experiment.privacy is not None:
            why = "privacy: further rounds would spend more than the run's ε"
        elif hidden := next((asked for asked in self.asks if asked in experiment.hidden), None):
            why = f"{experiment.hidden[hidden]}: hides clients' {hidden}, which it needs"
        elif method.asynchronous:
            why = f"method.name={method.name}: updates may still be on their way"
        elif isinstance(method, SharesImages):
            why = (
                f"method.name={method.name}: others hold what clients have shared of their images"
            )
        elif self.trains_alike and method.sent_part(task.again.fed.server.model) is not None:
            why = f"method.name={method.name}: clients train and send parts of the model"
        if why:
            raise RunFolderError(f"{run.path}: {why}; method={self.name} is not for it")


unlearning: Registry[Unlearning] = Registry("unlearning method", Unlearning)  # type: ignore[type-abstract]


@dataclass
class Cost:
    """What unlearning takes in a real system.

    Attributes:
        rounds: communication rounds.
        bytes_up, bytes_down: of all clients.
        stored: bytes of clients' updates that the server has to keep during the run.
        seconds: of these rounds here; not of playing the run again, which stands for what is
            stored.
    """

    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    stored: int = 0
    seconds: float = 0.0


@dataclass
class Forgetting:
    """A finished run that is to forget clients.

    Attributes:
        run: the run.
        clients: whom to forget.
        again: the run after its last round.
        actors: number of client actors on Ray; 0 for this process.
        further: number of rounds that are added to the run's.
        tell: called with lines about the progress.
        cost: of what was done so far.
    """

    run: Run
    clients: tuple[int, ...]
    again: Replay
    actors: int = 0
    further: int = 0
    tell: Callable[[str], None] = lambda _: None
    cost: Cost = field(default_factory=Cost)

    @property
    def weights(self) -> Vector:
        """(size,) w^T, the run's last global model."""
        weights: Vector = self.again.state.weights
        return weights

    @property
    def last(self) -> int:
        """T, the run's last round."""
        return self.run.last_round

    @property
    def first(self) -> int:
        """The first round in which one of the clients took part."""
        rows = arrived(self.run)
        return int(rows["round"][rows["client"].isin(self.clients)].min())

    @property
    def others_last(self) -> int:
        """The last round in which one of the others took part."""
        rows = arrived(self.run)
        found = rows["round"][~rows["client"].isin(self.clients)]
        if found.empty:
            raise RunFolderError(f"{self.run.path}: nobody but {self.named} took part")
        return int(found.max())

    @property
    def named(self) -> str:
        """Such as "client 3", or "clients 3, 7"."""
        plural = "s" * (len(self.clients) > 1)
        return f"client{plural} {in_short(list(map(str, self.clients)))}"

    def history(self, first: int) -> Iterator[tuple[int, Vector, dict[int, Vector]]]:
        """Each round t from `first` on as it was: t, w^t before it, and the others' w_k^t.

        A real server would have stored them.
        """
        again, rows = replay(self.run, first - 1), arrived(self.run)

        def on_round(t: int) -> None:
            self.tell(f"[{t}/{self.last}] rounds as they were")

        for before, trained in trained_models(again, on_round):
            there = {*rows["client"][rows["round"] == again.after]} - {*self.clients}
            others = {k: own for k, (own, _) in trained.items() if k in there}
            yield again.after, before, others

    def store(self, t: int) -> None:
        """Count all clients' updates of a round as stored."""
        self.cost.stored += int((arrived(self.run)["round"] == t).sum()) * self.weights.nbytes

    def recover(self, weights: Vector, rounds: int, after: int = 0) -> Vector:
        """w after rounds of the run's own method with the others alone, from these weights.

        The method starts anew, so that neither the server nor the clients keep anything else of
        those who are to be forgotten, such as momentum or control variates.

        Args:
            after: how many rounds after the run's last one they begin.
        """
        begin = self.last + after + 1
        return self.play(self.run.experiment.method, weights, range(begin, begin + rounds)).weights

    def play(
        self,
        functions: Method[Any] | Unlearning,
        start: State | Vector,
        rounds: Iterable[int],
        by_others: bool = True,
    ) -> State:
        """Rounds of a method, or of an unlearning method's own client functions, and their cost.

        Args:
            functions: whose `round` they are.
            start: the state before the first, or the weights for `Method.init` to start from.
            rounds: their numbers, on which random streams and learning rates depend.
            by_others: whether the others are there, or those who are to be forgotten.
        """
        again, spec = self.again, self.again.spec
        experiment = self.run.experiment.model_copy(update={"method": functions})
        absent, K = {*again.splits.absent}, len(again.splits)
        there = {*range(K)} - absent
        others = there - {*self.clients}
        absent |= {*self.clients} if by_others else others
        splits = again.splits.leaving_out(absent)
        length = max(spec.train.rounds, self.last + self.further)
        spec = replace(
            spec,
            functions=functions,
            train=spec.train.model_copy(update={"rounds": length}),
            conditions=tuple(c for c in spec.conditions if not isinstance(c, Explanations)),
            without=Without(clients=splits.absent) if splits.absent else None,
        )
        engine = self._engine(spec, splits)
        try:
            runner = RoundRunner(
                spec, again.dataset, splits, engine, device=engine.server_device()
            )
            runner.clients_per_step = clients_per_step(self.run.manifest, self.last)
            ledger = new_ledger()
            ledger["acted"] = [c.name for c in spec.conditions]  # the run has shown that they do
            runner.use_ledger(ledger)
            state = start if isinstance(start, State) else self._begin(runner, experiment, start)
            rounds = list(rounds)
            for i, t in enumerate(rounds):
                started = time.perf_counter()
                before, state = state, one_round(runner, experiment, state, t)
                if state is before and not by_others:
                    raise RunError(f"round {t}: {self.named} did not answer")
                row = on_record(runner, t, ledger)["rounds"][0]
                up, down = int(row["bytes_up"]), int(row["bytes_down"])
                self.cost.rounds += bool(up or down)
                self.cost.bytes_up += up
                self.cost.bytes_down += down
                self.cost.seconds += time.perf_counter() - started
                self.tell(f"[{i + 1}/{len(rounds)}] rounds of unlearning")
            return state
        finally:
            engine.close()

    def _begin(self, runner: RoundRunner, experiment: Any, weights: Vector) -> State:
        runner.initial_weights = weights.copy()
        return replace(initial_state(runner, experiment), weights=weights)

    def _engine(self, spec: RunSpec, splits: Any) -> Engine:
        settings, dataset = self.run.experiment.engine, self.again.dataset
        if settings.kind == "local":
            return LocalEngine(settings, spec, dataset, splits)
        import ray

        from fedsim.federation.ray_engine import RayEngine

        limit_threads(settings.cpus_per_actor)
        data = (ray.put(dataset), ray.put(splits))
        return RayEngine(settings, self.actors, len(splits), spec, *data)


def arrived(run: Run) -> pd.DataFrame:
    """The rows of `run.clients` whose clients answered, and whose answers were not lost."""
    rows = run.clients
    why_not = [name for name in ("dropped", "lost", "error") if name in rows]
    return rows[rows[why_not].isna().all(axis=1)]


def averaged(fed: Federation, sent: Mapping[int, Any]) -> Vector:
    """The mean of the models that clients sent, weighted by their numbers of examples."""
    return fed.server.average({k: message["weights"] for k, message in sent.items()})


def classifies(again: Replay) -> bool:
    """Whether a run's networks have a logit for each class, whatever they are trained by."""
    classes = again.dataset.classes
    return bool(classes) and again.spec.outputs == len(classes)
