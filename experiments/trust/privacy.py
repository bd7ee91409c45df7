"""What does privacy cost, of training or of explanations, and what do attacks make of it?"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from common import EXPLAINER, RESULTS
from matplotlib.figure import Figure
from tables import finished, spread, table

from fedsim import Grid
from fedsim.analysis.attacks.audit import PrivacyAudit

SHADOWS = 8
NOISE = (None, 0.0, 1.0, 3.0, 10.0)  # in explanations; None leaves them as they are


def rows(found: list[Grid]) -> pd.DataFrame:
    """Each run under attack, and what its explanations are worth; takes a minute for a run."""
    rows = []
    for cell, run in finished(found):
        last, audit = run.rounds.iloc[-1], PrivacyAudit(run)
        (explainer,) = run.experiment.explain.explainers  # type: ignore[union-attr]
        row = {**cell, "hash": run.result_hash, "accuracy": last["accuracy"]}
        row["epsilon"] = last.get("epsilon")
        row["faithfulness"] = last[f"{EXPLAINER}/insertion"] - last[f"{EXPLAINER}/deletion"]
        row["agreement"] = last[f"{EXPLAINER}/client_agreement_rank"]
        for noise, attacked in audit.infer_membership(SHADOWS, noises=NOISE).items():
            for attack in ("loss", "lira"):
                row[attack] = attacked[attack].auc
            for attack in ("variance", "norm", "norm_lira", "map_lira"):
                row[f"{attack}, noise {noise}"] = attacked[f"{EXPLAINER}/{attack}"].auc
            inversion = audit.invert_explanations(explainer, noise)
            row[f"ssim, noise {noise}"] = inversion.reconstructed.ssim
            row["ssim of the mean image"] = inversion.mean_image.ssim
        rows.append(row)
    return pd.DataFrame(rows)


def tables(results: pd.DataFrame) -> Iterator[str]:
    for data, own in results.groupby("data", sort=False):
        yield f"\n### {data}"
        yield from _tables_of(own)


def _tables_of(results: pd.DataFrame) -> Iterator[str]:
    of = results.groupby("privacy", sort=False)
    kinds = list(of.groups)
    cost = ("accuracy", "epsilon", "faithfulness", "agreement", "loss", "lira")
    yield "\n" + table(
        ["", *kinds], [[name, *(spread(own[name]) for _, own in of)] for name in cost]
    )
    for kind in ("variance", "norm", "norm_lira", "map_lira", "ssim"):
        of_noise = [
            [f"{noise}", *(spread(own[f"{kind}, noise {noise}"]) for _, own in of)]
            for noise in NOISE
        ]
        yield "\n" + table([f"{kind}, by noise in explanations", *kinds], of_noise)
    yield f"\nSSIM of the mean image: {spread(results['ssim of the mean image'])}"


def draw(results: pd.DataFrame) -> None:
    """Success of attacks on explanations by their noise; a line for each kind of training."""
    digits = results[results["data"] == "digits"]
    panels = {
        "map_lira": (
            "AUC of LiRA on explanations, noisy Gaussians",
            results[results["data"] != "digits"],
            0.5,
            "guessing",
        ),
        "ssim": (
            "SSIM of reconstructed digits",
            digits,
            digits["ssim of the mean image"].mean(),
            "the mean image",
        ),
    }
    labels = ["as they are", *(f"{noise:g}" for noise in NOISE if noise is not None)]
    figure = Figure(figsize=(9.2, 3.6), layout="constrained")
    for k, (kind, (label, results, chance, what)) in enumerate(panels.items()):
        axes = figure.add_subplot(1, 2, k + 1)
        for name, own in results.groupby("privacy", sort=False):
            columns = own[[f"{kind}, noise {noise}" for noise in NOISE]]
            (line,) = axes.plot(columns.mean().to_numpy(), marker="o", markersize=3, label=name)
            low, high = columns.min().to_numpy(), columns.max().to_numpy()
            axes.fill_between(
                range(len(NOISE)), low, high, color=line.get_color(), alpha=0.12, linewidth=0
            )
        axes.axhline(chance, color="0.5", lw=0.8, ls="--")
        axes.annotate(what, (0, chance), xytext=(0, 3), textcoords="offset points", fontsize=7)
        axes.set_xticks(range(len(NOISE)), labels)
        axes.set_xlabel("noise in explanations, in lengths of a map")
        axes.set_title(label, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
    figure.axes[0].legend(frameon=False, fontsize=7)
    figure.savefig(RESULTS / "privacy.png", dpi=150)
