"""How clients' updates are averaged: exactly, or with client-level differential privacy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedsim.conditions.privacy import Asked, Privacy, clipped, reference
from fedsim.errors import RunError
from fedsim.federation.reduction import (
    Mean,
    NothingToReduce,
    Update,
    WeightedMean,
    check_no_message,
)
from fedsim.federation.wire import to_arrays

if TYPE_CHECKING:
    from fedsim.federation.cohort import Cohort
    from fedsim.federation.federation import Federation


class Aggregation:
    """Exact weighted means; methods may use any information about clients.

    Attributes:
        hides: what of clients it hides from the server; see `Learns.asks`.
        section: the experiment's section that says so.
        independent_draws: whether each client is drawn for a cohort independently.
        column_names: names of the columns that it adds to a round's record.
    """

    hides: frozenset[Asked] = frozenset()
    section: str = ""
    independent_draws: ClassVar[bool] = False
    column_names: ClassVar[tuple[str, ...]] = ()

    def mean(
        self, fed: Federation, cohort: Sequence[int] | Cohort, before: Sequence[WeightedMean]
    ) -> WeightedMean:
        """The reduction that `Federation.mean` uses for a cohort.

        Args:
            before: the means of this round so far.
        """
        return WeightedMean()

    def check(self, asked: Asked, what: str) -> None:
        """Refuse a method what is hidden.

        Args:
            what: what the method does, as a verb phrase: "reads the data set".

        Raises:
            RunError: it is hidden.
        """
        if asked in self.hides:
            raise RunError(f"the method {what}, which `{self.section}` hides from the server")

    def columns(self, means: Sequence[WeightedMean], ledger: dict[str, Any]) -> dict[str, float]:
        """The columns that it adds to a round's record.

        Args:
            means: the means of the round.
            ledger: privacy spending carried from round to round.
        """
        return {}


class PrivateAggregation(Aggregation):
    """Clipped, noisy means over cohorts of independent draws; see `fedsim.conditions.privacy`.

    Args:
        privacy: the experiment's `privacy` section.
    """

    section: str = "privacy"
    independent_draws: ClassVar[bool] = True
    column_names: ClassVar[tuple[str, ...]] = ("epsilon",)

    def __init__(self, privacy: Privacy) -> None:
        self.privacy = privacy
        self.hides = privacy.hides

    def mean(
        self, fed: Federation, cohort: Sequence[int] | Cohort, before: Sequence[WeightedMean]
    ) -> WeightedMean:
        drawn = np.array_equal(cohort, fed.sample(fed.round))
        q = fed.settings.participation if drawn else 1.0
        count = q * fed.num_clients if drawn else float(len(cohort))
        return NoisyMean(self.privacy, q, count, fed.rng(f"privacy/{len(before) + 1}"))

    def columns(self, means: Sequence[WeightedMean], ledger: dict[str, Any]) -> dict[str, float]:
        """`epsilon`, spent so far."""
        per_rate = Counter(mean.participation for mean in means if isinstance(mean, NoisyMean))
        rounds = Counter({(q, r): n for q, r, n in ledger.get("releases", [])})
        rounds.update(sorted(per_rate.items()))
        ledger["releases"] = [[q, r, n] for (q, r), n in sorted(rounds.items())]
        return {"epsilon": self.privacy.epsilon(rounds)}


class NoisyMean(WeightedMean):
    """reference + (Σ_k clipped change_k + N(0, (zS)²)) / expected number of clients.

    Args:
        privacy: z and S.
        participation: q, the chance of each client to be in the cohort.
        count: expected number of clients.
        noise: random stream.
    """

    probes: ClassVar[bool] = True

    def __init__(
        self, privacy: Privacy, participation: float, count: float, noise: np.random.Generator
    ) -> None:
        super().__init__()
        self.privacy, self.participation, self.count = privacy, participation, count
        self._noise = noise

    def check(self, message: Any) -> None:
        super().check(message)
        check_no_message(message, "privacy")

    def fold(self, id: int, message: Update, arguments: Mapping[str, Any]) -> None:
        if message.vectors:
            self.add(id, 1.0, clipped(message.vectors, arguments, self.privacy.clip))

    def result(self, arguments: Mapping[str, Any], failures: Mapping[int, str]) -> Mean:
        self.check_alike()
        if self.count == 0:
            raise NothingToReduce("a mean of no clients")
        if not self.sums:
            raise NothingToReduce("no client of the cohort sent anything to add noise to")
        mean = {}
        for (name, size), total in sorted(self.sums.items()):
            scale = self.privacy.noise_multiplier * self.privacy.clip
            change = (total.value() + scale * self._noise.standard_normal(size)) / self.count
            sent = reference(to_arrays(arguments.get(name)), size)
            mean[name] = (sent + change).astype(np.float32)
        return Mean(mean, self.count)

    def forget(self) -> None:
        """Keep the shapes of the sums and discard their values, because the cohort was empty."""
        for total in self.sums.values():
            total.clear()
