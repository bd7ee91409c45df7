"""An explainer of a user's own: how strongly a network reacts to each of its inputs."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsim.explain import ExplainedData, ExplainedModel, Explainer, Explanation
from fedsim.explain.figures import draw_bars
from fedsim.explain.inputs import Inputs


class GradientNorm(Explainer):
    """The norm of the gradient of the greatest output with respect to the input."""

    name: str = "gradient_norm"

    def explain(
        self, model: ExplainedModel, data: ExplainedData, inputs: Inputs, rng: np.random.Generator
    ) -> Explanation:
        x = data.prepare(inputs.x).requires_grad_()
        model.network(x).amax(dim=1).sum().backward()
        return Norms(model, inputs.names, x.grad.flatten(1).norm(dim=1).cpu().numpy())


@dataclass(frozen=True)
class Norms(Explanation):
    model: ExplainedModel
    names: tuple[str, ...]
    norms: np.ndarray

    def text(self) -> str:
        return "\n".join(f"{self.model.title}, {r['input']}: {r['norm']:.4f}" for r in self.rows())

    def rows(self) -> list[dict[str, float | int | str | None]]:
        return [
            {"input": n, "norm": float(g)} for n, g in zip(self.names, self.norms, strict=True)
        ]

    def save(self, folder: Path) -> list[Path]:
        draw_bars(self.norms[None], self.names, [self.model.title], folder / "norms.png")
        return [folder / "norms.png"]
