"""Run FedRNL's grids and tabulate them: python run.py [NAME ...] [--similarity] [--out runs]

NAMEs are grids of small/ without their ending; with --done FOLDER ..., finished grids are
tabulated instead. `real` needs real reviews below $FEDSIM_DATA (see real.py), and takes word
vectors (--vectors FILE). With --similarity --done FOLDER, runs of `methods` on beer are replayed
to compare the encoders of their clients. Writes a row for each run to results/NAME.csv, one for
each round with scores to results/NAME-rounds.csv, and prints tables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pandas as pd
import torch

from fedsim import Grid
from fedsim.analysis.replay import ModelSnapshot
from fedsim.config.file import RawConfig
from fedsim.results.significance import paired

sys.path.insert(0, str(Path(__file__).parents[1]))
from real import write as write_real
from similarity import encoder_similarity
from tables import against, finished, grids, parser, spread, table, tested

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SCORES = ("accuracy", "rationale_f1", "chance_f1", "chosen", "comprehensiveness", "sufficiency")
COMPARED = ("accuracy", "rationale_f1")
PROBED = 200  # test reviews on which encoders are compared


def collect(grids: list[Grid]) -> pd.DataFrame:
    """A row for each run: the last round's scores."""
    rows = []
    for cell, run in finished(grids):
        last = run.rounds.iloc[-1]
        told = [*SCORES, "balanced_accuracy", "majority", "encoder_distance"]
        told += [name for name in last.index if "/" in name]
        scores = {name: last[name] for name in told if name in last}
        best = run.rounds["accuracy"].max()
        rows.append({**cell, **scores, "best": best, "result_hash": run.result_hash})
    return pd.DataFrame(rows)


def course(grids: list[Grid]) -> pd.DataFrame:
    """A row for each run and each round with scores."""
    names = ("round", "accuracy", "rationale_f1", "chosen", "encoder_distance")
    rows = [
        {**cell, **{name: scores[name] for name in names if name in scores}}
        for cell, run in finished(grids)
        for scores in run.rounds.dropna(subset=["accuracy"]).to_dict("records")
    ]
    return pd.DataFrame(rows)


def label(value: object) -> str:
    """Numbers as they are in the grid's file."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def by(results: pd.DataFrame, axis: str) -> str:
    """A line for each value of an axis."""
    rows = []
    for value, runs in results.groupby(axis, sort=False):
        cells = [spread(runs[name]) for name in SCORES]
        distance = runs.get("encoder_distance")
        rows.append([label(value), *cells, "" if distance is None else spread(distance, 2)])
    header = [axis, "accuracy", "F1", "chance", "chosen", "comprehensiveness", "sufficiency"]
    return table([*header, "‖θ_e − φ_e‖"], rows)


def scored(
    results: pd.DataFrame, axis: str, tests: Mapping[str, Mapping[str, list[str]]], above: str
) -> str:
    """Accuracy and F1 of each value of an axis, each beside its test.

    Args:
        tests: cells of `tables.tested` by score and value; those of a value may be missing.
        above: title of their differences.
    """
    rows = []
    for value, runs in results.groupby(axis, sort=False):
        cells = [label(value)]
        for score, by_value in tests.items():
            cells += [spread(runs[score]), *by_value.get(label(value), [""] * 3)]
        rows.append(cells)
    tested = [above, "p, Holm", "detectable"]
    return table([axis, "accuracy", *tested, "F1", *tested], rows)


def compared(results: pd.DataFrame, ours: str = "FedRNL") -> str:
    """Each method, and what FedRNL is above it, by pairs of runs with the same seed."""
    tests = {score: against(results, ours, score) for score in COMPARED}
    return scored(results, "method", tests, f"{ours} above by")


def along(results: pd.DataFrame, axis: str) -> Iterator[str]:
    """Each value of an axis less the first, by pairs of runs with the same seed."""
    of = {value: runs.set_index("seed") for value, runs in results.groupby(axis, sort=False)}
    first, *others = of
    tests = {
        score: tested({label(v): paired(of[v][score], of[first][score]) for v in others})
        for score in COMPARED
    }
    yield scored(results, axis, tests, f"above {label(first)} by")
    yield "\n" + by(results, axis)


def methods(results: pd.DataFrame) -> Iterator[str]:
    yield compared(results)
    yield "\n" + by(results, "method")


Tables = Callable[[pd.DataFrame], Iterator[str]]


def each(axis: str, title: str, made: Tables) -> Tables:
    """Tables for each value of an axis, below a title with the value."""

    def tables(results: pd.DataFrame) -> Iterator[str]:
        for value, part in results.groupby(axis, sort=False):
            yield f"\n{title.format(label(value))}\n"
            yield from made(part)

    return tables


def real(results: pd.DataFrame) -> Iterator[str]:
    columns = ("accuracy", "balanced_accuracy", "majority", "rationale_f1", "chance_f1", "chosen")
    for data, part in results.groupby("data", sort=False):
        rows = [
            [str(method), *(spread(runs[name]) for name in columns)]
            for method, runs in part.groupby("method", sort=False)
        ]
        header = [str(data), "accuracy", "balanced", "majority", "F1", "chance", "chosen"]
        yield "\n" + table(header, rows)


TABLES: dict[str, Tables] = {
    "methods": each("domain", "{}", methods),
    "sixty": methods,
    "distances": each("lam", "λ = {}", partial(along, axis="method.encoder_loss")),
    "clients": each("partition.clients", "{} clients", lambda results: iter([compared(results)])),
    "epochs": partial(along, axis="train.local_epochs"),
    "lambda": each("schedule", "{}", partial(along, axis="method.lam")),
    "mixed": each("domain", "{}", methods),
    "real": real,
}


def similarity(grids: list[Grid]) -> pd.DataFrame:
    """How alike the encoders of clients are after their first and last local training (Fig. 2)."""
    rows = []
    for cell, run in finished(grids):
        if cell["domain"] != "beer" or cell["method"] not in ("FedAvg", "FR", "FedRNL"):
            continue
        K, T = run.manifest["clients"], run.experiment.train.rounds
        for t in (1, T):
            clients = ModelSnapshot.of_clients(run, range(K), t)
            networks = [client.network() for client in clients]
            again = clients[0].again
            tests = again.fed.server.prepare(again.dataset.test_x, again.dataset.test_y).x
            probe = tests[torch.linspace(0, len(tests) - 1, PROBED).long()]  # of all aspects
            rows.append({**cell, "round": t, **encoder_similarity(networks, probe)})
    return pd.DataFrame(rows)


def similar(results: pd.DataFrame) -> str:
    rows = [
        [str(method), str(t), *(spread(runs[n]) for n in ("generator", "predictor", "chosen"))]
        for (method, t), runs in results.groupby(["method", "round"], sort=False)
    ]
    return table(["method", "round", "CKA of generators", "of predictors", "chosen"], rows)


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--similarity", action="store_true", help="compare encoders, no more")
    command.add_argument("--vectors", type=Path, help="of words of real reviews; else random ones")
    arguments = command.parse_args()
    RESULTS.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    if arguments.similarity:
        if not arguments.done:
            command.error("--similarity: give the grid `methods` with --done")
        found = similarity(grids(arguments, HERE, ["methods"])["methods"])
        found.to_csv(RESULTS / "similarity.csv", index=False, float_format="%.6g")
        print(similar(found))
        return

    def with_files(sheet: RawConfig) -> RawConfig:
        if sheet.content["data"]["name"] != "beer":
            return sheet
        root = arguments.out / "real-reviews"
        try:
            write_real(root)
        except OSError as error:
            command.error(f"real: {error}; its reviews lie below $FEDSIM_DATA (see real.py)")
        changes = {"data.root": str(root)}
        if arguments.vectors is not None:
            changes["data.vectors"] = str(arguments.vectors)
        return sheet.changed(changes, "files")

    for name, made in grids(arguments, HERE, TABLES, with_files).items():
        results = collect(made)
        for found, file in ((results, name), (course(made), f"{name}-rounds")):
            found.to_csv(RESULTS / f"{file}.csv", index=False, float_format="%.6g")
        print(f"\n## {name}\n", *TABLES[name](results), sep="\n")


if __name__ == "__main__":
    main()
