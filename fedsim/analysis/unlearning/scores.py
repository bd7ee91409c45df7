"""How far a model is from the retrained one, and what it still knows of the clients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.analysis.attacks.membership import (
    confidence,
    halves,
    lira_scores,
    outcome,
    passes,
    shadow_models,
)
from fedsim.analysis.replay import ModelSnapshot, Replay, as_errors
from fedsim.analysis.unlearning.forgetting import classifies
from fedsim.explain.compare import similarities
from fedsim.explain.explainer import FeatureExplainer
from fedsim.explain.scores.faithfulness import present
from fedsim.explain.scores.measure import relevances_of, similarity
from fedsim.explain.scores.relevance import mean_defined
from fedsim.federation import Examples, Vector
from fedsim.objectives import Batch, evaluate, scores_of
from fedsim.objectives.objective import EVALUATION_BATCH
from fedsim.support.rng import keyed_rng
from fedsim.training import logits

EXPLAINED = 32  # test examples, evenly spread
Z = 1.959964  # of an interval of 95 %


@dataclass(frozen=True)
class Judge:
    """Scores models beside the retrained one.

    Args:
        again: the run, whose data they are scored on.
        clients: whom they are to forget.
        retrained: (size,) the weights of the run without them.
        explainer: whose maps are compared; None for no score of them.
        shadows: number of shadow models for LiRA; 0 for no score of it.
        tell: called with a line about each shadow model.
    """

    again: Replay
    clients: tuple[int, ...]
    retrained: Vector
    explainer: FeatureExplainer | None
    shadows: int = 0
    tell: Callable[[str], None] = lambda _: None

    def scores(self, weights: Vector) -> dict[str, float]:
        """The scores of a model, by name; see `fedsim.unlearn`."""
        away = np.linalg.norm(weights.astype(np.float64) - self.retrained)
        norm = np.linalg.norm(self.retrained.astype(np.float64))
        found = {"weights": float(away / norm)}
        found |= self._predictions(weights)
        if self.explainer is not None:
            found |= self._explanations(weights, self.explainer)
        model = self._snapshot(weights)
        central = model.scores()
        primary = self.again.run.primary_metric.column
        found[primary] = central[primary]
        network, objective = model.network(), self.again.spec.objective
        for name, held in (("kept", self._kept), ("forgotten", self._forgotten)):
            totals = evaluate(objective, network, Batch(held.x, held.y, facts=held.facts))
            found[f"{primary}_{name}"] = scores_of(objective, totals)[primary]
        inside, outside = (self._losses(network, each) for each in (self._forgotten, self._test))
        found |= dict(zip(("mia", "mia_low", "mia_high"), auc(-inside, -outside), strict=True))
        if self.shadows:
            found |= dict(zip(("lira", "lira_low", "lira_high"), self._lira(network), strict=True))
        attack = self.again.experiment.adversaries and self.again.experiment.adversaries.attack
        if attack and attack.success is not None:
            found[attack.success.column] = central[attack.success.column]
        return found

    def _snapshot(self, weights: Vector) -> ModelSnapshot:
        self.again.runner.begin(self.again.after)  # for the same random numbers
        return ModelSnapshot(self.again.fed.server.tensor(weights), self.again, client=None)

    def _held(self, clients: list[int]) -> Examples:
        held = self.again.splits.held(self.again.after)
        rows = np.sort(np.concatenate([held.train[k] for k in clients]))
        return self.again.runner.context.examples(rows)

    @cached_property
    def _forgotten(self) -> Examples:
        return self._held(list(self.clients))

    @cached_property
    def _kept(self) -> Examples:
        there = np.flatnonzero(self.again.splits.present)
        return self._held(np.setdiff1d(there, self.clients).tolist())

    @property
    def _test(self) -> Examples:
        return self.again.fed.server.test_data

    @torch.no_grad()
    def _outputs(self, weights: Vector, x: Tensor) -> NDArray[np.float64]:
        network, objective = self._snapshot(weights).network(), self.again.spec.objective
        parts = torch.split(x, EVALUATION_BATCH)
        each = (objective.predictions(objective.outputs(network, part)) for part in parts)
        return torch.cat(list(each)).cpu().double().numpy()

    def _predictions(self, weights: Vector) -> dict[str, float]:
        """Distance in predictions on the test set, and on what is to be forgotten."""
        found = {}
        for name, x in (("", self._test.x), ("_forgotten", self._forgotten.x)):
            p, own = self._outputs(self.retrained, x), self._outputs(weights, x)
            if not classifies(self.again):
                found[f"difference{name}"] = float(np.sqrt(np.square(own - p).mean()))
                continue
            found[f"disagreement{name}"] = float((own.argmax(1) != p.argmax(1)).mean())
            log_p, log_q = (torch.from_numpy(z).log_softmax(dim=1) for z in (p, own))
            found[f"kl{name}"] = float((log_p.exp() * (log_p - log_q)).sum(dim=1).mean())
        return found

    def _explanations(self, weights: Vector, explainer: FeatureExplainer) -> dict[str, float]:
        """Similarity of maps of what the retrained model decides on test examples."""
        test, classes = self._test.x, bool(self.again.dataset.classes)
        x = test[np.unique(np.linspace(0, len(test) - 1, EXPLAINED).astype(int))]
        decided = torch.from_numpy(logits(self._snapshot(self.retrained).network(), x)).argmax(1)
        there = present(x, self.again.dataset.parts)
        maps = []
        for own in (self.retrained, weights):
            snapshot = self._snapshot(own)
            model, data = snapshot.explained(), snapshot.data()
            rng = keyed_rng(model.seed, f"unlearning/{explainer.label}")
            with as_errors(explainer):
                maps.append(relevances_of(explainer, model, data, x, decided, rng))
        found = {}
        for how, alike in similarities(None, by_size=not classes).items():
            mean = mean_defined(similarity(alike, there, *maps))
            found[f"explanations_{how}"] = math.nan if mean is None else mean
        return found

    def _lira(self, network: nn.Module) -> tuple[float, float, float]:
        """AUC by which LiRA tells the forgotten training examples from as many test examples."""
        parts, values, inside = self._of_shadows
        own = np.concatenate([self._confidence(network, part) for part in parts])
        likelier, members = lira_scores(own, values, inside), len(parts[0])
        return auc(likelier[:members], likelier[members:])

    @cached_property
    def _of_shadows(self) -> tuple[list[Examples], NDArray[Any], NDArray[np.bool_]]:
        """Forgotten and test examples, as many of each, and shadow models' confidences in them.

        (S, 2n), and which half of them each has trained on beside all examples of the others: on
        as many as the run's own model in all.
        """
        again, seed = self.again, self.again.experiment.seed
        rng = keyed_rng(seed, "unlearning/shadows")
        n = min(len(self._forgotten), len(self._test))
        both = [
            part.at(torch.from_numpy(np.sort(rng.choice(len(part), n, replace=False))))
            for part in (self._forgotten, self._test)
        ]
        parts, inside = (self._kept, *both), halves(2 * n, self.shadows, rng)
        x, y = (torch.cat([getattr(part, name) for part in parts]) for name in ("x", "y"))
        facts = {name: torch.cat([part.facts[name] for part in parts]) for name in parts[0].facts}
        everywhere = np.ones((self.shadows, len(self._kept)), np.bool_)
        settings, device = again.experiment.train, again.fed.server.device
        epochs = passes(settings, again.after, again.splits.held(again.after))
        models = shadow_models(
            *(again.spec.build_begun, x, y, np.hstack([everywhere, inside]), settings, epochs),
            *(seed, device, again.spec.objective.loss, facts),
        )
        values = []
        for s, model in enumerate(models, 1):
            values.append(np.concatenate([self._confidence(model, part) for part in both]))
            self.tell(f"[{s}/{self.shadows}] shadow models, {epochs} passes each")
        return both, np.stack(values), inside

    @torch.no_grad()
    def _confidence(self, network: nn.Module, examples: Examples) -> NDArray[np.float64]:
        """(n,) log-odds of the true classes."""
        return confidence(logits(network, examples.x), examples.y.cpu().numpy())

    @torch.no_grad()
    def _losses(self, network: nn.Module, examples: Examples) -> NDArray[np.float64]:
        """(n,) the training loss of each example."""
        return examples.losses(self.again.spec.objective, network).cpu().double().numpy()


def auc(members: NDArray[np.float64], others: NDArray[np.float64]) -> tuple[float, float, float]:
    """AUC of scores of members (n,) and others (m,), and its interval of 95 %.

    The interval is ±1.96 standard errors, whose square is Var(V_i)/n + Var(W_j)/m: V_i is the
    share of others below member i (ties count half), and W_j that of members above other j. NaN
    if there are fewer than two of either.

    Source:
        DeLong, DeLong and Clarke-Pearson, Comparing the Areas under Two or More Correlated
        Receiver Operating Characteristic Curves (Biometrics 1988).
    """
    value = outcome(members, others).auc
    if min(len(members), len(others)) < 2:
        return value, math.nan, math.nan

    def below(of: NDArray[np.float64], among: NDArray[np.float64]) -> NDArray[np.float64]:
        ordered = np.sort(among)
        less, no_more = np.searchsorted(ordered, of), np.searchsorted(ordered, of, "right")
        return (less + no_more) / 2 / len(among)

    error = below(members, others).var(ddof=1) / len(members)
    error += below(others, members).var(ddof=1) / len(others)
    half = Z * math.sqrt(error)
    return value, max(value - half, 0.0), min(value + half, 1.0)
