"""The manifest's entries about a run that is about to start, and the file of its final weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from safetensors.numpy import save

from fedsim.data import ClientSplits, Dataset
from fedsim.data.labels import label_rows
from fedsim.federation import Federation, RunSpec, draw_cohort
from fedsim.federation.engine import Engine
from fedsim.results.folder import LABELS, RunFolder
from fedsim.results.tables import write_table


def describe(
    folder: RunFolder, spec: RunSpec, dataset: Dataset, splits: ClientSplits, engine: Engine
) -> Iterator[str]:
    """Write what is known of a run before its first round into its folder."""
    experiment = folder.experiment
    method = experiment.method
    if dataset.y.ndim == 1:  # not for several targets per example
        with folder.writing():
            write_table(folder.path / LABELS, label_rows(dataset, splits))
    if folder.manifest.get("clients_per_step") is None:
        V = experiment.engine.clients_per_step
        if V != 1 and not method.stackable:
            V = 1
            yield f"clients are trained one by one: method.name={method.name} has its own training"
        elif V != 1:
            share = experiment.train.participation
            cohort = draw_cohort(experiment.seed, share, len(splits), 1)
            V, why = engine.choose_clients_per_step(cohort.tolist())
            yield why
        folder.update(clients_per_step=V)
    facts: dict[str, Any] = {}
    for condition in spec.conditions:
        facts |= condition.manifest(dataset)
    metrics = [asdict(metric) for metric in spec.shown(dataset)]
    folder.update(**{**facts, "server_device": str(engine.server_device()), "metrics": metrics})
    wanted = experiment.explain and (experiment.explain.of or ("cohort",))
    if wanted and "cohort" in wanted and not method.trains_clients:
        yield f"clients do not train models with method.name={method.name}"


def weights_file(fed: Federation, arrays: Mapping[str, Any]) -> bytes:
    """The content of a file of a global model's arrays; see `Run.weights`."""
    # The order of layers, which safetensors changes; a network may have some under two names.
    about = {"layers": json.dumps(list(arrays))}
    if arrays and fed.server.learner.builds_network:
        about["parameters"] = str(sum(p.numel() for p in fed.server.model.module.parameters()))
    content: bytes = save({n: np.asarray(a, order="C") for n, a in arrays.items()}, about)
    return content
