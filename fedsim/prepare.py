"""Load data, deal it out, and check that an experiment can be carried out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedsim.data import ClientSplits, Dataset, load_dataset
from fedsim.data.subset import take_stratified
from fedsim.devices import Fleet, check_deadline
from fedsim.errors import ExperimentError, FedsimError, in_one_line, in_own_code
from fedsim.experiment import Experiment
from fedsim.explain import ExplainedData, ExplainedModel
from fedsim.explain.section import Explain
from fedsim.federation import (
    Aggregation,
    PrivateAggregation,
    RobustAggregation,
    RunSpec,
    SecureAggregation,
    cohort_size,
)
from fedsim.federation.context import scaled
from fedsim.federation.federation import RESERVED
from fedsim.methods.learns import Problem
from fedsim.objectives import VALIDATION, Objective
from fedsim.objectives.metrics import further_metrics
from fedsim.records import TESTED, check_stopping
from fedsim.registry import MAIN, Config
from fedsim.results.loggers import check_loggers
from fedsim.rng import keyed_rng, keyed_torch_rng
from fedsim.training import lacks_memory
from fedsim.training.private import check_examples_apart


def prepare(
    experiment: Experiment, dataset: Dataset | None = None
) -> tuple[Dataset, ClientSplits, RunSpec]:
    """Load the data, deal it out to clients, and check that the experiment can be carried out.

    Args:
        dataset: the data of the experiment, if it is loaded already.

    Raises:
        BadInput: it cannot.
    """
    check_loggers(experiment)
    _check_importable(experiment)
    if experiment.privacy is not None:
        experiment.privacy.check()
    dataset = dataset or load_dataset(experiment.data)
    held_out = _held_out(experiment.evaluate.validation, dataset, experiment.seed)
    splits = experiment.partition.deal(dataset, experiment.seed, held_out)
    dataset, splits = experiment.data.for_clients(dataset, splits, experiment.seed)
    if experiment.adversaries is not None:
        dataset, splits = experiment.adversaries.join(dataset, splits, experiment.seed)
    share = experiment.train.participation
    if cohort_size(share, len(splits)) == 0:
        raise ExperimentError(
            f"train.participation={share} of {len(splits)} clients samples nobody; "
            f"{1 / len(splits):g} samples one"
        )
    if experiment.secure_aggregation is not None and cohort_size(share, len(splits)) < 2:
        raise ExperimentError(
            f"secure_aggregation: hides a client among others of its cohort, and "
            f"train.participation={share} of {len(splits)} clients samples one; "
            f"{2 / len(splits):g} samples two"
        )
    _check_aggregation(experiment, splits)
    objective = experiment.objective or experiment.model.objective(dataset)
    objective.check(dataset)
    objective = objective.fitted(dataset)
    primary = [metric.column for metric in objective.metrics(dataset) if metric.primary]
    if len(primary) != 1:
        raise ExperimentError(
            f"objective.name={objective.name}: one of its metrics must be the primary one, not "
            f"{len(primary)}"
        )
    if experiment.train.sampler == "balanced" and not dataset.classes:
        raise ExperimentError(
            "train.sampler=balanced needs classes, and the target here is a number"
        )
    objective = _with_further(experiment.evaluate.metrics, objective, dataset, splits)
    check_stopping(experiment.evaluate.early_stopping, objective.shown(dataset))
    experiment.method.check_fit(
        Problem(
            experiment.model,
            objective,
            splits.sequence is not None,
            experiment.privacy is not None and experiment.privacy.level == "client",
            experiment.secure_aggregation is not None,
        )
    )
    _check_rounds(experiment, splits)
    privacy = experiment.privacy
    of_clients = privacy if privacy is not None and privacy.level == "client" else None
    spec = RunSpec(
        model=experiment.model,
        objective=objective,
        train=experiment.train,
        seed=experiment.seed,
        functions=experiment.method,
        data=dataset.spec,
        outputs=objective.num_outputs(dataset),
        aggregation=_aggregation(experiment, splits),
        privacy=privacy if of_clients is None else None,
        devices=experiment.devices,
        uplink=experiment.uplink,
        downlink=experiment.downlink,
        attack=None if experiment.adversaries is None else experiment.adversaries.attack,
    )
    network = _try_model(spec)
    if privacy is not None and of_clients is None:
        check_examples_apart(network)
    if of_clients is not None:
        _check_no_running_stats(network, experiment.model.name)
    experiment.method.check_data(dataset, splits, network)
    size = sum(tensor.numel() for tensor in (*network.parameters(), *network.buffers()))
    explain = experiment.explain and _check_explain(experiment, dataset, network)
    if experiment.devices is not None:
        fleet = Fleet(experiment.devices, len(splits), experiment.seed)
        # A codec's messages are shorter by an amount that is not known yet.
        down, up = (
            4 * size if codec is None else 0 for codec in (experiment.downlink, experiment.uplink)
        )
        check_deadline(fleet, experiment.train, splits.train.lengths, down, up)
    return dataset, splits, replace(spec, size=size, explain=explain)


def defined_here(experiment: Experiment) -> str | None:
    """The key and the name of what the running program itself defines; None if nothing is.

    Such classes and functions are of the module `__main__`: no other process finds them.
    """
    for key, section in _sections(experiment, ()):
        values = [v if isinstance(v, tuple) else (v,) for v in vars(section).values()]
        names = [name for own in values for name in own if isinstance(name, str)]
        if type(section).__module__ == MAIN:
            names.append(f"{MAIN}:{type(section).__name__}")
        for name in names:
            if name.startswith(f"{MAIN}:"):
                return f"{'.'.join(key)}: {name.partition(':')[2]}"
    return None


def _check_importable(experiment: Experiment) -> None:
    """Refuse what is defined in the running program itself, where Ray's processes find nothing."""
    if experiment.engine.kind != "local" and (found := defined_here(experiment)):
        raise ExperimentError(
            f"{found} is defined in a notebook or in the script that is running, where the "
            "processes of Ray do not find it; put it into a file of its own, or use "
            "engine.kind=local"
        )


def _sections(value: object, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Config]]:
    """A section and all within it, each with its key."""
    if isinstance(value, Config):
        yield key, value
        for name, part in vars(value).items():
            yield from _sections(part, (*key, name))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _sections(part, key)


def _aggregation(experiment: Experiment, splits: ClientSplits) -> Aggregation:
    """How the experiment's updates are averaged."""
    if experiment.privacy is not None and experiment.privacy.level == "client":
        return PrivateAggregation(experiment.privacy)
    if experiment.secure_aggregation is not None:
        return SecureAggregation(experiment.secure_aggregation)
    adversaries = experiment.adversaries
    attack = adversaries.attack if adversaries is not None and adversaries.attack.forges else None
    if experiment.aggregation is None and attack is None:
        return Aggregation()
    return RobustAggregation(experiment.aggregation, attack, splits.adversaries)


def _check_aggregation(experiment: Experiment, splits: ClientSplits) -> None:
    """Refuse a rule for which a round has too few updates, or too many of adversaries."""
    rule, K = experiment.aggregation, len(splits)
    if rule is None:
        return
    n = experiment.method.updates_per_round(cohort_size(experiment.train.participation, K))
    try:
        rule.check(n)
    except ValueError as error:
        raise ExperimentError(f"aggregation.name={rule.name}: {error}") from None
    expected = -(-len(splits.adversaries) * n // K)
    adversaries, most = experiment.adversaries, rule.bears(n)
    if adversaries is not None and expected > most:
        raise ExperimentError(
            f"adversaries.share={adversaries.share:g}: about {expected} of the {n} clients of a "
            f"cohort are adversaries, and aggregation.name={rule.name} bears {most} ({rule.bound})"
        )


def _held_out(share: float, dataset: Dataset, seed: int) -> NDArray[np.int64]:
    """The training examples of the validation set, sorted.

    Raises:
        ExperimentError: there would be none.
    """
    everything = np.arange(dataset.num_loaded)
    rng = keyed_rng(seed, "validation set")
    drawn, _ = take_stratified(everything, dataset.strata, share, rng)
    if share and not len(drawn):
        raise ExperimentError(
            f"evaluate.validation={share} of {len(everything):,} training examples holds out "
            f"none; {1 / len(everything):.2g} holds out one"
        )
    return drawn


def _with_further(
    names: Sequence[str], objective: Objective, dataset: Dataset, splits: ClientSplits
) -> Objective:
    """The objective with the metrics of `evaluate.metrics`.

    Raises:
        ExperimentError: one is not for this data, or has the name of another column.
    """
    further = further_metrics(names, dataset, objective.num_outputs(dataset))
    taken = [metric.column for metric in objective.metrics(dataset)]
    reserved = {*RESERVED, "train_loss", *PrivateAggregation.column_names}
    prefixes = (VALIDATION, *(f"{who}_" for who in TESTED))  # of columns of other examples
    for name, metric in zip(names, further, strict=True):
        if metric.name in reserved or metric.name.startswith(prefixes):
            raise ExperimentError(
                f"evaluate.metrics: {name}: the column name '{metric.name}' is reserved; rename "
                "the function"
            )
        if metric.name in taken:
            raise ExperimentError(
                f"evaluate.metrics: {name}: there is a metric '{metric.name}' already; leave it "
                "out, or take another name"
            )
        if metric.is_table and splits.sequence is not None:
            raise ExperimentError(
                f"evaluate.metrics: {name} is not for clients that learn tasks one after another"
            )
        taken.append(metric.name)
    return objective.with_further(further) if further else objective


def _check_explain(experiment: Experiment, dataset: Dataset, network: nn.Module) -> Explain:
    """The `explain` section with what it leaves open filled in.

    Raises:
        BadInput: something of it cannot be done with this model, method or data.
    """
    assert experiment.explain is not None
    method = experiment.method
    section = experiment.explain.resolved(
        dataset,
        experiment.train.rounds,
        has_global=method.has_global_model,
        trains_clients=method.trains_clients,
        keeps_models=method.keeps_models,
    )
    trains = experiment.model.builds_network
    model = ExplainedModel(
        section=experiment.model,
        title="",
        round=0,
        seed=experiment.seed,
        network=network.eval() if trains else None,
        rules=None if trains else {},
    )
    data = ExplainedData(dataset, lambda x: scaled(dataset, torch.tensor(x)))
    with keyed_torch_rng(experiment.seed, "explain/check"):
        section.check(model, data)
    return section


def _check_rounds(experiment: Experiment, splits: ClientSplits) -> None:
    """Refuse rounds that do not divide among the tasks of a sequence, or end before a change."""
    if splits.change is not None and splits.change.round > experiment.train.rounds:
        raise ExperimentError(
            f"data.round={splits.change.round}: the run ends after round "
            f"{experiment.train.rounds} (train.rounds), before anything changes"
        )
    if splits.sequence is None:
        return
    T, rounds = splits.sequence.num_tasks, experiment.train.rounds
    if rounds % T:
        raise ExperimentError(
            f"train.rounds={rounds} is no multiple of the {T} tasks, each of which takes as many "
            f"rounds; {-(-rounds // T) * T} is"
        )


def _try_model(spec: RunSpec) -> nn.Module:
    """The network, after one input was sent through it, if it has any parameters.

    Raises:
        ExperimentError: it does not take the data's inputs, or returns another number of outputs
            than the objective needs.
    """
    name = f"model.name={spec.model.name}"
    try:
        network = spec.build_model()
        if not isinstance(network, nn.Module):
            raise ExperimentError(f"{name}: must return a torch.nn.Module, not {network!r}")
        if not spec.model.builds_network:
            return network
        with torch.no_grad():
            kind = torch.from_numpy(spec.data.dtype.type(0).reshape(1)).dtype
            x = torch.zeros(1, *spec.data.shape, dtype=kind)
            found = tuple(network.eval()(x).shape)
    except (FedsimError, KeyboardInterrupt):
        raise
    except BaseException as error:  # of the user's own code
        if lacks_memory(error):
            raise ExperimentError(
                f"{name}: there is not enough memory for it: {in_one_line(error)}"
            ) from error
        raise ExperimentError(
            f"{name} does not take the data's inputs of shape {spec.data.shape}: "
            f"{in_own_code(error)}"
        ) from error
    try:
        with torch.no_grad():
            spec.objective.outputs(network, x)
    except AttributeError as error:
        raise ExperimentError(
            f"objective.name={spec.objective.name} is not for {name}: {in_one_line(error)}"
        ) from error
    if found != (1, spec.outputs):
        raise ExperimentError(
            f"{name} returns outputs of shape {found} for one input; "
            f"objective.name={spec.objective.name} needs {(1, spec.outputs)}"
        )
    return network


def _check_no_running_stats(network: nn.Module, name: str) -> None:
    """Refuse noise on running statistics: a variance would end up below 0."""
    for layer, buffer in network.named_buffers():
        if buffer.is_floating_point():
            raise ExperimentError(
                f"privacy: adds noise to all that clients send, and model.name={name} sends "
                f"what does not bear it ('{layer}'); take a model without batch norm, or other "
                "buffers"
            )
