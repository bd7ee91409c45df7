"""Attacks that reconstruct images, and the measures of how close they come."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import look_at
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fedsim.analysis.attacks import inversion
from fedsim.analysis.attacks.inversion import (
    Fidelity,
    UNet,
    draw_reconstructions,
    fidelity,
    invert_gradient,
    reconstruct,
    train_denoiser,
)
from fedsim.data.sources.generated import Digits
from fedsim.support.rng import keyed_torch_rng, torch_seed

pytestmark = pytest.mark.filterwarnings("error")

HELD_OUT = 200


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@cache
def digits() -> tuple[Tensor, Tensor]:
    """(n, 1, 8, 8) with pixels in [0, 1], and their classes."""
    data = Digits().load()
    return torch.from_numpy(data.x), torch.from_numpy(data.y)


# -- how close ---------------------------------------------------------------------------------


def test_fidelity_is_that_of_the_formulas() -> None:
    x, found = draws(3, 2, 9, 7).double(), draws(3, 2, 9, 7, seed=1).double()
    errors = ((x - found) ** 2).mean(dim=(1, 2, 3))
    close = fidelity(x, found)
    assert close.mse == pytest.approx(float(errors.mean()), rel=1e-12)
    assert close.psnr == pytest.approx(float(-10 * errors.log10().mean()), rel=1e-12)
    assert -1 <= close.ssim < 0.3


def test_ssim_of_one_window_is_that_of_the_formula() -> None:
    """7×7 pixels are one window: Wang et al. (2004), Eq. 13, with C₁ = 0.01² and C₂ = 0.03²."""
    x, y = draws(1, 1, 7, 7).double(), draws(1, 1, 7, 7, seed=1).double()
    c1, c2 = 0.01**2, 0.03**2
    covariance = torch.cov(torch.stack([x.flatten(), y.flatten()]))
    expected = (2 * x.mean() * y.mean() + c1) * (2 * covariance[0, 1] + c2)
    expected /= (x.mean() ** 2 + y.mean() ** 2 + c1) * (covariance.trace() + c2)
    assert fidelity(x, y).ssim == pytest.approx(float(expected), rel=1e-9)


def test_what_is_exact_or_out_of_range() -> None:
    """An exact reconstruction counts as 100 dB; reconstructions are clamped."""
    x = draws(4, 3, 8, 8)
    exact = Fidelity(mse=0.0, psnr=100.0, ssim=1.0)
    assert fidelity(x, x.clone()) == exact
    ends = torch.tensor([0.0, 1.0]).repeat(1, 1, 8, 4)
    assert fidelity(ends, 3 * ends - 1) == exact
    half = x[:2] / 2
    found = torch.stack([half[0], half[1] + 0.1])  # an MSE of 0.01, 20 dB
    assert fidelity(half, found).psnr == pytest.approx(60, abs=1e-4)


# -- shared images -----------------------------------------------------------------------------


def unet(channels: int, width: int) -> UNet:
    with keyed_torch_rng(0, "test"):
        return UNet(channels, width)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 8), (2, 11, 13), (1, 28, 28)])
def test_unet_keeps_the_shape(shape: tuple[int, int, int]) -> None:
    found = unet(shape[0], width=2).eval()(10 * noise(2, *shape))
    assert found.shape == (2, *shape)
    assert 0 <= found.min() < found.max() <= 1


def test_unet_uses_all_levels() -> None:
    """Each parameter has a part in the output, and the output depends on pixels far away."""
    network, x = unet(1, width=8), noise(4, 1, 17, 17).requires_grad_()
    network(x)[0, 0, 8, 8].backward()
    assert all(p.grad.abs().sum() > 0 for p in network.parameters())
    (reached,) = torch.autograd.grad(network.eval()(x)[0, 0, 8, 8], x)
    assert reached[0, 0, 0].abs().sum() > 0  # 8 rows above
    assert reached[1:].abs().sum() == 0  # other images


train_small = partial(train_denoiser, epochs=2, width=4)


def test_inputs_are_standardised() -> None:
    """An affine change of a channel changes nothing but rounding; the buffers are its moments."""
    x = draws(40, 2, 8, 8)
    shared = x + 0.1 * noise(40, 2, 8, 8)
    scale, shift = torch.tensor([[4.0, 0.5], [-3.0, 2.0]])[..., None, None]
    plain, other = (train_small(s, x, seed=1) for s in (shared, scale * shared + shift))
    mean, std = shared.mean(dim=(0, 2, 3)), shared.std(dim=(0, 2, 3), correction=0)
    torch.testing.assert_close(plain.mean.flatten(), mean)
    torch.testing.assert_close(plain.std.flatten(), std)
    found = reconstruct(other, scale * shared + shift)
    torch.testing.assert_close(found, reconstruct(plain, shared), atol=1e-3, rtol=0)
    assert {"mean", "std"} <= plain.state_dict().keys()
    nothing = torch.zeros_like(x)
    assert reconstruct(train_small(nothing, x, seed=0), nothing).isfinite().all()


def test_reconstructs_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draws(12, 1, 8, 8)
    network = train_small(x, x, seed=0)
    assert not network.training
    found = reconstruct(network, x)
    assert not found.requires_grad
    monkeypatch.setattr(inversion, "BATCH", 5)
    torch.testing.assert_close(reconstruct(network, x), found)


def test_a_denoiser_beats_the_items_and_the_mean_image_and_is_worse_the_more_noise() -> None:
    """Of held-out digits with noise, by an attacker who has the others."""
    images = digits()[0][:800]
    x, own = images[:HELD_OUT], images[HELD_OUT:]
    close = []
    for sigma in (0.1, 0.5, 2.0):
        shared = images + sigma * noise(*images.shape, seed=1)
        victims, known = shared[:HELD_OUT], shared[HELD_OUT:]
        network = train_denoiser(known, own, epochs=4, seed=0, batch_size=32, width=8)
        close.append(fidelity(x, reconstruct(network, victims)))
        assert close[-1].mse < 0.9 * fidelity(x, victims).mse
    assert close[1].mse < 0.75 * float(mse_loss(own.mean(dim=0).expand_as(x), x))
    assert close[0].psnr > close[1].psnr + 2 > close[2].psnr + 4


# -- gradients ---------------------------------------------------------------------------------


def linear() -> nn.Module:
    with keyed_torch_rng(0, "test"):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def smooth() -> nn.Module:
    with keyed_torch_rng(0, "test"):
        return nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.Sigmoid(),
            nn.Conv2d(12, 12, 3, stride=2, padding=1),
            nn.Sigmoid(),
            nn.Dropout(0.5),
            nn.Flatten(),
            nn.Linear(192, 10),
        )


def gradient_of(network: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """As it is taken in evaluation mode, without a trace in the network."""
    training = network.training
    loss = cross_entropy(network.eval()(x), y)
    network.train(training)
    return list(torch.autograd.grad(loss, [p for p in network.parameters() if p.requires_grad]))


invert = partial(invert_gradient, shape=(1, 8, 8), low=0.0, high=1.0, steps=150, seed=1)


@pytest.mark.parametrize(("build", "least"), [(linear, 40.0), (smooth, 14.0)])
def test_a_gradient_shows_its_image(build: Callable[[], nn.Module], least: float) -> None:
    network, (x, y) = build(), digits()
    x, y = x[:1], y[:1]
    gradient = gradient_of(network, x, y)
    start = fidelity(x, invert(network, gradient, y, steps=0)).psnr
    found = invert(network, gradient, y)
    assert found.shape == x.shape
    assert 0 <= found.min() < found.max() <= 1
    assert start < 8 < least < fidelity(x, found).psnr
    disturbed = [g + g.std() * noise(*g.shape) for g in gradient]
    assert fidelity(x, invert(network, disturbed, y)).psnr < fidelity(x, found).psnr - 5


def slowly_inverted(
    network: nn.Module, gradient: list[Tensor], y: Tensor, low: Tensor, high: Tensor, tv: float
) -> Tensor:
    """16 steps: Adam on signs of the gradient, a tenth of the rate after 3/8, 5/8 and 7/8."""
    generator = torch.Generator().manual_seed(torch_seed(1, "gradient inversion"))
    x = torch.randn((len(y), 1, 8, 8), generator=generator)
    m = v = torch.zeros_like(x)
    theirs = torch.cat([g.flatten() for g in gradient])
    for t, lr in enumerate(6 * [0.1] + 4 * [0.01] + 4 * [0.001] + 2 * [0.0001], 1):
        loss, parameters = cross_entropy(network(x.requires_grad_()), y), [*network.parameters()]
        own = torch.autograd.grad(loss, parameters, create_graph=True)
        alike = torch.cosine_similarity(torch.cat([g.flatten() for g in own]), theirs, dim=0)
        variation = x.diff(dim=2).abs().mean() + x.diff(dim=3).abs().mean()
        (slope,) = torch.autograd.grad(1 - alike + tv * variation, x)
        sign = slope.sign()
        m, v = 0.9 * m + 0.1 * sign, 0.999 * v + 0.001 * sign**2
        step = lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        x = (x.detach() - step).clamp(low, high)
    return x


@pytest.mark.parametrize(("tv", "longer"), [(1e-4, 1), (1e-4, 1000), (0.5, 1)])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-0.1, 0.2)])
def test_inverted_as_written_out(tv: float, longer: float, low: float, high: float) -> None:
    """Whatever its length."""
    network, (x, y) = linear(), digits()
    ends = torch.full((1, 1, 1), low), torch.full((1, 1, 1), high)
    gradient = gradient_of(network, x[:2], y[:2])
    given = [longer * g for g in gradient]
    found = invert(network, given, y[:2], low=ends[0], high=high, steps=16, tv=tv)
    expected = slowly_inverted(network, gradient, y[:2], *ends, tv)
    same = (found - expected).abs() < 1e-3
    assert same.float().mean() > 0.95  # the sign of almost nothing depends on rounding
    assert low - 1e-6 <= found.min() < found.max() <= high + 1e-6


def denoised(seed: int) -> Tensor:
    x = draws(70, 1, 9, 9)
    shared = x + 0.2 * noise(70, 1, 9, 9)
    return reconstruct(train_small(shared, x, seed=seed), shared)


def inverted(seed: int) -> Tensor:
    network, (x, y) = smooth(), digits()
    return invert(network, gradient_of(network, x[:1], y[:1]), y[:1], steps=10, seed=seed)


@pytest.mark.parametrize("attack", [denoised, inverted])
def test_the_seed_decides_every_bit(attack: Callable[[int], Tensor]) -> None:
    found = []
    for seed in (5, 5, 6):
        torch.rand(3)  # wherever torch's own generator is
        before = torch.get_rng_state()
        found.append(attack(seed))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("training", [True, False])
def test_the_network_stays_as_it_was(training: bool) -> None:
    """In training mode batch norm would count the attack's inputs, and dropout blur them."""
    network, (x, y) = smooth().train(training), digits()
    network[0].eval()
    network[3].requires_grad_(False)
    network[0].weight.grad = torch.ones_like(network[0].weight)
    gradient = gradient_of(network, x[:1], y[:1])
    network[0].eval()
    before = look_at(network)
    invert(network, gradient, y[:1], steps=5)
    assert look_at(network) == before
    assert network[0].weight.grad.unique().tolist() == [1.0]


@pytest.mark.parametrize(("n", "channels", "columns"), [(1, 1, 1), (3, 3, 3), (11, 1, 8)])
def test_a_picture_has_a_row_for_each(tmp_path: Path, n: int, channels: int, columns: int) -> None:
    x = draws(n, channels, 9, 12)
    rows = {"$noise$": (x + 3 * noise(*x.shape), x / 2), "nothing": (x, x)}
    labels = [f"label {k}" for k in range(n)]
    figure = inversion._picture(rows, x, labels)
    assert len(figure.axes) == 5 * columns
    names = [axes.get_ylabel() for axes in figure.axes if axes.get_ylabel()]
    half = fidelity(x, x / 2).ssim
    assert names == [
        *("original", "\\$noise\\$\nshared", f"reconstructed\nSSIM {half:.2f}"),
        *("nothing\nshared", "reconstructed\nSSIM 1.00"),
    ]
    assert [axes.get_title() for axes in figure.axes][:columns] == labels[:columns]
    drawn = np.asarray(figure.axes[columns].images[0].get_array())  # the first shared item
    assert drawn.shape == ((9, 12, 1) if channels == 1 else (9, 12, 3))[: drawn.ndim]
    assert (drawn.min(), drawn.max()) == (0, 1)
    draw_reconstructions(rows, x, labels, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
