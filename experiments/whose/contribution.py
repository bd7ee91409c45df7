"""W1: who contributes what, exactly and estimated: python contribution.py [--out runs]

Writes results/values.csv (a row for each client of a run) and results/scores.csv (a row for each
estimator and run) beside this file, draws results/contribution.png, and prints the tables of the
README. Runs that are in the files are not run again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
import planted
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from tables import spread, table, tested

import fedsim
from fedsim.analysis.contributions.contributions import ESTIMATES
from fedsim.analysis.contributions.updates import scores_of_models, updates_of
from fedsim.results.figures.look import PAPER
from fedsim.results.significance import paired
from fedsim.support.rng import keyed_rng

HERE = Path(__file__).parent
RESULTS = HERE / "results"
VALUES, SCORES = RESULTS / "values.csv", RESULTS / "scores.csv"
SEEDS = range(10)
SKEW = 0.3  # α of Dirichlet's distribution
OF = {"digits": 150, "heart": 80, "clusters": 100}  # examples of a client
PLANTED = {
    f"{of}, {skew}": [f"data.of={of}", f"data.samples={n}", f"data.alpha={alpha}"]
    for of, n in OF.items()
    for skew, alpha in {"alike": "null", "skewed": SKEW}.items()
}
PLANTED |= {
    f"digits, alike, {rounds} rounds": [*PLANTED["digits, alike"], f"train.rounds={rounds}"]
    for rounds in (2, 10)
}
HOSPITALS = "four hospitals"
# Without cholesterol, of which one hospital has no value, so that it could not play alone.
FEATURES = "age, sex, cp, trestbps, fbs, restecg, thalach, exang, oldpeak, slope, ca, thal"
AS_THEY_ARE = [
    *(f"data.path={planted.HEART}/data/*.csv", f"data.features=[{FEATURES}]"),
    *("data.blanks={trestbps: [0]}", "partition.test_fraction=0", "evaluate={every: 1000}"),
    *("explain=null", "checkpoint.every=0"),
]
HOWS = ("permutations", "leave_one_out", *ESTIMATES)
CONTROLS = ("examples", "equal")  # n_k, and the same for all
ORDERS = 10


def experiment(cell: str, seed: int) -> fedsim.Experiment:
    if cell == HOSPITALS:
        return fedsim.Experiment.load(planted.HEART / "heart.yaml", [*AS_THEY_ARE, f"seed={seed}"])
    seeds = [f"seed={seed}", f"data.seed={seed}"]
    return fedsim.Experiment.load(HERE / "contribution.yaml", [*PLANTED[cell], *seeds])


def measured(run: fedsim.Run) -> tuple[pd.DataFrame, dict[str, dict[str, float]]]:
    """The values of a run's clients by each estimator, and what each has cost.

    Seconds are of the processor. What plays federations is charged for those that it uses, at the
    mean price of one of all that the exact values use.
    """
    start = time.process_time()
    exact = fedsim.contributions(run, how="shapley", progress=False)
    seconds = time.process_time() - start
    columns = {"shapley": exact.values}
    costs = {"shapley": {"federations": exact.coalitions, "evaluations": 0, "seconds": seconds}}
    for how in ("permutations", "leave_one_out"):
        found = fedsim.contributions(run, how=how, permutations=ORDERS, progress=False)
        columns[how], count = found.values, found.coalitions
        price = seconds * count / exact.coalitions
        costs[how] = {"federations": count, "evaluations": 0, "seconds": price}
    start = time.process_time()
    replayed = list(updates_of(run))
    replaying = time.process_time() - start
    worth = scores_of_models(replayed[0][1], exact.score)
    for how, estimate in ESTIMATES.items():
        evaluations = 0

        def counted(weights: NDArray[np.float32]) -> float:
            nonlocal evaluations
            evaluations += 1
            return worth(weights)

        start = time.process_time()
        rng = keyed_rng(run.experiment.seed, "contributions")
        found = estimate((round for round, _ in replayed), counted, rng)
        columns[how] = {k: own["value"] for k, own in found.items()}
        taken = replaying + time.process_time() - start
        costs[how] = {"federations": 1, "evaluations": evaluations, "seconds": taken}
    samples = run.clients.groupby("client")["samples"].first()
    gain = exact.everybody - exact.nobody
    columns["examples"] = samples.to_dict()
    columns["equal"] = dict.fromkeys(exact.values, gain / len(exact.values))
    table = pd.DataFrame(columns).fillna(0.0).rename_axis("client").reset_index()
    table["everybody"], table["nobody"] = exact.everybody, exact.nobody
    return table, costs


def scored(values: pd.DataFrame, how: str) -> dict[str, float]:
    """How close an estimator is to the exact values of a run, and whether it finds who is bad."""
    exact, found = values["shapley"].to_numpy(), values[how].to_numpy(dtype=float)
    size = float(found @ found)
    scaled = found * (exact @ found / size) if size else found
    lengths = float(np.linalg.norm(exact) * np.linalg.norm(found))
    row = {
        "error": float(np.abs(found - exact).mean()),
        "scaled_error": float(np.abs(scaled - exact).mean()),
        "cosine_distance": 1 - float(exact @ found) / lengths if lengths else 1.0,
        "rank": spearmanr(exact, found).statistic if np.ptp(found) else 0.0,
    }
    if "kind" in values and values["kind"].isin(planted.BAD).any():
        bad = values["kind"].isin(planted.BAD)
        row["auc"] = float(roc_auc_score(bad, -found))
        honest = values["kind"].isin(["clean", "twin"])
        for kind in (*planted.BAD, "other", "tiny"):
            of = values["kind"] == kind
            row[f"auc_{kind}"] = float(roc_auc_score(of[of | honest], -found[of | honest]))
    return row


def run_all(out: str, cells: list[str], seeds: range) -> None:
    RESULTS.mkdir(exist_ok=True)
    values, scores = (
        pd.read_csv(file).to_dict("records") if file.exists() else [] for file in (VALUES, SCORES)
    )
    known = {(row["cell"], row["seed"]) for row in scores}
    for seed in seeds:
        for cell in cells:
            if (cell, seed) in known:
                continue
            run = fedsim.run(experiment(cell, seed), out, progress=False)
            about = {"cell": cell, "seed": seed}
            table, costs = measured(run)
            kinds = run.manifest["client_names"] if cell == HOSPITALS else planted.KINDS
            table.insert(1, "kind", [kinds[k] for k in table["client"]])
            values += [about | row for row in table.to_dict("records")]
            for how in ("shapley", *HOWS, *CONTROLS):
                scores.append(about | {"how": how} | scored(table, how) | costs.get(how, {}))
            last = time.strftime("%H:%M:%S")
            print(last, cell, seed, f"{costs['shapley']['seconds']:.1f} s", flush=True)
            pd.DataFrame(values).to_csv(VALUES, index=False, float_format="%.5g")
            pd.DataFrame(scores).to_csv(SCORES, index=False, float_format="%.5g")


FIVE = [cell for cell in PLANTED if "rounds" not in cell]  # of so many rounds, and the hospitals
LABELS = {
    "shapley": "exact",
    "permutations": f"{ORDERS} random orders",
    "leave_one_out": "leave-one-out",
    "multi_rounds": "multi-rounds",
    "gtg_shapley": "GTG-Shapley",
    "shapfed": "ShapFed",
    "cosine": "cosine",
    "examples": "number of examples",
    "equal": "the same for all",
}
IN_UNITS = ("permutations", "leave_one_out", "multi_rounds", "gtg_shapley")  # of the score


def by_kind(values: pd.DataFrame) -> str:
    """The exact value of each kind of client, mean ± standard deviation over seeds."""
    kinds = list(dict.fromkeys(planted.KINDS))
    rows = []
    for cell in PLANTED:
        own = values[values["cell"] == cell]
        per = own.pivot_table(index="seed", columns="kind", values="shapley", sort=False)
        all_of = own.groupby("seed")["everybody"].first()
        rows.append([cell, str(len(per)), spread(all_of), *(spread(per[kind]) for kind in kinds)])
    return table(["clients", "seeds", "accuracy", *kinds], rows)


def below_clean(values: pd.DataFrame) -> str:
    """By how much each kind's exact value is below that of clean clients, tested over seeds."""
    five = values[values["cell"].isin(FIVE)]
    per = five.pivot_table(index=["seed", "cell"], columns="kind", values="shapley")
    clean = per["clean"]
    differences = {
        kind: paired(*(each.groupby("seed").mean() for each in (clean, per[kind])))
        for kind in ("twin", "tiny", "flipped", "shortcut", "freerider", "other")
    }
    rows = [[name, *cells] for name, cells in tested(differences).items()]
    return table(["clean − ", "mean, 95 % interval", "p", "detectable"], rows)


def by_estimator(scores: pd.DataFrame, columns: Mapping[str, str], title: str) -> str:
    """A score of each estimator, mean ± standard deviation over seeds.

    Args:
        columns: the column of each estimator.
    """
    cells, rows = (*PLANTED, HOSPITALS), []
    for how, column in columns.items():
        own = scores[scores["how"] == how]
        name = f"{LABELS[how]}, scaled" if column == "scaled_error" else LABELS[how]
        rows.append([name, *(spread(own.loc[own["cell"] == cell, column]) for cell in cells)])
    return table([title, *cells], rows)


def who_is_found(scores: pd.DataFrame) -> str:
    """Area under the curve of each bad kind against clean clients and the twin, by low values."""
    five = scores[scores["cell"].isin(FIVE)]
    columns = [f"auc_{kind}" for kind in ("flipped", "freerider", "shortcut", "other", "tiny")]
    rows = []
    for how in ("shapley", *HOWS, "examples"):
        means = five[five["how"] == how].groupby("seed")[[*columns, "auc"]].mean()
        rows.append([LABELS[how], *(spread(means[column], 2) for column in means)])
    header = ["found by", *(name.removeprefix("auc_") for name in columns), "the three bad ones"]
    return table(header, rows)


def prices(scores: pd.DataFrame) -> str:
    rows = []
    for cell in ("digits, alike, 2 rounds", "digits, alike", "digits, alike, 10 rounds"):
        own = scores[(scores["cell"] == cell)].groupby("how")[["federations", "evaluations"]]
        counts = own.mean()
        seconds = scores[scores["cell"] == cell].groupby("how")["seconds"]
        for how in ("shapley", *HOWS):
            whole = seconds.mean()["shapley"] / seconds.mean()[how]
            cells = [f"{counts.loc[how, name]:.0f}" for name in counts]
            told = [spread(seconds.get_group(how), 1), f"1/{whole:.0f}" if whole > 1 else "1"]
            rows.append([cell, LABELS[how], *cells, *told])
    header = ["", "", "federations", "evaluations", "seconds", "of the exact values'"]
    return table(header, rows)


def compared(scores: pd.DataFrame) -> str:
    """Differences in the rank correlation with the exact values: pairs of seeds."""
    five = scores[scores["cell"].isin(FIVE)]

    def rank(how: str, *words: str) -> pd.Series:
        own = five[(five["how"] == how) & five["cell"].map(lambda c: all(w in c for w in words))]
        return own.groupby("seed")["rank"].mean()

    differences = {
        f"{LABELS[how]} − {LABELS[other]}": paired(rank(how), rank(other))
        for other in ("permutations", "examples")
        for how in HOWS
        if how != other
    }
    differences |= {
        f"{LABELS[how]}, skewed − alike": paired(rank(how, "skewed"), rank(how, "alike"))
        for how in HOWS
    }
    ends = ["digits, alike, 10 rounds", "digits, alike, 2 rounds"]
    by = scores.set_index("seed")
    for how in HOWS:
        long, short = (by.loc[(by["how"] == how) & (by["cell"] == end), "rank"] for end in ends)
        differences[f"{LABELS[how]}, 10 − 2 rounds"] = paired(long, short)
    rows = [[name, *cells] for name, cells in tested(differences).items()]
    return table(["difference", "mean, 95 % interval", "p", "detectable"], rows)


def of_hospitals(values: pd.DataFrame) -> str:
    own = values[values["cell"] == HOSPITALS]
    rows = [
        [name, *(spread(part[how]) for how in ("shapley", *HOWS, "examples"))]
        for name, part in own.groupby("kind", sort=False)
    ]
    return table(["hospital", *(LABELS[how] for how in ("shapley", *HOWS, "examples"))], rows)


PANELS = {"permutations": "10 random orders", "gtg_shapley": "GTG-Shapley", "shapfed": "ShapFed"}
MARKS = dict(zip(dict.fromkeys(planted.KINDS), "osv^*DX", strict=False))


def draw(values: pd.DataFrame, cell: str = "digits, alike") -> None:
    """Estimated against exact values: a dot for each client of a run, a mark for a kind's mean."""
    own = values[values["cell"] == cell].copy()
    for _, run in own.groupby("seed"):
        found, exact = run["shapfed"], run["shapley"]
        own.loc[run.index, "shapfed"] = found * (exact @ found) / (found @ found)
    with mpl.rc_context(PAPER.settings):
        figure = Figure(figsize=(7.2, 2.9), layout="constrained")
        for k, (how, title) in enumerate(PANELS.items()):
            axes = figure.add_subplot(1, 3, k + 1)
            axes.axline((0, 0), slope=1, color=PAPER.other, linewidth=1, label="exact")
            for style, (kind, mark) in enumerate(MARKS.items()):
                part, colour = own[own["kind"] == kind], PAPER.colour(style)
                axes.scatter(part["shapley"], part[how], s=5, color=colour, alpha=0.35, lw=0)
                means = part["shapley"].mean(), part[how].mean()
                axes.scatter(*means, s=42, color=colour, marker=mark, label=kind, zorder=3)
            axes.set_ylim(-0.25, 0.5)
            axes.set_title(title, fontsize=PAPER.normal)
            axes.set_xlabel("exact Shapley value of accuracy")
            axes.set_ylabel("estimate" + ", scaled by least squares" * (how == "shapfed"))
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=8, frameon=False)
        figure.savefig(RESULTS / "contribution.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs", help="where runs lie")
    run_all(parser.parse_args().out, [*PLANTED, HOSPITALS], SEEDS)
    values, scores = pd.read_csv(VALUES), pd.read_csv(SCORES)
    draw(values)
    ranks = dict.fromkeys([*HOWS, "examples"], "rank")
    errors = {how: "error" if how in IN_UNITS else "scaled_error" for how in (*HOWS, *CONTROLS)}
    for text in (
        by_kind(values),
        below_clean(values),
        by_estimator(scores, ranks, "rank correlation"),
        by_estimator(scores, errors | {"equal": "error"}, "mean error, in accuracy"),
        who_is_found(scores),
        compared(scores),
        prices(scores),
        of_hospitals(values),
    ):
        print(f"{text}\n")


if __name__ == "__main__":
    main()
