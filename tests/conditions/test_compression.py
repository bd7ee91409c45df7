"""The sections `uplink` and `downlink`: what arrives, what clients keep, and the bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from experiments import (
    FEW,
    NETWORK_METHODS,
    by_day,
    federation,
    interrupted,
    server_states,
    small_experiment,
    with_method,
)
from fedsim import Client, Experiment, Federation, Run, State, Update, resume, run
from fedsim.conditions.codecs import Codec, codecs
from fedsim.errors import BadInput, ClientError, RunError
from fedsim.federation.worker import MEMORY
from fedsim.launch.prepare import prepare
from fedsim.methods.fedavg import FedAvg

Finish = Callable[..., Run]

TRAIN = {"rounds": 2, "participation": 0.5}
LAYERS = [64 * 32, 32, 32 * 10, 10]
P = sum(LAYERS)
TOPK = {"name": "topk", "fraction": 0.1}
SHORT = 4 * 241 + -(-P // 8)  # bytes of a vector of weights by TOPK


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(small_experiment(train=TRAIN), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "codec",
    [
        {"name": "topk", "fraction": 1},
        {"name": "randomk", "fraction": 1},
        {"name": "qsgd", "levels": 2**30},
        {"name": "lowrank", "rank": 22},
    ],
    ids=lambda codec: codec["name"],
)
def test_a_codec_that_loses_nothing_changes_nothing(
    finish: Finish, plain: Run, codec: dict[str, Any]
) -> None:
    assert finish(train=TRAIN, uplink=codec).result_hash == plain.result_hash


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        (TOPK, SHORT),
        ({"name": "topk", "fraction": 0.001}, 2 * (4 + 4)),
        ({"name": "randomk", "fraction": 0.1}, 4 * 241 + 8),
        ({"name": "qsgd", "levels": 15}, 4 * 5 + -(-P * 5 // 8)),
        ({"name": "sign"}, 4 * 4 + -(-P // 8)),
        ({"name": "lowrank", "rank": 2}, 4 * (2 * (64 + 32) + 32 + 2 * (32 + 10) + 10)),
        ({"name": "float16"}, 2 * P),
        ({"name": "int8"}, 4 * 4 + P),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else str(value),
)
def test_bytes_are_those_of_the_messages(finish: Finish, codec: dict[str, Any], size: int) -> None:
    done = finish(train=TRAIN, uplink=codec)
    assert set(done.clients["bytes_up"]) == {size}
    assert set(done.clients["bytes_down"]) == {4 * P}
    assert done.rounds["total_bytes_up"].iloc[-1] == 2 * 5 * size


# what is lost

# Whose server trains, whose clients keep what they receive, or that send nothing.
TRAIN_ON = {"feddf", "fedaux", "fedftg", "semifl", "xpfl", "local", "centralised", "ifca"}


@pytest.mark.parametrize("codec", ["int8", "qsgd", "float16"])
@pytest.mark.parametrize(
    "name",
    by_day(
        (n for n in NETWORK_METHODS if n not in TRAIN_ON),
        ["fedavg", "fedavgm", "fedadam", "feddyn", "scaffold", "fedgen", "fedxds", "afl"],
    ),
)
def test_the_error_of_a_downlink_is_no_step(name: str, codec: str) -> None:
    """With learning switched off, the server stays where it is, whatever its optimiser."""
    own = with_method(name, data=FEW, train={"rounds": 4, "optimizer": {"lr": 1e-9}})
    first, *_, last = server_states(small_experiment(**own, downlink={"name": codec}))
    assert np.abs(last.weights - first.weights).max() < 1e-4  # int8 alone has 1e-3


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "fedadam", "feddyn", "scaffold"])
def test_methods_learn_through_a_coarse_downlink(finish: Finish, name: str) -> None:
    rates = {"fedavgm": {"server_lr": 0.3}}
    sections: dict[str, Any] = {"method": {"name": name, **rates.get(name, {})}}
    done = finish(**sections, train={"rounds": 20}, downlink={"name": "qsgd", "levels": 127})
    plain = finish(**sections, train={"rounds": 20})
    assert done.rounds["accuracy"].iloc[-1] > plain.rounds["accuracy"].iloc[-1] - 0.05


def test_parts_for_single_clients_are_compressed_too(finish: Finish) -> None:
    made = with_method("fedbuff", train={"rounds": 2}, downlink={"name": "int8"})
    assert set(finish(**made).clients["bytes_down"]) == {4 * 4 + P}


def test_a_downlink_without_anything_to_compress(finish: Finish) -> None:
    for name in ("local", "centralised"):
        for section in ("uplink", "downlink"):
            with pytest.raises(
                BadInput, match=f"{section}: method.name={name} sends no weights of models"
            ):
                small_experiment(method={"name": name}, **{section: {"name": "int8"}})


class Silent(FedAvg):
    """Clients train, and send nothing."""

    name: str = "test_compression:Silent"

    def round(self, fed: Federation, state: State, t: int) -> State:
        fed.each(self.train, fed.sample(t), weights=state.weights)
        return state

    def train(self, client: Client, weights: Tensor) -> None:
        client.train(weights)


def test_clients_that_are_asked_for_nothing(finish: Finish) -> None:
    with pytest.raises(RunError, match=r"round 1: clients send no updates.* `uplink` is about"):
        finish(method={"name": Silent().name}, uplink={"name": "int8"})


def test_rounds_in_which_nobody_has_anything_to_send(finish: Finish) -> None:
    """No pseudo-label is that certain, which says nothing about the codec."""
    method = {"name": "semifl", "threshold": 0.999999}
    made = with_method("semifl", method=method, uplink={"name": "int8"}, train={"rounds": 2})
    assert finish(**made).clients["bytes_up"].eq(0).all()


def test_error_feedback_that_would_grow(finish: Finish) -> None:
    """QSGD is scaled so that what it loses is less than what it is given; others are refused."""
    done = finish(train={"rounds": 20}, uplink={"name": "qsgd", "error_feedback": True})
    assert done.rounds["accuracy"].iloc[-1] > 0.8
    uplink = {"name": "test_compression:Doubles", "error_feedback": True}
    message = (
        r"uplink.error_feedback: name=test_compression:Doubles loses 1.0 times .* without bound"
    )
    with pytest.raises(BadInput, match=message):
        finish(uplink=uplink)


class Doubles(Codec):
    """Every other entry, doubled: right on average, and too far off for error feedback."""

    name: str = "test_compression:Doubles"

    def encode(self, vector: Any, shapes: Any, rng: np.random.Generator) -> Any:
        return vector[::2].copy()

    def decode(self, message: Any, shapes: Any) -> Any:
        found = np.zeros(2 * len(message), np.float32)
        found[::2] = 2 * message * np.float32(1.01)
        return found[: sum(map(math.prod, shapes))]


def one_mean(fed: Federation, t: int, k: int) -> np.ndarray:
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
        change = one_mean(exact, t, 4) - start
        arrived = one_mean(fed, t, 4) - start
        kept = fed.runner.fetch(fed.runner.states()[4])[MEMORY]["uplink/local_update"]["weights"]
        np.testing.assert_allclose(arrived + kept, change + residual, atol=3e-7)
        assert np.abs(kept).max() > 1e-5
        residual = kept.astype(np.float64)


def test_a_round_by_hand() -> None:
    """FedAvg with top-k in NumPy, over three rounds."""
    made = small_experiment(train={"rounds": 3}, uplink=TOPK)
    exact = federation(small_experiment(train={"rounds": 3}))
    w, memory = exact.initial_weights(), np.zeros((10, P), dtype=np.float32)
    n = exact.server.num_samples
    for t, state in enumerate(server_states(made)[1:], start=1):
        exact.runner.begin(t)
        sent = np.zeros((10, P))
        for k in range(10):
            trained = exact.mean(FedAvg().local_update, [k], weights=w).weights
            target = (trained - w) + memory[k]
            where = np.argsort(-np.abs(target), kind="stable")[:241]
            sent[k, where] = target[where]
            memory[k] = target - sent[k]
        w = (w + (n @ sent) / n.sum()).astype(np.float32)
        np.testing.assert_allclose(state.weights, w, atol=1e-6)
        w = state.weights


def test_without_error_feedback_nothing_is_kept() -> None:
    fed = federation(small_experiment(uplink={**TOPK, "error_feedback": False}))
    one_mean(fed, 1, 4)
    assert fed.runner.states() == {}


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


def test_a_resumed_run_knows_what_was_lost(finish: Finish, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "method": {"name": "scaffold"},
        "train": {"rounds": 4, "participation": 0.5},
        "checkpoint": {"every": 1},
        "uplink": TOPK,
        "downlink": {"name": "qsgd", "levels": 127},
    }

    folder = interrupted(small_experiment(**sections), tmp_path / "again", 2)
    resumed = resume(folder, progress=False)
    assert resumed.result_hash == finish(**sections).result_hash
    assert set(resumed.clients["bytes_up"]) == {2 * SHORT}  # weights and control variate


def test_running_statistics_are_sent_as_they_are() -> None:
    resnet: dict[str, Any] = {"method": Echoes, "model": {"name": "resnet8", "width": 2}}
    exact = federation(small_experiment(**resnet))
    fed = federation(small_experiment(**resnet, uplink=TOPK, downlink={"name": "int8"}))
    parameters, size = fed.server.model.num_parameters, fed.server.model.size
    exact.runner.begin(1)
    fed.runner.begin(1)
    weights = fed.initial_weights()
    through = federation(small_experiment(**resnet, downlink={"name": "int8"}))
    through.runner.begin(1)
    echoed = through.mean(Echoes().echo, [0], weights=weights).seen
    np.testing.assert_array_equal(echoed[parameters:], weights[parameters:])
    assert not np.array_equal(echoed[:parameters], weights[:parameters])
    # From what arrived, so that training is the same.
    expected = exact.mean(FedAvg().local_update, [0], weights=echoed).weights
    found = fed.mean(FedAvg().local_update, [0], weights=weights).weights
    np.testing.assert_allclose(found[parameters:], expected[parameters:], atol=1e-6)
    (row,) = fed.runner.records()[1]["clients"]
    short = 4 * round(0.1 * parameters) + -(-parameters // 8)
    assert row["bytes_up"] == short + 4 * (size - parameters)


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

    def test_tests_of_clients_are_not_sent(self, finish: Finish) -> None:
        clients = {"partition": {"test_fraction": 0.2}, "evaluate": {"clients": True}}
        done = finish(train={"rounds": 1}, downlink={"name": "float16"}, **clients)
        assert set(done.clients["bytes_down"]) == {2 * P}


# what does not fit


class Halved(Codec):
    """Sends every other entry."""

    name: str = "test_compression:Halved"
    forgets: bool = False

    def encode(self, vector: Any, shapes: Any, rng: Any) -> Any:
        return vector[::2]

    def decode(self, message: Any, shapes: Any) -> Any:
        return message if self.forgets else np.repeat(message, 2)


def test_a_codec_of_ones_own(finish: Finish) -> None:
    done = finish(train={"rounds": 1}, uplink={"name": "test_compression:Halved"})
    assert set(done.clients["bytes_up"]) == {2 * P}
    assert finish(train={"rounds": 1}, uplink=Halved()).result_hash == done.result_hash


def test_one_that_loses_entries(finish: Finish) -> None:
    message = r"codec test_compression:Halved decodes a vector of \(2410,\) as \(1205,\)"
    with pytest.raises(ClientError, match=message):
        finish(uplink=Halved(forgets=True))


class Counts(FedAvg):
    """Clients send numbers of examples alone."""

    name: str = "test_compression:Counts"

    def round(self, fed: Federation, state: State, t: int) -> State:
        fed.gather(self.count, fed.sample(t))
        return state

    def count(self, client: Client) -> dict[str, Any]:
        return {"samples": np.array([client.num_samples])}


@pytest.mark.parametrize(
    ("section", "what"), [("uplink", "clients send no updates"), ("downlink", "the server sends")]
)
def test_a_method_that_sends_no_models(finish: Finish, section: str, what: str) -> None:
    with pytest.raises(RunError, match=f"round 1: {what}.* leave it out"):
        finish(method={"name": Counts().name}, **{section: {"name": "int8"}})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"uplink": {"name": "topkk"}},
            r"uplink.name: unknown codec 'topkk'; did you mean 'topk'",
        ),
        ({"uplink": {"name": "topk", "fraction": 0}}, "uplink.fraction: must be greater than 0"),
        ({"uplink": {"name": "topk", "k": 3}}, "uplink.k: unknown key"),
        ({"uplink": {"name": "qsgd", "levels": 0}}, "uplink.levels: must be greater than or"),
        ({"uplink": {"name": "lowrank", "rank": 0}}, "uplink.rank: must be greater than or"),
        ({"uplink": "sign"}, r"uplink: must be a section of keys; write \{name: sign\}"),
        (
            {"downlink": {"name": "topk"}},
            r"downlink.name=topk compresses changes .* codecs for it: float16, int8, qsgd",
        ),
        (
            {"downlink": {"name": "int8", "error_feedback": True}},
            "downlink.error_feedback: the server keeps no account",
        ),
    ],
)
def test_bad_input(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        prepare(small_experiment(**sections))


def test_sections_as_objects_are_written_out() -> None:
    made = small_experiment(uplink=codecs.parse(TOPK), downlink={"name": "float16"})
    again = Experiment.from_dict(made.model_dump(mode="json"))
    assert again == made
    assert again.uplink is not None
    assert again.uplink.model_dump()["fraction"] == 0.1


@pytest.mark.parametrize("name", ["fedper", "fedbabu"])
def test_statistics_of_batch_norm_are_not_compressed_in_parts(name: str) -> None:
    """The buffers arrive as if nothing had been compressed, also those of a part of the model."""
    sections: dict[str, Any] = {
        "model": {"name": "resnet8", "width": 2},
        "method": {"name": name},
        "train": {"rounds": 1, "participation": 0.3, "batch_size": 64},
    }
    P = federation(small_experiment(**sections)).server.model.num_parameters
    before, plain = server_states(small_experiment(**sections))
    _, coded = server_states(small_experiment(**sections, uplink=TOPK))
    assert np.array_equal(plain.weights[P:], coded.weights[P:])
    assert not np.allclose(plain.weights[:P], coded.weights[:P])
    assert not np.array_equal(before.weights[P:], plain.weights[P:])


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


def test_layers_without_batch_norm_s_own() -> None:
    """FedBN sends neither the parameters nor the statistics of batch norm."""
    made = small_experiment(method={"name": "fedbn"}, model={"name": "networks:normalised"})
    fed = federation(made)
    part = made.method.sent_part(fed.server.model)
    assert part is not None
    assert not part[fed.server.model.num_parameters :].any()
    assert sum(map(math.prod, fed.runner.layers[int(part.sum())])) == part.sum()
