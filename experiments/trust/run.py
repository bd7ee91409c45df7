"""Run grids on trust in explanations, and tabulate them: python run.py [NAME ...] [--done ...]

NAMEs are files of small/ without their ending; with --done, finished grids are tabulated instead
(several of one name are put together). Needs Fashion-MNIST below $FEDSIM_DATA, and for glass_box
Mortgage and OpenFL-XAI's data; background, concepts, detectors, drift, mimic_tree and sanity need
nothing. Writes a row for each run to results/NAME.csv, pictures beside it, and prints the tables
of the README. The searches are in fronts.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import background
import concepts
import detectors
import drift
import glass_box
import holders
import mimic_tree
import privacy
import sanity
import share
import shortcut
import skew
import stability
from common import HERE, RESULTS
from tables import grids, parser

# Of each grid `rows` (a table of its runs), `tables` (Markdown), and perhaps `draw`.
QUESTIONS: dict[str, Any] = {
    "skew": skew,
    "shortcut": shortcut,
    "holders": holders,
    "drift": drift,
    "detectors": detectors,
    "glass_box": glass_box,
    "concepts": concepts,
    "mimic_tree": mimic_tree,
    "share": share,
    "privacy": privacy,
    "stability": stability,
    "sanity": sanity,
    "background": background,
}


def main() -> None:
    arguments = parser(__doc__).parse_args()
    RESULTS.mkdir(exist_ok=True)
    for name, found in grids(arguments, HERE, QUESTIONS).items():
        question = QUESTIONS[name]
        results = question.rows(found)
        results.to_csv(RESULTS / f"{name}.csv", index=False, float_format="%.6g")
        if hasattr(question, "draw"):
            question.draw(results)
        print(f"\n## {name}, {len(results)} runs, {results['seed'].nunique()} seeds")
        for text in question.tables(results):
            print(text)


if __name__ == "__main__":
    main()
