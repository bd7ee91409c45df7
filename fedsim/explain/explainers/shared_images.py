"""Images that clients share, next to their original images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedsim.data.labels import draw_labels
from fedsim.errors import ExperimentError
from fedsim.explain import ExplainedData, ExplainedModel, Explainer, Explanation
from fedsim.explain.explainer import explainers
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures.canvas import picture
from fedsim.explain.pictures.images import Example, draw_shared
from fedsim.support.words import MOST_ROWS, columns


@explainers.register
class SharedImagesExplainer(Explainer):
    """Shared images next to the originals, and how many of each class each client shared."""

    niche: ClassVar[bool] = True
    name: str = "shared_images"
    takes_inputs: ClassVar[bool] = False
    whole_run: ClassVar[bool] = True
    takes_clients: ClassVar[bool] = True

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        if data.shared is None:
            raise ExperimentError(f"{model.title}: its method does not share masked images")

    def explain(
        self, model: ExplainedModel, data: ExplainedData, inputs: Inputs, rng: Generator
    ) -> Explanation:
        assert data.shared is not None
        shared = data.shared()
        examples = []
        for k, items in shared.images.items():
            labels, first = np.unique(items["labels"], return_index=True)
            for label, i in zip(labels.tolist(), first.tolist(), strict=True):
                one = (items[name][i] for name in ("held", "heatmaps", "masks", "shared"))
                examples.append(Example(k, label, *one))
        if not examples:
            raise ExperimentError(f"{model.title}: none of these clients shared an image")
        pool = np.zeros((shared.clients, len(data.dataset.classes)), dtype=np.int64)
        table = data.tables["explanations"][["client", "class", "images"]].astype(int)
        pool[table["client"], table["class"]] = table["images"]
        return SharedImages(
            *(model.title, model.suffix, tuple(examples), pool, data.dataset.classes),
            *(shared.words, data.clients),
        )


@dataclass(frozen=True)
class SharedImages(Explanation):
    """Clients' images, and what they shared of them.

    Args:
        examples: the first image of each selected client and each class that it shared.
        pool: (K, classes) number of images that each client shared.
        words: how the images were made, and the guarantee of the noise.
    """

    title: str
    suffix: str
    examples: tuple[Example, ...]
    pool: NDArray[np.int64]
    classes: tuple[str, ...]
    words: str
    clients: Sequence[str] = ()

    def text(self) -> str:
        names = self.clients or [*map(str, range(len(self.pool)))]
        rows = [
            [name, *(str(n) if n else "·" for n in row), str(sum(row))]
            for name, row in zip(names, self.pool[:MOST_ROWS].tolist(), strict=False)
        ]
        lines = [columns(("client", *self.classes, "all"), rows)]
        if len(self.pool) > MOST_ROWS:
            lines.append(f"… and {len(self.pool) - MOST_ROWS} more clients")
        return "\n".join([*lines, f"\n{self.pool.sum():,} images are shared; {self.words}"])

    def rows(self) -> list[dict[str, float | int | str | None]]:
        return [
            {"client": k, **dict(zip(self.classes, row, strict=True))}
            for k, row in enumerate(self.pool.tolist())
        ]

    def save(self, folder: Path) -> list[Path]:
        images, pool = picture(folder, f"shared_images{self.suffix}"), picture(folder, "pool")
        title = f"shared images, {self.title}"
        draw_shared(self.examples, self.classes, images, title, self.clients)
        draw_labels(self.pool, self.classes, pool, clients=self.clients)
        return [images, pool]
