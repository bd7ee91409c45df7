"""A finished run's models, re-made: the global one, or any client's, after any round.

again = reopen(run, after=3)              # the server's state after round 3, and the clients
models, again = client_models(run, [2, 7], after=3)

What a run draws at random depends on names and round numbers alone, so rounds that are carried
out once more come to the same bits. Each is compared with what the run has put on record.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedsim.data import Dataset, Holdings
from fedsim.errors import RunFolderError
from fedsim.experiment import Experiment
from fedsim.federation import Client, Federation, LocalEngine, Setup, pick_device
from fedsim.federation.checkpoint import Checkpoints
from fedsim.launch import same_data
from fedsim.methods import State
from fedsim.models import Rules
from fedsim.results.folder import RunFolder
from fedsim.results.run import Run
from fedsim.simulate import new_ledger, one_round, prepare, summarise
from fedsim.streams import torch_stream

# Of a client: weights (size,) of the experiment's network, another network, or rules.
Own = Tensor | nn.Module | Rules
OnRound = Callable[[int], None]
VARYING = {"seconds", "epsilon"}  # columns of rounds.parquet that are not compared


@dataclass
class Reopened:
    """A run, to look into.

    Attributes:
        run: it.
        fed: its clients, in this process, with what they have kept.
        state: the server's.
        after: the round after which all this is as it is.
        dataset, holdings, setup: as the run was started with.
    """

    run: Run
    fed: Federation
    state: State
    after: int
    dataset: Dataset
    holdings: Holdings
    setup: Setup
    engine: LocalEngine
    ledger: dict[str, Any]

    @property
    def experiment(self) -> Experiment:
        return self.run.experiment

    def go_on(self) -> None:
        """Carry out the next round once more.

        Raises:
            RunFolderError: it comes to something else than it did.
        """
        t = self.after + 1
        self.state = one_round(self.fed, self.experiment, self.state, t)
        self.after = t
        record, rows = self.fed.records()
        found = summarise(t, record, rows["clients"], self.ledger)
        stored = self.run.rounds[self.run.rounds["round"] == t].to_dict("records")[0]
        for name, value in found.items():
            known = stored.get(name)
            if name not in VARYING and value != known and not (_nan(value) and _nan(known)):
                raise RunFolderError(
                    f"{self.run.path}: round {t} comes out otherwise here: {name} is {value!r}, "
                    f"and was {known!r}; the run was computed by another kind of device, or by "
                    "other versions (see its manifest.json), so nothing can be re-made"
                )

    def own_model(self, client: int) -> Own | None:
        """What a client's kept state has of a model of its own."""
        kept = self.fed.states().get(client)
        state = {} if kept is None else self.fed.fetch(kept)
        return _kept(self.experiment, self.engine.client(client, self.after, state))


def _nan(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _kept(experiment: Experiment, client: Client) -> Own | None:
    """A copy of the client's model, which no later client changes."""
    own = experiment.method.own_model(client)
    if isinstance(own, Mapping):
        return dict(own)
    return None if own is None else copy.deepcopy(own)


def reopen(run: Run, after: int | None = None, on_round: OnRound = lambda t: None) -> Reopened:
    """The clients of a finished run, in this process, and the server's state.

    Any client function can be called once more: what it draws depends on the round, which
    `begin_round` sets. From here on this process computes with as many threads as the run did.

    Args:
        after: a round, 0 for none; by default the last one. From the latest checkpoint before it,
            or from the start, rounds are carried out once more, and compared with the record.
        on_round: called before each of these.

    Raises:
        BadInput: the run is not finished, its data is not what it was, there is no such round, or
            it comes out otherwise here.
    """
    run.result_hash  # noqa: B018  # raises if it is not finished
    experiment = run.experiment
    last = experiment.train.rounds
    after = last if after is None else after
    if not 0 <= after <= last:
        raise RunFolderError(f"{run.path}: there is no round {after}; it has {last}")
    dataset, holdings, setup = prepare(experiment)
    same_data(RunFolder.open(run.path), dataset, holdings)
    engine = LocalEngine(experiment.engine, setup, dataset, holdings)
    device = pick_device(experiment.engine)
    V = run.manifest["clients_per_step"]
    fed = Federation(setup, dataset, holdings, engine, V, device)
    with torch_stream(setup.seed, "server", 0, device=device):
        initial = experiment.method.init(fed)
    found = Checkpoints(run.path / "weights").latest(initial, fed, after)
    if found is None and after == last:
        raise RunFolderError(f"{run.path}: its last checkpoint is missing")
    begin, state, ledger = found or (0, initial, new_ledger())
    again = Reopened(run, fed, state, begin, dataset, holdings, setup, engine, ledger)
    while again.after < after:
        on_round(again.after + 1)
        again.go_on()
    return again


def client_models(
    run: Run,
    clients: Collection[int],
    after: int | None = None,
    on_round: OnRound = lambda t: None,
) -> tuple[dict[int, Own], Reopened]:
    """Clients' own models as they were after a round, and the run after that round.

    Each is the one that the client trained in that round, as it was before anything was averaged;
    of methods with personal models, the one that it kept.

    Args:
        after: a round in which all of these clients have learnt, or any for personal models; by
            default the last such.

    Raises:
        BadInput: as `reopen`; there is no such client; or one did not learn in that round.
    """
    K = run.manifest["clients"]
    for k in clients:
        if not 0 <= k < K:
            raise RunFolderError(f"there is no client {k}; there are {K}, counted from 0")
    again = reopen(run)
    personal = {k: own for k in clients if (own := again.own_model(k)) is not None}
    if len(personal) == len(clients) and after in (None, again.after):
        return personal, again
    learnt = {k: _rounds_of(run, k) for k in clients}
    if after is None:
        common = set.intersection(*(set(rounds) for rounds in learnt.values()))
        after = max(common, default=None)
    for k in clients:
        if after is None or (k not in personal and after not in learnt[k]):
            others = ", ".join(map(str, learnt[k][:10])) + (", …" if len(learnt[k]) > 10 else "")
            raise RunFolderError(
                f"client {k} learnt nothing of its own"
                + ("" if after is None else f" in round {after}")
                + (f"; it did in {others}" if learnt[k] else " in any round" * (after is None))
            )
    assert after is not None
    again = reopen(run, after - 1, on_round)
    trained: dict[int, Own] = {}

    def look(at: Client) -> None:
        if at.id in clients and (own := _kept(run.experiment, at)) is not None:
            trained[at.id] = own

    again.engine.watch(look)
    on_round(after)
    again.go_on()
    for k in clients:
        own = again.own_model(k)
        if own is not None:
            trained[k] = own
        if k not in trained:
            raise RunFolderError(f"client {k} has no model of its own after round {after}")
    return trained, again


@dataclass(frozen=True)
class Subject:
    """A model that is to be explained: the global one, or a client's.

    Attributes:
        title: «client 3's model after round 7».
        own: it.
        again: the run at that time.
        client: whose; None for the global model.
    """

    title: str
    own: Own
    again: Reopened
    client: int | None

    @classmethod
    def of(
        cls,
        run: Run,
        client: int | None = None,
        after: int | None = None,
        on_round: OnRound = lambda t: None,
    ) -> Subject:
        """Of a finished run, after a round; see `client_models` and `reopen`.

        Raises:
            BadInput: as these do; or there is no global model.
        """
        if client is not None:
            models, again = client_models(run, [client], after, on_round)
            title = f"client {client}'s model after round {again.after}"
            return cls(title, models[client], again, client)
        again = reopen(run, after, on_round)
        method = run.experiment.method
        arrays = method.global_model(again.fed, again.state)
        if not arrays or (not method.of_rules and method.continual):
            raise RunFolderError(
                f"{run.path}: method.name={method.name} leaves no global model; each client has "
                "its own (--client)"
            )
        own = dict(arrays) if method.of_rules else again.fed.tensor(again.state.weights)
        return cls(f"the global model after round {again.after}", own, again, None)

    @property
    def dataset(self) -> Dataset:
        return self.again.dataset

    @property
    def suffix(self) -> str:
        """For names of files: whose model, and of which round, if not the last."""
        whose = "" if self.client is None else f"-{self.client}"
        last = self.again.after == self.again.experiment.train.rounds
        return whose if last else f"{whose}-round-{self.again.after}"

    def network(self) -> nn.Module:
        """In evaluation.

        Raises:
            BadInput: the model is rules.
        """
        if isinstance(self.own, Mapping):
            raise RunFolderError(f"{self.again.run.path}: its models are rules, not networks")
        if isinstance(self.own, nn.Module):
            return self.own.eval()
        model = self.again.fed.model
        model.load(self.own)
        return model.module.eval()

    def rules(self) -> Rules:
        """Its rules.

        Raises:
            BadInput: the model is a network.
        """
        if not isinstance(self.own, Mapping):
            raise RunFolderError(
                f"{self.again.run.path}: model.name={self.again.experiment.model.name} is a "
                "network, and has no rules"
            )
        return self.own


def _rounds_of(run: Run, client: int) -> list[int]:
    """The rounds in which a client has learnt."""
    if run.clients.empty:
        return []
    own = run.clients[run.clients["client"] == client]
    columns = [name for name in ("steps", "rules") if name in own]
    return sorted(own.loc[own[columns].notna().any(axis=1), "round"].astype(int).tolist())
