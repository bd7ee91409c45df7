"""Client-level central differential privacy: the server adds noise to aggregates.

McMahan et al., Learning Differentially Private Recurrent Language Models (ICLR 2018), Algorithm 1
with the estimator of a fixed denominator: a round's cohort is drawn by Poisson sampling, each
client with probability q; what a client changed, Δ_k, is clipped to the norm S; and the mean is
(Σ_k Δ_k + N(0, (zS)²)) / (qK).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedsim.config.registry import Config
from fedsim.errors import ExperimentError
from fedsim.support.extras import require
from fedsim.training import Train

# (q, r): r sums over the same cohort with sampling rate q, in one round.
Release = tuple[float, int]


class Privacy(Config):
    """Differential privacy by clipping and noise, of clients or of single examples.

    `level: client`: the server clips each client's update and adds noise to the sum. An observer
    of all resulting models cannot tell whether a client took part at all, up to (ε, δ); ε is the
    column `epsilon` of the rounds. The server is trusted. All clients have the same
    weight, whatever their number of samples, because a client's weight must not depend on its
    data.

    This is a simulation: noise and cohorts follow from the experiment's seed, so anyone who knows
    the seed can remove the noise. The guarantee covers the models and their scores on the central
    test set. The other records of a run are taken from the clients unchanged (losses, number of
    participants, bytes, explanations of their models) and are not covered.

    `level: example`: clients train by DP-SGD, with `train.batch_size` as the expected size of
    batches whose examples are drawn independently. Whoever sees all that a client trained cannot
    tell whether one example was among its data. `epsilon` in clients.parquet is that of the
    client's examples over all rounds, in rounds.parquet the largest of all clients. What methods
    send besides trained weights (counts of samples or labels, ...) is not covered.

    Args:
        clip: S, largest L2 norm of one client's update, of all vectors together that it sends for
            one mean; or of one example's gradient.
        noise_multiplier: z, standard deviation of the noise on the sum, in units of S. With 0,
            updates or gradients are only clipped and ε is unbounded.
        delta: δ.
        level: whose data is protected: a whole `client`, or each single `example` of a client.

    Source:
        McMahan et al. (ICLR 2018) for clients; Abadi et al. (CCS 2016) for examples.
    """

    level: Literal["client", "example"] = "client"
    clip: float = Field(gt=0)
    noise_multiplier: float = Field(ge=0)
    delta: float = Field(1e-5, gt=0, lt=1)

    @property
    def hides(self) -> frozenset[str]:
        """What of clients the guarantee does not let a method ask for."""
        everything = frozenset({"messages", "sizes", "data", "weights"})
        return everything if self.level == "client" else frozenset()

    def check_train(self, train: Train) -> None:
        """Refuse settings of local training that DP-SGD (`level: example`) does not have."""
        defaults = Train()
        for key in ("sampler", "accumulate", "precision"):
            if self.level == "example" and getattr(train, key) != getattr(defaults, key):
                raise ExperimentError(
                    f"privacy.level=example: train.{key} has no effect on DP-SGD; leave it out"
                )

    def check(self) -> None:
        """Raise NotInstalled if dp-accounting, which computes ε, is missing."""
        if self.noise_multiplier:
            require("dp_accounting", "privacy: the privacy budget ε")

    def epsilon(self, releases: Mapping[Release, int]) -> float:
        """ε of all releases, for neighbouring data sets that differ in one client.

        Args:
            releases: number of rounds with each release.

        Source:
            Rényi accounting of the Poisson-subsampled Gaussian mechanism, Mironov et al. (2019).
        """
        if not releases:
            return 0.0
        if self.noise_multiplier == 0:
            return math.inf
        self.check()
        from dp_accounting.rdp import rdp_privacy_accountant as rdp  # slow to import

        # It warns of orders that it leaves out; ε is a bound without them, too.
        logging.getLogger("absl").setLevel(logging.ERROR)

        def of_order(order: float) -> float:
            # r sums of one cohort are one sum of vectors √r times as long.
            spent = sum(
                rounds * _divergence(q, self.noise_multiplier / math.sqrt(r), order)
                for (q, r), rounds in releases.items()
            )
            return float(rdp.compute_epsilon([order], [spent], self.delta)[0])

        # ε is the least that an order gives. Divergences grow with the order, so if one is small
        # enough for ε = 0, the first is. Otherwise first among whole orders, whose divergences are
        # finite sums; those of fractions are series, which may be given up or lose digits.
        orders = rdp.DEFAULT_RDP_ORDERS
        if of_order(orders[0]) == 0:
            return 0.0
        whole = _lowest(of_order, [order for order in orders if float(order).is_integer()])
        near = _lowest(of_order, [order for order in orders if abs(order - whole) <= 1])
        return min(of_order(whole), of_order(near))


def _lowest(of_order: Callable[[float], float], orders: list[float]) -> float:
    """The order that gives the least ε.

    (α − 1)·divergence is convex in the order α, and so is what is divided by α − 1 to give ε(α),
    unless it is 0. Therefore ε(α) falls up to its minimum, and rises from there.
    """
    low, high = 0, len(orders) - 1
    while low < high:
        middle = (low + high) // 2
        pair = of_order(orders[middle]), of_order(orders[middle + 1])
        if math.inf in pair:  # given up
            del orders[middle + pair.index(math.inf)]
            high -= 1
        elif pair[0] <= pair[1]:
            high = middle
        else:
            low = middle + 1
    return orders[low]


@lru_cache(maxsize=2**16)
def _divergence(q: float, noise_multiplier: float, order: float) -> float:
    """The Rényi divergence of one release: they add up over releases.

    Kept, because each takes a millisecond, and clients release something in every round.
    """
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    noise = dp_accounting.GaussianDpEvent(noise_multiplier)
    accountant = RdpAccountant([order]).compose(dp_accounting.PoissonSampledDpEvent(q, noise))
    return float(accountant._rdp[0])


def reference(sent: Any, size: int) -> Any:
    """The reference of a vector's change: what the server sent under its name, flat, or else 0."""
    if isinstance(sent, Tensor | np.ndarray) and math.prod(sent.shape) == size:
        return sent.reshape(-1)
    return 0.0


def clipped(
    vectors: Mapping[str, Tensor], references: Mapping[str, Tensor], norm: float
) -> dict[str, Tensor]:
    """A client's changes from the references, scaled together to an L2 norm of at most `norm`.

    A vector without a reference of its name and size is a change itself.
    """
    changes = {}
    for name, vector in vectors.items():
        change = vector.detach().reshape(-1).double()
        changes[name] = change - reference(references.get(name), len(change))
    total = torch.stack([change.square().sum() for change in changes.values()]).sum().sqrt()
    scale = torch.where(total > norm, norm / total, 1.0)
    return {name: change * scale for name, change in changes.items()}
