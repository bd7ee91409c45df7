"""Flower's simulation on Ray: a CPU for each client, so that one a core trains at once.

Its settings are left as they come. Both its server and its simulation engine look for messages ten
times a second; there is no documented way to have them look more often.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from flower_client import app as client_app
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import WORKS, Stopwatch, all_rounds, parser, report


class Timed(FedAvg):
    """FedAvg that notes when a round's mean is there."""

    stopwatch = Stopwatch()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        mean = super().aggregate_train(server_round, replies)
        assert mean[0] is not None, "clients failed"
        self.stopwatch.lap()
        return mean


def main() -> None:
    arguments = parser().parse_args()
    work = WORKS[arguments.work]
    logging.getLogger("flwr").setLevel(logging.ERROR)
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = Timed(
            fraction_train=work.cohort / work.clients,
            min_train_nodes=work.cohort,
            min_available_nodes=work.clients,
            fraction_evaluate=0.0,
        )
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(work.build().state_dict()),
            train_config=ConfigRecord({"work": arguments.work}),
            num_rounds=all_rounds(arguments.rounds),
        )

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=work.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": arguments.processes},
        },
    )
    report(Timed.stopwatch.seconds())


if __name__ == "__main__":
    main()
