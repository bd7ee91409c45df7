"""Layer-wise relevance propagation, by Zennit's rules."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.config.registry import import_object
from fedsim.errors import ExperimentError
from fedsim.explain.calls import RESHAPING, calls_between, function, name_of, names
from fedsim.explain.explainer import explainers
from fedsim.explain.explainers.attribution import (
    Attribution,
    attributions,
    batches,
    contrast,
    evaluation,
    one_hot,
    refuse_integers,
)
from fedsim.models.networks import ResidualBlock
from fedsim.support.extras import require

_COMPARED = 8  # rows on which the canonised network is compared with the network


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

    @property
    def complete(self) -> bool:  # type: ignore[override]
        """Whether relevances start at f_t, and sum to it but for what biases absorb."""
        return self.target != "batch"

    def explained(self, outputs: Tensor, y: Tensor) -> NDArray[np.float64]:
        weights = contrast(self.target, self.name, outputs, y)
        return (weights * outputs).double().sum(dim=1).numpy()

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
        refuse_integers(self.name, x)
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
            return one_hot(logits, y).amax(0, keepdim=True).expand_as(logits)
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
            f"explainer {self.name}: {where} ({type(module).__name__}): {what}. LRP supports "
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
                    f"explainer {self.name}: {where} calls {name_of(func)} itself, where no "
                    "rule applies. Use a module, for sums a canonizer that converts them to a "
                    "zennit.layer.Sum (attribution field canonizer: package.module:Name); or "
                    "attn_lrp, gradient, gradient_x_input, smoothgrad or integrated_gradients"
                )
        scale = before.nan_to_num().abs().amax().item() if before.numel() else 0.0
        if not torch.allclose(before, after, rtol=0, atol=1e-2 * scale + 1e-6, equal_nan=True):
            raise ExperimentError(
                f"explainer {self.name}: with batch norm merged and sums converted to modules, "
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
                f"explainer {self.name}: low and high have {len(self.low)} values, but the "
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
