"""One small run of each method, with all that happens in it: many tests ask the same run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from experiments import (
    NETWORK_METHODS,
    TREE_METHODS,
    WITHOUT_GLOBAL,
    WRITTEN,
    small_experiment,
    with_method,
)
from fedsim import Run, run, simulate
from fedsim.analysis.replay import ClientModel
from fedsim.experiment import Experiment
from fedsim.federation import Client, Federation, NotCounted, PerClient, RoundRunner
from fedsim.federation.reduction import Mean, WeightedMean
from fedsim.federation.worker import Worker
from fedsim.methods import State
from fedsim.simulate import evaluate_round, one_round

# Methods by name, and FedBABU once more, with fine-tuned models of clients.
TRAINED = [*NETWORK_METHODS, *TREE_METHODS, "fedbabu tuned"]
FINE_TUNED = {"name": "fedbabu", "fine_tune": "all", "fine_tune_epochs": 1}

# Whose clients predict with models of their own.
PERSONAL = [
    *("apfl", "ditto", "fedavg_ft", "fedbabu tuned", "fedbn", "fedper", "fedrep", "fedsa_lora"),
    "hetlora",
    "ifca",
    *("lg_fedavg", "local", "perfedavg", "pfedme", "xpfl"),
]
# Whose clients train no models.
UNTRAINED = ("centralised", "hist_trees")
ROUNDS = 5  # as many as the phases of FedFed and FedXDS take


@dataclass
class Trained:
    """What became of a method.

    Attributes:
        run: the finished run.
        states: the server's after each round.
        seen: what each client trained in each round, by client and round.
        mechanisms: of the engine, by what they are called in the code.
        asked: what the server asked of clients, as `Learns.asks` names it.
        averages: whether the server made means of updates.
    """

    run: Run = field(init=False)
    states: dict[int, State] = field(default_factory=dict)
    seen: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    mechanisms: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    averages: bool = False


def settings(name: str) -> dict[str, Any]:
    """The sections of a method's run."""
    method, _, tuned = name.partition(" ")
    by = "random" if method in TREE_METHODS else "gradient"
    explain: dict[str, Any] = {"explainers": [by], "inputs": 2, "every": 2, "maps": True}
    if name in PERSONAL:
        explain |= {"of": ["cohort", "personal"], "target": "decision"}
    elif method in UNTRAINED:
        explain |= {"of": ["global"]}
    elif method in WITHOUT_GLOBAL:
        explain |= {"of": ["cohort"], "inputs_from": "own"}
    else:
        explain |= {"target": "label", "share": {"noise": 0.5, "poisoned": 0.3}}
    return with_method(
        method,
        partition={"clients": 6, "test_fraction": 0.3, "min_samples": 4},
        train={"rounds": ROUNDS, "participation": 0.5},
        engine={"clients_per_step": 2},
        evaluate={"clients": True},
        checkpoint={"every": 3},
        explain=explain,
        method=FINE_TUNED if tuned else {},
    )


@cache
def trained(name: str) -> Trained:
    """The run of a method, made once in a process."""
    found = Trained()
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, found)
        folder = Path(tempfile.mkdtemp(dir=WRITTEN))
        found.run = run(small_experiment(**settings(name)), folder, progress=False)
    return found


def watch(patch: pytest.MonkeyPatch, found: Trained) -> None:
    """From now on note down what runs do."""
    run_client, reduce, check = Worker._run_client, RoundRunner.reduce, RoundRunner.check_asked

    def note_client(worker: Worker, id: int, call: Any, *rest: Any) -> None:
        with _made_clients() as made:
            run_client(worker, id, call, *rest)
        own = made[-1].trained
        if own is not None:
            arrays = arrays_of(own)
            found.seen[id, call.round] = {k: np.array(v, copy=True) for k, v in arrays.items()}

    def note_reduction(
        runner: RoundRunner, function: Any, cohort: Any, by: Any, given: Mapping[str, Any]
    ) -> Any:
        found.mechanisms.add(f"by {type(by).__name__}")
        wrapped = {type(value) for value in given.values()} & {PerClient, NotCounted}
        found.mechanisms.update(kind.__name__ for kind in wrapped)
        found.averages |= isinstance(by, WeightedMean)
        together = reduce(runner, function, cohort, by, given)
        if isinstance(together, Mean) and together.messages:
            found.asked.add("messages")
        return together

    def note_asked(runner: RoundRunner, asked: Any, what: str) -> None:
        if not runner.t or runner.round.running:
            found.asked.add(asked)
        check(runner, asked, what)

    def note_state(runner: RoundRunner, experiment: Experiment, state: State, t: int) -> State:
        found.states[t] = one_round(runner, experiment, state, t)
        return found.states[t]

    def without_tests(*arguments: Any) -> None:  # in which clients may train further
        with pytest.MonkeyPatch.context() as untouched:
            untouched.setattr(Worker, "_run_client", run_client)
            untouched.setattr(RoundRunner, "reduce", reduce)
            evaluate_round(*arguments)

    for kind in (Client, Federation):
        patch.setattr(kind, "__getattribute__", _noting(kind, found.mechanisms))
    patch.setattr(Worker, "_run_client", note_client)
    patch.setattr(RoundRunner, "reduce", note_reduction)
    patch.setattr(RoundRunner, "check_asked", note_asked)
    patch.setattr(simulate, "one_round", note_state)
    patch.setattr(simulate, "evaluate_round", without_tests)


def _noting(kind: type, mechanisms: set[str]) -> Any:
    """Access to attributes that notes which of them methods use."""
    get = kind.__getattribute__

    def noting(self: Any, name: str) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("fedsim.methods.") and not name.startswith("_"):
            mechanisms.add(f"{kind.__name__}.{name}")
        return get(self, name)

    return noting


@contextmanager
def _made_clients() -> Iterator[list[Client]]:
    made: list[Client] = []
    make = Client.__init__

    def note(client: Client, *arguments: Any) -> None:
        make(client, *arguments)
        made.append(client)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "__init__", note)
        yield made


def arrays_of(own: ClientModel) -> dict[str, Any]:
    """The arrays of a client's model, by name."""
    if isinstance(own, Tensor):
        return {"weights": own.cpu().numpy()}
    if isinstance(own, nn.Module):
        return {name: tensor.cpu().numpy() for name, tensor in own.state_dict().items()}
    return dict(own)


def vector(own: ClientModel) -> Tensor:
    assert isinstance(own, Tensor)
    return own


def assert_same(one: ClientModel, other: ClientModel) -> None:
    a, b = arrays_of(one), arrays_of(other)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def assert_same_state(one: State, other: State) -> None:
    for f in fields(one):
        a, b = getattr(one, f.name), getattr(other, f.name)
        assert str(a) == str(b)
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b)
