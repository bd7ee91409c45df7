"""Privacy attacks on a finished run.

`audit(run)` carries out all attacks that apply and returns tables and pictures; `PrivacyAudit`
carries out one attack at a time:

attacked = PrivacyAudit(fedsim.load(path))
attacked.infer_membership()[None]["loss"].auc
attacked.invert_shared().reconstructed.ssim
shown = IntegratedGradients()
attacked.infer_membership(4, [shown], noises=[0, 1])[1]["integrated_gradients/map_lira"].auc
attacked.invert_explanations(shown, noise=1).reconstructed.ssim
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor, nn

from fedsim.analysis.attacks.inversion import (
    SMALLEST,
    Fidelity,
    Inversion,
    check_fidelity,
    fidelity,
    reconstruct,
    train_denoiser,
)
from fedsim.analysis.attacks.membership import (
    Fit,
    Outcome,
    confidence,
    entropy_scores,
    fit,
    guessing,
    halves,
    insist_on_several,
    lira_scores,
    log_norm,
    loss_scores,
    map_scores,
    norm_scores,
    outcome,
    passes,
    shadow_models,
    variance_scores,
)
from fedsim.analysis.attacks.report import MAJORITY, MODEL, SHADOWS, SHARED, Audit, doubts, failed
from fedsim.analysis.explanations import Wanted, find_explainer
from fedsim.analysis.replay import ModelSnapshot, replay
from fedsim.config.arguments import checked
from fedsim.config.registry import LARGEST
from fedsim.data.splits import Indices
from fedsim.errors import BadInput, ExperimentError, RunFolderError
from fedsim.explain.explainer import Explainer, FeatureExplainer, refuse_unfit
from fedsim.explain.scores.faithfulness import present
from fedsim.explain.scores.measure import by_row, relevances_of
from fedsim.explain.scores.relevance import Scores
from fedsim.explain.section import Explain
from fedsim.explain.share import obscured
from fedsim.federation import Examples
from fedsim.launch.progress import LineProgress
from fedsim.methods.shared.pool import SharesImages, pixel_range, to_pixels
from fedsim.objectives import Classification
from fedsim.results.run import Run
from fedsim.support.rng import keyed_rng
from fedsim.training import logits

MEMBERS = 1000  # whose membership is inferred, at most, beside as many others
VICTIMS, AUXILIARY = 300, 1500  # images that are reconstructed, and that the attacker has, at most
DRAWS, EPOCHS = 2, 8  # of noise on each of the attacker's images; passes of its denoiser


_Sent = tuple[float | None, str]  # explanations as seen: with which noise, by which explainer


class PrivacyAudit:
    """A finished run of a classifier, under attack.

    Attacked explanations are those that a user of the final global model sees: relevances for its
    decision. `noise` is added before anyone sees them: None leaves them unchanged, a number scales
    each map to unit L2 norm and adds noise of this relative length (`obscured`). After scaling,
    the magnitude reveals nothing, even with a noise of 0.

    Attributes:
        fits: how well the model, and the shadow models, have learnt the members and the others;
            known once membership was inferred.

    Raises:
        BadInput: the run is not finished or has no global classifier, or its data has changed.
    """

    def __init__(self, run: Run | str | Path) -> None:
        again = replay(run)
        run = again.run
        self._experiment = run.experiment
        self._fed, self._state = again.fed, again.state
        self._dataset, self._spec = again.dataset, again.spec
        self._splits = again.splits.held(again.after)
        if not (model := again.spec.model).builds_network:
            raise RunFolderError(
                f"{run.path}: model.name={model.name} is a {model.kind}; attacks need a network"
            )
        classifies = isinstance(again.spec.objective, Classification)
        own = again.global_model()
        if not classifies or not isinstance(own, Tensor):
            raise RunFolderError(f"{run.path}: leaves no global classifier to attack")
        snapshot = ModelSnapshot(own, again, client=None)
        self._network, self._data = snapshot.network(), snapshot.data()
        self._model = snapshot.explained()
        self._path = run.path
        self.fits: dict[str, Fit] = {}
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
        method = self._experiment.method
        if isinstance(method, SharesImages) and method.has_shared(self._state):
            return method
        return None

    def infer_membership(
        self,
        shadows: int = 0,
        explainers: Sequence[FeatureExplainer] | None = None,
        noises: Sequence[float | None] = (None,),
        on_shadow: Callable[[int], None] = lambda s: None,
    ) -> dict[float | None, dict[str, Outcome]]:
        """Distinguish clients' training examples from test examples by the final global model.

        Args:
            shadows: number of shadow models for LiRA; 0 skips it. Each begins with the run's
                `train.initial_weights` and frozen layers, if it has any, and trains on half of the
                examined members and non-members, for as many passes as the run's last phase made
                over a client's example on average. They are explained in the same way as the
                model.
            explainers: explainers whose explanations are also attacked; by default those of the
                run's `explain` section, or none.
            noises: one or several noise levels for the explanations; see the class. Shadow models
                are trained once for all levels.
            on_shadow: called after each shadow model with the number of models done.

        Returns:
            Outcomes by noise, then by the attack's name: `loss`, `entropy`, `lira`; and for
            explanations `<explainer>/variance`, `<explainer>/norm`, `<explainer>/norm_lira` and
            `<explainer>/map_lira`.

        Raises:
            BadInput: an explainer does not apply to the model, a noise is negative or not finite,
                or there are too few shadow models.
        """
        if explainers is None:
            explainers = _explainers(None, self._experiment.explain)
        self._check(explainers, noises)
        known, count = self._splits.training_rows, self.members
        rng = keyed_rng(self._experiment.seed, "attack/membership")
        members = self._training_examples(rng.choice(known, count, replace=False))
        others = self._test_examples(rng.choice(len(self._dataset.test_y), count, replace=False))
        x, y = torch.cat([members.x, others.x]), torch.cat([members.y, others.y])
        labels, inside = y.cpu().numpy(), np.arange(2 * count) < count
        there = present(x, self._dataset.parts)

        def explained(network: nn.Module, number: int = -1) -> dict[_Sent, Scores]:
            """What each explainer says of a model's decisions; of a shadow model, its number."""
            found: dict[_Sent, Scores] = {}
            for explainer in explainers:
                maps, drawn = self._maps(explainer, network, x, number)
                for noise in noises:  # each is drawn as if it were the only one
                    sent = _sent(maps, copy.deepcopy(drawn), there, noise)
                    found[noise, explainer.label] = sent
            return found

        def compared(outputs: NDArray[Any], maps: dict[_Sent, Scores]) -> dict[_Sent, Scores]:
            """What LiRA compares with that of shadow models; by no explainer, of the model."""
            norms = {key: -by_row(norm_scores, there, sent) for key, sent in maps.items()}
            of_maps = {key: log_norm(norm) for key, norm in norms.items()}
            return {(None, ""): confidence(outputs, labels), **of_maps}

        seen, maps = logits(self._network, x), explained(self._network)
        majority = np.eye(seen.shape[1])[np.full(len(labels), np.bincount(labels).argmax())]
        constant = fit(majority, labels, inside)  # has no loss
        guess = Fit(constant.inside, constant.outside)
        self.fits = {MODEL: fit(seen, labels, inside), MAJORITY: guess}
        of_model = {"loss": loss_scores(seen, labels), "entropy": entropy_scores(seen)}
        scores: dict[float | None, dict[str, Scores]] = {noise: {} for noise in noises}
        for (noise, name), sent in maps.items():
            scores[noise][f"{name}/variance"] = by_row(variance_scores, there, sent)
            scores[noise][f"{name}/norm"] = by_row(norm_scores, there, sent)
        if shadows:
            parts, values, fits = halves(len(labels), shadows, rng), [], []
            means = {key: np.zeros((2, *sent.shape)) for key, sent in maps.items()}
            spec, seed, device = self._spec, self._experiment.seed, self._fed.server.device
            how = self._experiment.train, self.passes, seed, device, spec.objective.loss
            for s, network in enumerate(shadow_models(spec.build_begun, x, y, parts, *how)):
                of_shadow, outputs = explained(network, s), logits(network, x)
                fits.append(fit(outputs, labels, parts[s]))
                values.append(compared(outputs, of_shadow))
                for key, sent in of_shadow.items():
                    for mean, where in zip(means[key], (parts, ~parts), strict=True):
                        mean += sent * (where[s] / where.sum(axis=0))[:, np.newaxis]
                on_shadow(s + 1)
            self.fits[SHADOWS] = Fit(*map(float, np.mean([astuple(f) for f in fits], axis=0)))
            for key, target in compared(seen, maps).items():
                likelier = lira_scores(target, np.stack([v[key] for v in values]), parts)
                noise, name = key
                if name:
                    scores[noise][f"{name}/norm_lira"] = likelier
                else:
                    of_model["lira"] = likelier
            for (noise, name), sent in maps.items():
                means_of = means[noise, name]
                scores[noise][f"{name}/map_lira"] = map_scores(sent, *means_of)

        def outcomes(found: Mapping[str, Scores]) -> dict[str, Outcome]:
            return {n: outcome(each[inside], each[~inside]) for n, each in found.items()}

        names = [explainer.label for explainer in explainers]
        once, results = outcomes(of_model), {}
        for noise, of_maps in scores.items():
            in_order = sorted(of_maps, key=lambda name: names.index(name.rpartition("/")[0]))
            results[noise] = once | outcomes({name: of_maps[name] for name in in_order})
        return results

    @property
    def members(self) -> int:
        """The number of training examples examined; the number of test examples is the same."""
        return min(MEMBERS, len(self._splits.training_rows), len(self._dataset.test_y))

    @property
    def passes(self) -> int:
        """How often a shadow model sees its examples: as often as in the run's last phase."""
        return passes(self._experiment.train, self._rounds, self._splits)

    def invert_shared(self) -> Inversion:
        """Reconstruct clients' images from their shared images with a denoiser.

        The attacker knows the mechanism and the models that it uses (the global model if each
        client uses its own for attributions), and has labelled images of the same kind (from the
        central test set) to train its denoiser on.

        Raises:
            RunFolderError: the run shared no images.
        """
        sharing = self._sharing
        if sharing is None:
            raise RunFolderError(f"{self._path}: shares no images to invert")
        check_fidelity()  # before the denoiser is trained, not after
        rng = keyed_rng(self._experiment.seed, "attack/inversion")
        originals, items, y = self._shared_pairs(sharing, rng)
        many = min(AUXILIARY, len(self._dataset.test_y))
        own = self._test_examples(rng.choice(len(self._dataset.test_y), many, replace=False))
        known = torch.cat([self._shared(sharing, own, f"draw {k}") for k in range(DRAWS)])
        found = self._reconstructed(items, known, own)
        return self._inversion(originals, items, found, y, own)

    def invert_explanations(
        self, explainer: FeatureExplainer, noise: float | None = None
    ) -> Inversion:
        """Reconstruct clients' training images from explanations of the decisions on them.

        Uses a denoiser that gets the map (H, W) as every channel. The attacker trains it on
        explanations of its own images (from the central test set), of the same model and with the
        same noise.

        Args:
            explainer: the explainer whose explanations are attacked.
            noise: noise added to the explanations; see the class.

        Raises:
            BadInput: the inputs are not images or are too small, the explainer does not apply to
                the model, or the noise is negative or not finite.
        """
        if not self.explains_images:
            raise RunFolderError(
                f"{self._path}: its inputs are no images of {SMALLEST} pixels a side or more, "
                "which alone are reconstructed from explanations"
            )
        self._check([explainer], [noise])
        check_fidelity()
        rng = keyed_rng(self._experiment.seed, "attack/inversion")
        known, tests = self._splits.training_rows, len(self._dataset.test_y)
        some = rng.choice(known, min(VICTIMS, len(known)), replace=False)
        victims = self._training_examples(some)
        own = self._test_examples(rng.choice(tests, min(AUXILIARY, tests), replace=False))

        def sent(x: Tensor, number: int, draws: int) -> Tensor:
            """(draws·n, C, H, W) maps as they are sent, the same in each channel."""
            maps, drawn = self._maps(explainer, self._network, x, number)
            there = present(x, self._dataset.parts)
            each = [_sent(maps, drawn, there, noise) for _ in range(draws)]
            found = torch.from_numpy(np.concatenate(each)).to(x)
            return found.view(-1, 1, *x.shape[2:]).expand(-1, *x.shape[1:])

        items = sent(victims.x, 0, 1)
        found = self._reconstructed(items, sent(own.x, 1, DRAWS), own)
        most = items.abs().amax(dim=(1, 2, 3), keepdim=True)
        shown = 0.5 + items / torch.where(most > 0, 2 * most, 1)
        return self._inversion(self._pixels(victims.x), shown, found, victims.y.tolist(), own)

    def _reconstructed(self, items: Tensor, known: Tensor, own: Examples) -> Tensor:
        """Images from items, by a denoiser trained on `DRAWS` known items of each own image."""
        pixels = torch.cat([self._pixels(own.x)] * DRAWS)
        seed = self._experiment.seed
        return reconstruct(train_denoiser(known, pixels, epochs=EPOCHS, seed=seed), items)

    def _check(
        self, explainers: Sequence[FeatureExplainer], noises: Sequence[float | None]
    ) -> None:
        for noise in noises:
            if noise is not None and not 0 <= noise <= LARGEST:
                raise ExperimentError(
                    f"noise={noise!s:.60}: must be 0 or more, as a share of an explanation's "
                    f"length, and at most {LARGEST:g}"
                )
        for explainer in explainers:
            refuse_unfit(explainer, self._model, self._data)

    def _maps(
        self, explainer: FeatureExplainer, network: nn.Module, x: Tensor, number: int
    ) -> tuple[Scores, np.random.Generator]:
        """(n, P) relevances for what a network decides, and the random stream that goes on."""
        decided = torch.from_numpy(logits(network, x)).argmax(dim=1)
        rng = keyed_rng(self._experiment.seed, f"attack/{explainer.label}", client=number)
        model = replace(self._model, network=network)
        return relevances_of(explainer, model, self._data, x, decided, rng), rng

    def _inversion(
        self, originals: Tensor, items: Tensor, found: Tensor, y: list[int], own: Examples
    ) -> Inversion:
        labels = tuple(self._dataset.classes[c] for c in y)
        pixels = self._pixels(own.x)
        mean = pixels.mean(dim=0)
        # Of a class of which the attacker has no image, it knows nothing.
        of_class = {c: pixels[own.y == c].mean(dim=0) for c in set(own.y.tolist())}
        guesses = mean.expand_as(originals), torch.stack([of_class.get(c, mean) for c in y])
        close = (fidelity(originals, each) for each in (found, *guesses))
        return Inversion(originals, items, found, labels, *close)

    def _shared_pairs(
        self, sharing: SharesImages, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Clients' images, what they shared of them, both in pixels, and their labels."""
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        drawn = rng.permutation(self._fed.num_clients)
        for k in drawn[self._splits.present[drawn]].tolist():
            if sum(len(y) for *_, y in parts) >= VICTIMS:
                break
            parts.append(sharing.shared_pairs(self._fed, self._state, k))
        x, items, y = (torch.cat(part) for part in zip(*parts, strict=True))
        rows = torch.from_numpy(rng.permutation(len(y))[:VICTIMS]).to(x.device)
        return x[rows].clamp(0, 1), items[rows], y[rows].tolist()

    def _training_examples(self, rows: Indices) -> Examples:
        return self._fed.server.prepare(self._dataset.x[rows], self._dataset.y[rows])

    def _test_examples(self, rows: Indices) -> Examples:
        return self._fed.server.prepare(self._dataset.test_x[rows], self._dataset.test_y[rows])

    def _pixels(self, x: Tensor) -> Tensor:
        return to_pixels(x, self._fed.server.tensor(pixel_range(self._fed))).clamp(0, 1)

    def _shared(self, sharing: SharesImages, examples: Examples, draw: str) -> Tensor:
        rng = keyed_rng(self._experiment.seed, f"attack/{draw}")
        return sharing.obscured(self._fed, self._state, examples.x, examples.y, rng)


def _sent(
    maps: Scores, rng: np.random.Generator, there: NDArray[np.bool_], noise: float | None
) -> Scores:
    """(n, P) explanations as they are seen: 0 in parts that inputs lack."""
    return np.where(there, maps, 0) if noise is None else obscured(maps, there, noise, rng)


def _announced(
    attacked: PrivacyAudit, shadows: int, names: Sequence[str], levels: Sequence[float | None]
) -> str:
    """What is attacked, by what, as lines; `names` are those of explainers."""
    by = [
        f"membership of {attacked.members:,} training examples beside as many test examples",
        "by loss and entropy",
    ]
    if shadows:
        often = f"{attacked.passes} pass{'es' * (attacked.passes > 1)}"
        by.append(f"by {shadows} shadow models, each trained for {often}")
    explained = f"explanations of {' and '.join(names)}"
    if names:
        noise = " and ".join(f"{level:g}" for level in levels if level is not None)
        by.append(f"by {explained}{f' with noise {noise}' * bool(noise)}")
    lines = ["attacks on:", f"  {', '.join(by)}"]
    inverted = ["what clients shared"] * attacked.shares_images
    inverted += [explained] * bool(names and attacked.explains_images)
    if inverted:
        lines.append(f"  images from {' and from '.join(inverted)}, by a denoiser")
    return "\n".join(lines)


@checked
def audit(
    run: Run | str | Path,
    explainers: Wanted | Sequence[Wanted] | None = None,
    *,
    shadows: int = 0,
    noise: float | Sequence[float] | None = None,
    progress: bool | Callable[[str], None] = True,
) -> Audit:
    """Attack a finished run: membership inference, and reconstruction of images.

    Args:
        run: a run of a method with a global classifier, or its folder.
        explainers: explainers whose explanations are also attacked. Names
            (`fedsim list explainers`) get their settings from the run's `explain` section, if they
            are listed there. By default the explainers of that section; an empty sequence for
            none.
        shadows: number of shadow models to train for the likelihood-ratio attack (LiRA), 2 or
            more; 0 skips this attack.
        noise: noise added to explanations before they are attacked: they are scaled to unit
            length, and noise of this relative length is added. With a sequence, several levels
            share the shadow models. By default explanations are unchanged.
        progress: True shows what is attacked and a progress bar in a terminal or a notebook,
            False shows nothing. A function is called with the same as lines of text.

    Raises:
        BadInput: the run is not finished or has no global classifier, or its data has changed; an
            explainer is unknown or does not apply to the model; or a noise or number is out of
            range.

    Example:
        >>> import fedsim
        >>> run = fedsim.load(folder)
        >>> found = fedsim.audit(run, "gradient", shadows=2, noise=[0, 1], progress=False)
        >>> list(found.membership["attack"].unique())
        ['loss', 'entropy', 'lira', 'variance', 'norm', 'norm_lira', 'map_lira']
        >>> found.membership.query("explainer == 'gradient' and noise == 1").shape
        (4, 6)
    """
    with LineProgress(progress) as tell:
        return _audit(Run.of(run), explainers, shadows, noise, tell)


def _audit(
    run: Run,
    explainers: Wanted | Sequence[Wanted] | None,
    shadows: int,
    noise: float | Sequence[float] | None,
    tell: Callable[[str], None],
) -> Audit:
    import pandas as pd

    shown = _explainers(explainers, run.experiment.explain)
    levels: list[float | None] = [None]
    if noise is not None:
        levels = [*dict.fromkeys(np.atleast_1d(noise).tolist())]
        if not levels:
            raise BadInput("noise: the list is empty; name a level, such as 0.5")
        if not shown:
            raise BadInput("noise is added to explanations; name an explainer")
    attacked = PrivacyAudit(run)
    attacked._check(shown, levels)
    if shadows:
        insist_on_several(shadows)
    if attacked.shares_images or (shown and attacked.explains_images):
        check_fidelity()
    tell(_announced(attacked, shadows, [one.label for one in shown], levels))
    explained = len(shown) * len(levels) * attacked.explains_images
    steps = shadows + attacked.shares_images + explained

    def done(step: int, what: str) -> None:
        tell(f"[{step}/{steps}] {what}")

    found = attacked.infer_membership(
        shadows, shown, levels, lambda s: done(s, f"shadow model {s}")
    )
    membership = []
    for level, outcomes in found.items():
        for name, result in outcomes.items():
            explainer, _, attack = name.rpartition("/")
            if explainer or level == levels[0]:  # noise is in explanations alone
                about = {"attack": attack, "explainer": explainer}
                row = {**about, "noise": level if explainer else None, **asdict(result)}
                membership.append(row)
    images: list[dict[str, Any]] = []
    inversions: dict[str, Inversion] = {}

    def add(source: str, close: Fidelity, explainer: str = "", level: float | None = None) -> None:
        about = {"source": source, "explainer": explainer, "noise": level}
        images.append({**about, **asdict(close)})

    step = shadows
    if attacked.shares_images:
        inversion = inversions[SHARED] = attacked.invert_shared()
        add("shared", inversion.shared)
        add("reconstructed", inversion.reconstructed)
        done(step := step + 1, "images from what was shared")
    for one in shown if attacked.explains_images else ():
        for level in levels:
            name = one.label if level is None else f"{one.label}-noise-{level:g}"
            inversion = inversions[f"reconstructed-{name}"] = attacked.invert_explanations(
                one, level
            )
            add("explanations", inversion.reconstructed, one.label, level)
            done(step := step + 1, f"images from {name.replace('-', ' ')}")
    if images:
        add("mean image", inversion.mean_image)
        add("mean image of the class", inversion.class_mean)
    kinds = ["source", "explainer", "noise", "mse", "psnr", "ssim"]
    tables = pd.DataFrame(membership), pd.DataFrame(images, columns=kinds)
    for table in tables:
        table["noise"] = table["noise"].astype(float)
    chance = guessing(attacked.members, attacked.members)
    fits = pd.DataFrame([{"model": name, **asdict(one)} for name, one in attacked.fits.items()])
    of_members, of_images = (table.to_dict("records") for table in tables)
    warnings = (*doubts(of_members, chance, attacked.fits), *failed(of_images))
    return Audit(run, *tables, inversions, chance, fits, warnings)


def _explainers(
    wanted: Wanted | Sequence[Wanted] | None, section: Explain | None
) -> Sequence[FeatureExplainer]:
    """These, as the run's section sets those that it has; by default all of the section's."""
    usual = () if section is None else section.explainers
    if wanted is None:
        return usual
    each = [wanted] if isinstance(wanted, str | Mapping | Explainer) else wanted
    named = [find_explainer(one, usual) for one in each]
    try:
        return Explain.model_validate({"explainers": named}).explainers if named else ()
    except ValidationError as error:
        raise BadInput(f"explainer: {error.errors()[0]['msg']}") from None
