"""Memory over 1,000 rounds: python rounds.py

SCAFFOLD, whose clients keep state, on the digits with 20 clients, all of them every round. Prints
the memory of the launcher, the driver and the client actors every 100 rounds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from memory import own_megabytes

import fedsim

ROUNDS = 1_000


def main() -> None:
    experiment = fedsim.Experiment.load(
        Path(__file__).parents[1] / "quickstart.yaml",
        ["method.name=scaffold", "model.name=mlp", f"train.rounds={ROUNDS}", "evaluate.every=10"],
    )
    print("| round | launcher MB | driver MB | client actors MB | Ray's own MB |")
    print("| --- " * 5 + "|")

    def watch(event: Any) -> None:
        if isinstance(event, dict) and (event["round"] % 100 == 0 or event["round"] == 10):
            used = own_megabytes()
            print(
                f"| {event['round']} | {used['launcher']:.0f} | {used['driver']:.0f} | "
                f"{used['actors']:.0f} | {used['ray']:.0f} |",
                flush=True,
            )

    with tempfile.TemporaryDirectory() as out:
        fedsim.run(experiment, out, watch)


if __name__ == "__main__":
    main()
