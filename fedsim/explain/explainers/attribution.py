"""Attributions: the relevance of each entry of an input for a network's output.

An attribution assigns a signed number to every entry of an input x, its relevance for the logit
f_y(x) of the example's true class y. Positive values speak for the class, negative values against
it; no absolute values are taken. FedXDS removes the least relevant pixels before it shares an
image.

Attributions that differentiate have an option `target`, the output that is explained: the logit
f_y(x) of the example's class (`class`), or its distance from the mean logit, f_y(x) − 1/C Σ_c
f_c(x) (`centred`), which does not change, like the softmax, if a constant is added to all logits.
FedXDS's released code explains several classes at once: LRP's `batch` and gradients' `outputs`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.config.registry import Registry
from fedsim.data import Dataset
from fedsim.data.tokens import words_of
from fedsim.errors import ExperimentError
from fedsim.explain.baselines import Background, Compared
from fedsim.explain.calls import by_words
from fedsim.explain.explainer import (
    ExplainedData,
    ExplainedModel,
    Explanation,
    FeatureExplainer,
)
from fedsim.explain.explainers.attributed import Attributed
from fedsim.explain.groups import by_feature
from fedsim.explain.inputs import Inputs
from fedsim.explain.scores.faithfulness import PartOf
from fedsim.models.rationale import RationaleClassifier
from fedsim.support.gradients import vector_jacobian
from fedsim.training import logits

# Rows at a time, fixed because the bits of a matrix product depend on their number.
BATCH = 64


class OfDecision(FeatureExplainer, ABC):
    """Explains single decisions by relevances, in text and pictures."""

    def about_baseline(self, data: Dataset) -> str:
        """What inputs are compared with, in words; empty if with nothing."""
        return ""

    @property
    def file(self) -> str:
        """How names of pictures begin."""
        return self.name

    def explain(
        self, model: ExplainedModel, data: ExplainedData, inputs: Inputs, rng: Generator
    ) -> Explanation:
        """The relevance of each part of the inputs for the predicted class."""
        x, classes = data.prepare(inputs.x), data.dataset.classes
        outputs = torch.from_numpy(logits(model.as_network(), x))
        best = outputs.argmax(dim=1)
        relevance = self.each(model, data, x, best.clone().to(x.device), rng)
        if classes:
            chances = tuple(outputs.softmax(dim=1).amax(dim=1).tolist())
            decisions = tuple(classes[c] for c in best.tolist())
        else:
            scaling = data.dataset.target_scaling
            relevance = relevance * np.float32(scaling.span)
            values = scaling.undo(outputs[:, 0].double().numpy())
            chances, decisions = (), tuple(f"{value:.6g}" for value in values)
        inputs, relevance = inputs.joined(data.dataset, relevance)
        return Attributed(
            title=model.title,
            file=f"{self.file}{model.suffix}{inputs.suffix}",
            attribution=self.label,
            dataset=data.dataset,
            inputs=inputs,
            relevance=relevance,
            decisions=decisions,
            probabilities=chances,
            baseline=self.about_baseline(data.dataset),
        )


class Attribution(OfDecision, ABC):
    """Base class of attributions, which measure the relevance of each entry of an input.

    Attributes:
        differentiates: whether it needs gradients, which rules do not have.
        documents: whether it explains documents, if it needs gradients at their words' vectors.
    """

    differentiates: ClassVar[bool] = False
    documents: ClassVar[bool] = False

    def check_network(self, network: nn.Module) -> None:
        """Reject networks that the attribution cannot explain, before anything starts.

        Raises:
            ExperimentError: it cannot; the message names the layer and an alternative.
        """

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Reject inputs of a shape that the attribution cannot explain.

        Raises:
            ExperimentError: it cannot; the message says what it can.
        """

    @abstractmethod
    def relevance(self, network: nn.Module, x: Tensor, y: Tensor, rng: Generator) -> Tensor:
        """The signed relevance of every input entry for the logit of the example's own class.

        Computed in evaluation mode. The network's modes, parameters, gradients and hooks are left
        unchanged. Torch's global random generators are not touched.

        Args:
            network: inputs (B, ...) to logits (B, classes).
            x: (B, ...) floating-point inputs, on the network's device.
            y: (B,) class indices.
            rng: source of randomness.

        Returns:
            Relevances in the shape of x.

        Raises:
            ExperimentError: the inputs or the network cannot be explained in this way.
        """

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        self.check_shape(data.dataset.shape)
        if model.network is None:
            if self.differentiates:
                raise ExperimentError(
                    f"explainer {self.name}: explains networks; "
                    f"model.name={model.section.name} is a {model.section.kind}"
                )
            return
        if data.dataset.words and self.differentiates and not self.documents:
            raise _of_numbers(self.name, "these are documents")
        self.check_network(model.network)
        refuse_sampled(model.network)
        if self.differentiates:  # some problems show only in a call
            x, y = data.prepare(data.dataset.x[:1]), torch.zeros(1, dtype=torch.int64)
            self.relevance_in(model, data, x, y, np.random.default_rng(0))

    def relevances(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor, rng: Generator
    ) -> NDArray[np.float32]:
        found = self.relevance_in(model, data, x, y, rng)
        if len(data.dataset.shape) == 3:
            found = heatmap(found)
        return by_feature(found.cpu(), data.dataset.parts).numpy()

    def relevance_in(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor, rng: Generator
    ) -> Tensor:
        """`relevance`, with what the attribution needs to know about the data, if anything."""
        return self.relevance(model.as_network(), x, y, rng)


attributions: Registry[Attribution] = Registry("attribution", Attribution)  # type: ignore[type-abstract]


def heatmap(relevance: Tensor) -> Tensor:
    """The sum over the channels: (B, C, H, W) to (B, H, W); vectors (B, F) are unchanged."""
    return relevance.sum(1) if relevance.dim() > 2 else relevance


class FromBaseline(Compared, Attribution):
    """Base class of attributions that compare an input with a baseline."""

    @property
    def at_vectors(self) -> bool:
        return self.differentiates

    def relevance(self, network: nn.Module, x: Tensor, y: Tensor, rng: Generator) -> Tensor:
        if self.baseline != "zero":
            raise ExperimentError(
                f"explainer {self.name}: only explanations of whole data sets have a baseline "
                "other than zero here; leave out `baseline`"
            )
        return self.compared(network, x, y, None, None)

    def relevance_in(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor, rng: Generator
    ) -> Tensor:
        background = self.background(model, data, x)
        part_of, own = data.dataset.parts, data.dataset
        if own.tokenizer:
            part_of = words_of(own.tokenizer, own.padding, x.cpu().numpy())
        return self.compared(model.as_network(), x, y, background, part_of)

    @abstractmethod
    def compared(
        self,
        network: nn.Module,
        x: Tensor,
        y: Tensor,
        background: Background | None,
        part_of: PartOf,
    ) -> Tensor:
        """`relevance`, in comparison with baselines, or with zeros.

        Args:
            background: the baselines; None for zeros.
            part_of: (W,) the feature of each entry, if features take several; (B, L) the word of
                each token, −1 for padding, if words do.
        """


@dataclass(frozen=True)
class Output:
    """The output f_t that is explained, of a batch of inputs (b, ...) or of k copies of all.

    Args:
        attribution: whose target it is.
        network: what the inputs go through.
        of: the same as a function of what is differentiated, such as words' vectors.
        y: (b,) the classes.
        rows: where the batch is among all inputs.
    """

    attribution: OfGradients
    network: nn.Module
    of: Callable[[Tensor], Tensor]
    y: Tensor
    rows: slice

    @torch.no_grad()
    def __call__(self, x: Tensor) -> NDArray[np.float64]:
        """(k·b,) f_t."""
        outputs = self.of(x).double().cpu()
        return self.attribution.explained(outputs, self.y.cpu().repeat(len(x) // len(self.y)))

    def gradient(self, x: Tensor) -> Tensor:
        """∂f_t/∂x."""
        inputs, own = x.detach().clone().requires_grad_(), self.attribution
        with torch.enable_grad(), own.calling(self.network):
            logits = self.of(inputs)
        found = None
        if logits.requires_grad:
            if own.target == "outputs":
                of_logits = logits.detach()
            else:
                y = self.y.repeat(len(x) // len(self.y))
                of_logits = contrast(own.target, own.name, logits, y)
            (found,) = vector_jacobian(logits, [inputs], of_logits, allow_unused=True)
        if found is None:
            raise ExperimentError(
                f"explainer {own.name}: the network's outputs cannot be differentiated with "
                "respect to its inputs"
            )
        return found


class OfGradients(Attribution):
    """Base class of attributions from gradients of an output, for any differentiable network."""

    differentiates: ClassVar[bool] = True
    target: Literal["class", "centred", "outputs"] = "class"

    def explained(self, outputs: Tensor, y: Tensor) -> NDArray[np.float64]:
        if self.target == "outputs":
            return (outputs.double() ** 2).sum(dim=1).numpy() / 2
        weights = contrast(self.target, self.name, outputs, y)
        return (weights * outputs).double().sum(dim=1).numpy()

    def by_batch(
        self,
        network: nn.Module,
        x: Tensor,
        y: Tensor,
        explain: Callable[[Output, Tensor], Tensor],
        size: int | None = None,
    ) -> Tensor:
        """The relevances by `explain`, which gets f_t and a batch of inputs.

        Args:
            size: inputs at a time; by default `BATCH`.
        """
        if not self.documents:
            refuse_integers(self.name, x)
        x = x.detach()
        found = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        with evaluation(network), differentiable_rnn(network, x):
            for rows in batches(x, size):
                if x.is_floating_point():
                    found[rows] = explain(Output(self, network, network, y[rows], rows), x[rows])
                    continue
                vectors, of_vectors = by_words(f"explainer {self.name}", network, x[rows])
                output = Output(self, network, of_vectors, y[rows], rows)
                found[rows, : vectors.shape[1]] = explain(output, vectors).sum(dim=2)
        return found if x.is_floating_point() else found.masked_fill(x == 0, 0)

    def calling(self, network: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """What the network is called in."""
        return contextlib.nullcontext()


def contrast(target: str, name: str, logits: Tensor, y: Tensor) -> Tensor:
    """(b, C) the weights of the logits in f_y, or in f_y − 1/C Σ_c f_c."""
    weights = one_hot(logits, y)
    if target == "class":
        return weights
    if logits.shape[1] == 1:
        raise ExperimentError(
            f"explainer {name}: target=centred compares classes, and there is one output; use "
            "target=class"
        )
    return weights - 1 / logits.shape[1]


def one_hot(logits: Tensor, y: Tensor) -> Tensor:
    """(b, C) 1 for the class of each row."""
    return torch.zeros_like(logits).scatter_(1, y.to(logits.device).long()[:, None], 1)


def batches(x: Tensor, size: int | None = None) -> Iterable[slice]:
    size = size or BATCH
    return (slice(start, start + size) for start in range(0, len(x), size))


def refuse_integers(name: str, x: Tensor) -> None:
    """Reject documents; raises ExperimentError."""
    if not x.is_floating_point():
        raise _of_numbers(name, f"these are {str(x.dtype).removeprefix('torch.')}")


def _of_numbers(name: str, found: str) -> ExperimentError:
    able = ", ".join(n for n, one in attributions.items() if one.documents)
    return ExperimentError(
        f"explainer {name}: needs inputs of floating point, such as images; {found}; for "
        f"documents: occlusion, {able}"
    )


def refuse_sampled(network: nn.Module) -> None:
    """Reject networks that draw in evaluation; raises ExperimentError."""
    if isinstance(network, RationaleClassifier) and network.features.evaluate == "sampled":
        raise ExperimentError(
            "model.evaluate=sampled samples the words that it reads, so an attribution "
            "would be random"
        )


@contextlib.contextmanager
def evaluation(network: nn.Module) -> Iterator[None]:
    """Context in which all modules are in evaluation mode; afterwards modes are restored."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def differentiable_rnn(network: nn.Module, x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Context without cuDNN's recurrent layers, which have no gradient in evaluation mode."""
    if x.is_cuda and any(isinstance(module, nn.RNNBase) for module in network.modules()):
        return torch.backends.cudnn.flags(enabled=False)
    return contextlib.nullcontext()
