"""Methods that are FedAvg without what is their own."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from experiments import server_states, small_experiment

MODELS = {"mlp": {"name": "mlp", "hidden": [16]}, "normalised": {"name": "networks:normalised"}}
# Whose mean goes by samples; and whose clients all weigh the same.
BY_SAMPLES: list[dict[str, Any]] = [
    {"name": "fedprox", "mu": 0.0},
    {"name": "fedavgm", "beta": 0.0},
    {"name": "moon", "mu": 0.0},
    {"name": "fedsam", "rho": 0.0},
    {"name": "fedsam", "rho": 0.0, "variant": "asam"},
    {"name": "fedavg_ft"},
    {"name": "feddisco", "a": 0.0, "b": 0.0},
    {"name": "fednova"},  # of equally many steps
    {"name": "qfedavg", "q": 0.0},
    {"name": "afl", "mixture_lr": 0.0},
    {"name": "sse_agg", "beta": 0.0},
    {"name": "fedaux", "pretrain_epochs": 0, "epochs": 0},
    {"name": "feddf", "steps": 0},
    {"name": "feddf", "epochs": 0},
    {"name": "fedftg", "width": 4, "iterations": 0},
    {"name": "fedgen", "hidden": 16, "a": 0.0, "b": 0.0},
    {"name": "fedxds", "fraction": 0.0, "attribution": {"name": "gradient_x_input"}},
    {"name": "xpfl", "lam": 0.0, "psi": 0.0, "personalise": "everyone"},
    {"name": "xfedalign", "samples": 20, "poisoned": 0.2, "noise": 0.1},
    # √v + τ stays 2τ then, for all parameters.
    {"name": "fedadagrad", "tau": 1e3, "server_lr": 2e3, "beta1": 0},
    {"name": "fedadam", "tau": 1e3, "server_lr": 2e3, "beta1": 0, "beta2": 1 - 1e-9},
    {"name": "fedyogi", "tau": 1e3, "server_lr": 2e3, "beta1": 0, "beta2": 1 - 1e-9},
]
EQUAL: list[dict[str, Any]] = [
    {"name": "mime_lite", "beta": 0.0},
    {"name": "apfl", "alpha": 0.0, "adaptive": False},
    {"name": "perfedavg", "alpha": 0.0, "variant": "fo"},
    {"name": "perfedavg", "alpha": 0.0, "variant": "hf"},
    # From θ = w, one step of θ is one of plain SGD.
    {"name": "pfedme", "lam": 2.0, "eta": 0.5, "steps": 1},
    {"name": "ifca", "clusters": 1},
]
TO_THE_BIT = {"fedprox", "qfedavg", "feddf", "fedxds", "xpfl", "xfedalign", "fedavg_ft"}


def experiment(model: str, equal: bool, **sections: Any) -> Any:
    dealt = {"kind": "iid"} if equal else {"kind": "dirichlet", "alpha": 0.5, "min_samples": 4}
    # In small batches batch norm makes much of how a step is rounded.
    train = {"rounds": 2, "local_steps": 3, "batch_size": 32, "optimizer": {"lr": 0.02}}
    return small_experiment(
        data={"name": "synthetic", "shape": [1, 8, 8], "samples": 250, "test_samples": 20},
        partition={**dealt, "clients": 4, "server_fraction": 0.2},
        model=MODELS[model],
        train={**train, "participation": 1.0 if equal else 0.5},
        **sections,
    )


@cache
def fedavg(model: str, equal: bool) -> list[Any]:
    return server_states(experiment(model, equal))


def label(method: dict[str, Any]) -> str:
    return "-".join(str(method[key]) for key in ("name", "variant") if key in method)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", [*BY_SAMPLES, *EQUAL], ids=label)
def test_without_its_own_term_a_method_is_fedavg(method: dict[str, Any], model: str) -> None:
    equal = method in EQUAL
    plain = fedavg(model, equal)
    without = server_states(experiment(model, equal, method=method))
    start = plain[0].weights
    np.testing.assert_array_equal(without[0].weights, start)
    for a, b in zip(plain[1:], without[1:], strict=True):
        # Rounding may take an example over a ReLU's kink, so by the distance covered.
        covered = np.linalg.norm(a.weights - start)
        off = np.linalg.norm(b.weights - a.weights)
        assert off == 0 if method["name"] in TO_THE_BIT else off < 1e-3 * covered
