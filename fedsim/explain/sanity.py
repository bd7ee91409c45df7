"""The sanity check of an explanation: does it change as the network's weights become random?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedsim.errors import BadInput
from fedsim.explain.explainer import (
    ExplainedData,
    ExplainedModel,
    Explainer,
    Explanation,
    FeatureExplainer,
    refuse_unfit,
)
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures.canvas import new_figure, picture, place, plain, save
from fedsim.explain.scores.faithfulness import present
from fedsim.explain.scores.measure import relevances_of, similarity
from fedsim.explain.scores.randomisation import ALIKE, DRAWS, agreement, randomised
from fedsim.explain.scores.relevance import Scores, mean_defined
from fedsim.training import logits

_BINS = 100  # of a map's histogram, for its entropy


@dataclass(frozen=True)
class Sanity(Explanation):
    """How alike an explainer's maps are to those of the network with random weights.

    Each number is the mean over inputs and draws; NaN if undefined, as for inputs of fewer than
    three parts.

    Args:
        title, file, explainer: whose maps, and where the picture goes.
        layers: those that are random so far, by the last of them, from the top.
        rank: after each layer, |ρ| of the maps' rank correlation.
        ssim: likewise, the structural similarity of images' maps; empty without.
        rise: how much the maps' entropy rises with random weights, relative to before.
    """

    title: str
    file: str
    explainer: str
    layers: tuple[str, ...]
    rank: tuple[float, ...]
    ssim: tuple[float, ...]
    rise: float

    @property
    def changes(self) -> bool | None:
        """Whether the maps depend on the weights; None if that is not defined."""
        return None if np.isnan(self.rank[-1]) else self.rank[-1] <= ALIKE

    @property
    def verdict(self) -> str:
        """Whether the maps depend on the weights, in words."""
        if self.changes is None:
            return f"whether maps of {self.explainer} change cannot be told of so few parts"
        with_all = f"with all weights random, |ρ| is {self.rank[-1]:.2f}"
        if self.changes:
            return f"the maps of {self.explainer} depend on the weights: {with_all}"
        return (
            f"the maps of {self.explainer} DO NOT DEPEND ON THE WEIGHTS: {with_all}, above "
            f"{ALIKE:g}; they say nothing about what the network has learnt"
        )

    def text(self) -> str:
        lines = [f"{self.title}, {self.explainer}, with random weights from the top down to:"]
        wide = max(map(len, self.layers))
        for k, name in enumerate(self.layers):
            ssim = f"   SSIM {self.ssim[k]:5.2f}" if self.ssim else ""
            lines.append(f"  {name:{wide}}   |ρ| {self.rank[k]:.2f}{ssim}")
        if np.isfinite(self.rise):
            lines.append(f"entropy of the maps with all weights random: {self.rise:+.1%}")
        return "\n".join([*lines, self.verdict])

    def rows(self) -> list[dict[str, float | int | str | None]]:
        found: list[dict[str, float | int | str | None]] = []
        for k, name in enumerate(self.layers):
            found.append({"layer": name, "rank": self.rank[k]})
            if self.ssim:
                found[k]["ssim"] = self.ssim[k]
        return found

    def save(self, folder: Path) -> list[Path]:
        path, n = picture(folder, self.file), len(self.layers)
        figure = new_figure(6.0, 3.4)
        axes = place(figure, 0.7, 0.1, 5.1, 1.9)
        alike = f"above: do not depend on the weights ({ALIKE:g})"
        axes.axhline(ALIKE, color="0.5", linewidth=0.8, linestyle="--", label=alike)
        axes.plot(range(n), self.rank, marker="o", label="|ρ| of ranks")
        if self.ssim:
            axes.plot(range(n), self.ssim, marker="s", label="SSIM")
        axes.set_xticks(range(n), [plain(name) for name in self.layers], rotation=90, fontsize=7)
        axes.set_ylim(min(0.0, np.nanmin([0.0, *self.ssim])) - 0.02, 1.02)
        axes.set_ylabel("agreement with the maps before", fontsize=8)
        axes.legend(fontsize=8, frameon=False)
        axes.tick_params(axis="y", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        title = f"{self.title}, {self.explainer}: random weights, layer by layer"
        save(figure, path, title, self.verdict)
        return [path]


def check(
    explainer: Explainer, model: ExplainedModel, data: ExplainedData, inputs: Inputs
) -> Sanity:
    """Compare an explainer's maps with those of the network as its weights become random.

    Layers get random weights one after the other, from the top (cascading), which are drawn
    several times; the class explained stays that of the network itself.

    Raises:
        BadInput: the explainer gives no maps, or the model is no network.

    Source: Adebayo et al. (NeurIPS 2018); the rise of entropy: Hedström et al. (2024), eMPRT.
    """
    if not isinstance(explainer, FeatureExplainer):
        raise BadInput(
            f"check compares maps of relevance, and explainer {explainer.name} gives none"
        )
    if model.network is None:
        raise BadInput(
            "check makes the weights of a network random, and "
            f"model.name={model.section.name} is a {model.section.kind}"
        )
    refuse_unfit(explainer, model, data)
    x = data.prepare(inputs.x)
    decided = torch.from_numpy(logits(model.network, x)).argmax(dim=1)
    there, image = present(x, data.dataset.parts), len(data.dataset.shape) == 3

    def maps(network: nn.Module | None) -> Scores:
        rng = explainer.rng(model.seed, model.client)
        return relevances_of(explainer, replace(model, network=network), data, x, decided, rng)

    before = maps(model.network)
    ranks = partial(agreement, squares=explainer.squares(data.dataset.shape))
    compared = image and find_spec("skimage") is not None and min(data.dataset.shape[1:]) >= 3
    layers: dict[str, list[tuple[float | None, ...]]] = {}
    for draw in range(DRAWS):
        for name, network in randomised(model.network, model.seed, draw):
            after = maps(network)
            alike = [mean_defined(similarity(ranks, there, before, after))]
            if compared:
                alike.append(mean_defined(_ssim(before, after, data.dataset.shape[1:])))
            alike.append(mean_defined(_entropy(after, there) / _entropy(before, there) - 1))
            layers.setdefault(name, []).append(tuple(alike))
    means = [np.mean(np.array(each, np.float64), axis=0).tolist() for each in layers.values()]
    rank, *ssim, rise = zip(*means, strict=True)
    return Sanity(
        title=model.title,
        file=f"check-{explainer.label}{model.suffix}{inputs.suffix}",
        explainer=explainer.label,
        layers=tuple(name or "the network" for name in layers),
        rank=rank,
        ssim=ssim[0] if ssim else (),
        rise=rise[-1],
    )


def _ssim(a: Scores, b: Scores, shape: tuple[int, ...]) -> Scores:
    """(n,) the structural similarity of maps (n, H·W), each scaled to its largest relevance."""
    from skimage.metrics import structural_similarity  # slow to import

    side = min(7, *shape)
    window = side - (side % 2 == 0)
    found = np.full(len(a), np.nan)
    for k, both in enumerate(zip(a, b, strict=True)):
        if all(np.isfinite(one).all() and one.any() for one in both):
            one, other = (each.reshape(shape) / np.abs(each).max() for each in both)
            found[k] = structural_similarity(one, other, win_size=window, data_range=2)
    return found


def _entropy(maps: Scores, there: NDArray[np.bool_]) -> Scores:
    """(n,) the entropy of each map's histogram, in nats; NaN where it is 0 or not defined."""
    found = np.full(len(maps), np.nan)
    for k, (row, parts) in enumerate(zip(maps, there, strict=True)):
        if np.isfinite(row[parts]).all() and parts.any():
            count, _ = np.histogram(row[parts], _BINS)
            share = count[count > 0] / count.sum()
            found[k] = -(share * np.log(share)).sum() or np.nan
    return found
