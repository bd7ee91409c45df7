"""Placement: how many client actors fit a cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedsim.cluster.ray_compat import free_resources
from fedsim.cluster.settings import EngineSettings
from fedsim.errors import ClusterError

ACTOR_BYTES = 300e6  # measured: an actor that has imported torch takes about 270 MB


@dataclass(frozen=True)
class Node:
    name: str
    cpus: float
    gpus: float
    memory: float  # bytes for actors

    @classmethod
    def of(cls, ray_node: Mapping[str, object]) -> Node:
        """From an entry of `ray.nodes()`; a node may have no CPUs or GPUs."""
        has = ray_node.get("Resources") or {}
        assert isinstance(has, Mapping)
        return cls(
            str(ray_node.get("NodeManagerHostname", "node")),
            float(has.get("CPU", 0)),
            float(has.get("GPU", 0)),
            float(has.get("memory", math.inf)),
        )

    def without(self, memory: float) -> Node:
        """The node without some bytes of memory, which its actors share."""
        return replace(self, memory=max(1.0, self.memory - memory))

    def describe(self) -> str:
        return f"{self.name}: {self.cpus:g} CPUs, {self.gpus:g} GPUs, {self.memory / 1e9:.0f} GB"


def describe_actors(settings: EngineSettings, count: int = 1) -> str:
    words = f"{settings.cpus_per_actor * count} CPU(s)"
    if settings.gpus_per_actor:
        words += f" and {settings.gpus_per_actor * count:g} GPU(s)"
    return words


def actors_on(node: Node, settings: EngineSettings, actor_bytes: float = ACTOR_BYTES) -> int:
    """How many of the experiment's actors, of so much memory each, fit a node."""
    fit = min(math.floor(node.cpus / settings.cpus_per_actor), node.memory // actor_bytes)
    if 0 < settings.gpus_per_actor < 1:
        per_card = math.floor(1 / settings.gpus_per_actor + 1e-9)
        fit = min(fit, per_card * math.floor(node.gpus))
    elif settings.gpus_per_actor:
        fit = min(fit, math.floor(node.gpus / settings.gpus_per_actor))
    return int(fit)


def plan_actors(
    settings: EngineSettings,
    nodes: Sequence[Node],
    actor_bytes: float = ACTOR_BYTES,
    most: float = math.inf,
) -> int:
    """The number of client actors to make.

    Raises:
        ClusterError: no actor fits, or fewer than requested.
    """
    each = describe_actors(settings)
    if actor_bytes >= 1e9:
        each += f" and {actor_bytes / 1e9:.1f} GB"
    there = "; ".join(node.describe() for node in nodes)
    if settings.gpus_per_actor > 1 and settings.gpus_per_actor % 1:
        raise ClusterError(
            f"engine.gpus_per_actor={settings.gpus_per_actor:g}: must be a whole number if above 1"
        )
    fit = sum(actors_on(node, settings, actor_bytes) for node in nodes)
    if fit == 0 and any(actors_on(node, settings, 1.0) for node in nodes):
        raise ClusterError(
            f"no node has enough memory for a client actor of {each} ({there}); use a smaller "
            "model or a smaller engine.clients_per_step"
        )
    if fit == 0:
        raise ClusterError(
            f"no node can hold a client actor of {each} ({there}); lower engine.cpus_per_actor "
            "or engine.gpus_per_actor, or set engine.gpus_per_actor=0"
        )
    wanted = min(fit, int(min(most, fit))) if settings.actors == "auto" else settings.actors
    if wanted > fit:
        raise ClusterError(
            f"engine.actors={wanted}: only {fit} client actor(s) of {each} fit ({there}); set "
            f"engine.actors={fit} or engine.actors=auto"
        )
    return wanted


@dataclass(frozen=True)
class Free:
    node: Node
    cpus: float
    gpus: float

    def describe(self) -> str:
        words = f"{self.node.name}: {self.cpus:g} of {self.node.cpus:g} CPUs"
        if self.node.gpus:
            words += f" and {self.gpus:g} of {self.node.gpus:g} GPUs"
        return words + " free"


def live_nodes() -> dict[str, Node]:
    """The nodes of the cluster, by Ray's ids.

    Nodes of the same name, on one machine, get their ids added.
    """
    import ray

    nodes = {node["NodeID"]: Node.of(node) for node in ray.nodes() if node["Alive"]}
    names = [node.name for node in nodes.values()]
    return {
        id: replace(node, name=f"{node.name} ({id[:6]})") if names.count(node.name) > 1 else node
        for id, node in nodes.items()
    }


def node_is_lost() -> bool:
    import ray

    here = ray.get_runtime_context().get_node_id()
    return not any(node["Alive"] for node in ray.nodes() if node["NodeID"] == here)


def free_now() -> list[Free]:
    free = free_resources()
    return [
        Free(node, free.get(id, {}).get("CPU", 0.0), free.get(id, {}).get("GPU", 0.0))
        for id, node in live_nodes().items()
    ]


def describe_free(free: Sequence[Free]) -> str:
    return "; ".join(each.describe() for each in free)


def why_waiting(cpus: float, gpus: float, free: Sequence[Free]) -> str:
    there = f"({describe_free(free)})"

    def fits(cpus_there: float, gpus_there: float) -> bool:
        return cpus <= cpus_there + 1e-4 and gpus <= gpus_there + 1e-4  # Ray's precision is 1e-4

    if any(fits(each.cpus, each.gpus) for each in free):
        pieces = ", unless the free fractions belong to different GPUs" if gpus % 1 else ""
        return f"a node has these resources free now {there}, so it should be placed soon{pieces}"
    if any(fits(each.node.cpus, each.node.gpus) for each in free):
        return f"no node has these resources free now {there}; other jobs may be using them"
    return f"no node has these resources at all {there}; a node that had them may be lost"


def whereabouts(actor: Mapping[str, Any], nodes: Mapping[str, Node]) -> str:
    node = nodes.get(actor["Address"]["NodeID"])
    return f"process {actor['Pid']} on {node.name if node else 'a lost node'}"


def starting(actors: Sequence[Mapping[str, Any]], settings: EngineSettings) -> str:
    """Which client actors of Ray's table have not started, and why; empty if all have."""
    pending = [actor for actor in actors if actor["State"] != "ALIVE"]
    slow = [actor for actor in pending if actor["Pid"]]  # placed actors have a process
    parts = []
    if len(pending) > len(slow):
        each = describe_actors(settings)
        why = why_waiting(settings.cpus_per_actor, settings.gpus_per_actor, free_now())
        parts.append(
            f"{len(pending) - len(slow)} of {len(actors)} client actors of {each} are not placed "
            f"yet: {why}"
        )
    if slow:
        there = live_nodes()
        parts.append(
            f"{len(slow)} of {len(actors)} client actors are slow to start "
            f"({', '.join(whereabouts(actor, there) for actor in slow)})"
        )
    return "; ".join(parts)
