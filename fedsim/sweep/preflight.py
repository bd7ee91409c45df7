"""Resources of a grid or search on a cluster, decided before anything starts.

Ray would wait forever, at best with a warning, for what can never be placed: a trial larger than
the cluster, an actor larger than any node. Deadlocks between trials that hold each other's
resources cannot happen, because a trial gets resources for itself and all its actors at once (a
placement group).
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.tune import PlacementGroupFactory

from fedsim.cluster.placement import (
    ACTOR_BYTES,
    Node,
    actors_on,
    describe_actors,
    describe_free,
    free_now,
    live_nodes,
    plan_actors,
)
from fedsim.errors import ClusterError
from fedsim.federation import EngineSettings

PATIENCE = 60.0  # seconds without news of any trial before pending trials are reported


@dataclass(frozen=True)
class Allocation:
    """The client actors of each trial, 0 if it does client work itself, and trials at one time."""

    actors: int
    concurrent: int


def allocate(
    settings: EngineSettings,
    nodes: Sequence[Node],
    here: Node,
    trials: int,
    concurrent: int | Literal["auto"] = "auto",
    actor_bytes: float = ACTOR_BYTES,
) -> Allocation:
    """How many client actors a trial gets, and how many trials run at once.

    With `engine.actors=auto`, as many trials as possible run at once and share the resources: many
    small trials finish sooner than a few large ones, with the same results. Drivers run on `here`,
    the node of this process, because it has their folders. `actor_bytes` is the memory of each
    client actor, or of each trial in one process.

    Raises:
        ClusterError: a trial, or the requested number at once, can never be placed.
    """
    most_wanted = trials if concurrent == "auto" else min(concurrent, trials)
    local = settings.kind == "local"
    if local and actors_on(here, settings, actor_bytes) == 0:
        raise ClusterError(
            f"engine.kind=local: a trial of {settings.cpus_per_actor} CPU(s), "
            f"{settings.gpus_per_actor:g} GPU(s) and {actor_bytes / 1e9:.1f} GB does not fit "
            f"this node ({here.describe()}); lower engine.cpus_per_actor or "
            "engine.gpus_per_actor, or use a smaller model"
        )
    # Raises if they cannot be placed.
    actors = 1 if local else plan_actors(settings, nodes, actor_bytes)
    fit = sum(actors_on(n, settings, actor_bytes) for n in ([here] if local else nodes))
    # Half of this node's memory is for drivers, half for client actors.
    drivers = fit if local else max(1, int(min(here.memory / ACTOR_BYTES / 2, trials)))
    if settings.actors == "auto" and not local:
        actors = max(1, fit // (min(trials, drivers) if concurrent == "auto" else most_wanted))
    most = min(fit // actors, drivers)
    if concurrent != "auto" and most_wanted > most:
        there = "; ".join(node.describe() for node in nodes)
        raise ClusterError(
            f"concurrent={most_wanted}: only {most} trial(s) of "
            f"{describe_actors(settings, actors)} fit at the same time ({there}); set concurrent "
            f"to {max(1, most)} or auto, or lower engine.actors or engine.cpus_per_actor"
        )
    return Allocation(0 if local else actors, min(most, most_wanted))


def placement(settings: EngineSettings, actors: int, pin: str) -> PlacementGroupFactory:
    """The placement group of a trial: a bundle for its driver and each of its client actors.

    A driver that trains on a GPU shares one with an own actor on the same node. `pin` is the
    resource that identifies this node.
    """
    gpus = {"GPU": settings.gpus_per_actor} if settings.gpus_per_actor else {}
    driver, each = {pin: 0.001}, {"CPU": settings.cpus_per_actor, **gpus}
    if not actors:
        return PlacementGroupFactory([{**driver, **each}])
    return PlacementGroupFactory([driver, *[each] * actors], strategy="PACK")


def cluster() -> tuple[list[Node], Node, str]:
    mine = ray.get_runtime_context().get_node_id()
    (resources,) = (node["Resources"] for node in ray.nodes() if node["NodeID"] == mine)
    pin = next(kind for kind in resources if re.match(r"node:(?!__)", kind))
    nodes = live_nodes()
    return list(nodes.values()), nodes[mine], pin


class Watchdog:
    """Reports pending trials, and why they wait, after a while without news of any trial."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._heard = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def heard(self) -> None:
        self._heard = time.monotonic()

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(max(0.0, self._heard + PATIENCE - time.monotonic())):
            if time.monotonic() - self._heard >= PATIENCE:
                if line := describe_pending(ray.util.placement_group_table().values()):
                    self._tell(line)
                self.heard()


def describe_pending(groups: Iterable[dict[str, Any]]) -> str | None:
    """A line about pending trials, by Ray's table of placement groups; None if none is pending."""
    groups = list(groups)
    pending = [g for g in groups if g["state"] in ("PENDING", "RESCHEDULING")]
    placed = sum(g["state"] == "CREATED" for g in groups)
    if not pending:
        return None  # a trial's own log reports problems within it
    wants = Counter[str]()
    for bundle in pending[0]["bundles"].values():
        wants.update({kind: n for kind, n in bundle.items() if not kind.startswith("node:")})
    words = " and ".join(f"{amount:g} {kind}(s)" for kind, amount in wants.items()) or "nothing"
    return (
        f"no news for {PATIENCE:.0f} s; {placed} trial(s) are placed, {len(pending)} wait(s) for "
        f"{words}; {describe_free(free_now())}"
    )
