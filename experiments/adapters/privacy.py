"""Privacy of adapters beside that of all weights: python privacy.py [NAME…] [--done ...].

membership: who was trained on, by the final model; noise: client-level differential privacy, with
the clips that clips compares. Each is a file in small/ and writes a table of its name. R8, TREC
and GloVe's vectors lie below $FEDSIM_DATA.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from small import placed  # adds the folder of tables to the path
from tables import against, finished, grids, parser, spread, table

from fedsim import Grid
from fedsim.analysis.attacks.audit import PrivacyAudit
from fedsim.analysis.attacks.membership import guessing
from fedsim.analysis.attacks.report import MODEL

HERE = Path(__file__).parent
NAMES = ("membership", "clips", "noise")
TESTED = ("accuracy", "gap", "auc")


def membership(found: list[Grid]) -> pd.DataFrame:
    """How well losses tell each run's members from others; `gap` is of its accuracy on them."""
    rows = []
    for cell, run in finished(found):
        audit = PrivacyAudit(run)
        (outcomes,) = audit.infer_membership().values()
        fit, by_loss = audit.fits[MODEL], outcomes["loss"]
        row = {**cell, "hash": run.result_hash, "accuracy": run.rounds["accuracy"].iloc[-1]}
        row |= {"examined": audit.members, "on_members": fit.inside}
        row |= {"gap": fit.inside - fit.outside, "auc": by_loss.auc, "tpr": by_loss.tpr}
        rows.append(row)
    return pd.DataFrame(rows)


def scores(found: list[Grid]) -> pd.DataFrame:
    """Accuracy and ε of each run."""
    rows = []
    for cell, run in finished(found):
        last = run.rounds.iloc[-1]
        row = {"accuracy": last["accuracy"], "epsilon": last["epsilon"], "hash": run.result_hash}
        rows.append({**cell, **row})
    return pd.DataFrame(rows)


def shown(name: str, results: pd.DataFrame) -> None:
    """Print the table of a grid's results, and differences of all weights to adapters."""
    varied = list(results.columns[: list(results.columns).index("seed")])
    columns = [c for c in results if c not in {*varied, "seed", "hash", "examined"}]
    lines = [
        [*map(str, cell), *(spread(of[column]) for column in columns)]
        for cell, of in results.groupby(varied, sort=False)
    ]
    print(f"\n{name}, {results['seed'].nunique()} seeds\n")
    print(table([*varied, *columns], lines))
    if name == "membership":
        (examined,) = results["examined"].unique()
        print(f"\nguessing: {guessing(examined, examined)}")
    if results["seed"].nunique() == 1:
        return
    other = [axis for axis in varied if axis != "variant"]
    for (setting,), own in results.groupby(other) if other else [(("",), results)]:
        for column in [column for column in TESTED if column in own]:
            compared = against(own.rename(columns={"variant": "method"}), "all weights", column)
            lines = [[other, *cells] for other, cells in compared.items()]
            print(f"\n{column} of all weights less that of … {setting}\n")
            print(table(["", "difference", "p", "detectable"], lines))


def main() -> None:
    asked = parser(__doc__).parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)

    for name, found in grids(asked, HERE, NAMES, lambda sheet: placed(sheet, asked.out)).items():
        results = membership(found) if name == "membership" else scores(found)
        results.to_csv(HERE / f"{name}.csv", index=False, float_format="%.6g")
        shown(name, results)


if __name__ == "__main__":
    main()
