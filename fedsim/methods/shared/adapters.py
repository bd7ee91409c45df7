"""What methods that average adapters have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.federation import Client, Federation, Mean, Update, client_function
from fedsim.methods.learns import Learns
from fedsim.methods.method import Method, State
from fedsim.training import FlatModel
from fedsim.training.adapters import Pair, pairs

Array = NDArray[np.float64]
Share = tuple[float, Array, Array]


class ExactAdapters(Method[State]):
    """Base class of methods whose server adds to the frozen weights what averaging loses.

    `State.weights` has the adapters, the head, and the sum of what was added to each layer. The
    server sends all of it; clients send their adapters, as their own, and their heads.
    """

    learns: ClassVar[Learns] = Learns(asks=("messages", "sizes"))
    adapts = "both, exactly"

    def sent_part(self, model: FlatModel) -> NDArray[np.bool_]:
        """(size,) all but the sums, which are the server's."""
        sent = np.ones(model.size, np.bool_)
        for pair in pairs(model):
            assert pair.added is not None
            sent[pair.added] = False
        return sent

    def init(self, fed: Federation) -> State:
        return State(weights=fed.initial_weights())

    def round(self, fed: Federation, state: State, t: int) -> State:
        mean = fed.mean(self.local_update, fed.sample(t), weights=state.weights)
        model, weights = fed.server.model, state.weights.copy()
        weights[~_factors(model) & self.sent_part(model)] = mean.rest
        self.merge(fed, weights, mean)
        return State(weights=weights)

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor) -> Update:
        """(client) Its adapters, and the rest of what it has trained."""
        trained = client.train(weights)
        own = torch.from_numpy(_factors(client.model)).to(client.device)
        rest = torch.from_numpy(self.sent_part(client.model)).to(client.device) & ~own
        return Update(rest=trained[rest], message=trained[own], weight=client.num_samples)

    @abstractmethod
    def merge(self, fed: Federation, weights: NDArray[np.float32], mean: Mean) -> None:
        """(server) Write the new adapters, and add to the frozen weights, in place; see `shares`.

        Args:
            weights: (size,) of the last round, with the new head.
        """


def shares(fed: Federation, mean: Mean) -> Iterator[tuple[Pair, list[Share]]]:
    """Each layer, and of each client its share p_k = n_k/n in the mean, A_k and B_k."""
    model, sizes = fed.server.model, fed.server.num_samples[[*mean.messages]]
    own, vectors = _factors(model), np.zeros((len(sizes), model.size))
    vectors[:, own] = np.stack([*mean.messages.values()])
    for pair in pairs(model):
        each = zip(sizes / sizes.sum(), vectors, strict=True)
        yield pair, [(p, *pair.factors(vector)) for p, vector in each]


def _factors(model: FlatModel) -> NDArray[np.bool_]:
    """(size,) which of the weights are of adapters."""
    found = np.zeros(model.size, np.bool_)
    for pair in pairs(model):
        assert pair.a is not None
        found[pair.a] = found[pair.b] = True
    return found
