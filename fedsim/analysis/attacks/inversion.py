"""Attacks that reconstruct images from what clients share, and measures of their success.

`train_denoiser` attacks shared images (masked, noisy), for an attacker who knows the mechanism;
`invert_gradient` attacks gradients, and updates that are equivalent to one. `fidelity` measures
how close reconstructions come to the originals.

Sources: Geiping, Bauermeister, Dröge and Moeller, Inverting Gradients - How easy is it to break
privacy in federated learning? (NeurIPS 2020); Ronneberger, Fischer and Brox, U-Net (MICCAI 2015);
Wang, Bovik, Sheikh and Simoncelli, Image Quality Assessment (IEEE TIP 2004), for SSIM.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, interpolate, mse_loss

from fedsim.errors import ExperimentError
from fedsim.explain.pictures.canvas import new_figure, place, plain, save
from fedsim.support.extras import require
from fedsim.support.rng import keyed_torch_rng, torch_seed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEST_PSNR = 100.0  # dB, an MSE of 1e-10, for exact reconstructions
WINDOW = 7  # pixels a side of SSIM's window
SMALLEST = 8  # pixels a side, for two halvings
BATCH = 500  # images that a network reconstructs at once
MOST_IMAGES = 8  # columns of a picture
_FONT = 9  # points
_SIDE, _LINE, _GAP = 0.9, 0.06, 0.12  # inches: an image, between two, above a mechanism

Images = Tensor | NDArray[np.floating[Any]]


# -- how close ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fidelity:
    """How close reconstructions come to their originals: means over images.

    Args:
        mse: mean squared error of pixels in [0, 1].
        psnr: peak signal-to-noise ratio, 10·log₁₀(1/MSE) of each image, in dB.
        ssim: structural similarity, 1 for equal images, about 0 for unrelated ones.
    """

    mse: float
    psnr: float
    ssim: float


def check_fidelity() -> None:
    """Raise NotInstalled if images cannot be compared."""
    require("skimage", "comparing reconstructed images")


def fidelity(original: Images, reconstructed: Images) -> Fidelity:
    """Compare reconstructions with their originals, image by image, by scikit-image.

    The PSNR of an image is limited to 100 dB: it is infinite for an exact reconstruction, and a
    single one would dominate the mean. Both are (n, C, H, W), of 7 pixels a side or more,
    SSIM's window; originals lie in [0, 1], reconstructions are clamped to it first.

    Raises:
        NotInstalled: scikit-image is not.
        ExperimentError: no images, or smaller ones, shapes that differ, or originals out of range.
    """
    check_fidelity()
    from skimage import metrics  # slow to import

    measures: Any = metrics  # its functions have no types
    # In double precision, because SSIM takes differences of squares.
    x = torch.as_tensor(original).detach().double().cpu().numpy()
    found = torch.as_tensor(reconstructed).detach().double().cpu().numpy()
    _check_images(WINDOW, original=x.shape, reconstructed=found.shape)
    if not (x.min() >= 0 and x.max() <= 1):
        raise ExperimentError(
            f"original: pixels must lie in [0, 1], not in [{x.min():g}, {x.max():g}]"
        )
    found = found.clip(0, 1)
    each = []
    for a, b in zip(x, found, strict=True):
        with np.errstate(divide="ignore"):  # an exact reconstruction
            psnr = measures.peak_signal_noise_ratio(a, b, data_range=1)
        ssim = measures.structural_similarity(a, b, win_size=WINDOW, data_range=1, channel_axis=0)
        each.append((measures.mean_squared_error(a, b), np.minimum(psnr, BEST_PSNR), ssim))
    mse, psnr, ssim = np.mean(each, axis=0).tolist()
    return Fidelity(mse, psnr, ssim)


# -- shared images -----------------------------------------------------------------------------


class UNet(nn.Module):
    """A small U-Net from shared items (B, C, H, W) to images with pixels in [0, 1].

    Sides are halved twice, rounded up, and channels doubled; on the way back each level is resized
    to its skip connection and concatenated with it, so odd sides are allowed. Inputs are
    standardised by `mean` and `std`, (C, 1, 1).
    """

    mean: Tensor
    std: Tensor

    def __init__(self, channels: int, width: int = 16) -> None:
        super().__init__()
        w = width
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("std", torch.ones(channels, 1, 1))
        self.top = _convolutions(channels, w)
        self.middle = _convolutions(w, 2 * w, stride=2)
        self.bottom = _convolutions(2 * w, 4 * w, stride=2)
        self.middle_back = _convolutions(4 * w + 2 * w, 2 * w)
        self.top_back = _convolutions(2 * w + w, w)
        self.pixels = nn.Conv2d(w, channels, 1)

    def forward(self, shared: Tensor) -> Tensor:
        """(B, C, H, W) to (B, C, H, W), H and W of 8 or more."""
        top = self.top((shared - self.mean) / self.std)
        middle = self.middle(top)
        h = self.middle_back(_beside(self.bottom(middle), middle))
        return self.pixels(self.top_back(_beside(h, top))).sigmoid()


def _convolutions(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def _beside(low: Tensor, skip: Tensor) -> Tensor:
    return torch.cat([interpolate(low, skip.shape[-2:]), skip], dim=1)


def train_denoiser(
    shared: Tensor,
    x: Tensor,
    *,
    epochs: int,
    seed: int,
    batch_size: int = 64,
    lr: float = 1e-2,
    width: int = 16,
) -> UNet:
    """Train a U-Net to invert a mechanism, with Adam and the mean squared error.

    The attacker has its own images and knows the mechanism, so it can create training pairs. With
    a random mechanism, several draws per image can be given: like few epochs, they keep the
    network from memorising the noise of a single draw. The same seed, device and number of threads
    give the same bits.

    Args:
        shared: (n, C, H, W) what the mechanism makes of `x`: any real values. Their mean and
            standard deviation, by channel, standardise the network's inputs.
        x: (n, C, H, W) the attacker's images, pixels in [0, 1], of 8 pixels a side or more.
        epochs: passes over all of them.
        seed: of initial weights and batches.
        batch_size: images a step.
        lr: of Adam.
        width: channels of the U-Net's first level.

    Returns:
        The network in evaluation mode, on the images' device.

    Raises:
        ExperimentError: no images, or smaller ones, or shapes that differ.
    """
    _check_images(SMALLEST, shared=shared.shape, x=x.shape)
    with keyed_torch_rng(seed, "denoiser", device=x.device):
        network = UNet(x.shape[1], width).to(x.device)
        network.mean.copy_(shared.mean(dim=(0, 2, 3))[:, None, None])
        # 0 for a channel in which nothing is shared, whose centred inputs are 0 as well.
        std = shared.std(dim=(0, 2, 3), correction=0)[:, None, None]
        network.std.copy_(torch.where(std > 0, std, 1))
        optimizer = torch.optim.Adam(network.parameters(), lr)
        for _ in range(epochs):
            for batch in torch.split(torch.randperm(len(x)), batch_size):
                drawn = batch.to(x.device)
                optimizer.zero_grad()
                torch.autograd.backward(mse_loss(network(shared[drawn]), x[drawn]))
                optimizer.step()
    return network.eval()


@torch.no_grad()
def reconstruct(network: UNet, shared: Tensor) -> Tensor:
    """(n, C, H, W) reconstructions in [0, 1] from (n, C, H, W) shared items on its device."""
    _check_images(SMALLEST, shared=shared.shape)
    return torch.cat([network(batch) for batch in torch.split(shared, BATCH)])


# -- gradients ---------------------------------------------------------------------------------


def invert_gradient(
    network: nn.Module,
    gradient: Sequence[Tensor],
    labels: Tensor,
    shape: tuple[int, ...],
    low: float | Tensor,
    high: float | Tensor,
    steps: int,
    seed: int,
    lr: float = 0.1,
    tv: float = 1e-4,
) -> Tensor:
    """Find inputs whose gradient points in the same direction as a given one.

    Minimises 1 − cos(∇L(x), gradient) + tv·TV(x), L the mean cross-entropy and TV the mean
    absolute difference of neighbours, downwards plus across, from a normal draw on: by Adam on the
    signs of the objective's gradient, a tenth of the rate after 3/8, 5/8 and 7/8 of the steps, and
    x clamped after each.

    Args:
        network: a classifier, with the weights at which the gradient was taken. A copy of it is
            used, in evaluation mode.
        gradient: ∇L, a tensor for each trainable parameter, as of `torch.autograd.grad`.
        labels: (B,) classes of the inputs, which the attacker knows.
        shape: (C, H, W) of an input.
        low, high: the range of inputs as the network takes them: numbers, or (C, 1, 1) for
            channels that were standardised differently.
        steps: of Adam; the paper takes up to 24,000.
        seed: of the start.
        lr: the first step's.
        tv: weight of TV.

    Returns:
        (B, C, H, W) inputs of the network, of the gradient's type, on its device.

    Raises:
        ExperimentError: a gradient of another network, or one that is zero or not finite; inputs
            that are no images.

    Source:
        Geiping et al. (2020), Eq. 4; rate, decay and TV as in the authors' released code.
    """
    network = copy.deepcopy(network).eval()
    parameters = [p for p in network.parameters() if p.requires_grad]
    if [g.shape for g in gradient] != [p.shape for p in parameters]:
        raise ExperimentError(
            "gradient: must be one tensor for each trainable parameter of the network, "
            f"{[tuple(p.shape) for p in parameters]}, not {[tuple(g.shape) for g in gradient]}"
        )
    if len(shape) != 3 or min(shape[1:]) < 2:
        raise ExperimentError(
            f"shape={shape}: must be (C, H, W) of images of 2 pixels a side or more"
        )
    given = _flat(gradient)
    norm = float(given.norm())
    if not (math.isfinite(norm) and norm > 0):
        raise ExperimentError(f"gradient: its norm is {norm:g}, so it has no direction")

    generator = torch.Generator().manual_seed(torch_seed(seed, "gradient inversion"))
    x = torch.randn((len(labels), *shape), generator=generator).to(given).requires_grad_()
    low, high = (torch.as_tensor(end).to(given) for end in (low, high))
    optimizer = torch.optim.Adam([x], lr)
    milestones = [steps * k // 8 for k in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)
    for _ in range(steps):
        loss = cross_entropy(network(x), labels)
        own = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
        distance = 1 - cosine_similarity(_flat(own), given, dim=0)
        variation = x.diff(dim=-2).abs().mean() + x.diff(dim=-1).abs().mean()
        (direction,) = torch.autograd.grad(distance + tv * variation, x)
        x.grad = direction.sign()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(low, high)
    return x.detach()


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@dataclass(frozen=True)
class Inversion:
    """Images reconstructed from shared images or explanations: (n, C, H, W) in [0, 1].

    Args:
        originals: the victims' images.
        items: the shared images in pixels, which noise can take beyond [0, 1]; or the
            explanations, scaled for drawing: 0.5 is no relevance, and 0 or 1 is the strongest in a
            map.
        found: the attacker's reconstructions.
        labels: (n,) names of the classes.
        reconstructed: how close `found` is to `originals`.
        mean_image: the same for the attacker's mean image, the best guess without items.
        class_mean: the same for the mean of its images of the victim's class, the best guess from
            the label alone.
    """

    originals: Tensor
    items: Tensor
    found: Tensor
    labels: tuple[str, ...]
    reconstructed: Fidelity
    mean_image: Fidelity
    class_mean: Fidelity

    @property
    def shared(self) -> Fidelity:
        """How close the shared images themselves are to `originals`."""
        return fidelity(self.originals, self.items)

    def draw(self, name: str, path: Path, title: str = "") -> None:
        """Draw originals, items and reconstructions as a PNG file."""
        rows = {name: (self.items, self.found)}
        draw_reconstructions(rows, self.originals, self.labels, path, title)


# -- pictures ----------------------------------------------------------------------------------


def draw_reconstructions(
    rows: Mapping[str, tuple[Tensor, Tensor]],
    originals: Tensor,
    labels: Sequence[str],
    path: Path,
    title: str = "",
) -> None:
    """Draw images, what mechanisms make of them, and what an attack makes of that.

    A column for each of the first 8 images at most. Rows: the originals, then of each mechanism
    the shared items, clamped to [0, 1] to be drawn (noise goes beyond), and the reconstructions,
    with their mean SSIM over all n images. One channel is drawn grey, three as colours.

    Args:
        rows: by the mechanism's name (n, C, H, W) shared items and (n, C, H, W) reconstructions.
        originals: (n, C, H, W) with pixels in [0, 1], of 7 a side or more.
    """
    save(_picture(rows, originals, labels), path, title)


def _picture(
    rows: Mapping[str, tuple[Tensor, Tensor]], originals: Tensor, labels: Sequence[str]
) -> Figure:
    n, channels, H, W = originals.shape
    if channels not in (1, 3):
        raise ExperimentError(f"originals: must have 1 channel or 3 to be drawn, not {channels}")
    if len(labels) != n:
        raise ExperimentError(f"labels: {len(labels)} for {n} images; must be one for each")
    lines = [("original", originals, 0.0)]  # name, images, the gap above
    for name, (shared, reconstructed) in rows.items():
        _check_images(WINDOW, originals=originals.shape, shared=shared.shape)
        ssim = fidelity(originals, reconstructed).ssim
        lines.append((f"{name}\nshared", shared, _GAP))
        lines.append((f"reconstructed\nSSIM {ssim:.2f}", reconstructed, 0.0))

    columns = min(n, MOST_IMAGES)
    across, down = _SIDE + _LINE, _SIDE * H / W + _LINE
    height = down * len(lines) + _GAP * len(rows)
    figure = new_figure(across * columns, height)
    top = 0.0
    for name, images, gap in lines:
        top += gap
        drawn = images[:columns].detach().float().cpu().clamp(0, 1).movedim(1, -1).numpy()
        for k, image in enumerate(drawn):
            axes = place(figure, k * across, top, _SIDE, down - _LINE)
            axes.imshow(image, cmap="gray", vmin=0, vmax=1, aspect="auto")
            axes.set(xticks=(), yticks=())
            axes.spines[:].set(color="0.6", linewidth=0.5)
            if top == 0:
                axes.set_title(plain(labels[k]), fontsize=_FONT, pad=4)
            if k == 0:
                axes.set_ylabel(
                    plain(name), fontsize=_FONT, rotation=0, ha="right", va="center", labelpad=6
                )
        top += down
    note = "Shared items are clamped to [0, 1] to be drawn."
    if n > 1:
        note += f" SSIM: mean over {n} images."
    figure.text(0, -0.08 / height, note, fontsize=_FONT - 1, va="top", color="0.25")
    return figure


def _check_images(smallest: int, **shapes: Sequence[int]) -> None:
    words = " and ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    first, *others = (tuple(shape) for shape in shapes.values())
    if any(other != first for other in others):
        raise ExperimentError(f"{words}: must have the same shape")
    if len(first) != 4 or 0 in first or min(first[2:]) < smallest:
        raise ExperimentError(
            f"{words}: must be images (n, C, H, W) of {smallest} pixels a side or more"
        )
