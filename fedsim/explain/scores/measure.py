"""Explain one model in its process: relevances by every explainer, and their scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.explain.baselines import Compared
from fedsim.explain.explainer import ExplainedData, ExplainedModel, FeatureExplainer
from fedsim.explain.scores import faithfulness
from fedsim.explain.scores import relevance as scores
from fedsim.explain.scores.faithfulness import Streams
from fedsim.explain.scores.randomisation import (
    DRAWS,
    agreement,
    all_random,
    random_agreement,
)
from fedsim.explain.scores.relevance import Scores, informative
from fedsim.explain.scores.road import road
from fedsim.explain.section import SCORES, Explain
from fedsim.support.rng import input_rngs, keyed_rng, torch_seed
from fedsim.training import logits

NOISE = 0.1  # standard deviation for infidelity, relative to the input's range
RADIUS = 0.02  # radius for sensitivity, likewise
SAMPLES = 10  # samples of both
FILLED = 0.01  # standard deviation of noise on imputed pixels, likewise
ACROSS = 8  # squares of selectivity along the longer side of an image, at most
CURVES = {"deletion": faithfulness.deletion_curve, "insertion": faithfulness.insertion_curve}
SHARES = {
    "comprehensiveness": faithfulness.comprehensiveness,
    "sufficiency": faithfulness.sufficiency,
}
ALONE = {"sparseness": scores.sparseness, "effective_parts": scores.effective_parts}
IN_TRUTH = {
    "relevance_mass": scores.relevance_mass,
    "relevance_rank": scores.relevance_rank,
    "pointing_game": scores.pointing_game,
}


@dataclass(frozen=True)
class Explained:
    """One explainer's explanations of a model's decisions on m inputs.

    Args:
        inputs: (m,) the rows of the test set, or of the training data.
        relevance: (m, P) relevances of pixels, features or words.
        present: (m, P) which parts the inputs have, because documents differ in length.
        scores: (m,) each, by column; NaN if undefined.
        curves: (m, steps + 1) deletion and insertion curves, if requested.
        seconds: time taken.
        by_size: parts are ranked by |relevance|, as of a regression.
    """

    inputs: NDArray[np.int64]
    relevance: NDArray[np.float32]
    present: NDArray[np.bool_]
    scores: Mapping[str, Scores]
    curves: Mapping[str, Scores] = field(default_factory=dict)
    seconds: float = 0.0
    by_size: bool = False


@dataclass(frozen=True)
class ExplainedInputs:
    """Inputs whose predictions are explained."""

    rows: NDArray[np.int64]
    x: Tensor
    y: Tensor
    truth: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)


@torch.no_grad()
def measure(
    section: Explain,
    explainer: FeatureExplainer,
    model: ExplainedModel,
    data: ExplainedData,
    inputs: ExplainedInputs,
    given: Scores | None = None,
) -> Explained:
    """Explain a model's decisions on some inputs, and score the explanation.

    Parts are ranked by relevance, or by |relevance| for a regression, whose value is the closeness
    to the original prediction. If the relevances of an input do not tell its parts apart, they
    score what chance does (`Score.chance`); if they are not finite, as for a class that the model
    cannot predict, no score of them is defined. Randomness depends only on the seed, the round,
    the client, the explainer and the input, not on inputs beside it.

    Args:
        section: the resolved section, with the scores.
        given: (m, P) an explanation from elsewhere, which is only scored.
    """
    started, x = time.perf_counter(), inputs.x
    network = model.as_network()
    classes, part_of = bool(data.dataset.classes), data.dataset.parts

    def outputs(changed: Tensor) -> Tensor:
        return torch.from_numpy(logits(network, changed)).double()

    whole = outputs(x)
    decided = whole.argmax(dim=1)
    if section.target == "label" and classes:
        decided = inputs.y.cpu()

    def of_decision(found: Tensor) -> Tensor:
        """(k·m,) the outputs for the explained decisions, for k copies of all inputs."""
        return found[torch.arange(len(found)), decided.repeat(len(found) // len(x))]

    def raw(changed: Tensor) -> Tensor:
        """The logit of the explained class, or the predicted number."""
        return of_decision(outputs(changed))

    def value(changed: Tensor) -> Tensor:
        """The probability of the class, or a number's closeness to the original prediction."""
        if classes:
            return of_decision(outputs(changed).softmax(dim=1))
        return -(raw(changed) - whole[:, 0].repeat(len(changed) // len(x))).abs()

    def relevances(
        changed: Tensor,
        again: str = "",
        by: FeatureExplainer = explainer,
        network: nn.Module | None = model.network,
    ) -> Scores:
        purpose = f"explain/{explainer.label}{again}"
        client = -1 if model.client is None else model.client
        rng = keyed_rng(model.seed, purpose, model.round, client)
        seed = torch_seed(model.seed, purpose) if again else model.seed
        drawn = replace(model, seed=seed, network=network)
        return relevances_of(by, drawn, data, changed, decided, rng, x)

    relevance = relevances(x) if given is None else given
    present = faithfulness.present(x, part_of)
    wanted = section.scores or ()
    told = informative(relevance if classes else np.abs(relevance), present=present)
    known = np.where(told[:, None], relevance, 0)
    ranked = known if classes else np.abs(known)
    rows = x.flatten(1).double()
    spread = (rows.amax(1) - rows.amin(1)).cpu().numpy()

    def own(name: str) -> Streams:
        return input_rngs(keyed_rng(model.seed, f"explain/{name}"), x)

    curves = {
        name: curve(value, x, ranked, part_of=part_of, rng=own(name))
        for name, curve in CURVES.items()
        if name in wanted
    }

    def score(name: str) -> Scores:
        if name in curves:
            return faithfulness.area(curves[name])
        if name in SHARES:
            return SHARES[name](value, x, ranked, part_of=part_of, rng=own(name))
        if name == "selectivity":
            side = -(-max(x.shape[2:]) // ACROSS) if x.dim() == 4 else 1
            return faithfulness.selectivity(value, x, ranked, side, part_of, own(name))
        if name == "monotonicity":
            return faithfulness.monotonicity(value, x, ranked, part_of)
        if name == "road":
            return road(value, x, ranked, noise=FILLED * spread, rng=own(name))
        if name == "infidelity":
            parts = x.new_zeros(faithfulness.arranged(x, part_of))

            def over_parts(z: Tensor) -> Tensor:
                """All channels of a pixel, and all entries of a feature, change together."""
                if part_of is not None:
                    z = z[:, torch.from_numpy(part_of).to(z.device)]
                return raw(x + (z[:, None] if x.dim() == 4 else z))

            sigma = NOISE * spread.reshape(-1, *[1] * (parts.dim() - 1))
            errors = faithfulness.infidelity(
                over_parts, parts, torch.from_numpy(known), sigma, SAMPLES, own(name)
            )
            return np.where(spread > 0, errors, np.nan)  # without a range there is no noise
        if name == "sensitivity":
            radius = RADIUS * spread.reshape(-1, *[1] * (x.dim() - 1))
            changes = faithfulness.sensitivity(
                lambda z: torch.from_numpy(relevances(z)), x, radius, SAMPLES, own(name)
            )
            return np.where(spread > 0, np.where(told, changes, SCORES[name].chance), np.nan)
        if name == "completeness_gap":
            total = np.where(present, relevance, 0).sum(axis=1)
            ends = explainer.endpoints(model, data, x.clone(), decided.clone().to(x.device))
            return scores.completeness_gap(total, *ends)
        if name == "background_gap":
            assert isinstance(explainer, Compared)
            pooled = relevances(x, by=explainer.pooled() or explainer)
            length = np.linalg.norm(pooled, axis=1)
            away = np.linalg.norm(relevance - pooled, axis=1)
            return away / np.where(length > 0, length, np.nan)
        if name == "repeatability":
            return similarity(scores.cosine, present, relevance, relevances(x, "/again"))
        if name == "randomisation":
            assert model.network is not None
            at = model.round, -1 if model.client is None else model.client
            squares = explainer.squares(data.dataset.shape)
            alike = [
                similarity(
                    partial(agreement, squares=squares),
                    present,
                    relevance,
                    relevances(x, network=random),
                )
                for random in (all_random(model.network, model.seed, k, *at) for k in range(DRAWS))
            ]
            counts = present.sum(axis=1) if squares is None else np.full(len(x), squares)
            return np.where(told, np.mean(alike, axis=0), random_agreement(counts))
        return by_row(ALONE[name], present, known)

    fit = [name for name, one in SCORES.items() if one.about == "input" and one.fits(explainer)]
    if given is not None:
        fit = [name for name in fit if not SCORES[name].again]
    found = {}
    for name in wanted:
        if name in IN_TRUTH:
            for kind, where in inputs.truth.items():
                flat = where.reshape(len(x), -1)
                found[f"{name}_{kind}"] = by_row(IN_TRUTH[name], present, ranked, flat)
        elif name in fit:
            found[name] = score(name)
    finite = np.all(np.isfinite(relevance) | ~present, axis=1)
    found = {name: np.where(finite, values, np.nan) for name, values in found.items()}
    curves = {name: np.where(finite[:, None], curve, np.nan) for name, curve in curves.items()}
    return Explained(
        inputs=inputs.rows,
        relevance=relevance.astype(np.float32),
        present=present,
        scores=found,
        curves=curves,
        seconds=time.perf_counter() - started,
        by_size=not classes,
    )


def relevances_of(
    explainer: FeatureExplainer,
    model: ExplainedModel,
    data: ExplainedData,
    x: Tensor,
    decided: Tensor,
    rng: Generator,
    like: Tensor | None = None,
) -> Scores:
    """(m, P) an explainer's relevances of inputs; the network stays in evaluation mode.

    Args:
        x: (m, ...) as the network takes them.
        decided: (m,) the class explained; 0 for a regression.
        rng, like: as of `FeatureExplainer.each`.
    """
    decided = decided.clone().to(x.device)
    with torch.enable_grad():  # of copies, because other explainers get the same inputs
        found = explainer.each(model, data, x.clone(), decided, rng, like)
    if model.network is not None:
        model.network.eval()
    if found.shape != (shape := faithfulness.arranged(x, data.dataset.parts)):
        raise ValueError(f"relevances must have the shape {shape}, not {found.shape}")
    return np.array(found.reshape(len(x), -1), np.float64, order="C")  # it may be used again


def by_row(
    score: Callable[..., Scores], present: NDArray[np.bool_], *of_parts: NDArray[Any]
) -> Scores:
    """(m,) a score of arrays (m, P), for documents without padding.

    NaN where an array is not finite.

    Args:
        present: (m, P) existing parts; missing ones come last.
    """
    finite = np.all([np.isfinite(array) for array in of_parts], axis=0)
    finite = (finite | ~present).all(axis=1)
    found = np.full(len(present), np.nan)
    if present[finite].all():
        found[finite] = score(*(array[finite] for array in of_parts))
        return found
    for k in np.flatnonzero(finite):
        if n := present[k].sum():
            found[k] = score(*(array[k : k + 1, :n] for array in of_parts))[0]
    return found


def similarity(
    score: Callable[..., Scores], present: NDArray[np.bool_], a: NDArray[Any], b: NDArray[Any]
) -> Scores:
    """(m,) the similarity of two maps (m, P); where one says nothing of its input, chance."""
    known = (
        np.where(np.isfinite(one) & ~informative(one, present=present)[:, None], 0, one)
        for one in (a, b)
    )
    return by_row(score, present, *known)
