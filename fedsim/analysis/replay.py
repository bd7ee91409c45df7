"""Replay a finished run: recompute the global model, or any client's, after any round.

again = replay(run, after=3)              # the server's state after round 3, and the clients
models, again = client_models(run, [2, 7], after=3)

client = ModelSnapshot.of(run, client=3, after=7)         # its model after round 7
inputs = Inputs.of_rows(client.dataset, [0, 1])
client.explain(IntegratedGradients(), inputs).save(folder)
print(client.explain(TreeExplainer()).text())             # a tree that mimics it
print(explain_run(run, SharedImagesExplainer()).text())   # of a run as a whole

Random numbers depend only on the seed, names and round numbers, so repeated rounds give the same
result to the bit. Each round is compared with the run's records.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.config.arguments import checked
from fedsim.data import ClientSplits, Dataset, load_dataset
from fedsim.errors import (
    Damaged,
    FedsimError,
    FedsimWarning,
    RunError,
    RunFolderError,
    in_own_code,
)
from fedsim.experiment import Experiment
from fedsim.explain import ExplainedData, ExplainedModel, Explainer, Explanation
from fedsim.explain.explainer import SharedItems, refuse_unfit
from fedsim.explain.explainers.rules import Sourced
from fedsim.explain.inputs import Inputs
from fedsim.explain.sanity import Sanity, check
from fedsim.federation import Client, Federation, LocalEngine, RoundRunner, RunSpec, pick_device
from fedsim.federation.federation import federation_of
from fedsim.federation.reduction import Vector
from fedsim.launch.prepare import dealt, prepare
from fedsim.launch.reference import kept
from fedsim.launch.run import same_data
from fedsim.methods import State
from fedsim.methods.shared.pool import ShowsShared
from fedsim.models import Arrays, RuleModel
from fedsim.results.folder import RunFolder
from fedsim.results.manifest import clients_per_step
from fedsim.results.records import is_of_result, new_ledger, result_hash
from fedsim.results.run import Run
from fedsim.results.tables import check_progress
from fedsim.results.verify import check_end
from fedsim.simulate import evaluate_round, initial_state, on_record, one_round
from fedsim.support.words import short
from fedsim.training import FlatModel

# A client's model: weights (size,) of the experiment's network, another network, or arrays.
ClientModel = Tensor | nn.Module | Arrays
OnRound = Callable[[int], None]
OnClientDone = Callable[[Client], None]
Trained = dict[int, tuple[Vector, int]]  # see `trained_models`
_NAMED = 5  # clients in a message
Whose = Literal["cohort", "personal"]  # the model that a client trained, or predicts with


@dataclass
class Replay:
    """The state of a run after a round: the server, the clients and the data.

    Attributes:
        run: the run.
        runner: its rounds, in this process, with the clients' kept state.
        state: the server's state.
        after: the round after which the run has this state.
        dataset, splits, spec: as the run was started with.
    """

    run: Run
    runner: RoundRunner
    state: State
    after: int
    dataset: Dataset
    splits: ClientSplits
    spec: RunSpec
    _engine: LocalEngine
    _ledger: dict[str, Any]

    @property
    def experiment(self) -> Experiment:
        """The run's experiment."""
        return self.run.experiment

    @property
    def fed(self) -> Federation:
        """The federation, as the run's method sees it."""
        return federation_of(self.runner)

    def next_round(self, on_client_done: OnClientDone = lambda client: None) -> None:
        """Repeat the next round; refuses one whose result differs from the run's records.

        Args:
            on_client_done: called with each client after each client function of the round.
        """
        t = self.after + 1
        insist_on_round(self.run, t)
        self._engine.on_client_done(on_client_done)
        self.runner.clients_per_step = clients_per_step(self.run.manifest, t)
        self.state = one_round(self.runner, self.experiment, self.state, t)
        self._engine.on_client_done(lambda client: None)
        self.after = t
        evaluate_round(self.runner, self.experiment, self.state, t)
        for table, rows in on_record(self.runner, t, self._ledger).items():
            stored = getattr(self.run, table)
            known = [] if stored.empty else stored[stored["round"] == t].to_dict("records")
            if len(rows) != len(known):
                self._otherwise(
                    f"{table}.parquet has {len(known)} rows of it, and here {len(rows)}"
                )
            for row, before in zip(rows, known, strict=True):
                for name in {**row, **before}:  # either may lack columns of the other
                    value, was = row.get(name), before.get(name)
                    if is_of_result(name) and not _same(value, was):
                        self._otherwise(f"{name} in {table}.parquet is {value!r}, and was {was!r}")
        if t == self.run.last_round:
            found = result_hash(self._ledger["chain"], self.state)
            if found != self.run.result_hash:
                self._otherwise(f"the result hash is {found}, and was {self.run.result_hash}")

    def _otherwise(self, what: str) -> NoReturn:
        why = (
            "the run was computed on another kind of device or with other versions (see its "
            "manifest.json), so it cannot be recomputed"
        )
        begun = self.run.manifest.get("continues")
        if begun is not None and self.after <= begun["round"]:
            why = (
                f"its first {begun['round']} rounds are those of {begun['folder']}, perhaps with "
                "other learning rates, evaluations or devices; recompute them from that run"
            )
        raise RunFolderError(
            f"{self.run.path}: round {self.after} has a different result here: {what}; {why}"
        )

    def global_model(self) -> ClientModel | None:
        """The global model after this round; None if the method has none."""
        method = self.experiment.method
        if not method.has_global_model:
            return None
        if self.experiment.model.builds_network:
            return self.fed.server.tensor(self.state.weights)
        # There is none before any rules are learnt.
        return dict(method.global_model(self.fed, self.state)) or None

    def own_models(self, clients: Collection[int]) -> dict[int, ClientModel]:
        """Clients' personal models after this round, of those that have one.

        They are made for all clients, as for their tests, so that they are equal to the bit.
        """
        method = self.experiment.method
        if not method.keeps_models:
            return {}
        found, look = noted(clients)
        self._engine.on_client_done(look)
        given = method.for_own_models(self.fed, self.state)
        self.fed.each(method._keep, range(self.fed.num_clients), **given)
        self._engine.on_client_done(lambda client: None)
        return found


def _same(value: Any, known: Any) -> bool:
    """Whether a value equals that of a table, in which an empty cell is NaN or None."""
    if isinstance(value, np.ndarray):
        return np.array_equal(value, known, equal_nan=True)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return known is None or (isinstance(known, float) and math.isnan(known))
    return bool(value == known)


def insist_on_round(run: Run, t: int) -> None:
    if not 1 <= t <= run.last_round:
        raise RunFolderError(f"{run.path}: there is no round {t}; it has {run.last_round}")


def insist_on_client(run: Run, client: int) -> None:
    K, names = run.manifest["clients"], run.manifest.get("client_names", ())
    if not 0 <= client < K:
        more = ", …" if len(names) > _NAMED else ""
        told = f"; by name: {', '.join(names[:_NAMED])}{more}" if names else ""
        raise RunFolderError(f"there is no client {client}; there are {K}, counted from 0{told}")
    without = run.experiment.without
    if without is not None and client in without.clients:
        raise RunFolderError(f"{run.path}: client {client} is left out (`without`)")


def insist_on_personal(run: Run) -> None:
    method = run.experiment.method
    if not method.keeps_models:
        raise RunFolderError(
            f"{run.path}: clients of method.name={method.name} have no personal models; "
            "what they trained is of=cohort"
        )


def noted(clients: Collection[int]) -> tuple[dict[int, ClientModel], OnClientDone]:
    """The models that client functions leave as `trained`, and what notes them down."""
    found: dict[int, ClientModel] = {}

    def look(at: Client) -> None:
        if at.id in clients and at.trained is not None:
            own = at.trained
            found[at.id] = dict(own) if isinstance(own, Mapping) else copy.deepcopy(own)

    return found, look


def noting(trained: Trained) -> OnClientDone:
    """What notes down the weights of clients that trained a network, and their examples."""

    def look(at: Client) -> None:
        if isinstance(at.trained, Tensor):
            trained[at.id] = at.trained.cpu().numpy().copy(), at.num_samples

    return look


def trained_models(again: Replay, on_round: OnRound) -> Iterator[tuple[Vector, Trained]]:
    """The rounds of a run from there to its last, one after another.

    Yields:
        (size,) the server's weights before the round, and of each client that trained a network
        the weights (size,) that it trained, and n_k, its number of labelled training examples.
    """
    while again.after < again.run.last_round:
        on_round(again.after + 1)
        before, trained = again.state.weights, Trained()
        again.next_round(noting(trained))
        yield before, dict(sorted(trained.items()))


@checked
def replay(
    run: Run | str | Path,
    after: int | None = None,
    on_round: OnRound = lambda t: None,
    dataset: Dataset | None = None,
    again: Replay | None = None,
) -> Replay:
    """Restore a finished run after any round: its clients, in this process, and its server state.

    Any client function can be called again: its random numbers depend on the round, which is
    `after` until `Replay.runner.begin` sets another. From now on this process uses as many
    threads as the run did.

    Args:
        run: the run, or its folder.
        after: a round, 0 for the start; by default the last one. Rounds are repeated from the
            latest checkpoint before it, or from the start, and compared with the run's records.
        on_round: called before each of these rounds.
        dataset: the data of the experiment, if already loaded.
        again: the run after an earlier round, which goes on from there and is returned, unless
            there is a later checkpoint.

    Raises:
        BadInput: the run is not finished, its data has changed, there is no such round, or its
            result differs here.
    """
    run = Run.of(run)
    run.result_hash  # noqa: B018  # raises if it is not finished
    experiment = run.experiment
    last = run.last_round
    after = last if after is None else after
    if after:
        insist_on_round(run, after)
    folder = RunFolder.open(run.path)
    if again is not None and again.after <= after:
        later = [t for t in folder.checkpoints().rounds() if again.after < t <= after]
        if not later:
            return _forward(again, after, on_round)
    dataset, splits, spec = prepare(experiment, dataset, begun=True)
    spec = kept(folder, spec)
    same_data(folder, dataset, splits)
    engine = LocalEngine(experiment.engine, spec, dataset, splits)
    device = pick_device(experiment.engine)
    V = clients_per_step(run.manifest, 1)
    runner = RoundRunner(spec, dataset, splits, engine, V, device)
    initial = initial_state(runner, experiment)
    checkpoints, until, wrong = folder.checkpoints(), after, []
    try:
        check_end(folder)
    except Damaged as damage:
        until, wrong = min(after, last - 1), [str(damage)]
    found = checkpoints.latest(initial, runner, until, check=partial(check_progress, run.path))
    for line in [*wrong, *checkpoints.skipped]:
        warnings.warn(f"{line}; recomputing rounds", FedsimWarning, stacklevel=2)
    begin, state, ledger = 0, initial, new_ledger()
    if found is not None:
        begin, state, ledger = found.round, found.state, found.progress["ledger"]
    runner.use_ledger(ledger)
    again = Replay(run, runner, state, begin, dataset, splits, spec, engine, ledger)
    return _forward(again, after, on_round)


def _forward(again: Replay, after: int, on_round: OnRound) -> Replay:
    while again.after < after:
        on_round(again.after + 1)
        again.next_round()
    again.runner.begin(again.after)  # checkpoints do not set the round
    return again


@checked
def client_models(
    run: Run | str | Path,
    clients: Collection[int],
    after: int | None = None,
    on_round: OnRound = lambda t: None,
    dataset: Dataset | None = None,
    of: Whose | None = None,
    again: Replay | None = None,
) -> tuple[dict[int, ClientModel], Replay]:
    """Clients' models after a round, and the run after that round.

    Args:
        run, on_round, dataset, again: as for `replay`.
        after: a round, for `cohort` one in which all of these clients were trained; by default the
            last such round.
        of: `cohort`, what a client trained in that round and sent, before aggregation; or
            `personal`, what it predicts with afterwards, of methods with personal models, for
            which this is the default.

    Raises:
        BadInput: as for `replay`; there is no such client; it was not trained in that round; or
            the method has no personal models.
    """
    run = Run.of(run)
    for k in clients:
        insist_on_client(run, k)
    if after is not None:
        insist_on_round(run, after)
    if (of or whose_models(run)) == "personal":
        insist_on_personal(run)
        again = replay(run, after, on_round, dataset, again)
        models = again.own_models(clients)
    else:
        after = common_round(run, clients, after)
        again = replay(run, after - 1, on_round, dataset, again)
        models, look = noted(clients)
        on_round(after)
        again.next_round(look)
    for k in clients:
        if k not in models:
            raise RunFolderError(f"client {k} has no own model after round {again.after}")
    return models, again


def whose_models(run: Run) -> Whose:
    """Which models of clients are meant unless it is said: see `client_models`."""
    return "personal" if run.experiment.method.keeps_models else "cohort"


def trained_rounds(run: Run, clients: Collection[int]) -> dict[int, list[int]]:
    """The rounds in which each of some clients was trained."""
    if run.clients.empty:
        return {k: [] for k in clients}
    columns = [name for name in ("steps", "rules") if name in run.clients]
    trained = run.clients[run.clients[columns].notna().any(axis=1)]
    return {k: sorted(trained["round"][trained["client"] == k].astype(int)) for k in clients}


def common_round(run: Run, clients: Collection[int], after: int | None) -> int:
    """The round after which models are wanted, or the last in which all clients were trained."""
    learnt = trained_rounds(run, clients)
    if after is None:
        common = set.intersection(*map(set, learnt.values()))
        if not common and all(learnt.values()):
            raise RunFolderError(
                "there is no round in which all of these clients were trained: "
                + ", ".join(map(str, clients))
            )
        after = max(common, default=None)
    for k, rounds in learnt.items():
        if after not in rounds:
            some = ", ".join(map(str, rounds[:10])) + (", …" if len(rounds) > 10 else "")
            where = f" in round {after}; it did in {some}" if rounds else " in any round"
            raise RunFolderError(f"client {k} was not trained{where}")
    assert after is not None
    return after


@dataclass(frozen=True)
class ModelSnapshot:
    """A model to explain: the global model, or a client's.

    Attributes:
        own: the model.
        again: the run at that time.
        client: whose model it is; None for the global model.
        kind: which of the client's models, see `client_models`; `global` for the global one.
    """

    own: ClientModel
    again: Replay
    client: int | None
    kind: Whose | Literal["global"] = "global"

    @classmethod
    def of(
        cls,
        run: Run | str | Path,
        client: int | None = None,
        after: int | None = None,
        on_round: OnRound = lambda t: None,
        dataset: Dataset | None = None,
        of: Whose | None = None,
        again: Replay | None = None,
    ) -> ModelSnapshot:
        """Take a model of a finished run after a round; see `client_models` and `replay`.

        Raises:
            BadInput: as for these; or there is no global model.
        """
        if of is not None and client is None:
            raise RunFolderError(f"of={of} is about models of clients; name a client")
        run = Run.of(run)
        if client is not None:
            return cls.of_clients(run, [client], after, on_round, dataset, of, again)[0]
        again = replay(run, after, on_round, dataset, again)
        own = again.global_model()
        if own is None:
            raise RunFolderError(
                f"{run.path}: method.name={run.experiment.method.name} has no global model after "
                f"round {again.after}; clients may have their own (--client)"
            )
        return cls(own, again, None)

    @classmethod
    def of_clients(
        cls,
        run: Run | str | Path,
        clients: Collection[int],
        after: int | None = None,
        on_round: OnRound = lambda t: None,
        dataset: Dataset | None = None,
        of: Whose | None = None,
        again: Replay | None = None,
    ) -> list[ModelSnapshot]:
        """Take the models of several clients after a round; see `client_models`.

        In continual learning, the model for the task of that round, limited to its classes.
        """
        models, again = client_models(run, clients, after, on_round, dataset, of, again)
        return [cls(models[k], again, k, of or whose_models(again.run)) for k in clients]

    @property
    def dataset(self) -> Dataset:
        """The data that the run was started with."""
        return self.again.dataset

    @property
    def _task(self) -> tuple[int, tuple[int, ...]] | None:
        splits = self.again.splits.at(self.again.after, self.again.experiment.train.rounds)
        if splits.labels is None or self.client is None:
            return None
        return splits.task, splits.labels[self.client]

    @property
    def labels(self) -> tuple[int, ...] | None:
        """In continual learning, the classes that the client's model can predict; None for all."""
        return self._task[1] if self._task else None

    @property
    def title(self) -> str:
        """Such as "client 3's personal model after round 7"; without "personal", as trained."""
        whose = "the global"
        if self.client is not None:
            names = self.again.splits.names
            name = f" ({names[self.client]})" if names else ""
            whose = f"client {self.client}{name}'s"
        kind = "personal " if self.kind == "personal" else ""
        title = f"{whose} {kind}model after round {self.again.after}"
        if self._task is None:
            return title
        task, labels = self._task
        classes = ", ".join(self.dataset.classes[c] for c in labels)
        return f"{title}, for its task {task} ({classes})"

    @property
    def suffix(self) -> str:
        """A suffix of file names with the client and the round, and which model it is if asked."""
        whose = "" if self.client is None else f"-client-{self.client}"
        if self.client is not None and self.kind != whose_models(self.again.run):
            whose += f"-{self.kind}"
        return f"{whose}-round-{self.again.after}"

    def explain(self, explainer: Explainer, inputs: Inputs | None = None) -> Explanation:
        """Explain the model.

        Args:
            inputs: inputs whose predictions are explained; by default some of the central test
                set, if the explainer takes inputs.

        Raises:
            BadInput: the explainer does not apply.
            RunError: it raises another exception.
        """
        if inputs is None:
            inputs = usual_inputs(explainer, self.dataset)
        return _explained(explainer, self.explained(), self.data(), inputs)

    def check(self, explainer: Explainer, inputs: Inputs | None = None) -> Sanity:
        """Check whether the explainer's maps depend on the model's weights.

        Args:
            inputs: as of `explain`.

        Raises:
            BadInput: the explainer gives no maps, or does not apply; the model is no network.
            RunError: it raises another exception.
        """
        inputs = usual_inputs(explainer, self.dataset, True) if inputs is None else inputs
        with as_errors(explainer):
            return check(explainer, self.explained(), self.data(), inputs)

    def explained(self) -> ExplainedModel:
        """The model as explainers take it."""
        again, own = self.again, self.own
        experiment, state = again.experiment, again.state
        last = again.after == again.run.last_round
        sources = record = None  # a client's rules come from itself
        beside = {}
        if self.client is None:
            record = again.run.path / "explanations.parquet" if last else None
            sources = state.sources if isinstance(state, Sourced) else None
        elif isinstance(own, Tensor) and experiment.method.global_model(again.fed, state):
            weights = again.fed.server.tensor(state.weights)
            beside["global model"] = self._flat(weights).module.eval()
        return ExplainedModel(
            section=again.spec.model,
            title=self.title,
            round=again.after,
            seed=experiment.seed,
            client=self.client,
            suffix=self.suffix,
            network=None if isinstance(own, Mapping) else self.network(),
            arrays=dict(own) if isinstance(own, Mapping) else None,
            sources=sources,
            beside=beside,
            scores=self.scores,
            record=record,
        )

    def data(self) -> ExplainedData:
        """The data as explainers take them; a client's model comes with its own examples."""
        own, splits = None, self.again.splits
        if self.client is not None:
            held = splits.held(self.again.after)
            rows = [held.train[self.client], held.unlabelled[self.client]]
            own = self.dataset.x[np.concatenate(rows)]
        prepare = partial(_prepared, self.again.fed)
        return ExplainedData(self.dataset, prepare, own, clients=splits.names, splits=splits)

    def scores(self) -> dict[str, float]:
        """Its scores on the central test set, see `Federation.evaluate`.

        Empty for rules and for a method's own networks, which their methods score.
        """
        if isinstance(self.own, nn.Module) or isinstance(self.again.spec.model, RuleModel):
            return {}
        self.again.runner.begin(self.again.after)  # for the same random numbers
        own = self.own.cpu().numpy() if isinstance(self.own, Tensor) else self.own
        return self.again.fed.evaluate(own)

    def network(self) -> nn.Module:
        """The model's network, in evaluation mode; refuses a model that is none."""
        if isinstance(self.own, Mapping):
            section = self.again.spec.model
            raise RunFolderError(
                f"{self.again.run.path}: model.name={section.name} is a {section.kind}, not a "
                "network"
            )
        if isinstance(self.own, nn.Module):
            return self.own.eval()
        return self._flat(self.own, self.labels).module.eval()

    def _flat(self, weights: Tensor, labels: tuple[int, ...] | None = None) -> FlatModel:
        model = FlatModel(self.again.spec.build_model(), self.again.runner.context.device)
        model.restrict_classes(labels)
        model.load(weights)
        return model


def explain_run(run: Run, explainer: Explainer, clients: Sequence[int] = ()) -> Explanation:
    """Explain a finished run as a whole."""
    experiment, loaded = run.experiment, load_dataset(run.experiment.data)
    dataset = dealt(experiment, loaded)[0]
    method = experiment.method
    whom = sorted(set(clients or run.client_ids[:4]))
    for k in whom:
        insist_on_client(run, k)

    @cache  # slow, and needed by few explainers
    def again() -> Replay:
        return replay(run, dataset=loaded)

    def shared(method: ShowsShared) -> SharedItems:
        return method.shared_items(again().fed, again().state, whom)

    model = ExplainedModel(
        section=experiment.model,
        title=short(run.path),
        round=run.last_round,
        seed=experiment.seed,
        suffix=f"-client{'s' * (len(whom) > 1)}-{'-'.join(map(str, whom))}" if clients else "",
        record=run.path / "explanations.parquet",
    )
    data = ExplainedData(
        dataset,
        lambda x: _prepared(again().fed, x),
        tables={"tasks": run.tasks, "explanations": run.own_explanations},
        shared=partial(shared, method) if isinstance(method, ShowsShared) else None,
        clients=run.manifest.get("client_names", ()),
    )
    return _explained(explainer, model, data, Inputs.of_rows(dataset, []))


def _explained(
    explainer: Explainer, model: ExplainedModel, data: ExplainedData, inputs: Inputs
) -> Explanation:
    refuse_unfit(explainer, model, data)
    with as_errors(explainer):
        return explainer.explain(model, data, inputs, explainer.rng(model.seed, model.client))


@contextmanager
def as_errors(explainer: Explainer) -> Iterator[None]:
    try:
        yield
    except FedsimError:
        raise
    except Exception as error:  # a user's explainer may raise anything
        raise RunError(f"explainer {explainer.label}: {in_own_code(error)}") from error


def usual_inputs(explainer: Explainer, dataset: Dataset, always: bool = False) -> Inputs:
    n = explainer.usual_inputs if explainer.takes_inputs or always else 0
    rows = np.unique(np.linspace(0, len(dataset.test_y) - 1, n).astype(int)).tolist()
    told = (
        f"no row was chosen: explaining rows {', '.join(map(str, rows))} of the test set, which "
        "are evenly spread"
    )
    return replace(Inputs.of_rows(dataset, rows), suffix="", notes=(told,) if rows else ())


def _prepared(fed: Federation, x: NDArray[Any]) -> Tensor:
    return fed.server.prepare(x, np.zeros(len(x), np.int64)).x
