"""What methods that share images offer to explanations and audits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from fedsim.explain.explainer import SharedItems
from fedsim.federation import Federation


@runtime_checkable
class ShowsShared(Protocol):
    """A method that can say after a run what its clients shared."""

    def shared_items(self, fed: Federation, state: Any, clients: Sequence[int]) -> SharedItems:
        """What these clients shared, once more.

        Rows of explanations.parquet (`client`, `class`, `images`) say how much everyone shared.

        Raises:
            BadInput: nothing was shared.
        """


@runtime_checkable
class SharesImages(Protocol):
    """A method whose clients share images made from theirs, which an audit tries to invert."""

    def has_shared(self, state: Any) -> bool:
        """Whether the run has shared any."""

    def shared_pairs(
        self, fed: Federation, state: Any, client: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What a client holds and what it shared of it, (n, C, H, W) in pixels; (n,) labels."""

    def obscured(
        self, fed: Federation, state: Any, x: Tensor, y: Tensor, rng: np.random.Generator
    ) -> Tensor:
        """(n, C, H, W) what would be shared of any images, in pixels, as an attacker can make it.

        Args:
            x: (n, C, H, W) images as the network takes them.
            y: (n,) their labels.
        """
