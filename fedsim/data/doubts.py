"""What is doubtful about data: each a line for a warning, as training goes on."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.words import in_short


def of_classes(
    classes: Sequence[str], y: NDArray[np.int64], test_y: NDArray[np.int64]
) -> Iterator[str]:
    """Doubts about the classes of training labels (N,) and test labels (M,)."""
    alike = defaultdict(list)
    for name in classes:
        if len(name) > 1:  # letters can be classes
            alike[" ".join(unicodedata.normalize("NFKC", name).casefold().split())].append(name)
    for names in alike.values():
        if len(names) > 1:
            yield (
                f"the classes {in_short([repr(name) for name in names])} differ only in case, "
                "spaces or the form of their characters; if they are one, correct the labels"
            )
    untaught = np.setdiff1d(test_y, y)
    if len(untaught):
        yield (
            f"{len(untaught)} of {len(classes)} classes occur in the test set only and cannot be "
            f"learnt: {in_short([repr(classes[c]) for c in untaught])}"
        )


def of_inputs(x: NDArray[Any]) -> Iterator[str]:
    """Doubts about training inputs (N, ...)."""
    if len(x) > 1 and all(np.array_equal(row, x[0]) for row in x[1:]):
        yield f"the first {len(x):,} training inputs are all equal"
