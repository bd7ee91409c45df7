"""fluke's FedAvg, which trains one client after another in one process.

Its clients keep their data as its fastest loader does; nothing is evaluated, and what it keeps of
clients stays in memory.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch

# It imports torchvision, whose registrations fail beside a CPU build of torch.
sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")

from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader  # noqa: E402
from fluke.utils import FederationObserver  # noqa: E402
from work import CLASSES, LEARNING_RATE, WORKS, Stopwatch, all_rounds, parser, report  # noqa: E402


class Watch(FederationObserver):
    def __init__(self) -> None:
        self.stopwatch = Stopwatch()

    def end_round(self, round: int) -> None:
        self.stopwatch.lap()


def main() -> None:
    arguments = parser().parse_args()
    work = WORKS[arguments.work]
    torch.set_num_threads(1)
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device(arguments.device)
    environment.set_inmemory(True)
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    loaders = [
        FastDataLoader(x, y, num_labels=CLASSES, batch_size=work.batch, shuffle=True)
        for x, y in work.data()
    ]
    data = DummyDataContainer(loaders, [None] * work.clients, None, CLASSES)
    client = {
        "batch_size": work.batch,
        "local_epochs": work.epochs,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": LEARNING_RATE},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
    }
    network = work.build()
    settings = DDict(client=client, server={"weighted": True}, model=network)
    federation = FedAVG(work.clients, DataSplitter(data, distribution="iid"), settings)
    watch = Watch()
    federation.set_callbacks([watch])
    # Not finalised: that would train no more, but send the model to everybody.
    federation.finalize = lambda: None
    federation.run(all_rounds(arguments.rounds), work.cohort / work.clients)
    assert all(p.isfinite().all() for p in federation.server.model.parameters())
    report(watch.stopwatch.seconds())


if __name__ == "__main__":
    main()
