"""Train the reference of explanations, or take it from another run, before the first round."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save
from torch import nn

from fedsim.conditions.explaining import Explanations
from fedsim.data import ClientSplits, Dataset
from fedsim.errors import Damaged, RunError
from fedsim.experiment import Experiment
from fedsim.explain.scores.relevance import informative
from fedsim.federation import Engine, RoundRunner, RunSpec
from fedsim.federation.context import WorkerContext
from fedsim.federation.federation import federation_of
from fedsim.launch.prepare import prepare
from fedsim.launch.reference import KEY, alone_with, given, kept, network_of
from fedsim.models import Arrays
from fedsim.objectives import evaluate
from fedsim.objectives.objective import scores_of
from fedsim.results.describe import weights_file
from fedsim.results.folder import FINAL_WEIGHTS, REFERENCE, RunFolder, alone
from fedsim.results.manifest import hash_of, is_at
from fedsim.results.records import hashes
from fedsim.simulate import initial_state, one_round
from fedsim.support import atomic


def with_reference(
    folder: RunFolder, spec: RunSpec, dataset: Dataset, splits: ClientSplits, engine: Engine
) -> Generator[str, None, RunSpec]:
    """The specification of a run with the maps of its reference, which are made at the first time.

    They are kept in the run's folder, which from then on needs neither the reference nor its
    weights.
    """
    experiment = folder.experiment
    source = experiment.explain and experiment.explain.reference
    if not source:
        return spec
    with suppress(Damaged):
        return kept(folder, spec)
    device = engine.server_device()
    model: nn.Module | Arrays
    if isinstance(source, Path):
        model, about = given(source, experiment, dataset, splits, spec)
        words = about["folder"]
    else:
        other, rounds = alone_with(experiment, source), experiment.train.rounds
        words, about = f"{source}, {rounds} rounds", {"method": source, "rounds": rounds}
        place = _shelf(folder.path) / _key(experiment, other, dataset, splits, device)
        weights = place / Path(FINAL_WEIGHTS).name
        with folder.writing():
            place.mkdir(parents=True, exist_ok=True)
        with alone(place):  # another run may be training it
            if not weights.exists():
                yield f"training the reference of explanations: {words}"
                trained = _trained(other, engine, device)
                with folder.writing():
                    atomic.write(weights, trained)
        model = network_of(other, spec, weights)
    context = WorkerContext(spec, dataset, splits, device)
    if isinstance(model, nn.Module):
        model = model.to(device)
    (explanations,) = (c for c in spec.conditions if isinstance(c, Explanations))
    found = explanations.of_reference(context, model)
    for name, one in found.items():
        if silent := int((~informative(one.relevance, present=one.present)).sum()):
            yield (
                f"warning: of the reference, explainer {name} says nothing about {silent} of "
                f"{len(one.inputs)} inputs, and agreement with it is what chance gives"
            )
    totals = evaluate(spec.objective, context.as_network(model), context.central_batch)
    primary = next(metric for metric in spec.shown(dataset) if metric.primary)
    about[primary.column] = score = scores_of(spec.objective, totals)[primary.column]
    yield f"the reference of explanations: {words}, {primary.label} {score:.3g}"
    with folder.writing():
        maps = {name: one.relevance for name, one in found.items()}
        atomic.write(folder.path / REFERENCE, save(maps))
        about["checksum"] = atomic.checksum(folder.path / REFERENCE)
    folder.update(reference=about)
    return kept(folder, spec)


def _shelf(run: Path) -> Path:
    """Where runs keep what they share: in the folder of their grid or search, or beside them."""
    return next((path for path in run.parents if is_at(path)), run.parent) / ".references"


def _key(
    experiment: Experiment,
    other: Experiment,
    dataset: Dataset,
    splits: ClientSplits,
    device: torch.device,
) -> str:
    """A hash of all that a trained reference depends on, to the bit."""
    content = other.model_dump(mode="json", exclude={"engine"})
    # The union does not depend on who holds what, unless examples are changed or come and go.
    if not (experiment.adversaries or splits.sequence or splits.change):
        content["partition"] = hash_of(np.sort(splits.train.values).tobytes())
    arithmetic = [str(device), other.engine.cpus_per_actor, torch.__version__]
    data = hashes(dataset, splits, other)["data_hash"]
    return hash_of(json.dumps([content, data, *arithmetic], sort_keys=True).encode())


def _trained(experiment: Experiment, engine: Engine, device: torch.device) -> bytes:
    """The weights of its global model after the last round, as a run would write them.

    Args:
        engine: of the run; no client is asked for anything.
    """
    dataset, splits, spec = prepare(experiment)
    runner = RoundRunner(spec, dataset, splits, engine, device=device)
    try:
        state = initial_state(runner, experiment)
        for t in range(1, experiment.train.rounds + 1):
            state = one_round(runner, experiment, state, t)
    except RunError as error:
        raise RunError(f"{KEY}={experiment.method.name}: {error}") from error
    fed = federation_of(runner)
    return weights_file(fed, experiment.method.global_model(fed, state))
