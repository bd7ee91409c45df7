"""Explanations of transformers: attention rollout, and relevance propagated through attention.

Both follow the functions that a network calls (`fedsim.explain.calls`), so they explain networks
of any library, and of your own, with or without adapters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from numpy.random import Generator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from fedsim.errors import ExperimentError
from fedsim.explain.calls import (
    RESHAPING,
    Calls,
    WordVectors,
    function,
    is_activation,
    name_of,
    names,
)
from fedsim.explain.explainer import explainers
from fedsim.explain.explainers.attribution import (
    Attribution,
    OfGradients,
    attributions,
    batches,
    evaluation,
)

MOST_SPECIAL = 5  # tokens before those of an image's patches: a class token, registers


def patch_grid(tokens: int, H: int, W: int) -> tuple[int, int] | None:
    """How many tokens are special, and the rows of square patches; None if there are none."""
    for special in range(MOST_SPECIAL + 1):
        patches = tokens - special
        side = math.sqrt(H * W / patches) if patches > 0 else 0.0
        if side and H % side == 0 and W % side == 0:
            return special, round(H / side)
    return None


class _Maps(Calls):
    """Keeps attention's probabilities (B, heads, n, n), from which the network's graph begins.

    Args:
        batch: B. Attention of one head may be (B, n, n).
    """

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch
        self.maps: list[Tensor] = []

    def call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        found = func(*args, **kwargs)
        if function(func) != "softmax" or len({*found.shape[-2:]}) > 1:
            return found
        if found.dim() == 4 or (found.dim() == 3 and len(found) == self.batch):
            found = found.detach().requires_grad_()
            self.maps.append(found)
        return found


@explainers.register
@attributions.register
class AttentionRollout(Attribution):
    """Attention rollout: how much attention reaches a token through all layers.

    With A_l the mean of layer l's probabilities (n, n) over its heads, R = Ã_L ⋯ Ã_1 where
    Ã_l = (A_l + I)/2 allows for the residual connection. A token's relevance is its entry in R's
    row of the token that the decision is read from, such as a class token; in the mean of rows,
    if the last layer's attention of several tokens matters to the output. It is never negative,
    knows nothing of classes, and sums to 1 over tokens, of which special ones are left out for
    images. A patch's relevance is spread evenly over its pixels.

    Source: Abnar and Zuidema (ACL 2020).
    """

    name: str = "attention_rollout"
    differentiates: ClassVar[bool] = True
    documents: ClassVar[bool] = True

    def check_shape(self, shape: tuple[int, ...]) -> None:
        if len(shape) not in (1, 3):
            raise ExperimentError(f"explainer {self.name}: explains images and documents")

    def relevance(self, network: nn.Module, x: Tensor, y: Tensor, rng: Generator) -> Tensor:
        found = torch.zeros(x.shape, device=x.device)
        with evaluation(network):
            for rows in batches(x):
                some = x[rows]
                words, attention = WordVectors(f"explainer {self.name}", some), _Maps(len(some))
                images = x.is_floating_point()
                with torch.enable_grad(), attention, contextlib.nullcontext() if images else words:
                    logits = network(some)
                    output = logits.gather(1, y[rows].to(x.device).long()[:, None]).sum()
                reached = self._rolled(attention.maps, output, len(some))
                if images:
                    found[rows] = self._of_pixels(reached, some)
                    continue
                n = 0 if words.found is None else words.found.shape[1]
                if not 0 < n <= reached.shape[1]:
                    raise self._refusal("the network has no attention between words")
                found[rows, :n] = reached[:, reached.shape[1] - n :]
        return found if x.is_floating_point() else found.masked_fill(x == 0, 0)

    def _rolled(self, maps: list[Tensor], output: Tensor, batch: int) -> Tensor:
        """(B, n) R's mean row of the tokens that the output is read from."""
        if len({(len(one), one.shape[-1]) for one in maps}) != 1 or len(maps[0]) != batch:
            raise self._refusal(
                "the network has no attention between all tokens in all its layers"
            )
        of_last = None
        if output.requires_grad:
            (of_last,) = torch.autograd.grad(output, maps[-1], allow_unused=True)
        if of_last is None:
            raise self._refusal(
                "the network's outputs do not depend on its last layer's attention"
            )
        read = of_last.view(batch, -1, *of_last.shape[-2:]).abs().sum(dim=(1, 3)) > 0
        row = read.float() / read.sum(dim=1, keepdim=True).clamp(min=1)
        for one in reversed(maps):
            attention = one.detach().view(batch, -1, *one.shape[-2:]).float().mean(dim=1)
            row = (row + (row[:, None] @ attention)[:, 0]) / 2
        return row

    def _of_pixels(self, reached: Tensor, x: Tensor) -> Tensor:
        """(B, C, H, W) the relevance of the patches, the last tokens."""
        if x.dim() != 4:
            raise self._refusal("explains images and documents")
        C, H, W = x.shape[1:]
        if found := patch_grid(reached.shape[1], H, W):
            special, rows = found
            grid = reached[:, special:].view(len(x), 1, rows, -1)
            pixels = functional.interpolate(grid, size=(H, W), mode="nearest")
            return (pixels / (C * (H // rows) ** 2)).expand_as(x)
        raise self._refusal(
            f"the network's {reached.shape[1]} tokens are not square patches of {H}×{W} pixels"
        )

    def _refusal(self, why: str) -> ExperimentError:
        return ExperimentError(f"explainer {self.name}: {why}")


@explainers.register
@attributions.register
class AttnLrp(OfGradients):
    """AttnLRP: layer-wise relevance propagation through attention, f_y(x) passed down to inputs.

    R = x ⊙ ∂f̃_y/∂x, where f̃ has f's values and gradients that are the rules' relevances divided
    by the values (a function a ↦ z receives R_z = z ⊙ ∂f̃_y/∂z, and passes R_a = a ⊙ ∂f̃_y/∂a on):

    - linear functions, sums, means, maxima, ReLU, selections: as they are, R_j = a_j w_jk/z_k R_k
      (the ε-rule with ε → 0).
    - products of two activations (QKᵀ, AV, gates): half to each, R_A = ½ A ⊙ ∂f̃/∂A.
    - softmax s = softmax(z): R_i = z_i (R_si − s_i Σ_k R_sk).
    - other activations (GELU, SiLU, tanh): R passes unchanged, gradient f(a)/a.
    - layer norm (RMS norm): as linear, its standard deviation a constant.

    Documents are explained at their words' vectors, over whose entries relevances are summed. For
    images, the paper proposes the γ-rule in addition, which is not here. Biases, positions, class
    tokens and softmax absorb relevance, so that the sum differs from f_y(x).

    Rules are found by the functions of torch that a network calls, in its modules and between
    them. A function without a rule is refused, unless it is within a module that is found to be an
    activation: without weights, entry by entry, and 0 at 0.

    Args:
        target: the output that is explained: the logit f_y of the example's class (`class`), or
            f_y less the mean logit (`centred`).

    Source: Achtibat et al. (ICML 2024), equations 7, 9, 13, 15 and section 3.3.
    """

    name: str = "attn_lrp"
    documents: ClassVar[bool] = True
    target: Literal["class", "centred"] = "class"

    def relevance(self, network: nn.Module, x: Tensor, y: Tensor, rng: Generator) -> Tensor:
        return self.by_batch(network, x, y, lambda f, some: some * f.gradient(some))

    @contextlib.contextmanager
    def calling(self, network: nn.Module) -> Iterator[None]:
        rules = _Rules(self.name)
        handles = []
        for module in network.modules():
            if _may_be_activation(module):
                handles += [
                    module.register_forward_pre_hook(rules.before),
                    module.register_forward_hook(rules.after),
                ]
        try:
            with rules:
                yield
        finally:
            for handle in handles:
                handle.remove()


class _Rules(Calls):
    """Functions with the gradients of AttnLRP's rules; others are refused."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.within = False  # a module that is an activation

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.within = True
        self.within = len(args) == 1 and is_activation(args[0]) and _is_activation(module, *args)

    def after(self, module: nn.Module, args: tuple[Any, ...], found: Any) -> Any:
        if not self.within:
            return None
        passed = _passed(args[0], found)
        self.within = False
        return passed

    def call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if self.within:
            return func(*args, **kwargs)
        args, kwargs = tree_map(constant, (args, kwargs))
        name = function(func)
        given: Any = next(iter((*args, *kwargs.values())), None)  # often an activation
        activations = sum(map(is_activation, tree_leaves((args, kwargs))))
        if name in PRODUCTS and activations == 2:
            args, kwargs = tree_map(_half, (args, kwargs))
            halved = next(iter((*args, *kwargs.values())))
            found = func(*args, **kwargs)
            return given.copy_(found) if found is halved else found  # in place
        if name in NORMS and activations == 1:
            return NORMS[name](*args, **kwargs)
        if name in ACTIVATIONS and is_activation(given):
            a = given.detach().clone()
            args, kwargs = tree_map(lambda one: a if one is given else one, (args, kwargs))
            passed = _passed(given.clone(), found := func(*args, **kwargs))
            return given.copy_(passed) if found is a else passed  # in place
        found = func(*args, **kwargs)
        if not any(map(is_activation, tree_leaves(found))):
            return found
        if name == "batch_norm" and any(one is True for one in (*args, *kwargs.values())):
            name = "batch_norm of a batch's own statistics"
        known = name in LINEAR or (name in PRODUCTS and activations < 3)
        known |= name in WEIGHTED and activations == 1
        divisor = args[1] if len(args) > 1 else kwargs.get("other")
        known |= name in QUOTIENTS and not is_activation(divisor)
        if not known:
            raise ExperimentError(
                f"explainer {self.name}: the network calls {name_of(func)}, which has no rule; "
                "for any differentiable network, use gradient_x_input, integrated_gradients"
            )
        return found


def _passed(a: Tensor, found: Tensor) -> Tensor:
    """An activation's values, whose relevance passes to its inputs unchanged."""
    return a * torch.where(a == 0, 0, found / a).detach()


def _may_be_activation(module: nn.Module) -> bool:
    """Whether a module is none of torch's, whose functions are known, and has no weights."""
    known = type(module).__module__.startswith("torch.nn.")
    parts = *module.children(), *module.parameters(), *module.buffers()
    return not known and not parts


@torch.no_grad()
def _is_activation(module: nn.Module, a: Tensor) -> bool:
    """Whether a module works entry by entry, by its values at `a` in another order; 0 at 0."""
    try:
        whole, zero = module.forward(a.clone()), module.forward(torch.zeros_like(a))
        turned = module.forward(a.flatten().flip(0))
        same = whole.flatten().flip(0)
        return not zero.any() and torch.allclose(turned, same, rtol=1e-3, atol=1e-6)
    except Exception:  # any error for an input of another shape
        return False


def constant(value: Any) -> Any:
    return value.detach() if isinstance(value, nn.Parameter) else value


def _half(value: Any) -> Any:
    """The same values of an activation, and half the gradient."""
    return value.detach() + (value - value.detach()) / 2 if is_activation(value) else value


def _layer_norm(
    a: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    axes = tuple(range(-len(shape), 0))
    centred = a - a.mean(axes, keepdim=True)
    found = centred / (centred.square().mean(axes, keepdim=True) + eps).sqrt().detach()
    found = found if weight is None else found * weight
    return found if bias is None else found + bias


def _rms_norm(
    a: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    axes, eps = tuple(range(-len(shape), 0)), torch.finfo(a.dtype).eps if eps is None else eps
    found = a / (a.square().mean(axes, keepdim=True) + eps).sqrt().detach()
    return found if weight is None else found * weight


# Names of functions, without underscores around them.
NORMS: Mapping[str, Callable[..., Tensor]] = {"layer_norm": _layer_norm, "rms_norm": _rms_norm}
PRODUCTS = names("mul imul rmul multiply matmul rmatmul bmm mm einsum")
QUOTIENTS = names("div divide true_divide truediv itruediv")
ACTIVATIONS = names(
    "gelu silu mish tanh elu celu selu hardswish hardtanh relu6 softsign tanhshrink"
)
# Functions whose gradient is their rule: those linear in an activation, with weights;
WEIGHTED = names(
    """
    linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d addmm baddbmm
    batch_norm prelu bilinear
    """
)
# what is linear in all its inputs, but for a constant, or picks from them; and softmax.
LINEAR = RESHAPING | names(
    """
    add sub rsub radd iadd isub neg sum mean cumsum tril triu dropout feature_dropout alpha_dropout
    dropout1d dropout2d dropout3d softmax relu leaky_relu max amax min amin max_pool1d
    max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d avg_pool1d avg_pool2d avg_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d interpolate
    """
)
