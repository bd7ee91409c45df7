"""pfl-research's simulation with PyTorch, in one process or in several.

Several are started as its guide says: the same script once for each, which find each other by the
variables PFL_WORKER_ADDRESSES and PFL_WORKER_RANK. Its users' data are tensors that lie on the
device from the start, which its guide calls the fastest; it does not shuffle them.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from work import (
    LEARNING_RATE,
    WORKS,
    Stopwatch,
    Work,
    all_rounds,
    parser,
    report,
)


def main() -> None:
    arguments = parser().parse_args()
    os.environ["PFL_PYTORCH_DEVICE"] = arguments.device
    if arguments.processes > 1 and "PFL_WORKER_RANK" not in os.environ:
        sys.exit(in_processes(arguments.processes))
    simulate(arguments)


def in_processes(count: int) -> int:
    """Run this script in several processes; the exit status of the first."""
    addresses = ",".join(f"localhost:{port}" for port in free_ports(count))
    workers = []
    for rank in range(count):
        found = {"PFL_WORKER_ADDRESSES": addresses, "PFL_WORKER_RANK": str(rank)}
        workers.append(subprocess.Popen([sys.executable, *sys.argv], env=os.environ | found))
    status = workers[0].wait()
    for worker in workers[1:]:
        if status:
            worker.terminate()
        worker.wait()
    return status


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def simulate(arguments: argparse.Namespace) -> None:
    # Importing it makes the processes look for each other.
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Network(nn.Module):
        """What its PyTorchModel asks of a network."""

        def __init__(self, work: Work) -> None:
            super().__init__()
            self.network = work.build()

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(self.network(x), y)

        @torch.no_grad()
        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
            return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}

    class Watch(TrainingProcessCallback):
        def after_central_iteration(
            self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            stopwatch.lap()
            return False, Metrics()

    torch.set_num_threads(1)
    np.random.seed(0)  # the processes must draw the same cohorts
    torch.manual_seed(0)
    work, rounds = WORKS[arguments.work], all_rounds(arguments.rounds)
    stopwatch = Stopwatch(arguments.device)
    data = FederatedDataset.from_slices(
        work.data(arguments.device), get_user_sampler("minimize_reuse", range(work.clients))
    )
    network = Network(work).to(arguments.device)
    model = PyTorchModel(
        model=network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,  # it evaluates in the first round, and then never
            train_cohort_size=work.cohort,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(
            training_data=data, val_data=data, postprocessors=[WeightByUser()]
        ),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=work.epochs,
            local_learning_rate=LEARNING_RATE,
            local_batch_size=work.batch,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Watch()],
        send_metrics_to_platform=False,
    )
    assert all(p.isfinite().all() for p in network.parameters())
    if os.environ.get("PFL_WORKER_RANK", "0") == "0":
        report(stopwatch.seconds())


if __name__ == "__main__":
    main()
