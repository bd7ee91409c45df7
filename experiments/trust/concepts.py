"""What do concept bottlenecks learn from clients, some of whom have wrong concepts?"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from common import crossed, paired
from tables import finished

from fedsim import Grid

CLIENTS = 10
BASELINE = "joint"
SHOWN = {
    "accuracy": "accuracy",
    "concept_accuracy": "accuracy of concepts",
    "concept_error": "error of brightness, in standard deviations",
    "intervened_accuracy": "accuracy with true concepts",
    "gain": "what true concepts add to accuracy",
    "right": "accuracy of concepts, own examples of clients with right ones",
    "wrong": "the same, of clients with wrong ones",
}


def rows(found: list[Grid]) -> pd.DataFrame:
    """The scores after the last round, and those on clients' own test examples."""
    rows = []
    for cell, run in finished(found):
        last, wrong = run.rounds.iloc[-1], cell["data.wrong"]
        row = {"method": cell["learner"], "wrong_clients": wrong, "seed": cell["seed"]}
        row |= {"hash": run.result_hash, "accuracy": last["accuracy"]}
        if "concept_accuracy" in last:
            for name in ("concept_accuracy", "concept_error", "intervened_accuracy"):
                row[name] = last[name]
            row["gain"] = last["intervened_accuracy"] - last["accuracy"]
            own = run.clients[run.clients["round"] == last["round"]].set_index("client")
            own = own["test_concept_accuracy"]
            row["right"] = own.loc[: CLIENTS - wrong - 1].mean()
            row["wrong"] = own.loc[CLIENTS - wrong :].mean()
        rows.append(row)
    return pd.DataFrame(rows)


def tables(results: pd.DataFrame) -> Iterator[str]:
    for column, label in SHOWN.items():
        known = results.dropna(subset=column)
        if len(known):
            yield "\n" + crossed(known, "wrong_clients", column, label)
    for column in ("accuracy", "gain"):
        yield "\n" + paired(results.dropna(subset=column), "wrong_clients", column, BASELINE)
