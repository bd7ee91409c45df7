"""An explainer of a user's own: how strongly a network reacts to each of its inputs."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedsim.explain import ExplainedData, ExplainedModel, Explainer, Explanation
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures.rule_bases import draw_bars


class GradientNorm(Explainer):
    """The norm of the gradient of the greatest output with respect to the input."""

    name: str = "gradient_norm"

    def explain(
        self, model: ExplainedModel, data: ExplainedData, inputs: Inputs, rng: np.random.Generator
    ) -> Explanation:
        x = data.prepare(inputs.x).requires_grad_()
        grad = torch.autograd.grad(model.network(x).amax(dim=1).sum(), x)[0].flatten(1)
        return Norms(model.title, dict(zip(inputs.names, grad.norm(dim=1).tolist(), strict=True)))


@dataclass(frozen=True)
class Norms(Explanation):
    title: str
    norms: dict[str, float]

    def text(self) -> str:
        return "\n".join(f"{self.title}, {name}: {v:.4f}" for name, v in self.norms.items())

    def rows(self) -> list[dict[str, float | int | str | None]]:
        return [{"input": name, "norm": norm} for name, norm in self.norms.items()]

    def save(self, folder: Path) -> list[Path]:
        draw_bars(np.array([[*self.norms.values()]]), [*self.norms], [""], folder / "norms.png")
        return [folder / "norms.png"]
