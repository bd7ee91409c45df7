"""How a finished run withstands attacks.

attacked = PrivacyAudit(fedsim.load(path))
attacked.infer_membership()["loss"].auc
attacked.invert_shared().reconstructed.ssim
shown = IntegratedGradients()
attacked.infer_membership(4, [shown], noise=1)["integrated_gradients/map_lira"].auc
attacked.invert_explanations(shown, noise=1).reconstructed.ssim
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.analysis.replay import ModelSnapshot, replay
from fedsim.data.subset import Indices
from fedsim.errors import ExperimentError, RunFolderError
from fedsim.explain.explainer import FeatureExplainer
from fedsim.explain.faithfulness import present
from fedsim.explain.measure import by_row, relevances_of
from fedsim.explain.scores import Scores
from fedsim.explain.share import obscured
from fedsim.federation import Examples
from fedsim.methods.pixels import pixel_range, to_pixels
from fedsim.methods.sharing import SharesImages
from fedsim.objectives import Classification
from fedsim.privacy.inversion import (
    SMALLEST,
    Fidelity,
    check_fidelity,
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
    log_norm,
    loss_scores,
    map_scores,
    norm_scores,
    outcome,
    shadow_models,
    variance_scores,
)
from fedsim.results.run import Run
from fedsim.rng import keyed_rng
from fedsim.training import logits

MEMBERS = 1000  # whose membership is inferred, at most, beside as many others
VICTIMS, AUXILIARY = 300, 1500  # images that are reconstructed, and that the attacker has, at most
DRAWS, EPOCHS = 2, 8  # of noise on each of the attacker's images; passes of its denoiser


@dataclass(frozen=True)
class Inversion:
    """What an attacker makes of shared images or explanations; images (n, C, H, W) in [0, 1].

    Args:
        originals: of the victims.
        items: what was shared of them, in pixels, which noise may take beyond [0, 1]; or what was
            said of them, to be drawn: 0.5 is no relevance, and 0 or 1 the most in a map.
        found: what the attacker reconstructs.
        labels: (n,) names of their classes.
        reconstructed: how close `found` is to `originals`.
        mean_image: how close the mean of the attacker's own images is, its guess without items.
    """

    originals: Tensor
    items: Tensor
    found: Tensor
    labels: tuple[str, ...]
    reconstructed: Fidelity
    mean_image: Fidelity

    @property
    def shared(self) -> Fidelity:
        """How close shared images are to `originals`, as they are."""
        return fidelity(self.originals, self.items)

    def draw(self, name: str, path: Path) -> None:
        """Draw originals, items and reconstructions as a PNG file."""
        draw_reconstructions({name: (self.items, self.found)}, self.originals, self.labels, path)


class PrivacyAudit:
    """A finished run of a classifier, under attack.

    Where explanations are attacked, they are what a user of the final global model is shown:
    relevances for what it decides. `noise` is in them before anyone sees them: None leaves them as
    they are, a number scales each map to unit L2 norm and adds as much noise (`obscured`). Their
    scale then tells nothing, even with 0.

    Raises:
        BadInput: it is not finished, has no global classifier, or its data is not what it was.
    """

    def __init__(self, run: Run) -> None:
        self.experiment = run.experiment
        again = replay(run)
        self.fed, self.state = again.fed, again.state
        self._dataset, self._spec = again.dataset, again.spec
        self._splits = again.splits.held(again.after)
        classifies = isinstance(again.spec.objective, Classification)
        own = again.global_model()
        if not classifies or not isinstance(own, Tensor):
            raise RunFolderError(f"{run.path}: leaves no global classifier to attack")
        snapshot = ModelSnapshot(own, again, client=None)
        self._network, self._data = snapshot.network(), snapshot.data()
        self._model = snapshot.explained()
        self._path = run.path
        phases = run.rounds.get("phase")
        last = run.rounds if phases is None else run.rounds[phases == phases.iloc[-1]]
        self._rounds = len(last)

    @property
    def explains_images(self) -> bool:
        """Whether inputs are images that can be reconstructed from explanations."""
        shape = self._dataset.shape
        return len(shape) == 3 and min(shape[1:]) >= SMALLEST

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

    def infer_membership(
        self,
        shadows: int = 0,
        explainers: Sequence[FeatureExplainer] | None = None,
        noise: float | None = None,
    ) -> dict[str, Outcome]:
        """Tell clients' training examples from test examples by the final global model.

        Args:
            shadows: shadow models of LiRA, which is left out without. They train on halves of the
                members and others that are examined, for as many passes as the run's last phase
                made over a client's example on average. They are explained as the model is.
            explainers: whose explanations are attacked as well; by default those of the run's
                `explain` section, or none.
            noise: in explanations; see the class.

        Returns:
            By the attack's name: `loss`, `entropy`, `lira`; and of explanations
            `<explainer>/variance`, `<explainer>/norm`, `<explainer>/norm_lira` and
            `<explainer>/map_lira`.

        Raises:
            BadInput: an explainer is not for the model, a noise is negative or not finite, or
                there are too few shadow models.
        """
        if explainers is None:
            section = self.experiment.explain
            explainers = () if section is None else section.explainers
        self._check(explainers, noise)
        known = self._splits.train.values
        count = min(MEMBERS, len(known), len(self._dataset.test_y))
        rng = keyed_rng(self.experiment.seed, "attack/membership")
        members = self._training_examples(rng.choice(known, count, replace=False))
        others = self._test_examples(rng.choice(len(self._dataset.test_y), count, replace=False))
        x, y = torch.cat([members.x, others.x]), torch.cat([members.y, others.y])
        labels, inside = y.cpu().numpy(), np.arange(2 * count) < count
        there = present(x)

        def explained(network: nn.Module, number: int = -1) -> dict[str, Scores]:
            """What each explainer says of a model's decisions; of a shadow model, its number."""
            return {
                explainer.name: _sent(*self._maps(explainer, network, x, number), there, noise)
                for explainer in explainers
            }

        def compared(network: nn.Module, maps: dict[str, Scores]) -> dict[str, Scores]:
            """What LiRA compares with that of shadow models."""
            norms = {name: -by_row(norm_scores, there, sent) for name, sent in maps.items()}
            return {
                "lira": confidence(logits(network, x), labels),
                **{f"{name}/norm_lira": log_norm(norm) for name, norm in norms.items()},
            }

        seen, maps = logits(self._network, x), explained(self._network)
        scores = {"loss": loss_scores(seen, labels), "entropy": entropy_scores(seen)}
        for name, sent in maps.items():
            scores[f"{name}/variance"] = by_row(variance_scores, there, sent)
            scores[f"{name}/norm"] = by_row(norm_scores, there, sent)
        if shadows:
            train, spec = self.experiment.train, self._spec
            parts = halves(len(labels), shadows, rng)
            trained = shadow_models(
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
            values = []
            means = {name: np.zeros((2, *sent.shape)) for name, sent in maps.items()}
            for s, network in enumerate(trained):
                of_shadow = explained(network, s)
                values.append(compared(network, of_shadow))
                for name, sent in of_shadow.items():
                    for mean, where in zip(means[name], (parts, ~parts), strict=True):
                        mean += sent * (where[s] / where.sum(axis=0))[:, np.newaxis]
            for name, target in compared(self._network, maps).items():
                scores[name] = lira_scores(target, np.stack([v[name] for v in values]), parts)
            for name, sent in maps.items():
                scores[f"{name}/map_lira"] = map_scores(sent, *means[name])
        by_model_first = sorted(scores, key=lambda name: "/" in name)
        return {n: outcome(scores[n][inside], scores[n][~inside]) for n in by_model_first}

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
        check_fidelity()  # before the denoiser is trained, not after
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
        return self._inversion(originals, items, reconstruct(denoiser, items), y, own)

    def invert_explanations(
        self, explainer: FeatureExplainer, noise: float | None = None
    ) -> Inversion:
        """Reconstruct clients' training images from explanations of decisions on them.

        By a denoiser, to which a map (H, W) is the same in each channel. The attacker has
        explanations of images of its own, of the central test set, by the same model and with the
        same noise, to train it on.

        Args:
            explainer: whose explanations.
            noise: in them; see the class.

        Raises:
            BadInput: inputs are not images, or too small; the explainer is not for the model; the
                noise is negative or not finite.
        """
        if not self.explains_images:
            raise RunFolderError(
                f"{self._path}: its inputs are no images of {SMALLEST} pixels a side or more, "
                "which alone are reconstructed from explanations"
            )
        self._check([explainer], noise)
        check_fidelity()
        rng = keyed_rng(self.experiment.seed, "attack/inversion")
        known, tests = self._splits.train.values, len(self._dataset.test_y)
        victims = self._training_examples(
            rng.choice(known, min(VICTIMS, len(known)), replace=False)
        )
        own = self._test_examples(rng.choice(tests, min(AUXILIARY, tests), replace=False))

        def sent(x: Tensor, number: int, draws: int) -> Tensor:
            """(draws·n, C, H, W) maps as they are sent, the same in each channel."""
            maps, drawn = self._maps(explainer, self._network, x, number)
            each = [_sent(maps, drawn, present(x), noise) for _ in range(draws)]
            found = torch.from_numpy(np.concatenate(each)).to(x)
            return found.view(-1, 1, *x.shape[2:]).expand(-1, *x.shape[1:])

        items = sent(victims.x, 0, 1)
        denoiser = train_denoiser(
            sent(own.x, 1, DRAWS),
            torch.cat([self._pixels(own.x)] * DRAWS),
            epochs=EPOCHS,
            seed=self.experiment.seed,
        )
        most = items.abs().amax(dim=(1, 2, 3), keepdim=True)
        shown = 0.5 + items / torch.where(most > 0, 2 * most, 1)
        originals, found = self._pixels(victims.x), reconstruct(denoiser, items)
        return self._inversion(originals, shown, found, victims.y.tolist(), own)

    def _check(self, explainers: Sequence[FeatureExplainer], noise: float | None) -> None:
        if noise is not None and not 0 <= noise < math.inf:
            raise ExperimentError(
                f"noise={noise:g}: must be 0 or more, as a share of an explanation's length"
            )
        for explainer in explainers:
            explainer.check(self._model, self._data)

    def _maps(
        self, explainer: FeatureExplainer, network: nn.Module, x: Tensor, number: int
    ) -> tuple[Scores, np.random.Generator]:
        """(n, P) relevances for what a network decides, and the random stream that goes on."""
        decided = torch.from_numpy(logits(network, x)).argmax(dim=1)
        rng = keyed_rng(self.experiment.seed, f"attack/{explainer.name}", client=number)
        model = replace(self._model, network=network)
        return relevances_of(explainer, model, self._data, x, decided, rng), rng

    def _inversion(
        self, originals: Tensor, items: Tensor, found: Tensor, y: list[int], own: Examples
    ) -> Inversion:
        labels = tuple(self._dataset.classes[c] for c in y)
        mean = self._pixels(own.x).mean(dim=0).expand_as(originals)
        reconstructed, guessed = fidelity(originals, found), fidelity(originals, mean)
        return Inversion(originals, items, found, labels, reconstructed, guessed)

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


def _sent(
    maps: Scores, rng: np.random.Generator, there: NDArray[np.bool_], noise: float | None
) -> Scores:
    """(n, P) explanations as they are seen: 0 in parts that inputs lack."""
    return np.where(there, maps, 0) if noise is None else obscured(maps, there, noise, rng)
