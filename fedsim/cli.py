"""The command line."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from fedsim import atomic
from fedsim.component import first_line
from fedsim.data import datasets, partitions
from fedsim.data.labels import draw_labels, label_names, label_table
from fedsim.errors import BadInput, FedsimError, RunError
from fedsim.experiment import Experiment
from fedsim.federation import cohort_size
from fedsim.federation.federation import cut_blocks
from fedsim.federation.placement import Node, actors_on, plan_actors
from fedsim.launch import connect, resume, run
from fedsim.methods import methods
from fedsim.models import models
from fedsim.results.folder import Folder, RunFolder
from fedsim.results.run import Run
from fedsim.results.summary import digits, in_words, score_of, scores_of
from fedsim.sheet import Sheet
from fedsim.simulate import Progress, prepare

if TYPE_CHECKING:  # they take a second to import, and few commands need them
    from fedsim.sweep.grid import GridFolder
    from fedsim.sweep.search import SearchFolder

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Explainable federated learning, simulated on Ray.",
)
# No emoji: «:100:» is a line number, not a pictogram.
out = Console(
    highlight=False,
    soft_wrap=True,
    emoji=False,
    width=None if sys.stdout.isatty() else 160,  # a file or a pipe has no width of its own
)
err = Console(stderr=True, soft_wrap=True, emoji=False)

File = Annotated[Path, typer.Argument(help="An experiment file (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="section.key=value, as many as you like.", show_default=False),
]
OutFolder = Annotated[Path, typer.Option("--out", help="Where runs lie.")]
FileOrFolder = Annotated[
    Path,
    typer.Argument(help="An experiment file; with --resume, a folder.", show_default=False),
]
GoOn = Annotated[
    bool, typer.Option("--resume", help="Go on with the folder given: run what is missing.")
]


def main() -> None:
    """Run the command line; errors meant for a person become one message and an exit code."""
    sys.path.insert(0, "")  # so that the user's own `module:Name` is found beside their files
    if os.environ.get("RAY_JOB_STOP_SIGNAL") == "SIGINT":
        # This is a job, to be stopped so; a cluster that was started in a shell's background
        # ignores that signal, and so would all that it starts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app()
    except FedsimError as error:
        err.print(f"error: {error}", markup=False, highlight=False)
        sys.exit(error.exit_code)


@app.command("run")
def run_command(
    file: File,
    overrides: Overrides = None,
    out_folder: OutFolder = Path("runs"),
    name: Annotated[
        str | None, typer.Option(help="Instead of the experiment's name.", show_default=False)
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the complete experiment, and stop.")
    ] = False,
) -> None:
    """Run an experiment."""
    changes = [*(overrides or []), *([f"name={json.dumps(name)}"] if name else [])]
    experiment = Experiment.load(file, changes)
    if print_config:
        out.print(experiment.to_yaml(), end="", markup=False)
        return
    with _Screen() as screen:
        done = run(experiment, out_folder, screen.show, screen.start)
    _summary(done)


@app.command("resume")
def resume_command(
    folder: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
) -> None:
    """Go on with a run that broke off, from its last checkpoint."""
    with _Screen() as screen:
        done = resume(folder, screen.show, screen.start)
    _summary(done)


@app.command("grid")
def grid_command(
    file: FileOrFolder,
    overrides: Overrides = None,
    out_folder: OutFolder = Path("runs"),
    go_on: GoOn = False,
) -> None:
    """Run every cell of an experiment file's grid section."""
    from fedsim.sweep.grid import resume_grid, run_grid

    with _Lines("grid") as lines:
        if go_on:
            folder = resume_grid(_only_folder(file, overrides), lines.tell, lines.start)
        else:
            folder = run_grid(
                Sheet.read(file, overrides or []), out_folder, lines.tell, lines.start
            )
        lines.end(folder.manifest["status"])
    _grid_summary(folder)
    _tell_failures([run for run in folder.manifest["cells"] if run["status"] == "failed"])


@app.command("tune")
def tune_command(
    file: FileOrFolder,
    overrides: Overrides = None,
    out_folder: OutFolder = Path("runs"),
    go_on: GoOn = False,
) -> None:
    """Tune the hyper-parameters of an experiment file's search section."""
    from fedsim.sweep.search import resume_search, run_search

    with _Lines("tune") as lines:
        if go_on:
            folder = resume_search(_only_folder(file, overrides), lines.tell, lines.start)
        else:
            sheet = Sheet.read(file, overrides or [])
            folder = run_search(sheet, out_folder, lines.tell, lines.start)
        lines.end(folder.manifest["status"])
    _search_summary(folder)
    trials = folder.table("trials")
    _tell_failures(trials[trials["status"] == "failed"].to_dict("records"))


def _only_folder(path: Path, overrides: Sequence[str] | None) -> Path:
    if overrides:
        raise BadInput(f"--resume goes on with what is in {path}; it takes no overrides")
    return path


class _Lines:
    """Progress of a grid or a search: a line for each run that ends."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._folder: Folder | None = None

    def __enter__(self) -> _Lines:
        return self

    def start(self, folder: Folder) -> None:
        self._folder = folder
        out.print(f"{folder.kind} folder: {_short(folder.path)}", markup=False)

    def tell(self, line: str) -> None:
        out.print(line, markup=False)

    def end(self, status: str) -> None:
        if status == "interrupted":
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self._folder is None:
            return
        how = "interrupted" if issubclass(kind, KeyboardInterrupt) else "broke off"
        err.print(
            f"{how}; to go on:\n  fedsim {self._command} --resume {_short(self._folder.path)}",
            markup=False,
            highlight=False,
        )
        if issubclass(kind, KeyboardInterrupt):
            sys.exit(130)


def _grid_summary(folder: GridFolder) -> None:
    """The end of a grid as a table."""
    summary = folder.table("summary")
    if summary.empty:
        return
    axes = list(folder.manifest["axes"])
    table = Table(box=None, pad_edge=False)
    figures = {"last": "last round", "best": "best round", "last5": "mean of last 5"}
    for column in (*axes, "seeds", *figures.values(), "sent"):
        table.add_column(column, justify="left" if column in axes else "right")
    tested, aimed = "p_value" in summary, "reached" in summary
    if aimed:
        table.add_column(f"sent to reach {folder.manifest['target']:g}", justify="right")
    if tested:
        table.add_column("p", justify="right")
    for row in summary.to_dict("records"):  # iterrows would make floats of counts
        cells = [str(row[axis]) for axis in axes] + [str(row["seeds"])]
        cells += [_spread(row[f"{figure}_mean"], row[f"{figure}_std"]) for figure in figures]
        cells.append(_size(row["total_bytes_mean"]))
        if aimed:
            reached = f"({row['reached']}/{row['seeds']})"
            some = row["reached"] > 0
            cells.append(f"{_size(row['bytes_to_target_mean'])} {reached}" if some else "never")
        if tested:
            cells.append("" if np.isnan(row["p_value"]) else f"{row['p_value']:.3f}")
        table.add_row(*cells)
    out.print(table)
    score = in_words(scores_of(folder.table("rounds")))
    words = f"{score}: mean ± standard deviation over seeds"
    if tested:
        against = ", ".join(f"{k}={v}" for k, v in folder.manifest["baseline"].items())
        words += f"; p: one-tailed Welch test, mean of last 5 above that of {against}"
    out.print(words, markup=False)
    out.print(f"grid folder: {_short(folder.path)}", markup=False)


def _spread(mean: float, std: float) -> str:
    return digits(mean) if np.isnan(std) else f"{digits(mean)} ± {digits(std)}"


def _search_summary(folder: SearchFolder) -> None:
    """The end of a search as a table: its Pareto front, or its five best."""
    objectives = folder.manifest["objectives"]
    several = len(objectives) > 1
    rows = folder.table("trials")
    rows = rows[rows["status"] == "finished"]
    if rows.empty:
        raise RunError(f"no trial came to its end; {folder.path / 'trials.csv'} says why")
    if several:
        rows = folder.table("pareto")
    name, mode = next(iter(objectives.items()))
    rows = rows.sort_values(name, ascending=mode == "min", kind="stable")
    rows = rows if several else rows.head(5)
    table = Table(box=None, pad_edge=False)
    for column in ("trial", *folder.manifest["space"], *objectives):
        table.add_column(column, justify="right")
    for _, row in rows.iterrows():
        values = [row[key] for key in (*folder.manifest["space"], *objectives)]
        table.add_row(
            str(row["trial"]),
            *(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values),
        )
    out.print(table)
    out.print(
        "the Pareto front of the trials; pareto.png shows it" if several else "the best trials",
        markup=False,
    )
    shares = folder.table("importance")
    for objective in objectives:
        ranked = shares.sort_values(objective, ascending=False)
        words = ", ".join(
            f"{key} {share:.2f}"
            for key, share in zip(ranked["hyper-parameter"], ranked[objective], strict=True)
            if not np.isnan(share)
        )
        if words:
            out.print(f"importance for {objective}: {words}", markup=False)
    out.print(f"best, ready to run: fedsim run {_short(folder.path / 'best.yaml')}", markup=False)
    out.print(f"search folder: {_short(folder.path)}", markup=False)


def _tell_failures(failed: Sequence[Mapping[Any, Any]]) -> None:
    """Name the runs that failed, if there are any, and leave with exit code 1."""
    if failed:
        lines = "".join(f"\n  {run['folder']}: {run['error']}" for run in failed)
        raise RunError(f"{len(failed)} run(s) failed:{lines}")


class Sort(StrEnum):
    """What there are lists of."""

    methods = "methods"
    datasets = "datasets"
    models = "models"
    partitions = "partitions"


@app.command("list")
def list_command(
    sort: Annotated[Sort, typer.Argument(help="What to list.", show_default=False)],
) -> None:
    """List what an experiment can name, with the keys that each takes and their defaults."""
    registry: Any = {
        Sort.methods: methods,
        Sort.datasets: datasets,
        Sort.models: models,
        Sort.partitions: partitions,
    }[sort]
    table = Table(box=None, pad_edge=False)
    for column in ("name", "keys", "what it is"):
        table.add_column(column)
    for name, component in registry.items():
        keys = []
        for key, field in component.model_fields.items():
            if key != registry.key:
                keys.append(key if field.is_required() else f"{key}={_plain(field.default)}")
        table.add_row(name, "\n".join(keys), first_line(component), end_section=True)
    out.print(table)
    out.print(f"\nand your own: {registry.key}: package.module:Name", markup=False)


@app.command("data")
def data_command(
    file: File,
    overrides: Overrides = None,
    picture: Annotated[
        Path | None, typer.Option(help=r"Where to draw it. \[default: <name>-labels.png]")
    ] = None,
) -> None:
    """Show who holds which labels, as a table and as a picture."""
    experiment = Experiment.load(file, overrides or [])
    dataset, holdings, _ = prepare(experiment)
    counts, names = label_table(dataset, holdings), label_names(dataset)
    table = Table(box=None, pad_edge=False)
    for column in ("client", *names, "all", "labelled", "unlabelled", "test"):
        table.add_column(column, justify="right")
    shown = min(len(counts), 30)
    for k in range(shown):
        parts = (holdings.train[k], holdings.unlabelled[k], holdings.test[k])
        cells = [*counts[k], counts[k].sum(), *map(len, parts)]
        table.add_row(str(k), *(str(n) if n else "·" for n in cells))
    out.print(table)
    if shown < len(counts):
        out.print(f"… and {len(counts) - shown} clients more")
    sizes = counts.sum(axis=1)
    axis, groups = (
        ("class", "classes") if dataset.classes else ("target", "parts of the target's range")
    )
    out.print(
        f"\n{len(counts)} clients, {sizes.sum():,} of {len(dataset.y):,} training examples; "
        f"a client holds {sizes.min()} to {sizes.max()}, and "
        f"{(counts > 0).sum(axis=1).mean():.1f} of {len(names)} {groups} on average"
    )
    path = picture or Path(f"{experiment.name}-labels.png")
    draw_labels(counts, names, path, axis)
    out.print(f"drawn: {path}")


@app.command("report")
def report_command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Of runs, grids and searches; several are compared.",
            metavar="FOLDER",
            show_default=False,
        ),
    ],
    page: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The page; if not given, report.html, in the folder if there is only one.",
            show_default=False,
        ),
    ] = None,
    latex: Annotated[
        Path | None, typer.Option(help="Write the results as a LaTeX table, too.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the summary table, too.")] = None,
) -> None:
    """Show runs on one web page, with curves, tables and all that is known of them."""
    from fedsim.results.report import Report

    report = Report(folders)
    files = {page or Path(folders[0] if len(folders) == 1 else "", "report.html"): report.html()}
    if latex:
        files[latex] = report.latex()
    if csv:
        files[csv] = report.csv()
    for path, text in files.items():
        if path.is_dir():
            raise RunError(f"{path}: is a folder, not a file to write")
        try:
            atomic.write(path, text.encode())
        except OSError as error:
            raise RunError(f"{path}: cannot be written: {error.strerror}") from error
        out.print(f"written: {_short(path.absolute())}", markup=False)


@app.command("doctor")
def doctor_command(
    file: Annotated[Path | None, typer.Argument(help="An experiment file (YAML).")] = None,
    overrides: Overrides = None,
) -> None:
    """Say what Ray sees, and what an experiment would get of it."""
    import ray
    import torch

    experiment = Experiment.load(file, overrides or []) if file else None
    out.print(f"python {sys.version.split()[0]}, torch {torch.__version__}, ray {ray.__version__}")
    cards = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    out.print(f"GPUs that torch sees in this process: {', '.join(cards) or 'none'}")
    connect(experiment.engine if experiment else None)
    try:
        nodes = [Node.of(node) for node in ray.nodes() if node["Alive"]]
        out.print(f"Ray at {ray.get_runtime_context().gcs_address}: {len(nodes)} node(s)")
        for node in nodes:
            out.print(f"  {node.describe()}")
        if experiment is not None:
            _diagnose(experiment, nodes)
    finally:
        ray.shutdown()


def _diagnose(experiment: Experiment, nodes: Sequence[Node]) -> None:
    """What the experiment would get. Raises what would stop it."""
    _, holdings, _ = prepare(experiment)
    cohort = cohort_size(experiment.train.participation, len(holdings))
    sizes = holdings.train.lengths
    out.print(
        f"{experiment.name}: {len(holdings)} clients with {sizes.min()} to {sizes.max()} training "
        f"examples, {cohort} of them a round"
    )
    if experiment.engine.kind == "local":
        out.print("engine.kind=local: everything in one process, Ray is not used")
        return
    actors = plan_actors(experiment.engine, nodes)
    blocks = len(cut_blocks(np.arange(cohort), sizes[:cohort]))
    out.print(
        f"{actors} client actor(s) of {experiment.engine.cpus_per_actor} CPU(s) and "
        f"{experiment.engine.gpus_per_actor:g} GPU(s); at most "
        f"{' + '.join(str(actors_on(node, experiment.engine)) for node in nodes)} fit"
    )
    out.print(f"{blocks} blocks of clients a round, about {cohort / actors:.1f} clients an actor")
    if blocks < actors:
        out.print(f"{actors - blocks} actor(s) will idle: a round has {blocks} blocks only")


Address = Annotated[
    str | None,
    typer.Option(
        help="Of the cluster's dashboard: http://head:8265. "
        r"\[default: RAY_API_SERVER_ADDRESS, or RAY_ADDRESS]",
        show_default=False,
    ),
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Its id.", show_default=False)]


@app.command("submit")
def submit_command(
    file: File,
    overrides: Overrides = None,
    address: Address = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE for the job, as often as you like.", show_default=False),
    ] = None,
    out_folder: Annotated[
        str, typer.Option("--out", help="Where results of jobs lie on the cluster.")
    ] = "~/fedsim-jobs",
) -> None:
    """Send a run, grid or search to a Ray cluster, and follow its log."""
    from fedsim.sweep.submit import follow, submit

    cluster, job = submit(address, file, overrides or [], env or [], out_folder)
    where = f"{job.id} --address {address}" if address else job.id
    out.print(f"job {job.id}: fedsim {job.kind}, into {job.folder} on the cluster", markup=False)
    try:
        follow(cluster, job, lambda text: typer.echo(text, nl=False))
    except KeyboardInterrupt:
        err.print(
            f"\nthe job goes on without being followed; to stop it, and to bring its results:\n"
            f"  fedsim stop {where}\n  fedsim fetch {where}",
            markup=False,
            highlight=False,
        )
        sys.exit(130)
    out.print(f"to bring the results here:\n  fedsim fetch {where}", markup=False)


@app.command("jobs")
def jobs_command(address: Address = None) -> None:
    """List what was sent to a cluster."""
    from fedsim.sweep.submit import Cluster, jobs

    table = Table(box=None, pad_edge=False)
    for column in ("job", "what", "status", "started", "took"):
        table.add_column(column, no_wrap=column == "job", overflow="fold")
    for job in jobs(Cluster(address)):
        began = job.started or time.time()
        table.add_row(
            job.id,
            f"{job.kind} {job.name}",
            job.status.lower(),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began)),
            f"{(job.ended or time.time()) - began:.0f} s",
        )
    out.print(table if table.row_count else "no jobs")


@app.command("stop")
def stop_command(job: JobId, address: Address = None) -> None:
    """Stop a job; what it has done so far stays."""
    from fedsim.sweep.submit import Cluster, stop

    stop(Cluster(address), job)
    out.print(f"stopped: {job}", markup=False)


@app.command("fetch")
def fetch_command(
    job: JobId,
    address: Address = None,
    out_folder: Annotated[Path, typer.Option("--out", help="Where runs lie.")] = Path("runs"),
) -> None:
    """Bring the results of a job here, also of one that still goes on."""
    from fedsim.sweep.submit import Cluster, fetch

    for folder in fetch(Cluster(address), job, out_folder):
        out.print(f"fetched: {_short(folder)}", markup=False)


class _Screen:
    """Progress of a run: one live line on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._folder: RunFolder | None = None
        self._first = self._latest = self._rounds = 0
        self._began = time.monotonic()

    def __enter__(self) -> _Screen:
        return self

    def start(self, folder: RunFolder) -> None:
        self._folder = folder
        self._rounds = folder.experiment.train.rounds
        out.print(f"run folder: {_short(folder.path)}", markup=False)
        if out.is_terminal:
            self._bar = Bar(
                TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=24),
                TextColumn("{task.description}"),
                TimeRemainingColumn(compact=True),
                console=out,
                transient=True,
            )
            self._bar.add_task("starting", total=self._rounds)
            self._bar.start()

    def show(self, event: Progress) -> None:
        if isinstance(event, str):
            (self._bar.console if self._bar else out).print(event, markup=False)
            return
        self._latest = event["round"]
        if not self._first:
            self._first, self._began = self._latest, time.monotonic()
        line = self._line(event)
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=self._latest, description=line)
        else:
            out.print(f"round {self._latest}/{self._rounds}  {line}", markup=False)

    def _line(self, row: dict[str, Any]) -> str:
        score = score_of(row)
        parts = [] if score is None else [f"{score.words} {digits(row[score.column])}"]
        traffic = row["total_bytes_up"] + row["total_bytes_down"]
        parts.append(f"{_size(traffic)} sent")
        if self._latest > self._first:
            rate = (self._latest - self._first) / (time.monotonic() - self._began)
            parts.append(f"{rate:.2g} rounds/s")
        return "  ".join(parts)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar:
            self._bar.stop()
        if kind is None or self._folder is None:
            return
        how = "interrupted" if issubclass(kind, KeyboardInterrupt) else "broke off"
        when = f" after round {self._latest}" if self._latest else ""
        err.print(
            f"{how}{when}; to go on:\n  fedsim resume {_short(self._folder.path)}",
            markup=False,
            highlight=False,
        )
        if issubclass(kind, KeyboardInterrupt):
            sys.exit(130)


def _summary(done: Run) -> None:
    """The end of a run as a small table."""
    rounds = done.rounds
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a path that is cut off opens nothing
    score = score_of(rounds)
    if score is not None:
        scores = rounds[score.column].dropna()
        best = int(scores.argmax())
        table.add_row(f"{score.words}, last round", digits(scores.iloc[-1]))
        table.add_row(f"{score.words}, mean of last 5", digits(scores.iloc[-5:].mean()))
        table.add_row(
            f"{score.words}, best",
            f"{digits(scores.iloc[best])} (round {rounds.loc[scores.index[best], 'round']})",
        )
    last = rounds.iloc[-1]
    table.add_row("sent up, down", f"{_size(last.total_bytes_up)}, {_size(last.total_bytes_down)}")
    table.add_row("time", f"{done.manifest['wall_seconds']:.1f} s")
    table.add_row("result hash", done.result_hash)
    table.add_row("run folder", _short(done.path))
    out.print(table)


def _size(count: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def _short(path: Path) -> str:
    """A path as a person would type it from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _plain(value: Any) -> str:
    return "" if value is None else str(value)
