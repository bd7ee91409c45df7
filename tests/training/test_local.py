"""Local training against a plain PyTorch loop, and the random streams that it draws from."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from experiments import small_experiment
from fedsim.errors import BadInput
from fedsim.launch.prepare import prepare
from fedsim.objectives import Batch, Classification, evaluate
from fedsim.support.rng import keyed_rng, keyed_torch_rng, torch_seed
from fedsim.training import FlatModel, Hooks, Train, TrainingJob
from fedsim.training import train as train_task
from fedsim.training.local import epoch_order

CROSS_ENTROPY = Classification().loss
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks this small only wait for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def batch_norm_net() -> nn.Module:
    # Without the bias that batch norm takes away again: Adam would follow its rounding errors.
    first = nn.Linear(5, 8, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def examples(n: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(n)
    return torch.randn(n, 5), torch.randint(3, (n,))


def settings(optimizer: dict[str, Any], **fields: Any) -> Train:
    return Train.model_validate({"optimizer": optimizer, **fields})


def train(
    flat: FlatModel,
    x: Tensor,
    y: Tensor,
    section: Train,
    rng: np.random.Generator,
    context: Mapping[str, Tensor] | None = None,
    linear: Tensor | None = None,
    quadratic: float = 0.0,
    **hooks: Any,
) -> tuple[int, float]:
    """Local training from where the model is, at the optimiser's own learning rate."""
    start, lr = flat.vector.clone(), section.optimizer.lr
    done = train_task(
        flat,
        TrainingJob(
            start,
            x,
            y,
            lr,
            section.local_epochs,
            rng,
            Hooks(**{"loss": CROSS_ENTROPY, **hooks}),
            context or {},
            linear,
            quadratic,
        ),
        section,
    )
    assert torch.equal(done.weights, flat.vector)
    return done.steps, done.loss


def by_hand(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    rng: np.random.Generator,
    epochs: int,
    batch_size: int,
    skip_single: bool,
) -> tuple[int, float]:
    """The loop of any tutorial."""
    module.train()
    steps, losses = 0, []
    for _ in range(epochs):
        order = rng.permutation(len(y))
        for start in range(0, len(y), batch_size):
            batch = order[start : start + batch_size]
            if len(batch) == 1 and skip_single:
                continue
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            steps += 1
            losses += [loss.item()] * len(batch)
    return steps, float(np.mean(losses))


OPTIMIZERS: list[tuple[dict[str, Any], Any, dict[str, Any]]] = [
    ({"lr": 0.3}, torch.optim.SGD, {"lr": 0.3}),
    ({"lr": 0.1, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    ({"lr": 0.1, "weight_decay": 0.2}, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.2}),
    ({"name": "adam", "lr": 0.02}, torch.optim.Adam, {"lr": 0.02}),
    (
        {"name": "adam", "lr": 0.02, "betas": [0.5, 0.7], "weight_decay": 0.1},
        torch.optim.Adam,
        {"lr": 0.02, "betas": (0.5, 0.7), "weight_decay": 0.1},
    ),
    (
        {"name": "adamw", "lr": 0.02, "weight_decay": 0.3},
        torch.optim.AdamW,
        {"lr": 0.02, "weight_decay": 0.3},
    ),
    # PyTorch's own default is 0.01, ours is none.
    ({"name": "adamw", "lr": 0.02}, torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.0}),
]


@pytest.mark.parametrize(("section", "optimizer", "keywords"), OPTIMIZERS)
@pytest.mark.parametrize("net", [plain_net, batch_norm_net])
@pytest.mark.parametrize(
    ("n", "batch_size"), [(20, 5), (23, 5), (21, 5), (3, 16)], ids=["even", "ragged", "one", "few"]
)
def test_train_is_the_plain_loop(
    net: Any, section: dict[str, Any], optimizer: Any, keywords: Any, n: int, batch_size: int
) -> None:
    torch.manual_seed(0)
    plain = net()
    flat = FlatModel(copy.deepcopy(plain), CPU)
    x, y = examples(n)
    expected = by_hand(
        plain,
        optimizer(plain.parameters(), **keywords),
        x,
        y,
        keyed_rng(7, "batches", 2, 5),
        epochs=3,
        batch_size=batch_size,
        skip_single=net is batch_norm_net,
    )
    steps, loss = train(
        flat,
        x,
        y,
        settings(section, local_epochs=3, batch_size=batch_size),
        keyed_rng(7, "batches", 2, 5),
    )
    assert steps == expected[0]
    assert loss == pytest.approx(expected[1], rel=1e-4)
    for name, tensor in flat.named(flat.vector).items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_optimiser_state_is_made_anew() -> None:
    x, y = examples(12)
    section = settings({"lr": 0.1, "momentum": 0.9}, batch_size=4)
    ends = []
    flat = FlatModel(plain_net(), CPU)
    start = flat.vector.clone()
    for _ in range(2):
        flat.load(start)
        train(flat, x, y, section, np.random.default_rng(0))
        ends.append(flat.weights())
    np.testing.assert_array_equal(*ends)


def test_a_single_example_cannot_train_batch_norm() -> None:
    flat = FlatModel(batch_norm_net(), CPU)
    x, y = examples(1)
    with pytest.raises(
        ValueError,
        match="batch norm needs two training examples, and the client has one; raise partition",
    ):
        train(flat, x, y, settings({}), np.random.default_rng(0))


def test_a_single_example_trains_what_has_none() -> None:
    flat = FlatModel(plain_net(), CPU)
    before = flat.weights()
    x, y = examples(1)
    assert train(flat, x, y, settings({}), np.random.default_rng(0))[0] == 1
    assert (flat.weights() != before).any()


# the hooks of methods


def test_a_linear_and_a_quadratic_term() -> None:
    """(0.5 / 2)·‖w − anchor‖² beside the cross-entropy."""
    torch.manual_seed(0)
    plain = plain_net()
    flat = FlatModel(copy.deepcopy(plain), CPU)
    anchor = torch.randn(flat.num_parameters)
    x, y = examples(10)

    section = settings({"lr": 0.1, "momentum": 0.5}, batch_size=4, local_epochs=2)
    steps, loss = train(
        *(flat, x, y, section, np.random.default_rng(3)),
        linear=-0.5 * anchor,
        quadratic=0.5,
    )

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    rng, seen = np.random.default_rng(3), []
    for _ in range(2):
        order = rng.permutation(10)
        for start in range(0, 10, 4):
            batch = order[start : start + 4]
            optimizer.zero_grad()
            task = nn.functional.cross_entropy(plain(x[batch]), y[batch])
            w = torch.cat([p.reshape(-1) for p in plain.parameters()])
            (task + 0.25 * ((w - anchor) ** 2).sum()).backward()
            optimizer.step()
            seen += [task.item()] * len(batch)
    assert steps == 6
    assert loss == pytest.approx(np.mean(seen), rel=1e-4)
    expected = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
    torch.testing.assert_close(flat.vector, expected, rtol=1e-4, atol=1e-6)


def test_loss_hook() -> None:
    torch.manual_seed(0)
    module = plain_net()
    doubled, plain = (FlatModel(copy.deepcopy(module), CPU) for _ in range(2))
    x, y = examples(9)

    def double(model: nn.Module, x: Tensor, y: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        return 2 * CROSS_ENTROPY(model, x, y, context)

    one = train(
        *(doubled, x, y, settings({"lr": 0.1}, batch_size=4), np.random.default_rng(0)),
        loss=double,
    )
    other = train(plain, x, y, settings({"lr": 0.2}, batch_size=4), np.random.default_rng(0))
    assert one == (other[0], pytest.approx(2 * other[1], rel=1e-5))
    torch.testing.assert_close(doubled.vector, plain.vector)


def test_perturb_hook() -> None:
    """The gradient at w + ε, the step from w, also where batch norm watches."""
    torch.manual_seed(0)
    plain = batch_norm_net()
    flat = FlatModel(copy.deepcopy(plain), CPU)
    x, y = examples(12)

    def ascend(g: Tensor, w: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        return 0.3 * g / g.norm(dim=-1, keepdim=True)

    section = settings({"lr": 0.1, "momentum": 0.5}, batch_size=4)
    train(flat, x, y, section, np.random.default_rng(3), perturb=ascend)

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    for batch in np.random.default_rng(3).permutation(12).reshape(3, 4):
        nn.functional.cross_entropy(plain(x[batch]), y[batch]).backward()
        watched = copy.deepcopy(dict(plain.named_buffers()))
        origin = [p.detach().clone() for p in plain.parameters()]
        length = torch.cat([p.grad.reshape(-1) for p in plain.parameters()]).norm()  # type: ignore[union-attr]
        with torch.no_grad():
            for p in plain.parameters():
                p += 0.3 * p.grad / length
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x[batch]), y[batch]).backward()
        with torch.no_grad():
            for p, before in zip(plain.parameters(), origin, strict=True):
                p.copy_(before)
        optimizer.step()
        optimizer.zero_grad()
        plain.load_state_dict(watched, strict=False)  # the second look counts for nothing
    for name, tensor in flat.named(flat.vector).items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer", [{"lr": 0.1, "weight_decay": 0.1}, {"name": "adamw", "weight_decay": 0.1}]
)
def test_only_a_part_is_trained(optimizer: dict[str, Any]) -> None:
    torch.manual_seed(0)
    flat = FlatModel(plain_net(), CPU)
    before = flat.vector.clone()
    part = flat.part("2")
    assert part == slice(5 * 8 + 8, flat.num_parameters)
    train(flat, *examples(10), settings(optimizer), np.random.default_rng(0), part=part)
    assert torch.equal(flat.vector[: part.start], before[: part.start])
    assert (flat.vector[part] != before[part]).all()


def test_parts_have_names_and_lie_side_by_side() -> None:
    flat = FlatModel(nn.ModuleDict({"a": plain_net(), "b": nn.Linear(2, 2)}), CPU)
    assert flat.part("a") == slice(0, 75)
    assert flat.part("b") == slice(75, 81)
    assert flat.part("a.2.bias") == slice(72, 75)
    with pytest.raises(ValueError, match="the network has no 'c' with contiguous"):
        flat.part("c")


@pytest.mark.parametrize("trained", ["all", "the last layer"])
def test_long_gradients_are_clipped(trained: str) -> None:
    """By the norm of what is trained, as PyTorch clips the parameters of its optimiser."""
    torch.manual_seed(0)
    plain = plain_net()
    flat = FlatModel(copy.deepcopy(plain), CPU)
    x, y = examples(8)
    section = settings({"lr": 0.5, "weight_decay": 0.1}, batch_size=4, clip_norm=0.2)
    part = slice(None) if trained == "all" else flat.part("2")
    train(flat, x, y, section, np.random.default_rng(0), part=part)
    parameters = list((plain if trained == "all" else plain[2]).parameters())  # type: ignore[index]
    optimizer = torch.optim.SGD(parameters, lr=0.5, weight_decay=0.1)
    norms = []
    for batch in np.random.default_rng(0).permutation(8).reshape(2, 4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x[batch]), y[batch]).backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.2)))
        optimizer.step()
    assert max(norms) > 0.2
    expected = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
    torch.testing.assert_close(flat.vector, expected, rtol=1e-4, atol=1e-5)


def test_the_learning_rate_decays_from_round_to_round() -> None:
    section = settings({"lr": 0.2}, lr_decay=0.5)
    assert [section.lr(t) for t in (1, 2, 3)] == [0.2, 0.1, 0.05]


# evaluation


@pytest.mark.parametrize("n", [1, 499, 500, 501, 1203])
@pytest.mark.parametrize("net", [plain_net, batch_norm_net])
def test_evaluate_is_one_big_batch(net: Any, n: int) -> None:
    torch.manual_seed(0)
    flat = FlatModel(net(), CPU)
    flat.module(torch.randn(50, 5))  # batch norm's statistics are not those of a new network
    before = flat.weights()
    x, y = examples(n)
    totals = evaluate(Classification(), flat.module, Batch(x, y))
    logits = flat.module.eval()(x).detach()
    chances = torch.softmax(logits.double(), dim=1)[torch.arange(n), y]
    assert totals["loss"] == pytest.approx(-float(torch.log(chances).sum()), rel=1e-4)
    assert totals["right"] == sum(int(row.argmax()) == int(label) for row, label in zip(logits, y))  # noqa: B905
    np.testing.assert_array_equal(flat.weights(), before)


# streams

names = st.tuples(
    st.integers(0, 2**40), st.text("ab/0", max_size=4), st.integers(-1, 20), st.integers(-1, 20)
)


@given(names, names)
def test_streams_go_by_name(one: Any, other: Any) -> None:
    def draws(name: Any) -> tuple[list[int], int, list[float]]:
        with keyed_torch_rng(*name):
            noise = torch.rand(4).tolist()
        return keyed_rng(*name).integers(2**62, size=4).tolist(), torch_seed(*name), noise

    assert draws(one) == draws(one)
    if one != other:
        assert all(a != b for a, b in zip(draws(one), draws(other), strict=True))


def test_streams_leave_no_trace() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(3), np.random.rand(3)
    torch.manual_seed(5)
    np.random.seed(5)
    with keyed_torch_rng(1, "init"):
        torch.rand(10)
    keyed_rng(1, "batches").random(10)
    with pytest.raises(ZeroDivisionError), keyed_torch_rng(1, "init"):
        torch.rand(10 // 0)
    assert torch.equal(torch.rand(3), expected[0])
    np.testing.assert_array_equal(np.random.rand(3), expected[1])


def test_training_draws_from_its_own_stream_only() -> None:
    x, y = examples(8)
    ends = []
    for global_seed in (1, 2):
        torch.manual_seed(0)
        flat = FlatModel(nn.Sequential(nn.Dropout(0.5), plain_net()), CPU)
        torch.manual_seed(global_seed)
        with keyed_torch_rng(0, "dropout", 1, 2):
            train(flat, x, y, settings({}), keyed_rng(0, "batches", 1, 2))
        ends.append(flat.weights())
    np.testing.assert_array_equal(*ends)


def test_local_steps_end_within_an_epoch() -> None:
    x, y = examples(10)
    torch.manual_seed(0)
    flat = FlatModel(nn.Sequential(nn.Linear(5, 3)), torch.device("cpu"))
    start = flat.vector.clone()
    order = np.random.default_rng(0)
    passes = [order.permutation(10) for _ in range(2)]
    batches = [own[i : i + 4] for own in passes for i in (0, 4, 8)][:4]
    for batch in batches:
        flat.module.zero_grad()
        nn.functional.cross_entropy(flat.module(x[batch]), y[batch]).backward()
        with torch.no_grad():
            for parameter in flat.module.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
    expected = flat.vector.clone()
    flat.load(start)
    section = settings({"lr": 0.1}, batch_size=4, local_steps=4)
    job = TrainingJob(
        start,
        *(x, y, 0.1, section.most_epochs, np.random.default_rng(0), Hooks(CROSS_ENTROPY)),
        most_steps=section.local_steps,
    )
    done = train_task(flat, job, section)
    assert (done.steps, done.visited) == (4, 14)
    torch.testing.assert_close(done.weights, expected)


def test_epochs_or_steps() -> None:
    with pytest.raises(ValueError, match="local_epochs=2 and local_steps=3 are both set; set one"):
        Train(local_epochs=2, local_steps=3)


def test_the_learning_rate_follows_its_schedule() -> None:
    def rates(rounds: int, **fields: Any) -> list[float]:
        section = settings({"lr": 0.5}, rounds=rounds, **fields)
        return [section.lr(t) for t in range(1, rounds + 1)]

    np.testing.assert_allclose(
        rates(4, schedule={"name": "cosine", "floor": 0.2}),
        [0.5 * (0.2 + 0.8 * (1 + np.cos(np.pi * k / 4)) / 2) for k in range(4)],
    )
    stepped = rates(6, schedule={"name": "step", "every": 2, "gamma": 0.5, "warmup": 2})
    np.testing.assert_allclose(stepped, [0.5 / 3, 1 / 3, 0.5, 0.5, 0.25, 0.25])
    np.testing.assert_allclose(rates(3, lr_decay=0.9, schedule={"warmup": 1}), [0.25, 0.45, 0.405])


def test_a_warmup_without_end() -> None:
    with pytest.raises(ValueError, match=r"schedule.warmup=3 must be less than rounds=3"):
        Train.model_validate({"rounds": 3, "schedule": {"warmup": 3}})


def ascend(g: Tensor, w: Tensor, context: Mapping[str, Tensor]) -> Tensor:
    return 0.1 * g / g.norm()


class TestGradients:
    """`train.accumulate`, `precision` and `sampler`, and class weights, on a small network."""

    X, Y = examples(23)

    def trained(self, loss: Any = CROSS_ENTROPY, perturb: Any = None, **fields: Any) -> Tensor:
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        flat = FlatModel(network, torch.device("cpu"))
        section = settings({"lr": 0.2, "momentum": 0.5}, batch_size=7, local_epochs=3, **fields)
        hooks = Hooks(loss, perturb)
        rng = np.random.default_rng(3)
        job = TrainingJob(flat.vector.clone(), self.X, self.Y, 0.2, 3, rng, hooks)
        return train_task(flat, job, section).weights

    @pytest.mark.parametrize("perturb", [None, ascend], ids=["plain", "perturbed"])
    def test_in_parts_they_are_the_same(self, perturb: Any) -> None:
        whole = self.trained(perturb=perturb)
        for parts in (2, 3, 50):
            in_parts = self.trained(perturb=perturb, accumulate=parts)
            torch.testing.assert_close(in_parts, whole, rtol=1e-4, atol=1e-6)

    def test_in_bfloat16_they_are_nearly_the_same(self) -> None:
        exact, rounded = self.trained(), self.trained(precision="bfloat16")
        assert not torch.equal(exact, rounded)
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.02)

    def test_classes_are_drawn_alike(self) -> None:
        y = torch.tensor([0] * 900 + [2] * 100)
        drawn = epoch_order(y, np.random.default_rng(0), Train(sampler="balanced"))
        assert len(drawn) == 1000
        assert (y[drawn] == 2).float().mean() == pytest.approx(0.5, abs=0.05)
        assert not np.array_equal(self.trained(), self.trained(sampler="balanced"))

    def test_losses_are_weighted_by_class(self) -> None:
        weights = (0.5, 0.0, 2.0)
        objective = Classification(class_weights=weights)
        network = nn.Linear(5, 3)
        found = objective.loss(network, self.X, self.Y, {})
        plain = nn.functional.cross_entropy(
            network(self.X), self.Y, weight=torch.tensor(weights), reduction="none"
        )
        torch.testing.assert_close(found, plain)
        weighted = self.trained(loss=objective.loss)
        assert not torch.allclose(weighted, self.trained(), rtol=1e-2)


def test_balanced_weights_are_one_on_average() -> None:
    made = small_experiment(
        partition={"kind": "iid", "clients": 5},
        objective={"name": "classification", "class_weights": "balanced"},
    )
    dataset, _, spec = prepare(made)
    assert isinstance(spec.objective, Classification)
    weights = np.array(spec.objective.class_weights)
    counts = np.bincount(dataset.y)
    np.testing.assert_allclose(weights * counts, weights[0] * counts[0])
    assert weights[dataset.y].mean() == pytest.approx(1)


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        (
            {"objective": {"name": "classification", "class_weights": [1, 2]}},
            "objective.class_weights: 2 weights for 10 classes: 0, 1",
        ),
        (
            {
                "data": {"name": "table", "target": "t"},
                "train": {"sampler": "balanced"},
            },
            "train.sampler=balanced needs classes, and the target here is a number",
        ),
    ],
)
def test_bad_input(sections: dict[str, Any], problem: str, tmp_path: Path) -> None:
    if "data" in sections:
        path = tmp_path / "table.csv"
        path.write_text("a,t\n" + "".join(f"{i},{i / 7}\n" for i in range(40)))
        sections = {**sections, "data": {**sections["data"], "path": str(path)}}
    made = small_experiment(partition={"kind": "iid", "clients": 5}, **sections)
    with pytest.raises(BadInput, match=problem):
        prepare(made)
