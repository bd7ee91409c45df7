"""Local training, however its steps are made, against a loop in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from fake_card import FakeGraphs
from hypothesis import given
from hypothesis import strategies as st
from networks import Written
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, dropout, linear

from experiments import examples
from fedsim.models import Classifier
from fedsim.objectives import Classification
from fedsim.objectives.classification import _cross_entropy
from fedsim.training import Context, FlatModel, Hooks, Stack, Train, Trained, TrainingJob, train
from fedsim.training import captured as graphs
from fedsim.training.layerwise import LayerwiseSgd

CPU = torch.device("cpu")
SHAPE, CLASSES = (2, 4, 4), 3


# networks


def mlp(bias: bool = True, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(32, 9, bias),
        nn.ReLU(inplace),
        nn.Sequential(nn.Linear(9, 6, bias), nn.ReLU(inplace)),
        nn.Linear(6, CLASSES, bias),
    )


def cnn() -> nn.Module:
    features = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return Classifier(nn.Sequential(features, nn.Flatten(), nn.ReLU()), nn.Linear(16, CLASSES))


def tied() -> nn.Module:
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.Linear(32, CLASSES))


def twice() -> nn.Module:
    layer = nn.Linear(32, 32)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer, nn.Linear(32, CLASSES))


def outside() -> nn.Module:
    """A weight is used outside of its layer as well."""

    def forward(network: Any, x: Tensor) -> Tensor:
        x = x.flatten(1)
        logits: Tensor = network.second(network.first(x).relu() + linear(x, network.first.weight))
        return logits

    return Written(forward, first=nn.Linear(32, 32), second=nn.Linear(32, CLASSES))


class Doubled(nn.Sequential):
    """Not what a sequence of layers returns."""

    def forward(self, input: Tensor) -> Tensor:
        logits: Tensor = 2 * super().forward(input)
        return logits


class Remembering(nn.Module):
    """A layer that keeps what it returned."""

    def forward(self, x: Tensor) -> Tensor:
        self.latest = x.tanh()
        return self.latest


def hooked(as_a_whole: bool = False) -> nn.Module:
    network = mlp()
    (network if as_a_whole else network[1]).register_forward_hook(lambda _, inputs, z: 2 * z)
    network[3].register_forward_pre_hook(lambda _, inputs: inputs[0] + 1)
    return network


def frozen(*names: str) -> nn.Module:
    """With a buffer that is saved beside parameters that are not trained."""
    network = mlp()
    network.register_buffer("constant", torch.ones(4))
    for name in names:
        network.get_parameter(name).requires_grad_(False)
    return network


def convolutional(*layers: nn.Module, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, bias=bias), *layers, nn.Linear(16, CLASSES))


def fully_connected(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(9, CLASSES))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "no bias": lambda: mlp(bias=False),
    "in place": lambda: mlp(inplace=True),
    "cnn": cnn,
    # Without a bias that batch norm takes away again: Adam would follow its rounding errors.
    "batch norm": lambda: convolutional(
        nn.BatchNorm2d(4), nn.ELU(inplace=True), nn.Flatten(), bias=False
    ),
    "group norm": lambda: convolutional(nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten()),
    "layer norm": lambda: fully_connected(nn.Linear(32, 9), nn.LayerNorm(9), nn.Tanh()),
    "dropout": lambda: fully_connected(
        nn.Dropout(0.2), nn.Linear(32, 9), nn.Dropout(0.4), nn.ReLU()
    ),
    "channel dropout": lambda: convolutional(nn.Dropout2d(0.5), nn.Flatten()),
    "tied weights": tied,
    "a layer twice": twice,
    "three dimensions": lambda: nn.Sequential(
        nn.Flatten(1, 2), nn.Linear(4, 5), nn.ReLU(), nn.Flatten(1), nn.Linear(40, CLASSES)
    ),
    "a weight outside": outside,
    "its own forward": lambda: Doubled(*mlp()),
    "hooks": hooked,
    "a layer that remembers": lambda: fully_connected(nn.Linear(32, 9), Remembering()),
    "a hook of all": lambda: hooked(as_a_whole=True),
    # It takes no images whose channels are last in memory.
    "a view of memory": lambda: convolutional(Written(lambda _, x: x.view(len(x), -1))),
    "frozen weights": lambda: frozen("1.weight", "3.0.bias"),
    "a frozen first layer": lambda: frozen("1.weight", "1.bias"),
    "a frozen layer": lambda: frozen("3.0.weight", "3.0.bias"),
    "one layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, CLASSES)),
    "a last layer of another kind": lambda: nn.Sequential(*mlp(), nn.Softplus()),
}
NOT_BY_LAYERS = {
    *("tied weights", "a layer twice", "a weight outside", "its own forward"),
    *("a hook of all", "a last layer of another kind"),
}
STACKED = {
    *("mlp", "cnn", "group norm", "layer norm", "dropout", "channel dropout"),
    *("a frozen layer", "tied weights", "a view of memory"),
}


# losses


def losses(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    return cross_entropy(network(x), y, reduction="none")


def two_views(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """The network is run twice."""
    return losses(network, x, y, context) + losses(network, x.flip(-1), y, context)


def pseudo(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """The network is run without autograd as well."""
    with torch.no_grad():
        wanted = network(x.flip(-1)).argmax(dim=1)
    return losses(network, x, y, context) + losses(network, x, wanted, context)


def penalised(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """With a penalty on all weights, which does not pass through any layer."""
    penalty = sum((p.square().sum() for p in network.parameters()), torch.zeros(()))
    return losses(network, x, y, context) + 0.01 * penalty


def at_times(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """With a penalty in some batches alone, and noise that comes first."""
    x = x + 0.1 * torch.randn(x.shape)
    return (penalised if float(x.detach().sum()) > 0 else losses)(network, x, y, context)


def smooth(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """With a penalty on the gradient at the inputs: its own gradient needs the weights again."""
    x = x.clone().requires_grad_()
    found = losses(network, x, y, context)
    (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    return found + slope.square().flatten(1).sum(dim=1)


def confident(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """With a gradient at the outputs within."""
    logits = network(x)
    found = cross_entropy(logits, y, reduction="none")
    (slope,) = torch.autograd.grad(found.sum(), logits, create_graph=True)
    return found + slope.square().sum(dim=1)


def other_weights(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """The network is run with changed weights as well."""
    own = {name: 0.5 * p for name, p in network.named_parameters()}
    found = functional_call(network, own, (x,), tie_weights=False).square().mean(dim=1)
    return found + losses(network, x, y, context)


def inner(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """With a penalty on what a layer within returns."""
    found: list[Tensor] = []
    first = next(m for m in network.modules() if isinstance(m, nn.Linear))
    handle = first.register_forward_hook(lambda module, inputs, z: found.append(z))
    try:
        return losses(network, x, y, context) + 0.1 * found[0].flatten(1).square().sum(dim=1)
    finally:
        handle.remove()


def remembered(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """With a penalty on what a layer within has kept."""
    found = losses(network, x, y, context)
    kept = [m.latest for m in network.modules() if isinstance(m, Remembering)]
    return found + sum((0.3 * z.square().sum(dim=1) for z in kept), torch.zeros(()))


def masked(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """The outputs are changed in place."""
    logits = network(x)
    logits[:, 0] -= 1
    return cross_entropy(logits.mul_(2), y, reduction="none")


def by_two(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """Two losses an example, (B, 2), whose mean is minimised."""
    logits = network(x)
    return torch.stack([cross_entropy(logits, y, reduction="none"), logits.square().mean(1)], 1)


def weighted(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
    """By a vector of the client's own."""
    return losses(network, x, y, context) * (1 + 0.1 * context["anchor"][0] ** 2)


class Halved(Classification):
    """Another loss than that whose gradient is written out."""

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        return 0.5 * super().losses(logits, y)


class Squared(Classification):
    def loss(self, network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
        return super().loss(network, x, y, context).square()


WEIGHTS = (0.5, 0.0, 2.0)
# What the loop minimises, where it is not the same function.
PLAIN_LOSSES: dict[str, Callable[..., Tensor]] = {
    "classification": losses,
    "halved": lambda *batch: 0.5 * losses(*batch),
    "squared": lambda *batch: losses(*batch).square(),
    "class weights": lambda network, x, y, _: cross_entropy(
        network(x), y, weight=torch.tensor(WEIGHTS), reduction="none"
    ),
}
LOSSES: dict[str, Callable[..., Tensor]] = {
    "classification": Classification().loss,
    "halved": Halved().loss,
    "squared": Squared().loss,
    "class weights": Classification(class_weights=WEIGHTS).loss,
    **{
        loss.__name__: loss
        for loss in (losses, two_views, pseudo, penalised, at_times, smooth, confident)
    },
    **{
        loss.__name__: loss
        for loss in (other_weights, inner, remembered, masked, by_two, weighted)
    },
}
LOSSES_BY_LAYERS = {
    *("classification", "halved", "squared", "class weights"),
    *("losses", "confident", "remembered", "masked", "by_two", "weighted"),
}


def ascend(g: Tensor, w: Tensor, context: Context) -> Tensor:
    return 0.3 * g / g.norm(dim=-1, keepdim=True).clamp(min=1e-12)


# cases, and the loop


@dataclass(frozen=True)
class Case:
    """The training of some clients.

    Attributes:
        sizes: numbers of examples, of each client.
        terms: whether a linear and a quadratic term are added to the loss.
        part: the layer that is trained, if not all are.
        train: settings.
    """

    network: str = "mlp"
    loss: str = "losses"
    sizes: tuple[int, ...] = (8,)
    terms: bool = False
    perturbed: bool = False
    part: str = ""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> Train:
        common = {"batch_size": 3, "optimizer": {"lr": 0.1, **self.optimizer}}
        return Train.model_validate({**common, **self.train})

    def network_of(self, k: int) -> nn.Module:
        """The network with client k's initial weights."""
        torch.manual_seed(0)
        network, generator = NETWORKS[self.network](), torch.Generator().manual_seed(k)
        with torch.no_grad():
            for p in network.parameters():
                if p.requires_grad:
                    p += 0.05 * torch.randn(p.shape, generator=generator)
        return network

    def job_of(self, k: int, loss: Callable[..., Tensor] | None = None) -> TrainingJob:
        model, generator = FlatModel(self.network_of(k), CPU), torch.Generator().manual_seed(k)
        n, P = self.sizes[k], model.num_parameters
        noise = torch.randn(P, generator=generator)
        return TrainingJob(
            model.vector,
            torch.randn(n, *SHAPE, generator=generator),
            torch.randint(CLASSES, (n,), generator=generator),
            0.9 * self.settings.optimizer.lr,  # as in a later round
            self.settings.most_epochs,
            np.random.default_rng(k),
            Hooks(
                loss or LOSSES[self.loss],
                ascend if self.perturbed else None,
                model.part(self.part) if self.part else slice(None),
            ),
            {"anchor": noise},
            # Of several clients, some have no such terms.
            0.3 * noise if self.terms and k % 2 == 0 else None,
            0.2 * (k + 1) if self.terms and k != 2 else 0.0,
            self.settings.local_steps,
        )


def order_of(y: Tensor, rng: np.random.Generator, sampler: str) -> Any:
    """The examples of an epoch."""
    if sampler == "shuffle":
        return rng.permutation(len(y))
    labels = y.tolist()
    chances = [1 / (len(set(labels)) * labels.count(label)) for label in labels]
    return rng.choice(len(y), size=len(y), p=chances)


def by_hand(network: nn.Module, job: TrainingJob, settings: Train, part: str = "") -> Trained:
    """The loop of any tutorial."""
    network.train()
    everything = [p for p in network.parameters() if p.requires_grad]
    trained = list(network.get_submodule(part).parameters()) if part else everything
    given = settings.optimizer
    optimizer: torch.optim.Optimizer
    if given.name == "sgd":
        options = {"momentum": given.momentum, "nesterov": given.nesterov}
        optimizer = torch.optim.SGD(trained, job.lr, weight_decay=given.weight_decay, **options)
    else:
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[given.name]
        optimizer = kind(trained, job.lr, given.betas, weight_decay=given.weight_decay)
    buffers = list(network.buffers())
    skips_one = any(isinstance(m, nn.BatchNorm2d) for m in network.modules())

    def like(vector: Tensor) -> list[Tensor]:
        parts = vector.split([p.numel() for p in everything])
        return [own.view_as(p) for own, p in zip(parts, everything, strict=True)]

    def flat(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.detach().reshape(-1) for t in tensors])

    def gradient(rows: Any) -> tuple[Sequence[Tensor], Tensor]:
        found = job.hooks.loss(network, job.x[rows], job.y[rows], job.context)
        return torch.autograd.grad(found.mean(), everything, materialize_grads=True), found

    steps = visited = 0
    total = 0.0
    for _ in range(job.epochs):
        order = order_of(job.y, job.rng, settings.sampler)
        for start in range(0, len(order), settings.batch_size):
            rows = order[start : start + settings.batch_size]
            if steps == job.most_steps or (skips_one and len(rows) == 1):
                break
            slopes, found = gradient(rows)
            if job.hooks.perturb is not None:  # the gradient at w + ε, the step from w
                before = [t.detach().clone() for t in (*everything, *buffers)]
                ascent = job.hooks.perturb(flat(slopes), flat(everything), job.context)
                with torch.no_grad():
                    for p, change in zip(everything, like(ascent), strict=True):
                        p += change
                    slopes = [g.detach() for g in torch.enable_grad()(gradient)(rows)[0]]
                    for t, old in zip((*everything, *buffers), before, strict=True):
                        t.copy_(old)
            further = torch.zeros(()) if job.linear is None else job.linear
            added = like(further.expand(sum(p.numel() for p in everything)))
            for p, g, v in zip(everything, slopes, added, strict=True):
                p.grad = g + v + job.quadratic * p.detach()
            if settings.clip_norm is not None:
                nn.utils.clip_grad_norm_(trained, settings.clip_norm)
            optimizer.step()
            steps, visited = steps + 1, visited + len(rows)
            total += float(found.detach().sum())
    return Trained(FlatModel(network, CPU).vector, steps, visited, total / visited)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.3},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.5, "nesterov": True},
    "decay": {"weight_decay": 0.2},
    "adam": {"name": "adam", "lr": 0.02},
    "adam, decay": {"name": "adam", "lr": 0.02, "betas": [0.5, 0.7], "weight_decay": 0.1},
    "adamw, decay": {"name": "adamw", "lr": 0.02, "weight_decay": 0.3},
    # PyTorch's own default is 0.01, ours is none.
    "adamw": {"name": "adamw", "lr": 0.02},
}
TWICE = {"local_epochs": 2}
RAGGED = (9, 4, 8, 1)
CASES: dict[str, Case] = {
    **{f"{n}, autograd": Case(n) for n in NETWORKS},
    **{
        f"{n}, written out": Case(n, "classification", terms=True, optimizer=OPTIMIZERS["decay"])
        for n in NETWORKS
    },
    **{
        f"{loss}, {n}": Case(n, loss, terms=True, optimizer=OPTIMIZERS["decay"])
        for loss in LOSSES
        if loss != "classification"
        for n in ("mlp", "cnn", "batch norm", "tied weights", "a layer that remembers")
    },
    **{
        f"{name}, mlp": Case(sizes=RAGGED, optimizer=optimizer, train=TWICE)
        for name, optimizer in OPTIMIZERS.items()
    },
    **{
        f"{name}, {n}": Case(n, sizes=(9, 4, 8), optimizer=OPTIMIZERS[name], train=TWICE)
        for name in ("momentum", "adamw, decay")
        for n in ("batch norm", "dropout")
    },
    **{
        f"perturbed, {n}": Case(n, sizes=RAGGED, perturbed=True, optimizer={"momentum": 0.5})
        for n in ("mlp", "cnn", "dropout", "a frozen layer")
    },
    "perturbed, batch norm": Case("batch norm", perturbed=True, terms=True),
    **{
        f"the last layer, {name}": Case(sizes=RAGGED, part="4", optimizer=optimizer, terms=True)
        for name, optimizer in OPTIMIZERS.items()
        if "weight_decay" in optimizer
    },
    **{
        f"clipped, {part or 'all'}": Case(
            sizes=RAGGED, part=part, terms=True, train={"clip_norm": 0.2}, optimizer={"lr": 0.5}
        )
        for part in ("", "4")
    },
    "terms with momentum": Case(
        sizes=RAGGED, loss="weighted", terms=True, optimizer={"momentum": 0.5}, train=TWICE
    ),
    "clipped, with dropout": Case("dropout", sizes=RAGGED, train={"clip_norm": 0.2, **TWICE}),
    "steps": Case(sizes=(4, 7, 20), train={"local_steps": 4}),
    "balanced": Case(sizes=(4, 7, 20), train={"sampler": "balanced", **TWICE}),
}


def loop(case: Case) -> list[tuple[Trained, Tensor]]:
    """What each client comes to in the loop, and torch's generator afterwards."""
    found = []
    for k in range(len(case.sizes)):
        job = case.job_of(k, PLAIN_LOSSES.get(case.loss))
        network = case.network_of(k)
        torch.manual_seed(k)
        done = by_hand(network, job, case.settings, case.part)
        found.append((done, torch.get_rng_state()))
    return found


expected = cache(lambda name: loop(CASES[name]))


# the ways of making steps


def alone(case: Case, settings: Train) -> list[tuple[Trained, Tensor]]:
    model, found = FlatModel(case.network_of(0), CPU), []
    for k in range(len(case.sizes)):
        job = case.job_of(k)
        torch.manual_seed(k)
        done = train(model, job, settings)
        assert torch.equal(done.weights, model.vector)
        found.append((done, torch.get_rng_state()))
    return found


def in_parts(case: Case, settings: Train) -> list[tuple[Trained, Tensor]]:
    return alone(case, settings.model_copy(update={"accumulate": 2}))


def flat(case: Case, settings: Train) -> list[tuple[Trained, Tensor]]:
    """By the gradient of all layers, which clipping needs; this bound changes nothing."""
    return alone(case, settings.model_copy(update={"clip_norm": 1e9}))


def stacked(
    case: Case, settings: Train, stack: Stack | None = None
) -> list[tuple[Trained, Tensor]]:
    model, states = FlatModel(case.network_of(0), CPU), []
    before, clients = model.vector.clone(), range(len(case.sizes))
    for k in clients:
        torch.manual_seed(k)
        states.append(torch.get_rng_state())
    stack = stack or Stack(model)
    done, after = stack.train([case.job_of(k) for k in clients], settings, states)
    assert torch.equal(model.vector, before)  # the network for one client is not touched
    return list(zip(done, after, strict=True))


def capturing(case: Case) -> Stack:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "available", lambda device: True)
        return Stack(FlatModel(case.network_of(0), CPU))


def captured(case: Case, settings: Train) -> list[tuple[Trained, Tensor]]:
    """In graphs: the third time, all is replayed."""
    fake, eager = FakeGraphs(), stacked(case, settings)
    stack = capturing(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "capture", fake.capture)
        found = [stacked(case, settings, stack) for _ in range(3)]
    for again in found:
        for (one, drawn), (other, also) in zip(again, eager, strict=True):
            assert torch.equal(one.weights, other.weights)
            assert (one.loss, one.steps, one.visited) == (other.loss, other.steps, other.visited)
            assert torch.equal(drawn, also)
    assert stack.notices == set()
    assert (fake.replayed > 0) == ("dropout" not in case.network)
    return found[-1]


def ways(case: Case) -> Iterator[Callable[[Case, Train], list[tuple[Trained, Tensor]]]]:
    yield alone
    vmapped = case.loss in ("losses", "weighted", "classification")
    if case.network in STACKED and vmapped:
        yield stacked
        yield captured
    if case.network in ("mlp", "cnn", "tied weights") and vmapped:
        yield in_parts  # with batch norm and dropout, parts differ from the whole
    if case.loss == "losses" and not case.train and not case.optimizer:
        yield flat


def agree(
    found: Sequence[tuple[Trained, Tensor]], wanted: Sequence[tuple[Trained, Tensor]]
) -> None:
    for (one, drawn), (other, also) in zip(found, wanted, strict=True):
        assert (one.steps, one.visited) == (other.steps, other.visited)
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        torch.testing.assert_close(one.weights, other.weights, rtol=1e-3, atol=2e-5)
        assert torch.equal(drawn, also)


# By night all cases are captured, each of which is trained four times.
CAPTURED = {
    *("mlp, autograd", "dropout, autograd", "terms with momentum", "perturbed, mlp"),
    *("adam, mlp", "steps", "cnn, written out"),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(
            *(n, way),
            id=f"{way.__name__}: {n}",
            marks=[pytest.mark.night] * (way is captured and n not in CAPTURED),
        )
        for n in CASES
        for way in ways(CASES[n])
    ],
)
def test_steps_are_those_of_the_loop(name: str, way: Any) -> None:
    agree(way(CASES[name], CASES[name].settings), expected(name))


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    batch_size=st.integers(1, 6),
    local_epochs=st.integers(1, 3),
    parts=st.integers(1, 7),
)
@examples(15)
def test_any_sizes(sizes: list[int], batch_size: int, local_epochs: int, parts: int) -> None:
    train = {"batch_size": batch_size, "local_epochs": local_epochs}
    case = Case(sizes=tuple(sizes), train=train)
    wanted = loop(case)
    agree(stacked(case, case.settings), wanted)
    agree(alone(case, case.settings.model_copy(update={"accumulate": parts})), wanted)


def other_jobs(V: int, loss: str, batch_size: int = 3) -> Case:
    return Case(loss=loss, sizes=(6, 4, 6)[:V], train={"batch_size": batch_size})


def test_graphs_are_captured_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, case = FakeGraphs(), other_jobs(3, "losses")
    stack, counts = capturing(case), list[tuple[int, int]]()
    monkeypatch.setattr(graphs, "capture", fake.capture)
    # Steps of three clients, 3 and 3 (the last one's is padded); of one client; other functions.
    for each in (case, case, case, other_jobs(1, "losses"), other_jobs(1, "losses")):
        agree(stacked(each, each.settings, stack), loop(each))
        counts.append((fake.captured, fake.replayed))
    assert counts == [(1, 1), (1, 3), (1, 5), (2, 6), (2, 8)]
    for each in (other_jobs(1, "weighted"), other_jobs(1, "losses", 2), other_jobs(1, "losses")):
        agree(stacked(each, each.settings, stack), loop(each))
        counts.append((fake.captured, fake.replayed))
    assert counts[5:] == [(3, 9), (4, 11), (4, 13)]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("operation not permitted when stream is capturing\nmore"), "RuntimeError: "),
        # It must not change how many clients are trained at once.
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError: CUDA out of memory"),
        (None, "a replay has other gradients"),
    ],
)
def test_what_cannot_be_captured_is_computed_as_before(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, words: str
) -> None:
    fake, case, tries = FakeGraphs(broken=True), other_jobs(3, "losses"), list[int]()

    def failing(gradient: Any) -> Any:
        tries.append(1)
        if error is not None:
            raise error
        return fake.capture(gradient)

    stack = capturing(case)
    monkeypatch.setattr(graphs, "capture", failing)
    for _ in range(3):
        agree(stacked(case, case.settings, stack), loop(case))
    for (one, _), (other, _) in zip(
        stacked(case, case.settings, stack), stacked(case, case.settings), strict=True
    ):
        assert torch.equal(one.weights, other.weights)
    (line,) = stack.notices
    assert line.startswith(f"steps of stacks are not captured in CUDA graphs: {words}")
    assert "\n" not in line
    assert len(tries) == 1


@dataclass(frozen=True)
class Distilling(Case):
    """Clients that stay near the outputs of the weights from which they start."""

    def job_of(self, k: int, loss: Callable[..., Tensor] | None = None) -> TrainingJob:
        def distilled(network: nn.Module, x: Tensor, y: Tensor, context: Context) -> Tensor:
            away = network(x) - context["before"]
            return cross_entropy(network(x), y, reduction="none") + away.square().sum(dim=-1)

        job = super().job_of(k, distilled)
        hooks = replace(job.hooks, prepare=lambda network, x, context: {"before": network(x)})
        return replace(job, hooks=hooks)


@pytest.mark.parametrize("way", [in_parts, stacked, captured])
def test_what_is_prepared_is_of_a_client_s_own_weights(way: Any) -> None:
    case = Distilling(sizes=(9, 4, 7), train=TWICE)
    agree(way(case, case.settings), alone(case, case.settings))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_relu_after_max_pooling_is_relu_before_it(layout: torch.memory_format) -> None:
    draws = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(3, 4, 9, 9, generator=draws)).round() / 2  # with ties
    for pool in (
        *(nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 1)),
        *(nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, dilation=2)),
    ):
        one, other = (x.contiguous(memory_format=layout).requires_grad_() for _ in range(2))
        before, after = pool(torch.relu(one)), torch.relu(pool(other))
        assert torch.equal(before, after)
        upstream = torch.randn(before.shape, generator=draws)
        (of_one,) = torch.autograd.grad(before, one, upstream)
        (of_other,) = torch.autograd.grad(after, other, upstream)
        assert torch.equal(of_one, of_other), pool


@pytest.mark.parametrize("way", [alone, stacked])
def test_in_bfloat16_steps_are_nearly_the_same(way: Any) -> None:
    case = Case(sizes=(9, 4), optimizer={"lr": 0.2, "momentum": 0.5}, train=TWICE)
    rounded = way(case, case.settings.model_copy(update={"precision": "bfloat16"}))
    for (one, _), (other, _) in zip(rounded, loop(case), strict=True):
        assert one.weights.dtype == torch.float32
        assert not torch.equal(one.weights, other.weights)
        torch.testing.assert_close(one.weights, other.weights, rtol=0.1, atol=0.02)


def test_dropout_drops_what_pytorch_drops() -> None:
    for plain in (nn.Dropout(0.0), nn.Dropout(0.3), nn.Dropout(1.0), nn.Dropout2d(0.5)):
        x = torch.ones(4, 6, 3, 3)
        torch.manual_seed(3)
        expected = plain(x)
        ours = FlatModel(nn.Sequential(plain), CPU).module
        torch.manual_seed(3)
        assert torch.equal(ours.train()(x), expected)
        assert torch.equal(ours.eval()(x), x)


def test_a_dropout_of_the_user_s_own_stays() -> None:
    class Times7(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            return 7 * x

    model = FlatModel(nn.Sequential(Times7(0.5), nn.Linear(2, 2)), CPU)
    assert isinstance(model.module[0], Times7)  # type: ignore[index]


# what is refused, or done in another way


def test_batch_norm_needs_two_examples() -> None:
    case = Case("batch norm", sizes=(1,))
    with pytest.raises(
        ValueError,
        match="batch norm needs two training examples, and the client has one; raise partition",
    ):
        alone(case, case.settings)


@pytest.mark.parametrize("way", [alone, flat])
def test_what_is_frozen_later_cannot_be_trained(way: Any) -> None:
    def freezing(network: nn.Module, *batch: Any) -> Tensor:
        next(network.parameters()).requires_grad_(False)
        return losses(network, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LOSSES, "losses", freezing)
        with pytest.raises(RuntimeError, match="does not require grad"):
            way(Case(), Case().settings)


def made_by_layers(network: str, loss: Callable[..., Tensor]) -> bool:
    model, job = FlatModel(Case(network).network_of(0), CPU), Case(network).job_of(0)
    before = model.vector.clone()
    of_batch = partial(loss, model.module, job.x, job.y, job.context)
    _, gradient = LayerwiseSgd(model).step(of_batch, lr=0.1)
    assert "forward" not in vars(model.module)
    assert (gradient is None) == (not torch.equal(model.vector, before))
    return gradient is None


def test_which_networks_and_losses_go_layer_by_layer() -> None:
    assert {n for n in NETWORKS if not made_by_layers(n, losses)} == NOT_BY_LAYERS
    assert {n for n, loss in LOSSES.items() if made_by_layers("mlp", loss)} == LOSSES_BY_LAYERS
    # What a layer has kept is another way to the loss.
    assert not made_by_layers("a layer that remembers", remembered)


@pytest.mark.parametrize("network", ["mlp", "cnn", "batch norm"])
def test_a_gradient_that_is_written_out_is_autograd_s_to_the_bit(
    network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, step_to = list[str](), LayerwiseSgd.step_to

    def note(self: LayerwiseSgd, *arguments: Any) -> Tensor:
        asked.append(loss)
        return step_to(self, *arguments)

    monkeypatch.setattr(LayerwiseSgd, "step_to", note)
    found = {}
    for loss in ("losses", "classification", "halved", "squared", "class weights"):
        case = Case(network, loss, terms=True)
        ((found[loss], _),) = alone(case, case.settings)
    assert set(asked) == {"classification"}
    assert torch.equal(found["classification"].weights, found["losses"].weights)


def test_labels_of_a_byte_are_classes_as_well() -> None:
    logits, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    whole, bytes_ = (_cross_entropy(logits, labels) for labels in (y, y.to(torch.uint8)))
    assert all(torch.equal(a, b) for a, b in zip(whole, bytes_, strict=True))


def test_a_network_that_was_hooked_later_does_not_run_as_built() -> None:
    model = FlatModel(mlp(), CPU)
    by_layers = LayerwiseSgd(model)
    assert by_layers.runs_as_built()
    handle = model.module.register_forward_hook(lambda module, inputs, z: 2 * z)
    assert not by_layers.runs_as_built()
    handle.remove()
    assert by_layers.runs_as_built()
    model.restrict_classes([0, 2])
    assert not by_layers.runs_as_built()


def odd(way: Callable[[Tensor, nn.Module], Tensor]) -> nn.Module:
    """A linear layer, and something that a stack cannot do."""
    return Written(lambda own, x: way(x.flatten(1), own.linear), linear=nn.Linear(32, CLASSES))


NOT_STACKED: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (mlp, {"accumulate": 2}, "train.accumulate computes gradients in parts"),
    (
        NETWORKS["batch norm"],
        {},
        "layer '1' (BatchNorm2d) mixes examples or keeps running statistics",
    ),
    (
        lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(32, track_running_stats=False), mlp()),
        {},
        "layer '1' (BatchNorm1d) mixes examples or keeps running statistics",
    ),
    *(
        (
            lambda share=share: odd(lambda x, layer: layer(x - share * x.mean(dim=0))),
            {},
            "training in a stack gives other weights than training alone",
        )
        for share in (3.0, 0.05)
    ),
    (lambda: odd(lambda x, layer: layer(x if layer(x).sum() > 0 else 2 * x)), {}, "vmap"),
    # Dropout that is called as a function: vmap cannot tell whose masks it draws.
    (lambda: odd(lambda x, layer: dropout(layer(x), 0.5)), {}, "vmap"),
]


def why_not(model: FlatModel, **fields: Any) -> str | None:
    torch.manual_seed(0)
    x, y = torch.randn(5, *SHAPE), torch.arange(5) % CLASSES
    return Stack(model).why_not(x, y, Train(**fields), losses)


@pytest.mark.parametrize(("build", "fields", "words"), NOT_STACKED)
def test_what_cannot_be_stacked_says_why(
    build: Callable[[], nn.Module], fields: dict[str, Any], words: str
) -> None:
    torch.manual_seed(0)
    model = FlatModel(build(), CPU)
    if words == "vmap":
        with pytest.raises(RuntimeError, match=words):
            why_not(model, **fields)
    else:
        assert why_not(model, **fields) == words


@pytest.mark.parametrize("network", sorted(STACKED))
def test_what_can_be_stacked_has_no_obstacle(network: str) -> None:
    model = FlatModel(NETWORKS[network](), CPU)
    before = model.vector.clone()
    assert why_not(model) is None
    assert torch.equal(model.vector, before)


# how images lie in memory


def test_images_are_trained_channels_last_where_networks_take_them_so() -> None:
    seen: dict[str, set[bool]] = {}
    for name in ("cnn", "a view of memory", "mlp"):
        case, seen[name] = Case(name, sizes=(6,)), set()
        model = FlatModel(case.network_of(0), CPU)
        model.module.register_forward_pre_hook(
            lambda _, inputs, own=seen[name]: own.add(inputs[0].stride()[-1] != 1)
        )
        train(model, case.job_of(0), case.settings)
    assert seen == {"cnn": {True}, "a view of memory": {True, False}, "mlp": {False}}


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "last"),
    [(7, 1, 2, False), (8, 1, 2, True), (2, 1, 1, True), (2, 3, 2, True)],
)
def test_images_stay_as_they_are_where_the_backward_pass_would_overrun(
    channels: int, kernel: int, stride: int, last: bool
) -> None:
    first = nn.Conv2d(3, channels, 3, padding=1)
    second = nn.Conv2d(channels, 4, kernel, stride, padding=kernel // 2)
    network = nn.Sequential(first, second, nn.Flatten(), nn.LazyLinear(3))
    network(torch.zeros(1, 3, 4, 4))
    x = FlatModel(network, CPU).arranged(torch.zeros(2, 3, 4, 4))
    assert x.is_contiguous(memory_format=torch.channels_last) is last
