"""Load data, deal it out, and check that an experiment can be carried out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fedsim.conditions.adapters import AdapterRecords
from fedsim.conditions.compression import Downlink, Uplink
from fedsim.conditions.explaining import EPSILON, Explanations
from fedsim.conditions.noise import ClientPrivacy, ExamplePrivacy
from fedsim.conditions.robust import AdversaryRecords, RobustAggregation
from fedsim.conditions.secure import SecureAggregation
from fedsim.conditions.timing import SimulatedTime
from fedsim.config.registry import MAIN, Config
from fedsim.data import ClientSplits, Dataset, load_dataset
from fedsim.data.dataset import fitted
from fedsim.data.splits import take_stratified
from fedsim.errors import ExperimentError, FedsimError, FedsimWarning, in_one_line, in_own_code
from fedsim.experiment import Experiment
from fedsim.explain import ExplainedData, ExplainedModel
from fedsim.explain.baselines import Backgrounds
from fedsim.explain.section import Explain
from fedsim.federation import Condition, RunSpec, Withdrawn, cohort_size
from fedsim.federation.client import RESERVED as CLIENT_RESERVED
from fedsim.federation.client import Client
from fedsim.federation.context import WorkerContext, scaled
from fedsim.federation.runner import RESERVED
from fedsim.federation.worker import Rehearsal
from fedsim.launch.loggers import check_loggers
from fedsim.launch.reference import check_reference
from fedsim.methods.learns import Problem
from fedsim.models.adapters import check_adapted
from fedsim.objectives import VALIDATION, FurtherMetric, Objective
from fedsim.objectives.metrics import further_metrics
from fedsim.results.records import TESTED, check_stopping
from fedsim.support.rng import keyed_rng, keyed_torch_rng
from fedsim.training import Hooks, TrainingJob, blocks_of, has_batch_norm, lacks_memory

# Columns of the experiment's sections, whether or not they are in use, and whose they are.
COLUMNS = {
    **dict.fromkeys(("explain_seconds", EPSILON), "explain"),
    **dict.fromkeys(ClientPrivacy.columns, "privacy"),
    **dict.fromkeys(SecureAggregation.columns, "secure_aggregation"),
    **dict.fromkeys(SimulatedTime.columns, "devices"),
}
CLIENT_COLUMNS = {
    **dict.fromkeys(Explanations.client_columns, "explain"),
    **dict.fromkeys(ExamplePrivacy.client_columns, "privacy"),
    **dict.fromkeys(SimulatedTime.client_columns, "devices"),
    **dict.fromkeys(AdversaryRecords.client_columns, "adversaries"),
}


def prepare(
    experiment: Experiment, dataset: Dataset | None = None, begun: bool = False
) -> tuple[Dataset, ClientSplits, RunSpec]:
    """Load the data, deal it out, and check that the experiment can be carried out.

    Args:
        dataset: the data of the experiment, if already loaded.
        begun: whether there is a run of it already, which may have taken what it needs of others.
    """
    check_loggers(experiment)
    if experiment.engine.kind != "local" and (found := defined_here(experiment)):
        raise ExperimentError(
            f"{found} is defined in a notebook or in the script that is running, where the "
            "processes of Ray do not find it; put it into a file of its own, or use "
            "engine.kind=local"
        )
    if experiment.privacy is not None:
        experiment.privacy.check()
    dataset, splits, setup_bytes = dealt(experiment, dataset)
    if any(setup_bytes) and experiment.privacy is not None:
        warnings.warn(
            "data.fit=federated: clients' sums are sent without noise, and privacy does not count "
            "them",
            FedsimWarning,
            stacklevel=2,
        )
    if experiment.adversaries is not None:
        dataset, splits = experiment.adversaries.join(dataset, splits, experiment.seed)
    share = experiment.train.participation
    if cohort_size(share, len(splits)) == 0:
        raise ExperimentError(
            f"train.participation={share} of {len(splits)} clients samples nobody; "
            f"{1 / len(splits):g} samples one"
        )
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
    objective = _with_further(experiment, objective, dataset, splits)
    check_stopping(experiment.evaluate.early_stopping, objective.shown(dataset))
    in_tasks, adapters = splits.sequence is not None, experiment.adapters
    experiment.method.check_fit(Problem(experiment.model, objective, in_tasks, experiment.hidden))
    _check_rounds(experiment, splits)
    spec = RunSpec(
        model=experiment.model,
        objective=objective,
        train=experiment.train,
        seed=experiment.seed,
        functions=experiment.method,
        data=dataset.spec,
        outputs=objective.num_outputs(dataset),
        conditions=_in_order(_conditions(experiment, splits)),
        setup_bytes=setup_bytes,
        without=experiment.without,
        adapt=None if adapters is None else adapters.adapting(experiment.method.adapts),
    )
    network = _try_model(spec)
    frozen = {n: p.detach() for n, p in network.named_parameters() if not p.requires_grad}
    if experiment.adapters is not None:
        check_adapted(network, _one_input(spec))
    # NumPy lacks other types, such as bfloat16; and without adapters, frozen parts may change.
    shared = {n: p for n, p in frozen.items() if experiment.adapters and p.dtype == torch.float32}
    own = sum(p.nbytes for n, p in frozen.items() if n not in shared)
    spec = replace(spec, frozen={n: p.numpy() for n, p in shared.items()}, frozen_size=own)
    if spec.train.checkpoint_activations:
        _check_blocks(experiment, network)
    _check_saved(network, spec)
    experiment.method.check_data(dataset, splits, network)
    for condition in spec.conditions:
        with _own_code(condition, "check"):
            condition.check(spec, splits, network)
    if any(p.requires_grad for p in network.parameters()):
        _check_batch_norm(experiment, splits, network)
        _try_training(spec, dataset, splits)
    _check_pull(experiment, splits)
    trained = [p for p in network.parameters() if p.requires_grad]
    size = sum(tensor.numel() for tensor in (*trained, *network.buffers()))
    if experiment.explain is not None:
        section, common = _check_explain(experiment, dataset, splits, network)
        check_reference(experiment, dataset, splits, spec, begun)
        scored = tuple(metric.column for metric in section.metrics(dataset))
        explanations = Explanations(section=section, scored=scored, backgrounds=common.rows)
        spec = replace(spec, conditions=_in_order([*spec.conditions, explanations]))
        up, down = setup_bytes
        if section.of != ("global",):
            down += len(splits) * common.received
        spec = replace(spec, setup_bytes=(up + common.sent, down))
    _check_own_conditions(experiment, spec, dataset)
    columns = {name: one.name for one in spec.conditions for name in one.columns}
    of_clients = {name: one.name for one in spec.conditions for name in one.client_columns}
    spec = replace(spec, size=size, columns=COLUMNS | columns)
    return dataset, splits, replace(spec, client_columns=CLIENT_COLUMNS | of_clients)


def dealt(
    experiment: Experiment, dataset: Dataset | None = None
) -> tuple[Dataset, ClientSplits, tuple[int, int]]:
    """The data as clients hold them, and the bytes sent up and down to agree on their scales."""
    dataset = dataset or load_dataset(experiment.data)
    everything, share = np.arange(dataset.num_loaded), experiment.evaluate.validation
    rng = keyed_rng(experiment.seed, "validation set")
    held_out, _ = take_stratified(everything, dataset.strata, share, rng)
    if share and not len(held_out):
        raise ExperimentError(
            f"evaluate.validation={share} of {len(everything):,} training examples holds out "
            f"none; {1 / len(everything):.2g} holds out one"
        )
    splits = experiment.partition.deal(dataset, experiment.seed, held_out)
    if experiment.without is not None:
        splits = experiment.without.leave_out(splits)
    dataset, setup_bytes = fitted(dataset, splits)
    dataset, splits = experiment.data.for_clients(dataset, splits, experiment.seed)
    return experiment.model.takes(dataset), splits, setup_bytes


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


def _sections(value: object, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Config]]:
    if isinstance(value, Config):
        yield key, value
        for name, part in vars(value).items():
            yield from _sections(part, (*key, name))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _sections(part, key)


def _in_order(found: Iterable[Condition]) -> tuple[Condition, ...]:
    return tuple(sorted(found, key=lambda condition: condition.order))


def _conditions(experiment: Experiment, splits: ClientSplits) -> list[Condition]:
    found: list[Condition] = list(experiment.conditions)
    if experiment.privacy is not None:
        kind = ClientPrivacy if experiment.privacy.level == "client" else ExamplePrivacy
        found.append(kind(privacy=experiment.privacy))
    if experiment.secure_aggregation is not None:
        found.append(SecureAggregation(settings=experiment.secure_aggregation))
    attack = experiment.adversaries and experiment.adversaries.attack
    hostile = frozenset(splits.adversaries)
    if attack:
        found.append(AdversaryRecords(attack=attack, adversaries=hostile))
    attack = attack if attack and attack.forges else None
    if experiment.aggregation is not None or attack is not None:
        name = "adversaries" if experiment.aggregation is None else "aggregation"
        found.append(
            RobustAggregation(
                name=name,
                rule=experiment.aggregation,
                attack=attack,
                adversaries=hostile,
                share=experiment.adversaries.share if experiment.adversaries else 0.0,
            )
        )
    if experiment.uplink is not None:
        found.append(Uplink(codec=experiment.uplink))
    if experiment.downlink is not None:
        found.append(Downlink(codec=experiment.downlink))
    if experiment.adapters is not None:
        found.append(AdapterRecords())
    if experiment.devices is not None:
        found.append(SimulatedTime(settings=experiment.devices))
    return found


def _with_further(
    experiment: Experiment, objective: Objective, dataset: Dataset, splits: ClientSplits
) -> Objective:
    names, conformal = experiment.evaluate.metrics, experiment.evaluate.conformal
    outputs = objective.num_outputs(dataset)
    further = further_metrics(names, dataset, outputs)
    calibrated: tuple[FurtherMetric, ...] = ()
    if conformal is not None:
        conformal.check(dataset, outputs, len(splits.held_out))
        calibrated = conformal.metrics(dataset, experiment.seed)
    taken = [metric.column for metric in objective.metrics(dataset)]
    taken += [metric.name for metric in calibrated]
    reserved = {*RESERVED, "train_loss", *COLUMNS}
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
    measured = (*further, *calibrated)
    return objective.with_further(measured) if measured else objective


def _check_explain(
    experiment: Experiment, dataset: Dataset, splits: ClientSplits, network: nn.Module
) -> tuple[Explain, Backgrounds]:
    """The `explain` section with what it leaves open filled in, and its common baselines."""
    assert experiment.explain is not None
    method = experiment.method
    section = experiment.explain.resolved(
        dataset,
        experiment.train.rounds,
        has_global=method.has_global_model,
        trains_clients=method.trains_clients,
        keeps_models=method.keeps_models,
    )
    if section.share is not None and section.share.noise and not section.share.states_epsilon:
        warnings.warn(
            "explain.share.aggregation=quality: clients also send how good their explanations "
            "are, without noise, so that no ε is stated; take mean or median",
            FedsimWarning,
            stacklevel=2,
        )
    trains = experiment.model.builds_network
    model = ExplainedModel(
        section=experiment.model,
        title="",
        round=0,
        seed=experiment.seed,
        network=network.eval() if trains else None,
        arrays=None if trains else {},
    )
    data = ExplainedData(dataset, lambda x: scaled(dataset, torch.tensor(x)), splits=splits)
    with keyed_torch_rng(experiment.seed, "explain/check"):
        section.check(model, data)
    common = section.backgrounds(model, data)
    _warn_of_centres(experiment, common)
    return section, common


def _warn_of_centres(experiment: Experiment, common: Backgrounds) -> None:
    """Say what the centres that clients send for explanations give away."""
    what = "explain.explainers: baseline.clients: clients' centres are sent"
    if common.sent and experiment.privacy is not None:
        told = f"{what} without noise, and privacy does not count them"
        warnings.warn(told, FedsimWarning, stacklevel=2)
    if common.sent and experiment.secure_aggregation is not None:
        told = f"{what} without masks: the server sees those of each client"
        warnings.warn(told, FedsimWarning, stacklevel=2)
    if common.whole:
        warnings.warn(
            f"{what} by {len(common.whole)} clients, client {common.whole[0]} first, who hold no "
            "more different examples than that: they send the examples themselves",
            FedsimWarning,
            stacklevel=2,
        )


def _check_own_conditions(experiment: Experiment, spec: RunSpec, dataset: Dataset) -> None:
    """Refuse columns of the user's conditions that others have, and two who choose the cohort."""
    scores = [metric.column for metric in spec.objective.shown(dataset)]
    taken = {*RESERVED, "train_loss", *scores}
    taken |= {VALIDATION + score for score in scores}
    of_clients = set(CLIENT_RESERVED)
    for condition in sorted(spec.conditions, key=lambda one: one in experiment.conditions):
        columns = [*condition.columns, *(metric.column for metric in condition.metrics)]
        again = taken.intersection(columns) | of_clients.intersection(condition.client_columns)
        if condition in experiment.conditions and again:
            raise ExperimentError(
                f"conditions: {condition.name}: there is a column '{min(again)}' already; take "
                "another name"
            )
        taken.update(columns)
        of_clients.update(condition.client_columns)
    choosing = [one for one in spec.conditions if type(one).sample is not Condition.sample]
    for one in experiment.conditions:
        others = [c for c in spec.conditions if c in choosing or c.independent_draws]
        if one in choosing and (names := [c.name for c in others if c is not one]):
            raise ExperimentError(
                f"conditions: {one.name} chooses the clients of a round, and `{names[0]}` does "
                "so as well, or counts on how they are drawn; leave one of them out"
            )


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
    name = f"model.name={spec.model.name}"
    try:
        network = spec.build_model()
        if not isinstance(network, nn.Module):
            raise ExperimentError(f"{name}: must return a torch.nn.Module, not {network!r}")
        if not spec.model.builds_network:
            return network
        with torch.no_grad():
            x = _one_input(spec)
            found = tuple(network.eval()(x).shape)
            if x._version:
                raise ExperimentError(
                    f"{name} changes its inputs in place, which are used again; copy them first "
                    "(inplace=False in its first layer)"
                )
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


def _one_input(spec: RunSpec) -> torch.Tensor:
    """(1, ...) zeros, as a network takes inputs."""
    kind = torch.from_numpy(spec.data.dtype.type(0).reshape(1)).dtype
    return torch.zeros(1, *spec.data.shape, dtype=kind)


def _check_blocks(experiment: Experiment, network: nn.Module) -> None:
    key = "train.checkpoint_activations"
    if not blocks_of(network):
        name = experiment.model.name
        raise ExperimentError(f"{key}: model.name={name} has no repeated blocks; leave it out")
    if experiment.privacy is not None and experiment.privacy.level == "example":
        raise ExperimentError(
            f"{key}: the gradients of single examples, which privacy.level=example needs, are not "
            "computed in blocks; leave it out"
        )


def _check_pull(experiment: Experiment, splits: ClientSplits) -> None:
    """Refuse a term (a/2)·‖w − u‖² of a method on which steps of SGD grow without bound."""
    train, method = experiment.train, experiment.method
    optimizer, least = train.optimizer, train.optimizer.stable
    if (pull := method.pull(splits)) is None or optimizer.name != "sgd" or train.clip_norm:
        return
    key, strength = pull
    total = strength + optimizer.weight_decay
    if optimizer.lr * total >= least:
        given = getattr(method, key)
        most = f", {strength:.3g} for the smallest client," if strength != given else ""
        decay = f" and weight_decay={optimizer.weight_decay:g}" if optimizer.weight_decay else ""
        raise ExperimentError(
            f"method.{key}={given:g}{most}{decay} with train.optimizer.lr={optimizer.lr:g}: steps "
            f"diverge where the learning rate times their sum is {least:g} or more; set "
            f"train.optimizer.lr below {least / total:.3g}, or a smaller method.{key}"
        )


def _check_batch_norm(experiment: Experiment, splits: ClientSplits, network: nn.Module) -> None:
    """Refuse batches, and clients, of a single example where there is batch norm."""
    train, method = experiment.train, experiment.method
    if not (has_batch_norm(network) and method.trains_clients and method.needs_labels):
        return
    if train.batch_size == 1:
        raise ExperimentError(
            f"train.batch_size=1: model.name={experiment.model.name} has batch norm, which needs "
            "two examples in a batch"
        )
    if train.on_client_error == "skip":
        return
    if len(few := np.flatnonzero((splits.train.lengths < 2) & splits.present)):
        raise ExperimentError(
            f"partition: client {few[0]} has one labelled training example, and batch norm needs "
            f"two ({len(few)} of {len(splits)} clients have one); raise partition.min_samples or "
            "lower partition.clients, or set train.on_client_error=skip"
        )


def _try_training(spec: RunSpec, dataset: Dataset, splits: ClientSplits) -> None:
    """Make a local step on a few examples, as the `train` and `privacy` sections say."""
    rows = splits.train.values[: min(4, spec.train.batch_size)]
    name, private = f"model.name={spec.model.name}", False
    with keyed_torch_rng(spec.seed, "try training"):
        try:
            context = WorkerContext(spec, dataset, splits, torch.device("cpu"))
            if len(rows) < 1 + context.model.has_batch_norm:
                return
            few = context.examples(rows)
            job = TrainingJob(
                *(context.model.vector.clone(), few.x, few.y, spec.train.lr(1), 1),
                *(np.random.default_rng(0), Hooks(spec.objective.loss)),
                most_steps=1,
                facts=few.facts,
            )
            # Of the first client with examples, as the experiment's conditions make it.
            holder = int(np.flatnonzero(context.splits.train.lengths * context.splits.present)[0])
            client = Client(context, holder, 1, "try training", {}, Rehearsal(context), {})
            for condition in context.spec.conditions:
                with suppress(Withdrawn), _own_code(condition, "training"):  # as it may withdraw
                    job = condition.training(client, job)
            private = job.dp_sgd is not None
            context.train(job)
        except (FedsimError, KeyboardInterrupt):
            raise
        except BaseException as error:  # of the user's own code
            what = f"it cannot be trained by objective.name={spec.objective.name}"
            if private:
                what = "it has no gradient of a single example, which privacy.level=example needs"
            if lacks_memory(error):
                what = "there is not enough memory to train it"
            raise ExperimentError(f"{name}: {what}: {in_own_code(error)}") from error


@contextmanager
def _own_code(condition: Condition, hook: str) -> Iterator[None]:
    """Name the user's condition in errors of its own code."""
    try:
        yield
    except FedsimError:
        raise
    except Exception as error:
        raise ExperimentError(
            f"conditions: {condition.name}: {hook}: {in_own_code(error)}"
        ) from error


def _check_saved(network: nn.Module, spec: RunSpec) -> None:
    """Refuse networks whose saved weights would not make the same model again."""
    name, saved = f"model.name={spec.model.name}", network.state_dict()
    for layer, value in saved.items():
        if not isinstance(value, torch.Tensor):
            raise ExperimentError(
                f"{name}: '{layer}' of its state dict is a {type(value).__name__}; only tensors "
                "are saved as weights"
            )
    averaged: list[tuple[str, torch.Tensor]] = [
        (n, p) for n, p in network.named_parameters() if p.requires_grad
    ]
    averaged += [(n, b) for n, b in network.named_buffers() if n in saved]
    for layer, tensor in averaged:
        if tensor.dtype != torch.float32 and (tensor.is_floating_point() or tensor.is_complex()):
            raise ExperimentError(
                f"{name}: '{layer}' is of {tensor.dtype}, and weights are trained and sent in "
                "float32; make it float32 (train.precision computes in less), or freeze it"
            )
    if not (unsaved := _unsaved(network)):
        return
    with keyed_torch_rng(spec.seed, "init/again"):
        again = _unsaved(spec.build())
    for layer, tensor in unsaved.items():
        if layer not in again or not torch.equal(tensor, again[layer]):
            raise ExperimentError(
                f"{name}: '{layer}' is drawn at random and not part of the state dict, so that "
                "its saved weights make another model; register it as a frozen parameter"
            )


def _unsaved(network: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a network that are not part of its state dict, by name."""
    saved, found = network.state_dict(), dict(network.named_buffers())
    for name, module in network.named_modules():
        own = {k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)}
        found |= {f"{name}.{k}".removeprefix("."): v for k, v in own.items()}
    return {name: tensor for name, tensor in found.items() if name not in saved}
