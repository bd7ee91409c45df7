"""Explanations of transformers, and of documents by gradients at their words' vectors."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from networks import Written, look_at
from torch import Tensor, nn
from torch.nn import functional

from fedsim.errors import ExperimentError
from fedsim.explain.explainers.attribution import Attribution, attributions
from fedsim.models.adapters import Adapters, merged
from fedsim.models.rationale import RationaleModel
from fedsim.models.text import TextCnn
from fedsim.models.transformer import Transformer, Vit

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


def with_class_token(encoder: Any, h: Tensor, absent: Tensor | None) -> tuple[Tensor, Tensor]:
    """(B, 1 + n, D) tokens and which of them are absent."""
    absent = torch.zeros(h.shape[:2], dtype=torch.bool) if absent is None else absent
    h = torch.cat([encoder.class_token.expand(len(h), 1, -1), h], dim=1)
    return h, torch.cat([torch.zeros_like(absent[:, :1]), absent], dim=1)


def shared(a: Tensor, b: Tensor) -> Tensor:
    """A product, half of whose relevance each factor gets."""
    return (a @ b.detach() + a.detach() @ b) / 2


def normed(layer: Any, h: Tensor) -> Tensor:
    """With a standard deviation that counts as a constant."""
    sigma = (h.var(-1, correction=0, keepdim=True) + layer.eps).sqrt().detach()
    return (h - h.mean(-1, keepdim=True)) / sigma * layer.weight + layer.bias


def passed_through(block: Any, h: Tensor, absent: Tensor) -> Tensor:
    layer, (B, n, D) = block.attention, h.shape
    qkv = layer.qkv(normed(block.norm1, h)).view(B, n, 3, layer.heads, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    z = shared(q, k.mT) / math.sqrt(q.shape[-1])
    A = z.masked_fill(absent[:, None, None], -math.inf).softmax(-1)
    h = h + layer.projection(shared(A, v).transpose(1, 2).reshape(B, n, D))
    first, _, second, _ = block.mlp
    z = first(normed(block.norm2, h))
    return h + second(z * (functional.gelu(z) / z).detach())  # GELU passes relevance on


def slopes(network: Any, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """(B, n, D) tokens, which are absent, and their relevances in AttnLRP by what they are of.

    As gradients of a network with constants as above.
    """
    tokens, absent = network.features.tokens(x)
    tokens = tokens.detach().requires_grad_()
    h, with_class = with_class_token(network.features, tokens, absent)
    for block in network.features.blocks:
        h = passed_through(block, h, with_class)
    logits = network.head(normed(network.features.norm, h[:, 0]))
    torch.testing.assert_close(logits, network(x))
    (found,) = torch.autograd.grad(logits.gather(1, CLASS[:, None]).sum(), tokens)
    return tokens.detach(), absent, found


def test_attn_lrp_is_the_rules_written_out() -> None:
    network: Any = reader()
    _, absent, R = slopes(network, DOCUMENTS)
    R = R * network.features.tokens.embedding(DOCUMENTS).detach()  # positions absorb the rest
    expected = R.masked_fill(absent[..., None], 0).sum(dim=2)
    found = explain("attn_lrp", network, DOCUMENTS)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)

    network, x = vit(), images()
    patches = network.features.tokens
    tokens, _, R = slopes(network, x)
    R = R * (tokens - patches.positions - patches.embedding.bias)  # which absorb the rest
    of_patches = functional.unfold(explain("attn_lrp", network, x), 4, stride=4).sum(dim=1)
    torch.testing.assert_close(of_patches, R.sum(dim=2).detach(), rtol=1e-4, atol=1e-8)


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
                self.A = torch.softmax(scores, dim=-1)
                attended = self.A @ v
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


def one_head(network: Any, x: Tensor, axis: bool = False) -> Tensor:
    """Attention (B, n, n) of one head, or with an axis of heads."""
    h, absent = network.table(x), (x == 0)[:, None]
    if axis:
        h, absent = h[:, None], absent[:, None]
    h = (h @ h.mT).masked_fill(absent, -math.inf).softmax(-1) @ h
    return network.head((h[:, 0] if axis else h)[:, 0])


def test_one_head_needs_no_axis() -> None:
    torch.manual_seed(4)
    modules = {"table": nn.Embedding(V, 8, padding_idx=0), "head": nn.Linear(8, CLASSES)}
    network, other = (Written(partial(one_head, axis=a), **modules) for a in (False, True))
    for name in ("attention_rollout", "attn_lrp"):
        expected = explain(name, other, DOCUMENTS)
        torch.testing.assert_close(explain(name, network, DOCUMENTS), expected)
        assert expected.any()


def test_torchs_own_encoder_is_followed() -> None:
    """Whose fast path calls no function that can be followed."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True)
    network = stirred(
        Written(
            lambda net, x: net.head(net.encoder(net.table(x), src_key_padding_mask=x == 0)[:, 0]),
            table=nn.Embedding(V, 8, padding_idx=0),
            encoder=nn.TransformerEncoder(layer, 2),
            head=nn.Linear(8, CLASSES),
        )
    )
    rolled = explain("attention_rollout", network, DOCUMENTS)
    torch.testing.assert_close(rolled.sum(dim=1), torch.ones(3))
    passed = explain("attn_lrp", network, DOCUMENTS)
    assert (passed[0] != 0).all()
    assert not passed[DOCUMENTS == 0].any()


# -- Rollout ------------------------------------------------------------------------------------


def probabilities(network: Any, x: Tensor) -> list[Tensor]:
    """(B, n, n) the mean attention of each layer over its heads."""
    tokens, absent = network.features.tokens(x)
    h, absent = with_class_token(network.features, tokens, absent)
    found = []
    for block in network.features.blocks:
        layer, (B, n, D) = block.attention, h.shape
        qkv = layer.qkv(block.norm1(h)).view(B, n, 3, layer.heads, -1).permute(2, 0, 3, 1, 4)
        scores = qkv[0] @ qkv[1].mT / math.sqrt(D // layer.heads)
        found.append(scores.masked_fill(absent[:, None, None], -math.inf).softmax(-1).mean(1))
        h = block(h, absent)
    return [A.detach() for A in found]


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
    network: Any = written("plain")
    network(DOCUMENTS)
    R, there = rolled_out([network.A.detach().mean(1)]), (DOCUMENTS != 0).double()
    expected = (R * there[..., None]).sum(1) / there.sum(1, keepdim=True)
    found = explain("attention_rollout", network, DOCUMENTS).double()
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
    network = READERS[of]()
    before, together = look_at(network), explain(name, network, DOCUMENTS)
    for k, own in enumerate(DOCUMENTS):
        alone = explain(name, network, own[None], CLASS[k : k + 1])
        torch.testing.assert_close(alone[0], together[k], rtol=1e-4, atol=1e-6)
    assert look_at(network) == before


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


AT_WORDS = ("gradient_x_input", "integrated_gradients", "attn_lrp")


@pytest.mark.parametrize("how", ["positions first", "in place", "by keyword"])
def test_vectors_of_positions_are_not_those_of_words(how: str) -> None:
    torch.manual_seed(5)
    network, other = Positions(how), Positions("words first")
    other.load_state_dict(network.state_dict())
    for name, n in itertools.product(AT_WORDS, (1, 3)):
        expected = explain(name, other, DOCUMENTS[:n], CLASS[:n])
        torch.testing.assert_close(explain(name, network, DOCUMENTS[:n], CLASS[:n]), expected)


def test_documents_without_a_word_may_look_like_positions() -> None:
    """Of types, say, which are all 0."""
    torch.manual_seed(5)

    class Typed(Positions):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.head(self.places(torch.zeros_like(x)).sum(1))

    for name, x in itertools.product(AT_WORDS, (torch.zeros_like(DOCUMENTS), DOCUMENTS[:, :1])):
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


def between(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """A convolution, a function that `forward` calls, or a module, and a linear layer."""
    torch.manual_seed(0)
    modules = {"called": function} if isinstance(function, nn.Module) else {}

    def forward(net: Any, x: Tensor) -> Tensor:
        called = net.called if modules else function
        return net.head(called(net.convolution(x)).flatten(2).amax(2))

    ends = {"convolution": nn.Conv2d(1, 4, 3, padding=1), "head": nn.Linear(4, CLASSES)}
    return Written(forward, **ends, **modules).eval()


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
    network, x = between(called), torch.randn(3, 1, 6, 6)
    pytest.importorskip("zennit")
    for name, able, line in (
        ("lrp", by_lrp, r"[\w.]+ itself, where no rule applies\. Use a "),
        ("attn_lrp", by_attn_lrp, r"[\w.]+, which has no rule; for any diff"),
    ):
        if able:
            assert explain(name, network, x).isfinite().all()
            continue
        with pytest.raises(ExperimentError, match=f"{name}: the network calls {line}"):
            explain(name, network, x)


@pytest.mark.parametrize("of", ["scaling", "gate", "residual", "gelu", "mean", "product"])
def test_relevance_is_neither_lost_nor_made_by_a_function(of: str) -> None:
    """Without biases; as gradients it would be, by which LRP's rules were left out before."""
    network, x = between(FUNCTIONS[of][0]).double(), torch.randn(3, 1, 6, 6).double()
    for layer in (network.convolution, network.head):
        layer.bias.data.zero_()
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

    x, networks = torch.randn(3, 1, 6, 6), map(between, (changed, IN_PLACE[of][1]))
    torch.testing.assert_close(*(explain("attn_lrp", network, x) for network in networks))


def test_a_module_that_is_an_activation_passes_relevance_on() -> None:
    def gelu(h: Tensor) -> Tensor:
        return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h.pow(3))))

    x, found = torch.randn(3, 1, 6, 6), []
    for module in (Written(lambda _, h: gelu(h)), nn.GELU("tanh")):
        network = between(module)
        found.append(explain("attn_lrp", network, x))
        assert not any(part._forward_hooks for part in network.modules())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_a_module_that_is_no_activation_is_refused() -> None:
    of_several = Written(lambda _, h: h * h.square().mean(1, keepdim=True).rsqrt())
    for module in (of_several, Written(lambda _, h: h.exp())):  # which is 1 at 0
        network = between(module)
        with pytest.raises(ExperimentError, match="attn_lrp: the network calls"):
            explain("attn_lrp", network, torch.randn(3, 1, 6, 6))
        assert not any(part._forward_pre_hooks for part in network.modules())
        assert not torch.overrides._get_current_function_mode_stack()


def windows() -> nn.Module:
    """Attention of two sizes."""
    network: Any = vit()
    attend = network.features.blocks[1].forward
    network.features.blocks[1].forward = lambda h, absent: attend(h[:, :3], absent)
    return network


def frozen() -> nn.Module:
    """A network that gets no gradients."""
    return Written(
        lambda net, x: torch.no_grad()(net.body)(x), body=reader().requires_grad_(False)
    )


def within_parts(_: Any, x: Tensor) -> Tensor:
    """Attention within the parts of an image, which are as many rows of a batch."""
    parts = x.unflatten(3, (2, 4)).movedim(3, 1).flatten(0, 1)  # (2B, C, 8, 4)
    return ((parts @ parts.mT).softmax(-1) @ parts).mean((2, 3)).view(len(x), -1)[:, :CLASSES]


def looks_up(how: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A network that looks up documents in one of two tables, or in both."""
    return lambda: Written(
        lambda net, x: net.head(how(net, x).sum(1)),
        table=nn.Embedding(V, 4),
        other=nn.Embedding(V, 4),
        head=nn.Linear(4, CLASSES),
    )


TABLES = looks_up(lambda net, x: net.table(x) + net.other(x))
FORTH_AND_BACK = looks_up(lambda net, x: net.table(x) + net.table(x.flip(1)))
BACK_AND_FORTH = looks_up(lambda net, x: net.table(x.flip(1)) + net.table(x))
BACK = looks_up(lambda net, x: net.table(x.flip(1)))
APART = "the network has no attention between all tokens in all its layers"
NO_VECTORS = "the network looks up no vectors of words; for documents: occlusion"
TWICE = (
    "the network looks up vectors of words twice, and not of the same; for documents: occlusion"
)
FLOATS = (
    "needs inputs of floating point, such as images; these are int64; for documents: occlusion, "
    "attention_rollout, attn_lrp, gradient_x_input, integrated_gradients"
)


@pytest.mark.parametrize(
    ("name", "make", "x", "line"),
    [
        ("attention_rollout", lambda: nn.Flatten().double(), images(), APART),
        ("attention_rollout", windows, images(), APART),
        ("attention_rollout", lambda: Written(within_parts), images(), APART),
        (
            *("attention_rollout", frozen, DOCUMENTS),
            "the network's outputs do not depend on its last layer's attention",
        ),
        ("attn_lrp", rationale, DOCUMENTS, "the network calls "),
        (
            *("attn_lrp", TABLES, DOCUMENTS),
            "the network looks up words in two tables; for documents: occlusion",
        ),
        ("integrated_gradients", lambda: nn.Linear(L, CLASSES), DOCUMENTS, NO_VECTORS),
        ("gradient_x_input", BACK_AND_FORTH, DOCUMENTS, TWICE),
        ("gradient_x_input", BACK, DOCUMENTS, NO_VECTORS),
        ("gradient_x_input", FORTH_AND_BACK, DOCUMENTS, TWICE),
        ("gradient", reader, DOCUMENTS, FLOATS),
    ],
)
def test_refusals(name: str, make: Callable[[], nn.Module], x: Tensor, line: str) -> None:
    with pytest.raises(ExperimentError, match=re.escape(f"explainer {name}: {line}")):
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
