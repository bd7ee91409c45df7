"""Who has a shortcut? SpRAy across clients, slices, contributions, and what a server sees."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
from common import RESULTS
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from tables import finished, spread, table
from torch import Tensor

import fedsim
from fedsim import Grid
from fedsim.analysis.contributions.contributions import ESTIMATES
from fedsim.analysis.contributions.updates import updates_of
from fedsim.federation import Vector
from fedsim.results.significance import paired, shown_p
from fedsim.training import FlatModel

AXIS = "data.clients"
CLIENTS = 20
SPRAY = {
    "spray": ("gradient_x_input", None),
    "spray, IG": ({"name": "integrated_gradients", "rule": "right", "steps": 20}, None),
    "spray, own models": ("gradient_x_input", "cohort"),
}
# Each gives a number to every client, of which much speaks for the shortcut.
LABELS = {
    "spray": "SpRAy, gradient × input",
    "spray, IG": "SpRAy, integrated gradients",
    "spray, own models": "SpRAy, clients' own models",
    "loss": "low training loss",
    "tested": "accuracy on own test images",
    "clear": "own model: errors on the test set",
    "others": "own model: decides otherwise",
    "cosine": "contribution: low cosine",
    "without": "contribution: low leave-one-out",
    "reliance": "own model: aligned − against",
    "relevance": "own model: relevance on the patch",
    "without, against": "low leave-one-out, against",
}
KNOWING = ("reliance", "relevance", "without, against")  # what the patch is
TESTED = ("aligned", "absent", "against")  # variants of the test set

Decided = NDArray[np.int64]


def rows(found: list[Grid]) -> pd.DataFrame:
    """A row for each run: the AUC of each detector, and who is named by clusters."""
    rows = []
    for cell, run in finished(found):
        last = run.rounds.iloc[-1]
        row = {**cell, "hash": run.result_hash}
        row |= {f"accuracy/{name}": last[f"accuracy/{name}"] for name in ("absent", "against")}
        row["reliance"] = last["accuracy/aligned"] - last["accuracy/against"]
        clients = run.manifest["clients"]
        holds = np.isin(np.arange(clients), run.experiment.data.holders(clients, cell["seed"]))
        scores = measured(run) if holds.any() else {}
        for name, (explainer, of) in SPRAY.items():
            clusters = fedsim.clusters(run, explainer, of=of, progress=False)
            few = clusters.members[clusters.members["few"]]
            least = few.groupby("client")["p_value"].min().reindex(range(clients), fill_value=1)
            scores[name] = -least
            named = np.isin(np.arange(clients), clusters.named)
            row[f"{name}/right"] = (named & holds).sum()
            row[f"{name}/wrong"] = (named & ~holds).sum()
            row[f"{name}/rand_index"] = clusters.scores["rand_index"]
        for name in LABELS if holds.any() else ():
            values = scores[name].to_numpy()
            row[f"{name}/auc"] = roc_auc_score(holds, values)
            first = np.argsort(-values, kind="stable")[: holds.sum()]
            row[f"{name}/first"] = holds[first].mean()
        rows.append(row)
    return pd.DataFrame(rows)


def measured(run: fedsim.Run) -> dict[str, pd.Series]:
    """By client, what each detector but SpRAy goes by."""
    reported = run.clients[run.clients["round"] == run.last_round].set_index("client")
    explained = run.explanations[run.explanations["client"].notna()].groupby("client")
    replayed = list(updates_of(run))
    rounds, again = [each for each, _ in replayed], replayed[-1][1]
    variant, y = again.dataset.test_columns["shortcut"], again.dataset.test_y
    model = again.fed.server.model
    x = again.runner.context.test_batch(slice(0, len(y))).x

    def right(found: Decided) -> dict[str, float]:
        return {name: (found == y)[variant == name].mean() for name in TESTED}

    last = rounds[-1]
    decisions = {k: decided(model, x, last.model([k])) for k in last.cohort}
    own = pd.DataFrame({k: right(each) for k, each in decisions.items()}).T
    clear = np.stack([each[variant == "absent"] for each in decisions.values()])
    most = np.array([np.bincount(votes).argmax() for votes in clear.T])
    cosine = ESTIMATES["cosine"](iter(rounds), lambda _: 0.0, np.random.default_rng(0))
    added = pd.DataFrame(0.0, index=last.cohort, columns=TESTED)
    for each in rounds:
        whole = pd.Series(right(decided(model, x, each.after)))
        for k in each.cohort:
            others = each.model([j for j in each.cohort if j != k])
            added.loc[k] += whole - pd.Series(right(decided(model, x, others)))
    return {
        "loss": -reported["loss"],
        "tested": reported["test_accuracy"],
        "clear": -own["absent"],
        "others": pd.Series((clear != most).mean(axis=1), index=last.cohort),
        "cosine": -pd.Series({k: each["value"] for k, each in cosine.items()}).sort_index(),
        "without": -added["absent"],
        "reliance": own["aligned"] - own["against"],
        "relevance": explained["relevance_mass_shortcut"].mean(),
        "without, against": -added["against"],
    }


def decided(model: FlatModel, x: Tensor, weights: Vector) -> Decided:
    """(M,) the class of each test example by these weights."""
    model.load(torch.from_numpy(weights.copy()))
    with torch.no_grad():
        return model.module.eval()(x).argmax(1).numpy()


def tables(results: pd.DataFrame) -> Iterator[str]:
    shares = [str(share) for share in dict.fromkeys(results[AXIS])]
    of_share = [own for _, own in results.groupby(AXIS, sort=False)]
    columns = {"accuracy/absent": "accuracy without the patch", "reliance": "reliance"}
    for name in SPRAY:
        columns |= {f"{name}/right": f"{LABELS[name]}: holders named"}
        columns |= {f"{name}/wrong": "others named", f"{name}/rand_index": "adjusted Rand index"}
    cells = [
        [label, *(spread(own[column]) for own in of_share)] for column, label in columns.items()
    ]
    yield "\n" + table(["global model, and who is named", *shares], cells)
    for score, label in (("auc", "AUC"), ("first", "right of the first k")):
        cells = [
            [what, *(spread(own[f"{name}/{score}"], 2) for own in of_share[1:])]
            for name, what in LABELS.items()
        ]
        yield "\n" + table([label, *shares[1:]], cells)
    cells = [
        [what, *(against(own["spray/auc"], own[f"{name}/auc"]) for own in of_share[1:])]
        for name, what in LABELS.items()
        if name != "spray"
    ]
    yield "\n" + table([f"p, AUC, against {LABELS['spray']}", *shares[1:]], cells)


def against(ours: pd.Series, theirs: pd.Series) -> str:
    p = paired(ours, theirs).p()
    return shown_p(p) if p == p else "–"  # all differences are the same


def draw(results: pd.DataFrame) -> None:
    """AUC by share of holders: the mean over seeds, and a band from the lowest to the highest."""
    results = results[results[AXIS] > 0]
    blind = [name for name in LABELS if name not in (*SPRAY, *KNOWING)]
    groups = {
        "sees clients' maps": [*SPRAY],
        "sees losses, models, clean test images": blind,
        "knows the patch": [*KNOWING],
    }
    shares = sorted(set(results[AXIS]))
    places = range(len(shares))
    figure = Figure(figsize=(13, 5), layout="constrained")
    panels = figure.subplots(1, len(groups), sharey=True)
    for axes, (title, names) in zip(panels, groups.items(), strict=True):
        axes.axhline(0.5, color="0.5", linestyle="--", linewidth=1, label="guessing")
        for name in names:
            of = results.groupby(AXIS)[f"{name}/auc"]
            (line,) = axes.plot(places, of.mean(), marker="o", markersize=4, label=LABELS[name])
            band = {"color": line.get_color(), "alpha": 0.1, "linewidth": 0}
            axes.fill_between(places, of.min(), of.max(), **band)
        axes.set_xticks(places, [f"{share * CLIENTS:g}" for share in shares])
        axes.set_xlabel(f"clients with the patch, of {CLIENTS}")
        axes.set_title(title, fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    panels[0].set_ylabel("AUC: are they told from the others?")
    figure.savefig(RESULTS / "holders.png", dpi=150)
