"""Commands that show things: components, data, the cluster, results."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from fedsim import atomic
from fedsim.cli.console import File, Overrides, app, out, short
from fedsim.component import first_line
from fedsim.data import datasets, partitions
from fedsim.data.labels import draw_labels, label_names, label_table
from fedsim.errors import BadInput, RunError
from fedsim.experiment import Experiment
from fedsim.explain.attribution import attributions
from fedsim.explain.rules import measures_in_words, row_in_words
from fedsim.explain.tasks import draw_tasks
from fedsim.explained import FinalRules, PersonalModel, Rationales, SharedImages
from fedsim.federation import cohort_size
from fedsim.federation.federation import cut_blocks
from fedsim.federation.placement import Node, actors_on, plan_actors
from fedsim.launch import connect
from fedsim.methods import methods
from fedsim.methods.fedxds import FedXDS
from fedsim.methods.xpfl import XPFL
from fedsim.models import models
from fedsim.models.rationale import RationaleModel
from fedsim.models.tsk import Tsk, write_published
from fedsim.privacy.gaussian import guarantee
from fedsim.results.continual import continual
from fedsim.results.run import Run, load
from fedsim.simulate import prepare

MOST_CLIENTS = 30  # rows of a table
MOST_DOCUMENTS = 8  # shown with the words that were chosen
DELTA = 1e-5  # of a guarantee, where the experiment gives σ


class Sort(StrEnum):
    """What there are lists of."""

    methods = "methods"
    datasets = "datasets"
    models = "models"
    partitions = "partitions"
    attributions = "attributions"


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
        Sort.attributions: attributions,
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
    shown = min(len(counts), MOST_CLIENTS)
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
        out.print(f"written: {short(path.absolute())}", markup=False)


@app.command("explain")
def explain_command(
    folder: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    row: Annotated[
        list[int] | None,
        typer.Option(help="Explain the prediction for this row of the test set, from 0 on."),
    ] = None,
    most: Annotated[int, typer.Option(help="Rules to print, the weightiest first.", min=1)] = 10,
    npy: Annotated[
        Path | None,
        typer.Option(help="Write the rules to this folder, as OpenFL-XAI's three .npy files."),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Explain what a model that chooses words makes of this.")
    ] = None,
    client: Annotated[
        list[int] | None,
        typer.Option(
            help=r"Whose shared images, or personal model, to draw. \[default: the first ones]"
        ),
    ] = None,
) -> None:
    """Explain what a run came to, in words and pictures.

    Rules, shared images, personal models, chosen words, or tasks that were learnt in turn.
    """
    run = load(folder)
    if text is not None and not isinstance(run.experiment.model, RationaleModel):
        raise BadInput("--text is for models that choose words: model.name=rationale")
    if isinstance(run.experiment.method, FedXDS):
        if row or npy:
            raise BadInput("--row and --npy explain rules; this run shared images")
        _explain_shared(run, client or range(min(4, run.manifest["clients"])))
    elif isinstance(run.experiment.method, XPFL):
        if row or npy:
            raise BadInput("--row and --npy explain rules; this run made personal models")
        trained = run.clients.loc[run.clients["psi"].notna(), "client"]
        for k in client or [int(trained.min())]:
            personal = PersonalModel.of(run, k)
            out.print(personal.in_words(), markup=False)
            _written(partial(personal.draw, run.path / "explanations"))
    elif isinstance(run.experiment.model, RationaleModel):
        if npy or client:
            raise BadInput("--npy and --client are not for models that choose words")
        _explain_words(run, row or [], text)
    elif not run.tasks.empty:
        if row or npy or client:
            raise BadInput("--row, --npy and --client are not for runs that learn tasks in turn")
        _explain_tasks(run)
    elif client:
        raise BadInput("--client is for shared images and personal models; this run has none")
    else:
        _explain_rules(run, row or [], most, npy)


def _explain_shared(run: Run, clients: Sequence[int]) -> None:
    shared = SharedImages.of(run, clients)
    method = run.experiment.method
    assert isinstance(method, FedXDS)
    table = Table(box=None, pad_edge=False)
    for column in ("client", *shared.classes, "all"):
        table.add_column(column, justify="right")
    for k, row in enumerate(shared.pool[:MOST_CLIENTS].tolist()):
        table.add_row(str(k), *(str(n) if n else "·" for n in row), str(sum(row)))
    out.print(table)
    if len(shared.pool) > MOST_CLIENTS:
        out.print(f"… and {len(shared.pool) - MOST_CLIENTS} clients more")
    out.print(
        f"\n{shared.pool.sum():,} images are shared; of each, {method.removed:g} % of the pixels "
        f"are removed, the least relevant by {method.attribution.name}\n",
        markup=False,
    )
    if method.noise:
        promise = guarantee(method.noise, method.delta or DELTA, method.clip)
        out.print(promise.in_words(), markup=False)
    else:
        out.print("there is no noise (σ = 0): nothing is guaranteed")
    _written(partial(shared.draw, run.path / "explanations"))


def _explain_tasks(run: Run) -> None:
    measures = continual(run.tasks)
    for what, value in (
        ("accuracy over all tasks of all clients", measures.tta),
        ("after a task's first round", measures.first_round),
        ("forgotten since the best round, of tasks before the last", measures.forgetting),
        ("backward transfer", measures.backward),
        ("forward transfer", measures.forward),
    ):
        if not math.isnan(value):
            out.print(f"{what}: {value:.4f}")
    given = run.explanations
    if not given.empty:
        table = Table(box=None, pad_edge=False)
        for column in ("learns", "from", "classes in common", "score", "attention"):
            table.add_column(column, justify="right")
        for found in given.head(MOST_CLIENTS).to_dict("records"):
            table.add_row(
                f"{found['client']}/{found['task']}",
                f"{found['from_client']}/{found['from_task']}",
                str(found["shared_classes"]),
                f"{found['score']:.4f}",
                f"{found['attention']:.4f}",
            )
        shared = given.groupby(["client", "task"])["of_best_choice"].first().mean()
        out.print(f"classes in common with what was given, of the most possible: {shared:.1%}")
        out.print("\nwho learns from whom (client/task):")
        out.print(table)
        if len(given) > MOST_CLIENTS:
            file = short(run.path / "explanations.parquet")
            out.print(f"… and {len(given) - MOST_CLIENTS} more, in {file}", markup=False)
    _written(partial(draw_tasks, run.tasks, given, run.path / "explanations"))


def _explain_words(run: Run, rows: Sequence[int], text: str | None) -> None:
    rationales = Rationales.of(run)
    if text is not None:
        out.print(rationales.explain(text).in_words(), markup=False)
        return
    last = run.rounds.to_dict("records")[-1]
    for name in ("accuracy", "balanced_accuracy", "majority", "chosen"):
        out.print(f"{name.replace('_', ' ')}: {last[name]:.4f}")
    if "rationale_f1" in last:
        f1, chance = last["rationale_f1"], last["chance_f1"]
        out.print(f"chosen words against marked ones: F1 {f1:.4f}, at random {chance:.4f}")
    tested = len(rationales.dataset.test_y)
    shown = (
        list(rows) or np.unique(np.linspace(0, tested - 1, MOST_DOCUMENTS).astype(int)).tolist()
    )
    for k in shown:
        out.print(f"\nrow {k}: {rationales.tested(k).in_words()}", markup=False)
    _written(partial(rationales.draw, shown, run.path / "explanations"))


def _explain_rules(run: Run, row: Sequence[int], most: int, npy: Path | None) -> None:
    final = FinalRules.of(run)
    if npy is not None and not (isinstance(final.model, Tsk) and final.model.terms == 3):
        raise BadInput(
            "--npy: OpenFL-XAI knows rules of model.name=tsk with model.terms=3, not those of "
            "this run"
        )
    why = [final.explain_row(k) for k in row]
    last = run.rounds.to_dict("records")[-1]
    out.print(measures_in_words({str(k): v for k, v in last.items()}), markup=False)
    rules = run.explanations[run.explanations["round"] == last["round"]]
    for rule in rules.head(most).to_dict("records"):
        out.print(f"\n{row_in_words({str(k): v for k, v in rule.items()})}", markup=False)
    if len(rules) > most:
        file = short(run.path / "explanations.parquet")
        out.print(f"\n… and {len(rules) - most} more, in {file}", markup=False)
    for k, found in zip(row, why, strict=True):
        truth = f"{final.target} is {final.dataset.test_y[k]:.6g}"
        out.print(f"\nrow {k} of the test set, where {truth}:", markup=False)
        out.print(found.in_words(final.names, final.target), markup=False)

    def draw() -> list[Path]:
        written = final.draw(run.path / "explanations")
        if npy is not None:
            write_published(npy, final.rules)
            written.append(npy)
        return written

    _written(draw)


def _written(draw: Callable[[], list[Path]]) -> None:
    """Draw, and say where."""
    try:
        written = draw()
    except OSError as error:
        raise RunError(f"{error.filename}: cannot be written: {error.strerror}") from error
    for path in written:
        out.print(f"written: {short(path.absolute())}", markup=False)


@app.command("attack")
def attack_command(
    folder: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    shadows: Annotated[
        int, typer.Option(help="Shadow models for LiRA, a training each; 0 leaves it out.")
    ] = 0,
) -> None:
    """Attack a run: who was trained on, and what shared images show."""
    from fedsim.attacked import Attacked

    attacked = Attacked(load(folder))
    found: dict[str, Any] = {"membership": {}}
    table = Table(box=None, pad_edge=False)
    for column in ("membership by", "AUC", "balanced accuracy", "TPR at 1 % FPR"):
        table.add_column(column, justify="left" if column == "membership by" else "right")
    for name, outcome in attacked.infer_membership(shadows).items():
        found["membership"][name] = asdict(outcome)
        table.add_row(name, *(f"{value:.3f}" for value in astuple(outcome)))
    table.add_row("guessing", "0.500", "0.500", "0.010")
    out.print(table)
    if attacked.shares_images:
        inversion = attacked.invert_shared()
        table = Table(box=None, pad_edge=False)
        for column in ("of shared images", "MSE", "PSNR", "SSIM"):
            table.add_column(column, justify="left" if column[0] == "o" else "right")
        for name in ("shared", "reconstructed"):
            close = getattr(inversion, name)
            found[name] = asdict(close)
            table.add_row(name, f"{close.mse:.4f}", f"{close.psnr:.1f} dB", f"{close.ssim:.3f}")
        out.print("")
        out.print(table)

    def write() -> list[Path]:
        paths = [folder / "attacks.json"]
        atomic.write(paths[0], (json.dumps(found, indent=2) + "\n").encode())
        if attacked.shares_images:
            (folder / "explanations").mkdir(exist_ok=True)
            paths.append(folder / "explanations" / "reconstructed.png")
            inversion.draw(attacked.experiment.method.name, paths[1])
        return paths

    _written(write)


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


def _plain(value: Any) -> str:
    return "" if value is None else str(value)
