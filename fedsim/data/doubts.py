"""Warnings about doubtful data, a line each, as training goes on."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.support.words import in_short

APART = 1e3  # scales of which networks learn from the greater alone
FEWEST = 30  # rows in which different numbers may be an identifier
FEWEST_TOKENS = 1000  # in which most words are different only if they are no words
EXACT = 2**24  # whole numbers beyond are rounded in float32
_ID = re.compile(r"(^|[\W_])(id|uuid|index)s?($|[\W_])|[a-z]I[dD]$|^(ID|Id|Index)$")


def of_classes(
    classes: Sequence[str], y: NDArray[np.int64], test_y: NDArray[np.int64]
) -> Iterator[str]:
    """Doubts about the classes of training labels (N,) and test labels (M,)."""
    yield from of_names("the classes", [name for name in classes if len(name) > 1])  # or letters
    untaught = np.setdiff1d(test_y, y)
    if len(untaught):
        yield (
            f"{len(untaught)} of {len(classes)} classes occur in the test set only and cannot be "
            f"learnt: {in_short([repr(classes[c]) for c in untaught])}"
        )


def of_names(what: str, given: Iterable[str]) -> Iterator[str]:
    """Doubts about names, of classes say, that may be meant to be the same."""
    alike = defaultdict(list)
    for name in given:
        alike[" ".join(unicodedata.normalize("NFKC", name).casefold().split())].append(name)
    for names in alike.values():
        if len(names) > 1:
            yield (
                f"{what} {in_short([repr(name) for name in names])} differ only in case, spaces "
                "or the form of their characters; if they are one, correct the file"
            )


def of_inputs(x: NDArray[Any]) -> Iterator[str]:
    """Doubts about training inputs (N, ...)."""
    if len(x) > 1 and all(np.array_equal(row, x[0]) for row in x[1:]):
        yield f"the first {len(x):,} training inputs are all equal"


def of_words(x: NDArray[np.int32]) -> Iterator[str]:
    """Doubts about the token ids (N, L) of documents, which are 2 and more."""
    tokens = x[x > 1]
    different = len(np.unique(tokens))
    if len(tokens) >= FEWEST_TOKENS and different > len(tokens) / 2:
        yield (
            f"{different:,} of {len(tokens):,} words are different, so that most occur only "
            "once; is it the text, and are its words separated by spaces?"
        )


def of_identifiers(x: NDArray[np.float64], names: Sequence[str], count: int) -> Iterator[str]:
    """Doubts about features that number the `count` examples; x (n, F) has the file's units."""
    found = []
    for name, values in zip(names, x.T, strict=True):
        whole = np.rint(values)
        steps = np.diff(whole)
        rounding = max(0.05, np.ptp(values) / EXACT)  # of scaled numbers
        if len(x) < FEWEST or np.abs(values - whole).max() > rounding:
            continue
        known = np.unique(whole)
        share, step = len(known) / len(x), np.gcd.reduce(np.diff(known).astype(np.int64))
        different = share == 1 or (share > 0.5 and np.abs(whole).max() >= EXACT)
        ordered = (steps >= 0).all() or (steps <= 0).all()
        dense = np.ptp(whole) / max(step, 1) < 2 * count
        if different and (_ID.search(name) or ordered or dense):
            found.append(repr(name))
    if found:
        yield (
            f"{in_short(found)} may be an identifier, as every example may have another whole "
            "number; leave it out of the features"
        )


def of_scales(columns: Mapping[str, NDArray[Any]], has_scale: bool) -> Iterator[str]:
    """Doubts about the scales of features and a regression's target, (n,) values of each."""
    for size in (np.ptp, lambda values: np.abs(values).max()):
        sizes = {name: float(size(v)) for name, v in columns.items() if np.ptp(v) > 0}
        if not sizes:
            return
        least, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        # Networks are initialised for values of about 1.
        if max(sizes[most], 1) > APART * min(sizes[least], 1):
            advice = "set data.scale=standard" if has_scale else "scale by mean and deviation"
            yield (
                f"scales are far apart or far from 1 ({least!r}: {sizes[least]:.3g}, {most!r}: "
                f"{sizes[most]:.3g}), so that networks train badly or not at all; {advice}"
            )
            return
