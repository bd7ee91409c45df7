"""The reference of a run's explanations (`explain.reference`): trained first, or another run's."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import nn

from fedsim.conditions.explaining import Explanations
from fedsim.data import ClientSplits, Dataset
from fedsim.errors import BadInput, Damaged, ExperimentError, RunError
from fedsim.experiment import Evaluate, Experiment
from fedsim.explain.scores.relevance import informative
from fedsim.federation import Engine, RoundRunner, RunSpec
from fedsim.federation.context import WorkerContext
from fedsim.federation.federation import federation_of
from fedsim.methods import methods
from fedsim.methods.learns import Problem, why_unfit
from fedsim.models import Arrays
from fedsim.objectives import evaluate
from fedsim.objectives.objective import scores_of
from fedsim.results.folder import FINAL_WEIGHTS, REFERENCE, RunFolder, alone
from fedsim.results.manifest import hash_of, is_at
from fedsim.results.records import hashes
from fedsim.results.run import Run
from fedsim.simulate import initial_state, one_round
from fedsim.support import atomic
from fedsim.training import load_weights

KEY = "explain.reference"
SHARED = ("seed", "data", "partition", "model", "adapters", "objective", "train", "engine")


def check_reference(
    experiment: Experiment, dataset: Dataset, splits: ClientSplits, spec: RunSpec, begun: bool
) -> None:
    """Refuse a reference that cannot be trained, or taken, before the start.

    Args:
        begun: whether the run may have the reference already, so that it takes it from nowhere.
    """
    source = experiment.explain and experiment.explain.reference
    if isinstance(source, Path):
        if not begun:
            _given(source, experiment, dataset, splits, spec)
    elif source:
        method = methods.parse({"name": source})
        problem = Problem(experiment.model, spec.objective, splits.sequence is not None)
        if why := why_unfit(method.learns, problem):
            raise ExperimentError(
                f"{KEY}={source}: method.name={source} {why}; name a finished run instead"
            )
        _alone(experiment, source)


def _alone(experiment: Experiment, method: str) -> Experiment:
    """The experiment of a reference that is trained: what does not belong to a federation."""
    rounds, validation = experiment.train.rounds, experiment.evaluate.validation
    try:
        return Experiment(
            name="reference",
            method={"name": method},
            evaluate=Evaluate(every=rounds, validation=validation),
            **{key: getattr(experiment, key) for key in SHARED},
        )
    except ExperimentError as error:
        raise ExperimentError(f"{KEY}={method}: {error}") from None


def _given(
    path: Path, experiment: Experiment, dataset: Dataset, splits: ClientSplits, spec: RunSpec
) -> tuple[nn.Module | Arrays, dict[str, Any]]:
    """The final global model of a finished run, and what the manifest says of it."""
    try:
        run = Run.open(path)
        other, result = run.experiment, run.result_hash
        if not other.method.has_global_model:
            raise ExperimentError(
                f"{run.path}: method.name={other.method.name} has no global model; take a run "
                "that has one"
            )
        for key in ("data", "model", "adapters"):
            if _content(experiment, key) != _content(other, key):
                raise ExperimentError(
                    f"{run.path}: its section `{key}` is not this experiment's; take a run of the "
                    "same data and model"
                )
        # Adversaries change examples, and what is compared are models of the same inputs.
        if experiment.adversaries is None and other.adversaries is None:
            found = hashes(dataset, splits, other)["data_hash"]
            if found != run.manifest["data_hash"]:
                raise ExperimentError(f"{run.path}: its data are others than these")
        weights = run.weights()
        about = {"folder": str(run.path), "result_hash": result}
        if not experiment.model.builds_network:
            return {name: tensor.numpy() for name, tensor in weights.items()}, about
        return _network(other, spec, run.path / FINAL_WEIGHTS), about
    except (BadInput, OSError) as error:
        hint = "" if path.exists() else "; name a finished run, or centralised"
        raise ExperimentError(f"{KEY}: {error}{hint}") from error


def _content(experiment: Experiment, key: str) -> Any:
    content = experiment.model_dump(mode="json", include={key})[key]
    return {k: v for k, v in (content or {}).items() if k != "root"}  # where the data lie


def _network(experiment: Experiment, spec: RunSpec, weights: Path) -> nn.Module:
    """The network of another experiment on the run's data, with weights from a file."""
    adapters = experiment.adapters
    adapt = None if adapters is None else adapters.adapting(experiment.method.adapts)
    train = spec.train.model_copy(update={"initial_weights": None})  # the file has all of them
    network = replace(spec, train=train, adapt=adapt, frozen={}).build_model()
    load_weights(weights, network)
    return network.eval()


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
        model, about = _given(source, experiment, dataset, splits, spec)
        words = about["folder"]
    else:
        other, rounds = _alone(experiment, source), experiment.train.rounds
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
        model = _network(other, spec, weights)
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


def kept(folder: RunFolder, spec: RunSpec) -> RunSpec:
    """The specification with the maps of the reference that the run's folder holds, if it has one.

    Raises:
        Damaged: they are missing or damaged.
    """
    if not (folder.experiment.explain and folder.experiment.explain.reference):
        return spec
    path = folder.path / REFERENCE
    try:
        atomic.check(path, folder.manifest["reference"]["checksum"])
        maps = load_file(path)
    except (FileNotFoundError, KeyError) as error:
        raise Damaged(f"{path}: is missing") from error
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path}: is damaged: {error}") from error
    return with_maps(spec, maps)


def with_maps(spec: RunSpec, maps: Mapping[str, Any]) -> RunSpec:
    """The specification with these maps of a reference, (m, P) by explainer."""
    conditions = (
        one.model_copy(update={"reference": maps}) if isinstance(one, Explanations) else one
        for one in spec.conditions
    )
    return replace(spec, conditions=tuple(conditions))


def maps_of(spec: RunSpec) -> Mapping[str, Any]:
    """The maps of the reference that a specification has; empty if there is none."""
    found = (one.reference for one in spec.conditions if isinstance(one, Explanations))
    return next(found, {})


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
    from fedsim.launch.prepare import prepare  # which imports this module

    dataset, splits, spec = prepare(experiment)
    runner = RoundRunner(spec, dataset, splits, engine, device=device)
    try:
        state = initial_state(runner, experiment)
        for t in range(1, experiment.train.rounds + 1):
            state = one_round(runner, experiment, state, t)
    except RunError as error:
        raise RunError(f"{KEY}={experiment.method.name}: {error}") from error
    arrays = experiment.method.global_model(federation_of(runner), state)
    content: bytes = save({name: np.asarray(a, order="C") for name, a in arrays.items()})
    return content
