"""How does label skew change explanations?"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from common import EXPLAINER, RESULTS, by_method, crossed, lines, paired
from tables import finished

from fedsim import Grid
from fedsim.results.maps import similarity


def rows(found: list[Grid]) -> pd.DataFrame:
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


def tables(results: pd.DataFrame) -> Iterator[str]:
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


def draw(results: pd.DataFrame) -> None:
    names = {
        "accuracy": "accuracy",
        f"{EXPLAINER}/agreement_rank": "agreement of clients (rank correlation)",
        f"{EXPLAINER}/centralised_rank": "agreement with the centralised model",
    }
    panels = [(label, label, by_method(results, column)) for column, label in names.items()]
    lines(results, "partition.alpha", panels, RESULTS / "skew.png", reverse=True)
