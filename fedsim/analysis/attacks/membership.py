"""Membership inference: which examples were in the training set of a finished model.

An attack assigns each example a score, which is higher the more likely the example was trained on.
`outcome` measures how well scores separate members (clients' training examples) from non-members
(test examples).

Scores from the model alone are its loss, entropy and confidence. The likelihood-ratio attack
(LiRA) compares the confidence with that of shadow models, trained with and without the example.
Here it is used as an audit: its shadow models are trained on the members and non-members
themselves.

Explanations also reveal members: by the variance and the norm of their relevances, by LiRA on that
norm, and most of all by LiRA on all of a map's relevances at once.

Sources: Yeom et al., Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting
(CSF 2018); Salem et al., ML-Leaks (NDSS 2019); Song and Mittal, Systematic Evaluation of Privacy
Risks of Machine Learning Models (USENIX Security 2021); Carlini et al., Membership Inference
Attacks From First Principles (S&P 2022); Shokri, Strobel and Zick, On the Privacy Risks of Model
Explanations (AIES 2021); Huang, Pawelczyk and Lakkaraju, Explaining the Model, Protecting Your
Data (arXiv 2407.17663, 2024), whose L1-LRT is LiRA on the norm of explanations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.data import ClientSplits
from fedsim.errors import ExperimentError
from fedsim.objectives import Classification
from fedsim.objectives.objective import Context
from fedsim.support.rng import keyed_rng, keyed_torch_rng
from fedsim.training import FlatModel, Hooks, Loss, Train, TrainingJob, train

MAX_FPR = 0.01
CROSS_ENTROPY = Classification().loss
MOST_SHADOWS = 10_000


@dataclass(frozen=True)
class Outcome:
    """How well an attack's scores separate members from non-members.

    Args:
        auc: area under the ROC curve; 0.5 for guessing.
        balanced_accuracy: max (TPR + 1 − FPR)/2 over all thresholds; 0.5 for guessing. It is the
            optimum, found with the answers at hand: an upper bound for an attacker, who has to
            choose a threshold without them.
        tpr: the largest TPR of the thresholds with an FPR of at most 1 %. With fewer than 100
            non-members it is the share of members that score higher than all of them.
    """

    auc: float
    balanced_accuracy: float
    tpr: float


def outcome(members: NDArray[Any], others: NDArray[Any]) -> Outcome:
    """How well scores separate members (n,) from others (m,); a score ≥ t predicts a member.

    Carlini et al. (2022), §III, say why TPR at a low FPR.

    Raises:
        ExperimentError: no scores, or some that are not finite.
    """
    from sklearn.metrics import auc, roc_curve  # scikit-learn is slow to import

    _finite(members=members, others=others)
    truth = np.repeat([True, False], [len(members), len(others)])
    scores = np.concatenate([members, others], dtype=np.float64)
    # Keep all thresholds, also those on straight segments, which roc_curve drops by default.
    fpr, tpr, _ = roc_curve(truth, scores, drop_intermediate=False)
    return Outcome(
        auc=float(auc(fpr, tpr)),
        balanced_accuracy=float(np.max(tpr + 1 - fpr) / 2),
        tpr=float(np.max(tpr[fpr <= MAX_FPR])),
    )


def guessing(members: int, others: int) -> dict[str, tuple[float, float]]:
    """Where 95 % of the outcomes of random scores lie, by the outcome's name.

    The balanced accuracy of guessing is 0.5 or more, because it is that of the best threshold.

    Source:
        Of the AUC the normal approximation of Mann and Whitney (1947), of the balanced accuracy
        the limit of Smirnov's one-sided statistic; the TPR is a beta-binomial share.
    """
    from scipy.stats import betabinom, norm

    tails = np.array([0.025, 0.975])
    aucs = norm.ppf(tails, 0.5, np.sqrt((members + others + 1) / (12 * members * others)))
    gap = np.sqrt(-np.log(0.05) * (members + others) / (2 * members * others))
    allowed = int(MAX_FPR * others)  # non-members above the threshold
    hits = betabinom.ppf(tails, members, allowed + 1, others - allowed) / members
    shares = {"auc": aucs, "balanced_accuracy": (0.5, (1 + gap) / 2), "tpr": hits}
    return {
        name: (max(float(low), 0), min(float(high), 1)) for name, (low, high) in shares.items()
    }


@dataclass(frozen=True)
class Fit:
    """The accuracy and the mean loss of a model on examples that it was trained on, and on others.

    Its losses are what attacks see: of two models that are right about all their examples, one may
    be far surer of them.
    """

    inside: float
    outside: float
    inside_loss: float = math.nan
    outside_loss: float = math.nan


def fit(logits: NDArray[Any], labels: NDArray[Any], inside: NDArray[np.bool_]) -> Fit:
    """The fit of a model by its logits (n, C) on examples, trained on those `inside`."""
    right, losses = logits.argmax(axis=1) == labels, -loss_scores(logits, labels)
    found = (each[where].mean() for each in (right, losses) for where in (inside, ~inside))
    return Fit(*map(float, found))


def confidence(logits: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.float64]:
    """(n,) log(p_y / (1 − p_y)) = z_y − log Σ_{c≠y} e^(z_c), which is nearly Gaussian.

    z are logits (n, C) of C ≥ 2 classes, y the true ones (n,). Carlini et al. (2022), §IV-C.
    """
    from scipy.special import logsumexp  # SciPy is slow to import

    rest = logits.astype(np.float64)
    rows = np.arange(len(labels))
    own = rest[rows, labels]
    rest[rows, labels] = -np.inf
    return own - logsumexp(rest, axis=1)


def loss_scores(logits: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.float64]:
    """(n,) log p_y by logits (n, C) and true classes (n,), minus the cross-entropy.

    Computed as −log(1 + e^(−confidence)), which distinguishes values of p_y that all round to 1:
    models are very confident on memorised examples. Yeom et al. (2018), Adversary 2.
    """
    return -np.logaddexp(0, -confidence(logits, labels))


def entropy_scores(logits: NDArray[Any]) -> NDArray[np.float64]:
    """(n,) Σ_c p_c·log p_c of logits (n, C), the entropy of the prediction with its sign changed.

    Salem et al. (2019), adversary 3; Song and Mittal (2021).
    """
    from scipy.special import entr, softmax

    return -entr(softmax(logits.astype(np.float64), axis=1)).sum(axis=1)


def variance_scores(relevance: NDArray[Any]) -> NDArray[np.float64]:
    """(n,) minus the variance of relevances (n, P), signed, over an input (Shokri et al. 2021).

    Explanations of a probability are flat where the model is confident, as it is on memorised
    examples. Explanations of a logit, as all of fedsim's are, do not saturate: there the score may
    reveal nothing, or members may even have the larger variance, and the AUC is below 0.5.
    """
    return -np.var(relevance, axis=1, dtype=np.float64)


def norm_scores(relevance: NDArray[Any]) -> NDArray[np.float64]:
    """(n,) −Σ_p |R_p|, the L1 norm of explanations (n, P) with its sign changed (Shokri 2021).

    For logits, as with the variance, it may reveal nothing or be reversed.
    """
    return -np.abs(relevance).sum(axis=1, dtype=np.float64)


def log_norm(norm: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n,) the logarithm of explanations' norms (n,), for LiRA.

    A gradient is a product over layers, so that its norm is skewed to the right and its logarithm
    nearly Gaussian; Huang et al. (2024) take the norm itself. Norms of 0 count as the least of the
    others, all of 0 as 1.
    """
    least = norm[norm > 0].min(initial=np.inf)
    return np.log(np.maximum(norm, least if np.isfinite(least) else 1))


def lira_scores(
    target: NDArray[Any], shadows: NDArray[Any], inside: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """(n,) log Λ = log N(target; μ_in, σ_in²) − log N(target; μ_out, σ_out²), the online attack.

    Carlini et al. (2022), §IV and Algorithm 1. Means are each example's own. Variances are global,
    as the paper advises for few shadow models, from which an example's own cannot be estimated:
    σ_in² is that of all values of inside examples about their common mean, as in the authors'
    code, and σ_out² that of the rest.

    Args:
        target: (n,) a value of the attacked model for each example that is roughly Gaussian over
            models, such as `confidence` or `log_norm`.
        shadows: (S, n) the same for each shadow model.
        inside: (S, n) whether the example was in that shadow model's training set.

    Raises:
        ExperimentError: fewer than two shadow models; an example never or always inside; values
            that are not finite, or all the same.
    """
    from scipy.stats import norm

    insist_on_several(len(shadows))
    _finite(target=target, shadows=shadows)
    for where, word in (inside, "never"), (~inside, "always"):
        if len(missing := np.flatnonzero(~where.any(axis=0))):
            raise ExperimentError(
                f"inside: {len(missing)} of {len(target)} examples (the first is {missing[0]}) "
                f"are {word} in a shadow model's training set; LiRA needs both for each"
            )

    def log_density(where: NDArray[np.bool_]) -> NDArray[np.float64]:
        values = shadows[where].astype(np.float64)
        if np.ptp(values) == 0:
            raise ExperimentError("shadows: values are all the same, and have no variance")
        means = np.mean(shadows, axis=0, where=where, dtype=np.float64)
        return norm.logpdf(target, means, values.std())

    return log_density(inside) - log_density(~inside)


def map_scores(
    target: NDArray[Any], inside: NDArray[Any], outside: NDArray[Any]
) -> NDArray[np.float64]:
    """(n,) ‖R − μ_out‖² − ‖R − μ_in‖²: LiRA on the relevances of all parts at once.

    Equal to log N(R; μ_in, σ²I) − log N(R; μ_out, σ²I) except for the factor 1/(2σ²), which is the
    same for all examples: few shadow models allow no more than means to be estimated (Carlini et
    al. 2022, §IV, whose likelihoods may be of several dimensions). The norm reveals only a small
    part of what a map does: training on an example changes which parts are relevant.

    Args:
        target: (n, P) explanations by the model under attack.
        inside: (n, P) μ_in, the mean of those by shadow models that have trained on the example.
        outside: (n, P) μ_out, by those that have not.
    """
    to_outside = np.square(target - outside).sum(axis=1, dtype=np.float64)
    return to_outside - np.square(target - inside).sum(axis=1)


def halves(n: int, shadows: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """(S, n) which of n examples each of S shadow models trains on, at random.

    Each example is in the training sets of exactly ⌊S/2⌋ shadow models, as in Carlini et al.
    (2022), and so in some and not in others; the sets are of about that share of n.
    """
    insist_on_several(shadows)
    ones = np.arange(shadows) < shadows // 2
    return rng.permuted(np.tile(ones, (n, 1)), axis=1).T


def shadow_models(
    build: Callable[[], nn.Module],
    x: Tensor,
    y: Tensor,
    inside: NDArray[np.bool_],
    settings: Train,
    epochs: int,
    seed: int,
    device: torch.device,
    loss: Loss = CROSS_ENTROPY,
    facts: Context | None = None,
) -> Iterator[nn.Module]:
    """S shadow models, each trained on its own part of the examples; one at a time, when asked.

    Training is central, with the clients' optimiser, batch size and clipping, at the learning
    rate that they begin with. Random streams, and initial weights as far as `build` draws them,
    are each shadow model's own, by (seed, s): no other changes them.

    Args:
        build: makes a classifier, such as `RunSpec.build_begun`; what it draws is from torch's own
            generator, which this function sets, and puts back.
        x, y: (n, ...) inputs and (n,) labels.
        inside: (S, n) which examples shadow model s trains on, as `halves` draws them.
        settings: of the run under attack.
        epochs: passes over a shadow model's part.
        loss: of each example; the run's own.
        facts: (n, ...) what the loss needs of the examples beside; see `Objective.facts`.

    Yields:
        Each classifier, in evaluation mode, on the device.

    Raises:
        ExperimentError: a shadow model has nothing to train on.
        ValueError: it has a single example, and batch norm.
    """
    if len(empty := np.flatnonzero(~inside.any(axis=1))):
        raise ExperimentError(f"inside: shadow model {empty[0]} has no training example")
    x, y = x.to(device), y.to(device)
    for s, part in enumerate(inside):
        rows = torch.from_numpy(np.flatnonzero(part)).to(device)
        rng = keyed_rng(seed, "shadow/batches", client=s)
        # Dropout draws as well.
        with keyed_torch_rng(seed, "shadow/torch", client=s, device=device):
            model = FlatModel(build(), device)
            start = model.vector.clone()
            known = {name: fact.to(device)[rows] for name, fact in (facts or {}).items()}
            job = TrainingJob(
                *(start, x[rows], y[rows], settings.lr(1), epochs, rng, Hooks(loss)), facts=known
            )
            train(model, job, settings)
        yield model.module.eval()


def passes(settings: Train, rounds: int, splits: ClientSplits) -> int:
    """How often so many rounds go over an example, on average; 1 or more."""
    epochs: float = settings.local_epochs
    if settings.local_steps is not None:
        samples = splits.train.lengths[splits.present].mean()
        epochs = settings.local_steps / math.ceil(samples / settings.batch_size)
    return max(1, round(rounds * epochs * settings.participation))


def insist_on_several(shadows: int) -> None:
    """Raise ExperimentError for a number of shadow models that LiRA cannot do with."""
    if shadows < 2:
        raise ExperimentError(
            f"shadows={shadows}: LiRA needs at least 2 shadow models, so that each example can be "
            "in the training set of one and not of another"
        )
    if shadows > MOST_SHADOWS:
        raise ExperimentError(f"shadows={shadows}: {MOST_SHADOWS:,} are the most, a training each")


def _finite(**named: NDArray[Any]) -> None:
    for name, values in named.items():
        if values.size == 0:
            raise ExperimentError(f"{name}: there are no values")
        if bad := values.size - int(np.isfinite(values).sum()):
            raise ExperimentError(
                f"{name}: {bad} of {values.size} values are not finite; has the model diverged?"
            )
