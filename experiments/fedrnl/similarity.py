"""The similarity of clients' encoders of rationalisation models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.models.rationale import RationaleClassifier


@torch.no_grad()
def encoder_similarity(networks: Sequence[RationaleClassifier], x: Tensor) -> dict[str, float]:
    """Similarity of clients' encoders: the mean linear CKA over all pairs (FedRNL, Fig. 2).

    A document is represented by the mean of an encoder's outputs for its words: generators read
    all words, predictors those that their own generator selects. If hardly any words are selected,
    predictors see only the lengths of documents, which makes them similar.

    Args:
        networks: two or more, on the documents' device, without sampling in evaluation.
        x: (n, L) documents, the same for all.

    Returns:
        `generator` and `predictor`, see `linear_cka`, and `chosen`, the mean share of selected
        words.
    """
    read: dict[str, list[NDArray[np.floating]]] = {"generator": [], "predictor": []}
    words, chosen = (x != 0).float()[:, :, None], []
    for network in networks:
        features = network.eval().features
        z = features.select(x)[:, :, None]
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
    """Similarity of two representations (n, D) and (n, E) of the same n examples, from 0 to 1.

    ‖Yᵀ·X‖² / (‖Xᵀ·X‖·‖Yᵀ·Y‖), Frobenius norms of centred columns (Kornblith et al. 2019).
    Invariant to rotation and scale. NaN if one is the same for all examples.
    """
    a, b = (v.astype(np.float64) - v.mean(axis=0, dtype=np.float64) for v in (x, y))
    across = np.square(b.T @ a).sum()
    own = math.sqrt(np.square(a.T @ a).sum()) * math.sqrt(np.square(b.T @ b).sum())
    differ = all(np.ptp(v, axis=0).any() for v in (x, y))  # by more than rounding
    return min(float(across / own), 1.0) if own and differ else math.nan
