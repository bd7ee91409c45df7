"""Adapters: what methods make of them, against their formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networks
import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray

from experiments import (
    LATE,
    NETWORK_METHODS,
    Finish,
    Say,
    by_day,
    interrupted,
    ran,
    small_experiment,
    with_method,
)
from fedsim import Run, resume
from fedsim.analysis.merging import merge
from fedsim.analysis.replay import ModelSnapshot
from fedsim.errors import ExperimentError, FedsimWarning
from fedsim.launch.prepare import prepare
from fedsim.methods import methods
from fedsim.training import load_weights

MLP: dict[str, Any] = {"name": "mlp", "hidden": [24, 12]}
ADAPTERS = {"r": 3, "alpha": 5}
METHODS = sorted(name for name, method in methods.items() if method.adapts)
BY_DAY = ("fedavg", "fedsa_lora", "flora", "hetlora")


def finished(name: str, **sections: Any) -> Run:
    """A run that tests only read."""
    train = {"rounds": 2, "participation": 1.0, "optimizer": {"lr": 0.3}}
    own = {"model": MLP, "adapters": ADAPTERS, "train": train}
    return ran(method={"name": name}, **{**own, **sections})


def layers(model: ModelSnapshot) -> dict[str, NDArray[np.float64]]:
    """The weight of each layer with adapters, as it acts: W₀ + (α/r)·B·A and what was added."""
    found = {}
    for name, module in model.network().named_modules():
        if hasattr(module, "lora_A"):
            base: Any = module.base_layer
            parts = (base.weight, getattr(base, "added", None), module.lora_A["default"].weight)
            w, added, a, b = (
                np.float64(0) if part is None else part.detach().double().numpy()
                for part in (*parts, module.lora_B["default"].weight)  # type: ignore[union-attr]
            )
            found[name] = w + added + ADAPTERS["alpha"] / ADAPTERS["r"] * (b @ a)
    return found


def means(run: Run) -> tuple[dict[str, NDArray[np.float64]], ...]:
    """The layers of the global model after each round, and n-weighted means of the clients'."""
    found = []
    for t in (1, 2):
        rows = run.clients.query("round == @t").set_index("client")["samples"]
        clients = ModelSnapshot.of_clients(run, list(rows.index), t)
        own = {k: layers(model) for k, model in zip(rows.index, clients, strict=True)}
        mean = {
            layer: sum(n * own[k][layer] for k, n in rows.items()) / rows.sum()
            for layer in own[rows.index[0]]
        }
        found += [layers(ModelSnapshot.of(run, after=t)), mean]
    return tuple(found)


@pytest.mark.parametrize("name", ["ffa_lora", "fedex_lora", "flora"])
def test_the_mean_of_clients_weights_is_exact(name: str) -> None:
    for new, mean in zip(*[iter(means(finished(name)))] * 2, strict=True):
        for layer in mean:
            norm = np.linalg.norm(mean[layer])
            assert np.linalg.norm(new[layer] - mean[layer]) < 1e-6 * norm, layer


def test_averaged_adapters_miss_it_by_the_gap() -> None:
    run = finished("fedavg")
    scale = ADAPTERS["alpha"] / ADAPTERS["r"]
    found = means(run)
    for t in (1, 2):
        new, mean = found[2 * t - 2 : 2 * t]
        rows = run.adapters.query("round == @t").set_index("layer")
        assert {*rows.index} == {*mean} == {"features.1", "features.3"}
        for layer in mean:
            missed = np.linalg.norm(new[layer] - mean[layer]) / scale
            assert missed == pytest.approx(rows.loc[layer, "gap"], rel=1e-3)
            assert missed > 1e-4 * rows.loc[layer, "norm"]
        gap, norm = (np.linalg.norm(rows[column]) for column in ("gap", "norm"))
        assert run.rounds.set_index("round").loc[t, "adapter_gap"] == pytest.approx(gap / norm)


def test_flora_begins_anew_and_fedex_goes_on() -> None:
    for name, zero in (("flora", True), ("fedex_lora", False)):
        weights = finished(name).weights()
        for layer in ("features.1", "features.3"):
            b = weights[f"{layer}.lora_B.default.weight"]
            assert (b == 0).all() == zero
            assert weights[f"{layer}.base_layer.added"].any()


@pytest.mark.parametrize("name", by_day(["fedavg", *METHODS], BY_DAY))
def test_final_weights_are_a_beginning(name: str) -> None:
    run = finished(name)
    if not run.experiment.method.has_global_model:
        pytest.skip("there is none")
    path = run.path / "weights/final.safetensors"
    assert not any("base_layer.weight" in layer for layer in run.weights())
    train = {**run.experiment.train.model_dump(exclude_unset=True), "initial_weights": path}
    again = finished(name, train=train | {"optimizer": {"lr": 1e-12}})
    for layer, weights in run.weights().items():
        if "lora" not in layer or name not in ("flora", "hetlora"):  # new, or padded with zeros
            np.testing.assert_allclose(again.weights()[layer], weights, atol=1e-6)


@pytest.mark.parametrize("name", by_day(["fedavg", *METHODS], BY_DAY))
def test_a_network_without_adapters_lies_below_them(finish: Finish, name: str) -> None:
    plain = finished("fedavg", adapters=None)
    sections: dict[str, Any] = {"model": MLP, "adapters": ADAPTERS}
    start = {"rounds": 1, "initial_weights": plain.path / "weights/final.safetensors"}
    method = {"name": name}
    _, _, spec = prepare(small_experiment(**sections, method=method, train=start))
    network, expected = spec.build_model().eval(), ModelSnapshot.of(plain).network()
    x = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(network(x), expected(x))
    for layer, array in spec.frozen.items():  # of all processes of a node
        assert network.get_parameter(layer).data_ptr() == array.ctypes.data
    if name == "fedavg":
        assert (spec.node_bytes, spec.frozen_size) == (4 * (64 * 24 + 24 + 24 * 12 + 12), 0)
    still = {"rounds": 1, "optimizer": {"lr": 1e-12}}
    after = finish(**sections, method=method, train=start | still)
    if after.experiment.method.has_global_model:
        torch.testing.assert_close(ModelSnapshot.of(after).network()(x), expected(x))


@pytest.mark.parametrize("name", by_day(["fedavg", *METHODS], ["hetlora"]))
def test_interrupted_and_resumed(finish: Finish, tmp_path: Path, name: str) -> None:
    """Of a network from a file, a checkpoint has nothing but the sums of the server."""
    plain = finished("fedavg", adapters=None)
    train: dict[str, Any] = {"rounds": 4, "participation": 0.5}
    train["initial_weights"] = plain.path / "weights/final.safetensors"
    sections: dict[str, Any] = {"model": MLP, "adapters": ADAPTERS, "train": train}
    sections |= {"method": {"name": name}, "checkpoint": {"every": 1}}
    folder = interrupted(small_experiment(**sections), tmp_path / "stopped", 2)
    done, whole = resume(folder, progress=False), finish(**sections)
    assert done.result_hash == whole.result_hash
    pd.testing.assert_frame_equal(done.adapters, whole.adapters)
    if whole.experiment.method.has_global_model:
        for layer, weights in whole.weights().items():
            assert torch.equal(weights, done.weights()[layer])


@pytest.mark.parametrize("name", by_day([name for name in NETWORK_METHODS if name not in METHODS]))
def test_every_method_trains_adapters(finish: Finish, name: str) -> None:
    rounds = 4 if name in LATE else 2
    sections = {"adapters": ADAPTERS, "train": {"rounds": rounds}}
    given = {"model": MLP, **with_method(name, **sections)}
    if name == "fedxds":  # LRP, its usual attribution, has no rule for adapters
        given["method"] = {**given["method"], "attribution": {"name": "attn_lrp"}}
    run = finish(**given)
    weights = run.weights() if run.experiment.method.has_global_model else {}
    assert not any("base_layer" in layer for layer in weights)
    assert len(run.rounds) == rounds


def test_all_of_a_head_is_trained_and_has_no_adapters(tmp_path: Path) -> None:
    """Nor have layers that nobody names, which may be of another type."""
    adapters = {**ADAPTERS, "targets": ["features.2"]}
    run = finished("fedavg", model={"name": "networks:deep_head"}, adapters=adapters)
    heads = {f"head.{k}.{part}" for k in (0, 2) for part in ("weight", "bias")}
    assert {*run.weights()} == heads | {f"features.2.lora_{f}.default.weight" for f in "AB"}
    merge(run, tmp_path / "merged")
    network, plain = ModelSnapshot.of(run).network(), networks.deep_head((1, 8, 8), 10)
    load_weights(tmp_path / "merged" / "model.safetensors", plain)
    x = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(network.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("name", by_day(["fedavg", *METHODS], {*BY_DAY, "ffa_lora"}))
def test_what_a_model_freezes_stays_frozen(name: str) -> None:
    run = finished(name, model={"name": "networks:partly_frozen"})
    network = prepare(run.experiment)[2].build_model()
    now = ModelSnapshot.of(
        run, client=None if run.experiment.method.has_global_model else 0
    ).network()
    trained = {name for name, p in now.named_parameters() if p.requires_grad}
    factors = "B" if name == "ffa_lora" else "AB"
    assert trained == {f"features.1.lora_{f}.default.weight" for f in factors} | {"head.bias"}
    for layer, weights in network.named_parameters():
        if layer not in trained:
            assert torch.equal(weights, now.get_parameter(layer))
        elif layer == "head.bias":
            assert not torch.equal(weights, now.get_parameter(layer))


def test_networks_with_shared_layers_are_merged(finish: Finish, tmp_path: Path) -> None:
    run = finish(model={"name": "networks:repeated"}, method={"name": "fedavg"})
    merge(run, tmp_path / "merged")
    load_weights(tmp_path / "merged" / "model.safetensors", networks.repeated((1, 8, 8), 10))


def test_nothing_to_merge(say: Say) -> None:
    for name, told in (
        (
            "fedsa_lora",
            "method.name=fedsa_lora has no global model to merge; for a client's own: "
            "fedsim.analysis.replay.ModelSnapshot.of(run, client=0).network()",
        ),
        ("hist_trees", "model.name=boosted_trees is a tree ensemble, not a network"),
    ):
        trees = {"model": {"name": "boosted_trees"}, "adapters": None, "train": {"rounds": 1}}
        run = finished(name, **(trees if name == "hist_trees" else {}))
        complaint = say.refused("merge", str(run.path), "--out", str(run.path / "merged"))
        assert " ".join(complaint.split()) == f"error: {run.path}: {told}"
        assert not (run.path / "merged").exists()


def test_the_gap_is_of_updates_that_arrive() -> None:
    sections = {"partition": {"clients": 2}, "devices": {"packet_error": 0.3}}
    run = finished("fedavg", train={"rounds": 6, "participation": 1.0}, **sections)
    arrived = 2 - run.clients.groupby("round")["lost"].sum()
    gaps = run.rounds.set_index("round")["adapter_gap"]
    assert {1, 2} <= {*arrived}
    assert (gaps[arrived == 1] < 1e-6).all()
    assert (gaps[arrived == 2] > 1e-6).all()


@pytest.mark.parametrize(
    "sections",
    [
        {"aggregation": {"name": "median"}},
        {"uplink": {"name": "topk", "fraction": 0.1}},
        {"downlink": {"name": "int8"}},
        {"privacy": {"level": "example", "clip": 1.0, "noise_multiplier": 0.5}},
        {"adversaries": {"share": 0.3, "attack": {"name": "sign_flip"}}},
    ],
    ids=lambda sections: next(iter(sections)),
)
def test_other_sections_reach_adapters(sections: dict[str, Any]) -> None:
    """Methods of adapters are among those of docs/reference/combinations.md."""
    plain, found = finished("fedavg"), finished("fedavg", **sections)
    assert found.result_hash != plain.result_hash
    sent = [run.rounds["bytes_up"].iloc[-1] for run in (plain, found)]
    assert (sent[1] < 0.4 * sent[0]) == ("uplink" in sections)


def test_a_rank_above_that_of_a_layer_is_warned_of(finish: Finish) -> None:
    told = r"^adapters\.r=30: 'features\.1' \(24×64\) has no rank above 24, so that r=24 adapts it"
    with pytest.warns(FedsimWarning, match=told):
        finish(adapters={"r": 30}, model=MLP, method={"name": "fedavg"})


def test_frozen_parts_count_for_each_process() -> None:
    """Where nothing but the user's network knows that they are frozen."""
    data = {"name": "digits", "subset": 0.1}
    _, _, spec = prepare(small_experiment(data=data, model={"name": "networks:frozen"}))
    frozen = sum(p.numel() for p in spec.build_model().parameters() if not p.requires_grad)
    assert (spec.frozen_size, spec.node_bytes) == (4 * frozen, 0.0)
    assert spec.worker_bytes(1) == 4 * spec.size * 10 + 4 * frozen


def test_layers_whose_weights_others_read_get_no_adapters() -> None:
    """torch's attention, for one, does not call the layer that it reads."""
    data = {"name": "digits", "subset": 0.1}
    given: dict[str, Any] = {"data": data, "model": {"name": "own_attention:Attending"}}
    _, _, spec = prepare(small_experiment(**given, adapters={"r": 2}))
    adapted = {name for name, _ in spec.build_model().named_modules() if name.endswith(".lora_A")}
    assert adapted == {f"{layer}.lora_A" for layer in ("embed", "hidden")}
    named = {"r": 2, "targets": ["out_proj"]}
    with pytest.raises(ExperimentError, match=r"called 'out_proj'; there are embed, hidden"):
        prepare(small_experiment(**given, adapters=named))
