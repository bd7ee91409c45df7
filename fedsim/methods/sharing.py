"""What methods that share images offer to explanations and audits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

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
