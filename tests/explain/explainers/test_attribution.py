"""Attributions: each against its formula, and what any of them must keep to."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from networks import Written, look_at
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fedsim.errors import ExperimentError
from fedsim.explain.explainers import attribution
from fedsim.explain.explainers.attribution import Attribution, attributions, heatmap
from fedsim.explain.explainers.gradients import GradientXInput, SmoothGrad
from fedsim.explain.explainers.lrp import Lrp
from fedsim.models import Classifier, models
from fedsim.training import FlatModel

COMPOSITES = ("epsilon_plus_flat", "epsilon_gamma_box", "epsilon")
# Attention rollout is for networks with attention; see test_attention.py.
NAMES = [name for name, _ in attributions.items() if name not in ("attention_rollout", "gradcam")]
OF_GRADIENTS = ("gradient", "gradient_x_input", "smoothgrad", "integrated_gradients")
CLASSES = 10


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def parse(name: str, **fields: Any) -> Attribution:
    found: Attribution = attributions.parse({"name": name, **fields})
    return found


def explain(name: str, network: nn.Module, x: Tensor, y: Tensor, **fields: Any) -> Tensor:
    return parse(name, **fields).relevance(network, x, y, rng())


def examples(shape: tuple[int, ...], n: int = 12) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    y = torch.arange(n) % CLASSES
    centres = torch.randn(CLASSES, shape[0], *[1] * (len(shape) - 1), generator=draw)
    return torch.randn(n, *shape, generator=draw) + centres[y], y


def network(name: str, shape: tuple[int, ...], **fields: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made: nn.Module = models.parse({"name": name, **fields}).build(shape, CLASSES)
    return made


def own_logit(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return network(x).gather(1, y[:, None])[:, 0]


def total(relevance: Tensor) -> Tensor:
    return relevance.flatten(1).sum(1)


def without_biases(network: nn.Module) -> nn.Module:
    """Remove what LRP loses relevance to: biases, and batch norm's once it is merged."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.zero_()
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            module.bias.data.zero_()
    return network


@cache
def trained_resnet() -> nn.Module:
    """Our ResNet8 with the statistics and weights of a few steps of training."""
    trained = network("resnet8", (3, 16, 16), width=4)
    x, y = examples((3, 16, 16), 32)
    optimizer = torch.optim.SGD(trained.parameters(), 0.05, momentum=0.9)
    for _ in range(8):
        optimizer.zero_grad()
        F.cross_entropy(trained(x), y).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return trained.eval()


@pytest.fixture
def resnet() -> nn.Module:
    return trained_resnet()


def torchvisions(block: str) -> nn.Module:
    resnet: Any = importlib.import_module("torchvision.models.resnet")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made: nn.Module = resnet.ResNet(getattr(resnet, block), [1] * 4, num_classes=CLASSES)
    return made


def pooled(pool: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), pool),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, CLASSES)),
        )


class Residual(nn.Module):
    """A residual block of a user's own, its sum written out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        joined: Tensor = self.relu(self.conv(x) + x)
        return joined


def residual() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        features = nn.Sequential(
            first, nn.ReLU(), Residual(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        return Classifier(features, nn.Linear(4, CLASSES, bias=False))


def own_canonizer() -> Any:
    """The canonizer for `Residual` that a user would write."""
    canonizers = importlib.import_module("zennit.canonizers")
    layer = importlib.import_module("zennit.layer")

    def with_sum(name: str, module: nn.Module) -> dict[str, Any] | None:
        if not isinstance(module, Residual):
            return None
        branches: Callable[[Tensor], Tensor] = lambda x: torch.stack([module.conv(x), x], -1)  # noqa: E731
        return {"forward": lambda x: module.relu(module.sum(branches(x))), "sum": layer.Sum()}

    return canonizers.AttributeCanonizer(with_sum)


def merging_canonizer() -> Any:
    canonizers = importlib.import_module("zennit.canonizers")
    return canonizers.NamedMergeBatchNorm([(["layers.1"], "layers.0")])


def no_canonizer() -> int:
    return 3


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (lambda: network("cnn", (1, 28, 28), channels=(3, 4)), (1, 28, 28)),
    "resnet8": (lambda: network("resnet8", (3, 32, 32), width=2), (3, 32, 32)),
    "mlp of images": (lambda: network("mlp", (3, 32, 32), hidden=(8,)), (3, 32, 32)),
    "mlp of vectors": (lambda: network("mlp", (7,), hidden=(8, 8)), (7,)),
    "projection": (
        lambda: network("cnn", (1, 28, 28), channels=(2, 2), projection=5),
        (1, 28, 28),
    ),
}


SUMMING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "maximum": (lambda: pooled(nn.MaxPool2d(2)), (3, 12, 12)),
    "mean": (lambda: pooled(nn.AvgPool2d(2)), (3, 12, 12)),
    "adaptive mean": (lambda: pooled(nn.AdaptiveAvgPool2d(3)), (3, 12, 12)),
    "resnet8": (trained_resnet, (3, 16, 16)),
    "torchvision": (lambda: torchvisions("BasicBlock"), (3, 32, 32)),
    "torchvision, deeper": (lambda: torchvisions("Bottleneck"), (3, 32, 32)),
    "residual": (residual, (3, 8, 8)),
}


@pytest.mark.parametrize("of", NETWORKS)
@pytest.mark.parametrize("name", NAMES)
def test_gives_signed_numbers_and_changes_nothing(name: str, of: str) -> None:
    make, shape = NETWORKS[of]
    net, (x, y) = make(), examples(shape, 6)
    net.train()
    next(net.children()).eval()  # modes differ from module to module
    next(net.parameters()).requires_grad_(False)
    before, kept = look_at(net), x.clone()
    drawn = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore
    chosen = parse(name)
    chosen.check_network(net)
    found = chosen.relevance(net, x, y, rng())
    assert (found.shape, found.dtype, found.device) == (x.shape, x.dtype, x.device)
    assert not found.requires_grad
    assert found.isfinite().all()
    assert found.min() < 0 < found.max()
    assert look_at(net) == before
    assert torch.equal(x, kept)
    assert not x.requires_grad
    assert torch.equal(drawn[0], torch.random.get_rng_state())
    assert np.array_equal(drawn[1], np.random.get_state()[1])  # type: ignore[arg-type]
    assert chosen.relevance(net, x[:0], y[:0], rng()).shape == (0, *shape)


@pytest.mark.parametrize("name", [*NAMES, "lrp box"])
def test_in_one_batch_in_many_or_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    box = {"name": "lrp", "composite": "epsilon_gamma_box"}
    chosen = parse(**box) if name == "lrp box" else parse(name)
    net, (x, y) = network("resnet8", (3, 8, 8), width=2), examples((3, 8, 8), 7)
    whole = chosen.relevance(net, x, y, rng())
    draws = rng()  # one stream, example after example
    alone = [chosen.relevance(net, x[i : i + 1], y[i : i + 1], draws) for i in range(7)]
    monkeypatch.setattr(attribution, "BATCH", 3)
    for parts in (torch.cat(alone), chosen.relevance(net, x, y, rng())):
        torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-4 * whole.abs().max().item())


def test_heatmaps_sum_over_channels() -> None:
    relevance = torch.randn(2, 3, 4, 5)
    assert torch.equal(heatmap(relevance), relevance[:, 0] + relevance[:, 1] + relevance[:, 2])
    assert heatmap(torch.ones(2, 1, 4, 5)).shape == (2, 4, 5)
    assert torch.equal(heatmap(relevance[:, 0, 0]), relevance[:, 0, 0])


class TestGradients:
    def test_smoothgrad_is_the_mean_of_noisy_gradients(self) -> None:
        """Of f = Σ x³, with gradient 3x²: its mean is 3(x² + σ²)."""

        cubes = Written(lambda _, x: (x**3).sum((1, 2, 3))[:, None])
        x = torch.zeros(2, 1, 4, 4)
        x[0, 0, 0, 0], x[1, 0, 0, 0] = 1, 3  # ranges 1 and 3
        chosen = SmoothGrad(noise=0.5, samples=2000)
        found = chosen.relevance(cubes, x, torch.zeros(2, dtype=torch.int64), rng())
        sigma = torch.tensor([0.5, 1.5]).view(2, 1, 1, 1)
        torch.testing.assert_close(found, 3 * (x**2 + sigma**2), rtol=0.15, atol=0)

    @pytest.mark.parametrize("name", OF_GRADIENTS)
    def test_any_differentiable_network(self, name: str) -> None:
        net = Written(
            lambda net, x: net.head(net.gru(net.norm(x))[0][:, -1]),
            norm=nn.LayerNorm(4),
            gru=nn.GRU(4, 6, batch_first=True),
            head=nn.Linear(6, CLASSES),
        )
        x, y = examples((5, 4), 3)
        parse(name).check_network(net)
        assert explain(name, net, x, y).abs().sum() > 0

    def test_a_network_that_cuts_the_gradient_is_refused(self) -> None:
        cut = Written(lambda net, x: net.head(x.detach()), head=nn.Linear(4, CLASSES))
        with pytest.raises(ExperimentError, match=r"gradient: .* cannot be differentiated"):
            explain("gradient", cut, *examples((4,), 2))


def test_random_is_uniform_and_knows_nothing_of_the_network() -> None:
    x, y = examples((3, 8, 8), 50)
    one, other = network("mlp", (3, 8, 8)), network("resnet8", (3, 8, 8), width=1)
    found = parse("random").relevance(one, x, y, rng(3))
    assert torch.equal(found, parse("random").relevance(other, 2 * x, y.flip(0), rng(3)))
    assert not torch.equal(found, parse("random").relevance(one, x, y, rng(4)))
    assert -1 <= found.min() < -0.99
    assert 0.99 < found.max() < 1
    assert found.mean().abs() < 0.03


class TestLrp:
    def test_follows_the_epsilon_rule(self) -> None:
        """Two layers, by the formula."""
        net, (x, y) = network("mlp", (6,), hidden=(8,)).double(), examples((6,))
        x, eps = x.double(), 0.1
        first, second = net.features[1], net.head
        z = first(x)
        a = z.relu()
        logits = second(a)
        top = F.one_hot(y, CLASSES) * logits

        def stable(z: Tensor) -> Tensor:
            return z + eps * torch.where(z >= 0, 1.0, -1.0)

        middle = a * ((top / stable(logits)) @ second.weight)
        expected = x * ((middle / stable(z)) @ first.weight)
        found = explain("lrp", net, x, y, composite="epsilon", epsilon=eps)
        torch.testing.assert_close(found, expected.detach())

    def test_follows_the_plus_and_flat_rules(self) -> None:
        """Two convolutions with one window each, beside which a column is left over."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            one, two, head = nn.Linear(18, 4), nn.Linear(4, 6), nn.Linear(6, CLASSES)
        first, second = nn.Conv2d(2, 4, 3, stride=3), nn.Conv2d(4, 6, 1)
        for conv, linear in ((first, one), (second, two)):
            conv.weight.data = linear.weight.data.view_as(conv.weight)
            conv.bias.data = linear.bias.data
        net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), head).double()
        x, y = examples((2, 3, 4))
        x = x.double()
        a = one.double()(x[..., :3].flatten(1)).relu()
        z = two.double()(a).relu()
        logits = head(z)
        ratio = (F.one_hot(y, CLASSES) * logits) / logits
        top = z * (ratio @ head.weight)
        w, b = two.weight.clamp(min=0), two.bias.clamp(min=0)
        middle = a * ((top / (a @ w.T + b + 1e-6)) @ w)
        expected = (middle.sum(1) / 18).view(-1, 1, 1, 1).expand(-1, 2, 3, 3)
        expected = F.pad(expected, (0, 1))
        torch.testing.assert_close(
            explain("lrp", net, x, y), expected.detach(), rtol=1e-4, atol=1e-6
        )

    @pytest.mark.parametrize("composite", COMPOSITES)
    @pytest.mark.parametrize("of", SUMMING)
    def test_relevances_sum_to_the_logit(self, of: str, composite: str) -> None:
        """Without biases, up to the stabilisers, 1e-6 in each denominator."""
        make, shape = SUMMING[of]
        net, (x, y) = without_biases(copy.deepcopy(make()).eval()), examples(shape, 4)
        own = f"{__name__}:own_canonizer" if of == "residual" else None
        chosen, before = Lrp(composite=composite, canonizer=own), look_at(net)
        chosen.check_network(net)
        found, logit = total(chosen.relevance(net, x, y, rng())), own_logit(net, x, y)
        # z⁺ loses what reaches an output without any positive product, and outputs of a residual
        # branch may be negative.
        lossy = of == "resnet8" and composite == "epsilon_plus_flat"
        assert ((found - logit) / logit).abs().max() < (0.08 if lossy else 5e-3)
        assert look_at(net) == before

    @pytest.mark.parametrize("shape", [(3, 16, 16), (1, 28, 28)])
    def test_epsilon_is_by_gradient(self, shape: tuple[int, ...], resnet: nn.Module) -> None:
        """As it must be for ε → 0 on a ReLU network, whatever its biases (batch norm's too).

        In double precision; Zennit keeps 1e-6 in the denominators of sums and pooling.
        """
        net = resnet if shape == (3, 16, 16) else network("cnn", shape)
        net, (x, y) = copy.deepcopy(net).double(), examples(shape)
        x = x.double()
        found = explain("lrp", net, x, y, composite="epsilon", epsilon=1e-12)
        expected = GradientXInput().relevance(net, x, y, rng())
        assert (found - expected).norm() < 5e-3 * expected.norm()

    @pytest.mark.parametrize(
        ("layer", "norm", "shape"),
        [
            (nn.Linear(4, 6), nn.BatchNorm1d(6), (4,)),
            (nn.Linear(4, 6, bias=False), nn.SyncBatchNorm(6), (4,)),
            (nn.Conv1d(4, 6, 2), nn.BatchNorm1d(6), (4, 5)),
            (nn.Conv2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6), (4, 5, 5)),
            (nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3, eps=0.1), (2, 3, 3, 3)),
            (nn.ConvTranspose1d(4, 6, 2), nn.BatchNorm1d(6), (4, 5)),
            (nn.ConvTranspose2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), (4, 3, 3)),
            (nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), (4, 3, 3)),
        ],
    )
    def test_batch_norm_is_merged_without_zennit(
        self,
        layer: nn.Module,
        norm: nn.Module,
        shape: tuple[int, ...],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Its versions differ: 0.5 leaves √(1 + eps), 1.0 keeps parameters unmerged."""
        canonizers = importlib.import_module("zennit.canonizers")
        monkeypatch.delattr(canonizers, "SequentialMergeBatchNorm")
        monkeypatch.delattr(canonizers.MergeBatchNorm, "merge_batch_norm")
        generator = torch.Generator().manual_seed(0)
        for values in (*norm.parameters(), norm.running_mean, norm.running_var):
            values.data.uniform_(0.5, 2, generator=generator)
        net = nn.Sequential(layer, norm, nn.ReLU()).double().eval()
        x = torch.rand((3, *shape), generator=generator, dtype=torch.float64) - 0.5
        merged = Lrp()._canonised(net)
        assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in merged.modules())
        torch.testing.assert_close(merged(x), net(x), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("bias", [True, False])
    def test_a_users_canonizer_merges_what_is_defined_elsewhere(self, bias: bool) -> None:
        norm = nn.BatchNorm1d(4)
        norm.running_mean.fill_(1.0)
        layers = norm, nn.Linear(4, 4, bias=bias), nn.ReLU(), nn.Linear(4, 2)
        net = Backwards(*layers, order=(1, 0, 2, 3))
        x, y = examples((4,), 5)
        chosen = Lrp(composite="epsilon", canonizer=f"{__name__}:merging_canonizer")
        found = chosen.relevance(net, x, y % 2, rng())
        expected = GradientXInput().relevance(net, x, y % 2, rng())
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)

    def test_the_box_is_each_images_own_or_the_one_given(self) -> None:
        """One convolution that sees all of its input, by the formula."""
        net = nn.Sequential(nn.Conv2d(2, CLASSES, 3), nn.Flatten()).double()
        x, y = examples((2, 3, 3))
        x = x.double()
        w = net[0].weight[y].detach()

        def expected(low: Tensor, high: Tensor) -> Tensor:
            z = w * x - w.clamp(min=0) * low - w.clamp(max=0) * high
            return z / total(z).view(-1, 1, 1, 1) * own_logit(net, x, y).view(-1, 1, 1, 1)

        found = explain("lrp", net, x, y, composite="epsilon_gamma_box")
        own = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
        torch.testing.assert_close(found, expected(*own), rtol=1e-4, atol=1e-7)
        box: dict[str, Any] = {"low": (-5, -6), "high": (7, 8)}
        found = explain("lrp", net, x, y, composite="epsilon_gamma_box", **box)
        low, high = (torch.tensor(box[k]).view(1, 2, 1, 1) for k in ("low", "high"))
        torch.testing.assert_close(found, expected(low, high), rtol=1e-4, atol=1e-7)

    def test_what_is_no_canonizer(self) -> None:
        for name in ("no_canonizer", "Residual"):
            with pytest.raises(ValidationError):
                parse("lrp", canonizer=f"{__name__}:{name}")

    def test_a_box_of_other_channels(self) -> None:
        net = nn.Sequential(nn.Conv2d(3, CLASSES, 8), nn.Flatten())
        box: dict[str, Any] = {"low": (0, 0), "high": (1, 1)}
        with pytest.raises(ExperimentError, match="2 values, but the inputs have 3 channels"):
            explain("lrp", net, *examples((3, 8, 8), 2), composite="epsilon_gamma_box", **box)


def scaled() -> nn.Module:
    """A parameter outside of a layer."""
    made = Written(lambda net, x: net.linear(net.scale * x), linear=nn.Linear(4, CLASSES))
    made.scale = nn.Parameter(torch.ones(()))
    return made


class Backwards(nn.Module):
    """Layers called in another order than they are defined in."""

    def __init__(self, *layers: nn.Module, order: tuple[int, ...]) -> None:
        super().__init__()
        self.layers, self.order = nn.ModuleList(layers), order

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = self.layers[i](x)
        return x


class TestOcclusion:
    @pytest.mark.parametrize("size", [5, 8])
    def test_squares_of_an_image(self, resnet: nn.Module, size: int) -> None:
        x, y = examples((3, 16, 16), 2)
        found = explain("occlusion", resnet, x, y, size=size)
        whole = own_logit(resnet, x, y)
        for i in range(0, 16, size):
            for j in range(0, 16, size):
                without = x.clone()
                without[:, :, i : i + size, j : j + size] = 0
                lost = whole - own_logit(resnet, without, y)
                part = found[:, :, i : i + size, j : j + size]
                torch.testing.assert_close(part.sum(dim=(1, 2, 3)), lost, atol=1e-5, rtol=1e-5)
                assert (part == part[:, :1, :1, :1]).all()

    def test_entries_of_a_vector(self) -> None:
        net = nn.Linear(6, CLASSES)
        x, y = examples((6,), 5)
        found = explain("occlusion", net, x, y)  # of a linear network: gradient times input
        torch.testing.assert_close(found, (x * net.weight[y]).detach())

    def test_words_of_a_document_are_left_out(self) -> None:
        def order(_: Any, x: Tensor) -> Tensor:
            """Logits that depend on where words stand."""
            score = (x * torch.arange(1, x.shape[1] + 1)).sum(dim=1).float()
            return torch.stack([score, -score], dim=1)

        x = torch.tensor([[5, 2, 9, 0], [4, 0, 0, 0], [3, 3, 1, 7]], dtype=torch.int32)
        y = torch.tensor([0, 1, 0])
        net = Written(order)
        found = explain("occlusion", net, x, y)
        assert found.dtype == torch.float32
        whole = own_logit(net, x, y)
        for i in range(x.shape[1]):  # those after it move up
            without = F.pad(torch.cat([x[:, :i], x[:, i + 1 :]], dim=1), (0, 1))
            lost = whole - own_logit(net, without, y)
            assert torch.equal(found[:, i], lost)


class TestRefusals:
    @pytest.mark.parametrize(
        ("net", "named"),
        [
            (nn.Sequential(nn.GRU(4, 4), nn.Linear(4, 2)), "layer 0 (GRU)"),
            (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "layer 1 (LayerNorm)"),
            (nn.Sequential(nn.Linear(4, 4), nn.Softmax(1)), "layer 1 (Softmax)"),
            (nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), "layer 1 (Sigmoid)"),
            (nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), "layer 1 (GroupNorm)"),
            (nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)), "layer 0 (Embedding)"),
            (Classifier(nn.Sequential(nn.GRU(4, 4)), nn.Linear(4, 2)), "layer features.0 (GRU)"),
            (nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)), "layer 0 (BatchNorm2d)"),
            (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(3)), "layer 1 (BatchNorm1d)"),
            (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)), "(BatchNorm1d)"),
            (
                nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)),
                "layer 1 (BatchNorm1d)",
            ),
            (nn.MultiheadAttention(4, 1), "the network itself (MultiheadAttention)"),
            (scaled(), "the network itself (Written)"),
        ],
    )
    def test_layers_without_a_rule_are_named(self, net: nn.Module, named: str) -> None:
        with pytest.raises(ExperimentError, match=re.escape(named)) as refusal:
            parse("lrp").check_network(net)
        assert "gradient" in str(refusal.value)  # what would do
        for name in (*OF_GRADIENTS, "random"):
            parse(name).check_network(net)

    def test_dropout_of_any_sort_and_empty_shortcuts_pass(self) -> None:
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Sequential(), nn.AlphaDropout())
        parse("lrp").check_network(net)
        parse("lrp").check_network(FlatModel(net, torch.device("cpu")).module)

    @pytest.mark.parametrize("name", sorted(set(NAMES) - {"occlusion", "random"}))
    def test_integers(self, name: str) -> None:
        line = "the network looks up no vectors of words"
        if not dict(attributions.items())[name].documents:
            line = "needs inputs of floating point"
        with pytest.raises(ExperimentError, match=f"{name}: {line}"):
            explain(name, nn.Linear(4, 2), torch.ones(2, 4, dtype=torch.int64), torch.zeros(2))

    @pytest.mark.parametrize(
        ("layers", "order", "named"),
        [
            ("LRL", (0, 1, 0, 1, 2), r"layer layers.0 \(Linear\): called more than once"),
            ("LRL", (2, 1, 0), r"layer layers.0 \(Linear\): defined first, so the first rule"),
            ("LRLNL", (0, 3, 1, 2, 4), "the network's output changes"),
        ],
    )
    def test_layers_in_another_order(
        self, layers: str, order: tuple[int, ...], named: str
    ) -> None:
        norm = nn.BatchNorm1d(4)
        norm.running_mean.fill_(1.0)
        norm.weight.data.fill_(3.0)
        makes = {"L": lambda: nn.Linear(4, 4), "R": nn.ReLU, "N": lambda: norm}
        net, (x, y) = Backwards(*(makes[k]() for k in layers), order=order), examples((4,), 4)
        with pytest.raises(ExperimentError, match=named):
            explain("lrp", net, x, y % 4)
        if "defined first" in named:
            assert explain("lrp", net, x, y % 4, composite="epsilon").shape == x.shape

    def test_nothing_is_left_behind_by_a_refusal(self) -> None:
        net, (x, y) = residual().train(), examples((3, 8, 8), 2)
        before = look_at(net)
        with pytest.raises(ExperimentError):
            explain("lrp", net, x, y)
        with pytest.raises(RuntimeError):
            explain("gradient", net, x[:, :2], y)
        assert look_at(net) == before


def test_defaults_are_those_of_fedxds() -> None:
    assert Lrp().composite == "epsilon_plus_flat"
    assert (SmoothGrad().noise, SmoothGrad().samples) == (0.1, 20)


class TestTarget:
    """Which output is explained."""

    @pytest.mark.parametrize("target", ["class", "centred", "outputs"])
    def test_of_gradients(self, target: str) -> None:
        net, (x, y) = network("mlp", (7,), hidden=(8, 8)), examples((7,), 5)

        def gradient(at: Tensor) -> Tensor:
            inputs = at.clone().requires_grad_()
            f = net(inputs)
            own = f.gather(1, y[:, None])[:, 0]
            targets = {"class": own, "centred": own - f.mean(1), "outputs": (f**2).sum(1) / 2}
            (found,) = torch.autograd.grad(targets[target].sum(), inputs)
            return found

        path = (gradient(x / 3) + gradient(2 * x / 3) + gradient(x)) / 3
        for name, expected, fields in (
            ("gradient", gradient(x), {}),
            ("gradient_x_input", x * gradient(x), {}),
            ("integrated_gradients", x * path, {"rule": "right", "steps": 3}),
            ("smoothgrad", gradient(x), {"samples": 4, "noise": 0.0}),
        ):
            found = explain(name, net, x, y, target=target, **fields)
            torch.testing.assert_close(found, expected)

    def test_lrp_starts_at_the_target(self) -> None:
        """Of a linear network: R_j = Σ_c a_j w_jc / f_c · R_c."""
        net, (x, y) = nn.Sequential(nn.Linear(6, CLASSES, bias=False)), examples((6,), 3)
        w = net[0].weight
        assert isinstance(w, Tensor)
        f = x @ w.T
        one_hot = F.one_hot(y, CLASSES)
        starts = {
            "class": one_hot * f,
            "centred": (one_hot - 1 / CLASSES) * f,
            "batch": one_hot.amax(0).expand(3, -1),  # three of ten classes
        }
        for target, start in starts.items():
            expected = x * ((start / f) @ w)
            found = explain("lrp", net, x, y, composite="epsilon", target=target)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)

    def test_one_output_has_no_other_to_compare_with(self) -> None:
        about = nn.Linear(3, 1), torch.ones(2, 3), torch.zeros(2)
        for name, fields in {"lrp": {"composite": "epsilon"}, "gradient": {}}.items():
            with pytest.raises(ExperimentError, match=r"target=centred compares classes.*one out"):
                explain(name, *about, target="centred", **fields)
