"""Names of client functions' random streams."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import replace

import pytest
from torch import Tensor

from experiments import Finish
from fedsim.federation import Client, Federation, Update, client_function
from fedsim.methods import State, methods
from fedsim.methods.fedavg import FedAvg


class Renamed(FedAvg):
    """FedAvg, whose client function has another name but the same streams."""

    name: str = "test_client_functions:Renamed"

    def round(self, fed: Federation, state: State, t: int) -> State:
        mean = fed.mean(self.train_locally, fed.sample(t), weights=state.weights)
        return replace(state, weights=mean.weights)

    @client_function("local_update")
    def train_locally(self, client: Client, weights: Tensor) -> Update:
        return FedAvg.local_update(self, client, weights)


class WithoutName(Renamed):
    """The same, with the streams of the new name."""

    name: str = "test_client_functions:WithoutName"

    def train_locally(self, client: Client, weights: Tensor) -> Update:
        return FedAvg.local_update(self, client, weights)


def test_renaming_a_client_function_keeps_its_streams_if_they_are_named(finish: Finish) -> None:
    def weights_hash(name: str) -> str:
        return finish(train={"rounds": 2}, method={"name": name}).result_hash

    fedavg = weights_hash("fedavg")
    assert weights_hash("test_client_functions:Renamed") == fedavg
    assert weights_hash("test_client_functions:WithoutName") != fedavg


@pytest.mark.parametrize("name", [name for name, _ in methods.items()])
def test_client_functions_of_the_package_name_their_streams(name: str) -> None:
    method = dict(methods.items())[name]
    sources = (
        inspect.getsource(member)
        for _, member in inspect.getmembers(method, inspect.isfunction)
        if member.__module__.startswith("fedsim.")
    )
    called = {
        call.args[0].attr
        for source in sources
        for call in ast.walk(ast.parse(textwrap.dedent(source)))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("mean", "gather", "each", "reduce")
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "fed"
        and isinstance(call.args[0], ast.Attribute)
    }
    assert called, "every method asks clients for something"
    for function in called:
        assert getattr(getattr(method, function), "rng", None), f"{name}.{function}"


class Making(FedAvg):
    """Clients note which examples and which weights something is made of."""

    name: str = "test_client_functions:Making"

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor) -> Update:
        of_examples = client.once("examples", lambda: client.round)
        of_weights = client.once("weights", lambda: client.round, weights[:3].numpy().copy())
        client.report(of_examples=of_examples, of_weights=of_weights)
        return super().local_update(client, weights)


def test_what_is_made_once_is_made_again_of_others(finish: Finish) -> None:
    """Client by client; when its examples change, or the arrays that it is made of."""
    method = {"name": "test_client_functions:Making"}
    done = finish(train={"rounds": 4}, method=method, partition={"clients": 3})
    assert (done.clients["of_examples"] == 1).all()
    assert (done.clients["of_weights"] == done.clients["round"]).all()
    changed = {"name": "drift", "of": {"name": "digits"}, "round": 3}
    done = finish(train={"rounds": 4}, method=method, data=changed, partition={"clients": 3})
    drifting = done.clients.groupby("round")["of_examples"].max()
    assert drifting.tolist() == [1, 1, 3, 3]
