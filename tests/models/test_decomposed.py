"""Networks of B ⊙ m + A, against loops that are written out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import token_rows
from torch import Tensor

from experiments import examples
from fedsim.models.decomposed import Layout, ProjectedRest, Rest
from fedsim.models.text import Reader

V, D = 12, 3  # words, with the padding; length of a vector
LAYOUTS = [
    Layout((1,), 2, D),
    Layout((2, 3), 3, D),
    Layout((3, 1, 5), 2, D),
    Layout((2, 3), 2, D, dense=(4, 12)),
]


def a_reader() -> Reader:
    vectors = torch.randn(V, D, generator=torch.Generator().manual_seed(1))
    vectors[0] = 0
    return Reader(vectors, torch.arange(V) > 1)


# Longer and shorter than every window, of one word, and empty.
TEXTS = ([2, 3, 4, 5, 6, 7, 8], [9, 3], [11], [], [4, 4, 4], [2, 10, 9, 8, 7, 6, 5, 4, 3])


def blocks_by_hand(layout: Layout) -> list[tuple[int, int]]:
    sizes = [(layout.filters, layout.vectors * width) for width in layout.kernels]
    return sizes + ([layout.dense] if layout.dense else [])


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_windows_and_masked(layout: Layout, lead: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    vector, mask = torch.randn(*lead, layout.size), torch.randn(*lead, layout.rows)
    one = torch.randn(layout.size)
    parts, masked, windows = layout.split(vector), layout.masked(one, mask), layout.windows(one)
    only = layout.windows(one[: layout.convolutional])
    assert masked.shape == vector.shape
    at = row = 0
    for part, (rows, columns) in zip(parts, blocks_by_hand(layout), strict=True):
        own = slice(at, at + rows * columns)
        assert torch.equal(part, vector[..., own].view(*lead, rows, columns))
        gates = mask[..., row : row + rows].repeat_interleave(columns, dim=-1)
        assert torch.equal(masked[..., own], one[own] * gates)
        at, row = own.stop, row + rows
    assert (at, row) == (layout.size, layout.rows)
    assert layout.draw().shape == (layout.size,)
    assert layout.features == layout.filters * len(layout.kernels)
    # A row of a convolution is (word vector, place in the window), as PyTorch's own.
    assert [w.shape for w in windows] == [(layout.filters, D, k) for k in layout.kernels]
    for found in (windows, only):
        in_order = torch.cat([window.flatten() for window in found])
        assert torch.equal(in_order, one[: layout.convolutional])


def test_initial_values_are_glorots() -> None:
    torch.manual_seed(0)
    layout = Layout((3, 5), 64, 20, dense=(50, 256))
    bounds = [(6 / (20 * w + 64 * w)) ** 0.5 for w in (3, 5)] + [(6 / (256 + 50)) ** 0.5]
    for part, bound in zip(layout.split(layout.draw()), bounds, strict=True):
        assert bound * 0.98 < part.abs().max() <= bound
        assert part.mean().abs() < 0.1 * bound


def responses(reader: Reader, text: list[int], weight: Tensor) -> Tensor:
    """(windows, F) what each filter (F, D, width) makes of each of a document's n windows."""
    width = weight.shape[2]
    words = torch.cat([reader.vectors[text], torch.zeros(width, D)])
    windows = [words[start : start + width].T for start in range(max(1, len(text)))]
    return torch.stack([(weight * window).sum(dim=(1, 2)) for window in windows])


def filled(network: Rest, seed: int, used: int) -> Rest:
    """A network with random parameters, of both signs, and that many A's of others."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    network.foreign[:used] = torch.randn(network.foreign[:used].shape, generator=generator)
    return network.eval()


def weighed(layout: Layout, seed: int) -> Tensor:
    return torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))


def logits(network: Rest, reader: Reader, x: Tensor, theta: Tensor) -> Tensor:
    found: Tensor = network(reader(x), theta, network.digest(reader, x))
    return found


def slow_rest(network: Rest, reader: Reader, text: list[int], theta: Tensor) -> Tensor:
    layout, pooled = network.layout, []
    for s, weight in enumerate(layout.windows(theta)):
        for j, foreign in enumerate(network.foreign):
            weight = weight + network.attention[j, s] * layout.windows(foreign)[s]
        bias = network.bias[s * layout.filters : (s + 1) * layout.filters]
        pooled.append(torch.relu(responses(reader, text, weight) + bias).amax(dim=0))
    return network.head(torch.cat(pooled))


def slow_projected(
    network: ProjectedRest, reader: Reader, text: list[int], theta: Tensor
) -> Tensor:
    layout, F = network.layout, network.layout.filters
    own, others = [], []  # by width; by A, then by width
    for s, weight in enumerate(layout.windows(theta)):
        bias = network.bias[s * F : (s + 1) * F]
        own.append(torch.relu(responses(reader, text, weight) + bias).amax(dim=0))
    for j, vector in enumerate(network.foreign):
        of_one = []
        for s, weight in enumerate(layout.windows(vector)):
            bias = network.foreign_bias[j, s * F : (s + 1) * F]
            found = responses(reader, text, network.attention[j, s] * weight)
            of_one.append((found + bias).amax(dim=0))
        others.append(of_one)
    if layout.dense:
        z = torch.cat([*own, *itertools.chain.from_iterable(others)]).clamp(min=0)
        W = theta[layout.convolutional :].view(layout.dense)
        for j, vector in enumerate(network.foreign):
            alpha = network.attention[j, len(layout.kernels)]
            W = W + alpha * vector[layout.convolutional :].view(layout.dense)
        h = torch.relu(W @ z + network.hidden_bias)
    else:
        for s, layer in enumerate(network.projections):
            own.append(torch.relu(layer(torch.cat([of_one[s] for of_one in others]))))
        h = torch.relu(network.combination(torch.cat(own)))
    return network.head(h)


def all_networks(slots: int = 2) -> list[Rest]:
    layout, hidden = Layout((2, 3), 3, D), 4
    dense = Layout((2, 3), 3, D, dense=(hidden, (slots + 1) * 6))
    return [
        Rest(layout, slots, 3, 0.0, hidden),
        ProjectedRest(layout, slots, 3, 0.0, hidden),
        ProjectedRest(dense, slots, 3, 0.0, hidden),
    ]


KINDS = ["fedweit", "projected", "dls"]
kinds = pytest.mark.parametrize("kind", range(3), ids=KINDS)


def slow(network: Rest, reader: Reader, texts: Iterable[list[int]], theta: Tensor) -> Tensor:
    form = slow_projected if isinstance(network, ProjectedRest) else slow_rest
    return torch.stack([form(network, reader, text, theta) for text in texts])  # type: ignore[arg-type]


@kinds
def test_attention_of_both_signs_and_none(kind: int) -> None:
    """Logits and their gradients, also of A's that are not there yet."""
    reader, found = a_reader(), list[Tensor]()
    weights = torch.randn(len(TEXTS), 3, generator=torch.Generator().manual_seed(0))
    for used in (0, 1, 2):
        network = filled(all_networks()[kind], seed=7, used=used)
        theta = weighed(network.layout, 3).requires_grad_()
        leaves = [theta, *network.parameters()]
        for signs in ([[1, -1], [-1, 1]], [[-1, -1], [1, 1]], [[0, 1], [-1, 0]], [[0, 0], [0, 0]]):
            alpha = torch.tensor([[*row, row[0]] for row in signs]).float() * 0.7
            network.attention.data = alpha[:, : len(network.layout.blocks)]
            found.append(logits(network, reader, token_rows(TEXTS), theta))
            expected = slow(network, reader, TEXTS, theta)
            torch.testing.assert_close(found[-1], expected, rtol=1e-4, atol=1e-4)
            if (alpha != 0).all():  # at 0, the greatest response changes
                one, other = (
                    torch.autograd.grad((logits_ * weights).sum(), leaves, materialize_grads=True)
                    for logits_ in (found[-1], expected)
                )
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert all((a != b).any() for a, b in itertools.combinations(found[-4:], 2))


@kinds
@given(
    texts=st.lists(st.lists(st.integers(1, V - 1), max_size=7), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    more=st.integers(0, 5),
)
@examples(15)
def test_any_documents(kind: int, texts: list[list[int]], seed: int, more: int) -> None:
    """And alone, or with padding, they come to the same."""
    reader = a_reader()
    network = filled(all_networks()[kind], seed, used=2)
    theta = weighed(network.layout, seed)
    found = logits(network, reader, token_rows(texts), theta)
    torch.testing.assert_close(found, slow(network, reader, texts, theta), rtol=1e-4, atol=1e-4)
    longest = max(1, *map(len, texts))
    padded = logits(network, reader, token_rows(texts, longest + more), theta)
    torch.testing.assert_close(padded, found, rtol=1e-5, atol=1e-5)
    alone = logits(network, reader, token_rows(texts[:1]), theta)
    torch.testing.assert_close(alone[0], found[0], rtol=1e-5, atol=1e-5)


@kinds
def test_a_digest_of_many_documents_is_that_of_each(kind: int) -> None:
    """They are gone through some at a time."""
    reader = a_reader()
    network = filled(all_networks()[kind], 5, used=1)
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, V, size=rng.integers(0, 6)).tolist() for _ in range(150)]
    x, theta = token_rows(texts), weighed(network.layout, 0)
    found = logits(network, reader, x, theta)
    for i in (0, 63, 64, 127, 128, 149):
        torch.testing.assert_close(found[i], logits(network, reader, x[i : i + 1], theta)[0])
    assert len(network.digest(reader, x[:0])) == 0


@kinds
def test_what_is_drawn_anew(kind: int) -> None:
    network = filled(all_networks()[kind], 9, used=2)
    torch.manual_seed(3)
    network.reset()
    first = {n: p.detach().clone() for n, p in network.named_parameters()}
    for name, value in first.items():
        drawn = name == "attention" or name.endswith("weight")
        assert bool(value.any()) == drawn, name
    network.reset()
    again = dict(network.named_parameters())
    assert all((first[n] != again[n]).any() for n in first if first[n].any())
