"""A user's networks, parts of which read the weights of a layer without calling it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import linear


class Attending(nn.Module):
    """torch's own block of attention over the rows of an image."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(shape[2], 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x[:, 0])).mean(dim=1))


class Passing(nn.Module):
    """A layer whose weights its owner reads."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(shape[2], 8)
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(linear(x[:, 0], self.hidden.weight).mean(dim=1))
