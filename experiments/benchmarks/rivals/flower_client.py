"""The ClientApp of flower_run.py.

A module of its own, so that Ray's workers import it and its data and network stay with them;
what the main script defines would be pickled anew with every message.
"""

from __future__ import annotations

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from work import LEARNING_RATE, WORKS

torch.set_num_threads(1)
app = ClientApp()


@cache
def data(work: str) -> list[tuple[Tensor, Tensor]]:
    """Drawn once in a process."""
    return WORKS[work].data()


@cache
def network(work: str) -> nn.Module:
    """Built once in a process: drawing initial weights for each client would be a waste."""
    return WORKS[work].build()


@app.train()
def train(message: Message, context: Context) -> Message:
    name = str(message.content["config"]["work"])
    work, model = WORKS[name], network(name)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = data(name)[int(context.node_config["partition-id"])]
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    # By index and not with a DataLoader, which would take longer than the training.
    for _ in range(work.epochs):
        for batch in torch.randperm(work.samples).split(work.batch):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(y)}),
        }
    )
    return Message(content=content, reply_to=message)
