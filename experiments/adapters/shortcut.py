"""Which adapters let a shortcut in, and which explainers show it: python shortcut.py [--done ...].

The questions of a fifth of the clients have a word that gives their class away. R8, TREC and
GloVe's vectors lie below $FEDSIM_DATA. Writes shortcut.csv, and prints the tables of the README.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from small import placed  # adds the folder of tables to the path
from tables import against, finished, grids, parser, spread, table

from fedsim import Grid

HERE = Path(__file__).parent
SHARE = "data.clients"
GAMES, MASS = "pointing_game_shortcut", "relevance_mass_shortcut"


def rows(found: list[Grid]) -> pd.DataFrame:
    """A row for each run: accuracy, what it relies on, and where explainers look."""
    rows = []
    for cell, run in finished(found):
        last = run.rounds.iloc[-1]
        row = {**cell, "hash": run.result_hash, "absent": last["accuracy/absent"]}
        row["reliance"] = last["accuracy/aligned"] - last["accuracy/against"]
        for score in (GAMES, MASS):
            row |= {c: last[c] for c in run.rounds if c.endswith(f"/{score}")}
        rows.append(row)
    return pd.DataFrame(rows)


def shown(results: pd.DataFrame) -> None:
    columns = ["absent", "reliance"]
    body = [
        [*map(str, cell), *(spread(of[column]) for column in columns)]
        for cell, of in results.groupby(["variant", SHARE], sort=False)
    ]
    print(table(["", "share", *columns], body))
    held = results[results[SHARE] > 0]
    by = held.groupby("variant", sort=False)
    for score in (GAMES, MASS):
        columns = [c for c in results if c.endswith(f"/{score}")]
        body = [[name, *(spread(of[c]) for c in columns)] for name, of in by]
        print(f"\n{score}\n\n" + table(["", *(c.partition("/")[0] for c in columns)], body))
    compared = against(held.rename(columns={"variant": "method"}), "FedIT", "reliance")
    body = [[other, *cells] for other, cells in compared.items()]
    print("\nreliance of FedIT less that of …\n")
    print(table(["", "difference", "p", "detectable"], body))


def main() -> None:
    asked = parser(__doc__).parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    made = grids(asked, HERE, ("shortcut",), lambda sheet: placed(sheet, asked.out, "data.of"))
    for found in made.values():
        results = rows(found)
        results.to_csv(HERE / "shortcut.csv", index=False, float_format="%.6g")
        shown(results)


if __name__ == "__main__":
    main()
