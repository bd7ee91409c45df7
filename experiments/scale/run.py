"""500 clients that keep states, carried out in three ways; in one of them a node is lost.

    python run.py [--out runs]

Carries out scaffold.yaml in process, on a Ray cluster of one node, and on one of three nodes, of
which one is killed in mid-run with what it holds: a client actor and its share of kept states. The
result hash must be the same each time. Prints tables, and writes results.csv beside this file.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import ray
from ray.cluster_utils import Cluster

import fedsim
from fedsim.cluster.ray_compat import actor_table, free_resources

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "benchmarks"))
from memory import own_megabytes  # noqa: E402

# A method whose clients keep something is a line: what it changes in scaffold.yaml.
METHODS = {
    "SCAFFOLD": [],
    "FedDyn": ["method={name: feddyn}"],
}
LOST_AFTER = 38  # the round after which a node is killed; the last checkpoint is that of round 35
STORE = 10**9  # bytes of each node's object store
Facts = dict[str, Any]


@dataclass
class Witness:
    """Sees a run from outside while it goes on: `progress` of `fedsim.run`.

    Attributes:
        strike: called once, when round LOST_AFTER has ended; returns facts.
        seen: all that the run told, and when.
        facts: what else was found out on the way.
    """

    strike: Callable[[], Facts] | None = None
    seen: list[tuple[float, Any]] = field(default_factory=list)
    facts: Facts = field(default_factory=dict)

    def __call__(self, event: Any) -> None:
        self.seen.append((time.monotonic(), event))
        if isinstance(event, str):
            print(f"  {event}", flush=True)
        elif event["round"] == LOST_AFTER and self.strike:
            strike, self.strike = self.strike, None
            self.facts |= {"struck": time.monotonic(), **strike()}
        elif event["round"] % 10 == 5:
            print(f"  round {event['round']}, accuracy {event['accuracy']:.4f}", flush=True)
            self.facts |= {f"{role}_mb": round(mb) for role, mb in own_megabytes().items()}

    def ended(self, t: int) -> float:
        """When round t ended for the first time."""
        return next(at for at, e in self.seen if not isinstance(e, str) and e["round"] == t)

    def told(self, words: str) -> float:
        """When a line with these words was told; NaN if none was."""
        times = (at for at, e in self.seen if isinstance(e, str) and words in e)
        return next(times, float("nan"))


def in_process(experiment: fedsim.Experiment, out: str) -> Facts:
    """The oracle: one process, one client after another."""
    engine = experiment.engine.model_copy(update={"kind": "local"})
    return carry_out(experiment.model_copy(update={"engine": engine}), out, Witness())


def on_one_node(experiment: fedsim.Experiment, out: str) -> Facts:
    """All client actors on one node, undisturbed."""
    with cluster([6]):
        return carry_out(experiment, out, Witness())


def on_three_nodes_of_which_one_is_lost(experiment: fedsim.Experiment, out: str) -> Facts:
    """A client actor on each of three nodes; one node is killed."""
    with cluster([2, 2, 2]) as nodes:
        witness = Witness(strike=lambda: kill_a_node(nodes))
        facts = carry_out(experiment, out, witness)
    struck = facts.pop("struck")
    usual = 1 / facts["rounds_per_second"]
    lines = [e for _, e in witness.seen if isinstance(e, str)]
    return facts | {
        "seconds_until_known": witness.told("falling back") - struck,
        "seconds_lost": witness.ended(LOST_AFTER + 1) - struck - usual,
        "rounds_again": sum(not isinstance(e, str) for _, e in witness.seen) - facts["rounds"],
        "actors_made_again": sum("a client actor was lost" in line for line in lines),
    }


WAYS = [in_process, on_one_node, on_three_nodes_of_which_one_is_lost]


@contextmanager
def cluster(cpus: Sequence[int]) -> Iterator[Cluster]:
    """A Ray cluster on this machine: a node for each number of CPUs, the first is the head."""
    with tempfile.TemporaryDirectory(prefix="ray-") as temporary:
        os.environ["RAY_TMPDIR"] = temporary  # so that nobody else takes it for theirs
        nodes = Cluster()
        try:
            for count in cpus:
                nodes.add_node(num_cpus=count, object_store_memory=STORE, dashboard_port=None)
            ray.init(nodes.address, log_to_driver=False, logging_level=logging.ERROR)
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()


def kill_a_node(nodes: Cluster) -> Facts:
    """Kill the node, other than the head, that holds most; say what it held."""
    held = {
        node: STORE - free_resources()[node.node_id]["object_store_memory"]
        for node in nodes.worker_nodes
    }
    victim = max(held, key=lambda node: held[node])
    there = [
        actor
        for actor in actor_table().values()
        if actor["State"] == "ALIVE" and actor["Address"]["NodeID"] == victim.node_id
    ]
    print(f"  killing a node with {len(there)} client actor(s), {held[victim] / 1e6:.0f} MB kept")
    nodes.remove_node(victim, allow_graceful=False)
    return {"actors_lost": len(there), "kept_mb_lost": held[victim] / 1e6}


def carry_out(experiment: fedsim.Experiment, out: str, witness: Witness) -> Facts:
    """Run the experiment, and gather what there is to say of it."""
    run = fedsim.run(experiment, out, witness)
    kept = list((run.path / "weights" / "clients").iterdir())
    return {
        "result_hash": run.result_hash,
        "accuracy": run.rounds["accuracy"].iloc[-1],
        "rounds": len(run.rounds),
        "rounds_per_second": (LOST_AFTER - 8) / (witness.ended(LOST_AFTER) - witness.ended(8)),
        "seconds": run.manifest["wall_seconds"],
        "kept_states": len(kept),
        "kept_mb": sum(file.stat().st_size for file in kept) / 1e6,
        "sent_mb": (run.rounds.bytes_up + run.rounds.bytes_down).sum() / 1e6,
        **witness.facts,
    }


def tabulate(results: pd.DataFrame, columns: Sequence[str]) -> str:
    """A Markdown table of some columns."""
    rows = [["method", "way", *columns], ["---"] * (2 + len(columns))]
    for row in results.to_dict("records"):
        values = [row["method"], row["way"].replace("_", " "), *(row[c] for c in columns)]
        rows.append([f"{v:.4g}" if isinstance(v, float) else str(v) for v in values])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs", help="where runs lie")
    out = parser.parse_args().out
    rows = []
    for method, overrides in METHODS.items():
        experiment = fedsim.Experiment.load(HERE / "scaffold.yaml", overrides)
        for way in WAYS:
            print(f"{method}, {way.__name__.replace('_', ' ')}", flush=True)
            rows.append({"method": method, "way": way.__name__, **way(experiment, out)})
    results = pd.DataFrame(rows)
    results.round(4).to_csv(HERE / "results.csv", index=False)
    undisturbed = ["result_hash", "accuracy", "rounds_per_second", "seconds", "sent_mb"]
    memory = ["launcher_mb", "driver_mb", "actors_mb", "kept_states", "kept_mb"]
    losses = ["actors_lost", "kept_mb_lost", "seconds_until_known", "rounds_again", "seconds_lost"]
    print(tabulate(results, undisturbed), tabulate(results, memory), sep="\n")
    print(tabulate(results[results.way == WAYS[-1].__name__], losses))
    if (results.groupby("method").result_hash.nunique() > 1).any():
        sys.exit("the result hashes differ")


if __name__ == "__main__":
    main()
