"""Glass box or black box, on the same tables?

The grids glass_box.yaml and boosted.yaml have one name, so that `--done` puts them together.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from common import BAND, RESULTS, paired
from matplotlib.figure import Figure
from tables import finished, spread, table

import fedsim
from fedsim import Grid
from fedsim.results import significance


def rows(found: list[Grid]) -> pd.DataFrame:
    """Error, explanations, size and traffic of each learner of tables.

    Areas under deletion and insertion are errors of a number here, in its unit, and larger where a
    model answers wildly to values of 0; so they are given as multiples of those of a random order
    on the same model. `own` is the explanation that goes with the model, `occlusion` the one that
    all models share.
    """
    rows = []
    for cell, run in finished(found):
        last, section = run.rounds.iloc[-1], run.experiment.explain
        assert section is not None
        alone = "personal" in (section.of or ())
        whose, of_clients = ("personal_", "personal_") if alone else ("", "client_")
        row = {**cell, "hash": run.result_hash, "r2": last["r2"], **_size(run, last)}
        row["bytes_up"] = last["total_bytes_up"]
        for name, explainer in (("own", section.explainers[0].name), ("occlusion", "occlusion")):
            for score in ("deletion", "insertion"):
                by_chance = last[f"random/{whose}{score}"]
                row[f"{name}/{score}"] = last[f"{explainer}/{whose}{score}"] / by_chance
            row[f"{name}/effective_parts"] = last[f"{explainer}/{whose}effective_parts"]
            for how in ("rank", "top_k"):
                score = f"{of_clients}agreement_{how}"
                # None of `hist_trees`, whose clients have no models of their own.
                row[f"{name}/agreement_{how}"] = last.get(f"{explainer}/{score}")
            if cell["table"] == "Friedman":
                row[f"{name}/signal"] = _on_signal(run, explainer)
        rows.append(row)
    return pd.DataFrame(rows)


def _size(run: fedsim.Run, last: pd.Series) -> dict[str, float]:
    """What there is to read: rules, conditions of one, and numbers in all of the model."""
    model, F = run.experiment.model, len(run.maps["relevance"].iloc[0])
    if model.builds_network:
        return {"numbers": sum(p.numel() for p in model.build((F,), 1).parameters())}
    if model.name == "boosted_trees":  # a feature and a threshold a split, a value a leaf
        feature = run.weights()["feature"]
        trees, splits = feature.shape[0] * feature.shape[1], int((feature >= 0).sum())
        return {"numbers": 3 * splits + trees}
    outputs = F + 1 if model.name == "tsk" else 1
    rules, length = last["rules"], last["rule_length"]
    return {"rules": rules, "rule_length": length, "numbers": rules * (length + outputs)}


def _on_signal(run: fedsim.Run, explainer: str) -> float:
    """Of Friedman's data the share of all |relevance| on what matters, the first five inputs."""
    maps = run.maps
    kept = maps[(maps["explainer"] == explainer) & (maps["model"] != "cohort")]["relevance"]
    size = np.abs(np.stack(kept.tolist()))
    return float(size[:, :5].sum() / size.sum())


def tables(results: pd.DataFrame) -> Iterator[str]:
    scores = {
        "r2": "R²",
        "own/insertion": "insertion, × random",
        "own/deletion": "deletion, × random",
        "own/agreement_rank": "agreement",
    }
    sizes = {
        "own/effective_parts": ("features", ".1f"),
        "rules": ("rules", ".0f"),
        "rule_length": ("conditions a rule", ".1f"),
        "numbers": ("numbers", ",.0f"),
        "bytes_up": ("bytes up", ",.0f"),
    }
    by_occlusion = {
        "occlusion/insertion": "insertion, × random",
        "occlusion/deletion": "deletion, × random",
        "occlusion/agreement_rank": "agreement",
        "own/signal": "on x1 to x5, own",
        "occlusion/signal": "on x1 to x5, occlusion",
    }
    main, beside = [], []
    for (name, learner), own in results.groupby(["table", "learner"], sort=False):
        means = [f"{own[c].mean():{form}}".replace("nan", "–") for c, (_, form) in sizes.items()]
        main.append([name, learner, *(spread(own[c]) for c in scores), *means])
        p = f"{significance.paired(own['own/insertion'], own['occlusion/insertion']).p():.3f}"
        p = p.replace("nan", "–")  # of a single rule both are the same
        beside.append([name, learner, *(spread(own[c]) for c in by_occlusion), p])
    yield "\n" + table(["", "", *scores.values(), *(label for label, _ in sizes.values())], main)
    yield "\nby occlusion\n\n" + table(["", "", *by_occlusion.values(), "p, insertion"], beside)
    of_learner = results.assign(method=results["learner"])
    alone = results["learner"].str.endswith("alone")
    for baseline, some in {"MLP, federated": ~alone, "MLP, alone": alone}.items():
        for column in (*scores, "occlusion/insertion", "occlusion/agreement_rank"):
            p = paired(of_learner[some], "table", column, baseline)
            yield "\n" + p.replace("nan", "–")


def draw(results: pd.DataFrame) -> None:
    """A panel for each measure: tables across, a mark for each learner, a line over its seeds."""
    panels = {
        "r2": "R² (more is better)",
        "own/insertion": "error of insertion, × random (less is better)",
        "own/agreement_rank": "agreement of clients, rank correlation (more)",
    }
    names = list(dict.fromkeys(results["table"]))
    learners = list(dict.fromkeys(results["learner"]))
    colours = {"fuzzy rules": "#d55e00", "tree rules": "#009e73", "MLP": "#0072b2"}
    colours |= {"NAM": "#cc79a7", "boosted trees": "#56b4e9"}
    figure = Figure(figsize=(8, 2.9 * len(panels)), layout="constrained")
    for k, (column, label) in enumerate(panels.items()):
        axes = figure.add_subplot(len(panels), 1, k + 1)
        for place, learner in enumerate(learners):
            own = results[results["learner"] == learner].groupby("table")[column]
            mean, low, high = (getattr(own, how)().reindex(names) for how in BAND)
            x = np.arange(len(names)) + 0.075 * (place - (len(learners) - 1) / 2)
            kind, _, how = learner.partition(", ")
            federated = how == "federated"
            axes.vlines(x, low, high, color=colours[kind], lw=1)
            axes.plot(
                x,
                mean,
                {"federated": "o", "bagged": "D"}.get(how, "s"),
                color=colours[kind],
                markerfacecolor=colours[kind] if federated else "white",
                markersize=6,
                label=learner,
            )
        if "/insertion" in column:
            axes.axhline(1, color="0.5", lw=0.8, ls="--")
        axes.set_xticks(range(len(names)), names)
        axes.set_title(label, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        if k == 0:
            axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left")
    figure.savefig(RESULTS / "glass_box.png", dpi=150)
