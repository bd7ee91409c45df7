"""Run FedSeIT's grids and tabulate them: python run.py [NAME ...] [--vectors FILE] [--out runs]

NAMEs are grids of small/ without their ending; with --done FOLDER ..., finished grids are
tabulated instead. Needs TREC, R8 and TMN below $FEDSIM_DATA. Writes a row for each run to
results/NAME.csv, pictures beside it, and prints the tables of the README. With --clients, it shows
memory of 20 clients with ten tasks each, and what clients are sent as they become more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.ticker import MaxNLocator

import fedsim
from fedsim import Grid
from fedsim.config.file import RawConfig
from fedsim.explain.pictures.canvas import class_colours, new_figure, place, save
from fedsim.objectives.continual import continual
from fedsim.results.summary import of_run

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.memory import own_megabytes, stored_megabytes
from tables import against, finished, grids, parser, spread, table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
KINDS = {  # of what is sent, and the titles of their columns
    "adaptive": "A",
    "adaptive_dense": "A, if dense",
    "selected": "A's of others",
    "selected_dense": "if dense",
    "centres": "centres",
}
CLIENT = 2  # whose tasks are drawn: the paper's third


def collect(grids: list[Grid]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row for each run, and accuracy on each task after each round."""
    rows, curves = [], []
    for cell, run in finished(grids):
        clients = run.manifest["clients"]
        row = {**cell, **asdict(continual(run.tasks))}
        if run.experiment.evaluate.every > 1:
            row["first_round"] = nan  # that of the first round with scores
        row["megabytes"] = of_run(run.rounds, run.primary_metric)["total_bytes"] / clients / 1e6
        for kind in KINDS:  # of one client
            if f"{kind}_bytes" in run.clients:
                row[kind] = run.clients[f"{kind}_bytes"].sum() / clients / 1e6
        given = run.explanations
        if len(given):
            row["of_best_choice"] = (
                given.groupby(["client", "task"])["of_best_choice"].first().mean()
            )
        rows.append({**row, "result_hash": run.result_hash})
        curves.append(run.tasks.assign(**cell))
    return pd.DataFrame(rows), pd.concat(curves, ignore_index=True)


SCORES = {  # and the titles of their columns
    "tta": "TTA",
    "first_round": "first round",
    "forgetting": "forgetting",
    "backward": "backward",
    "of_best_choice": "choice",
}


def by_task_set(results: pd.DataFrame) -> Iterator[tuple[dict[str, str], pd.DataFrame]]:
    """The rows of each data set and, if the grid varies it, each λ₂; with the cells of both."""
    columns = {"data": "data", "lam2": "λ₂"}
    keys = [key for key in columns if key in results]
    for values, part in results.groupby(keys, sort=False):
        yield {columns[k]: str(v) for k, v in zip(keys, values, strict=True)}, part


def compared(results: pd.DataFrame, ours: str, column: str = "tta") -> str:
    """Each method's mean of a column, and what one of them is above it, by pairs of one seed."""
    rows, header = [], ["method", SCORES[column], f"{ours} above by", "p, Holm", "detectable"]
    for cells, part in by_task_set(results):
        tests = against(part, ours, column)
        for method, runs in part.groupby("method", sort=False):
            row = [str(method), spread(runs[column]), *tests.get(str(method), [""] * 3)]
            rows.append(cells | dict(zip(header, row, strict=True)))
    return table(list(rows[0]), [list(row.values()) for row in rows])


def further(results: pd.DataFrame) -> str:
    """Forgetting, backward transfer, choice of tasks, and traffic of a client."""
    columns = [c for c in ("forgetting", "backward", "of_best_choice") if c in results]
    kinds = [kind for kind in KINDS if kind in results]
    rows = []
    for cells, part in by_task_set(results):
        for method, runs in part.groupby("method", sort=False):
            row = cells | {"method": str(method)}
            row |= {SCORES[c]: spread(runs[c]) for c in columns}
            row |= {"MB a client": f"{runs['megabytes'].mean():.1f}"}
            sent = runs[kinds].mean()
            row |= {KINDS[k]: "–" if isnan(sent[k]) else f"{sent[k]:.2f}" for k in kinds}
            rows.append(row)
    return table(list(rows[0]), [list(row.values()) for row in rows])


def methods(results: pd.DataFrame, ours: str) -> Iterator[str]:
    yield compared(results, ours) + "\n"
    scored = results.dropna(subset="first_round")
    if len(scored):
        yield compared(scored, ours, "first_round") + "\n"
    yield further(results)


def table2(results: pd.DataFrame) -> Iterator[str]:
    """As described, and as released."""
    released = results["method"].str.endswith("as released")
    yield from methods(results[~released], "FedSeIT")
    yield "\n" + compared(results[released], "FedSeIT as released")


def bounds(results: pd.DataFrame) -> Iterator[str]:
    """Beside FedSeIT, tuned, at λ₂ = 1."""
    tuned = pd.read_csv(RESULTS / "transfer.csv")
    ours = tuned[(tuned["method"] == "FedSeIT") & (tuned["lam2"] == 1)].drop(columns="lam2")
    yield compared(pd.concat([ours, results], ignore_index=True), "FedSeIT") + "\n"
    rows = []
    for (data, method), runs in results.groupby(["data", "method"], sort=False):
        columns = ("first_round", "forgetting", "backward", "forward")
        cells = [spread(runs[c]) for c in columns]
        rows.append([str(data), str(method), *cells, f"{runs['megabytes'].mean():.1f}"])
    header = ["data", "method", "first round", "forgetting", "backward", "forward"]
    yield table([*header, "MB a client"], rows)


TABLES: dict[str, Callable[[pd.DataFrame], Iterator[str]]] = {
    "transfer": partial(methods, ours="FedSeIT"),
    "selection": partial(methods, ours="K = 3"),
    "released": partial(methods, ours="FedSeIT as released"),
    "table2": table2,
    "trec50": partial(methods, ours="FedSeIT"),
    "bounds": bounds,
}


def draw(curves: pd.DataFrame, path: Path) -> None:
    """The paper's Fig. 5: accuracy of one client on each of its tasks, mean over seeds."""
    methods = ("FedWeIT", "without others", "FedSeIT")
    own = curves[(curves["client"] == CLIENT) & curves["seen"] & curves["method"].isin(methods)]
    mean = own.groupby(["task", "method", "round"])["accuracy"].mean()
    tasks = sorted(own["task"].unique())
    colours = dict(zip(methods, class_colours(len(methods)), strict=True))
    width, height, gap = 1.7, 1.7, 0.15
    figure = new_figure(len(tasks) * (width + gap) + 0.6, height + 0.8)
    for column, task in enumerate(tasks):
        axes = place(figure, 0.6 + column * (width + gap), 0.3, width, height)
        for method in methods:
            curve = mean[task, method]
            label = method if column == 0 else None
            axes.plot(curve.index, curve, color=colours[method], label=label, linewidth=1.3)
        axes.set_title(f"task {task + 1}", fontsize=8)
        axes.set_ylim(mean.min() - 0.02, mean.max() + 0.02)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.tick_params(labelsize=7, labelleft=column == 0)
        axes.set_xlabel("round", fontsize=8)
    figure.legend(loc="lower center", ncols=3, fontsize=8, bbox_to_anchor=(0.5, -0.08))
    save(figure, path)


def clients(out: Path) -> Iterator[str]:
    """Memory over ten tasks of 20 clients on two actors; traffic of 5, 10 and 20 clients."""
    _, sheet = RawConfig.read(HERE / "small" / "transfer.yaml").take("grid")
    common: dict[str, Any] = {
        "partition": {"kind": "tasks", "tasks": 10},
        "data.dimension": 300,  # as of the paper's vectors, for the size of A
        "train.local_epochs": 1,
        "train.rounds": 10,
        "evaluate.every": 10,
    }
    rows = []

    def note(event: dict[str, Any] | str) -> None:
        if isinstance(event, dict):
            used = own_megabytes()
            stored = stored_megabytes()
            cells = [used["driver"], used["actors"], stored, event["total_bytes_down"] / 20e6]
            rows.append([str(event["round"]), *(f"{c:.0f}" for c in cells)])

    sit = {"name": "fedseit", "top_k": 3}
    there = {"engine": {"kind": "ray", "actors": 2}, "method": sit, "partition.clients": 20}
    fedsim.run(sheet.changed({**common, **there}, "clients").build(fedsim.Experiment), out, note)
    header = ["task", "driver, MB", "both actors, MB", "object store, MB"]
    yield table([*header, "sent to a client so far, MB"], rows)
    rows = []
    for name, method in (("FedWeIT", {"name": "fedweit"}), ("SIT3", sit)):
        cells = []
        for count in (5, 10, 20):
            changes = {**common, "partition.clients": count, "method": method, "train.rounds": 4}
            changes["partition.tasks"] = 4
            experiment = sheet.changed(changes, "clients").build(fedsim.Experiment)
            sent = fedsim.run(experiment, out).rounds["total_bytes_down"].iloc[-1]
            cells.append(f"{sent / count / 1e6:.1f}")
        rows.append([name, *cells])
    yield "\n" + table(["sent to a client in four tasks, MB", "5 clients", "10", "20"], rows)


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--clients", action="store_true", help="memory, traffic, and no more")
    command.add_argument("--vectors", type=Path, help="word vectors; random ones, if not given")
    arguments = command.parse_args()
    RESULTS.mkdir(exist_ok=True)
    if arguments.clients:
        print(*clients(arguments.out), sep="\n")
        return

    def with_vectors(sheet: RawConfig) -> RawConfig:
        if arguments.vectors is None:
            return sheet
        return sheet.changed({"data.vectors": str(arguments.vectors)}, "--vectors")

    for name, made in grids(arguments, HERE, TABLES, with_vectors).items():
        results, curves = collect(made)
        results.to_csv(RESULTS / f"{name}.csv", index=False, float_format="%.6g")
        print(f"\n## {name}\n", *TABLES[name](results), sep="\n")
        if name == "transfer":
            for (data, lam2), part in curves.groupby(["data", "lam2"], sort=False):
                draw(part, RESULTS / f"rounds-{data}-{lam2}.png")


if __name__ == "__main__":
    main()
