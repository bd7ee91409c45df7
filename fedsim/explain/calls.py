"""What happens within a network: the functions of torch that it calls, whoever calls them.

A `TorchFunctionMode` sees every function, in modules and in what a `forward` writes out, and can
replace it. So a network need not be written in a certain way to be explained.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from fedsim.errors import ExperimentError


class WordVectors(TorchFunctionMode):
    """The vectors (B, n, D) that a network looks up for the tokens of documents (B, L), L ≥ n.

    Those of positions and the like are not theirs: the tokens that are looked up are a document's
    own, though padding, 0, may have changed places with another token.

    Args:
        what: who asks, as errors begin.
        documents: (B, L) what the network reads.
        instead: vectors for the network to read in place of those; by default its own.
    """

    def __init__(self, what: str, documents: Tensor, instead: Tensor | None = None) -> None:
        super().__init__()
        self.what, self.documents, self.instead = what, documents, instead
        self.found: Tensor | None = None
        self._tokens: Tensor | None = None
        self._table: int | None = None  # where it is in memory
        self._others: set[int] = set()  # tables in which something else is looked up

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func in (functional.embedding, functional.embedding_bag):
            tokens = args[0] if args else kwargs["input"]
            table = args[1] if len(args) > 1 else kwargs["weight"]
        elif func is Tensor.__getitem__:
            table, tokens = args
        else:
            return found
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.dim() != 2:
            return found
        if tokens.dtype == torch.bool or table.dim() != 2 or not table.is_floating_point():
            return found
        at, own = table.data_ptr(), func is not functional.embedding_bag
        if self._table is None and own and self._are_words(tokens):
            self._table, self._tokens, self.found = at, tokens, found.clone()
        elif self._tokens is None:
            self._others.add(at)
        same = self._tokens is not None and torch.equal(tokens, self._tokens)
        if at == self._table and (not same or not own or at in self._others):
            raise self._refusal("the network looks up vectors of words twice, and not of the same")
        if at != self._table:
            if same and own and tokens.min() < tokens.max():  # else it may be chance
                raise self._refusal("the network looks up words in two tables")
            return found
        return found if self.instead is None else self.instead.clone()

    def _are_words(self, tokens: Tensor) -> bool:
        if len(tokens) != len(self.documents) or tokens.shape[1] > self.documents.shape[1]:
            return False
        x = self.documents[:, : tokens.shape[1]]
        moved = tokens != x
        padding = int(torch.maximum(tokens, x)[moved].max()) if moved.any() else 0
        swapped = torch.where(x == 0, padding, torch.where(x == padding, 0, x))
        return bool((tokens == swapped).all())

    def _refusal(self, why: str) -> ExperimentError:
        return ExperimentError(f"{self.what}: {why}; for documents: occlusion")


def by_words(
    what: str, network: nn.Module, documents: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The vectors (B, n, D) of documents (B, L), and the network as a function of such vectors.

    It also takes several changed copies (k·B, n, D) of all of them.

    Args:
        what: who asks, as errors begin.

    Raises:
        ExperimentError: it looks up no vectors of words.
    """
    nothing = f"{what}: the network looks up no vectors of words; for documents: occlusion"
    words = WordVectors(what, documents)
    try:
        with words, torch.no_grad():
            network(documents)
    except RuntimeError as error:
        if words.found is not None or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ExperimentError(nothing) from error  # it does not take integers
    if words.found is None:
        raise ExperimentError(nothing)

    def read(vectors: Tensor) -> Tensor:
        several = documents.repeat(len(vectors) // len(documents), 1)
        with WordVectors(what, several, vectors):
            logits: Tensor = network(several)
        return logits

    return words.found, read


class Calls(TorchFunctionMode):
    """Base class of what replaces functions; those of attention are split into simple ones."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            func = self._fused
        elif func is functional.multi_head_attention_forward:
            func = self._multi_head
        else:
            func = partial(self.call, func)
        return func(*args, **(kwargs or {}))

    def call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """What takes the place of a function's value."""
        return func(*args, **kwargs)

    def _fused(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._attention(*args, **kwargs)[0]

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The attended values, and the probabilities (..., heads, n, n)."""
        q, k, v = query, key, value
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        scores = self.call(torch.matmul, q, k.transpose(-2, -1))
        scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attn_mask, -math.inf)
            else:
                scores = scores + attn_mask
        A = self.call(torch.softmax, scores, -1)
        return self.call(torch.matmul, A, v), A

    def _multi_head(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        width: int,
        heads: int,
        weight: Tensor | None,
        bias: Tensor | None,
        *more: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`nn.MultiheadAttention` as most use it: one weight, and no masks but padding."""
        bias_k, bias_v, zeros, _, out, out_bias, *_ = more
        unusual = (bias_k, bias_v, kwargs.get("attn_mask"), weight is None or None)
        if zeros or any(one is not None for one in unusual) or kwargs.get("is_causal"):
            raise ExperimentError(
                "attention cannot be explained in nn.MultiheadAttention with weights of different "
                "sizes, additional keys or masks of pairs"
            )
        assert weight is not None
        weights, biases = weight.chunk(3), (None,) * 3 if bias is None else bias.chunk(3)
        q, k, v = (  # (n, B, D) each, to (B, heads, n, D/heads)
            functional.linear(x, w, b).view(*x.shape[:2], heads, -1).permute(1, 2, 0, 3)
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        absent = kwargs.get("key_padding_mask")
        if absent is not None and absent.dtype == torch.bool:
            absent = torch.zeros_like(absent, dtype=q.dtype).masked_fill(absent, -math.inf)
        mask = None if absent is None else absent[:, None, None]
        attended, A = self._attention(q, k, v, mask)
        found = functional.linear(attended.permute(2, 0, 1, 3).flatten(2), out, out_bias)
        if not kwargs.get("need_weights", True):
            return found, None
        return found, A.mean(dim=1) if kwargs.get("average_attn_weights", True) else A


@contextlib.contextmanager
def calls_between(
    network: nn.Module, within: tuple[type[nn.Module], ...]
) -> Iterator[list[tuple[str, Any]]]:
    """Context that lists the functions of activations which a network calls itself, in its layers.

    Args:
        within: classes of modules whose own calls are left out.
    """
    called: list[tuple[str, Any]] = []  # in which layer, and what
    inside: list[tuple[str, nn.Module]] = []

    class Listed(Calls):
        def call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
            found = func(*args, **kwargs)
            outside = not any(isinstance(module, within) for _, module in inside)
            if outside and any(map(is_activation, tree_leaves(found))):
                called.append((inside[-1][0] if inside else "", func))
            return found

    handles = []
    for name, module in network.named_modules():
        here = name, module
        handles += [
            module.register_forward_pre_hook(lambda *_, here=here: inside.append(here)),
            module.register_forward_hook(lambda *_: inside.pop() and None),
        ]
    try:
        with Listed():
            yield called
    finally:
        for handle in handles:
            handle.remove()


def names(words: str) -> frozenset[str]:
    return frozenset(words.split())


def is_activation(value: Any) -> bool:
    """Whether a value depends on the inputs, with weights that need no gradient."""
    return isinstance(value, Tensor) and value.requires_grad


def function(func: Any) -> str:
    """A function's name without underscores around it, the same for all its forms: `add`."""
    return str(getattr(func, "__name__", "")).strip("_")


def name_of(func: Any) -> str:
    """A function's name as people write it: `torch.Tensor.mul`, `torch.nn.functional.gelu`."""
    return resolve_name(func) or str(getattr(func, "__name__", func))


# Functions that change shapes or select, and so hand relevance on as it is.
RESHAPING = names(
    """
    reshape view view_as ravel flatten unflatten transpose permute swapaxes swapdims movedim
    moveaxis t get squeeze unsqueeze expand expand_as broadcast_to repeat repeat_interleave tile
    contiguous clone to cpu cuda float double half bfloat16 type type_as cat concat hstack vstack
    stack split split_with_sizes chunk tensor_split unbind select narrow getitem gather
    index_select take_along_dim diagonal masked_fill where roll flip pad unfold fold
    pixel_shuffle pixel_unshuffle channel_shuffle iter detach requires_grad
    """
)
