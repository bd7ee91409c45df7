"""Explanations of additive models: the function of each feature, and what it adds here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedsim.data import Dataset
from fedsim.data.encoding import Feature, firsts_of
from fedsim.errors import ExperimentError
from fedsim.explain.explainer import ExplainedData, ExplainedModel, Explanation, explainers
from fedsim.explain.explainers.attributed import Attributed
from fedsim.explain.explainers.attribution import OfDecision
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures.canvas import picture, save, some
from fedsim.explain.pictures.shapes import Axis, draw_shapes
from fedsim.models.nam import AdditiveClassifier
from fedsim.objectives.objective import EVALUATION_BATCH

Array = NDArray[np.float64]

POINTS = 100  # of a number's range
MOST_PANELS = 40  # features in the picture
QUANTILES = (0, 25, 50, 75, 100)  # of a number, in the text


@explainers.register
class ShapeFunctions(OfDecision):
    """The shape functions of a neural additive model: what each feature adds, value by value.

    The score of a class is its logit less the mean of the others': the log-odds of two classes,
    and nothing that the softmax would not see. That of a regression is the number. A feature's
    shape function is what it adds to the score, less its mean over all clients' training examples,
    so that functions of several models can be compared. They are drawn in the features' own units
    over how often values occur; of several clients over one another, and over the global model's.

    The relevance of a feature is its shape function's value at the input. With the bias and the
    features' means, the relevances of an input sum to the score.

    Args:
        most: number of features in the text, by the mean of |shape function|.

    Source: Agarwal et al. (NeurIPS 2021), Section 2 and Figure 1.
    """

    name: str = "shape_functions"
    usual_inputs: ClassVar[int] = 0
    most: int = Field(10, ge=1)

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        if not isinstance(model.network, AdditiveClassifier):
            raise ExperimentError(
                f"model.name={model.section.name} adds no functions of single features, as nam "
                "does"
            )

    def explain(
        self, model: ExplainedModel, data: ExplainedData, inputs: Inputs, rng: Generator
    ) -> Explanation:
        dataset, raw = data.dataset, _training_rows(data)
        axes, grid = _axes(dataset, raw)
        assert isinstance(model.network, AdditiveClassifier)
        own = _shapes(model.network, data, raw, grid)
        others = {
            name: _shapes(network, data, raw, grid)[0]
            for name, network in model.beside.items()
            if isinstance(network, AdditiveClassifier)
        }
        classes = dataset.classes or (dataset.target or "y",)
        of = classes[1:] if len(classes) == 2 else classes
        local = super().explain(model, data, inputs, rng) if len(inputs.x) else None
        assert local is None or isinstance(local, Attributed)
        about = model.title, model.suffix, dataset, axes, of
        return Shapes(*about, *own, self.most, local, others)

    @torch.no_grad()
    def relevances(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor, rng: Generator
    ) -> NDArray[np.float32]:
        network = model.network
        assert isinstance(network, AdditiveClassifier)
        found = of_scores(network.contributions(x)) - _mean(network, data, _training_rows(data))
        return found[torch.arange(len(x)), :, y].float().cpu().numpy()


def _training_rows(data: ExplainedData) -> NDArray[Any]:
    """(N, W) the training examples of all clients, as in the data set."""
    rows = np.arange(data.dataset.num_loaded)
    return np.asarray(data.dataset.x)[rows if data.splits is None else data.splits.training_rows]


def of_scores(outputs: Tensor) -> Tensor:
    """Contributions (B, F, C) to outputs as those to scores: z_c − mean of z_k, k ≠ c."""
    C = outputs.shape[2]
    return outputs if C == 1 else (outputs - outputs.mean(dim=2, keepdim=True)) * (C / (C - 1))


def _contributions(
    network: AdditiveClassifier, data: ExplainedData, raw: NDArray[Any]
) -> Iterator[Tensor]:
    """Contributions (n, F, C) to scores of rows (N, W) as in the data set, some at a time."""
    for start in range(0, len(raw), EVALUATION_BATCH):
        x = data.prepare(raw[start : start + EVALUATION_BATCH])
        yield of_scores(network.contributions(x))


def _mean(network: AdditiveClassifier, data: ExplainedData, raw: NDArray[Any]) -> Tensor:
    """(F, C) what each feature adds to each score on average over rows (N, W)."""
    sums = [some.sum(dim=0) for some in _contributions(network, data, raw)]
    return torch.stack(sums).sum(dim=0) / len(raw)


@torch.no_grad()
def _shapes(
    network: AdditiveClassifier, data: ExplainedData, raw: NDArray[Any], grid: NDArray[Any]
) -> tuple[Array, Array, Array]:
    """Shape functions (P, F, S) on a grid (P, W), the mean score (S,) and importances (F, S).

    An importance is the mean of |shape function| over the training examples `raw` (N, W). All are
    in the units of the target.
    """
    dataset = data.dataset
    shown = slice(1 if len(dataset.classes) == 2 else 0, None)
    mean = _mean(network, data, raw)
    both = [torch.cat([*_contributions(network, data, rows)]) - mean for rows in (grid, raw)]
    at, own = (found[:, :, shown].cpu().numpy() for found in both)
    bias = of_scores(network.head.bias.double()[None, None])[0, 0]
    base = (bias + mean.sum(dim=0))[shown].cpu().numpy()
    importance = np.abs(own).mean(axis=0)
    if not dataset.classes:
        scaling = dataset.target_scaling
        at, importance = at * scaling.span, importance * scaling.span
        base = scaling.undo(base)
    return at, base, importance


def _axes(dataset: Dataset, raw: NDArray[Any]) -> tuple[tuple[Axis, ...], NDArray[Any]]:
    """The values at which each feature is shown, and rows (P, W) with the values of all features.

    Features with fewer values than others repeat their last one.

    Args:
        raw: (N, W) training examples.
    """
    features = dataset.encoding or tuple(map(Feature, dataset.feature_names))
    firsts = firsts_of(features)
    ends = [*firsts[1:], raw.shape[1]]
    found = [
        _levels(feature, raw[:, a:b]) for feature, a, b in zip(features, firsts, ends, strict=True)
    ]
    P = max(len(levels) for levels, _ in found)
    padded = [levels[np.minimum(np.arange(P), len(levels) - 1)] for levels, _ in found]
    grid = np.concatenate(padded, axis=1).astype(raw.dtype)
    told, values = map(dataset.in_units, (grid, raw))
    axes = []
    for feature, (levels, share), a, b in zip(features, found, firsts, ends, strict=True):
        own, known, at = told[: len(levels), a:b], np.ones(len(values), np.bool_), None
        if feature.kind in ("number", "date"):
            at = own[:, 0].copy()
            if feature.indicator:
                at[own[:, -1] > 0.5] = np.nan
                known = values[:, b - 1] < 0.5
        axes.append(
            Axis(
                f"{feature.name} ({feature.unit})" if feature.unit else feature.name,
                tuple(feature.shown(row) for row in own),
                at,
                share,
                values[known, a],
                feature.kind == "date",
            )
        )
    return tuple(axes), grid


def _levels(feature: Feature, values: NDArray[Any]) -> tuple[NDArray[Any], Array]:
    """The values of a feature at which it is shown, and how often they occur.

    Args:
        values: (N, w) its entries of the training examples.

    Returns:
        (P, w) all categories that occur, or up to 100 numbers, and last a blank cell if there are
        any; and (P,) the shares of examples, of numbers of those that are nearest.
    """
    blank = values[:, -1] > 0.5 if feature.indicator else np.zeros(len(values), np.bool_)
    known = values[~blank][:, : values.shape[1] - feature.indicator]
    axis = 0 if feature.kind == "one_hot" else None  # numbers are sorted faster than rows
    levels, index = np.unique(known, return_inverse=True, axis=axis)
    levels = levels.reshape(-1, known.shape[1])
    if feature.kind == "one_hot":  # in their order, not in that of their bits
        levels, index = levels[::-1], len(levels) - 1 - index
    elif feature.kind in ("number", "date") and len(levels) > POINTS:
        ends = float(levels[0, 0]), float(levels[-1, 0])
        levels = np.unique(np.linspace(*ends, POINTS).astype(values.dtype))[:, None]
        places = levels[:, 0].astype(np.float64)
        index = np.searchsorted((places[1:] + places[:-1]) / 2, known[:, 0])
    counts = np.bincount(index.ravel(), minlength=len(levels))
    if feature.indicator:
        levels = np.pad(levels, ((0, 0), (0, 1)))
        if blank.any():
            levels = np.concatenate([levels, values[blank][:1]])
            counts = np.append(counts, blank.sum())
    return levels, counts / len(values)


@dataclass(frozen=True)
class Shapes(Explanation):
    """The shape functions of a model.

    Args:
        axes: the values at which each feature is shown.
        of: (S,) whose scores these are: classes, of two the second; or the number.
        values: (P, F, S) the functions, in the order of the axes, whose later rows may be unused.
        base: (S,) the mean score.
        importance: (F, S) mean of |function| over the training examples.
        most: features in the text.
        local: what the features add to single decisions, if inputs are explained.
        others: (P, F, S) functions of other models, by name.
    """

    title: str
    suffix: str
    dataset: Dataset
    axes: tuple[Axis, ...]
    of: tuple[str, ...]
    values: Array
    base: Array
    importance: Array
    most: int
    local: Attributed | None = None
    others: Mapping[str, Array] = field(default_factory=dict)

    def beside(self, others: Sequence[Explanation]) -> Explanation:
        shapes = [one for one in others if isinstance(one, Shapes)]
        named = {one.title: one.values for one in shapes if one.title != self.title}
        local = self.local
        if local is not None:
            local = local.beside([one.local for one in shapes if one.local is not None])
        return replace(self, local=local, others={**self.others, **named})

    @property
    def _order(self) -> list[int]:
        """The features by decreasing importance."""
        return np.argsort(-self.importance.max(axis=1), kind="stable").tolist()

    @property
    def _about(self) -> str:
        """What the functions add to."""
        classes = self.dataset.classes
        if not classes:
            return self.of[0]
        if len(classes) == 2:
            return f"log-odds of {self.of[0]}"
        return "logit less the others' mean"

    def text(self) -> str:
        base = ", ".join(
            f"{value + 0.0:.4g}" + (f" ({name})" if len(self.of) > 1 else "")
            for name, value in zip(self.of, self.base, strict=True)
        )
        lines = [
            f"{self.title}: {self._about} = {base}, the mean, plus what each of the "
            f"{len(self.axes)} features adds:"
        ]
        for f in self._order[: self.most]:
            size = self.importance[f].max()
            lines.append(f"\n{self.axes[f].name}: {size:.3g} on average")
            for s, name in enumerate(self.of):
                told = self._told(f, s)
                lines.append(f"  {f'{name}: ' if len(self.of) > 1 else ''}{told}")
        if self.most < len(self.axes):
            lines.append(f"\n… and {len(self.axes) - self.most} more; --most shows more")
        if self.local is not None:
            lines += ["", self.local.text()]
        return "\n".join(lines)

    def _told(self, f: int, s: int) -> str:
        """A function in words: at each category, or from the least number to the greatest."""
        axis = self.axes[f]
        shown = [*range(len(axis.words))]
        if axis.at is not None:
            at = np.percentile(axis.values, QUANTILES)
            near = np.nanargmin(np.abs(axis.at[:, None] - at), axis=0)
            blank = np.flatnonzero(np.isnan(axis.at))
            shown = [*dict.fromkeys([*near.tolist(), *blank.tolist()])]
        return ", ".join(f"{axis.words[p]} → {self.values[p, f, s] + 0.0:+.3g}" for p in shown)

    @property
    def attributed(self) -> Attributed | None:
        return self.local

    def rows(self) -> list[dict[str, float | int | str | None]]:
        """The functions value by value, the most important feature first."""
        return [
            {
                "feature": self.dataset.feature_names[f],
                "value": word,
                "of": name,
                "score": float(self.values[p, f, s]),
                "share": float(self.axes[f].share[p]),
            }
            for f in self._order
            for s, name in enumerate(self.of)
            for p, word in enumerate(self.axes[f].words)
        ]

    def save(self, folder: Path) -> list[Path]:
        path = picture(folder, f"shape_functions{self.suffix}")
        drawn = self._order[:MOST_PANELS]
        axes = [self.axes[f] for f in drawn]
        title = f"{self.title}: what each feature adds to the {self._about}"
        title += some(len(self.axes), "features", MOST_PANELS)
        models = {self.title: self.values, **self.others}
        shapes = {
            name: [of[: len(axis.words), f] for f, axis in zip(drawn, axes, strict=True)]
            for name, of in models.items()
        }
        save(draw_shapes(axes, shapes, self.of), path, title)
        return [path, *(self.local.save(folder) if self.local is not None else ())]
