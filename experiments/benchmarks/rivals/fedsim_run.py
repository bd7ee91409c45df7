"""fedsim, on either engine, with one client or several in a stack.

A round is timed where its record arrives, not by fedsim's own clock, so that everything that
happens between rounds counts.
"""

from __future__ import annotations

import tempfile
from typing import Any

from work import WORKS, Stopwatch, all_rounds, parser, report

import fedsim


def main() -> None:
    options = parser()
    options.add_argument("--engine", choices=["local", "ray"], required=True)
    options.add_argument("--stack", required=True, help="clients in a stack, or auto")
    arguments = options.parse_args()
    work, rounds = WORKS[arguments.work], all_rounds(arguments.rounds)
    stack = arguments.stack if arguments.stack == "auto" else int(arguments.stack)
    engine = {
        "kind": arguments.engine,
        "actors": arguments.processes,
        "gpus_per_actor": 1 if arguments.device == "cuda" else 0,
        "clients_per_step": stack,
    }
    content = work.experiment(work.clients, work.cohort, rounds, "fedavg", engine)
    experiment = fedsim.Experiment.from_dict(content)
    stopwatch = Stopwatch()

    def watch(event: Any) -> None:
        if isinstance(event, dict):
            stopwatch.lap()

    with tempfile.TemporaryDirectory() as out:
        run = fedsim.run(experiment, out, watch)
        # That the work was the work.
        assert set(run.clients["samples"]) == {work.samples}
        assert set(run.clients["steps"]) == {work.steps}
        assert set(run.rounds["clients"]) == {work.cohort}
        trained = (w for name, w in run.weights().items() if "running_" not in name)
        assert sum(w.numel() for w in trained) == work.parameters
    report(stopwatch.seconds())


if __name__ == "__main__":
    main()
