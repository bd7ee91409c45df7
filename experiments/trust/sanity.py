"""Which explainers depend on what a network has learnt, by method and skew?"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from tables import finished, spread, table

from fedsim import Grid
from fedsim.results.significance import holm, paired, shown_p

AXIS = "partition.alpha"
SCORE = "randomisation"
PREFIXES = {"global": "", "personal": "personal_"}
# The global model of Ditto is FedAvg's, bit for bit: clients train their own models beside it.
NAMES = {("Ditto", "global"): "FedAvg", ("Ditto", "personal"): "Ditto, personal"}


def rows(found: list[Grid]) -> pd.DataFrame:
    """A row for each run and kind of model, with |ρ| by explainer."""
    rows = []
    for cell, run in finished(found):
        last, rounds = run.rounds.iloc[-1], run.rounds
        for whose in run.experiment.explain.of or ():
            name = NAMES.get((cell["method"], whose), cell["method"])
            row = {**cell, "method": name, "hash": run.result_hash, "accuracy": last["accuracy"]}
            if whose == "personal":
                own = run.clients[run.clients["round"] == last["round"]]
                row["accuracy"] = own["test_accuracy"].mean()
            columns = [c for c in rounds if c.endswith(f"/{PREFIXES[whose]}{SCORE}")]
            rows.append(row | {column.split("/")[0]: last[column] for column in columns})
    return pd.DataFrame(rows)


def tables(results: pd.DataFrame) -> Iterator[str]:
    explainers = [*results.columns[list(results.columns).index("accuracy") + 1 :]]
    cells = list(dict.fromkeys(zip(results["method"], results[AXIS], strict=True)))
    of = {
        cell: results[(results["method"] == cell[0]) & (results[AXIS] == cell[1])].set_index(
            "seed"
        )
        for cell in cells
    }
    columns = ["accuracy", *explainers]
    body = [
        [name, f"{alpha:g}", *(spread(own[c], 2) for c in columns)]
        for (name, alpha), own in of.items()
    ]
    yield "\n|ρ| with all weights random\n\n" + table(["", "α", *columns], body)

    def tested(title: str, pairs: dict[str, tuple[pd.DataFrame, pd.DataFrame]]) -> str:
        """Differences by explainer, with p corrected (Holm) over the table."""
        found = {
            (e, label): paired(one[e], other[e])
            for e in explainers
            if e != "random"
            for label, (one, other) in pairs.items()
        }
        ps = dict(zip(found, holm(each.p() for each in found.values()), strict=True))
        body = [
            [e, *(f"{found[e, label].mean:+.3f}, {shown_p(ps[e, label])}" for label in pairs)]
            for e in explainers
            if e != "random"
        ]
        return f"\n{title}; p by Holm\n\n" + table(["", *pairs], body)

    plain, alphas = of["untrained", 100], sorted(set(results[AXIS]), reverse=True)
    fedavg = {alpha: of["FedAvg", alpha] for alpha in alphas}
    trained = {f"FedAvg, α = {alpha:g}": (own, plain) for alpha, own in fedavg.items()}
    trained["centralised"] = (of["centralised", 100], plain)
    yield tested("trained − untrained", trained)
    skewed = {
        name: (of[name, alphas[-1]], of[name, alphas[0]])
        for name in dict.fromkeys(name for name, alpha in cells if alpha == alphas[-1])
    }
    yield tested(f"α = {alphas[-1]:g} − α = {alphas[0]:g}", skewed)
    for name in skewed:
        if name != "FedAvg":
            pairs = {f"α = {a:g}": (of[name, a], own) for a, own in fedavg.items()}
            yield tested(f"{name} − FedAvg", pairs)
