"""Attributions in text and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsim.data import Dataset
from fedsim.data.dataset import feature_names
from fedsim.explain.explainer import Explanation
from fedsim.explain.figures import draw_bars
from fedsim.explain.highlight import Weighed, draw_weighed, in_short
from fedsim.explain.images import as_pixels, draw_relevances
from fedsim.explain.inputs import Inputs

MOST_DRAWN = 24  # inputs in a picture
MOST_NAMED = 5  # words or features for a decision, and as many against it


@dataclass(frozen=True)
class Attributed(Explanation):
    """What decisions of a network owe to each part of its inputs.

    Args:
        title: whose network.
        file: the picture's name, without its ending.
        attribution: the name of the attribution.
        dataset: that the inputs are like.
        inputs: n of them.
        relevance: (n, ...) signed, of pixels (channels are added up), features or words, for the
            class decided upon.
        decisions: that class, or the number predicted.
        probabilities: of the class; empty for a regression.
        baseline: what inputs are compared with; empty if with nothing.
    """

    title: str
    file: str
    attribution: str
    dataset: Dataset
    inputs: Inputs
    relevance: NDArray[np.float32]
    decisions: tuple[str, ...]
    probabilities: tuple[float, ...]
    baseline: str = ""

    @property
    def titles(self) -> tuple[str, ...]:
        """«row 3: predicted seven (98%), true class nine» of each input."""
        told = map(in_short, self.decisions, self._chances, self.inputs.labels)
        return tuple(f"{name}: {what}" for name, what in zip(self.inputs.names, told, strict=True))

    @property
    def _chances(self) -> tuple[float | None, ...]:
        return self.probabilities or (None,) * len(self.decisions)

    def text(self) -> str:
        """What each decision owes most to: words or features; of an image, to how much of it."""
        lines = [f"{self.title}, {self.attribution}:"]
        if self.baseline:
            lines.append(f"(baseline: {self.baseline})")
        for k, title in enumerate(self.titles):
            lines.append(f"\n{title}")
            if not self.relevance[k].any():
                lines.append("  nothing of it is of any relevance")
            elif self._images:
                lines.append(f"  half of the relevance is in {self._half(k):.1%} of its pixels")
            else:
                for about in ("for", "against"):
                    if told := self._most(k, about):
                        lines.append(f"  {about} it: {told}")
        return "\n".join(lines)

    def rows(self) -> list[dict[str, float | int | str | None]]:
        """Of each input: the decision, and what it owes most to, as in the text."""
        found: list[dict[str, float | int | str | None]] = []
        for k, name in enumerate(self.inputs.names):
            row: dict[str, float | int | str | None] = {
                "input": name,
                "decision": self.decisions[k],
                "probability": self._chances[k],
                "label": self.inputs.labels[k],
            }
            if self._images:
                row["half"] = self._half(k)
            else:
                row |= {about: self._most(k, about) for about in ("for", "against")}
            found.append(row)
        return found

    @property
    def _images(self) -> bool:
        return len(self.dataset.shape) == 3

    def _half(self, k: int) -> float:
        """In which share of an image's pixels half of the relevance is."""
        size = np.sort(np.abs(self.relevance[k]).ravel())[::-1]
        return (int(np.searchsorted(size.cumsum(), size.sum() / 2)) + 1) / size.size

    def _most(self, k: int, about: str) -> str:
        """What is most relevant `for` or `against` a decision: «lovely +1.2, head +0.3»."""
        own, parts = self.relevance[k].ravel(), self._parts(k)
        order = np.argsort(-own[: len(parts)], kind="stable").tolist()
        some = order[:MOST_NAMED] if about == "for" else order[::-1][:MOST_NAMED]
        told = [i for i in some if (own[i] > 0) == (about == "for") and own[i]]
        return ", ".join(f"{parts[i]} {own[i]:+.4g}" for i in told)

    def _parts(self, k: int) -> tuple[str, ...]:
        """What an input that is no image consists of."""
        data = self.dataset
        if data.words:
            return self.inputs.words[k]
        if len(data.shape) == 1:
            return feature_names(data.shape[0], data.features)
        return tuple(f"x[{', '.join(map(str, place))}]" for place in np.ndindex(*data.shape))

    def save(self, folder: Path) -> list[Path]:
        """Draw the inputs, the first ones if there are many, with what is owed to their parts."""
        path, title = folder / f"{self.file}.png", f"{self.title}, {self.attribution}"
        data, x = self.dataset, self.inputs.x[:MOST_DRAWN]
        titles, relevance = self.titles[:MOST_DRAWN], self.relevance[:MOST_DRAWN]
        if data.words:
            documents = [
                Weighed(
                    words,
                    self.decisions[k],
                    self.probabilities[k],
                    self.inputs.labels[k],
                    tuple(self.relevance[k, : len(words)].tolist()),
                )
                for k, words in enumerate(self.inputs.words[:MOST_DRAWN])
            ]
            draw_weighed(documents, path, title)
        elif self._images:
            captions = [title.replace(": ", "\n", 1) for title in titles]
            draw_relevances(list(as_pixels(x, data)), list(relevance), captions, path, title)
        else:
            rows = relevance.reshape(len(x), -1).astype(np.float64)
            predicted = "class" if self.probabilities else "value"
            xlabel = f"relevance for the predicted {predicted}"
            draw_bars(rows, self._parts(0), titles, path, title=title, xlabel=xlabel)
        return [path]
