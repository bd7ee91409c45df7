"""How many client actors fit a cluster, decided before any is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsim.errors import ClusterError
from fedsim.federation.engine import EngineSettings

ACTOR_BYTES = 300e6  # memory of an actor that has imported torch, as measured: about 270 MB


@dataclass(frozen=True)
class Node:
    """What a node of the cluster has in all."""

    name: str
    cpus: float
    gpus: float
    memory: float  # bytes that actors may take

    @classmethod
    def of(cls, ray_node: Mapping[str, object]) -> Node:
        """From an entry of `ray.nodes()`; a node may offer no CPU or GPU at all."""
        has = ray_node.get("Resources") or {}
        assert isinstance(has, Mapping)
        return cls(
            str(ray_node.get("NodeManagerHostname", "node")),
            float(has.get("CPU", 0)),
            float(has.get("GPU", 0)),
            float(has.get("memory", math.inf)),
        )

    def describe(self) -> str:
        return f"{self.name}: {self.cpus:g} CPUs, {self.gpus:g} GPUs, {self.memory / 1e9:.0f} GB"


def actors_on(node: Node, settings: EngineSettings) -> int:
    """How many of the experiment's actors fit a node.

    Ray cuts each GPU by itself: a fraction never spans two cards, and more than one GPU is a
    whole number of cards.
    """
    fit = min(math.floor(node.cpus / settings.cpus_per_actor), node.memory // ACTOR_BYTES)
    if 0 < settings.gpus_per_actor < 1:
        per_card = math.floor(1 / settings.gpus_per_actor + 1e-9)
        fit = min(fit, per_card * math.floor(node.gpus))
    elif settings.gpus_per_actor:
        fit = min(fit, math.floor(node.gpus / settings.gpus_per_actor))
    return int(fit)


def plan_actors(settings: EngineSettings, nodes: Sequence[Node]) -> int:
    """The number of client actors to make.

    Raises:
        ClusterError: not one, or not as many as asked for, can ever be placed.
    """
    each = f"{settings.cpus_per_actor} CPU(s)"
    if settings.gpus_per_actor:
        each += f" and {settings.gpus_per_actor:g} GPU(s)"
    there = "; ".join(node.describe() for node in nodes)
    if settings.gpus_per_actor > 1 and settings.gpus_per_actor % 1:
        raise ClusterError(
            f"engine.gpus_per_actor={settings.gpus_per_actor:g}: above 1 it must be a whole number"
        )
    fit = sum(actors_on(node, settings) for node in nodes)
    if fit == 0:
        raise ClusterError(
            f"no node can hold a client actor of {each} ({there}); "
            "lower engine.cpus_per_actor or engine.gpus_per_actor, or set engine.gpus_per_actor=0"
        )
    wanted = fit if settings.actors == "auto" else settings.actors
    if wanted > fit:
        raise ClusterError(
            f"engine.actors={wanted}: only {fit} client actor(s) of {each} fit ({there}); "
            f"set engine.actors={fit} or engine.actors=auto"
        )
    return wanted
