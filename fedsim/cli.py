"""The command line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from fedsim.component import first_line
from fedsim.data import datasets, partitions
from fedsim.data.labels import draw_labels, label_table
from fedsim.errors import FedsimError
from fedsim.experiment import Experiment
from fedsim.federation import cohort_size
from fedsim.federation.federation import cut_blocks
from fedsim.federation.placement import Node, actors_on, plan_actors
from fedsim.launch import connect, resume, run
from fedsim.methods import methods
from fedsim.models import models
from fedsim.results.folder import RunFolder
from fedsim.results.run import Run
from fedsim.simulate import Progress, prepare

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Explainable federated learning, simulated on Ray.",
)
# No emoji: «:100:» is a line number, not a pictogram.
out = Console(highlight=False, soft_wrap=True, emoji=False)
err = Console(stderr=True, soft_wrap=True, emoji=False)

File = Annotated[Path, typer.Argument(help="An experiment file (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="section.key=value, as many as you like.", show_default=False),
]


def main() -> None:
    """Run the command line; errors meant for a person become one message and an exit code."""
    sys.path.insert(0, "")  # so that the user's own `module:Name` is found beside their files
    try:
        app()
    except FedsimError as error:
        err.print(f"error: {error}", markup=False, highlight=False)
        sys.exit(error.exit_code)


@app.command("run")
def run_command(
    file: File,
    overrides: Overrides = None,
    out_folder: Annotated[Path, typer.Option("--out", help="Where runs lie.")] = Path("runs"),
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
        Path | None, typer.Option(help="Where to draw it. [default: <name>-labels.png]")
    ] = None,
) -> None:
    """Show who holds which labels, as a table and as a picture."""
    experiment = Experiment.load(file, overrides or [])
    dataset, holdings, _ = prepare(experiment)
    counts = label_table(dataset, holdings)
    table = Table(box=None, pad_edge=False)
    for column in ("client", *dataset.classes, "all", "labelled", "unlabelled", "test"):
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
    out.print(
        f"\n{len(counts)} clients, {sizes.sum():,} of {len(dataset.y):,} training examples; "
        f"a client holds {sizes.min()} to {sizes.max()}, and "
        f"{(counts > 0).sum(axis=1).mean():.1f} of {len(dataset.classes)} classes on average"
    )
    path = picture or Path(f"{experiment.name}-labels.png")
    draw_labels(counts, dataset.classes, path)
    out.print(f"drawn: {path}")


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
        parts = [f"accuracy {row['accuracy']:.4f}"] if row.get("accuracy") is not None else []
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
    if "accuracy" in rounds:
        accuracy = rounds["accuracy"].dropna()
        best = int(accuracy.argmax())
        table.add_row("accuracy, last round", f"{accuracy.iloc[-1]:.4f}")
        table.add_row("accuracy, mean of last 5", f"{accuracy.iloc[-5:].mean():.4f}")
        table.add_row(
            "accuracy, best",
            f"{accuracy.iloc[best]:.4f} (round {rounds.loc[accuracy.index[best], 'round']})",
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
