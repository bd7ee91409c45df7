"""How good chosen words are, against those that people have marked; how alike encoders are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.models.rationale import RationaleClassifier

BATCH = 500  # documents at once
OF = "\n"  # between an aspect and what is of it, in names of totals


@torch.no_grad()
def encoder_similarity(networks: Sequence[RationaleClassifier], x: Tensor) -> dict[str, float]:
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
    """How alike two representations (n, D) and (n, E) of the same n examples are, from 0 to 1.

    ‖Yᵀ·X‖² / (‖Xᵀ·X‖·‖Yᵀ·Y‖), Frobenius norms of columns less their means (Kornblith et al. 2019).
    Rotations and scales change nothing. NaN where one is the same for all examples.
    """
    a, b = (v.astype(np.float64) - v.mean(axis=0, dtype=np.float64) for v in (x, y))
    across = np.square(b.T @ a).sum()
    own = math.sqrt(np.square(a.T @ a).sum()) * math.sqrt(np.square(b.T @ b).sum())
    return float(across / own) if own else math.nan
