"""How many actors fit a cluster; what never fits is in refusals.yaml."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import nodes

from fedsim.cluster.connection import planned_actors
from fedsim.cluster.placement import Node, actors_on, plan_actors
from fedsim.errors import ClusterError
from fedsim.federation import EngineSettings

LAPTOP = [Node("laptop", cpus=16, gpus=0, memory=10e9)]
HEAD = Node.of({"NodeManagerHostname": "head", "Resources": {"memory": 8e9}})


@pytest.mark.parametrize(
    ("settings", "cluster", "known", "actors"),
    [
        ({"gpus_per_actor": 0.6}, nodes(2), {}, 2),  # no actor has parts of two cards
        ({}, [Node("laptop", cpus=1000, gpus=0, memory=3e9)], {}, 10),
        ({}, [HEAD, *nodes(0, cpus=2)], {}, 2),
        ({}, LAPTOP, {}, 16),
        ({}, LAPTOP, {"actor_bytes": 3e9}, 3),
        ({}, LAPTOP, {"most": 12}, 12),
        ({"actors": 14}, LAPTOP, {"most": 12}, 14),
    ],
)
def test_as_many_actors_as_fit_and_are_of_use(
    settings: dict[str, Any], cluster: list[Node], known: dict[str, Any], actors: int
) -> None:
    assert plan_actors(EngineSettings.model_validate(settings), cluster, **known) == actors


def test_what_actors_share_counts_once_a_node() -> None:
    """Frozen weights: as many actors fit as fit beside them."""
    two = [Node(name, cpus=16, gpus=0, memory=10e9) for name in "ab"]
    shared = [node.without(4e9) for node in two]
    assert plan_actors(EngineSettings(), shared, 3e9) == 4
    assert plan_actors(EngineSettings(), two, 3e9) == 6
    with pytest.raises(ClusterError, match=r"no node has enough memory for a client actor"):
        plan_actors(EngineSettings(), [node.without(11e9) for node in two])
    alone = EngineSettings(kind="local")
    with (
        pytest.raises(ClusterError, match=r"training takes about 1000000000\.0 GB of memory"),
        planned_actors(alone, 0.0, 1, print, node_bytes=1e18),
    ):
        pass


def test_a_node_without_cpus() -> None:
    assert (HEAD.name, HEAD.cpus, HEAD.gpus) == ("head", 0, 0)


def packed(cpus: int, gpus: int, cpus_per_actor: int, share: Fraction) -> int:
    """Place actors one by one on a node, as Ray does, until none fits."""
    free, placed = [Fraction(1)] * gpus, 0
    while cpus >= cpus_per_actor:
        if share > 1:
            cards = [k for k, left in enumerate(free) if left == 1][: int(share)]
            if len(cards) < share:
                break
        else:
            cards = [k for k, left in enumerate(free) if left >= share][:1]
            if share and not cards:
                break
        for k in cards:
            free[k] -= min(share, Fraction(1))
        cpus, placed = cpus - cpus_per_actor, placed + 1
    return placed


@given(
    sizes=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), min_size=1, max_size=4),
    cpus_per_actor=st.integers(1, 4),
    hundredths=st.integers(0, 100) | st.sampled_from([200, 300, 400]),
)
def test_the_plan_is_what_can_be_packed(
    sizes: list[tuple[int, int]], cpus_per_actor: int, hundredths: int
) -> None:
    settings = EngineSettings(cpus_per_actor=cpus_per_actor, gpus_per_actor=hundredths / 100)
    share = Fraction(hundredths, 100)
    cluster = [Node("node", cpus, gpus, 64e9) for cpus, gpus in sizes]
    fit = [packed(cpus, gpus, cpus_per_actor, share) for cpus, gpus in sizes]
    assert [actors_on(node, settings) for node in cluster] == fit
    if sum(fit) == 0:
        with pytest.raises(ClusterError, match="no node can hold"):
            plan_actors(settings, cluster)
        return
    assert plan_actors(settings, cluster) == sum(fit)
    asked = settings.model_copy(update={"actors": sum(fit)})
    assert plan_actors(asked, cluster) == sum(fit)
    with pytest.raises(ClusterError, match=f"only {sum(fit)} client actor"):
        plan_actors(asked.model_copy(update={"actors": sum(fit) + 1}), cluster)
