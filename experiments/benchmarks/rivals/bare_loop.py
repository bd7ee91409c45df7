"""The yardstick: federated averaging as a plain PyTorch loop, one client after another.

With several processes, as many such loops side by side, each with cohorts of its own, and the time
in which all of them together get through one cohort.
"""

from __future__ import annotations

import argparse
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
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


def loop(arguments: argparse.Namespace, together: Barrier, results: Any) -> None:
    torch.set_num_threads(1)
    work, device = WORKS[arguments.work], arguments.device
    data = work.data(device)
    network = work.build().to(device)
    weights = [p.detach().clone() for p in network.parameters()]
    stopwatch = Stopwatch(device)
    together.wait()
    for _ in range(all_rounds(arguments.rounds)):
        mean = [torch.zeros_like(w) for w in weights]
        for client in torch.randperm(len(data))[: work.cohort].tolist():
            train(work, network, weights, *data[client])
            with torch.no_grad():
                for total, parameter in zip(mean, network.parameters(), strict=True):
                    total.add_(parameter, alpha=1 / work.cohort)
        weights = mean
        stopwatch.lap()
    assert all(w.isfinite().all() for w in weights)
    results.put(stopwatch.seconds())


def train(
    work: Work,
    network: torch.nn.Module,
    weights: list[torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Local epochs from `weights`."""
    with torch.no_grad():
        for parameter, weight in zip(network.parameters(), weights, strict=True):
            parameter.copy_(weight)
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    for _ in range(work.epochs):
        order = torch.randperm(work.samples, device=x.device)
        for batch in order.split(work.batch):
            optimizer.zero_grad()
            cross_entropy(network(x[batch]), y[batch]).backward()
            optimizer.step()


def main() -> None:
    arguments = parser().parse_args()
    context, count = get_context("spawn"), arguments.processes
    together, results = context.Barrier(count), context.Queue()
    loops = [
        context.Process(target=loop, args=(arguments, together, results)) for _ in range(count)
    ]
    for process in loops:
        process.start()
    report([s / count for _ in loops for s in results.get()])
    for process in loops:
        process.join()


if __name__ == "__main__":
    main()
