"""How good chosen words are, against those that people have marked; how alike encoders are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsim.models.rationale import Rationaliser

BATCH = 500  # documents at once
OF = "\n"  # between an aspect and what is of it, in names of totals


@torch.no_grad()
def rationale_totals(
    network: Rationaliser, x: Tensor, y: Tensor, marks: Tensor | None
) -> dict[str, float]:
    """Sums over documents, which `rationale_scores` makes scores of.

    Args:
        network: is left in evaluation.
        x: (n, L) documents.
        y: (n,) their classes.
        marks: (n, L) words that are the rationale, if it is known.

    Returns:
        `loss` and `right`, as of `fedsim.training.evaluate`; `words`; `chosen` places, padding
        counted; `full`, `chosen_only` and `rest_only`: the probability of the class decided
        upon, with all words, with those chosen, and with those that were not; `right/c` and
        `of/c` decisions for examples of each class c, and all; with marks `gold`, how many there
        are, and `hit`, how many of them were chosen.
    """
    network.eval()
    names = ["loss", "right", "words", "chosen", "full", "chosen_only", "rest_only"]
    totals = dict.fromkeys(names + (["gold", "hit"] if marks is not None else []), 0.0)
    for c in range(network.head.out_features):
        totals[f"right/{c}"] = 0.0
        totals[f"of/{c}"] = float((y == c).sum())
    for start in range(0, len(x), BATCH):
        part, labels = x[start : start + BATCH], y[start : start + BATCH]
        z = network.features.choice(part)
        ways = {"full": torch.ones_like(z), "chosen_only": z, "rest_only": 1 - z}
        logits = {
            name: network.head(network.features.read(part, way)) for name, way in ways.items()
        }
        totals["loss"] += float(cross_entropy(logits["chosen_only"], labels, reduction="sum"))
        found = {name: outputs.softmax(dim=1) for name, outputs in logits.items()}
        decided = found["chosen_only"].argmax(dim=1, keepdim=True)
        for name, probabilities in found.items():
            totals[name] += float(probabilities.gather(1, decided).double().sum())
        for c in labels[decided.flatten() == labels].tolist():
            totals["right"] += 1
            totals[f"right/{c}"] += 1
        totals["words"] += float((part != 0).sum())
        totals["chosen"] += float(z.double().sum())
        if marks is not None:
            own = marks[start : start + BATCH]
            totals["gold"] += float(own.sum())
            totals["hit"] += float((z.bool() & own).sum())
    return totals


def rationale_scores(totals: Mapping[str, float]) -> dict[str, float]:
    """What chosen words, and decisions by them, are worth.

    Args:
        totals: of `rationale_totals`, over all documents.

    Returns:
        `balanced_accuracy`, the mean over classes; `majority`, the share of the largest class,
        which is the accuracy of always saying the same. `chosen`: the share of the words that is
        chosen. `comprehensiveness`: by how much the class decided upon is less probable by the
        other words than by all; `sufficiency`: by how much by the chosen ones alone. With marks
        `rationale_precision`, `rationale_recall`, `rationale_f1`, over all words of all
        documents, and `chance_f1`: that of as many words chosen at random among words,
        2gs/(g + s) for shares g marked and s chosen, s at most 1.
    """
    words = max(totals["words"], 1)
    counts = {key: n for key, n in totals.items() if key.startswith("of/") and n}
    documents = sum(counts.values())
    recalls = [totals[key.replace("of/", "right/")] / n for key, n in counts.items()]
    found = {
        "balanced_accuracy": sum(recalls) / len(recalls),
        "majority": max(counts.values()) / documents,
        "chosen": totals["chosen"] / words,
        "comprehensiveness": (totals["full"] - totals["rest_only"]) / documents,
        "sufficiency": (totals["full"] - totals["chosen_only"]) / documents,
    }
    if "gold" in totals:
        hit, chosen, gold = totals["hit"], totals["chosen"], totals["gold"]
        g, s = gold / words, min(chosen / words, 1.0)
        found |= {
            "rationale_precision": hit / chosen if chosen else 0.0,
            "rationale_recall": hit / gold if gold else 0.0,
            "rationale_f1": 2 * hit / (chosen + gold) if chosen + gold else 0.0,
            "chance_f1": 2 * g * s / (g + s) if g + s else 0.0,
        }
    return found


def aspect_scores(totals: Mapping[str, float]) -> dict[str, float]:
    """Scores over documents of all aspects, and of each where there are several.

    Args:
        totals: of `rationale_totals` for each aspect, its name and `OF` before theirs.

    Returns:
        `loss`, `accuracy` and what `rationale_scores` has; then `accuracy/aroma`,
        `balanced_accuracy/aroma`, `rationale_f1/aroma` and `chance_f1/aroma` for an aspect.
    """
    parts: dict[str, dict[str, float]] = {}
    for key, total in totals.items():
        aspect, _, name = key.partition(OF)
        parts.setdefault(aspect, {})[name] = total
    names = next(iter(parts.values()))
    found = _scores({name: math.fsum(own[name] for own in parts.values()) for name in names})
    if len(parts) > 1:
        told = ("accuracy", "balanced_accuracy", "rationale_f1", "chance_f1")
        for aspect, own in parts.items():
            scores = _scores(own)
            found |= {f"{name}/{aspect}": scores[name] for name in told if name in scores}
    return found


def _scores(totals: Mapping[str, float]) -> dict[str, float]:
    documents = math.fsum(n for key, n in totals.items() if key.startswith("of/"))
    means = {"loss": totals["loss"] / documents, "accuracy": totals["right"] / documents}
    return means | rationale_scores(totals)


def encoder_scores(model: Mapping[str, NDArray[np.floating]]) -> dict[str, float]:
    """What the weights of a `Rationaliser` say of its encoders, generator's and predictor's.

    Args:
        model: weights by name.

    Returns:
        `encoder_distance`, ‖θ_e − φ_e‖ over all their weights; nothing if there is one encoder.
    """
    own, other = "features.generator.", "features.predictor."
    squares = [
        np.square(weights - model[own + name.removeprefix(other)], dtype=np.float64).sum()
        for name, weights in model.items()
        if name.startswith(other)
    ]
    return {"encoder_distance": math.sqrt(math.fsum(squares))} if squares else {}


@torch.no_grad()
def encoder_similarity(networks: Sequence[Rationaliser], x: Tensor) -> dict[str, float]:
    """How alike clients' encoders are: the mean linear CKA over all pairs (FedRNL, Fig. 2).

    A representation of a document is the mean of what an encoder makes of its words: a generator
    reads all of them, a predictor those that its own generator chooses. Where hardly a word is
    chosen, predictors see how long documents are, and are alike in that.

    Args:
        networks: two or more, on the documents' device, that do not draw in evaluation.
        x: (n, L) documents, the same for all.

    Returns:
        `generator` and `predictor`, as of `linear_cka`, and `chosen`, the mean of the shares of
        words that generators choose.
    """
    read: dict[str, list[NDArray[np.floating]]] = {"generator": [], "predictor": []}
    words, chosen = (x != 0).float()[:, :, None], []
    for network in networks:
        features = network.eval().features
        z = features.choice(x)[:, :, None]
        chosen.append(float((z * words).sum() / words.sum()))
        for part, ways in (("generator", 1.0), ("predictor", z)):
            h = features.get_submodule(part)(features.words(x) * ways)
            mean = (h * words).sum(dim=1) / words.sum(dim=1).clamp(min=1)
            read[part].append(mean.cpu().numpy())
    pairs = list(itertools.combinations(range(len(networks)), 2))
    alike = {
        part: math.fsum(linear_cka(own[a], own[b]) for a, b in pairs) / len(pairs)
        for part, own in read.items()
    }
    return {**alike, "chosen": math.fsum(chosen) / len(chosen)}


def linear_cka(x: NDArray[np.floating], y: NDArray[np.floating]) -> float:
    """How alike two representations (n, D) and (n, E) of the same n examples are, from 0 to 1.

    ‖Yᵀ·X‖² / (‖Xᵀ·X‖·‖Yᵀ·Y‖), Frobenius norms of columns less their means (Kornblith et al. 2019).
    Rotations and scales change nothing. NaN where one is the same for all examples.
    """
    a, b = (v.astype(np.float64) - v.mean(axis=0, dtype=np.float64) for v in (x, y))
    across = np.square(b.T @ a).sum()
    own = math.sqrt(np.square(a.T @ a).sum()) * math.sqrt(np.square(b.T @ b).sum())
    return float(across / own) if own else math.nan
