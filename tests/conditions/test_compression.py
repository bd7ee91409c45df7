"""The sections `uplink` and `downlink`: what arrives, what clients keep, and the bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from experiments import (
    NETWORK_METHODS,
    WHOLE,
    Finish,
    by_day,
    federation,
    server_states,
    small_experiment,
    with_method,
)
from fedsim import Client, Federation, Run, State, Update, run
from fedsim.conditions.codecs import Codec
from fedsim.errors import BadInput, ClientError
from fedsim.federation.worker import MEMORY
from fedsim.methods.fedavg import FedAvg

TRAIN = {"rounds": 2, "participation": 0.5}
LAYERS = [64 * 32, 32, 32 * 10, 10]
P = sum(LAYERS)
TOPK = {"name": "topk", "fraction": 0.1}
SHORT = 4 * 241 + -(-P // 8)  # bytes of a vector of weights by TOPK


class Halved(Codec):
    """Sends every other entry."""

    name: str = "test_compression:Halved"
    forgets: bool = False

    def encode(self, vector: Any, shapes: Any, rng: Any) -> Any:
        return vector[::2]

    def decode(self, message: Any, shapes: Any) -> Any:
        return message if self.forgets else np.repeat(message, 2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(small_experiment(train=TRAIN), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        (TOPK, SHORT),
        ({"name": "test_compression:Halved"}, 2 * P),
        (Halved(), 2 * P),
        # Those that lose nothing, and change nothing.
        ({"name": "topk", "fraction": 1}, None),
        ({"name": "qsgd", "levels": 2**30}, None),
        ({"name": "lowrank", "rank": 22}, None),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_messages(
    finish: Finish, plain: Run, codec: Any, size: int | None
) -> None:
    done = finish(train=TRAIN, uplink=codec)
    assert (done.result_hash == plain.result_hash) == (size is None)
    if size is not None:
        assert set(done.clients["bytes_up"]) == {size}
        assert done.rounds["total_bytes_up"].iloc[-1] == 2 * 5 * size
    assert set(done.clients["bytes_down"]) == {4 * P}


TESTS: dict[str, Any] = {"partition": {"test_fraction": 0.2}, "evaluate": {"clients": True}}
UNSURE = {"threshold": 0.999999}  # no pseudo-label is that certain, whatever the codec


@pytest.mark.parametrize(
    ("sections", "up", "down"),
    [
        ({"method": {"name": "scaffold"}, "uplink": TOPK}, 2 * SHORT, 8 * P),
        (with_method("fedbuff", downlink={"name": "int8"}), 4 * P, 4 * 4 + P),  # for single ones
        (with_method("semifl", method=UNSURE, uplink={"name": "int8"}), 0, 4 * P),
        ({"downlink": {"name": "float16"}, **TESTS}, 4 * P, 2 * P),  # which are not sent
    ],
    ids=["two vectors", "parts", "nothing to send", "tests"],
)
def test_what_is_compressed(finish: Finish, sections: dict[str, Any], up: int, down: int) -> None:
    done = finish(**sections, train={"rounds": 2})
    assert set(done.clients["bytes_up"]) == {up}
    assert set(done.clients["bytes_down"]) == {down}


def test_a_codec_that_loses_entries(finish: Finish) -> None:
    message = r"codec test_compression:Halved decodes a vector of \(2410,\) as \(1205,\)"
    with pytest.raises(ClientError, match=message):
        finish(uplink=Halved(forgets=True))


# what is lost

# Whose server trains, whose clients keep what they receive, or that send nothing.
TRAIN_ON = {"feddf", "fedaux", "fedftg", "semifl", "xpfl", "local", "centralised", "ifca"}
TRAIN_ON |= {"fedex_lora", "flora"}  # refused
TRAIN_ON |= {"hetlora"}  # whose server pads with zeros


@pytest.mark.parametrize("codec", by_day(["int8", "qsgd", "float16"], ["int8"]))
@pytest.mark.parametrize(
    "name",
    by_day(
        (n for n in NETWORK_METHODS if n not in TRAIN_ON),
        ["fedavg", "fedavgm", "fedadam", "feddyn", "scaffold", "fedgen", "fedxds", "afl"],
    ),
)
def test_the_error_of_a_downlink_is_no_step(name: str, codec: str) -> None:
    """With learning switched off, the server stays where it is, whatever its optimiser."""
    own = with_method(name, train={"rounds": 4, "optimizer": {"lr": 1e-9}})
    first, *_, last = server_states(small_experiment(**own, downlink={"name": codec}))
    assert np.abs(last.weights - first.weights).max() < 1e-4  # int8 alone has 1e-3


def test_error_feedback_that_would_grow(finish: Finish) -> None:
    """QSGD is scaled so that what it loses is less than what it is given; others are refused."""
    done = finish(
        data=WHOLE, train={"rounds": 20}, uplink={"name": "qsgd", "error_feedback": True}
    )
    assert done.rounds["accuracy"].iloc[-1] > 0.8
    message = r"uplink.error_feedback: name=test_compression:Doubles loses 1.0 times .* without"
    with pytest.raises(BadInput, match=message):
        finish(uplink={"name": "test_compression:Doubles", "error_feedback": True})


class Doubles(Codec):
    """Every other entry, doubled: right on average, and too far off for error feedback."""

    name: str = "test_compression:Doubles"

    def encode(self, vector: Any, shapes: Any, rng: np.random.Generator) -> Any:
        return vector[::2].copy()

    def decode(self, message: Any, shapes: Any) -> Any:
        found = np.zeros(2 * len(message), np.float32)
        found[::2] = 2 * message * np.float32(1.01)
        return found[: sum(map(math.prod, shapes))]


def sent_by(fed: Federation, t: int, k: int) -> np.ndarray:
    """What client k sends in round t, trained from the initial weights."""
    fed.runner.begin(t)
    return fed.mean(FedAvg().local_update, [k], weights=fed.initial_weights()).weights


@pytest.mark.parametrize("name", ["topk", "randomk", "sign", "lowrank", "int8"])
def test_what_was_not_sent_is_kept_and_sent_later(name: str) -> None:
    codec = {"name": name, "error_feedback": True}
    exact, fed = federation(small_experiment()), federation(small_experiment(uplink=codec))
    start = exact.initial_weights().astype(np.float64)
    residual = np.zeros(P)
    for t in (1, 2, 3):
        change = sent_by(exact, t, 4) - start
        arrived = sent_by(fed, t, 4) - start
        kept = fed.runner.fetch(fed.runner.states()[4])[MEMORY]["uplink/local_update"]["weights"]
        np.testing.assert_allclose(arrived + kept, change + residual, atol=3e-7)
        assert np.abs(kept).max() > 1e-5
        residual = kept.astype(np.float64)
    without = federation(small_experiment(uplink={**codec, "error_feedback": False}))
    sent_by(without, 1, 4)
    assert without.runner.states() == {}


class Remembers(FedAvg):
    """Replaces its state, looks at it, and sends vectors of several sorts."""

    name: str = "test_compression:Remembers"

    def round(self, fed: Federation, state: State, t: int) -> State:
        mean = fed.mean(self.local_update, fed.sample(t), weights=state.weights)
        assert set(mean.messages.values()) == {t}
        assert mean.one.tolist() == [t]
        return State(weights=state.weights + mean.delta.reshape(-1))

    def local_update(self, client: Client, weights: Tensor) -> Any:
        assert set(client.state) <= {"rounds"}
        client.state = {"rounds": [*client.state.get("rounds", []), client.round]}
        delta = (client.train(weights) - weights).reshape(2, -1)
        one = weights.new_full((1,), client.round)
        return Update(delta=delta, one=one, message=len(client.state["rounds"]))


def test_the_method_does_not_see_what_is_kept(finish: Finish) -> None:
    done = finish(method=Remembers, uplink=TOPK, train={"rounds": 3})
    assert set(done.clients["bytes_up"]) == {SHORT + 4}


def test_running_statistics_are_sent_as_they_are() -> None:
    resnet: dict[str, Any] = {"method": Echoes, "model": {"name": "resnet8", "width": 2}}
    fed = federation(small_experiment(**resnet, downlink={"name": "int8"}))
    fed.runner.begin(1)
    weights, P = fed.initial_weights(), fed.server.model.num_parameters
    echoed = fed.mean(Echoes().echo, [0], weights=weights).seen
    np.testing.assert_array_equal(echoed[P:], weights[P:])
    assert not np.array_equal(echoed[:P], weights[:P])


# the downlink


class Echoes(FedAvg):
    """Clients send back what they were sent, under another name: it is no change of a model."""

    name: str = "test_compression:Echoes"

    def echo(self, client: Client, weights: Tensor) -> Update:
        return Update(seen=weights)

    def nest(self, client: Client, nest: dict[str, Any], count: Tensor) -> Update:
        return Update(weights=nest["weights"][0], count=count.float())


class TestDownlink:
    @pytest.mark.parametrize(
        ("name", "size"),
        [("float16", 2 * P), ("int8", 4 * 4 + P), ("qsgd", 4 * 5 + -(-P * 4 // 8))],
    )
    def test_clients_get_what_they_decode(self, name: str, size: int) -> None:
        made = small_experiment(method=Echoes, downlink={"name": name})
        fed = federation(made)
        fed.runner.begin(1)
        weights = fed.initial_weights()
        echoed = fed.mean(Echoes().echo, [3], weights=weights).seen
        assert 0 < np.abs(echoed - weights).max() < 0.3
        if name == "float16":
            np.testing.assert_array_equal(echoed, weights.astype(np.float16))
        rows = fed.runner.records()[1]["clients"]
        assert [(row["bytes_up"], row["bytes_down"]) for row in rows] == [(4 * P, size)]

    def test_arrays_within_and_of_other_types(self) -> None:
        made = small_experiment(method=Echoes, downlink={"name": "float16"})
        fed = federation(made)
        fed.runner.begin(1)
        weights = fed.initial_weights()
        count = np.arange(5)
        mean = fed.mean(Echoes().nest, [3], nest={"weights": [weights]}, count=count)
        np.testing.assert_array_equal(mean.weights, weights.astype(np.float16))
        assert fed.runner.records()[1]["clients"][0]["bytes_down"] == 2 * P + count.nbytes


HEAD = [(10, 32), (10,)]
BODY = [(32, 64), (32,)]


@pytest.mark.parametrize(
    ("name", "sent"), [("fedavg", BODY + HEAD), ("fedper", BODY), ("lg_fedavg", HEAD)]
)
def test_a_codec_sees_the_layers_of_the_part_that_is_sent(
    finish: Finish, name: str, sent: list[tuple[int, ...]]
) -> None:
    made = small_experiment(method={"name": name})
    assert federation(made).runner.layers[sum(map(math.prod, sent))] == sent
    done = finish(method={"name": name}, train={"rounds": 1}, uplink={"name": "sign"})
    expected = sum(4 + -(-math.prod(shape) // 8) for shape in sent)  # a scale for each layer
    assert set(done.clients["bytes_up"]) == {expected}


@pytest.mark.parametrize("name", ["fedavg", "fedper", "fedbabu"])
def test_statistics_of_batch_norm_are_not_compressed(name: str) -> None:
    """The buffers arrive as if nothing had been compressed, also those of a part of the model."""
    sections: dict[str, Any] = {
        "model": {"name": "resnet8", "width": 2},
        "method": {"name": name},
        "train": {"rounds": 1, "participation": 0.3, "batch_size": 64},
    }
    fed = federation(small_experiment(**sections, uplink=TOPK))
    P, size = fed.server.model.num_parameters, fed.server.model.size
    before, plain = server_states(small_experiment(**sections))
    _, coded = server_states(small_experiment(**sections, uplink=TOPK))
    if name == "fedavg":
        fed.runner.begin(1)
        fed.mean(FedAvg().local_update, [0], weights=fed.initial_weights())
        (row,) = fed.runner.records()[1]["clients"]
        assert row["bytes_up"] == 4 * round(0.1 * P) + -(-P // 8) + 4 * (size - P)
    assert np.array_equal(plain.weights[P:], coded.weights[P:])
    assert not np.allclose(plain.weights[:P], coded.weights[:P])
    assert not np.array_equal(before.weights[P:], plain.weights[P:])


def test_layers_without_batch_norm_s_own() -> None:
    """FedBN sends neither the parameters nor the statistics of batch norm."""
    made = small_experiment(method={"name": "fedbn"}, model={"name": "networks:normalised"})
    fed = federation(made)
    part = made.method.sent_part(fed.server.model)
    assert part is not None
    assert not part[fed.server.model.num_parameters :].any()
    assert sum(map(math.prod, fed.runner.layers[int(part.sum())])) == part.sum()
