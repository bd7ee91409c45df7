"""The results of privacy attacks on a run: tables, pictures, and doubts about them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fedsim.analysis.attacks.inversion import Inversion
from fedsim.analysis.attacks.membership import Fit
from fedsim.explain.pictures.canvas import as_html, picture
from fedsim.results.run import Run
from fedsim.results.summary import budgets
from fedsim.support import atomic
from fedsim.support.words import columns

if TYPE_CHECKING:
    import pandas as pd

SHARED = "reconstructed-shared-images"  # the name of a picture
SOURCES = {  # of reconstructed images, as a table names them
    "shared": "shared images as they are",
    "reconstructed": "shared images",
    "explanations": "explanations by {}",
    "mean image": "the mean image, without any",
    "mean image of the class": "the mean image of the class, without any",
}
MODEL, SHADOWS, MAJORITY = "the model", "shadow models (mean)", "always the most frequent class"
LESS = 0.05  # of accuracy, with which a model has not learnt what another has
HALF = 0.5  # of the gap of losses, with which a model remembers less of its examples than another


@dataclass(frozen=True)
class Audit:
    """The results of privacy attacks on a run. Notebooks display it.

    Args:
        run: the attacked run.
        membership: one row per membership inference attack. Columns: `attack`; `explainer` (empty
            for attacks on the model itself) and its `noise` (NaN for none); `auc`,
            `balanced_accuracy` and `tpr` (at a false-positive rate of 1 %), see
            `fedsim.analysis.attacks.membership.Outcome`.
        guessing: where 95 % of the outcomes of guessing lie, with as many examples, by column of
            `membership`.
        fits: one row per model: the model, the shadow models and a constant guess. Columns:
            `model`, its accuracy on examples it was trained on (`inside`) and others (`outside`),
            and its mean loss on both (`inside_loss`, `outside_loss`; NaN of a constant guess).
        warnings: where an attack has failed for a reason that is not privacy.
        reconstruction: one row per image reconstruction attack; empty if there is nothing to
            reconstruct images from. Columns: `source` (`shared` for the shared images themselves,
            `reconstructed` from these, `explanations`, or `mean image`, the attacker's guess
            without either), `explainer`, `noise`, and how close they come to the originals: `mse`,
            `psnr` (dB) and `ssim`.
        inversions: the images of the reconstructions, by file name.
    """

    run: Run
    membership: pd.DataFrame
    reconstruction: pd.DataFrame
    inversions: Mapping[str, Inversion]
    guessing: Mapping[str, tuple[float, float]]
    fits: pd.DataFrame
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<audit of {self.run.path}>"

    def text(self) -> str:
        """The tables and warnings as text, as `fedsim attack` prints them."""
        rows = [
            [_attack(row), *(f"{row[k]:.3f}" for k in ("auc", "balanced_accuracy", "tpr"))]
            for row in self.membership.to_dict("records")
        ]
        ranges = (f"{low:.3f} to {high:.3f}" for low, high in self.guessing.values())
        rows.append(["guessing, 95 % of cases", *ranges])
        parts = [_table(["membership by", "AUC", "balanced accuracy", "TPR at 1 % FPR"], rows)]
        rows = [
            [name, *("" if math.isnan(value) else f"{value:.3f}" for value in values)]
            for name, *values in self.fits.itertuples(index=False)
        ]
        heads = ["accuracy: trained on", "others", "loss: trained on", "others"]
        parts.append(_table(["how well they have learnt", *heads], rows))
        if len(self.reconstruction):
            rows = [
                [
                    _named(SOURCES[row["source"]].format(row["explainer"]), row["noise"]),
                    *(f"{row['mse']:.4f}", f"{row['psnr']:.1f} dB", f"{row['ssim']:.3f}"),
                ]
                for row in self.reconstruction.to_dict("records")
            ]
            parts.append(_table(["images from", "MSE", "PSNR", "SSIM"], rows))
        stated = budgets(self.run).items()
        parts += [f"{name}, as the run states it: {words}" for name, words in stated]
        return "\n\n".join([*parts, *(f"warning: {warning}" for warning in self.warnings)])

    def save(self, folder: str | Path | None = None) -> list[Path]:
        """Write the tables to attacks.json, and draw the reconstructed images.

        Args:
            folder: folder to write to, created if missing. By default the run's own folder, and
                its `explanations` folder for pictures, which `fedsim report` shows.

        Returns:
            The paths of all files.

        Raises:
            OSError: they cannot be written.
        """
        pictures = self.run.path / "explanations" if folder is None else Path(folder)
        folder = self.run.path if folder is None else Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tables = {"membership": self.membership, "reconstruction": self.reconstruction}
        tables["fits"] = self.fits
        content: dict[str, Any] = {
            name: json.loads(table.to_json(orient="records")) for name, table in tables.items()
        }
        content |= {"guessing": dict(self.guessing), "warnings": list(self.warnings)}
        paths = [folder / "attacks.json"]
        with atomic.named(paths[0]) as aside:
            aside.write_text(json.dumps(content, indent=2) + "\n")
        return paths + self._draw(pictures)

    def _draw(self, folder: Path) -> list[Path]:
        paths = []
        for stem, inversion in self.inversions.items():
            folder.mkdir(parents=True, exist_ok=True)
            paths.append(picture(folder, stem))
            what = stem.removeprefix("reconstructed-").replace("-", " ")
            name = self.run.experiment.method.name if stem == SHARED else what
            t = self.run.last_round
            title = f"the global model after round {t}: images reconstructed from {what}"
            inversion.draw(name, paths[-1], title)
        return paths

    def _repr_html_(self) -> str:
        with TemporaryDirectory() as folder:
            pictures = self._draw(Path(folder))
            text = "\n".join(f"warning: {warning}" for warning in self.warnings)
            return as_html(text, pictures, self.membership, self.fits, self.reconstruction)


def doubts(
    rows: Sequence[Mapping[Any, Any]],
    chance: Mapping[str, tuple[float, float]],
    fits: Mapping[str, Fit],
) -> Iterator[str]:
    """Why a membership inference attack may be weak, other than for privacy."""
    own, shadows = fits[MODEL], fits.get(SHADOWS)
    if own.inside <= fits[MAJORITY].inside + LESS:
        yield (
            f"the model has learnt too little to reveal its examples (accuracy {own.inside:.3f} "
            "on them): weak attacks are no evidence of privacy"
        )
    if shadows is not None and shadows.inside < own.inside - LESS:
        yield (
            "the shadow models have learnt their examples worse than the model "
            f"({shadows.inside:.3f}, {own.inside:.3f}): what LiRA finds is too little, and no "
            "evidence of privacy"
        )
    elif shadows is not None and _gap(shadows) < HALF * _gap(own):
        yield (
            "the shadow models remember less of their examples than the model: their losses on "
            f"others exceed those on these by {_gap(shadows):.3g}, the model's by {_gap(own):.3g};"
            " what LiRA finds is too little, and no evidence of privacy"
        )
    auc = {_attack(row): row["auc"] for row in rows}
    width = chance["auc"][1] - 0.5
    if "lira" in auc and auc["lira"] < auc["loss"] - width:
        yield (
            f"LiRA (AUC {auc['lira']:.3f}) is weaker than the loss ({auc['loss']:.3f}): its "
            "shadow models do not behave as the model does; the strongest attack counts"
        )
    if low := [name for name, found in auc.items() if found < chance["auc"][0]]:
        yield (
            f"below guessing: {', '.join(low)}; members score lower than others, so that an "
            "attacker who turns the scores round gains 1 − AUC"
        )


def _gap(fit: Fit) -> float:
    """By how much losses on other examples exceed those on the examples trained on."""
    return fit.outside_loss - fit.inside_loss


def failed(images: Sequence[Mapping[Any, Any]]) -> Iterator[str]:
    """Which reconstructions are no better than the guess without anything."""
    guess = min((r["mse"] for r in images if r["source"].startswith("mean image")), default=0)
    for row in images:
        if row["source"] in ("reconstructed", "explanations") and row["mse"] >= guess:
            name = _named(SOURCES[row["source"]].format(row["explainer"]), row["noise"])
            yield (
                f"images from {name}: no closer than a mean image (MSE {row['mse']:.4f}, "
                f"{guess:.4f}): this denoiser has failed; another may not"
            )


def _attack(row: Mapping[Any, Any]) -> str:
    return _named("/".join(filter(None, (row["explainer"], row["attack"]))), row["noise"])


def _named(name: str, noise: float) -> str:
    return name if math.isnan(noise) else f"{name}, noise {noise:g}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    wide = max(len(row[0]) for row in [header, *rows])
    first, *others = ([row[0].ljust(wide), *row[1:]] for row in [header, *rows])
    return columns(first, others)
