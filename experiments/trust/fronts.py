"""Search for Pareto fronts of trust, and tabulate them: python fronts.py [NAME ...] [--done ...]

NAMEs are files of small/ that have a search section, without their ending; with --done, finished
searches are tabulated instead. Needs Fashion-MNIST below $FEDSIM_DATA. Writes a row for each trial
to results/NAME.csv and a picture beside it, and prints the tables of the README.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd
from scipy.stats import spearmanr

import fedsim
from fedsim import Search
from fedsim.config.file import RawConfig
from fedsim.results import pareto

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import HERE, RESULTS
from tables import parser, table

# What figures call the objectives.
LABELS = {
    "accuracy/absent": "accuracy without the patch",
    "integrated_gradients/relevance_mass_shortcut": "relevance on the patch",
    "total_bytes_up": "bytes up",
    "accuracy": "accuracy",
    "epsilon": "ε",
    "integrated_gradients/insertion": "area under insertion",
}
# What else the last round of a trial says, by the name of the search.
BESIDE = {
    "pareto_shortcut": [
        "accuracy/aligned",
        "accuracy/against",
        "integrated_gradients/pointing_game_shortcut",
    ],
    "pareto_privacy": [
        "integrated_gradients/deletion",
        "integrated_gradients/client_agreement_rank",
        "integrated_gradients/client_global_agreement_rank",
        "total_bytes_up",
    ],
}


def trials(folder: Search, name: str) -> pd.DataFrame:
    """A row for each finished trial: what was chosen, what came of it, whether on the front."""
    found = folder.trials
    found = found[found["status"] == "finished"].reset_index(drop=True)
    runs = [fedsim.load(folder.path / path) for path in found["folder"]]
    for column in BESIDE[name]:
        found[column] = [run.rounds.iloc[-1][column] for run in runs]
    if name == "pareto_shortcut":
        found["reliance"] = found["accuracy/aligned"] - found["accuracy/against"]
    else:  # standard deviation of the noise on a round's mean, by entry
        cohort = found["train.participation"] * runs[0].manifest["clients"]
        found["noise"] = found["privacy.noise_multiplier"] * found["privacy.clip"] / cohort
    found["front"] = pareto.front(found, folder.manifest["objectives"])
    found["hash"] = [run.result_hash for run in runs]
    return found.drop(columns=["status", "error", "folder", "rounds"])


def tables(
    found: pd.DataFrame, objectives: Mapping[str, str], space: list[str], shares: pd.DataFrame
) -> Iterator[str]:
    """The front, how its objectives go together, and what decides them.

    Args:
        shares: of each objective's variance that a hyper-parameter explains.
    """
    columns = [*objectives, "reliance" if "reliance" in found else "noise"]
    shown = ["trial", *space, *columns]
    best = found[found["front"]].sort_values(next(iter(objectives)), ascending=False)
    rows = [[_number(row[column]) for column in shown] for row in best.to_dict("records")]
    yield f"\n{len(best)} of {len(found)} trials are on the front\n\n" + table(shown, rows)
    numbers = [c for c in found.select_dtypes("number") if c not in ("trial", *space)]
    rho = found[numbers].corr(method=lambda a, b: spearmanr(a, b).statistic)
    yield "\n" + table(
        ["Spearman's ρ", *columns],
        [[c, *(f"{rho.loc[c, o]:.2f}" for o in columns)] for c in numbers],
    )
    rows = [[row[0], *(f"{share:.2f}" for share in row[1:])] for row in shares.values.tolist()]
    yield "\n" + table(["share of the variance", *objectives], rows)


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    arguments = parser(__doc__).parse_args()
    RESULTS.mkdir(exist_ok=True)
    if arguments.done:
        folders = [Search.open(path) for path in arguments.done]
    else:
        names = arguments.names or BESIDE
        sheets = [RawConfig.read(HERE / "small" / f"{name}.yaml") for name in names]
        folders = [fedsim.tune(sheet, out=arguments.out, progress=print) for sheet in sheets]
    for folder in folders:
        name = str(folder.manifest["name"]).removeprefix(f"{HERE.name}-")
        objectives, space = folder.manifest["objectives"], folder.manifest["space"]
        found = trials(folder, name)
        found.to_csv(RESULTS / f"{name}.csv", index=False, float_format="%.6g")
        called = {LABELS[column]: best for column, best in objectives.items()}
        pareto.draw(found.rename(columns=LABELS), called, RESULTS / f"{name}.png")
        print(f"\n## {name}")
        for text in tables(found, objectives, space, folder.importance):
            print(text)


if __name__ == "__main__":
    main()
