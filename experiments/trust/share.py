"""What is an explanation worth that clients make together, and what do noise and poison cost?"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from common import EXPLAINER, crossed, paired
from tables import finished

from fedsim import Grid


def rows(found: list[Grid]) -> pd.DataFrame:
    """Faithfulness of what is shared, of clients' own explanations and of the global model's."""
    rows = []
    for cell, run in finished(found):
        last = run.rounds.iloc[-1]
        row = {"sent": cell["sent"], "method": cell["explain.share.aggregation"]}
        row |= {"seed": cell["seed"], "hash": run.result_hash, "accuracy": last["accuracy"]}
        for prefix in ("shared_", "", "client_"):
            areas = [last[f"{EXPLAINER}/{prefix}{score}"] for score in ("insertion", "deletion")]
            row[f"{prefix}faithfulness"] = areas[0] - areas[1]
        row["agreement"] = last[f"{EXPLAINER}/shared_global_agreement_rank"]
        rows.append(row)
    return pd.DataFrame(rows)


def tables(results: pd.DataFrame) -> Iterator[str]:
    for column, label in (
        ("shared_faithfulness", "insertion − deletion of what is shared"),
        ("agreement", "agreement with the global model's explanation"),
    ):
        yield "\n" + crossed(results, "sent", column, label)
        yield "\n" + paired(results, "sent", column, "mean")
    for column in ("faithfulness", "client_faithfulness", "accuracy"):
        yield f"\n{column}: {results[column].mean():.3f}"
