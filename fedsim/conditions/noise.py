"""Differential privacy: noisy means over cohorts of independent draws, or noisy local steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from fedsim.conditions.privacy import Privacy, clipped, reference
from fedsim.data import ClientSplits
from fedsim.errors import ExperimentError
from fedsim.federation.cohort import Cohort
from fedsim.federation.condition import Condition, ConditionOnMeans, Round
from fedsim.federation.context import RunSpec
from fedsim.federation.reduction import Mean, NothingToReduce, Update, WeightedMean
from fedsim.federation.wire import to_arrays
from fedsim.training import FlatModel, Trained, TrainingJob
from fedsim.training.dp_sgd import check_examples_apart, sampling_rate


class ClientPrivacy(ConditionOnMeans):
    """Clipped, noisy means over cohorts of independent draws; see `fedsim.conditions.privacy`."""

    name: str = "privacy"
    columns: ClassVar[tuple[str, ...]] = ("epsilon",)
    independent_draws: ClassVar[bool] = True
    privacy: Privacy

    @property
    def hides(self) -> frozenset[str]:
        return self.privacy.hides

    def check(self, spec: RunSpec, splits: ClientSplits, network: nn.Module) -> None:
        """Refuse noise on running statistics: a variance would end up below 0."""
        model = FlatModel(spec.build_model(), torch.device("cpu"))
        part = spec.functions.sent_part(model)
        sent = np.ones(model.size, np.bool_) if part is None else part
        inside = model.named(torch.from_numpy(sent))
        for layer, buffer in network.named_buffers():
            if buffer.is_floating_point() and layer in inside and inside[layer].any():
                raise ExperimentError(
                    f"privacy: model.name={spec.model.name} has running statistics ('{layer}'), "
                    "which the noise on all that clients send would corrupt; take a model "
                    "without batch norm, or a method that keeps it (fedbn)"
                )

    def mean(self, round: Round, cohort: Cohort) -> WeightedMean:
        drawn = np.array_equal(cohort, round.runner.sample(round.t))
        q = round.runner.settings.participation if drawn else 1.0
        count = q * round.runner.num_clients if drawn else float(len(cohort))
        number = round.note(self.name, q)
        return NoisyMean(self.privacy, count, round.rng(f"privacy/{number}"))

    def close(self, round: Round, ledger: dict[str, Any]) -> dict[str, float]:
        """`epsilon`, spent so far."""
        per_rate = Counter(round.notes.get(self.name, ()))
        rounds = Counter({(q, r): n for q, r, n in ledger.get("releases", [])})
        rounds.update(sorted(per_rate.items()))
        ledger["releases"] = [[q, r, n] for (q, r), n in sorted(rounds.items())]
        return {"epsilon": self.privacy.epsilon(rounds)}


class NoisyMean(WeightedMean):
    """reference + (Σ_k clipped change_k + N(0, (zS)²)) / expected number (`count`) of clients."""

    probes: ClassVar[bool] = True

    def __init__(self, privacy: Privacy, count: float, noise: np.random.Generator) -> None:
        super().__init__()
        self.privacy, self.count = privacy, count
        self._noise = noise

    def fold(self, id: int, message: Update, arguments: Mapping[str, Any]) -> None:
        if message.vectors:
            wide = {n for n, sent in message.vectors.items() if sent.dtype == torch.float64}
            self.add(id, 1.0, clipped(message.vectors, arguments, self.privacy.clip))
            self.wide = wide

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
            mean[name] = self.as_sent(name, sent + change)
        return Mean(mean, self.count)

    def forget(self) -> None:
        """Keep the shapes of the sums and discard their values, because the cohort was empty."""
        for total in self.sums.values():
            total.clear()


class ExamplePrivacy(Condition):
    """Clients train by DP-SGD, and the budget of each is counted."""

    name: str = "privacy"
    order: ClassVar[int] = 40
    columns: ClassVar[tuple[str, ...]] = ("epsilon",)
    client_columns: ClassVar[tuple[str, ...]] = ("epsilon",)
    privacy: Privacy

    def check(self, spec: RunSpec, splits: ClientSplits, network: nn.Module) -> None:
        check_examples_apart(network)

    def training(self, client: Any, job: TrainingJob) -> TrainingJob:
        return replace(job, dp_sgd=(self.privacy.clip, self.privacy.noise_multiplier))

    def trained(self, client: Any, job: TrainingJob, done: Trained) -> None:
        """Counts private steps, by the sampling rate of their batches."""
        steps = client.notes.setdefault(self.name, Counter())
        steps[sampling_rate(len(job.y), client.settings.batch_size)] += done.steps

    def close(self, round: Round, ledger: dict[str, Any]) -> dict[str, float]:
        """Adds ε of each client's examples to its row; `epsilon` is the largest so far."""
        spent, made = ledger.setdefault("steps", {}), dict[int, Counter[float]]()
        for k, steps in round.notes.get(self.name, ()):
            made.setdefault(k, Counter()).update(steps)
        for k, steps in sorted(made.items()):
            known = Counter(dict(spent.get(str(k), [])))
            known.update(steps)
            spent[str(k)] = [[q, n] for q, n in sorted(known.items())]
            epsilon = self.privacy.epsilon({(q, 1): n for q, n in known.items()})
            round.runner.rows.setdefault(k, {})["epsilon"] = epsilon
            ledger["epsilon"] = max(ledger.get("epsilon", 0.0), epsilon)
        return {"epsilon": ledger.get("epsilon", 0.0)}
