"""The prior of xFedAlign: the importance of groups of input parts for each class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedsim.data import Dataset
from fedsim.errors import ExperimentError
from fedsim.explain.explainer import ExplainedData, ExplainedModel, Explainer, Explanation
from fedsim.explain.groups import Groups, group_parts
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures.canvas import MOST_DRAWN, picture, some
from fedsim.explain.pictures.images import as_pixels, draw_relevances
from fedsim.explain.pictures.rule_bases import draw_bars

MOST_NAMED = 5  # groups of a class


class PriorExplainer(Explainer):
    """The prior with which clients' explanations are aligned, after the last round (xFedAlign).

    Args:
        size: side of a group in pixels, as set in the method.
    """

    name: str = "prior"
    takes_inputs: ClassVar[bool] = False
    whole_run: ClassVar[bool] = True
    size: int | None = None

    def explain(
        self, model: ExplainedModel, data: ExplainedData, inputs: Inputs, rng: Generator
    ) -> Explanation:
        table, dataset = data.tables["explanations"], data.dataset
        rows = table[:0]
        if "group" in table:
            rows = table[(table["round"] == table["round"].max()) & table["group"].notna()]
        if not len(rows):
            raise ExperimentError(
                f"{model.title}: no prior after the last round: clients do not agree on any group"
            )
        groups = group_parts(dataset.shape, self.size, dataset.parts)
        prior = np.zeros((len(dataset.classes), len(groups)))
        prior[rows["class"].astype(int), rows["group"].astype(int)] = rows["relevance"]
        return ClassPrior(model.title, dataset, groups, prior)


@dataclass(frozen=True)
class ClassPrior(Explanation):
    """The importance (C, G) of each group of parts for each class, zero for unknown classes."""

    title: str
    dataset: Dataset
    groups: Groups
    prior: NDArray[np.float64]

    @property
    def _classes(self) -> list[int]:
        return np.flatnonzero(self.prior.any(axis=1)).tolist()

    def text(self) -> str:
        lines = [f"{self.title}, the clients' prior for each class:"]
        for c in self._classes:
            order = np.argsort(-np.abs(self.prior[c]), kind="stable")[:MOST_NAMED]
            told = [f"{self._name(g)} {self.prior[c, g]:+.3g}" for g in order if self.prior[c, g]]
            lines.append(f"  {self.dataset.classes[c]}: {'; '.join(told)}")
        return "\n".join(lines)

    def rows(self) -> list[dict[str, float | int | str | None]]:
        classes, values = self.dataset.classes, self.prior
        return [
            {"class": classes[c], "group": self._name(g), "relevance": float(values[c, g])}
            for c, g in np.argwhere(values)
        ]

    def save(self, folder: Path) -> list[Path]:
        path, data, classes = picture(folder, "prior"), self.dataset, self._classes[:MOST_DRAWN]
        names = [data.classes[c] for c in classes]
        drawn = some(len(self._classes), "classes")
        title = f"the clients' prior for each class{drawn}, {self.title}"
        if len(data.shape) == 1:
            rows, xlabel = self.prior[classes], "relevance for the class"
            draw_bars(rows, data.feature_names, names, path, title=title, xlabel=xlabel)
            return [path]
        images = []
        for c in classes:
            own = as_pixels(data.test_x[data.test_y == c], data)
            images.append(own.mean(axis=0) if len(own) else np.zeros(data.shape, np.float32))
        heatmaps = [self.prior[c].astype(np.float32)[self.groups.index] for c in classes]
        draw_relevances(images, heatmaps, names, path, title)
        return [path]

    def _name(self, group: int) -> str:
        """The feature, or "rows 0–3, columns 4–7" of an image."""
        where = np.argwhere(self.groups.index == group)
        if where.shape[1] == 1:
            return self.dataset.feature_names[group]
        spans = (f"{low}–{high}" for low, high in zip(where.min(0), where.max(0), strict=True))
        return "rows {}, columns {}".format(*spans)
