"""Conformance checks for authors of methods, objectives, partitions, models and explainers.

Each check takes a component and raises an AssertionError that says what is wrong with it. fedsim's
own tests run them on every built-in component. Call them from any test framework:

    from fedsim.testing import check_method
    from my_method import MyMethod

    def test_my_method():
        check_method(MyMethod(mu=0.1))

`check_method` and `check_explainer` run small experiments in this process, within seconds.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.analysis.replay import ModelSnapshot, explain_run
from fedsim.data import ClientSplits, Dataset, Partition
from fedsim.errors import DataError, ExperimentError
from fedsim.experiment import Experiment
from fedsim.explain import Explainer, Explanation
from fedsim.explain.inputs import Inputs
from fedsim.federation import LocalEngine, RoundRunner
from fedsim.federation.checkpoint import Checkpoints
from fedsim.launch.prepare import prepare
from fedsim.launch.run import resume, run
from fedsim.methods import Method, State
from fedsim.models import Model, models
from fedsim.objectives import Batch, Objective, evaluate, scores_of
from fedsim.objectives.objective import merged
from fedsim.results.run import Run
from fedsim.simulate import TABLES, Progress, initial_state, one_round

_TIMES = ["seconds", "explain_seconds"]  # columns that no two runs have alike


def small_experiment(**sections: Any) -> Experiment:
    """Ten clients that learn ten digits for ten rounds, in this process, in about a second.

    Args:
        sections: sections that extend the default ones; a section that names another component, or
            is an object, replaces the default.

    Example:
        >>> small_experiment(train={"rounds": 3}, method={"name": "scaffold"}).train.rounds
        3
    """
    content: dict[str, Any] = {
        "name": "small",
        "data": {"name": "digits"},
        "partition": {"kind": "dirichlet", "clients": 10, "alpha": 0.5},
        "model": {"name": "mlp", "hidden": [32]},
        "method": {"name": "fedavg"},
        "train": {"rounds": 10, "local_epochs": 1, "batch_size": 16, "optimizer": {"lr": 0.1}},
        "engine": {"kind": "local"},
    }
    for name, section in sections.items():
        known = content.get(name, {})
        extends = isinstance(section, Mapping) and {"name", "kind"}.isdisjoint(section)
        content[name] = {**known, **section} if extends else section
    return Experiment.from_dict(content)


def check_method(
    method: Method[Any] | type[Method[Any]] | Mapping[str, Any],
    *,
    actors: int = 0,
    **sections: Any,
) -> None:
    """Check that a method fulfils what the federation relies on.

    - Its state is a `State` of arrays never changed in place, and its weights stay finite.
    - `round` is a function of that state and of what clients keep: after a checkpoint, in another
      process, the next round comes out to the same bits.
    - A run that is interrupted and resumed has the result and the tables of one that was not.
    - The bytes of a round are the sum over its clients.
    - If it says that clients can be trained in stacks (`Method.stackable`), stacks of three give
      the same result as the loop, up to rounding.
    - With `actors`, a run on that many Ray client actors has the same result hash.

    Args:
        method: the method, in any form that an experiment accepts.
        actors: number of Ray client actors to compare with; 0 starts none. Ray takes some seconds.
        sections: settings that it needs in addition to `small_experiment`, such as
            `partition={"server_fraction": 0.2}`.

    Raises:
        AssertionError: one of these checks fails.
        FedsimError: the method cannot be run in that experiment at all.

    Example:
        >>> check_method({"name": "fedprox", "mu": 0.1}, train={"rounds": 4})
    """
    experiment = small_experiment(method=method, **sections)
    if experiment.train.rounds < 3:
        raise ExperimentError(
            f"check_method needs train.rounds=3 or more, not {experiment.train.rounds}: it "
            "interrupts the run, and resumes it"
        )
    with tempfile.TemporaryDirectory() as folder:
        done = run(experiment, Path(folder, "undisturbed"), progress=False)
        _check_run(done, Path(folder))
        if actors:
            engine = {**experiment.engine.model_dump(), "kind": "ray", "actors": actors}
            there = run(
                small_experiment(method=method, **{**sections, "engine": engine}),
                Path(folder, "ray"),
                progress=False,
            )
            _check(
                there.result_hash == done.result_hash,
                f"method {experiment.method.name}: its result on {actors} client actors is not "
                "that of this process; does a client function depend on anything but its client "
                "and its arguments?",
            )


def _check_run(done: Run, folder: Path) -> None:
    """Check the method of a finished run."""
    experiment = done.experiment
    what = f"method {experiment.method.name}"
    _check_state(experiment, what)
    _check_resumption(experiment, done, folder / "interrupted", what)
    _check_bytes(done, what)
    if experiment.method.stackable:
        _check_stacks(experiment, what)


def _check_state(experiment: Experiment, what: str) -> None:
    runner, ledger = _runner(experiment), dict[str, Any]()
    runner.use_ledger(ledger)
    state = initial_state(runner, experiment)
    last = min(2, experiment.train.rounds - 1)
    with tempfile.TemporaryDirectory() as folder:
        for t in range(1, last + 1):
            state = _pure_round(runner, experiment, state, t, what)
        checkpoints = Checkpoints(Path(folder))
        checkpoints.save(last, state, runner, {})
        carried = copy.deepcopy(ledger)
        following = _pure_round(runner, experiment, state, last + 1, what)
        other = _runner(experiment)
        other.use_ledger(carried)
        found = checkpoints.latest(initial_state(other, experiment), other)
        assert found is not None
        again = one_round(other, experiment, found.state, last + 1)
    for field in fields(following):
        _check(
            _same(getattr(following, field.name), getattr(again, field.name)),
            f"{what}: after a checkpoint, state.{field.name} of round {last + 1} comes out "
            "otherwise: what rounds need must be in the state, or be kept by the clients",
        )


def _pure_round(
    runner: RoundRunner, experiment: Experiment, state: State, t: int, what: str
) -> State:
    before = copy.deepcopy(state)
    following = one_round(runner, experiment, state, t)
    for field in fields(state):
        _check(
            _same(getattr(before, field.name), getattr(state, field.name)),
            f"{what}: round {t} changes state.{field.name} in place; return a new state",
        )
    return following


def _check_resumption(experiment: Experiment, undisturbed: Run, out: Path, what: str) -> None:
    every, last = experiment.checkpoint.every, experiment.train.rounds
    stop = min(every + 2, last - 1)

    def interrupt(event: Progress) -> None:
        if isinstance(event, dict) and event["round"] == stop:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        run(experiment, out, interrupt)
    (folder,) = out.glob("*/*")
    resumed = resume(folder, progress=False)
    _check(
        resumed.result_hash == undisturbed.result_hash,
        f"{what}: interrupted in round {stop} and resumed, its result is another; what rounds "
        "need must be in the state, or be kept by the clients (client.state)",
    )
    for table in TABLES:
        one, other = (
            getattr(r, table).drop(columns=_TIMES, errors="ignore") for r in (undisturbed, resumed)
        )
        _check(
            one.equals(other),
            f"{what}: interrupted in round {stop} and resumed, its table of {table} is another",
        )


def _check_bytes(done: Run, what: str) -> None:
    for column in ("bytes_up", "bytes_down"):
        total = int(done.rounds[f"total_{column}"].iloc[-1])
        of_clients = int(done.clients[column].sum()) if column in done.clients else 0
        _check(
            total == of_clients,
            f"{what}: {total} bytes are on record for its rounds and {of_clients} for its "
            f"clients ({column})",
        )


def _check_stacks(experiment: Experiment, what: str) -> None:
    found = []
    for size in (1, 3):
        dataset, splits, spec = prepare(experiment)
        engine = LocalEngine(experiment.engine, spec, dataset, splits)
        runner = RoundRunner(spec, dataset, splits, engine, clients_per_step=size)
        state = initial_state(runner, experiment)
        begin = np.array(state.weights)
        for t in range(1, min(2, experiment.train.rounds) + 1):
            state = one_round(runner, experiment, state, t)
        engine.close()
        found.append(np.asarray(state.weights))
    one, three = found
    scale = float(np.abs(one - begin).max()) if one.size else 0.0
    _check(
        np.allclose(three, one, rtol=0, atol=2e-2 * scale),
        f"{what}: trained three at once, clients come to other weights; loss and perturb must "
        "take what is a client's own from the context",
    )


def check_objective(
    objective: Objective, data: Dataset, model: Model | Mapping[str, Any] | None = None
) -> None:
    """Check that an objective's loss and scores can be computed from parts.

    - It has one primary metric, no two in the same column, and scores for all of them: finite
      numbers.
    - The loss (B,) of an example does not depend on the rest of the batch, and is differentiable.
    - Scores do not depend on how examples are cut into batches.
    - The gradient from `output_gradient` agrees with autograd.

    Args:
        data: a data set for the objective; 40 examples of the test set are used.
        model: in any form that an experiment accepts; by default a small MLP.

    Raises:
        AssertionError: one of these checks fails.

    Example:
        >>> from fedsim.objectives import Classification
        >>> from fedsim.testing import check_objective, small_experiment
        >>> check_objective(Classification(), small_experiment().data.load())
    """
    what = f"objective {objective.name}"
    objective.check(data)
    objective = objective.fitted(data)
    metrics = objective.metrics(data)
    columns = [metric.column for metric in metrics]
    primary = sum(metric.primary for metric in metrics)
    _check(primary == 1, f"{what}: {primary} of its metrics are primary; one must be")
    _check(len(set(columns)) == len(columns), f"{what}: two metrics have the same column")
    outputs = objective.num_outputs(data)
    _check(
        isinstance(outputs, int) and outputs > 0,
        f"{what}: num_outputs must be a whole number above 0, not {outputs!r}",
    )
    learner: Model = models.parse(model or {"name": "mlp", "hidden": [8]})
    torch.manual_seed(0)
    network = learner.build_for(data.spec, outputs).eval()
    count = min(40, len(data.test_y))
    x = _inputs(data, data.test_x[np.arange(count)])
    known = objective.facts(data.test_columns, slice(count)).items()
    facts = {name: torch.from_numpy(fact) for name, fact in known}
    batch = Batch(x, torch.from_numpy(np.asarray(data.test_y[:count])), facts=facts)
    _check_loss(objective, network, batch, what)
    whole = scores_of(objective, evaluate(objective, network, batch))
    for column in columns:
        _check(column in whole, f"{what}: has no score for its metric '{column}'")
    parts = [
        evaluate(objective, network, batch.at(slice(start, start + 7)))
        for start in range(0, count, 7)
    ]
    together = scores_of(objective, merged(parts))
    for column, score in whole.items():
        _check(
            _close(score, together.get(column, math.nan)),
            f"{what}: '{column}' is {score} of all examples, and {together.get(column)} where "
            "they are cut into batches; totals must be sums or arrays over examples",
        )


def _check_loss(objective: Objective, network: nn.Module, batch: Batch, what: str) -> None:
    x, y = batch.x, batch.y
    losses = objective.loss(network, x, y, batch.facts)
    _check(
        isinstance(losses, Tensor) and losses.shape == (len(x),),
        f"{what}: loss must return one number for each example, ({len(x)},), not "
        f"{tuple(getattr(losses, 'shape', ()))}",
    )
    _check(bool(torch.isfinite(losses).all()), f"{what}: a loss is not finite")
    _check(
        losses.requires_grad, f"{what}: its loss cannot be differentiated by the network's weights"
    )
    singles = [batch.at(slice(k, k + 1)) for k in range(5)]
    alone = torch.cat([objective.loss(network, one.x, one.y, one.facts) for one in singles])
    _check(
        torch.allclose(alone, losses[:5], rtol=1e-3, atol=1e-5),
        f"{what}: the loss of an example depends on what else is in the batch",
    )
    written = objective.output_gradient()
    if written is None:
        return
    returned = network(x).detach().requires_grad_()
    values, gradient = written(returned.detach(), y)
    expected = objective.loss(_Constant(returned), x, y, {})
    (wanted,) = torch.autograd.grad(expected.mean(), returned)
    _check(
        torch.allclose(values, expected, rtol=1e-3, atol=1e-5)
        and torch.allclose(gradient, wanted, rtol=1e-3, atol=1e-6),
        f"{what}: output_gradient returns other losses, or another gradient, than `loss` has",
    )


class _Constant(nn.Module):
    """Returns the same outputs, whatever it is asked."""

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        return self._outputs


def check_partition(partition: Partition, data: Dataset, *, random: bool = True) -> None:
    """Check that a partition distributes examples correctly.

    - It assigns no example twice, none that does not exist, and at least one to every client.
    - The same seed gives the same partition, and another seed a different one.
    - Clients hold the same examples, however their shares are then divided into training,
      unlabelled and test examples; these divisions are stratified.
    - A client left without a labelled example is rejected.

    Args:
        data: the data set to distribute.
        random: whether the partition depends on the seed.

    Raises:
        AssertionError: one of these checks fails.

    Example:
        >>> from fedsim.data import partitions
        >>> from fedsim.testing import check_partition, small_experiment
        >>> check_partition(
        ...     partitions.parse({"kind": "iid", "clients": 7}), small_experiment().data.load()
        ... )
    """
    what = f"partition {partition.kind}"
    uncut = {"test_fraction": 0.0, "labelled_fraction": 1.0, "server_fraction": 0.0}
    partition = partition.model_copy(update=uncut)
    missing = f"{what}: deals out examples that there are not"
    try:
        whole = partition.deal(data, 0)
    except IndexError as error:
        raise AssertionError(missing) from error
    values = whole.train.values
    _check(len(values) > 0 and values.min() >= 0 and values.max() < len(data.y), missing)
    _check(len(np.unique(values)) == len(values), f"{what}: deals an example out twice")
    _check(bool((whole.train.lengths > 0).all()), f"{what}: deals a client no example")
    _check(_same_splits(whole, partition.deal(data, 0)), f"{what}: deals otherwise each time")
    differs = not _same_splits(whole, partition.deal(data, 1))
    _check(
        differs == random,
        f"{what}: does {'not ' if random else ''}depend on the seed; draw from `rng` alone",
    )
    for test, labelled in ((0.0, 0.3), (0.25, 1.0), (0.25, 0.3), (0.5, 0.5)):
        cut = partition.model_copy(update={"test_fraction": test, "labelled_fraction": labelled})
        _check_cuts(whole, cut.deal(data, 0), data, test, labelled, what)
    greedy = partition.model_copy(update={"test_fraction": 0.999})
    try:
        greedy.deal(data, 0)
    except DataError:
        return
    raise AssertionError(f"{what}: leaves a client without a training example")


def _check_cuts(
    whole: ClientSplits, cut: ClientSplits, data: Dataset, test: float, labelled: float, what: str
) -> None:
    classes = int(data.strata.max()) + 1
    _check(len(whole) == len(cut), f"{what}: has other clients once shares are cut")
    for k, share in enumerate(whole.train):
        pieces = [part[k] for part in (cut.train, cut.unlabelled, cut.test)]
        _check(
            np.array_equal(np.sort(np.concatenate(pieces)), np.sort(share)),
            f"{what}: client {k} holds other examples once its share is cut",
        )
        own, hidden, aside = (np.bincount(data.strata[p], minlength=classes) for p in pieces)
        every = own + hidden + aside
        _check(
            aside.sum() == round(test * len(share))
            and bool((np.abs(aside - test * every) < 1).all())
            and own.sum() == round(labelled * (len(share) - aside.sum()))
            and bool((np.abs(own - labelled * (every - aside)) < 1).all()),
            f"{what}: the share of client {k} is not cut in proportion to its classes",
        )


def check_model(model: Any, shape: Sequence[int] = (1, 8, 8), outputs: int = 10) -> None:
    """Check that a model builds networks that can be trained in a federation.

    - It returns (B, outputs) finite numbers for (B, *shape) inputs.
    - It builds the same network from the same random state.
    - Every trainable parameter gets a gradient.
    - In evaluation mode, outputs are deterministic and do not depend on the rest of the batch.

    Args:
        model: in any form that an experiment accepts: a component, a network class, a function.
        shape: shape of one input; images are (channels, height, width).
        outputs: number of outputs.

    Raises:
        AssertionError: one of these checks fails.

    Example:
        >>> check_model({"name": "mlp", "hidden": [16]}, shape=(5,), outputs=2)
    """
    learner: Model = small_experiment(model=model).model
    what = f"model {learner.name}"
    built = []
    for _ in range(2):
        torch.manual_seed(0)
        built.append(learner.build(tuple(shape), outputs))
    network, twin = built
    _check(isinstance(network, nn.Module), f"{what}: must return a torch.nn.Module")
    own, other = network.state_dict(), twin.state_dict()
    _check(
        own.keys() == other.keys() and all(torch.equal(own[n], other[n]) for n in own),
        f"{what}: from the same random state it builds another network; draw from torch's own "
        "generator alone",
    )
    x = torch.randn(6, *shape, generator=torch.Generator().manual_seed(1))
    returned = network.train()(x)
    _check(
        isinstance(returned, Tensor) and returned.shape == (6, outputs),
        f"{what}: returns {tuple(getattr(returned, 'shape', ()))} for 6 inputs, not "
        f"{(6, outputs)}",
    )
    returned.square().sum().backward()
    for name, parameter in network.named_parameters():
        _check(
            not parameter.requires_grad or parameter.grad is not None,
            f"{what}: parameter '{name}' gets no gradient; leave it out, or set "
            "requires_grad=False",
        )
    network.eval()
    with torch.no_grad():
        together, again = network(x), network(x)
        alone = torch.cat([network(one[None]) for one in x])
    _check(bool(torch.isfinite(together).all()), f"{what}: returns numbers that are not finite")
    _check(torch.equal(together, again), f"{what}: in evaluation it returns something else twice")
    _check(
        torch.allclose(alone, together, rtol=1e-3, atol=1e-4),
        f"{what}: in evaluation an example's outputs depend on what else is in the batch",
    )


def check_explainer(explainer: Explainer, done: Run, client: int | None = None) -> None:
    """Check that an explainer has no side effects on the model, and is reproducible.

    - The network's weights, modes, gradients and hooks are left as they were, and so are the
      global random generators.
    - Text and rows are the same for the same random stream; rows hold numbers and strings.
    - Pictures are written to the given folder, and their paths are returned.

    Args:
        done: a finished run whose model it can explain.
        client: the client whose model is explained; by default the global model.

    Raises:
        AssertionError: one of these checks fails.
        BadInput: the explainer rejects this run.
    """
    what = f"explainer {explainer.name}"
    if explainer.whole_run:
        found = [explain_run(done, explainer) for _ in range(2)]
    else:
        snapshot = ModelSnapshot.of(done, client=client)
        model, data = snapshot.explained(), snapshot.data()
        explainer.check(model, data)
        rows = list(range(2)) if explainer.takes_inputs else []
        inputs = Inputs.of_rows(snapshot.dataset, rows)
        before = _traces(model.network)
        found = []
        for _ in range(2):
            torch.manual_seed(len(found))  # which must not matter
            np.random.seed(len(found))
            drawn = torch.get_rng_state()
            rng = explainer.rng(model.seed, client)
            found.append(explainer.explain(model, data, inputs, rng))
            _check(
                torch.equal(drawn, torch.get_rng_state()),
                f"{what}: draws from torch's global generator; draw from `rng`",
            )
        after = _traces(model.network)
        for name in before:
            _check(_same(before[name], after[name]), f"{what}: changes the network's {name}")
    _check_explanations(found, what)


def _traces(network: nn.Module | None) -> dict[str, Any]:
    """What must be as it was."""
    if network is None:
        return {}
    return {
        "weights": {n: v.detach().cpu().numpy().copy() for n, v in network.state_dict().items()},
        "modes": [module.training for module in network.modules()],
        "gradients": [parameter.grad is None for parameter in network.parameters()],
        "hooks": [len(m._forward_hooks) + len(m._backward_hooks) for m in network.modules()],
    }


def _check_explanations(found: Sequence[Explanation], what: str) -> None:
    one, other = found
    _check(isinstance(one.text(), str), f"{what}: text() must be a str")
    _check(one.text() == other.text(), f"{what}: says something else twice")
    rows = one.rows()
    _check(bool(rows), f"{what}: has no rows")
    _check(_same(rows, other.rows()), f"{what}: has other rows twice")
    for row in rows:
        for key, value in row.items():
            _check(
                value is None or isinstance(value, int | float | str | np.number),
                f"{what}: rows hold numbers and words; '{key}' is a {type(value).__name__}",
            )
    with tempfile.TemporaryDirectory() as folder:
        for path in one.save(Path(folder)):
            _check(
                path.exists() and path.is_relative_to(folder),
                f"{what}: names {path} among its pictures, which it did not write",
            )


def _runner(experiment: Experiment) -> RoundRunner:
    dataset, splits, spec = prepare(experiment)
    engine = LocalEngine(experiment.engine, spec, dataset, splits)
    return RoundRunner(spec, dataset, splits, engine)


def _inputs(data: Dataset, x: NDArray[Any]) -> Tensor:
    found = torch.from_numpy(np.asarray(x))
    return found if data.words else found.float() / (255 if x.dtype == np.uint8 else 1)


def _same_splits(one: ClientSplits, other: ClientSplits) -> bool:
    return _same(one.train.values, other.train.values) and _same(
        one.train.offsets, other.train.offsets
    )


def _close(one: float, other: float) -> bool:
    both = math.isnan(one) and math.isnan(other)
    return both or math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same bits: arrays, numbers, and what holds them."""
    if isinstance(one, Mapping):
        alike = isinstance(other, Mapping) and one.keys() == other.keys()
        return alike and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, np.ndarray | float):
        equal_nan = not isinstance(one, np.ndarray) or one.dtype.kind == "f"
        return bool(np.array_equal(one, other, equal_nan=equal_nan))
    return bool(one == other)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
