"""Do methods that steer by explanations make these more stable?"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from common import EXPLAINER, crossed, paired
from tables import finished

from fedsim import Grid

AXIS = "partition.alpha"
# Of the section `explain`, which is none of the methods' own; and what each has on record itself.
SCORES = {
    "accuracy": "accuracy",
    f"{EXPLAINER}/client_agreement_rank": "agreement of clients",
    f"{EXPLAINER}/drift_rank": "drift of the global model's explanations, from round 10 to 20",
    f"{EXPLAINER}/insertion": "area under insertion",
}
OWN = {
    "sketch_distance": "SSE-AGG: distance of clients' sketches",
    "consensus_drift": "SSE-AGG: drift of the consensus in a round",
    "artifact_agreement": "xFedAlign: agreement of clients' artifacts",
    "drift_from_prior": "xFedAlign: drift from the prior",
}


def rows(found: list[Grid]) -> pd.DataFrame:
    """Scores of the last round; the methods' own as means over the last ten."""
    rows = []
    for cell, run in finished(found):
        last, late = run.rounds.iloc[-1], run.rounds.tail(10)
        row = {**cell, "hash": run.result_hash, **{name: last[name] for name in SCORES}}
        rows.append(row | {name: late[name].mean() for name in OWN if name in late})
    return pd.DataFrame(rows)


def tables(results: pd.DataFrame) -> Iterator[str]:
    for method, without in (("SSE-AGG", "SSE-AGG, β = 0"), ("xFedAlign", "xFedAlign, λ = 0")):
        of_method = results[results["method"].str.startswith(method)]
        own = {n: label for n, label in OWN.items() if label.startswith(method)}
        for column, label in {**SCORES, **own}.items():
            yield "\n" + crossed(of_method, AXIS, column, label)
            yield "\n" + paired(of_method, AXIS, column, without)
