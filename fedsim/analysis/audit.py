"""How a finished run withstands attacks.

attacked = PrivacyAudit(fedsim.load(path))
attacked.infer_membership()["loss"].auc
attacked.invert_shared().reconstructed.ssim
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsim.analysis.replay import replay
from fedsim.data.partition import Indices
from fedsim.errors import RunFolderError
from fedsim.federation import Examples
from fedsim.methods.pixels import pixel_range, to_pixels
from fedsim.methods.sharing import SharesImages
from fedsim.objectives import Classification
from fedsim.privacy.inversion import (
    Fidelity,
    draw_reconstructions,
    fidelity,
    reconstruct,
    train_denoiser,
)
from fedsim.privacy.membership import (
    Outcome,
    confidence,
    entropy_scores,
    halves,
    lira_scores,
    loss_scores,
    outcome,
    shadow_confidences,
)
from fedsim.results.run import Run
from fedsim.rng import keyed_rng
from fedsim.training import logits

MEMBERS = 1000  # whose membership is inferred, at most, beside as many others
VICTIMS, AUXILIARY = 300, 1500  # images that are reconstructed, and that the attacker has, at most
DRAWS, EPOCHS = 2, 8  # of noise on each of the attacker's images; passes of its denoiser


@dataclass(frozen=True)
class Inversion:
    """What an attacker makes of shared images; (n, C, H, W) tensors with pixels in [0, 1].

    Args:
        originals: of the victims.
        items: what was shared of them, in pixels; noise may take them beyond [0, 1].
        found: what the attacker reconstructs.
        labels: (n,) names of their classes.
        shared: how close `items` are to `originals`.
        reconstructed: how close `found` is.
    """

    originals: Tensor
    items: Tensor
    found: Tensor
    labels: tuple[str, ...]
    shared: Fidelity
    reconstructed: Fidelity

    def draw(self, name: str, path: Path) -> None:
        """Draw originals, shared items and reconstructions as a PNG file."""
        draw_reconstructions({name: (self.items, self.found)}, self.originals, self.labels, path)


class PrivacyAudit:
    """A finished run of a classifier, under attack.

    Raises:
        BadInput: it is not finished, has no global classifier, or its data is not what it was.
    """

    def __init__(self, run: Run) -> None:
        self.experiment = run.experiment
        again = replay(run)
        self.fed, self.state = again.fed, again.state
        self._dataset, self._splits, self._spec = again.dataset, again.splits, again.spec
        classifies = isinstance(again.spec.objective, Classification)
        if not classifies or not isinstance(again.global_model(), Tensor):
            raise RunFolderError(f"{run.path}: leaves no global classifier to attack")
        self._path = run.path
        phases = run.rounds.get("phase")
        last = run.rounds if phases is None else run.rounds[phases == phases.iloc[-1]]
        self._rounds = len(last)

    @property
    def shares_images(self) -> bool:
        """Whether the run has shared images that can be inverted."""
        return self._sharing is not None

    @property
    def _sharing(self) -> SharesImages | None:
        method = self.experiment.method
        if isinstance(method, SharesImages) and method.has_shared(self.state):
            return method
        return None

    def infer_membership(self, shadows: int = 0) -> dict[str, Outcome]:
        """Tell clients' training examples from test examples by the final global model.

        Args:
            shadows: shadow models of LiRA, which is left out without. They train on halves of the
                members and others that are examined, for as many passes as the run's last phase
                made over a client's example on average.

        Returns:
            By the attack's name: `loss`, `entropy`, `lira`.
        """
        known = self._splits.train.values
        count = min(MEMBERS, len(known), len(self._dataset.test_y))
        rng = keyed_rng(self.experiment.seed, "attack/membership")
        members = self._training_examples(rng.choice(known, count, replace=False))
        others = self._test_examples(rng.choice(len(self._dataset.test_y), count, replace=False))
        x, y = torch.cat([members.x, others.x]), torch.cat([members.y, others.y])
        labels, inside = y.cpu().numpy(), np.arange(2 * count) < count
        self.fed.model.load(self.fed.tensor(self.state.weights))
        seen = logits(self.fed.model.module, x)
        scores = {"loss": loss_scores(seen, labels), "entropy": entropy_scores(seen)}
        if shadows:
            train, spec = self.experiment.train, self._spec
            parts = halves(len(labels), shadows, rng)
            trained = shadow_confidences(
                lambda: spec.model.build_for(spec.data, spec.outputs),
                x,
                y,
                parts,
                train,
                max(1, round(self._rounds * train.local_epochs * train.participation)),
                self.experiment.seed,
                self.fed.device,
                spec.objective.loss,
            )
            scores["lira"] = lira_scores(confidence(seen, labels), trained, parts)
        return {name: outcome(s[inside], s[~inside]) for name, s in scores.items()}

    def invert_shared(self) -> Inversion:
        """Reconstruct clients' images from what they share, by a denoiser.

        The attacker knows the mechanism and the models that it uses (the global one, where each
        client attributes by its own), and has images of the same kind (of the central test set),
        with labels, to train its denoiser on.

        Raises:
            RunFolderError: the run shared no images.
        """
        sharing = self._sharing
        if sharing is None:
            raise RunFolderError(f"{self._path}: shares no images to invert")
        rng = keyed_rng(self.experiment.seed, "attack/inversion")
        originals, items, y = self._shared_pairs(sharing, rng)
        many = min(AUXILIARY, len(self._dataset.test_y))
        own = self._test_examples(rng.choice(len(self._dataset.test_y), many, replace=False))
        denoiser = train_denoiser(
            torch.cat([self._shared(sharing, own, f"draw {k}") for k in range(DRAWS)]),
            torch.cat([self._pixels(own.x)] * DRAWS),
            epochs=EPOCHS,
            seed=self.experiment.seed,
        )
        found = reconstruct(denoiser, items)
        labels = tuple(self._dataset.classes[c] for c in y)
        shared, reconstructed = fidelity(originals, items), fidelity(originals, found)
        return Inversion(originals, items, found, labels, shared, reconstructed)

    def _shared_pairs(
        self, sharing: SharesImages, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Clients' images, what they shared of them, both in pixels, and their labels."""
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for k in rng.permutation(self.fed.num_clients).tolist():
            if sum(len(y) for *_, y in parts) >= VICTIMS:
                break
            parts.append(sharing.shared_pairs(self.fed, self.state, k))
        x, items, y = (torch.cat(part) for part in zip(*parts, strict=True))
        rows = torch.from_numpy(rng.permutation(len(y))[:VICTIMS]).to(x.device)
        return x[rows].clamp(0, 1), items[rows], y[rows].tolist()

    def _training_examples(self, rows: Indices) -> Examples:
        return self.fed.prepare(self._dataset.x[rows], self._dataset.y[rows])

    def _test_examples(self, rows: Indices) -> Examples:
        return self.fed.prepare(self._dataset.test_x[rows], self._dataset.test_y[rows])

    def _pixels(self, x: Tensor) -> Tensor:
        """Pixels in [0, 1] of the network's inputs."""
        return to_pixels(x, self.fed.tensor(pixel_range(self.fed))).clamp(0, 1)

    def _shared(self, sharing: SharesImages, examples: Examples, draw: str) -> Tensor:
        """What would be shared of images, in pixels."""
        rng = keyed_rng(self.experiment.seed, f"attack/{draw}")
        return sharing.obscured(self.fed, self.state, examples.x, examples.y, rng)
