"""Networks for documents with weights B ⊙ m + A, as trained by FedWeIT and FedSeIT.

B, m and A are flat vectors with the layout of `Layout`. `Rest` holds a task's own parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsim.models.text import Reader, TextFeatures, convolved, most

CUT_OFF = 0.87962566103423978  # standard deviation of a standard normal truncated at ±2
Read = tuple[Tensor, Tensor]  # documents, as returned by `Reader`


@dataclass(frozen=True)
class Layout:
    """The layout of decomposed layers in a flat vector: consecutive blocks of (rows, columns).

    A row has the weights of one output and one entry in the mask. The blocks are those of the
    convolutions, by width of their windows, followed by that of the dense layer, if any.
    """

    kernels: tuple[int, ...]  # widths of the windows
    filters: int  # F, of each width
    vectors: int  # D, the length of a word's vector
    dense: tuple[int, int] | None = None  # rows and columns of the dense layer

    @classmethod
    def of(cls, features: TextFeatures) -> Layout:
        """The layout of a `TextCnn`'s convolutions, without its dense layer."""
        convolutions = [c for c in features.convolutions if isinstance(c, nn.Conv1d)]
        kernels = tuple(c.kernel_size[0] for c in convolutions)
        return cls(kernels, convolutions[0].out_channels, convolutions[0].in_channels)

    @property
    def blocks(self) -> list[tuple[int, int]]:
        blocks = [(self.filters, self.vectors * width) for width in self.kernels]
        return [*blocks, self.dense] if self.dense else blocks

    @property
    def features(self) -> int:
        """Number of features of the convolutions."""
        return self.filters * len(self.kernels)

    @property
    def rows(self) -> int:
        """Number of entries of a mask."""
        return sum(rows for rows, _ in self.blocks)

    @property
    def size(self) -> int:
        """P, the length of the vector."""
        return sum(rows * columns for rows, columns in self.blocks)

    @property
    def convolutional(self) -> int:
        """Length of the convolutions' part of the vector, which comes first."""
        return replace(self, dense=None).size

    def split(self, vector: Tensor) -> list[Tensor]:
        """Views (..., rows, columns) of each block of vectors (..., P)."""
        ends = [0]
        for rows, columns in self.blocks:
            ends.append(ends[-1] + rows * columns)
        return [
            vector[..., start:end].view(*vector.shape[:-1], *block)
            for (start, end), block in zip(pairwise(ends), self.blocks, strict=True)
        ]

    def windows(self, vector: Tensor) -> list[Tensor]:
        """(F, D, width) filters of each width, from a vector (P,) or its convolutional part."""
        blocks = replace(self, dense=None).split(vector)
        return [
            block.view(self.filters, self.vectors, width)
            for block, width in zip(blocks, self.kernels, strict=True)
        ]

    def masked(self, vector: Tensor, mask: Tensor) -> Tensor:
        """(..., P) each row of a vector (P,) times its entry of masks (..., rows)."""
        sizes = [rows for rows, _ in self.blocks]
        parts = zip(self.split(vector), torch.split(mask, sizes, dim=-1), strict=True)
        return torch.cat([(block * m.unsqueeze(-1)).flatten(-2) for block, m in parts], dim=-1)

    def draw_mask(self) -> Tensor:
        """(rows,) initial values of a mask from torch's current random state.

        Normal with variance 1/rows in each block, truncated at two standard deviations (the factor
        corrects the variance for this).
        """
        mask = torch.empty(self.rows)
        for part in torch.split(mask, [rows for rows, _ in self.blocks]):
            _init_cut_off(part, 1 / math.sqrt(len(part)))
        return mask

    def draw(self) -> Tensor:
        """(P,) initial values (Glorot uniform) from torch's current random state."""
        parts = []
        widths = [*self.kernels, 1]
        for (rows, columns), width in zip(self.blocks, widths, strict=False):
            bound = math.sqrt(6 / (columns + rows * width))
            parts.append((2 * torch.rand(rows * columns) - 1) * bound)
        return torch.cat(parts)


def _init_cut_off(values: Tensor, std: float) -> None:
    """Normal, truncated at two standard deviations, with this standard deviation after that."""
    wider = std / CUT_OFF
    nn.init.trunc_normal_(values, std=wider, a=-2 * wider, b=2 * wider)


class Rest(nn.Module):
    """A task's own parameters besides m and A: biases, attention and a head for L `labels`.

    The weights of others' tasks, K `slots`, are added to its own: θ + Σ_j α_j·A_j (FedWeIT).
    `hidden`, the width of a layer before the head, is unused here.
    """

    foreign: Tensor  # (K, P) the A's, padded with zeros
    # Parameters that the released code does not train.
    untrained: tuple[str, ...] = ("head",)
    # Whether others' A's are added to the task's weights; if not, the released code has no use of
    # them.
    uses_others: ClassVar[bool] = True

    def __init__(
        self, layout: Layout, slots: int, labels: int, dropout: float, hidden: int
    ) -> None:
        super().__init__()
        self.layout = layout
        self.bias = nn.Parameter(torch.zeros(layout.features))
        self.attention = nn.Parameter(torch.zeros(slots, len(layout.blocks)))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(layout.features, labels)
        # Not saved, so not part of the weights.
        self.register_buffer("foreign", torch.zeros(slots, layout.size), persistent=False)

    def reset(self) -> None:
        """Draw initial weights from torch's current random state."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        _init_cut_off(self.attention, 1 / math.sqrt(len(self.attention)))

    @property
    def dense(self) -> list[Tensor]:
        """Weights that are regularised."""
        return []

    def digest(self, reader: Reader, x: Tensor) -> Tensor:
        """(n, ...) results computed once for documents (n, L), before training."""
        return torch.zeros(len(x), 0, device=x.device)

    def windows(self, theta: Tensor) -> list[Tensor]:
        """(F, D, width) filters of each width that find the task's features."""
        weights = self.layout.windows(theta)
        if not self.uses_others:
            return weights
        for a, alpha in zip(self.foreign, self.attention, strict=True):
            others = self.layout.windows(a)
            weights = [w + alpha[s] * others[s] for s, w in enumerate(weights)]
        return weights

    def own_features(self, read: Read, weights: list[Tensor]) -> Tensor:
        """(B, features) from convolutions with filters (F, D, width) of each width."""
        words, never = read
        biases = self.bias.view(len(weights), -1)
        pooled = [
            (most(convolved(words, w), never) + b).relu()
            for w, b in zip(weights, biases, strict=True)
        ]
        return torch.cat(pooled, dim=1)

    def forward(self, read: Read, theta: Tensor, digested: Tensor) -> Tensor:
        """Logits (B, L) of B documents, for θ = B ⊙ m + A (P,), and their results of `digest`."""
        return self.head(self.dropout(self.own_features(read, self.windows(theta))))


class ProjectedRest(Rest):
    """Separate convolutions with others' weights: h_j = max conv(x, α_j·A_j) + b_j (FedSeIT).

    For each width, W_f projects the h_j of all j to F numbers, with ReLU; W_c, with ReLU, maps
    these and the features of the task's own convolutions to `hidden` numbers, the inputs of the
    head. If the dense layer is decomposed (DLS), it is W_c + Σ_j α_j·(A_j of W_c), applied to
    ReLU(h_j) of all j, without W_f.

    Neither words nor A_j are trained, and conv(x, α·A) = α·conv(x, A), whose maximum is α·max or
    α·min, depending on the sign of α. The convolutions with A_j are therefore computed once per
    document.
    """

    uses_others: ClassVar[bool] = False

    def __init__(
        self, layout: Layout, slots: int, labels: int, dropout: float, hidden: int
    ) -> None:
        super().__init__(layout, slots, labels, dropout, hidden)
        F, widths = layout.filters, len(layout.kernels)
        self.foreign_bias = nn.Parameter(torch.zeros(slots, layout.features))
        self.head = nn.Linear(hidden, labels)
        if layout.dense:
            self.hidden_bias = nn.Parameter(torch.zeros(hidden))
        else:
            self.projections = nn.ModuleList(nn.Linear(slots * F, F) for _ in range(widths))
            self.combination = nn.Linear(2 * layout.features, hidden)
            self.untrained = ("head", *(f"projections.{s}" for s in range(1, widths)))

    @property
    def dense(self) -> list[Tensor]:
        if self.layout.dense:
            return []
        layers = [*self.projections, self.combination]
        return [layer.weight for layer in layers if isinstance(layer, nn.Linear)]

    @torch.no_grad()
    def digest(self, reader: Reader, x: Tensor) -> Tensor:
        """(n, 2, K, features) maximum and minimum of each convolution with an A_j."""
        K, features = len(self.foreign), self.layout.features
        found = torch.zeros(len(x), 2, K, features, device=x.device)
        used = [j for j in range(K) if self.foreign[j].any()]
        if not used or not len(x):
            return found
        for rows in torch.split(torch.arange(len(x), device=x.device), 64):
            words, never = reader(x[rows])
            for j in used:
                parts = [convolved(words, w) for w in self.layout.windows(self.foreign[j])]
                found[rows, 0, j] = torch.cat([most(part, never) for part in parts], dim=1)
                found[rows, 1, j] = torch.cat([(p - never).amin(dim=2) for p in parts], dim=1)
        return found

    def forward(self, read: Read, theta: Tensor, digested: Tensor) -> Tensor:
        own = self.own_features(read, self.windows(theta))
        largest, least = digested.unbind(dim=1)  # (B, K, features) each
        widths = len(self.layout.kernels)
        # (K, features)
        alpha = self.attention[:, :widths].repeat_interleave(self.layout.filters, dim=1)
        others = torch.where(alpha >= 0, alpha * largest, alpha * least) + self.foreign_bias
        if self.layout.dense:
            z = self.dropout(torch.cat([own, others.relu().flatten(1)], dim=1))
            of_others = self.layout.split(self.foreign)[-1]  # (K, hidden, columns)
            W_c = self.layout.split(theta)[-1] + torch.tensordot(
                self.attention[:, -1], of_others, dims=1
            )
            h = (z @ W_c.T + self.hidden_bias).relu()
        else:
            by_width = torch.split(others, self.layout.filters, dim=2)
            projected = [
                layer(part.flatten(1)).relu()
                for layer, part in zip(self.projections, by_width, strict=True)
            ]
            z = self.dropout(torch.cat([own, *projected], dim=1))
            h = self.combination(z).relu()
        return self.head(h)


class DenseRest(ProjectedRest):
    """FedSeIT's layers, with others' weights added to the task's own as in FedWeIT.

    With f the features from θ + Σ_j α_j·A_j, logits are head(ReLU(W_c·[f, 0] + b)): the zeros are
    the projected features, all h_j being 0.
    """

    uses_others: ClassVar[bool] = True

    def digest(self, reader: Reader, x: Tensor) -> Tensor:
        """(n, 2, K, features) zeros."""
        return torch.zeros(len(x), 2, *self.foreign_bias.shape, device=x.device)
