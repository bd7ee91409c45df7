"""Cohorts: drawing them, and dividing them into blocks of work."""

from __future__ import annotations

import heapq
import math

import numpy as np
from numpy.typing import NDArray

from fedsim.support.rng import keyed_rng

Cohort = NDArray[np.int64]  # client ids, ascending


def cohort_size(participation: float, num_clients: int) -> int:
    """How many clients a round samples: participation·K, rounded."""
    return round(participation * num_clients)


def draw_cohort(
    seed: int,
    participation: float,
    num_clients: int,
    t: int,
    independent: bool = False,
    among: Cohort | None = None,
    over_selection: float = 1.0,
) -> Cohort:
    """The clients that take part in round t, drawn without replacement.

    Args:
        independent: draw each client independently with that probability (Poisson sampling).
        among: the clients that can be drawn, ascending; by default all.
        over_selection: factor by which the cohort is enlarged, up to all clients.
    """
    if independent:
        drawn = keyed_rng(seed, "cohort", t).random(num_clients) < participation
        return np.flatnonzero(drawn) if among is None else among[drawn[among]]
    known = num_clients if among is None else len(among)
    size = min(known, round(cohort_size(participation, num_clients) * over_selection))
    if size == known:
        return np.arange(known) if among is None else among
    # By number where all can be drawn: an array of a million clients takes longer than the draw.
    from_these = num_clients if among is None else among
    return np.sort(keyed_rng(seed, "cohort", t).choice(from_these, size=size, replace=False))


def cut_blocks(
    cohort: Cohort, costs: NDArray[np.int64], clients_per_step: int = 1
) -> list[list[int]]:
    """Divide a cohort into blocks, the most expensive first.

    Blocks do not depend on the cluster, because the sum within a block is rounded. Without stacks,
    blocks have about equal cost: one client per block for cohorts of up to 16, then 16 blocks, and
    from 128 clients on blocks of about eight. With stacks, a block is a stack of clients with
    about the same cost, which minimises padding.

    Args:
        cohort: (n,) client ids.
        costs: (n,) each client's cost, in any unit.
        clients_per_step: V, clients per stack.

    Returns:
        Blocks of ascending ids.
    """
    order = np.lexsort((cohort, -costs))
    if clients_per_step > 1:
        stacks = np.array_split(cohort[order], max(1, math.ceil(len(cohort) / clients_per_step)))
        return [sorted(stack.tolist()) for stack in stacks if len(stack)]
    count = min(len(cohort), max(16, math.ceil(len(cohort) / 8)))
    blocks: list[list[int]] = [[] for _ in range(count)]
    load = [(0, b) for b in range(count)]  # a heap: the least loaded block first
    for i in order:
        total, b = heapq.heappop(load)
        blocks[b].append(int(cohort[i]))
        heapq.heappush(load, (total + int(costs[i]), b))
    loads = {b: total for total, b in load}
    return [sorted(blocks[b]) for b in sorted(loads, key=lambda b: (-loads[b], b))]
