"""What conditions refuse: before a run starts, and what methods may not do in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from experiments import RESNET, federation, small_experiment, with_method
from fedsim import Client, Federation, Run, State, Update
from fedsim.errors import BadInput, ClientError, RunError
from fedsim.launch.prepare import prepare
from fedsim.methods.fedavg import FedAvg

Finish = Callable[..., Run]
IID = {"kind": "iid", "clients": 10}
TABLE = {"name": "synthetic", "samples": 200, "test_samples": 50, "classes": 4}
SHARE = {"explainers": ["occlusion"], "share": {"noise": 0.1}}
LATE = {"deadline": 0.5, "partial_work": True}
RATES = ("speed", "download", "upload")
TASKS = {
    "data": TABLE,
    "partition": {"kind": "own_tasks", "tasks": [[["0", "1"], ["2", "3"]]] * 5},
    "train": {"rounds": 2},
}


def attacked(name: str, share: float = 0.2, **fields: Any) -> dict[str, Any]:
    return {"adversaries": {"share": share, "attack": {"name": name, **fields}}}


def aggregated(name: str, **fields: Any) -> dict[str, Any]:
    return {"aggregation": {"name": name, **fields}}


def uplink(name: str, **fields: Any) -> dict[str, Any]:
    return {"uplink": {"name": name, **fields}}


def downlink(name: str, **fields: Any) -> dict[str, Any]:
    return {"downlink": {"name": name, **fields}}


def private(**fields: Any) -> dict[str, Any]:
    return {"privacy": {"clip": 1.0, "noise_multiplier": 1.0, **fields}}


def secure(**fields: Any) -> dict[str, Any]:
    return {"secure_aggregation": fields}


def devices(**fields: Any) -> dict[str, Any]:
    return {"devices": fields, "partition": IID}


def drawn(median: float, sigma: float) -> dict[str, float]:
    return {"median": median, "sigma": sigma}


def own(name: str, **fields: Any) -> dict[str, Any]:
    return {"conditions": [{"name": name, **fields}]}


def method(name: str, **fields: Any) -> dict[str, Any]:
    return {"method": {"name": name, **fields}}


PRIVACY, FLIPS = private(), attacked("label_flip")
SECTIONS: list[tuple[dict[str, Any], str]] = [
    # adversaries
    (attacked("sign_flop"), "adversaries.attack.name: unknown attack 'sign_flop'"),
    (attacked("sign_flip", size=2), "attack.size: unknown key; known: name, scale$"),
    (attacked("sign_flip", 0.04), "share=0.04 of 10 clients makes nobody an adversary; 0.1 makes"),
    (attacked("sign_flip", 0.96), "share=0.96 of 10 clients makes everybody an adversary; lower"),
    (attacked("alie", 0.1), "makes 1 an adversary, and alie takes 2; 0.2 makes 2"),
    ({**FLIPS, "data": {"name": "friedman"}, "partition": IID}, "label_flip: needs a class for"),
    ({**FLIPS, **TASKS}, "label_flip: clients that learn tasks one after another cannot be poi"),
    ({**attacked("backdoor"), "data": TABLE}, r"paints .* images, and .* inputs of shape \(16,\)"),
    (attacked("backdoor", target=10), "target=10: there are 10 classes, 0 to 9"),
    (attacked("backdoor", size=9), "size=9: the patch is larger than images of"),
    ({**attacked("sign_flip"), **PRIVACY}, "leave out `adversaries`, or `privacy`"),
    (
        {**attacked("sign_flip"), **method("local")},
        "adversaries.attack.name=sign_flip: method.name=local does not average clients'",
    ),
    # aggregation
    (aggregated("medain"), "unknown aggregation rule 'medain'; did you mean"),
    (
        {**aggregated("median"), **attacked("sign_flip", 0.5)},
        "adversaries.share=0.5: about 5 of the 10 clients of a cohort are adversaries, and "
        r"aggregation.name=median withstands 4 \(f < n/2\)",
    ),
    (
        {**aggregated("trimmed_mean", trim=0.1), **attacked("sign_flip")},
        r"aggregation.name=trimmed_mean withstands 1 \(f ≤ ⌈trim·n⌉\)",
    ),
    (
        {**aggregated("krum"), **attacked("sign_flip", 0.4)},
        r"withstands 2 \(f as assumed by aggregation.adversaries, and n ≥ 2f \+ 3\)",
    ),
    (
        {**aggregated("krum"), "train": {"participation": 0.4}},
        r"krum: with f = 1 .* \(aggregation.adversaries=0.2\) it needs n ≥ 2f \+ 3 = 5 .* are 4",
    ),
    (  # FedBuff averages as many as its buffer holds
        {**aggregated("krum"), **method("fedbuff", buffer=4), "devices": {}},
        "aggregation.name=krum: .* are 4",
    ),
    ({**aggregated("median"), **PRIVACY}, "median: `privacy` covers sums of honest clients alone"),
    ({**aggregated("median"), **method("local")}, "median: method.name=local does not average"),
    # uplink and downlink
    (uplink("topkk"), "uplink.name: unknown codec 'topkk'; did you mean 'topk'"),
    (uplink("topk", fraction=0), "uplink.fraction: must be greater than 0"),
    (uplink("topk", k=3), "uplink.k: unknown key"),
    (uplink("qsgd", levels=0), "uplink.levels: must be greater than or"),
    (uplink("lowrank", rank=0), "uplink.rank: must be greater than or"),
    ({"uplink": "sign"}, r"uplink: must be a section of keys; write \{name: sign\}"),
    (downlink("topk"), "downlink.name=topk compresses changes .* for it: float16, int8, qsgd"),
    (
        downlink("int8", error_feedback=True),
        "downlink.error_feedback: the server keeps no account",
    ),
    *(
        ({**section("int8"), **method(name)}, f"link: method.name={name} sends no weights of mod")
        for section in (uplink, downlink)
        for name in ("local", "centralised")
    ),
    # privacy
    (private(clip=0), "privacy.clip: must be greater than 0"),
    ({"privacy": {"clip": 1}}, "privacy.noise_multiplier: missing"),
    (private(noise_multiplier=-1), "privacy.noise_multiplier: must be greater than or"),
    (private(delta=1), "privacy.delta: must be less than 1"),
    (private(delta=0), "privacy.delta: must be greater than 0"),
    (private(noise=1), "privacy.noise: unknown key"),
    ({**PRIVACY, **method("feddyn")}, "numbers of samples, .* set method.scale=none"),
    ({**PRIVACY, "model": RESNET}, "model.name=resnet8 .*'features.1.running_mean'"),
    ({**PRIVACY, **method("own_components:FedMedian")}, "asks for what each client sends, which"),
    # secure_aggregation
    (secure(threshold=0), "secure_aggregation.threshold: must be greater"),
    (secure(dropout=1), "secure_aggregation.dropout: must be less than 1"),
    (secure(graph=3), "graph: must be 'complete' or a multiple of 2, not 3"),
    (secure(graph="ring"), "graph: must be 'complete' or a whole number, not 'ring'"),
    (secure(drop=0.1), "secure_aggregation.drop: unknown key"),
    ({**secure(), **with_method("feddf")}, "asks for what each client sends, which secure_aggreg"),
    ({**secure(), **method("feddyn")}, "hides clients' numbers of samples, .* method.scale=none"),
    ({**secure(), **PRIVACY}, "secure_aggregation: the clipping of `privacy` needs the clients'"),
    ({**secure(), **uplink("sign")}, "secure_aggregation: masked updates cannot be compressed"),
    (
        {**secure(), "explain": {**SHARE, "share": {"noise": 0}}},
        "explain.share: .* covers only averages; leave out `expl",
    ),
    ({**secure(), "train": {"participation": 0.1}}, "samples one; 0.2 samples two"),
    # devices
    (devices(speed=0), "speed must be above 0"),
    *((devices(**{key: 1e-308}), f"{key} must be above 0, 1e-30 or more") for key in RATES),
    *((devices(**{key: 10**400}), f"devices.{key}: is too large") for key in RATES),
    *((devices(**{key: drawn(1e-308, 1)}), f"{key} must be above 0, 1e-") for key in RATES),
    *(
        (devices(**{key: drawn(1e-29, 10)}), f"^devices.{key}: .* is drawn, .*; lower dev")
        for key in RATES
    ),
    (devices(partial_work=True), "partial_work needs a deadline"),
    (devices(over_selection=0.5), "devices.over_selection"),
    (devices(capacity_trace="x", upload=3), "capacity_trace says what upload says; leave one of"),
    (devices(availability_trace="x", available=0.5), "availability_trace says what available"),
    (devices(speed=10, deadline=0.5), "devices.deadline=0.5: no client meets it; the fastest "),
    (devices(speed=10, **LATE), "the fastest needs [0-9.]+ s for a single step"),
    ({**devices(over_selection=2), **PRIVACY}, "samples more clients than `privacy` accounts for"),
    (with_method("xpfl", devices=LATE), "has a training loop of its own, which cannot stop early"),
    *(
        ({**method("fedbuff"), "devices": section}, "fedbuff is asynchronous: it needs a section")
        for section in (None, {"deadline": 3.0}, {"over_selection": 2.0})
    ),
    ({**method("fedbuff"), **devices()}, "method.buffer=10 of 10 clients: .* set at most 9"),
    # conditions
    (own("own_channel:Lossless"), "own_channel has no 'Lossless'"),
    (own("lossy"), "conditions.0.name: unknown condition 'lossy'"),
    (own("own_channel:Lossy", shares=0.1), "conditions.0.shares: unknown key"),
    (own("own_channel:Lossy", share=2), "conditions.0.share: must be less than 1"),
    ({"conditions": 2 * own("own_channel:Lossy")["conditions"]}, "Lossy' is named twice"),
    ({"conditions": "own_channel:Lossy"}, "conditions: must be a list"),
]


@pytest.mark.parametrize(("sections", "message"), SECTIONS)
def test_before_a_run(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as refused:
        prepare(small_experiment(**sections))
    assert "\n" not in str(refused.value)


# in a round


class Gathers(FedAvg):
    """Says nothing of what it gathers."""

    name: str = "test_refused:Gathers"

    def round(self, fed: Federation, state: State, t: int) -> State:
        fed.gather(self.count, fed.sample(t))
        return state

    def count(self, client: Client) -> dict[str, Any]:
        return {"samples": np.array([client.num_samples])}


class Silent(Gathers):
    """Clients train, and send nothing."""

    name: str = "test_refused:Silent"

    def round(self, fed: Federation, state: State, t: int) -> State:
        fed.each(self.train, fed.sample(t), weights=state.weights)
        return state

    def train(self, client: Client, weights: Tensor) -> None:
        client.train(weights)


class OneByOne(FedAvg):
    name: str = "test_refused:OneByOne"

    def round(self, fed: Federation, state: State, t: int) -> State:
        return State(weights=fed.mean(self.local_update, [0], weights=state.weights).weights)


class Heavy(FedAvg):
    name: str = "test_refused:Heavy"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        return Update(weights=0 * weights, weight=1e12)


class Counts(FedAvg):
    name: str = "test_refused:Counts"

    def round(self, fed: Federation, state: State, t: int) -> State:
        fed.log(largest=int(fed.server.num_samples.max()))
        return state


class Reads(FedAvg):
    name: str = "test_refused:Reads"

    def round(self, fed: Federation, state: State, t: int) -> State:
        len(fed.server.labelled_data)
        return state


class SendsNothing(FedAvg):
    name: str = "test_refused:SendsNothing"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        return Update()


GATHERS = r"the method gathers each client's message \(count\), which `{}` hides"


@pytest.mark.parametrize(
    ("method", "sections", "error", "message"),
    [
        (Gathers, secure(), RunError, GATHERS.format("secure_aggregation")),
        (
            OneByOne,
            secure(),
            RunError,
            "round 1: a cohort of 1, and secure_aggregation hides a cli",
        ),
        (Heavy, secure(), ClientError, r"the update's weight is 1e\+12"),
        (
            FedAvg,
            secure(dropout=0.5, threshold=1),
            RunError,
            r"round 1: \d of 10 clients are left to unmask the sum, and .*=1 takes 10",
        ),
        (Gathers, PRIVACY, RunError, GATHERS.format("privacy")),
        (Counts, PRIVACY, RunError, "the method reads each client's number of examples"),
        (Reads, PRIVACY, RunError, "the method reads the clients' examples"),
        (
            SendsNothing,
            PRIVACY,
            RunError,
            "round 1: no client of the cohort sent anything to add noise to",
        ),
        *(
            (own, uplink("int8"), RunError, "round 1: clients send no updates.* leave it out")
            for own in (Silent, Gathers)
        ),
        (
            Gathers,
            downlink("int8"),
            RunError,
            "round 1: the server sends.* leave it out",
        ),
        (
            FedAvg,
            aggregated("own_robust:Short"),
            RunError,
            r"name=own_robust:Short: must return an array of shape \(2410,\), not \(3,\)",
        ),
        (
            FedAvg,
            aggregated("own_robust:Undefined"),
            RunError,
            "name=own_robust:Undefined: returns numbers that are NaN or infinite",
        ),
        (
            FedAvg,
            attacked("gaussian", std=1e12),
            ClientError,
            "name=gaussian forges values up to .*'weights'",
        ),
    ],
)
def test_in_a_round(
    finish: Finish,
    method: type[FedAvg],
    sections: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        finish(method=method, train={"rounds": 1}, **sections)


def test_a_mean_of_nobody_has_no_noise_to_hide_in() -> None:
    fed = federation(small_experiment(**PRIVACY))
    fed.runner.begin(1)
    with pytest.raises(RunError, match="round 1: a mean of no clients"):
        fed.mean(FedAvg().local_update, [], weights=fed.initial_weights())
