"""Rationalisation models, which select the words for their decision.

A generator selects words, and a predictor reads only these: rationalisation as in Lei, Barzilay
and Jaakkola (EMNLP 2016), with the layers and loss terms of the code of FR (Liu et al., NeurIPS
2022), on which FedRNL (ECML-PKDD 2025) builds.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import gumbel_softmax

from fedsim.data import Dataset
from fedsim.models.model import Classifier, TextModel, models
from fedsim.models.text import Reader
from fedsim.objectives import Objective, Rationales

Selection = Literal["argmax", "sampled", "budget"]

PADDED = -1e6  # value of padding in the predictor's maximum over a document
ROUNDING = 1e-4  # by which α·length may be above a whole number of words
TINY = 1e-12  # added under a norm's root, whose gradient would be NaN for equal encoders


class Recurrent(nn.GRU):
    """A GRU that keeps its weights as views of one vector (`FlatModel`)."""

    def flatten_parameters(self) -> None:
        """Does nothing: cuDNN's copy would not follow training and loading."""


class Encoder(nn.Module):
    """A bidirectional GRU and layer norm, over all positions of a document, including padding."""

    def __init__(self, vectors: int, hidden: int) -> None:
        super().__init__()
        self.gru = Recurrent(vectors, hidden, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(2 * hidden)

    def forward(self, words: Tensor) -> Tensor:
        """(B, L, D) to (B, L, 2·hidden)."""
        return self.norm(self.gru(words)[0])


class Rationale(nn.Module):
    """Documents (B, L) to the predictor's encoding of the words that the generator selects."""

    def __init__(self, reader: Reader, section: RationaleModel) -> None:
        super().__init__()
        self.reader = reader
        D = reader.vectors.shape[1]
        self.generator = Encoder(D, section.hidden)
        self.chooser = nn.Linear(2 * section.hidden, 2)
        self.predictor = self.generator if section.shared else Encoder(D, section.hidden)
        self.dropout = nn.Dropout(section.dropout)
        self.evaluate, self.share = section.evaluate, section.share
        self.chooser.requires_grad_(not section.fixed_chooser)

    def select(self, x: Tensor) -> Tensor:
        """(B, L) 1 for selected words, 0 for others; padding may be selected, too.

        In training, each is drawn from the generator's probabilities (straight-through
        Gumbel-softmax with temperature 1); in evaluation, as `evaluate` says.
        """
        logits = self.chooser(self.dropout(self.generator(self.words(x))))
        if self.training or self.evaluate == "sampled":
            return gumbel_softmax(logits, tau=1, hard=True)[..., 1]
        score = logits[..., 1] - logits[..., 0]
        if self.evaluate == "argmax":
            return (score > 0).to(logits.dtype)
        place = torch.argsort(
            score.masked_fill(x == 0, -torch.inf), dim=1, descending=True, stable=True
        )
        budget = torch.ceil(self.share * (x != 0).sum(1, keepdim=True) - ROUNDING)
        among = (torch.arange(x.shape[1], device=x.device) < budget).to(logits.dtype)
        return torch.zeros_like(score).scatter_(1, place, among)

    def encode(self, x: Tensor, z: Tensor) -> Tensor:
        """(B, 2·hidden) the predictor's encoding of documents with the selection z (B, L)."""
        h = self.predictor(self.words(x) * z.unsqueeze(2))
        padding = x == 0
        padding[:, 0] = False  # an empty document has one position
        h = h.masked_fill(padding.unsqueeze(2), PADDED)
        return self.dropout(h.amax(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x, self.select(x))

    def words(self, x: Tensor) -> Tensor:
        """(B, L, D) vectors; zeros for padding."""
        return self.reader.vectors[x]


class RationaleClassifier(Classifier):
    """A classifier by selected words, with the weights of the terms of `objectives.Rationales`."""

    features: Rationale

    def __init__(self, features: Rationale, head: nn.Linear, section: RationaleModel) -> None:
        super().__init__(features, head)
        self.sparsity, self.continuity = section.sparsity, section.continuity
        self.weight = section.weight

    @property
    def shared(self) -> bool:
        """Whether generator and predictor share one encoder."""
        return self.features.predictor is self.features.generator

    def encoders(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of the generator's encoder and of the predictor's, in the same order."""
        features = self.features
        return list(features.generator.parameters()), list(features.predictor.parameters())


@models.register
class RationaleModel(TextModel):
    """Rationalisation with bidirectional GRUs: a generator selects words, a predictor reads them.

    With separate encoders it is RNP; with a shared encoder it is FR. FedRNL (`method.name=fedrnl`)
    keeps two encoders close to each other.

    Args:
        hidden: width of each direction of the GRUs (FR's papers say 200 for both together).
        dropout: dropout of the encoders' outputs.
        shared: use one encoder (GRU and layer norm) for generator and predictor.
        share: α, the share of words to select. Not given in FedRNL's paper; FR's code uses 0.12 to
            0.15 for beer and 0.09 to 0.12 for hotels.
        sparsity: λ_s, weight of |selected share − α|.
        continuity: λ_c, weight of the mean change from word to word.
        weight: weight of the cross-entropy, 0.9 in FR's code.
        evaluate: how words are selected in evaluation: those more likely selected than not
            (`argmax`); drawn, as in FR's code (`sampled`); or a fixed number, the ⌈α·length⌉
            likeliest (`budget`), so that models are compared at the same number of words.
        fixed_chooser: the generator's last layer keeps its initial weights. With
            `method.name=fedbabu` both last layers are then fixed.

    Unknown words have vectors like all others (see `data`); FR's code uses zeros for them.
    """

    name: str = "rationale"
    explainer: ClassVar[str] = "rationale"
    hidden: int = Field(100, ge=1)
    dropout: float = Field(0.2, ge=0, lt=1)
    shared: bool = False
    share: float = Field(0.15, ge=0, le=1)
    sparsity: float = Field(10.0, ge=0)
    continuity: float = Field(10.0, ge=0)
    weight: float = Field(0.9, gt=0)
    evaluate: Selection = "argmax"
    fixed_chooser: bool = False

    def objective(self, data: Dataset) -> Objective:
        return Rationales()

    def build_text(self, vectors: Tensor, known: Tensor, outputs: int) -> nn.Module:
        features = Rationale(Reader(vectors, known), self)
        return RationaleClassifier(features, nn.Linear(2 * self.hidden, outputs), self)


def encoder_distance(generator: list[Tensor], predictor: list[Tensor], kind: str) -> Tensor:
    """The distance of two encoders, over their tensors D_j = W_j^g − W_j^p (FedRNL, Eq. 4).

    Args:
        generator, predictor: their weights, in the same order.
        kind: `frobenius` Σ_j ‖D_j‖_F, `l2` Σ_j ‖D_j‖²_F, `l1` Σ_j Σ|D_j|, `cos` 1 − the cosine
            of both encoders as vectors.
    """
    differences = [g - p for g, p in zip(generator, predictor, strict=True)]
    if kind == "l1":
        return torch.stack([d.abs().sum() for d in differences]).sum()
    if kind == "l2":
        return torch.stack([d.square().sum() for d in differences]).sum()
    if kind == "frobenius":
        return torch.stack([(d.square().sum() + TINY).sqrt() for d in differences]).sum()
    if kind == "cos":
        a, b = (torch.cat([w.flatten() for w in encoder]) for encoder in (generator, predictor))
        return 1 - torch.cosine_similarity(a, b, dim=0)
    raise ValueError(f"unknown distance of encoders: {kind!r}")
