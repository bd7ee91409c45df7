"""A generator that chooses words and a predictor that reads them, against what they should be."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedsim.data import Dataset
from fedsim.models import models
from fedsim.models.rationale import PADDED, RationaleClassifier, RationaleModel, encoder_distance
from fedsim.objectives import Rationales
from fedsim.training import FlatModel, representation

D, V = 5, 9


def build(seed: int = 0, vectors: tuple[int, int] = (V, D), **fields: Any) -> RationaleClassifier:
    torch.manual_seed(seed)
    model = models.parse({"name": "rationale", "hidden": 4, **fields})
    assert isinstance(model, RationaleModel)
    table = torch.randn(vectors)
    table[0] = 0
    network = model.build_text(table, torch.arange(len(table)) > 1, 2)
    assert isinstance(network, RationaleClassifier)
    return network


DOCUMENTS = torch.tensor([[2, 3, 4, 5, 0, 0], [6, 7, 0, 0, 0, 0], [8, 2, 2, 3, 4, 5]]).int()
LABELS = torch.tensor([0, 1, 1])


def test_sizes_are_those_of_the_paper() -> None:
    """Of 100 components a word: RNP 244,004 parameters, FR 122,404; vectors are none of them."""
    for shared, size in ((False, 244_004), (True, 122_404)):
        network = build(vectors=(V, 100), hidden=100, shared=shared)
        assert FlatModel(network, torch.device("cpu")).size == size


@pytest.mark.parametrize("shared", [False, True])
@torch.no_grad()
def test_chooses_and_reads_as_written_out(shared: bool) -> None:
    network = build(shared=shared).eval()
    features = network.features
    z = features.select(DOCUMENTS)
    logits = network(DOCUMENTS)
    for x, chosen, found in zip(DOCUMENTS, z, logits, strict=True):
        words = features.reader.vectors[x]
        marks = features.chooser(features.generator.norm(features.generator.gru(words)[0]))
        assert torch.equal(chosen, (marks[:, 1] > marks[:, 0]).float())
        heard, _ = features.predictor.gru(words * chosen[:, None])
        read = features.predictor.norm(heard)
        read[x == 0] = PADDED
        torch.testing.assert_close(network.head(read.max(dim=0).values), found)


def test_losses_are_as_written_out() -> None:
    network = build(dropout=0.0, share=0.3, sparsity=2.0, continuity=3.0, weight=0.7)
    torch.manual_seed(1)
    losses, read, logits = Rationales().forward(network, DOCUMENTS, LABELS)
    torch.manual_seed(1)
    z = network.features.select(DOCUMENTS)
    assert set(z.detach().unique().tolist()) <= {0.0, 1.0}
    chosen, words, change = 0.0, 0, []
    for x, marks in zip(DOCUMENTS.tolist(), z.tolist(), strict=True):
        chosen += sum(marks)  # padding that is chosen counts
        words += sum(word != 0 for word in x)
        change += [abs(b - a) for a, b in pairwise(marks)]
    penalty = 2.0 * abs(chosen / words - 0.3) + 3.0 * sum(change) / len(change)
    plain = cross_entropy(network.head(read), LABELS, reduction="none")
    torch.testing.assert_close(losses, 0.7 * plain + penalty)
    torch.testing.assert_close(logits, network.head(read))
    torch.testing.assert_close(read, network.features.encode(DOCUMENTS, z))


def test_training_minimises_the_networks_own_losses() -> None:
    network = build(dropout=0.0)
    torch.manual_seed(2)
    y = np.zeros(3, dtype=np.int64)
    data = Dataset(DOCUMENTS.numpy(), y, DOCUMENTS.numpy(), y, ("a", "b"))
    found = RationaleModel().objective(data).loss(network, DOCUMENTS, LABELS, {})
    torch.manual_seed(2)
    torch.testing.assert_close(found, Rationales().forward(network, DOCUMENTS, LABELS).losses)


def test_weights_stay_in_the_vector_where_cudnn_would_copy_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def copied(self: nn.RNNBase) -> None:
        for weight in self._flat_weights:
            weight.data = weight.data.clone()  # type: ignore[union-attr]

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", copied)
    model = FlatModel(build(), torch.device("cpu"))
    model.module(DOCUMENTS)
    representation(model.module, model.vector.clone(), DOCUMENTS)
    model.module(DOCUMENTS)
    model.load(torch.zeros_like(model.vector))
    assert not any(parameter.any() for parameter in model.module.parameters())


def test_gradients_go_straight_through_the_choice() -> None:
    """The gradient of a drawn z is that of its probability under the noise that was drawn."""
    network = build(dropout=0.0)
    torch.manual_seed(3)
    z = network.features.select(DOCUMENTS)
    (found,) = torch.autograd.grad(z.sum(), network.features.chooser.bias)
    torch.manual_seed(3)
    features = network.features
    logits = features.chooser(features.generator(features.words(DOCUMENTS)))
    noise = -torch.empty_like(logits).exponential_().log()
    soft = (logits + noise).softmax(dim=-1)[..., 1]
    assert torch.equal(z, (soft > 0.5).float())
    (expected,) = torch.autograd.grad(soft.sum(), features.chooser.bias)
    torch.testing.assert_close(found, expected)
    torch.manual_seed(3)
    losses = Rationales().forward(network, DOCUMENTS, LABELS).losses
    gradients = torch.autograd.grad(losses.mean(), list(network.parameters()))
    assert all(g.abs().sum() > 0 for g in gradients)


def test_evaluation_draws_nothing_unless_asked_to() -> None:
    network = build().eval()
    assert torch.equal(network(DOCUMENTS), network(DOCUMENTS))
    torch.manual_seed(0)
    sampled, training = (
        build(evaluate="sampled").eval(),
        build(evaluate="budget", dropout=0.0).train(),
    )
    for drawing in (sampled, training):
        assert not all(torch.equal(drawing(DOCUMENTS), drawing(DOCUMENTS)) for _ in range(5))


@pytest.mark.parametrize(
    ("share", "counts"), [(0.5, [2, 1, 3]), (0.25, [1, 1, 2]), (1, [4, 2, 6])]
)
def test_a_budget_of_words_is_kept(share: float, counts: list[int]) -> None:
    """The ⌈α·length⌉ likeliest of each document, never padding."""
    network = build(evaluate="budget", share=share).eval()
    chosen = network.features.select(DOCUMENTS)
    assert chosen.sum(dim=1).tolist() == counts
    features = network.features
    logits = features.chooser(features.generator(features.words(DOCUMENTS)))
    for x, z, own, count in zip(DOCUMENTS, chosen, logits, counts, strict=True):
        words = np.flatnonzero(x.numpy())
        score = (own[:, 1] - own[:, 0]).detach().numpy()[words]
        assert set(np.flatnonzero(z.numpy())) == set(words[np.argsort(-score)[:count]])
    assert torch.equal(features.select(torch.zeros(1, 3).int()), torch.zeros(1, 3))


def test_a_whole_share_of_words_is_not_rounded_up() -> None:
    """In float32, 0.15·20 is above 3."""
    network = build(evaluate="budget", share=0.15).eval()
    x = torch.randint(1, V, (4, 100)).int()
    for length, count in ((20, 3), (40, 6), (60, 9), (100, 15), (21, 4)):
        chosen = network.features.select(x[:, :length])
        assert chosen.sum(dim=1).tolist() == [count] * 4


def test_documents_without_words_and_of_one() -> None:
    network = build()
    x = torch.tensor([[0, 0], [2, 0], [1, 1]]).int()  # the last of unknown words
    losses = Rationales().forward(network, x, LABELS).losses
    assert losses.isfinite().all()
    assert losses.abs().max() < 100
    alone = Rationales().forward(network, torch.zeros(1, 1).int(), LABELS[:1]).losses
    assert alone.isfinite().all()


def test_distances_of_encoders() -> None:
    g = [torch.tensor([[3.0, 4.0]]), torch.tensor([1.0])]
    p = [torch.tensor([[0.0, 0.0]]), torch.tensor([3.0])]
    found = {k: float(encoder_distance(g, p, k)) for k in ("frobenius", "l2", "l1", "cos")}
    cosine = 3 / (26**0.5 * 3)
    expected = {"frobenius": 5 + 2, "l2": 25 + 4, "l1": 7 + 2, "cos": 1 - cosine}
    assert found == pytest.approx(expected, abs=1e-5)
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    for kind in expected:  # of equal encoders
        distance = encoder_distance([w], [w.detach().clone()], kind)
        assert float(distance.detach()) == pytest.approx(0, abs=2e-6)
        (gradient,) = torch.autograd.grad(distance, w)
        assert gradient.isfinite().all()
