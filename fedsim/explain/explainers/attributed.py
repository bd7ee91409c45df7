"""Attributions in text and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsim.data import Dataset
from fedsim.explain.explainer import Explanation
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures.canvas import MOST_DRAWN, picture, some
from fedsim.explain.pictures.documents import Weighed, draw_weighed, in_short
from fedsim.explain.pictures.images import as_pixels, draw_relevances
from fedsim.explain.pictures.rule_bases import draw_bars
from fedsim.explain.scores.relevance import silence

MOST_NAMED = 5  # words or features for a decision, and the same number against it


@dataclass(frozen=True)
class Attributed(Explanation):
    """The relevance of each part of inputs for a network's decisions.

    Args:
        title: whose decisions.
        file: how the names of pictures begin.
        attribution: what the explainer is called.
        dataset, inputs: where the n inputs are from, and which.
        relevance: (n, ...) signed, of pixels (summed over channels), features or words, for the
            predicted class; or for the predicted number, in its own units.
        decisions: the predicted class or number.
        probabilities: probability of the class; empty for a regression.
        baseline: what inputs are compared with; empty if there is no baseline.
        compared: (m, ...) the relevances whose scale and order bars have, also those of other
            models; empty for this one's alone.
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
    compared: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))

    def beside(self, others: Sequence[Explanation]) -> Attributed:
        """The same; bars have one order and one scale in all pictures."""
        maps = [one.relevance for one in others if isinstance(one, Attributed)]
        return replace(self, compared=np.concatenate(maps))

    @property
    def titles(self) -> tuple[str, ...]:
        """For each input, as in "row 3: predicted seven (98%), true class nine"."""
        told = map(in_short, self.decisions, self._chances, self.inputs.labels)
        return tuple(f"{name}: {what}" for name, what in zip(self.inputs.names, told, strict=True))

    @property
    def _chances(self) -> tuple[float | None, ...]:
        return self.probabilities or (None,) * len(self.decisions)

    def text(self) -> str:
        lines = [f"{self.title}, {self.attribution}:"]
        if self.baseline:
            lines.append(f"(baseline: {self.baseline})")
        for k, title in enumerate(self.titles):
            lines.append(f"\n{title}")
            if why := self._silence(k):
                lines.append(f"  {why}, so this says nothing")
            elif self.images:
                lines.append(f"  half of the relevance is in {self._half(k):.1%} of its pixels")
            else:
                words = {"for": "for it", "against": "against it"}
                if not self.probabilities:  # a number
                    words = {"for": "raises it", "against": "lowers it"}
                for about, word in words.items():
                    if told := self._most(k, about):
                        lines.append(f"  {word}: {told}")
        return "\n".join(lines)

    def rows(self) -> list[dict[str, float | int | str | None]]:
        found: list[dict[str, float | int | str | None]] = []
        for k, name in enumerate(self.inputs.names):
            found.append({"input": name, "decision": self.decisions[k]})
            found[k] |= {"probability": self._chances[k], "label": self.inputs.labels[k]}
            if self.images:
                found[k]["half"] = None if self._silence(k) else self._half(k)
            else:
                found[k] |= {about: self._most(k, about) for about in ("for", "against")}
            if why := self._silence(k):
                found[k]["says nothing"] = why
        return found

    @property
    def images(self) -> bool:
        """Whether its inputs are images."""
        return len(self.dataset.shape) == 3

    def _silence(self, k: int) -> str:
        """Why the relevances of an input say nothing; empty if they do."""
        own = self.relevance[k].ravel()
        if self.images:
            return silence(own, "pixels")
        return silence(own[: len(self.parts(k))], "words" if self.dataset.words else "features")

    def _half(self, k: int) -> float:
        """The share of an image's pixels that has half of the relevance."""
        size = np.sort(np.abs(self.relevance[k]).ravel())[::-1]
        return (int(np.searchsorted(size.cumsum(), size.sum() / 2)) + 1) / size.size

    def _most(self, k: int, about: str) -> str:
        """The most relevant parts `for` or `against` a decision: "lovely +1.2, head +0.3"."""
        if self._silence(k):
            return ""
        own, parts = self.relevance[k].ravel(), self.parts(k)
        order = np.argsort(-own[: len(parts)], kind="stable").tolist()
        some = order[:MOST_NAMED] if about == "for" else order[::-1][:MOST_NAMED]
        told = [i for i in some if (own[i] > 0) == (about == "for") and own[i]]
        return ", ".join(f"{parts[i]} {own[i]:+.4g}" for i in told)

    def parts(self, k: int | None) -> tuple[str, ...]:
        """The parts of an input that is not an image; those of all of them for None."""
        data = self.dataset
        if data.words and k is not None:
            return self.inputs.words[k]
        if len(data.shape) == 1:
            return data.feature_names if k is None else self.inputs.shown(data, k)
        return tuple(f"x[{', '.join(map(str, place))}]" for place in np.ndindex(*data.shape))

    @property
    def attributed(self) -> Attributed:
        """Itself, as explanations are asked for their relevances."""
        return self

    @property
    def _largest(self) -> list[float]:
        """The largest relevance of each input in all models' maps; empty for one model's alone."""
        if not self.compared.size:
            return []
        size = np.where(np.isfinite(self.compared), np.abs(self.compared), 0)
        return size.reshape(-1, len(self.relevance), self.relevance[0].size).max((0, 2)).tolist()

    def save(self, folder: Path) -> list[Path]:
        path, title = picture(folder, self.file), f"{self.title}, {self.attribution}"
        data, x, largest = self.dataset, self.inputs.x[:MOST_DRAWN], self._largest[:MOST_DRAWN]
        title += some(len(self.inputs.x), "inputs")
        titles, relevance = self.titles[:MOST_DRAWN], self.relevance[:MOST_DRAWN]
        if data.words:
            about = zip(self.decisions, self.probabilities, self.inputs.labels, strict=True)
            shown = list(zip(self.inputs.words, about, relevance.tolist(), strict=False))
            documents = [Weighed(words, *of, tuple(r[: len(words)])) for words, of, r in shown]
            draw_weighed(documents, self.inputs.names[: len(x)], path, title, largest)
        elif self.images:
            captions = [  # a line for the name, the decision and the truth each
                title.replace(": ", "\n", 1).replace(", true", "\ntrue", 1) for title in titles
            ]
            images = list(as_pixels(x, data))
            draw_relevances(images, list(relevance), captions, path, title, largest)
        else:
            rows = relevance.reshape(len(x), -1).astype(np.float64)
            compared = self.compared.astype(np.float64).reshape(-1, rows.shape[1])
            parts = self.parts(0 if len(x) == 1 else None)
            what, signs = "class", ("for it", "against it")
            if not self.probabilities:
                what, signs = "value", ("raises it", "lowers it")
            words = f"relevance for the predicted {what}"
            draw_bars(rows, parts, titles, path, 12, title, words, compared, signs)
        return [path]
