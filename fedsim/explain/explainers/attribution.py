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
import copy
import importlib
import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.config.registry import Registry, import_object
from fedsim.data import Dataset
from fedsim.data.tokens import words_of
from fedsim.errors import ExperimentError
from fedsim.explain.baselines import Baseline, Reference, baseline_of, in_words
from fedsim.explain.calls import RESHAPING, by_words, calls_between, function, name_of, names
from fedsim.explain.explainer import (
    ExplainedData,
    ExplainedModel,
    Explanation,
    FeatureExplainer,
    explainers,
)
from fedsim.explain.explainers.attributed import Attributed
from fedsim.explain.groups import by_feature, check_size, group_parts
from fedsim.explain.inputs import Inputs
from fedsim.explain.scores.faithfulness import PartOf, without
from fedsim.models.networks import ResidualBlock
from fedsim.models.rationale import RationaleClassifier
from fedsim.support.extras import require
from fedsim.training import logits

# Rows at a time, fixed because the bits of a matrix product depend on their number.
BATCH = 64

_COMPARED = 8  # rows on which the canonised network is compared with the network


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
            attribution=self.name,
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
                    f"attribution {self.name} explains networks; "
                    f"model.name={model.section.name} is a {model.section.kind}"
                )
            return
        if data.dataset.words and self.differentiates and not self.documents:
            raise _of_numbers(self.name, "these are documents")
        self.check_network(model.network)
        if (
            isinstance(model.network, RationaleClassifier)
            and model.network.features.evaluate == "sampled"
        ):
            raise ExperimentError(
                "model.evaluate=sampled samples the words that it reads, so an attribution "
                "would be random"
            )
        if self.differentiates:  # some problems show only in a call
            x, y = data.prepare(data.dataset.x[:1]), torch.zeros(1, dtype=torch.int64)
            self.relevance_in(data, model.network, x, y, np.random.default_rng(0))

    def relevances(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor, rng: Generator
    ) -> NDArray[np.float32]:
        found = self.relevance_in(data, model.as_network(), x, y, rng)
        if len(data.dataset.shape) == 3:
            found = heatmap(found)
        return by_feature(found.cpu(), data.dataset.parts).numpy()

    def relevance_in(
        self, data: ExplainedData, network: nn.Module, x: Tensor, y: Tensor, rng: Generator
    ) -> Tensor:
        """`relevance`, with what the attribution needs to know about the data, if anything."""
        return self.relevance(network, x, y, rng)


attributions: Registry[Attribution] = Registry("attribution", Attribution)  # type: ignore[type-abstract]


def heatmap(relevance: Tensor) -> Tensor:
    """The sum over the channels: (B, C, H, W) to (B, H, W); vectors (B, F) are unchanged."""
    return relevance.sum(1) if relevance.dim() > 2 else relevance


class _FromBaseline(Attribution):
    """Base class of attributions that compare an input with another one, the baseline.

    Attributes:
        baseline: `zero`; the `mean` or the `median` of the training inputs, entry by entry; the
            mean of the `clients`' means, as they could send them; or a row of the central test
            set, `{reference: 12}`. Of documents `zero` alone: the document without a word, or
            zero vectors of words for what needs gradients.
    """

    baseline: Baseline = "zero"

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        super().check(model, data)
        if self.baseline != "zero":
            baseline_of(self.baseline, data)

    def about_baseline(self, data: Dataset) -> str:
        if data.words and self.differentiates:
            return "zero in each entry of the words' vectors"
        return in_words(self.baseline, data)

    @property
    def file(self) -> str:
        if self.baseline == "zero":
            return self.name
        chosen = self.baseline
        told = f"row-{chosen.reference}" if isinstance(chosen, Reference) else chosen
        return f"{self.name}-baseline-{told}"

    def relevance(self, network: nn.Module, x: Tensor, y: Tensor, rng: Generator) -> Tensor:
        if self.baseline != "zero":
            raise ExperimentError(
                f"attribution {self.name}: only explanations of whole data sets have a baseline "
                "other than zero here; leave out `baseline`"
            )
        return self.compared(network, x, y, None, None)

    def relevance_in(
        self, data: ExplainedData, network: nn.Module, x: Tensor, y: Tensor, rng: Generator
    ) -> Tensor:
        baseline = None if self.baseline == "zero" else baseline_of(self.baseline, data).to(x)
        part_of, own = data.dataset.parts, data.dataset
        if own.tokenizer:
            part_of = words_of(own.tokenizer, own.padding, x.cpu().numpy())
        return self.compared(network, x, y, baseline, part_of)

    @abstractmethod
    def compared(
        self,
        network: nn.Module,
        x: Tensor,
        y: Tensor,
        baseline: Tensor | None,
        part_of: PartOf,
    ) -> Tensor:
        """`relevance`, in comparison with a baseline (1, ...), or with zeros.

        Args:
            part_of: (W,) the feature of each entry, if features take several; (B, L) the word of
                each token, −1 for padding, if words do.
        """


class OfGradients(Attribution):
    """Base class of attributions from gradients of an output, for any differentiable network."""

    differentiates: ClassVar[bool] = True
    target: Literal["class", "centred", "outputs"] = "class"

    def by_batch(
        self, network: nn.Module, x: Tensor, y: Tensor, explain: Callable[..., Tensor]
    ) -> Tensor:
        """The relevances by `explain`, which gets ∂f_t/∂x as a function, and a batch of inputs."""
        if not self.documents:
            _refuse_integers(self.name, x)
        x = x.detach()
        found = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        with evaluation(network), _differentiable_rnn(network, x):
            for rows in batches(x):
                if x.is_floating_point():
                    gradient = partial(self._gradient, network, network, y[rows])
                    found[rows] = explain(gradient, x[rows])
                    continue
                vectors, of_vectors = by_words(f"attribution {self.name}", network, x[rows])
                own = explain(partial(self._gradient, network, of_vectors, y[rows]), vectors)
                found[rows, : own.shape[1]] = own.sum(dim=2)
        return found if x.is_floating_point() else found.masked_fill(x == 0, 0)

    def calling(self, network: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """What the network is called in."""
        return contextlib.nullcontext()

    def _gradient(
        self, network: nn.Module, of: Callable[[Tensor], Tensor], y: Tensor, x: Tensor
    ) -> Tensor:
        """∂f_t/∂x at a batch of inputs, or at several changed copies of all of them."""
        inputs = x.detach().clone().requires_grad_()
        with torch.enable_grad(), self.calling(network):
            logits = of(inputs)
        found = None
        if logits.requires_grad:
            if self.target == "outputs":
                of_logits = logits.detach()
            else:
                of_logits = contrast(self.target, self.name, logits, y.repeat(len(x) // len(y)))
            (found,) = torch.autograd.grad(logits, inputs, of_logits, allow_unused=True)
        if found is None:
            raise ExperimentError(
                f"attribution {self.name}: the network's outputs cannot be differentiated with "
                "respect to its inputs"
            )
        return found


@explainers.register
@attributions.register
class Gradient(OfGradients):
    """Gradient of the logit: R = ∂f_y(x)/∂x.

    Args:
        target: the output that is explained: the logit f_y of the example's class (`class`), f_y
            less the mean logit (`centred`), or ½ Σ_c f_c² (`outputs`), as in FedXDS's released
            code.

    Source: Simonyan et al. (ICLR 2014 workshop), without the absolute value.
    """

    name: str = "gradient"

    def relevance(self, network: nn.Module, x: Tensor, y: Tensor, rng: Generator) -> Tensor:
        return self.by_batch(network, x, y, lambda gradient, some: gradient(some))


@explainers.register
@attributions.register
class GradientXInput(_FromBaseline, OfGradients):
    """Gradient times input: R = (x − x') ⊙ ∂f_y(x)/∂x, with a baseline x', usually zero.

    For a piecewise linear network without biases, the relevances from zero sum to the logit.
    Documents are explained at their words' vectors, over whose entries relevances are summed.

    Args:
        baseline: x'; see `integrated_gradients`.
        target: the output that is explained; see `gradient`.

    Source: Shrikumar et al. (2016), "Not Just a Black Box".
    """

    name: str = "gradient_x_input"
    documents: ClassVar[bool] = True

    def compared(
        self, network: nn.Module, x: Tensor, y: Tensor, baseline: Tensor | None, part_of: PartOf
    ) -> Tensor:
        def explain(gradient: Callable[[Tensor], Tensor], some: Tensor) -> Tensor:
            return (some if baseline is None else some - baseline) * gradient(some)

        return self.by_batch(network, x, y, explain)


@explainers.register
@attributions.register
class SmoothGrad(OfGradients):
    """SmoothGrad, the mean gradient near an input: R = 1/n Σ_i ∂f_y(x + ε_i)/∂x, ε_i ~ N(0, σ²).

    σ = noise·(max x − min x), separately for each example. All n samples are noisy, as in the
    paper; Zennit leaves the last one clean. FedXDS's code for SmoothGrad does not run, so it
    cannot be followed.

    Args:
        noise: σ as a share of the example's range.
        samples: n, number of noisy samples.
        target: the output that is explained; see `gradient`.

    Source: Smilkov et al. (2017).
    """

    name: str = "smoothgrad"
    draws: ClassVar[bool] = True
    noise: float = Field(0.1, ge=0)
    samples: int = Field(20, ge=1)

    def relevance(self, network: nn.Module, x: Tensor, y: Tensor, rng: Generator) -> Tensor:
        return self.by_batch(network, x, y, partial(self._smooth, rng))

    def _smooth(self, rng: Generator, gradient: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        rows = x.flatten(1)
        spread = (rows.amax(1) - rows.amin(1)).view(-1, *[1] * (x.dim() - 1))
        # an example's samples are drawn together, so that the draws do not depend on the batch
        draws = rng.standard_normal((len(x), self.samples, *x.shape[1:]), dtype=np.float32)
        total, together = torch.zeros_like(x), max(1, BATCH // len(x))  # samples at a time
        for i in range(0, self.samples, together):
            some = torch.from_numpy(draws[:, i : i + together]).to(x).transpose(0, 1)
            noisy = x + self.noise * spread * some
            total += gradient(noisy.flatten(0, 1)).view_as(noisy).sum(0)
        return total / self.samples


@explainers.register
@attributions.register
class IntegratedGradients(_FromBaseline, OfGradients):
    """Integrated gradients, R = (x − x') ⊙ 1/m Σ_{k=1..m} ∂f_y(x' + k/m·(x − x'))/∂x.

    The baseline x' is usually zero as the network takes it: the mean pixel if the data are
    normalised, otherwise black, or the minimum of a scaled feature. With many steps the relevances
    sum to f_y(x) − f_y(x'). Documents are explained at their words' vectors, over whose entries
    relevances are summed.

    Args:
        baseline: x': `zero`; the `mean` or the `median` of the training inputs, entry by entry;
            the mean of the `clients`' means; or a row of the central test set, `{reference: 12}`.
        steps: m, number of steps; FedXDS uses 20.
        target: the output that is explained; see `gradient`.

    Source: Sundararajan et al. (ICML 2017), the sum of their section 5.
    """

    name: str = "integrated_gradients"
    documents: ClassVar[bool] = True
    steps: int = Field(20, ge=1)

    def compared(
        self, network: nn.Module, x: Tensor, y: Tensor, baseline: Tensor | None, part_of: PartOf
    ) -> Tensor:
        def explain(gradient: Callable[[Tensor], Tensor], some: Tensor) -> Tensor:
            change, total = some if baseline is None else some - baseline, torch.zeros_like(some)
            for k in range(1, self.steps + 1):
                step = k / self.steps * change
                total += gradient(step if baseline is None else baseline + step)
            return change * total / self.steps

        return self.by_batch(network, x, y, explain)


@explainers.register
@attributions.register
class Random(Attribution):
    """A random control that ignores the network: R ~ U[−1, 1) for each entry or word.

    As it should, it fails the check that maps depend on the weights (`fedsim explain --check`).
    """

    name: str = "random"
    draws: ClassVar[bool] = True

    def relevance(self, network: nn.Module, x: Tensor, y: Tensor, rng: Generator) -> Tensor:
        draws = 2 * torch.from_numpy(rng.random(tuple(x.shape), dtype=np.float32)) - 1
        found = draws.to(x.device)
        return found if x.is_floating_point() else found.masked_fill(x == 0, 0)

    def relevance_in(
        self, data: ExplainedData, network: nn.Module, x: Tensor, y: Tensor, rng: Generator
    ) -> Tensor:
        found = self.relevance(network, x, y, rng)
        if data.dataset.parts is not None:  # a feature of many entries is no more likely to count
            found[:, np.flatnonzero(np.diff(data.dataset.parts, prepend=-1) == 0)] = 0
        return found


@explainers.register
@attributions.register
class Occlusion(_FromBaseline):
    """Occlusion, the drop of the logit without a part of x: R = f_y(x) − f_y(x without it).

    For images, one square at a time is set to the baseline, usually zero (the mean pixel if the
    data are normalised), and the drop is spread evenly over its pixels and channels; for vectors,
    one entry at a time, or all entries of a feature; for documents, one word at a time is left
    out. Works with any network, differentiable or not.

    Args:
        baseline: see `integrated_gradients`.
        size: side of the squares, in pixels; squares at the right and lower edges may be smaller.

    Sources: Zeiler and Fergus (ECCV 2014); of words, Li et al. (2016), "Understanding Neural
    Networks through Representation Erasure".
    """

    name: str = "occlusion"
    size: int = Field(4, ge=1)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        check_size(f"attribution {self.name}: size", shape, self.size)

    @torch.no_grad()
    def compared(
        self, network: nn.Module, x: Tensor, y: Tensor, baseline: Tensor | None, part_of: PartOf
    ) -> Tensor:
        # Each word, entry of a vector, or feature is one part.
        if part_of is None or part_of.ndim == 1:
            part_of = group_parts(tuple(x.shape[1:]), self.size, part_of).index[None]
        part_of = np.broadcast_to(part_of.reshape(len(part_of), -1), (len(x), part_of[0].size))
        found = torch.zeros(part_of.shape, device=x.device)  # of all channels alike
        channels = x.shape[1] if x.dim() == 4 else 1

        def outputs(some: Tensor, classes: Tensor) -> Tensor:
            return network(some).gather(1, classes)[:, 0]

        with evaluation(network):
            for rows in batches(x):
                some, labels = x[rows], y[rows].to(x.device).long()[:, None]
                whole, own = outputs(some, labels), part_of[rows]
                for g in range(own.max(initial=-1) + 1):
                    removed = own == g
                    changed = without(some, removed, instead=baseline)
                    lost = whole - outputs(changed, labels)
                    gone = torch.from_numpy(removed).to(x.device)
                    each = (lost / (gone.sum(1).clamp(min=1) * channels))[:, None].to(found)
                    found[rows] = torch.where(gone, each, found[rows])
        if x.dim() == 4:
            return found.view(len(x), 1, *x.shape[2:]).repeat(1, channels, 1, 1)
        found = found.view(x.shape)
        return found if x.is_floating_point() else found.masked_fill(x == 0, 0)


@explainers.register
@attributions.register
class Lrp(Attribution):
    """Layer-wise relevance propagation: f_y(x) is passed down layer by layer, by Zennit's rules.

    The relevance of the outputs is f_y(x) for the class y and 0 for the others (see `target`). A
    layer with inputs a (J,) and outputs z_k = Σ_j a_j w_jk + b_k distributes the relevance of its
    outputs:

    - ε: R_j = Σ_k a_j w_jk / (z_k + ε·sign z_k) · R_k. Batch norm is merged into the layer before
      it, sums of residual branches and average pooling are layers with w = 1, activations pass it
      on unchanged, maximum pooling passes it to the maximum.
    - z⁺: as ε, with only the positive products a_j w_jk and b_k⁺.
    - γ: as ε, with w_jk + γ·w_jk⁺ (γ = 1/4; the mirror image for z_k < 0).
    - flat: R_j = Σ_k R_k / |inputs of k|, whatever a and w are.
    - box: a_j w_jk − l_j w_jk⁺ − h_j w_jk⁻ in place of a_j w_jk, for inputs within [l, h].

    Composites (which rule where):

    ====================  ================  =================  ==============
    name                  first layer       convolutions       linear layers
    ====================  ================  =================  ==============
    epsilon_plus_flat     flat              z⁺                 ε
    epsilon_gamma_box     box               γ                  ε
    epsilon               ε                 ε                  ε
    ====================  ================  =================  ==============

    Flat and box are for convolutions smaller than the input. Another first layer has the ε-rule:
    flat would make all inputs equally relevant, since each of its outputs sees all of them.

    Biases absorb relevance (including those of merged batch norm): without any, the relevances sum
    to f_y(x), as far as each rule allows.

    Rules apply to modules only. Sums within fedsim's and torchvision's residual blocks are
    converted to modules first; a network with other sums needs its own canonizer. Functions that
    a `forward` calls itself (means, products, GELU) are refused, but for reshaping, selections,
    ReLU and maxima. `attn_lrp` has rules for such functions, too.

    Args:
        composite: which rules are used, see above.
        epsilon: ε.
        target: where relevance starts: at f_y(x) for the class y (`class`), at f_y(x) for y less
            1/C of each logit (`centred`), or at 1 for every class among the labels of a batch of
            64 (`batch`), as in FedXDS's released code; explanations have batches of one. Rules
            hand on the sign: with `class`, most relevances are negative where f_y(x) is.
        low: l, the least value of a pixel for each channel, or one for all: (0 − mean)/std for
            pixels in [0, 1]. Without it, the least and greatest values of each image's own
            channels: a box that holds the image, needs no knowledge of the data, and does not
            depend on other images.
        high: h, the greatest value: (1 − mean)/std.
        canonizer: `package.module:Name` of a class or function that, called without arguments,
            returns a `zennit.canonizers.Canonizer`, for your own residual networks. It is applied
            after fedsim's, to a copy.

    Source: Bach et al. (PLoS ONE 2015) for ε, z⁺; Montavon et al. (Pattern Recognition 2017;
    LNCS 11700, 2019) for box, γ and composites; FedXDS for `epsilon_plus_flat`, of convolutional
    networks. Batch norm is merged by fedsim, so that results do not depend on Zennit's version.
    """

    differentiates: ClassVar[bool] = True
    name: str = "lrp"
    composite: Literal["epsilon_plus_flat", "epsilon_gamma_box", "epsilon"] = "epsilon_plus_flat"
    epsilon: float = Field(1e-6, gt=0)
    target: Literal["class", "centred", "batch"] = "class"
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    canonizer: str | None = None

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Whether a map would depend on other inputs, whose classes `batch` explains, too."""
        return self.target == "batch"

    @field_validator("canonizer")
    @classmethod
    def _is_canonizer(cls, name: str | None) -> str | None:
        if name is not None:
            _own_canonizer(name)
        return name

    @model_validator(mode="after")
    def _box_fits(self) -> Lrp:
        low, high = self.low, self.high
        if low is None and high is None:
            return self
        if self.composite != "epsilon_gamma_box":
            raise ValueError("low and high need composite: epsilon_gamma_box")
        if low is None or high is None or not low or len(low) != len(high):
            raise ValueError("low and high must be given together, with one value per channel")
        if any(a >= b for a, b in zip(low, high, strict=True)):
            raise ValueError("low must be below high")
        return self

    def check_network(self, network: nn.Module) -> None:
        self._canonised(network)

    def relevance(self, network: nn.Module, x: Tensor, y: Tensor, rng: Generator) -> Tensor:
        _refuse_integers(self.name, x)
        canonised = self._canonised(network)
        found = torch.empty_like(x)
        with evaluation(network):
            self._refuse_changed(network, canonised, x[:_COMPARED])
        for rows in batches(x):
            rules = self._rules(canonised, x[rows])
            with rules.context(canonised), self._order(canonised) as order:
                inputs = x[rows].detach().clone().requires_grad_()
                with torch.enable_grad():
                    logits = canonised(inputs)
                if rows.start == 0:
                    self._refuse_unseen(canonised, order)
                initial = self._initial(logits.detach(), y[rows])
                (found[rows],) = torch.autograd.grad(logits, inputs, initial)
        return found

    def _initial(self, logits: Tensor, y: Tensor) -> Tensor:
        """(b, C) the relevance of each output."""
        if self.target == "batch":
            return _one_hot(logits, y).amax(0, keepdim=True).expand_as(logits)
        return contrast(self.target, self.name, logits, y) * logits

    @torch.no_grad()
    def _canonised(self, network: nn.Module) -> nn.Module:
        """A copy in evaluation mode, with batch norm merged and sums converted to modules."""
        canonizers, torchvision = _zennit("canonizers"), _zennit("torchvision")
        steps = [
            canonizers.AttributeCanonizer(_block_with_sum),
            torchvision.ResNetBottleneckCanonizer(),
            torchvision.ResNetBasicBlockCanonizer(),
        ]
        if self.canonizer is not None:
            steps.append(_own_canonizer(self.canonizer))
        for name, module in network.named_modules():
            if isinstance(module, _BatchNorm) and (
                module.weight is None or module.running_mean is None
            ):
                what = "batch norm without weights or without running statistics cannot be merged"
                self._refuse(name, module, what)
        canonised = copy.deepcopy(network).eval()
        _merge_batch_norm(canonised)
        merged = []  # by the user's canonizer
        for step in steps:
            for done in step.apply(canonised):
                if isinstance(done, canonizers.MergeBatchNorm):
                    done.batch_norm.eps = 0  # the identity, whatever Zennit's version
                    merged.append(done.batch_norm)
        canonised.requires_grad_(False)
        self._refuse_unknown(canonised, merged)
        return canonised

    def _refuse_unknown(self, canonised: nn.Module, merged: list[nn.Module]) -> None:
        for name, module in canonised.named_modules():
            if isinstance(module, self._ruled()):
                continue
            if isinstance(module, _BatchNorm):
                if not any(module is other for other in merged):
                    what = "batch norm can be merged only into a convolution or linear layer "
                    self._refuse(name, module, what + "defined right before it")
            elif next(module.parameters(recurse=False), None) is not None:
                self._refuse(name, module, "no rule for its parameters")
            elif next(module.children(), None) is None and not _hands_on(module):
                self._refuse(name, module, "no rule for it")

    def _ruled(self) -> tuple[type[nn.Module], ...]:
        types = _zennit("types")
        return (*_LAYERS, types.Linear, types.AvgPool, types.MaxPool, _zennit("layer").Sum)

    def _refuse(self, name: str, module: nn.Module, what: str) -> None:
        where = f"layer {name}" if name else "the network itself"
        raise ExperimentError(
            f"attribution {self.name}: {where} ({type(module).__name__}): {what}. LRP supports "
            "convolutions, linear layers, batch norm right after them, ReLU and similar "
            "activations, pooling, flattening and dropout; use attn_lrp for transformers, and for "
            "any differentiable network gradient, gradient_x_input, smoothgrad, "
            "integrated_gradients"
        )

    def _refuse_changed(self, network: nn.Module, canonised: nn.Module, x: Tensor) -> None:
        """Check the copy: merging assumes that layers are called in the order of definition.

        And that functions without rules are called within modules alone.
        """
        within = *self._ruled(), _BatchNorm
        with torch.no_grad():
            before = network(x)
        with torch.enable_grad(), calls_between(canonised, within) as called:
            after = canonised(x.detach().clone().requires_grad_()).detach()
        for name, func in called:
            if function(func) not in _HANDED_ON:
                where = f"layer {name}" if name else "the network"
                raise ExperimentError(
                    f"attribution {self.name}: {where} calls {name_of(func)} itself, where no "
                    "rule applies. Use a module, for sums a canonizer that converts them to a "
                    "zennit.layer.Sum (attribution field canonizer: package.module:Name); or "
                    "attn_lrp, gradient, gradient_x_input, smoothgrad or integrated_gradients"
                )
        scale = before.nan_to_num().abs().amax().item() if before.numel() else 0.0
        if not torch.allclose(before, after, rtol=0, atol=1e-2 * scale + 1e-6, equal_nan=True):
            raise ExperimentError(
                f"attribution {self.name}: with batch norm merged and sums converted to modules, "
                "the network's output changes. Define layers in the order of their calls, and "
                "each batch norm right after the layer that it follows"
            )

    def _rules(self, canonised: nn.Module, x: Tensor) -> Any:
        """The Zennit composite for one batch."""
        composites, types, rules = _zennit("composites"), _zennit("types"), _zennit("rules")
        _, first = _first_layer(canonised)
        begins = isinstance(first, types.Convolution)
        # All that one window sees is equally relevant by the flat rule.
        kernel: Any = getattr(first, "kernel_size", ())
        windows = begins and any(k < n for k, n in zip(kernel, x.shape[2:], strict=False))
        if self.composite == "epsilon_plus_flat" and windows:
            return composites.EpsilonPlusFlat(epsilon=self.epsilon)
        if self.composite == "epsilon_gamma_box" and begins:
            return composites.EpsilonGammaBox(*self._box(x), epsilon=self.epsilon)
        layers = usual = [(types.Linear, rules.Epsilon(epsilon=self.epsilon))]
        if self.composite == "epsilon_plus_flat":
            layers = [(types.Convolution, rules.ZPlus()), *layers]
        if self.composite == "epsilon_gamma_box":
            layers = [(types.Convolution, rules.Gamma(gamma=0.25)), *layers]
        return composites.SpecialFirstLayerMapComposite(
            [*composites.layer_map_base(), *layers], first_map=usual
        )

    def _box(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The minimum and maximum values, (1 or b, 1 or C, 1, ...)."""
        if self.low is None or self.high is None:
            axes = tuple(range(2, x.dim())) or (1,)
            return x.amin(axes, keepdim=True), x.amax(axes, keepdim=True)
        if len(self.low) not in (1, x.shape[1]):
            raise ExperimentError(
                f"attribution {self.name}: low and high have {len(self.low)} values, but the "
                f"inputs have {x.shape[1]} channels"
            )
        shape = 1, len(self.low), *[1] * (x.dim() - 2)
        return x.new_tensor(self.low).view(shape), x.new_tensor(self.high).view(shape)

    @contextlib.contextmanager
    def _order(self, canonised: nn.Module) -> Iterator[list[nn.Module]]:
        """Context that lists layers whose rules use their inputs, in the order of their calls."""
        types = _zennit("types")
        ruled = types.Linear, types.AvgPool, _zennit("layer").Sum
        called: list[nn.Module] = []
        handles = [
            module.register_forward_hook(lambda module, *_: called.append(module))
            for module in canonised.modules()
            if isinstance(module, ruled)
        ]
        try:
            yield called
        finally:
            for handle in handles:
                handle.remove()

    def _refuse_unseen(self, canonised: nn.Module, called: list[nn.Module]) -> None:
        """Reject layers that are called twice, or before the one that is defined first."""
        for name, module in canonised.named_modules():
            if sum(module is other for other in called) > 1:
                self._refuse(name, module, "called more than once in a forward pass")
        if self.composite == "epsilon":
            return
        name, first = _first_layer(canonised)
        linear = [other for other in called if isinstance(other, _zennit("types").Linear)]
        if first is not None and linear and linear[0] is not first:
            what = f"defined first, so the first rule of {self.composite} applies, but "
            self._refuse(name, first, what + "another layer is called before it")


# Layers that need no own rule, because their gradient or the rule for activations is right.
# Sigmoid, Softplus and similar ones are missing: they are not zero at zero.
_LAYERS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU),
    *(nn.SiLU, nn.Hardswish, nn.Hardtanh, nn.Tanh, nn.Softsign, nn.Hardshrink, nn.Softshrink),
    *(nn.Tanhshrink, nn.Flatten, nn.Unflatten, nn.Identity, nn.modules.dropout._DropoutNd),
)


# Functions that hand relevance on as gradients do.
_HANDED_ON = RESHAPING | names(
    """
    relu max amax max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d dropout
    feature_dropout dropout1d dropout2d dropout3d alpha_dropout
    """
)


def _first_layer(network: nn.Module) -> tuple[str, nn.Module | None]:
    """The layer with weights that is defined first, with its name."""
    linear = _zennit("types").Linear
    layers = ((n, m) for n, m in network.named_modules() if isinstance(m, linear))
    return next(layers, ("", None))


def _zennit(part: str) -> Any:
    require("zennit", "layer-wise relevance propagation (lrp)")
    return importlib.import_module(f"zennit.{part}")


def _own_canonizer(name: str) -> Any:
    """The user's canonizer."""

    def refusal(problem: str) -> PydanticCustomError:
        return PydanticCustomError("not_a_canonizer", "{problem}", {"problem": problem})

    base = _zennit("canonizers").Canonizer  # first, because the user's module imports it, too
    make = import_object(name, "canonizer")
    if not (inspect.isfunction(make) or (inspect.isclass(make) and issubclass(make, base))):
        raise refusal(
            f"'{name}' is neither a zennit.canonizers.Canonizer nor a function that returns one"
        )
    try:
        made = make()
    except Exception as error:  # a user's code may raise anything
        why = str(error) or type(error).__name__
        raise refusal(f"canonizer '{name}' cannot be called without arguments: {why}") from error
    if not isinstance(made, base):
        kind = type(made).__name__
        raise refusal(f"'{name}' returns {kind}, not a zennit.canonizers.Canonizer")
    return made


def _merge_batch_norm(network: nn.Module) -> None:
    """Merge each batch norm into the layer defined right before it; an identity replaces it."""
    types = _zennit("types")
    leaves: list[tuple[str, Any]] = [
        leaf for leaf in network.named_modules() if next(leaf[1].children(), None) is None
    ]
    for (_, layer), (name, norm) in itertools.pairwise(leaves):
        merges = isinstance(norm, _BatchNorm) and isinstance(layer, types.Linear)
        outputs = getattr(layer, "out_channels", getattr(layer, "out_features", None))
        if not merges or norm.num_features != outputs:
            continue
        scale = norm.weight / (norm.running_var + norm.eps) ** 0.5
        bias = 0 if layer.bias is None else layer.bias
        weight, ones = layer.weight, [1] * (layer.weight.dim() - 2)
        if isinstance(layer, types.ConvolutionTranspose):  # (inputs, outputs of a group, ...)
            weight = weight.unflatten(0, (layer.groups, -1))
            weight = (weight * scale.view(layer.groups, 1, -1, *ones)).flatten(0, 1)
        else:
            weight = weight * scale.view(-1, 1, *ones)
        layer.weight = nn.Parameter(weight)
        layer.bias = nn.Parameter((bias - norm.running_mean) * scale + norm.bias)
        network.set_submodule(name, nn.Identity())


def _block_with_sum(name: str, module: nn.Module) -> dict[str, Any] | None:
    """For Zennit's AttributeCanonizer: the sum in fedsim's residual block as a module."""
    if not isinstance(module, ResidualBlock):
        return None

    def forward(x: Tensor) -> Tensor:
        out = module.relu(module.bn1(module.conv1(x)))
        out = module.bn2(module.conv2(out))
        branches = torch.stack([out, module.shortcut(x)], dim=-1)
        return module.relu(module.canonizer_sum(branches))  # type: ignore[operator]

    return {"forward": forward, "canonizer_sum": _zennit("layer").Sum()}


def _hands_on(module: nn.Module) -> bool:
    """Whether a module without parameters is the identity in evaluation (dropout)."""
    values = torch.tensor([-1.0, 1.0]).view(1, 2, 1, 1)
    probe = values.clone()
    try:
        return module(probe) is probe and torch.equal(probe, values)
    except Exception:  # any error for an invalid input
        return False


def contrast(target: str, name: str, logits: Tensor, y: Tensor) -> Tensor:
    """(b, C) the weights of the logits in f_y, or in f_y − 1/C Σ_c f_c."""
    weights = _one_hot(logits, y)
    if target == "class":
        return weights
    if logits.shape[1] == 1:
        raise ExperimentError(
            f"attribution {name}: target=centred compares classes, and there is one output; use "
            "target=class"
        )
    return weights - 1 / logits.shape[1]


def _one_hot(logits: Tensor, y: Tensor) -> Tensor:
    return torch.zeros_like(logits).scatter_(1, y.to(logits.device).long()[:, None], 1)


def batches(x: Tensor) -> Iterable[slice]:
    return (slice(start, start + BATCH) for start in range(0, len(x), BATCH))


def _refuse_integers(name: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise _of_numbers(name, f"these are {str(x.dtype).removeprefix('torch.')}")


def _of_numbers(name: str, found: str) -> ExperimentError:
    able = ", ".join(n for n, one in attributions.items() if one.documents)
    return ExperimentError(
        f"attribution {name}: needs inputs of floating point, such as images; {found}; for "
        f"documents: occlusion, {able}"
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


def _differentiable_rnn(network: nn.Module, x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Context without cuDNN's recurrent layers, which have no gradient in evaluation mode."""
    if x.is_cuda and any(isinstance(module, nn.RNNBase) for module in network.modules()):
        return torch.backends.cudnn.flags(enabled=False)
    return contextlib.nullcontext()
