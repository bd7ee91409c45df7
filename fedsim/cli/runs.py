"""Commands that run experiments, grids and searches."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsim.cli.console import (
    AsJson,
    File,
    FolderArgument,
    OutFolder,
    Overrides,
    RunArgument,
    Trust,
    app,
    duration,
    err,
    latest,
    out,
    print_json,
    print_table,
    short,
    size,
)
from fedsim.errors import ClientError, FedsimError, MethodError, RunError

if TYPE_CHECKING:  # these import torch: imported by the commands that need them
    import pandas as pd

    from fedsim import Grid, Run, Search
    from fedsim.launch.progress import TerminalBar
    from fedsim.results.sweeps import Sweep
    from fedsim.simulate import Progress

MOST_SCORES = 4  # of a grid, beside the primary metric, in the terminal
MOST_EXPLAINED = 10  # rows of scores of explanations
# The scores of explanations in the terminal; the first others if there are none of these.
MAIN_SCORES = (
    "deletion",
    "insertion",
    "agreement_rank",
    "global_agreement_rank",
    "reference_agreement_rank",
    "relevance_mass_signal",
)


@app.command("run")
def run_command(
    file: File,
    overrides: Overrides = None,
    out_folder: OutFolder = Path("runs"),
    name: Annotated[
        str | None, typer.Option(help="Use this name instead of the experiment's.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the complete experiment and exit.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment."""
    from fedsim import Experiment, run

    changes = [*(overrides or []), *([f"name={json.dumps(name)}"] if name else [])]
    experiment = Experiment.load(file, changes)
    if print_config:
        out.print(experiment.to_yaml(), end="")
        return
    if as_json:  # without progress
        from fedsim.analysis.comparison import figures

        done = run(experiment, out_folder, progress=False)
        print_json({"folder": str(done.path), **figures(done)})
        return
    with _Screen() as screen:
        done = run(experiment, out_folder, screen.show, screen.start)
    _conclude(done)


@app.command("resume")
def resume_command(folder: FolderArgument, trust: Trust = False) -> None:
    """Continue an interrupted run, grid or search."""
    from fedsim import resume
    from fedsim.results.manifest import kind_of

    folder = latest(folder, trust=trust)
    with _Lines() if kind_of(folder) in ("grid", "search") else _Screen() as screen:
        done = resume(folder, screen.show, screen.start)
    _conclude(done)


@app.command("continue")
def continue_command(
    folder: RunArgument,
    overrides: Annotated[
        list[str],
        typer.Argument(
            help="More rounds, such as train.rounds=200; name, engine, checkpoint, loggers and "
            "evaluate.every may change, too.",
            metavar="SECTION.KEY=VALUE...",
        ),
    ],
    out_folder: OutFolder = Path("runs"),
    trust: Trust = False,
) -> None:
    """Continue a finished run for more rounds, as a new run."""
    from fedsim import extend

    folder = latest(folder, "run", trust)
    with _Screen() as screen:
        done = extend(folder, overrides, out_folder, screen.show, screen.start)
    _conclude(done)


@app.command("grid")
def grid_command(
    file: File, overrides: Overrides = None, out_folder: OutFolder = Path("runs")
) -> None:
    """Run every cell of an experiment file's grid section."""
    from fedsim import grid

    with _Lines() as lines:
        done = grid(file, overrides or [], out_folder, lines.show, lines.start)
    _conclude(done)


@app.command("tune")
def tune_command(
    file: File, overrides: Overrides = None, out_folder: OutFolder = Path("runs")
) -> None:
    """Tune the hyper-parameters of an experiment file's search section."""
    from fedsim import tune

    with _Lines() as lines:
        done = tune(file, overrides or [], out_folder, lines.show, lines.start)
    _conclude(done)


def _conclude(done: Run | Grid | Search) -> None:
    from fedsim import Grid, Run

    if isinstance(done, Run):
        _summary(done)
        return
    if isinstance(done, Grid):
        _grid_summary(done)
        runs = done.cells
    else:
        _search_summary(done)
        runs = done.trials
    if failed := runs[runs["status"] == "failed"].to_dict("records"):
        lines = "".join(f"\n  {run['folder']}: {run['error']}" for run in failed)
        raise RunError(f"{len(failed)} run(s) failed:{lines}")


class _Lines:
    """Progress of a grid or a search: a line for each run that ends."""

    def __init__(self) -> None:
        self._folder: Run | Sweep | None = None
        self._latest = 0  # round of a run

    def __enter__(self) -> _Lines:
        return self

    def start(self, folder: Any) -> None:
        self._folder = folder
        out.print(f"{folder.kind} folder: {short(folder.path)}")

    def show(self, event: Any) -> None:
        out.print(event)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if kind is None or self._folder is None:
            return
        if isinstance(error, RunError) and not error.resumable:
            return
        when = f" after round {self._latest}" if self._latest else ""
        path, how = short(self._folder.path), "to continue"
        if isinstance(error, ClientError | MethodError):
            how = f"traceback in {path}/log.txt; once fixed, continue with"
        how += f":\n  fedsim resume {path}"
        advice = f"failed{when}; {how}"
        if isinstance(error, KeyboardInterrupt):
            err.print(f"interrupted{when}; {how}")
            sys.exit(130)
        if isinstance(error, FedsimError):
            error.advice = advice
        elif issubclass(kind, SystemExit):  # an error, whatever the exit code
            ended = RunError("code of the experiment has ended the process (sys.exit)")
            ended.advice = advice
            raise ended from error
        else:
            err.print(advice)


def _grid_summary(folder: Grid) -> None:
    from fedsim.objectives import VALIDATION
    from fedsim.results.summary import FIGURES, compared_by, in_words, mean_std, pairing

    summary = folder.summary
    if summary.empty:
        return
    axes = folder.axes
    runs = [run for run in folder.runs if run.status == "finished"]
    by = compared_by(runs)
    figures = {f: words for f, words in FIGURES.items() if f in ("last", "best", by)}
    tested = "p_holm" in summary
    table: dict[str, Iterable[str]] = {axis: summary[axis].map(str) for axis in axes}
    table["seeds"] = summary["seeds"].map(str)
    for figure, words in figures.items():
        table[words] = mean_std(summary[f"{figure}_mean"], summary[f"{figure}_std"])
    table["sent"] = summary["total_bytes_mean"].map(size)
    if "simulated_seconds_mean" in summary:
        table["simulated"] = summary["simulated_seconds_mean"].map(duration)
    if "reached" in summary:
        reached = summary[["bytes_to_target_mean", "reached", "seeds"]].itertuples(index=False)
        table[f"sent to reach {folder.manifest['target']:g}"] = [
            f"{size(sent)} ({some}/{of})" if some else "never" for sent, some, of in reached
        ]
    if tested:
        table["p"] = ["" if math.isnan(p) else f"{p:.3f}" for p in summary["p_holm"]]
    print_table([*table], zip(*table.values(), strict=True), right=table.keys() - set(axes))
    metrics = list(dict.fromkeys(run.primary_metric for run in runs))
    words = f"{in_words(metrics)}: mean ± standard deviation over seeds"
    if any(VALIDATION + run.primary_metric.column in run.rounds for run in runs):
        words += "; best round: by its score on the validation set"
    if tested:
        against = ", ".join(f"{k}={v}" for k, v in folder.manifest["baseline"].items())
        words += (
            f"; p: two-tailed t-test of the difference of {figures[by]} to {against}, "
            f"{pairing(summary)}, corrected for all comparisons (Holm)"
        )
    out.print(words)
    _print_further(summary, axes, runs)
    out.print(f"grid folder: {short(folder.path)}")


def _print_further(summary: pd.DataFrame, axes: Sequence[str], runs: Sequence[Run]) -> None:
    from fedsim.results.summary import STARS, further_scores, score_rows

    known = further_scores(summary, runs)
    if not known:
        return
    shown = dict(list(known.items())[:MOST_SCORES])
    out.print("")
    columns = [*axes, *shown.values()]
    print_table(columns, score_rows(summary, axes, shown), right=columns[len(axes) :])
    words = [STARS] if "p_holm" in summary else []
    if len(known) > MOST_SCORES:
        words.append(f"fedsim report shows {len(known) - MOST_SCORES} further scores")
    if words:
        out.print("; ".join(words))


def _search_summary(folder: Search) -> None:
    from fedsim.results.summary import aligned
    from fedsim.results.sweeps import best_trials

    objectives = folder.objectives
    finished = int((folder.trials["status"] == "finished").sum())
    if not finished:
        raise RunError(f"no trial finished; {folder.path / 'trials.csv'} says why")
    rows = best_trials(folder)
    if len(objectives) > 1:
        words = f"Pareto front, {len(rows)} of {finished} finished trials (see pareto.png):"
    elif len(rows) < finished:
        words = f"best {len(rows)} of {finished} finished trials:"
    else:
        words = "finished trials, best first:"
    out.print(f"\n{words}")
    columns = ("trial", *folder.space, *objectives)
    values = zip(*(aligned(rows[column]) for column in columns), strict=True)
    print_table(columns, values, right=columns)
    shares = folder.importance
    for objective in objectives:
        ranked = shares.set_index("hyper-parameter")[objective].dropna()
        ranked = ranked.sort_values(ascending=False)
        if words := ", ".join(f"{key} {share:.2f}" for key, share in ranked.items()):
            out.print(f"importance for {objective}: {words}")
    out.print(f"best, ready to run: fedsim run {short(folder.path / 'best.yaml')}")
    out.print(f"search folder: {short(folder.path)}")


class _Screen(_Lines):
    """Progress of a run: one live line on a terminal, plain lines elsewhere."""

    _bar: TerminalBar | None = None

    def start(self, folder: Run) -> None:
        from fedsim.launch.progress import RoundLine, TerminalBar

        super().start(folder)
        self._line = RoundLine(folder)
        self._rounds = folder.experiment.train.rounds
        if out.is_terminal:
            self._bar = TerminalBar(out, "round", transient=True)
            self._bar.update(0, self._rounds, "starting")

    def show(self, event: Progress) -> None:
        if isinstance(event, str):
            out.print(event)  # above the bar, if there is one
            return
        self._latest = event["round"]
        line = self._line(event)
        if self._bar:
            self._bar.update(self._latest, self._rounds, line)
        else:
            out.print(f"round {self._latest}/{self._rounds}  {line}")

    def __exit__(self, *error: Any) -> None:
        if self._bar:
            self._bar.close()
        super().__exit__(*error)


def _summary(done: Run) -> None:
    from fedsim.objectives.continual import continual
    from fedsim.results.summary import budgets, score_facts

    _print_explained(done)
    table = score_facts(done)
    if "accuracy" in done.tasks:
        found = continual(done.tasks)
        table["forgetting, backward"] = f"{found.forgetting:.4f}, {found.backward:.4f}"
    last = done.rounds.iloc[-1]
    table["sent up, down"] = f"{size(last.total_bytes_up)}, {size(last.total_bytes_down)}"
    if "total_simulated_seconds" in done.rounds:
        energy = f"{last.total_energy_joules / 3600:.3g} Wh"
        table["simulated"] = f"{duration(last.total_simulated_seconds)}, {energy}"
    table |= budgets(done)
    table["time"] = f"{done.manifest['wall_seconds']:.1f} s"
    table["result hash"] = done.result_hash
    table["run folder"] = short(done.path)
    print_table(("what", "value"), table.items(), whole=("what",), header=False)


def _print_explained(done: Run) -> None:
    """The main scores of explanations: a row for each explainer and kind of models."""
    from fedsim.explain.section import PREFIXES
    from fedsim.results.summary import digits

    table: dict[tuple[str, str], dict[str, str]] = {}
    for metric in done.explained:
        explainer, _, score = metric.column.rpartition("/")
        fitting = [whose for whose, prefix in PREFIXES.items() if score.startswith(prefix)]
        whose = max(fitting, key=lambda whose: len(PREFIXES[whose]))  # "" is the global model's
        scores = done.rounds.get(metric.column, done.rounds["round"][:0]).dropna()
        if len(scores):
            own = table.setdefault((explainer, whose), {})
            own[score.removeprefix(PREFIXES[whose])] = digits(scores.iloc[-1])
    if not table:
        return
    known = dict.fromkeys(score for own in table.values() for score in own)
    shown = [s for s in MAIN_SCORES if s in known] or [*known][:MOST_SCORES]
    heads = [s.removesuffix("_rank").removesuffix("_signal").replace("_", " ") for s in shown]
    rows = [
        (name if len(name) <= 24 else f"…{name[-23:]}", whose, *(own.get(s, "") for s in shown))
        for (name, whose), own in table.items()
    ]
    print_table(["explainer", "model", *heads], rows[:MOST_EXPLAINED], right=heads, whole=heads)
    more = f"… and {len(rows) - MOST_EXPLAINED} more; " if len(rows) > MOST_EXPLAINED else ""
    out.print(f"{more}all scores: fedsim report, or run.explanations in Python\n")
