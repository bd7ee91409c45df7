"""Small pre-norm transformers: `vit` for images, `transformer` for documents.

Dosovitskiy et al., An Image is Worth 16x16 Words (ICLR 2021); Vaswani et al., Attention Is All You
Need (NeurIPS 2017), with layer norm before each sublayer (Xiong et al., ICML 2020). Both read a
class token, whose last state is the representation. Positions are fixed, as sines and cosines.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedsim.config.registry import located, unfit
from fedsim.errors import ExperimentError
from fedsim.models.masked_autoencoder import patch_grid, patch_positions, patchify, position_codes
from fedsim.models.model import Classifier, Model, TextModel, image_shape, models

Width = Annotated[int, Field(ge=1)]


class SelfAttention(nn.Module):
    """Multi-head self-attention of tokens (B, n, D), of which some (B, n) are absent: padding."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        # Queries, keys, values, each by head. A bias of keys would change no probability, and its
        # gradient be rounding alone, which Adam takes for a direction.
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.projection = nn.Linear(dim, dim)

    def forward(self, x: Tensor, absent: Tensor | None) -> Tensor:
        qkv = self.qkv(x).unflatten(2, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, n, D/heads) each
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if absent is not None:
            scores = scores.masked_fill(absent[:, None, None], -math.inf)
        attended = scores.softmax(dim=-1) @ v
        return self.projection(attended.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Self-attention, then an MLP, each of the normalised tokens and added to them."""

    def __init__(self, dim: int, heads: int, mlp_ratio: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, heads)
        self.dropout = nn.Dropout(dropout)
        hidden = mlp_ratio * dim
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, absent: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), absent))
        return x + self.mlp(self.norm2(x))


class Patches(nn.Module):
    """Images (B, C, H, W) to tokens (B, N, D) of their patches; none is padding."""

    positions: Tensor

    def __init__(self, shape: tuple[int, ...], patch: int, dim: int) -> None:
        super().__init__()
        C, rows, columns = patch_grid(shape, patch)
        self.patch = patch
        self.embedding = nn.Linear(patch**2 * C, dim)
        positions = patch_positions(rows, columns, dim)
        self.register_buffer("positions", positions, persistent=False)  # no part of the weights

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.embedding(patchify(x, self.patch)) + self.positions, None


class Words(nn.Module):
    """Documents (B, L) to tokens (B, n, D), and (B, n) which are padding.

    n is the length of the longest document; L in training if the tokens have dropout, whose draws
    would otherwise depend on the other documents of a batch.
    """

    def __init__(self, embedding: nn.Module, dim: int, dropout: float) -> None:
        super().__init__()
        self.embedding, self.dim, self.dropout = embedding, dim, dropout

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not (self.training and self.dropout):
            x = x[:, : longest(x)]
        words = self.embedding(x)
        return words + position_codes(x.shape[1], self.dim, x.device).to(words), x == 0


def longest(x: Tensor) -> int:
    """The length to which padded documents (B, L) can be cut, at least 1."""
    try:
        return max(1, int((x != 0).sum(dim=1).max()))
    except RuntimeError:  # under vmap, where values cannot decide on a shape
        return x.shape[1]


class WordVectors(nn.Module):
    """The data's vectors of words, which are not trained, projected to D entries."""

    vectors: Tensor

    def __init__(self, vectors: Tensor, dim: int) -> None:
        super().__init__()
        self.register_buffer("vectors", vectors, persistent=False)  # no part of the weights
        self.projection = nn.Linear(vectors.shape[1], dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.vectors[x])


class Encoder(nn.Module):
    """Inputs to the last state (B, D) of a class token that attends to all their tokens."""

    def __init__(
        self, tokens: nn.Module, dim: int, depth: int, heads: int, mlp_ratio: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.class_token = nn.Parameter(torch.randn(dim) * 0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            TransformerBlock(dim, heads, mlp_ratio, dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        tokens, absent = self.tokens(x)
        h = torch.cat([self.class_token.expand(len(tokens), 1, -1), tokens], dim=1)
        if absent is not None:  # so that an empty document has a token, too
            absent = torch.cat([torch.zeros_like(absent[:, :1]), absent], dim=1)
        h = self.dropout(h)
        for block in self.blocks:
            h = block(h, absent)
        return self.norm(h[:, 0])


class _Sizes(Model):
    """The sizes of a transformer.

    Args:
        dim: width of the tokens, a multiple of 4 and of `heads`.
        depth: number of blocks.
        heads: heads of each block's attention.
        mlp_ratio: width of each block's MLP, relative to `dim`.
        dropout: dropout of the tokens and of what each block adds to them, in training.
    """

    dim: Width = 64
    depth: Width = 4
    heads: Width = 4
    mlp_ratio: Width = 2
    dropout: float = Field(0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _divides_among_heads(self) -> _Sizes:
        if self.dim % self.heads or self.dim % 4:
            problem = unfit(
                f"must be a multiple of heads={self.heads}, and of 4 for codes of positions"
            )
            raise located(type(self).__name__, "dim", problem, self.dim)
        return self

    def _classifier(self, tokens: nn.Module, outputs: int) -> Classifier:
        sizes = self.dim, self.depth, self.heads, self.mlp_ratio, self.dropout
        return Classifier(Encoder(tokens, *sizes), nn.Linear(self.dim, outputs))


@models.register
class Vit(_Sizes):
    """A small vision transformer: patches of an image and a class token.

    Args:
        patch: side of a patch in pixels, which must divide the image's.
    """

    name: str = "vit"
    patch: Width = 4

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        shape = image_shape(self.name, shape, smallest=1)
        try:
            patches = Patches(shape, self.patch, self.dim)
        except ExperimentError as error:
            raise ExperimentError(f"model.{error}") from None
        return self._classifier(patches, outputs)


@models.register
class Transformer(_Sizes, TextModel):
    """A small transformer encoder of documents: their words or tokens, and a class token.

    Padding is not attended to, so results do not depend on the other documents of a batch.

    Args:
        embeddings: `learned`, a vector of each token of the vocabulary, trained with the rest; or
            the data's own `vectors` (`data.vectors`), projected and not trained, so that a model
            has no weights for each word.
    """

    name: str = "transformer"
    embeddings: Literal["learned", "vectors"] = "learned"

    @property
    def reads_vectors(self) -> bool:
        return self.embeddings == "vectors"

    def build_text(self, vectors: Tensor, known: Tensor, outputs: int) -> nn.Module:
        embedding = (
            WordVectors(vectors, self.dim)
            if self.embeddings == "vectors"
            else nn.Embedding(len(vectors), self.dim, padding_idx=0)
        )
        return self._classifier(Words(embedding, self.dim, self.dropout), outputs)
