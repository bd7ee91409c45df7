"""Cohorts: drawing them, and dividing them into blocks of work."""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import field_validator, model_validator

from fedsim.config.registry import Config, check_named
from fedsim.data import ClientSplits
from fedsim.errors import ExperimentError
from fedsim.support.rng import keyed_rng

Cohort = NDArray[np.int64]  # client ids, ascending


class Without(Config):
    """Clients that never join the federation; `without: [3, 7]` is short for their `clients`.

    Everything else stays as it is with them: the other clients' data and names, all random
    streams, and cohorts, in which their places stay empty (unless `devices.over_selection` has
    others ready). So does what is fixed before the first round: scales of the data, backgrounds
    and the reference of explanations, and constants of a method that depend on the number of
    clients, such as 1/K in SCAFFOLD. A run without clients that never took part has the result of
    the run with them.

    Args:
        clients: their numbers.
        replace: fill their places in cohorts with others, drawn at random.
    """

    clients: tuple[int, ...]
    replace: bool = False

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {"clients": given} if isinstance(given, list | tuple) else given

    @field_validator("clients")
    @classmethod
    def _each_once(cls, clients: tuple[int, ...]) -> tuple[int, ...]:
        check_named(list(map(str, clients)), "names nobody; leave the section out")
        return tuple(sorted(clients))

    def leave_out(self, splits: ClientSplits) -> ClientSplits:
        """Raises ExperimentError if there is no such client, or nobody would be left."""
        for k in self.clients:
            if not 0 <= k < len(splits):
                raise ExperimentError(
                    f"without.clients: there is no client {k}; there are {len(splits)}, counted "
                    "from 0"
                )
        if len(self.clients) == len(splits):
            raise ExperimentError("without.clients: leaves out all clients; keep one")
        return splits.leaving_out(self.clients)


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
    without: Without | None = None,
) -> Cohort:
    """The clients that take part in round t, drawn without replacement.

    Args:
        independent: draw each client independently with that probability (Poisson sampling).
        among: the clients that can be drawn, ascending; by default all.
        over_selection: factor by which the cohort is enlarged, up to all clients.
        without: clients that are left out, once all are drawn.
    """
    drawn = _drawn(seed, participation, num_clients, t, independent, among, over_selection)
    if without is None:
        return drawn
    left = np.setdiff1d(drawn, without.clients, assume_unique=True)
    if not without.replace:
        return left
    others = np.setdiff1d(np.arange(num_clients) if among is None else among, without.clients)
    idle = np.setdiff1d(others, left, assume_unique=True)
    size = min(len(drawn) - len(left), len(idle))
    # A stream of its own, so that the others are drawn as they are with everybody.
    instead = keyed_rng(seed, "cohort/instead", t).choice(idle, size=size, replace=False)
    return np.sort(np.concatenate([left, instead]))


def _drawn(
    seed: int,
    participation: float,
    num_clients: int,
    t: int,
    independent: bool,
    among: Cohort | None,
    over_selection: float,
) -> Cohort:
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
