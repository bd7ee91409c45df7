"""Is a tree that mimics a classifier more faithful than attributions?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pandas as pd
from common import EXPLAINER
from tables import finished, spread, table

from fedsim import Grid
from fedsim.results.significance import paired

MIMICS = ("tree", EXPLAINER, "occlusion", "random")


def rows(found: list[Grid]) -> pd.DataFrame:
    """Accuracy, scores of trees and attributions of the same networks, and the trees' fidelity."""
    rows = []
    for cell, run in finished(found):
        last, trees = run.rounds.iloc[-1], run.own_explanations
        row = {**cell, "hash": run.result_hash, "accuracy": last["accuracy"]}
        for column in ("held_out_fidelity", "leaves"):  # of the cohort's in the last round
            row[column] = trees.loc[trees["round"] == last["round"], column].mean()
        for explainer, whose in itertools.product(MIMICS, ("", "personal_")):
            for score in ("deletion", "insertion", "comprehensiveness", "effective_parts"):
                row[f"{explainer}/{whose}{score}"] = last[f"{explainer}/{whose}{score}"]
            row[f"{explainer}/agreement"] = last[f"{explainer}/personal_agreement_rank"]
        rows.append(row)
    return pd.DataFrame(rows)


def tables(results: pd.DataFrame) -> Iterator[str]:
    columns = {
        "insertion": "insertion, global",
        "deletion": "deletion, global",
        "comprehensiveness": "comprehensiveness, global",
        "personal_insertion": "insertion, personal",
        "personal_deletion": "deletion, personal",
        "personal_comprehensiveness": "comprehensiveness, personal",
        "personal_effective_parts": "pixels, personal",
        "agreement": "agreement, personal",
    }
    for alpha, own in results.groupby("partition.alpha", sort=False):
        about = ", ".join(
            f"{c} {spread(own[c])}" for c in ("accuracy", "held_out_fidelity", "leaves")
        )
        rows = []
        for explainer in MIMICS:
            ps = []
            for score in ("insertion", "comprehensiveness"):
                tree, ours = (own[f"{e}/personal_{score}"] for e in ("tree", explainer))
                ps.append("–" if explainer == "tree" else f"{paired(tree, ours).p():.4f}")
            rows.append([explainer, *(spread(own[f"{explainer}/{c}"]) for c in columns), *ps])
        tested = ("p, insertion, personal, against the tree", "p, comprehensiveness")
        header = ["", *columns.values(), *tested]
        yield f"\nα = {alpha:g}: {about}\n\n" + table(header, rows)
