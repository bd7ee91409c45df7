"""Explanations of transformers, and of documents by gradients at their words' vectors."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsim.errors import ExperimentError
from fedsim.explain.calls import Calls, by_words, function, is_activation
from fedsim.explain.explainers.attribution import Attribution, attributions
from fedsim.models.adapters import Adapters, merged
from fedsim.models.rationale import RationaleModel
from fedsim.models.text import TextCnn
from fedsim.models.transformer import (
    Encoder,
    SelfAttention,
    Transformer,
    TransformerBlock,
    Vit,
    Words,
)

V, L, CLASSES = 30, 7, 3
DOCUMENTS = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [2, 9, 4, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0, 0]])
CLASS = torch.tensor([2, 0, 1])


def explain(name: str, network: nn.Module, x: Tensor, y: Tensor = CLASS, **more: Any) -> Tensor:
    chosen: Attribution = attributions.parse({"name": name, **more})
    return chosen.relevance(network, x, y, np.random.default_rng(0))


def logit(network: nn.Module, x: Tensor, y: Tensor = CLASS) -> Tensor:
    with torch.no_grad():
        return network(x).gather(1, y[:, None])[:, 0]


def stirred(network: nn.Module) -> nn.Module:
    """In evaluation mode, in double precision, with weights and biases that matter."""
    torch.manual_seed(1)
    for parameter in network.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return network.eval().double()


def vectors() -> Tensor:
    torch.manual_seed(0)
    found = torch.randn(V, 12)
    found[0] = 0
    return found


def reader(**more: Any) -> nn.Module:
    section = Transformer(dim=8, depth=2, heads=2, **more)
    return stirred(section.build_text(vectors(), torch.ones(V, dtype=torch.bool), CLASSES))


def vit(**more: Any) -> nn.Module:
    return stirred(Vit(dim=8, depth=2, heads=2, patch=4, **more).build((2, 8, 8), CLASSES))


def images() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(3, 2, 8, 8, dtype=torch.double)


# -- AttnLRP ------------------------------------------------------------------------------------


class Relevance:
    """AttnLRP written out: relevances of outputs to those of inputs, function by function.

    Args:
        network: a classifier of ours with an `Encoder`.
    """

    def __init__(self, network: Any) -> None:
        self.encoder: Encoder = network.features
        self.head: nn.Linear = network.head
        self.absorbed = 0.0  # by constants and softmax

    def linear(self, a: Tensor, layer: nn.Linear, R: Tensor) -> Tensor:
        z = functional.linear(a, layer.weight, layer.bias)
        passed = a * ((R / z) @ layer.weight)
        self.absorbed += float(R.sum() - passed.sum())
        return passed

    def plus(self, a: Tensor, b: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
        return a / (a + b) * R, b / (a + b) * R

    def product(self, a: Tensor, b: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
        share = R / (a @ b) / 2
        return a * (share @ b.mT), b * (a.mT @ share)

    def softmax(self, z: Tensor, R: Tensor) -> Tensor:
        passed = z.masked_fill(z.isinf(), 0) * (R - z.softmax(-1) * R.sum(-1, keepdim=True))
        self.absorbed += float(R.sum() - passed.sum())
        return passed

    def norm(self, a: Tensor, layer: nn.LayerNorm, R: Tensor) -> Tensor:
        """z = (a − mean a)/σ·w + b with a constant σ: R_j = Σ_k a_j (δ_jk − 1/D) w_k/σ R_k/z_k."""
        D = a.shape[-1]
        sigma = (a.var(-1, correction=0, keepdim=True) + layer.eps).sqrt()
        z = (a - a.mean(-1, keepdim=True)) / sigma * layer.weight + layer.bias
        matrix = (torch.eye(D, dtype=a.dtype) - 1 / D) * layer.weight
        passed = a / sigma * ((R / z) @ matrix.mT)
        self.absorbed += float(R.sum() - passed.sum())
        return passed

    def attention(self, h: Tensor, layer: SelfAttention, absent: Tensor, R: Tensor) -> Tensor:
        B, n, D = h.shape
        q, k, v = layer.qkv(h).view(B, n, 3, layer.heads, -1).permute(2, 0, 3, 1, 4)
        scale = math.sqrt(q.shape[-1])
        z = (q @ k.mT / scale).masked_fill(absent[:, None, None], -math.inf)
        A = z.softmax(-1)
        attended = (A @ v).transpose(1, 2).reshape(B, n, D)
        R = self.linear(attended, layer.projection, R).view(B, n, layer.heads, -1).transpose(1, 2)
        R_A, R_v = self.product(A, v, R)
        R_z = self.softmax(z, R_A)
        R_q, R_k = self.product(q, k.mT, R_z * scale / scale)
        R_qkv = torch.stack([R_q, R_k.mT, R_v]).permute(1, 3, 0, 2, 4).reshape(B, n, 3 * D)
        return self.linear(h, layer.qkv, R_qkv)

    def block(self, h: Tensor, block: TransformerBlock, absent: Tensor, R: Tensor) -> Tensor:
        normal = block.norm1(h)
        attended = block.attention(normal, absent)
        middle = h + attended
        first, _, second, _ = block.mlp
        hidden = first(block.norm2(middle))
        R_middle, R_mlp = self.plus(middle, second(functional.gelu(hidden)), R)
        R_hidden = self.linear(functional.gelu(hidden), second, R_mlp)  # GELU passes it on
        R_normal = self.linear(block.norm2(middle), first, R_hidden)
        R_middle = R_middle + self.norm(middle, block.norm2, R_normal)
        R_h, R_attended = self.plus(h, attended, R_middle)
        R_normal = self.attention(normal, block.attention, absent, R_attended)
        return R_h + self.norm(h, block.norm1, R_normal)

    @torch.no_grad()
    def __call__(self, tokens: Tensor, absent: Tensor, y: Tensor) -> Tensor:
        """(B, n, D) the relevances of tokens, with their positions, from which blocks begin."""
        encoder = self.encoder
        h = torch.cat([encoder.class_token.expand(len(tokens), 1, -1), tokens], dim=1)
        absent = torch.cat([torch.zeros_like(absent[:, :1]), absent], dim=1)
        states = [h]
        for block in encoder.blocks:
            states.append(block(states[-1], absent))
        last = encoder.norm(states[-1][:, 0])
        logits = self.head(last)
        R = logits * functional.one_hot(y, CLASSES)
        R = self.norm(states[-1][:, 0], encoder.norm, self.linear(last, self.head, R))
        R = torch.cat([R[:, None], torch.zeros_like(states[-1][:, 1:])], dim=1)
        for block, state in zip(reversed([*encoder.blocks]), reversed(states[:-1]), strict=True):
            R = self.block(state, block, absent, R)  # type: ignore[arg-type]
        self.absorbed += float(R[:, 0].sum())  # by the class token
        return R[:, 1:]


def test_attn_lrp_is_the_rules_written_out_for_documents() -> None:
    network: Any = reader()
    words: Words = network.features.tokens
    rules, found = Relevance(network), explain("attn_lrp", network, DOCUMENTS)
    with torch.no_grad():
        tokens, absent = words(DOCUMENTS)
        own = words.embedding(DOCUMENTS)
        R = rules(tokens, absent, CLASS) * own / tokens  # positions absorb the rest
    expected = R.masked_fill(absent[..., None], 0).sum(dim=2)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
    # Nothing is lost on the way: what does not reach words is in biases, positions, the class
    # token and softmax.
    rules = Relevance(network)
    total = float(rules(tokens, absent, CLASS).sum())
    whole = float(logit(network, DOCUMENTS).sum())
    assert total + rules.absorbed == pytest.approx(whole, rel=1e-6)


def test_attn_lrp_is_the_rules_written_out_for_images() -> None:
    network: Any = vit()
    patches = network.features.tokens
    x, rules = images(), Relevance(network)
    with torch.no_grad():
        tokens, _ = patches(x)
        absent = torch.zeros(tokens.shape[:2], dtype=torch.bool)
        R = rules(tokens, absent, CLASS)
        embedded = tokens - patches.positions
        R = R * embedded / tokens
        pixels = functional.unfold(x, 4, stride=4).mT  # (B, N, C·16), by channel
        grid = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(3, 4, -1)
        torch.testing.assert_close(pixels, grid)
    found = explain("attn_lrp", network, x)
    of_patches = functional.unfold(found, 4, stride=4).sum(dim=1)
    weight, bias = patches.embedding.weight, patches.embedding.bias
    share = (embedded - bias) / embedded  # of the bias
    expected = (R * share).sum(dim=2)
    assert weight.shape == (8, 32)
    torch.testing.assert_close(of_patches, expected, rtol=1e-4, atol=1e-8)


def test_attn_lrp_is_that_of_lxt() -> None:
    """The authors' library, whose functions hand relevances on in the place of gradients."""
    theirs = pytest.importorskip("lxt.explicit.functional")
    identity = pytest.importorskip("lxt.explicit.rules").identity
    tiny = 1e-12  # their stabiliser

    class Theirs(Calls):
        def call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
            found = {
                "linear": lambda x, w, b=None: theirs.linear_epsilon(x, w, b, tiny),
                "matmul": lambda a, b: theirs.matmul(a, b, False, tiny),
                "add": lambda a, b: theirs.add2(a, b, False, tiny),
                "div": lambda a, b: theirs.mul2(a, 1 / b),
                "softmax": lambda a, dim: theirs.softmax(a, dim),
                "gelu": lambda a, **_: identity(functional.gelu, a),
                "layer_norm": lambda a, _, weight, bias, eps: theirs.layer_norm(
                    a, weight, bias, eps
                ),
            }
            if not any(is_activation(a) for a in args):
                return func(*args, **kwargs)
            return found.get(function(func), func)(*args, **kwargs)

    network, x = vit().requires_grad_(False), images().requires_grad_()
    with Theirs():
        logits = network(x)
    logits.backward(logits.detach() * functional.one_hot(CLASS, CLASSES))
    found = explain("attn_lrp", network, x.detach())
    torch.testing.assert_close(found, x.grad, rtol=1e-3, atol=1e-6)


# -- Attention of any writing -------------------------------------------------------------------


class Tokens(nn.Module):
    """A network of documents by one layer of attention, written in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Embedding(V, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, absent = self.table(x), x == 0
        if self.how == "torch":
            attended, A = self.attention(h, h, h, key_padding_mask=absent)
            assert A.shape == (len(x), x.shape[1], x.shape[1])
        else:
            own = self.attention
            qkv = functional.linear(h, own.in_proj_weight, own.in_proj_bias)
            q, k, v = qkv.view(*x.shape, 3, 2, 4).permute(2, 0, 3, 1, 4)
            if self.how == "fused":
                mask = ~absent[:, None, None]
                attended = functional.scaled_dot_product_attention(
                    query=q, key=k, value=v, attn_mask=mask
                )
            elif self.how == "einsum":
                scores = torch.einsum("bhid,bhjd->bhij", q, k) * 0.5
                A = scores.masked_fill(absent[:, None, None], -math.inf).softmax(-1)
                attended = torch.einsum("bhij,bhjd->bhid", A, v)
            else:
                scores = q @ k.transpose(-2, -1) / 2
                scores = scores.masked_fill(absent[:, None, None], -math.inf)
                attended = torch.softmax(scores, dim=-1) @ v
            attended = own.out_proj(attended.transpose(1, 2).flatten(2))
        there = (~absent)[..., None]
        h = self.norm(h + attended) * there
        return self.head(h.sum(1) / there.sum(1))


def written(how: str) -> nn.Module:
    torch.manual_seed(3)
    return stirred(Tokens(how))


@pytest.mark.parametrize("how", ["torch", "fused", "einsum"])
@pytest.mark.parametrize("name", ["attention_rollout", "attn_lrp", "integrated_gradients"])
def test_attention_is_followed_however_it_is_written(name: str, how: str) -> None:
    expected = explain(name, written("plain"), DOCUMENTS)
    assert expected.abs().max() > 0.01
    found = explain(name, written(how), DOCUMENTS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


class OneHead(nn.Module):
    """Attention (B, n, n) of one head, or with an axis of heads."""

    def __init__(self, axis: bool) -> None:
        super().__init__()
        self.axis = axis
        self.table, self.head = nn.Embedding(V, 8, padding_idx=0), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        h = h[:, None] if self.axis else h
        absent = (x == 0)[:, None, None] if self.axis else (x == 0)[:, None]
        A = (h @ h.mT).masked_fill(absent, -math.inf).softmax(-1)
        h = A @ h
        return self.head((h[:, 0] if self.axis else h)[:, 0])


def test_one_head_needs_no_axis() -> None:
    torch.manual_seed(4)
    network, other = OneHead(axis=False), OneHead(axis=True)
    other.load_state_dict(network.state_dict())
    for name in ("attention_rollout", "attn_lrp"):
        expected = explain(name, other, DOCUMENTS)
        torch.testing.assert_close(explain(name, network, DOCUMENTS), expected)
        assert expected.any()


class Stack(nn.Module):
    """torch's own encoder, whose fast path calls no function that can be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(V, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.table(x), src_key_padding_mask=x == 0)[:, 0])


def test_torchs_own_encoder_is_followed() -> None:
    network = stirred(Stack())
    rolled = explain("attention_rollout", network, DOCUMENTS)
    torch.testing.assert_close(rolled.sum(dim=1), torch.ones(3))
    passed = explain("attn_lrp", network, DOCUMENTS)
    assert (passed[0] != 0).all()
    assert not passed[DOCUMENTS == 0].any()


# -- Rollout ------------------------------------------------------------------------------------


def probabilities(network: Any, x: Tensor) -> list[Tensor]:
    """(B, n, n) the mean attention of each layer over its heads."""
    encoder: Encoder = network.features
    with torch.no_grad():
        tokens, absent = encoder.tokens(x)
        h = torch.cat([encoder.class_token.expand(len(tokens), 1, -1), tokens], dim=1)
        if absent is None:
            absent = torch.zeros(tokens.shape[:2], dtype=torch.bool)
        absent = torch.cat([torch.zeros_like(absent[:, :1]), absent], dim=1)
        found = []
        for block in encoder.blocks:
            layer = block.attention
            B, n, D = h.shape
            qkv = layer.qkv(block.norm1(h)).view(B, n, 3, layer.heads, -1).permute(2, 0, 3, 1, 4)
            scores = qkv[0] @ qkv[1].mT / math.sqrt(D // layer.heads)
            found.append(scores.masked_fill(absent[:, None, None], -math.inf).softmax(-1).mean(1))
            h = block(h, absent)
    return found


def rolled_out(maps: list[Tensor]) -> Tensor:
    """(B, n, n) the product of (A + I)/2 over layers, the last one first."""
    n = maps[0].shape[-1]
    product = torch.eye(n, dtype=maps[0].dtype)
    for A in maps:
        product = (A + torch.eye(n)) / 2 @ product
    return product


def test_rollout_is_the_product_of_layers_for_documents() -> None:
    network = reader()
    expected = rolled_out(probabilities(network, DOCUMENTS))[:, 0]  # of the class token
    found = explain("attention_rollout", network, DOCUMENTS).double()
    torch.testing.assert_close(found, expected[:, 1:])
    torch.testing.assert_close(found.sum(1) + expected[:, 0], torch.ones(3).double())
    assert not found[DOCUMENTS == 0].any()


def test_rollout_is_spread_over_the_pixels_of_patches() -> None:
    network, x = vit(), images()
    expected = rolled_out(probabilities(network, x))[:, 0, 1:].view(3, 2, 2)
    found = explain("attention_rollout", network, x)
    assert found.shape == x.shape
    of_patches = found.double().sum(1).unfold(1, 4, 4).unfold(2, 4, 4).sum((3, 4))
    torch.testing.assert_close(of_patches, expected)
    assert torch.equal(found[:, :, :4, :4], found[:, :1, :1, :1].expand(3, 2, 4, 4))


def test_rollout_reads_the_tokens_that_the_output_is_read_from() -> None:
    """The mean of rows where tokens are averaged, of which padding is none."""
    network, x = written("plain"), DOCUMENTS
    own: Any = network
    with torch.no_grad():
        h = own.table(x)
        q, k, _ = (
            functional.linear(h, own.attention.in_proj_weight, own.attention.in_proj_bias)
            .view(*x.shape, 3, 2, 4)
            .permute(2, 0, 3, 1, 4)
        )
        A = (q @ k.mT / 2).masked_fill((x == 0)[:, None, None], -math.inf).softmax(-1).mean(1)
    R, there = rolled_out([A]), (x != 0).double()
    expected = (R * there[..., None]).sum(1) / there.sum(1, keepdim=True)
    found = explain("attention_rollout", network, x).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


# -- Gradients at words' vectors ----------------------------------------------------------------


def text_cnn() -> nn.Module:
    known = torch.ones(V, dtype=torch.bool)
    return stirred(TextCnn(filters=4, hidden=6).build_text(vectors(), known, CLASSES))


def rationale() -> nn.Module:
    known = torch.ones(V, dtype=torch.bool)
    section = RationaleModel(hidden=5, evaluate="budget", share=0.5)
    return stirred(section.build_text(vectors(), known, CLASSES))


READERS: dict[str, Callable[[], nn.Module]] = {
    "text_cnn": text_cnn,
    "rationale": rationale,
    "transformer": reader,
    "transformer of vectors": lambda: reader(embeddings="vectors"),
    "torch": lambda: written("torch"),
}


@pytest.mark.parametrize("of", [of for of in READERS if of != "rationale"])
def test_integrated_gradients_sum_to_the_change_from_empty_vectors(of: str) -> None:
    network = READERS[of]()
    found = explain("integrated_gradients", network, DOCUMENTS, steps=3000)
    vectors, read = by_words("it", network, DOCUMENTS)
    with torch.no_grad():
        nothing = read(torch.zeros_like(vectors)).gather(1, CLASS[:, None])[:, 0]
    change = logit(network, DOCUMENTS) - nothing
    torch.testing.assert_close(found.sum(1).double(), change, rtol=0.01, atol=2e-3)
    assert not found[DOCUMENTS == 0].any()


@pytest.mark.parametrize("of", READERS)
def test_gradients_are_those_of_the_table_of_words(of: str) -> None:
    """Documents without a word twice, one at a time: ∂f/∂E, of which each row is a word's."""
    network = READERS[of]()
    tables = [*network.named_parameters(), *network.named_buffers()]
    name, table = next((n, t) for n, t in tables if len(t) == V and t.dim() == 2)
    for k, own in enumerate(DOCUMENTS):
        x = own[None, : int((own != 0).sum())]
        changed = table.detach().clone().requires_grad_()
        f = torch.func.functional_call(network, {name: changed}, (x,))[0, CLASS[k]]
        (gradient,) = torch.autograd.grad(f, changed)
        expected = (gradient * changed.detach()).sum(1)[x]
        found = explain("gradient_x_input", network, x, CLASS[k : k + 1]).double()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("of", READERS)
@pytest.mark.parametrize("name", ["gradient_x_input", "integrated_gradients", "attn_lrp"])
def test_a_document_is_explained_alone_as_among_others(name: str, of: str) -> None:
    if name == "attn_lrp" and of == "rationale":
        pytest.skip("its recurrent layers have no rule")
    network, before = READERS[of](), copy.deepcopy(READERS[of]().state_dict())
    together = explain(name, network, DOCUMENTS)
    for k, own in enumerate(DOCUMENTS):
        alone = explain(name, network, own[None], CLASS[k : k + 1])
        torch.testing.assert_close(alone[0], together[k], rtol=1e-4, atol=1e-6)
    for key, value in network.state_dict().items():
        assert torch.equal(value, before[key])
    assert all(p.grad is None for p in network.parameters())


class Positions(nn.Module):
    """Words and positions, looked up in an order, and added in place or not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.places, self.table = nn.Embedding(L, 4), nn.Embedding(V, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[None]
        if self.how == "positions first":
            h = self.places(places) + self.table(x)
        elif self.how == "in place":
            h = self.table(x)
            h += self.places(places)
        elif self.how == "by keyword":
            h = functional.embedding(input=x, weight=self.table.weight) + self.places(places)
        else:
            h = self.table(x) + self.places(places.expand(len(x), -1))
        return self.head(h.tanh().sum(1))


@pytest.mark.parametrize("how", ["positions first", "in place", "by keyword"])
@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 3)])
def test_vectors_of_positions_are_not_those_of_words(how: str, rows: slice) -> None:
    torch.manual_seed(5)
    network, other = Positions(how), Positions("words first")
    other.load_state_dict(network.state_dict())
    for name in ("gradient_x_input", "integrated_gradients", "attn_lrp"):
        expected = explain(name, other, DOCUMENTS[rows], CLASS[rows])
        torch.testing.assert_close(explain(name, network, DOCUMENTS[rows], CLASS[rows]), expected)


def test_documents_without_a_word_may_look_like_positions() -> None:
    """Of types, say, which are all 0."""
    torch.manual_seed(5)

    class Typed(Positions):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.head(self.places(torch.zeros_like(x)).sum(1))

    for name in ("gradient_x_input", "integrated_gradients", "attn_lrp"):
        for x in (torch.zeros_like(DOCUMENTS), DOCUMENTS[:, :1]):
            found = explain(name, Typed("words first"), x)
            assert torch.equal(found != 0, x != 0)


def test_padding_may_be_another_token() -> None:
    """0 and 4 change places, as in what a tokenizer with padding 4 reads."""
    torch.manual_seed(5)

    class Swapped(Positions):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.where(x == 0, 4, torch.where(x == 4, 0, x.long()))
            return super().forward(x)

    network, other = Swapped("words first"), Positions("words first")
    weights = network.state_dict()
    order = torch.tensor([4, 1, 2, 3, 0, *range(5, V)])
    other.load_state_dict(weights | {"table.weight": weights["table.weight"][order]})
    expected = explain("gradient_x_input", other, DOCUMENTS)
    found = explain("gradient_x_input", network, DOCUMENTS.int())
    torch.testing.assert_close(found, expected)


# -- What has no rule ---------------------------------------------------------------------------


class Between(nn.Module):
    """A convolution, a function that `forward` calls, and a linear layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.convolution, self.function = nn.Conv2d(1, 4, 3, padding=1), function
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self.convolution(x)).flatten(2).amax(2))


# Functions, whether LRP takes them outside of modules, and AttnLRP at all.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool, bool]] = {
    "relu": (torch.relu, True, True),
    "reshape": (lambda h: h.reshape(*h.shape), True, True),
    "cat": (lambda h: torch.cat([h[:, :2], h[:, 2:]], dim=1), True, True),
    "max pooling": (lambda h: functional.max_pool2d(h, 2), True, True),
    "mean": (lambda h: h.mean((2, 3), keepdim=True), False, True),
    "sum": (lambda h: h.sum((2, 3), keepdim=True), False, True),
    "mean pooling": (lambda h: functional.adaptive_avg_pool2d(h, 1), False, True),
    "scaling": (lambda h: 0.5 * h, False, True),
    "division": (lambda h: h / 3, False, True),
    "division by name": (lambda h: torch.div(h, other=3.0), False, True),
    "gate": (lambda h: h * h.relu(), False, True),
    "shift": (lambda h: h + 1, False, True),
    "residual": (lambda h: h + h.relu(), False, True),
    "gelu": (functional.gelu, False, True),
    "tanh": (torch.tanh, False, True),
    "softmax": (lambda h: h.softmax(1), False, True),
    "layer norm": (lambda h: functional.layer_norm(h, h.shape[1:]), False, True),
    "product": (lambda h: h @ h.mT, False, True),
    "sigmoid": (torch.sigmoid, False, False),
    "exp": (torch.exp, False, False),
    "square": (lambda h: h**2, False, False),
    "root": (lambda h: h.abs().sqrt(), False, False),
    "division by an activation": (lambda h: h / (1 + h.relu()), False, False),
    "normalised": (lambda h: functional.normalize(h, dim=1), False, False),
    "instance norm": (functional.instance_norm, False, False),
    "three factors": (lambda h: torch.einsum("bcij,bcij,bcij->bcij", h, h, h), False, False),
    "clamp": (lambda h: h.clamp(0, 1), False, False),
}


@pytest.mark.parametrize("of", FUNCTIONS)
def test_a_function_without_a_rule_is_refused(of: str) -> None:
    called, by_lrp, by_attn_lrp = FUNCTIONS[of]
    torch.manual_seed(0)
    network, x = Between(called).eval(), torch.randn(3, 1, 6, 6)
    pytest.importorskip("zennit")
    if by_lrp:
        assert explain("lrp", network, x).isfinite().all()
    else:
        line = r"attribution lrp: the network calls [\w.]+ itself, where no rule applies\. Use a "
        with pytest.raises(ExperimentError, match=line):
            explain("lrp", network, x)
    if by_attn_lrp:
        assert explain("attn_lrp", network, x).isfinite().all()
    else:
        line = r"attribution attn_lrp: the network calls [\w.]+, which has no rule; for any diff"
        with pytest.raises(ExperimentError, match=line):
            explain("attn_lrp", network, x)


@pytest.mark.parametrize("of", ["scaling", "gate", "residual", "gelu", "mean", "product"])
def test_relevance_is_neither_lost_nor_made_by_a_function(of: str) -> None:
    """Without biases; as gradients it would be, by which LRP's rules were left out before."""
    torch.manual_seed(0)
    network, x = Between(FUNCTIONS[of][0]).eval().double(), torch.randn(3, 1, 6, 6).double()
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    found = explain("attn_lrp", network, x).sum(dim=(1, 2, 3))
    torch.testing.assert_close(found, logit(network, x), rtol=1e-9, atol=1e-12)


IN_PLACE: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "silu": (lambda h: functional.silu(h, inplace=True), functional.silu),
    "tanh, of which the value is not used": (lambda h: h.tanh_(), torch.tanh),
    "gate": (lambda h: h.mul_(h.relu()), lambda h: h * h.relu()),
    "scaling": (lambda h: h.div_(2), lambda h: h / 2),
}


@pytest.mark.parametrize("of", IN_PLACE)
def test_functions_in_place_are_as_others(of: str) -> None:
    def changed(h: Tensor) -> Tensor:
        IN_PLACE[of][0](h)
        return h

    x, found = torch.randn(3, 1, 6, 6), []
    for called in (changed, IN_PLACE[of][1]):
        torch.manual_seed(0)
        found.append(explain("attn_lrp", Between(called).eval(), x))
    torch.testing.assert_close(*found)


class WrittenOut(nn.Module):
    """An activation, by functions of which some have no rule; or what is none."""

    def __init__(self, called: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.called = called

    def forward(self, h: Tensor) -> Tensor:
        return self.called(h)


def test_a_module_that_is_an_activation_passes_relevance_on() -> None:
    def gelu(h: Tensor) -> Tensor:
        return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h.pow(3))))

    x, found = torch.randn(3, 1, 6, 6), []
    for module in (WrittenOut(gelu), nn.GELU("tanh")):
        torch.manual_seed(0)
        network = Between(module).eval()
        found.append(explain("attn_lrp", network, x))
        assert not any(part._forward_hooks for part in network.modules())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "called",
    [
        lambda h: h * h.square().mean(1, keepdim=True).rsqrt(),  # of several entries
        lambda h: h.exp(),  # 1 at 0
    ],
)
def test_a_module_that_is_no_activation_is_refused(called: Callable[[Tensor], Tensor]) -> None:
    network = Between(WrittenOut(called)).eval()
    with pytest.raises(ExperimentError, match="attn_lrp: the network calls"):
        explain("attn_lrp", network, torch.randn(3, 1, 6, 6))
    assert not any(part._forward_pre_hooks for part in network.modules())
    assert not torch.overrides._get_current_function_mode_stack()


def windows() -> nn.Module:
    """Attention of two sizes."""
    network: Any = vit()

    class Halved(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, h: Tensor, absent: Tensor | None) -> Tensor:
            return self.block(h[:, :3], absent)

    network.features.blocks[1] = Halved(network.features.blocks[1])
    return network


class Frozen(nn.Module):
    """A head, which needs gradients or not, of a network that gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = reader().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.body(x)


class Parts(nn.Module):
    """Attention within the parts of an image, which are as many rows of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(3, (2, 4)).movedim(3, 1).flatten(0, 1)  # (2B, C, 8, 4)
        return ((parts @ parts.mT).softmax(-1) @ parts).mean((2, 3)).view(len(x), -1)[:, :CLASSES]


REFUSED: list[tuple[str, Callable[[], nn.Module], Tensor, str]] = [
    (
        "attention_rollout",
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, CLASSES)).double(),
        images(),
        "the network has no attention between all tokens in all its layers",
    ),
    (
        "attention_rollout",
        windows,
        images(),
        "the network has no attention between all tokens in all its layers",
    ),
    (
        "attention_rollout",
        lambda: Parts(),
        images(),
        "the network has no attention between all tokens in all its layers",
    ),
    (
        "attention_rollout",
        lambda: Frozen(),
        DOCUMENTS,
        "the network's outputs do not depend on its last layer's attention",
    ),
    ("attn_lrp", rationale, DOCUMENTS, "the network calls "),
    (
        "attn_lrp",
        lambda: Twice("two tables"),
        DOCUMENTS,
        "the network looks up words in two tables; for documents: occlusion",
    ),
    (
        "integrated_gradients",
        lambda: nn.Linear(L, CLASSES),
        DOCUMENTS,
        "the network looks up no vectors of words; for documents: occlusion",
    ),
    (
        "gradient_x_input",
        lambda: Twice("reversed first"),
        DOCUMENTS,
        "the network looks up vectors of words twice, and not of the same; for documents: "
        "occlusion",
    ),
    (
        "gradient_x_input",
        lambda: Twice("reversed alone"),
        DOCUMENTS,
        "the network looks up no vectors of words; for documents: occlusion",
    ),
    (
        "gradient_x_input",
        lambda: Twice("reversed"),
        DOCUMENTS,
        "the network looks up vectors of words twice, and not of the same; for documents: "
        "occlusion",
    ),
    (
        "gradient",
        reader,
        DOCUMENTS,
        "needs inputs of floating point, such as images; these are int64; for documents: "
        "occlusion, attention_rollout, attn_lrp, gradient_x_input, integrated_gradients",
    ),
]


class Twice(nn.Module):
    """Looks up a document, and its words in the reverse order or in another table."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table, self.other = nn.Embedding(V, 4), nn.Embedding(V, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        back = x.flip(1)
        if self.how == "two tables":
            h = self.table(x) + self.other(x)
        elif self.how == "reversed first":
            h = self.table(back) + self.table(x)
        elif self.how == "reversed alone":
            h = self.table(back)
        else:
            h = self.table(x) + self.table(back)
        return self.head(h.sum(1))


@pytest.mark.parametrize(("name", "make", "x", "line"), REFUSED)
def test_refusals(name: str, make: Callable[[], nn.Module], x: Tensor, line: str) -> None:
    with pytest.raises(ExperimentError, match=re.escape(f"attribution {name}: {line}")):
        explain(name, make().eval(), x)


@pytest.mark.parametrize("name", ["attention_rollout", "attn_lrp", "gradient_x_input"])
@pytest.mark.parametrize("of", ["documents", "images"])
def test_adapters_are_explained_as_merged_into_their_network(name: str, of: str) -> None:
    pytest.importorskip("peft")
    network = Adapters(r=2).applied(reader() if of == "documents" else vit(), False, False)
    stirred(network)
    merged_in = merged(copy.deepcopy(network))
    x = DOCUMENTS if of == "documents" else images()
    expected = explain(name, merged_in, x)
    torch.testing.assert_close(explain(name, network, x), expected, rtol=1e-4, atol=1e-7)
