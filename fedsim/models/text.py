"""Networks for documents."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import conv1d, embedding_bag, pad

from fedsim.models.model import Classifier, TextModel, models

Width = Annotated[int, Field(ge=1)]


class Reader(nn.Module):
    """Words to vectors, and windows of words to features. Vectors are not trained.

    A document of n words has n windows of each width, the last ones padded with zeros; an empty
    document has one window of zeros. Results therefore do not depend on padding, that is on the
    other documents of a batch. Vectors are (V, D); `known` (V,) are those with a meaning.
    """

    vectors: Tensor
    known: Tensor

    def __init__(self, vectors: Tensor, known: Tensor) -> None:
        super().__init__()
        # Not saved, so not part of the weights.
        self.register_buffer("vectors", vectors, persistent=False)
        self.register_buffer("known", known, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Word vectors and windows of documents (B, L), B ≥ 1.

        Returns:
            Vectors (B, D, n) of their words, n the length of the longest document; and (B, 1, n) 0
            for existing windows, −∞ for others.
        """
        lengths = (x != 0).sum(dim=1).clamp(min=1)
        n = int(lengths.max())
        absent = torch.arange(n, device=x.device) >= lengths[:, None]
        never = torch.zeros(absent.shape, device=x.device).masked_fill_(absent, -math.inf)
        return self.vectors[x[:, :n]].transpose(1, 2), never[:, None]

    def document_vectors(self, x: Tensor) -> Tensor:
        """(B, D) the mean vector of the known words of documents; zero if there is none."""
        known = self.known[x].to(self.vectors.dtype)
        total = embedding_bag(x, self.vectors, mode="sum", per_sample_weights=known)
        return total / known.sum(dim=1, keepdim=True).clamp(min=1)


def convolved(words: Tensor, weight: Tensor) -> Tensor:
    """(B, F, n) the outputs of filters (F, D, width) at windows of words (B, D, n)."""
    return conv1d(pad(words, (0, weight.shape[2] - 1)), weight)


def most(found: Tensor, never: Tensor) -> Tensor:
    """(B, F) the maximum of (B, F, n) over existing windows; see `Reader`."""
    return (found + never).amax(dim=2)


class TextFeatures(nn.Module):
    """Convolutions over words, each with ReLU and its maximum over the document."""

    def __init__(
        self, reader: Reader, kernels: tuple[int, ...], filters: int, hidden: int, dropout: float
    ) -> None:
        super().__init__()
        self.reader = reader
        D = reader.vectors.shape[1]
        self.convolutions = nn.ModuleList(nn.Conv1d(D, filters, width) for width in kernels)
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(filters * len(kernels), hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(B, hidden) features of documents (B, L)."""
        words, never = self.reader(x)
        pooled = []
        for convolution in self.convolutions:
            assert isinstance(convolution, nn.Conv1d)
            assert convolution.bias is not None
            found = most(convolved(words, convolution.weight), never)
            pooled.append((found + convolution.bias).relu())
        return self.dense(self.dropout(torch.cat(pooled, dim=1))).relu()


@models.register
class TextCnn(TextModel):
    """A convolutional network for sentences, as in FedSeIT: windows of words, then a dense layer.

    Args:
        kernels: widths of the windows, in words.
        filters: number of filters for each width.
        hidden: width of the layer before the last one.
        dropout: dropout of the windows' features in training.
    """

    name: str = "text_cnn"
    kernels: tuple[Width, ...] = Field((3, 4, 5), min_length=1)
    filters: Width = 128
    hidden: Width = 384
    dropout: float = Field(0.3, ge=0, lt=1)

    def build_text(self, vectors: Tensor, known: Tensor, outputs: int) -> nn.Module:
        reader = Reader(vectors, known)
        features = TextFeatures(reader, self.kernels, self.filters, self.hidden, self.dropout)
        return Classifier(features, nn.Linear(self.hidden, outputs))
