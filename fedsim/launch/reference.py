"""The reference of a run's explanations (`explain.reference`): what it may be, and its maps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import nn

from fedsim.conditions.explaining import Explanations
from fedsim.data import ClientSplits, Dataset
from fedsim.errors import BadInput, Damaged, ExperimentError
from fedsim.experiment import Evaluate, Experiment
from fedsim.federation import RunSpec
from fedsim.methods import methods
from fedsim.methods.learns import Problem, why_unfit
from fedsim.models import Arrays
from fedsim.results.folder import FINAL_WEIGHTS, REFERENCE, RunFolder
from fedsim.results.records import hashes
from fedsim.results.run import Run
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
            given(source, experiment, dataset, splits, spec)
    elif source:
        method = methods.parse({"name": source})
        problem = Problem(experiment.model, spec.objective, splits.sequence is not None)
        if why := why_unfit(method.learns, problem):
            raise ExperimentError(
                f"{KEY}={source}: method.name={source} {why}; name a finished run instead"
            )
        alone_with(experiment, source)


def alone_with(experiment: Experiment, method: str) -> Experiment:
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


def given(
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
        return network_of(other, spec, run.path / FINAL_WEIGHTS), about
    except (BadInput, OSError) as error:
        hint = "" if path.exists() else "; name a finished run, or centralised"
        raise ExperimentError(f"{KEY}: {error}{hint}") from error


def _content(experiment: Experiment, key: str) -> Any:
    content = experiment.model_dump(mode="json", include={key})[key]
    return {k: v for k, v in (content or {}).items() if k != "root"}  # where the data lie


def network_of(experiment: Experiment, spec: RunSpec, weights: Path) -> nn.Module:
    """The network of another experiment on the run's data, with weights from a file."""
    adapters = experiment.adapters
    adapt = None if adapters is None else adapters.adapting(experiment.method.adapts)
    train = spec.train.model_copy(update={"initial_weights": None})  # the file has all of them
    network = replace(spec, train=train, adapt=adapt, frozen={}).build_model()
    load_weights(weights, network)
    return network.eval()


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
    conditions = (
        one.model_copy(update={"reference": maps}) if isinstance(one, Explanations) else one
        for one in spec.conditions
    )
    return replace(spec, conditions=tuple(conditions))
