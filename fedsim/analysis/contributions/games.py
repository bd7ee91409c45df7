"""Shapley values of a game."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

Coalition = frozenset[int]


def subsets(clients: Sequence[int]) -> Iterator[Coalition]:
    """All 2^n coalitions, the smallest first."""
    for size in range(len(clients) + 1):
        yield from map(frozenset, itertools.combinations(clients, size))


def shapley(clients: Sequence[int], worth: Callable[[Coalition], float]) -> dict[int, float]:
    """φ_k = Σ_{S ⊆ N∖k} |S|! (n − |S| − 1)! / n! · (v(S ∪ k) − v(S)), exactly rounded."""
    n, of = len(clients), {own: worth(own) for own in subsets(clients)}
    weight = [1 / (n * math.comb(n - 1, size)) for size in range(n)]
    return {
        k: math.fsum(weight[len(own)] * (of[own | {k}] - of[own]) for own in of if k not in own)
        for k in clients
    }
