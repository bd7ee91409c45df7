"""Attributions of Captum, and the SHAP family, which Captum computes."""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fedsim.config.registry import located, nearest
from fedsim.data import Dataset
from fedsim.data.tokens import words_of
from fedsim.errors import ExperimentError
from fedsim.explain.baselines import Background, Compared
from fedsim.explain.calls import (
    Calls,
    by_words,
    calls_between,
    function,
    is_activation,
    name_of,
    names,
)
from fedsim.explain.explainer import ExplainedData, ExplainedModel, explainers
from fedsim.explain.explainers.attention import LINEAR, PRODUCTS, QUOTIENTS, WEIGHTED, constant
from fedsim.explain.explainers.attribution import (
    BATCH,
    OfDecision,
    differentiable_rnn,
    evaluation,
    heatmap,
    refuse_sampled,
)
from fedsim.explain.groups import by_feature, check_size, count_squares, group_parts
from fedsim.explain.scores.faithfulness import without
from fedsim.support.extras import require
from fedsim.support.rng import global_generators

SIDE = 4  # of squares, in pixels
MOST_ORDERED = 8  # parts of which all orders are gone through
DRAWN = 4  # rows of a background with weights, for each sample of GradientSHAP


@dataclass(frozen=True)
class Kind:
    """How one of Captum's attributions is asked.

    Args:
        parts: whether parts of inputs, such as squares, are taken away and put back, of any model;
            otherwise entries are explained.
        differentiates: whether it needs gradients, which rules and trees do not have.
        modules: which functions it must find as modules: `rescaled` (DeepLift), `relu`, or none.
        background: `one` baseline at a time, over which its values are averaged; `all` of them at
            once, to be averaged; `drawn` from all; or `none`.
    """

    parts: bool = False
    differentiates: bool = True
    modules: Literal["rescaled", "relu", "none"] = "none"
    background: Literal["one", "all", "drawn", "none"] = "none"


_PARTS = Kind(parts=True, differentiates=False, background="all")
METHODS: Mapping[str, Kind] = {
    "Deconvolution": Kind(modules="relu"),
    "DeepLift": Kind(modules="rescaled", background="one"),
    "DeepLiftShap": Kind(modules="rescaled", background="all"),
    "FeatureAblation": _PARTS,
    "GradientShap": Kind(background="drawn"),
    "GuidedBackprop": Kind(modules="relu"),
    "InputXGradient": Kind(),
    "IntegratedGradients": Kind(background="one"),
    "KernelShap": _PARTS,
    "Lime": _PARTS,
    "Occlusion": Kind(differentiates=False, background="one"),
    "Saliency": Kind(),
    "ShapleyValues": _PARTS,
    "ShapleyValueSampling": _PARTS,
}
# Arguments that fedsim gives, and what sets them.
_GIVEN: Mapping[str, str] = {
    **dict.fromkeys(("forward_func", "model", "inputs", "target"), "fedsim"),
    **dict.fromkeys(("additional_forward_args", "return_convergence_delta"), "fedsim"),
    **dict.fromkeys(("return_input_shape", "show_progress"), "fedsim"),
    **{"baselines": "`baseline`", "feature_mask": "`size`"},
}


@dataclass(frozen=True)
class Request:
    """An attribution of Captum, with its arguments and the side of squares."""

    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    size: int = SIDE

    @property
    def kind(self) -> Kind:
        return METHODS[self.method]


class OfCaptum(Compared, OfDecision, ABC):
    """Base class of explainers whose values Captum computes, each input by itself."""

    @abstractmethod
    def request(self) -> Request:
        """What is asked of Captum."""

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        require("captum", f"explainer {self.name}")
        super().check(model, data)
        asked, dataset = self.request(), data.dataset
        kind = asked.kind
        network = model.as_network()
        if kind.differentiates and model.network is None:
            raise self._refusal(
                f"{asked.method} explains networks; model.name={model.section.name} is a "
                f"{model.section.kind}; for others: kernel_shap, occlusion"
            )
        refuse_sampled(network)
        if dataset.words and not (kind.parts or kind.differentiates):
            raise self._refusal(f"{asked.method} explains numbers; for documents: kernel_shap")
        if kind.parts:
            check_size(f"explainer {self.name}: size", dataset.shape, asked.size)
            parts = dataset.shape[0]
            if not dataset.words:
                parts = len(group_parts(dataset.shape, asked.size, dataset.parts))
            if asked.method == "ShapleyValues" and parts > MOST_ORDERED:
                raise self._refusal(
                    f"{asked.method} goes through all orders of parts, and these are {parts}, "
                    f"more than {MOST_ORDERED}; take ShapleyValueSampling or kernel_shap"
                )
        _split(asked, self.name)
        # Some problems show only in a call.
        x, y = data.prepare(dataset.x[:1]), torch.zeros(1, dtype=torch.int64)
        self.relevances(model, data, x, y, np.random.default_rng(0))

    def relevances(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor, rng: Generator
    ) -> NDArray[np.float32]:
        asked, network = self.request(), model.as_network()
        background = self.background(model, data, x)
        explain = self._by_parts if asked.kind.parts else self._by_entries
        found = []
        with evaluation(network), differentiable_rnn(network, x), _quietly():
            for k in range(len(x)):
                others = background and background.of(slice(k, k + 1))
                with global_generators(rng, x.device):
                    found.append(explain(asked, network, data, x[k : k + 1], int(y[k]), others))
        return np.concatenate(found).astype(np.float32)

    def _by_entries(
        self,
        asked: Request,
        network: nn.Module,
        data: ExplainedData,
        x: Tensor,
        c: int,
        others: Background | None,
    ) -> NDArray[Any]:
        """The values of the entries of an input (1, ...), summed over those of a part."""
        inputs, read = x, network
        if not x.is_floating_point():
            inputs, of_vectors = by_words(f"explainer {self.name}", network, x)
            read = _Reading(network, of_vectors)
        read = self._in_modules(asked, read, inputs)
        if asked.kind.background == "none":
            total = self._ask(asked, read, inputs, target=c)
        else:
            asks = _baselines(asked, others or Background.zero(inputs))
            total = sum(
                (w * self._ask(asked, read, inputs, target=c, baselines=rows) for w, rows in asks),
                start=torch.zeros(()),
            ) / len(asks)
        total = total.detach()
        if not x.is_floating_point():
            found = torch.zeros(x.shape, device=x.device)
            found[:, : total.shape[1]] = total.sum(dim=2)
            return found.masked_fill(x == 0, 0).cpu().numpy()
        if len(data.dataset.shape) == 3:
            total = heatmap(total)
        return by_feature(total.cpu(), data.dataset.parts).numpy()

    def _by_parts(
        self,
        asked: Request,
        network: nn.Module,
        data: ExplainedData,
        x: Tensor,
        c: int,
        others: Background | None,
    ) -> NDArray[Any]:
        """The values of an input's parts, which are put in place of others, or of nothing."""
        dataset = data.dataset
        if dataset.words:
            index = np.where(x[0].cpu().numpy() != 0, np.arange(x.shape[1]), -1)
            if dataset.tokenizer:
                (index,) = words_of(dataset.tokenizer, dataset.padding, x.cpu().numpy())
        else:
            index = group_parts(tuple(x.shape[1:]), asked.size, dataset.parts).index
        G, n = int(index.max(initial=-1)) + 1, 1 if others is None else len(others.rows)
        together = max(1, BATCH // n)

        @torch.no_grad()
        def value(there: Tensor) -> Tensor:
            """(k,) the mean logit with the parts (k, G) of x, and the rest of each other input."""
            gone = np.where(index < 0, False, ~there.bool().cpu().numpy()[:, index])
            gone = gone.reshape(len(gone), -1)
            found = []
            for some in np.split(gone, range(together, len(gone), together)):
                instead = None
                if others is not None:
                    instead = others.rows[:, 0].repeat_interleave(len(some), 0)
                copies = x.expand(n * len(some), *x.shape[1:])
                mixed = without(copies, np.tile(some, (n, 1)), instead=instead)
                logits = network(mixed.contiguous())[:, c].view(n, -1)
                found.append(logits[0] if others is None else others.mean(logits))
            return torch.cat(found)

        present = torch.ones(1, max(G, 1), device=x.device)
        if G < 2:  # nothing to share out
            worth = value(present) - value(0 * present) if G else 0 * present[0]
        else:
            worth = self.shared_out(asked, value, present)[0]
        values = worth.detach().double().cpu().numpy()
        if dataset.parts is not None:
            return values[None]
        spread = np.append(values / np.bincount(index[index >= 0], minlength=len(values)), 0)
        return spread[index][None]  # the last one, 0, is that of padding

    def shared_out(
        self, asked: Request, value: Callable[[Tensor], Tensor], present: Tensor
    ) -> Tensor:
        """(1, G) the values of parts.

        Args:
            value: which parts are there, (k, G), to what they are worth, (k,).
            present: (1, G) ones.
        """
        return self._ask(asked, value, present, baselines=0)

    def _in_modules(self, asked: Request, network: nn.Module, inputs: Tensor) -> nn.Module:
        if asked.kind.modules == "rescaled":
            return _Rescaled(f"explainer {self.name}", network, inputs)
        if asked.kind.modules == "relu":
            with torch.enable_grad(), calls_between(network, (nn.ReLU,)) as called:
                network(inputs.detach().clone().requires_grad_())
            rectified = any(isinstance(module, nn.ReLU) for module in network.modules())
            if not rectified or any(function(func) == "relu" for _, func in called):
                raise self._refusal(
                    f"{asked.method} changes the modules nn.ReLU of a network, which calls "
                    f"{'torch.relu' if called and rectified else 'none'}; take {_GRADIENTS}"
                )
        return network

    def _ask(self, asked: Request, of: Any, inputs: Tensor, **more: Any) -> Tensor:
        """The values by Captum; what it refuses, we refuse."""
        make, call = _split(asked, self.name)
        method = _captum(asked.method)(of, **make)
        if "perturbations_per_eval" in _parameters(method.attribute) and asked.kind.parts:
            call.setdefault("perturbations_per_eval", BATCH)
        try:
            found: Tensor = method.attribute(inputs, **more, **call)
        except (AssertionError, TypeError, ValueError) as error:
            why = (str(error) or type(error).__name__).strip().splitlines()[0]
            raise self._refusal(f"{asked.method}: {why}") from error
        return found

    def squares(self, shape: tuple[int, ...]) -> int | None:
        asked = self.request()
        return count_squares(shape, asked.size) if asked.kind.parts else None

    def _refusal(self, why: str) -> ExperimentError:
        return ExperimentError(f"explainer {self.name}: {why}")

    def endpoints(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        if data.dataset.words:  # without a word, a document is not the baseline of zero
            return np.full(len(x), np.nan), np.full(len(x), np.nan)
        return super().endpoints(model, data, x, y)

    @property
    def at_vectors(self) -> bool:
        return self.request().kind.differentiates

    def about_baseline(self, data: Dataset) -> str:
        return "" if self.request().kind.background == "none" else super().about_baseline(data)


@explainers.register
class Captum(OfCaptum):
    """An attribution of Captum, by its name there and with its arguments.

    `DeepLift`, `DeepLiftShap`, `GradientShap`, `IntegratedGradients`, `InputXGradient`,
    `Saliency` (without sign, unless `arguments: {abs: false}`), `GuidedBackprop` and
    `Deconvolution` explain networks, entry by entry, and documents at their words' vectors.
    `FeatureAblation`, `KernelShap`, `Lime`, `ShapleyValues` and `ShapleyValueSampling` explain any
    model by its outputs without some parts: squares of pixels, features, words. Captum's features
    are then these parts, 1 if one is there, so that Lime's distances are those of parts.
    `Occlusion` moves a window.

    DeepLift's rules are for modules that are called once; here each call of ReLU, sigmoid, tanh,
    ELU, softplus or maximum pooling is one, wherever it is called. Other non-linear functions are
    refused, because their values would not add up. Left out: `LRP`, for which there is `lrp`;
    `FeaturePermutation`, whose values depend on the other inputs; and what explains layers.

    Args:
        method: its name in `captum.attr`.
        arguments: those of its constructor and of `attribute`, such as `{n_samples: 50}`.
        baseline: what inputs are compared with; see `integrated_gradients`. Values are averaged
            over the rows of a background, with which absent parts are filled in.
        size: side of the squares in pixels, of methods that take parts away.

    Source: Kokhlikyan et al. (2020), "Captum: A unified and generic model interpretability library
    for PyTorch".
    """

    name: str = "captum"
    draws: ClassVar[bool] = True
    method: Annotated[str, Field(json_schema_extra={"enum": [*METHODS]})] = "ShapleyValueSampling"
    arguments: dict[str, Any] = Field({}, validate_default=False)
    size: int | None = Field(None, ge=1)

    @field_validator("method")
    @classmethod
    def _known(cls, method: str) -> str:
        if method not in METHODS:
            about = {"name": method, "hint": nearest(method, METHODS)}
            raise PydanticCustomError("unknown_name", "unknown method '{name}'{hint}", about)
        return method

    @model_validator(mode="after")
    def _fits_together(self) -> Captum:
        kind = METHODS[self.method]
        for key, fits, what in (
            ("size", kind.parts, "explains each entry by itself"),
            ("baseline", kind.background != "none", "compares with nothing"),
        ):
            if not fits and getattr(self, key) != type(self).model_fields[key].default:
                about = {"method": self.method, "what": what}
                problem = PydanticCustomError("unfit", "{method} {what}; leave it out", about)
                raise located(type(self).__name__, key, problem, getattr(self, key))
        return self

    @property
    def label(self) -> str:
        return f"{self.name}-{self.method}"

    def request(self) -> Request:
        return Request(self.method, self.arguments, self.size or SIDE)


def _baselines(asked: Request, others: Background) -> list[tuple[float, Tensor]]:
    """Baselines for which Captum is asked, one after another, and how much each answer counts."""
    how, rows = asked.kind.background, others.rows[:, 0]
    if how == "drawn" and not others.even:
        chances = others.weights / others.weights.sum()
        count = DRAWN * asked.arguments.get("n_samples", 5)  # of which Captum draws
        rows = rows[np.random.choice(len(rows), count, p=chances)]
    if how == "one":
        return [*others.each()]
    asks = [(1.0, rows)] if how == "drawn" or others.even else [*others.each()]
    # Captum wants several.
    return [(w, own if len(own) > 1 else own.repeat_interleave(2, 0)) for w, own in asks]


@explainers.register
class KernelShap(OfCaptum):
    """KernelSHAP: Shapley values of an input's parts, from a weighted linear regression.

    Parts are squares of pixels, features or words. The value of some of them is the mean logit of
    inputs whose other parts are those of a background, or which have no other words. If `samples`
    suffices for all 2^G subsets of G parts, these are taken, and the values are exact; otherwise
    subsets are drawn with Shapley's weights. They sum to f_y(x) minus the background's mean logit.
    Explains any model.

    Args:
        baseline: the background; see `integrated_gradients`.
        samples: how many subsets.
        size: side of the squares, in pixels.

    Source: Lundberg and Lee (NeurIPS 2017), Theorem 2; by Captum.
    """

    name: str = "kernel_shap"
    complete: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    samples: int = Field(256, ge=4)
    size: int = Field(SIDE, ge=1)

    def request(self) -> Request:
        return Request("KernelShap", {"n_samples": self.samples}, self.size)

    def shared_out(
        self, asked: Request, value: Callable[[Tensor], Tensor], present: Tensor
    ) -> Tensor:
        G = present.shape[1]
        if self.samples < 2**G:
            return super().shared_out(asked, value, present)
        regression = importlib.import_module(
            "captum._utils.models.linear_model"
        ).SkLearnLinearRegression()
        lime = _captum("Lime")(value, regression, _shapley_weight, _subsets)
        found: Tensor = lime.attribute(
            present, baselines=0, n_samples=2**G, perturbations_per_eval=BATCH
        )
        return found


def _subsets(present: Tensor, **_: Any) -> Iterator[Tensor]:
    """All (1, G) of zeros and ones."""
    for bits in itertools.product((0, 1), repeat=present.shape[1]):
        yield torch.tensor([bits], device=present.device)


def _shapley_weight(_: Tensor, __: Tensor, subset: Tensor, **___: Any) -> Tensor:
    """Shapley's kernel, for which the whole and nothing weigh as good as infinitely much."""
    G, k = subset.shape[1], int(subset.sum())
    weight = 1e6 if k in (0, G) else (G - 1) / (math.comb(G, k) * k * (G - k))
    return torch.tensor([weight], device=subset.device)


@explainers.register
class GradientShap(OfCaptum):
    """GradientSHAP, expected gradients: R = E[(x − x') ⊙ ∂f_y(x' + α·(x − x'))/∂x].

    x' is drawn from a background and α from U(0, 1). With many samples, the relevances sum to
    f_y(x) minus the background's mean logit. Documents are explained at their words' vectors.

    Args:
        baseline: the background; see `integrated_gradients`.
        samples: how many x' and α are drawn.

    Source: Erion et al., "Improving performance of deep learning models with axiomatic attribution
    priors and expected gradients", Nature Machine Intelligence 3 (2021), Eq. 2; by Captum.
    """

    name: str = "gradient_shap"
    complete: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    samples: int = Field(50, ge=1)

    def request(self) -> Request:
        return Request("GradientShap", {"n_samples": self.samples})


@explainers.register
class DeepShap(OfCaptum):
    """DeepSHAP: DeepLIFT's relevances, averaged over a background.

    They sum to f_y(x) minus the background's mean logit. Explains networks whose non-linear
    functions are ReLU, leaky ReLU, ELU, sigmoid, tanh, softplus or maximum pooling.

    Args:
        baseline: the background; see `integrated_gradients`.

    Sources: Lundberg and Lee (NeurIPS 2017), section 4.2; Shrikumar et al. (ICML 2017), the
    rescale rule; by Captum.
    """

    name: str = "deep_shap"
    complete: ClassVar[bool] = True

    def request(self) -> Request:
        return Request("DeepLiftShap")


class _Reading(nn.Module):
    """A network as a function of its words' vectors, as a module."""

    def __init__(self, network: nn.Module, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.read = network, read

    def forward(self, vectors: Tensor) -> Tensor:
        return self.read(vectors)


class _Rescaled(nn.Module):
    """A network whose non-linear functions are modules that are called once, as DeepLift needs.

    Args:
        what: who asks, as errors begin.
        network: where they are called, by modules or between them.
        inputs: (1, ...)

    Raises:
        ExperimentError: DeepLift has no rule for a function.
    """

    def __init__(self, what: str, network: nn.Module, inputs: Tensor) -> None:
        super().__init__()
        self.units = nn.ModuleList()
        self.network = (network,)  # whose own modules Captum must not find
        x = inputs.detach().clone().requires_grad_()
        with torch.enable_grad():
            with _Units(what, self.units, new=True):
                found = network(x)
            if not torch.allclose(found, network(x), rtol=1e-4, atol=1e-5):
                raise ExperimentError(
                    f"{what}: the network changes activations in place, which DeepLift cannot "
                    f"follow; take {_GRADIENTS}"
                )

    def forward(self, x: Tensor) -> Tensor:
        with _Units("", self.units):
            logits: Tensor = self.network[0](x)
        return logits


class _Units(Calls):
    """Replaces the calls of non-linear functions by modules, one after another."""

    def __init__(self, what: str, units: nn.ModuleList, new: bool = False) -> None:
        super().__init__()
        self.what, self.units, self.new = what, units, new
        self.calls = 0

    def call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(constant, (args, kwargs))
        name = function(func)
        given: Any = next(iter((*args, *kwargs.values())), None)
        if name in _UNITS and is_activation(given):
            if self.new:
                self.units.append(_unit(func, *args, **kwargs))
            self.calls += 1
            # A copy, because of two modules in a row Captum would take the first one's gradient
            # from before the second one's rule.
            return self.units[self.calls - 1](given.clone())
        found = func(*args, **kwargs)
        if self.new and any(map(is_activation, tree_leaves(found))):
            self._refuse_unknown(func, args, kwargs)
        return found

    def _refuse_unknown(self, func: Any, args: Any, kwargs: Any) -> None:
        name = function(func)
        activations = sum(map(is_activation, tree_leaves((args, kwargs))))
        divisor = args[1] if len(args) > 1 else kwargs.get("other")
        known = name in LINEAR - _NOT_LINEAR
        known |= name in (WEIGHTED | PRODUCTS) - _NOT_LINEAR and activations == 1
        known |= name in QUOTIENTS and not is_activation(divisor)
        if not known:
            raise ExperimentError(
                f"{self.what}: the network calls {name_of(func)}, for which DeepLift has no rule; "
                f"take {_GRADIENTS}"
            )


_GRADIENTS = "gradient_shap or integrated_gradients"
_UNITS: Mapping[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "max_pool1d": nn.MaxPool1d,
    "max_pool2d": nn.MaxPool2d,
    "max_pool3d": nn.MaxPool3d,
}
# Of what AttnLRP knows, what is linear only between two values of its own.
_NOT_LINEAR = names("softmax relu leaky_relu prelu max amax min amin") | names(
    "max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d"
)
# Names of the functions' arguments after the input.
_ORDER: Mapping[str, tuple[str, ...]] = {
    "leaky_relu": ("negative_slope",),
    "elu": ("alpha",),
    "softplus": ("beta", "threshold"),
    **dict.fromkeys(
        ("max_pool1d", "max_pool2d", "max_pool3d"),
        ("kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    ),
}


def _unit(func: Any, _: Tensor, *args: Any, **kwargs: Any) -> nn.Module:
    """A module for one call of a function."""
    order = _ORDER.get(function(func), ())
    given = {**dict(zip(order, args, strict=False)), **kwargs}
    return _UNITS[function(func)](**{key: one for key, one in given.items() if key in order})


def _split(asked: Request, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a constructor and of `attribute`.

    Raises:
        ExperimentError: there are none of these names, or some are missing.
    """
    method = _captum(asked.method)
    makes, calls = _parameters(method), _parameters(method.attribute)
    known = {key for key in (*makes, *calls) if key not in (*_GIVEN, "self", "kwargs")}
    for key in asked.arguments:
        if key in _GIVEN:
            by = _GIVEN[key]
            raise ExperimentError(f"explainer {name}: arguments.{key}: {by} sets it; leave it out")
        if key not in known:
            raise ExperimentError(
                f"explainer {name}: {asked.method} has no argument '{key}'{nearest(key, known)}"
            )
    for key, parameter in calls.items():
        if parameter.default is parameter.empty and key in known - asked.arguments.keys():
            raise ExperimentError(f"explainer {name}: {asked.method} needs arguments.{key}")
    given = {key: _as_tuples(value) for key, value in asked.arguments.items()}
    return (
        {key: value for key, value in given.items() if key in makes},
        {key: value for key, value in given.items() if key not in makes},
    )


def _parameters(of: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(of).parameters


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def _captum(name: str) -> Any:
    """A class of `captum.attr`."""
    return getattr(importlib.import_module("captum.attr"), name)


@contextmanager
def _quietly() -> Iterator[None]:
    """Context without Captum's warnings of what it does."""
    with warnings.catch_warnings():
        for begin in ("Setting (forward, )?backward hooks", "Input Tensor", "Generator completed"):
            warnings.filterwarnings("ignore", rf"\s*{begin}")
        yield
