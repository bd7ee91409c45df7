"""Run grids on trust in explanations, and tabulate them: python run.py [NAME ...] [--done ...]

NAMEs are files of small/ without their ending; with --done, finished grids are tabulated instead
(several of one name are put together). Needs Fashion-MNIST below $FEDSIM_DATA, but for drift.
Writes a row for each run to results/NAME.csv, pictures beside it, and prints the tables of the
README.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import spearmanr, ttest_rel

from fedsim.results.maps import similarity
from fedsim.results.run import Run
from fedsim.sweep.grid import GridFolder

sys.path.insert(0, str(Path(__file__).parents[1]))
from tables import finished, grids, parser, spread, table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
EXPLAINER = "integrated_gradients"  # of the skew grid
BAND = ("mean", "min", "max")
# What a client is watched by: its attributed loss, and scores on the same examples.
WATCHED = {"sage": "attributed loss", "test_accuracy": "accuracy", "test_loss": "loss"}
REFERENCE = slice(8, 18)  # rounds that a client is compared with; it is watched from the end on
LOOK = 10  # rounds from the drift on whose mean map says which column it is
DETECTORS = {  # each by itself, and as a trailing mean of some rounds
    f"{name}/{window}": (name, window, f"{what}, {window} rounds" if window > 1 else what)
    for window in (1, 5)
    for name, what in WATCHED.items()
}
ALARMS = 0.05  # share of clients that do not drift for which an alarm is raised
EXPLAINERS = ("gradient", "gradient_x_input", EXPLAINER, "occlusion", "lrp", "random")


# -- rows --------------------------------------------------------------------------------------


def skew(found: list[GridFolder]) -> pd.DataFrame:
    """Accuracy and explanations of each run, beside those of the centralised run of its seed."""
    runs = list(finished(found))
    central = {cell["seed"]: run for cell, run in runs if cell["method"] == "centralised"}
    runs = [(cell, run) for cell, run in runs if cell["seed"] in central]
    rows = []
    for cell, run in runs:
        last = run.rounds.iloc[-1]
        row = {**cell, "hash": run.result_hash, "accuracy": last["accuracy"]}
        for explainer in (EXPLAINER, "random"):
            for score in ("deletion", "insertion", "drift_rank"):
                row[f"{explainer}/{score}"] = last[f"{explainer}/{score}"]
            for score in ("agreement_rank", "global_agreement_rank"):
                row[f"{explainer}/{score}"] = last.get(f"{explainer}/client_{score}")
            row[f"{explainer}/centralised_rank"] = similarity(
                run, central[cell["seed"]], explainer
            )
        rows.append(row)
    return pd.DataFrame(rows)


def shortcut(found: list[GridFolder]) -> pd.DataFrame:
    """Accuracy by variant of the test set, and the relevance that explainers put on the patch."""
    rows = []
    for cell, run in finished(found):
        last = run.rounds.iloc[-1]
        row = {**cell, "hash": run.result_hash}
        row |= {
            variant: last[f"accuracy/{variant}"] for variant in ("aligned", "absent", "against")
        }
        row["reliance"] = row["aligned"] - row["against"]
        for explainer in EXPLAINERS:
            for score in ("pointing_game_shortcut", "relevance_mass_shortcut"):
                row[f"{explainer}/{score}"] = last[f"{explainer}/{score}"]
            row[f"{explainer}/deletion"] = last[f"{explainer}/deletion"]
        rows.append(row)
    return pd.DataFrame(rows)


def drift(found: list[GridFolder]) -> pd.DataFrame:
    """Who is taken to drift, from when on and why, by what a client is watched by.

    A client's statistic is the distance from its mean over the reference rounds, in units of such
    distances there, mean over the clients of the run. The threshold is the one that a share of
    `ALARMS` of clients exceeds where none drifts.
    """
    runs = list(finished(found))
    watched = [{name: _watched(run, name) for name in WATCHED} for _, run in runs]
    clear = [own for (cell, _), own in zip(runs, watched, strict=True) if cell["drift"] == "none"]
    rows = []
    for (cell, run), own in zip(runs, watched, strict=True):
        change = run.manifest.get("change", {"round": 0, "clients": [], "features": []})
        last = run.rounds.iloc[-1]
        row = {**cell, "hash": run.result_hash, "accuracy": last["accuracy"]}
        for detector, (name, window, _) in DETECTORS.items():
            most = np.concatenate([_distance(o[name], window).max(axis=0) for o in clear])
            over = _distance(own[name], window) > np.quantile(most, 1 - ALARMS)
            first = {
                k: int(over[:, k].argmax()) + REFERENCE.stop
                for k in np.flatnonzero(over.any(axis=0)).tolist()
            }
            right = [
                k for k, t in first.items() if k in change["clients"] and t >= change["round"]
            ]
            row[f"{detector}/found"] = len(right)
            row[f"{detector}/false"] = len(first) - len(right)
            if not change["clients"]:
                continue
            row[f"{detector}/f1"] = 2 * len(right) / (len(first) + len(change["clients"]))
            if right:
                row[f"{detector}/delay"] = np.mean([first[k] - change["round"] for k in right])
        if change["clients"]:
            before, after = (
                own["sage"][rounds.start - 1 : rounds.stop - 1].mean(axis=0)
                for rounds in (REFERENCE, slice(change["round"], change["round"] + LOOK))
            )
            largest = np.abs(after - before)[change["clients"]].argmax(axis=1) + 1
            row["why"] = np.mean([f"x{f}" in change["features"] for f in largest])
        rows.append(row)
    return pd.DataFrame(rows)


def _watched(run: Run, name: str) -> NDArray[np.float64]:
    """(rounds, clients, 1) a score of each client in each round, or (…, columns) its mean map."""
    if name != "sage":
        table = run.clients.pivot(index="round", columns="client", values=name)
        return table.to_numpy()[:, :, None]
    maps = run.maps
    means = maps.groupby(["round", "client"])["relevance"].apply(
        lambda own: np.mean(own.tolist(), axis=0)
    )
    found = np.stack(means.tolist()).reshape(-1, maps["client"].nunique(), len(means.iloc[0]))
    return found.astype(np.float64)


def _distance(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """(rounds watched, clients) how far each client is from its own past; see `drift`.

    Args:
        window: rounds of the trailing mean that is taken first.
    """
    means = np.lib.stride_tricks.sliding_window_view(values, window, axis=0).mean(axis=-1)
    values = np.concatenate([values[: window - 1], means])
    past = values[REFERENCE.start - 1 : REFERENCE.stop - 1]  # rounds count from 1
    n, mean = len(past), past.mean(axis=0)
    unit = np.linalg.norm((past - mean) * n / (n - 1), axis=2).mean()  # each from the others
    far: NDArray[np.float64] = np.linalg.norm(values[REFERENCE.stop - 1 :] - mean, axis=2) / unit
    return far


ROWS: dict[str, Callable[[list[GridFolder]], pd.DataFrame]] = {
    "skew": skew,
    "shortcut": shortcut,
    "drift": drift,
}


# -- tables ------------------------------------------------------------------------------------


def paired(results: pd.DataFrame, axis: str, column: str, baseline: str) -> str:
    """p that a column differs from the baseline's, two-tailed, paired by seed."""
    rows = []
    plain = results[results["method"] == baseline].set_index([axis, "seed"])[column]
    for method, own in results.groupby("method", sort=False):
        if method in (baseline, "centralised"):
            continue
        ps = []
        for value, part in own.groupby(axis, sort=False):
            ours = part.set_index("seed")[column]
            ps.append(f"{ttest_rel(ours, plain[value].loc[ours.index]).pvalue:.3f}")
        rows.append([str(method), *ps])
    values = list(dict.fromkeys(results[axis]))
    return table([f"p, {column}, against {baseline}", *map(str, values)], rows)


def crossed(results: pd.DataFrame, axis: str, column: str, label: str) -> str:
    """Mean ± standard deviation of a column, methods down and an axis across."""
    values = list(dict.fromkeys(results[axis]))
    rows = []
    for method, own in results.groupby("method", sort=False):
        cells = [spread(own.loc[own[axis] == value, column]) for value in values]
        rows.append([str(method), *cells])
    return table([label, *(str(value) for value in values)], rows)


def skew_tables(results: pd.DataFrame) -> Iterator[str]:
    axis = "partition.alpha"
    for column, label in (
        ("accuracy", "accuracy"),
        (f"{EXPLAINER}/agreement_rank", "agreement of clients"),
        (f"{EXPLAINER}/global_agreement_rank", "agreement with the global model"),
        (f"{EXPLAINER}/centralised_rank", "agreement with the centralised model"),
        (f"{EXPLAINER}/deletion", "area under deletion"),
        (f"{EXPLAINER}/insertion", "area under insertion"),
    ):
        yield "\n" + crossed(results, axis, column, label)
    federated = results[results["method"] != "centralised"]
    for column in ("accuracy", f"{EXPLAINER}/agreement_rank", f"{EXPLAINER}/centralised_rank"):
        yield "\n" + paired(federated, axis, column, "FedAvg")


def shortcut_tables(results: pd.DataFrame) -> Iterator[str]:
    axis = "data.clients"
    yield "\n" + crossed(results, axis, "absent", "accuracy without the patch")
    yield "\n" + crossed(results, axis, "reliance", "reliance: aligned − against")
    yield "\n" + paired(results, axis, "reliance", "FedAvg")
    for score in ("pointing_game_shortcut", "relevance_mass_shortcut"):
        rows = []
        for explainer in EXPLAINERS:
            column = f"{explainer}/{score}"
            cells = [spread(own[column]) for _, own in results.groupby(axis, sort=False)]
            rho = spearmanr(results["reliance"], results[column]).statistic
            rows.append([explainer, *cells, f"{rho:.2f}"])
        values = [str(v) for v in dict.fromkeys(results[axis])]
        yield "\n" + table([score.replace("_", " "), *values, "ρ with reliance"], rows)
    yield "\n" + detection(results)


def detection(results: pd.DataFrame) -> str:
    """From which share of clients on a method's pointing game is above what it is without any."""
    rows = []
    for explainer in EXPLAINERS:
        column, cells = f"{explainer}/pointing_game_shortcut", []
        for _, own in results.groupby("method", sort=False):
            clear = own.loc[own["data.clients"] == 0, column].max()
            seen = [
                str(share)
                for share, part in own[own["data.clients"] > 0].groupby("data.clients")
                if part[column].min() > clear
            ]
            cells.append(seen[0] if seen else "–")
        rows.append([explainer, *cells])
    methods = list(dict.fromkeys(results["method"]))
    return table(["seen from which share on", *methods], rows)


def drift_tables(results: pd.DataFrame) -> Iterator[str]:
    scores = {"f1": "F1", "found": "found of 2", "false": "false alarms", "delay": "delay"}
    drifts = list(dict.fromkeys(results["drift"]))
    columns = {f"{name}/{score}": f"{label}, {what}" for score, label in scores.items()
               for name, (*_, what) in DETECTORS.items()}  # fmt: skip
    columns["why"] = "largest change is the column that drifts"
    columns["accuracy"] = "accuracy on the central test set"
    rows = [
        [label, *(spread(results.loc[results["drift"] == kind, column], 2) for kind in drifts)]
        for column, label in columns.items()
    ]
    yield "\n" + table(["", *drifts], rows)


TABLES: dict[str, Callable[[pd.DataFrame], Iterator[str]]] = {
    "skew": skew_tables,
    "shortcut": shortcut_tables,
    "drift": drift_tables,
}


# -- pictures ----------------------------------------------------------------------------------


def lines(
    results: pd.DataFrame,
    axis: str,
    panels: Sequence[tuple[str, str, dict[str, pd.Series]]],
    path: Path,
    reverse: bool = False,
) -> None:
    """A panel for each (title, label of the vertical axis, values of each line).

    Line: mean over seeds; band: from the lowest to the highest.
    """
    values = sorted(set(results[axis]), reverse=reverse)
    figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
    for k, (title, label, named) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), k + 1)
        for name, column in named.items():
            of = column.groupby(results.loc[column.index, axis])
            mean, low, high = (
                getattr(of, how)().reindex(values) for how in ("mean", "min", "max")
            )
            places = range(len(values))
            (line,) = axes.plot(places, mean, marker="o", markersize=3, label=name)
            axes.fill_between(places, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        axes.set_xlabel("α of the label skew" if axis == "partition.alpha" else "share of clients")
        axes.set_ylabel(label)
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=150)


def by_method(results: pd.DataFrame, column: str) -> dict[str, pd.Series]:
    of = results[results["method"] != "centralised"].groupby("method", sort=False)
    return {str(method): own[column] for method, own in of}


def draw_skew(results: pd.DataFrame) -> None:
    names = {
        "accuracy": "accuracy",
        f"{EXPLAINER}/agreement_rank": "agreement of clients (rank correlation)",
        f"{EXPLAINER}/centralised_rank": "agreement with the centralised model",
    }
    panels = [(label, label, by_method(results, column)) for column, label in names.items()]
    lines(results, "partition.alpha", panels, RESULTS / "skew.png", reverse=True)


def draw_shortcut(results: pd.DataFrame) -> None:
    of_explainers = {
        explainer: results[f"{explainer}/pointing_game_shortcut"] for explainer in EXPLAINERS
    }
    panels = [
        ("accuracy lost when the patch lies", "aligned − against", by_method(results, "reliance")),
        ("most relevant pixel is in the patch", "share of test images", of_explainers),
    ]
    lines(results, "data.clients", panels, RESULTS / "shortcut.png")


def draw_drift(results: pd.DataFrame) -> None:
    """F1 and delay by what drifts: mean over seeds, and each seed as a point."""
    results = results[results["drift"] != "none"]
    drifts = list(dict.fromkeys(results["drift"]))
    figure = Figure(figsize=(9.2, 3.6), layout="constrained")
    panels = {"f1": "F1 over clients", "delay": "delay in rounds, of clients found"}
    for n, (score, label) in enumerate(panels.items()):
        axes = figure.add_subplot(1, 2, n + 1)
        for k, (name, (_, window, what)) in enumerate(DETECTORS.items()):
            colour, alpha = f"C{k % len(WATCHED)}", 0.8 if window == 1 else 0.35
            places = np.arange(len(drifts)) + 0.13 * (k - 2.5)
            column = results[f"{name}/{score}"]
            means = [column[results["drift"] == kind].mean() for kind in drifts]
            axes.bar(places, means, width=0.12, label=what, color=colour, alpha=alpha)
            at = [places[drifts.index(kind)] for kind in results["drift"]]
            axes.scatter(at, column, s=8, color=colour, zorder=3, clip_on=False)
        axes.set_xticks(range(len(drifts)), drifts, fontsize=7)
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
    named = figure.axes[0].get_legend_handles_labels()
    figure.legend(*named, frameon=False, fontsize=7, loc="outside upper center", ncols=6)
    figure.savefig(RESULTS / "drift.png", dpi=150)


PICTURES: dict[str, Callable[[pd.DataFrame], None]] = {
    "skew": draw_skew,
    "shortcut": draw_shortcut,
    "drift": draw_drift,
}


def main() -> None:
    arguments = parser(__doc__).parse_args()
    RESULTS.mkdir(exist_ok=True)
    for name, found in grids(arguments, HERE, ROWS).items():
        results = ROWS[name](found)
        results.to_csv(RESULTS / f"{name}.csv", index=False, float_format="%.6g")
        PICTURES[name](results)
        print(f"\n## {name}, {len(results)} runs, {results['seed'].nunique()} seeds")
        for text in TABLES[name](results):
            print(text)


if __name__ == "__main__":
    main()
