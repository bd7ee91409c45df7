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
from pydantic import ValidationError
from pydantic_core import PydanticCustomError
from rich.status import Status
from rich.table import Table

from fedsim import atomic
from fedsim.analysis.explanations import Attributed, Mimicked, Rationales, RuleBase, SharedImages
from fedsim.analysis.replay import ModelSnapshot
from fedsim.cli.console import File, Overrides, app, out, short
from fedsim.cluster.connection import connect
from fedsim.cluster.placement import Node, actors_on, plan_actors
from fedsim.data import datasets, partitions
from fedsim.data.labels import draw_labels, label_names, label_table
from fedsim.errors import BadInput, RunError
from fedsim.experiment import Experiment
from fedsim.explain.attribution import Attribution, attributions
from fedsim.explain.inputs import Inputs
from fedsim.explain.rules import measures_in_words, row_in_words, scale_in_words
from fedsim.explain.tasks import draw_tasks
from fedsim.federation import cohort_size
from fedsim.federation.cohort import cut_blocks
from fedsim.methods import methods
from fedsim.methods.fedxds import FedXDS
from fedsim.methods.xpfl import XPFL
from fedsim.models import TextModel, models
from fedsim.models.rationale import RationaleModel
from fedsim.models.tsk import Tsk, write_published
from fedsim.prepare import prepare
from fedsim.privacy.gaussian import guarantee
from fedsim.registry import first_line, nearest
from fedsim.results.continual import continual
from fedsim.results.run import Run, load

MOST_CLIENTS = 30  # rows of a table
MOST_WORDS = 20  # that are named as unknown
MOST_INPUTS = 8  # of the test set that are explained, if nobody says which
EXPLAINERS = ("rules", "rationale", "tree")  # beside attributions
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
    dataset, splits, _ = prepare(experiment)
    counts, names = label_table(dataset, splits), label_names(dataset)
    table = Table(box=None, pad_edge=False)
    for column in ("client", *names, "all", "labelled", "unlabelled", "test"):
        table.add_column(column, justify="right")
    shown = min(len(counts), MOST_CLIENTS)
    for k in range(shown):
        parts = (splits.train[k], splits.unlabelled[k], splits.test[k])
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
    round: Annotated[
        list[int] | None,
        typer.Option(help=r"Explain a model as it was after this round. \[default: the last]"),
    ] = None,
    client: Annotated[
        list[int] | None,
        typer.Option(help=r"Explain this client's model, or images. \[default: the global one]"),
    ] = None,
    explainer: Annotated[
        str | None,
        typer.Option(
            help="rules, rationale, tree, or an attribution (`fedsim list attributions`).",
        ),
    ] = None,
    row: Annotated[
        list[int] | None,
        typer.Option(help="Explain the prediction for this row of the test set, from 0 on."),
    ] = None,
    input: Annotated[
        Path | None,
        typer.Option(help="Explain the predictions for what is in this file instead."),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Explain the prediction for this document instead.")
    ] = None,
    most: Annotated[int, typer.Option(help="Rules to print, the weightiest first.", min=1)] = 10,
    npy: Annotated[
        Path | None,
        typer.Option(help="Write the rules to this folder, as OpenFL-XAI's three .npy files."),
    ] = None,
) -> None:
    """Explain a run's global model, or any client's, after any round, in words and pictures.

    Models of earlier rounds are made once more from what the run has stored. Without options:
    what there is to see of the whole run.
    """
    run = load(folder)
    experiment = run.experiment
    ways = sum(way is not None for way in (input, text, row or None))
    if ways > 1:
        raise BadInput("--row, --input and --text are three ways to say what is to be explained")
    if explainer is None and not round and not ways:
        if isinstance(experiment.method, FedXDS) and not npy:
            _explain_shared(run, client or range(min(4, run.manifest["clients"])))
            return
        if not run.tasks.empty and not client and not npy:
            _explain_tasks(run)
            return
    run.result_hash  # noqa: B018  # raises if it is not finished
    kind = explainer or _usual_explainer(run)
    explain = _explainers(run, kind, most, npy)
    if kind == "tree" and ways:
        raise BadInput(
            "--row, --input and --text say what an attribution explains (--explainer); a tree "
            "mimics all decisions"
        )
    times: list[int | None] = [*(round or [])]
    times = times or [None]
    if npy is not None and len(times) * len(client or [None]) > 1:
        raise BadInput("--npy writes the rules of one model; name one --client and --round")
    dataset = experiment.data.load()
    if input is not None:
        inputs = Inputs.of_file(dataset, input)
    elif text is not None:
        inputs = Inputs.of_texts(dataset, [text], ["text"])
    else:
        some = np.unique(np.linspace(0, len(dataset.test_y) - 1, MOST_INPUTS).astype(int)).tolist()
        inputs = Inputs.of_rows(dataset, row or ([] if kind == "rules" else some))
    if input or text:
        _say_unknown(inputs.unknown)
    for t in times:
        whose = client or ([] if explainer else _first_personal(run, t))
        with out.status("") as status:

            def tell(t: int, status: Status = status) -> None:
                status.update(f"making round {t} once more")

            if whose:
                subjects = ModelSnapshot.of_clients(run, whose, t, tell, dataset)
            else:
                subjects = [ModelSnapshot.of(run, None, t, tell, dataset)]
        for subject in subjects:
            explain(subject, inputs)


def _say_unknown(words: Sequence[str]) -> None:
    if words:
        rest = f" … and {len(words) - MOST_WORDS} more" if len(words) > MOST_WORDS else ""
        named = " ".join(words[:MOST_WORDS])
        out.print(f"words that the run's data have not: {named}{rest}", markup=False)


def _explainers(
    run: Run, kind: str, most: int, npy: Path | None
) -> Callable[[ModelSnapshot, Inputs], None]:
    """What explains a model in the way that is asked for.

    Raises:
        BadInput: there is no such way.
    """
    known = [*EXPLAINERS, *(name for name, _ in attributions.items())]
    if kind not in known and ":" not in kind:  # which names one of the user's own
        raise BadInput(f"no explainer is called '{kind}'{nearest(kind, known)}")
    if npy is not None and kind != "rules":
        raise BadInput("--npy writes rules, and this explains no rules")
    if kind == "rules":
        return partial(_explain_rules, most=most, npy=npy)
    if kind == "rationale":
        return _explain_words
    if kind == "tree":
        return _explain_by_tree
    method = run.experiment.method
    if isinstance(method, FedXDS) and kind == method.attribution.name:
        return partial(_explain_parts, attribution=method.attribution)
    try:
        attribution = attributions.parse({"name": kind})
    except (ValidationError, PydanticCustomError) as error:
        raise BadInput(f"--explainer {kind}: {error}") from None
    return partial(_explain_parts, attribution=attribution)


def _usual_explainer(run: Run) -> str:
    """What explains a model of this run, if nobody says what."""
    experiment = run.experiment
    if not experiment.model.builds_network:
        return "rules"
    if isinstance(experiment.model, RationaleModel):
        return "rationale"
    if isinstance(experiment.method, XPFL):
        return "tree"
    if isinstance(experiment.method, FedXDS):
        return experiment.method.attribution.name
    return "occlusion" if isinstance(experiment.model, TextModel) else "integrated_gradients"


def _first_personal(run: Run, t: int | None) -> list[int]:
    """Whose model is explained if nobody says whose: of XPFL's personal models the first."""
    if not isinstance(run.experiment.method, XPFL) or "psi" not in run.clients:
        return []
    fused = run.clients[run.clients["psi"].notna()]
    if t is not None:
        fused = fused[fused["round"] <= t]
    return [int(k) for k in sorted(fused["client"])[:1]]


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


def _explain_by_tree(subject: ModelSnapshot, _: Inputs) -> None:
    mimicked = Mimicked.of(subject)
    out.print(mimicked.in_words(), markup=False)
    _written(partial(mimicked.draw, subject.folder))


def _explain_parts(subject: ModelSnapshot, inputs: Inputs, attribution: Attribution) -> None:
    attributed = Attributed.of(subject, attribution, inputs)
    out.print(attributed.in_words(), markup=False)
    _written(partial(attributed.draw, subject.folder))


def _explain_words(subject: ModelSnapshot, inputs: Inputs) -> None:
    rationales = Rationales.of(subject)
    scores = rationales.scores()
    out.print(f"{subject.title}, on the test set:")
    for name in ("accuracy", "balanced_accuracy", "majority", "chosen"):
        if name in scores:  # of tasks in turn, the accuracy alone
            out.print(f"{name.replace('_', ' ')}: {scores[name]:.4f}")
    if "rationale_f1" in scores:
        f1, chance = scores["rationale_f1"], scores["chance_f1"]
        out.print(f"chosen words against marked ones: F1 {f1:.4f}, at random {chance:.4f}")
    documents = rationales.explain(inputs)
    for name, found in zip(inputs.names, documents, strict=True):
        out.print(f"\n{name}: {found.in_words()}", markup=False)
    _written(partial(rationales.draw, documents, subject.folder))


def _explain_rules(subject: ModelSnapshot, inputs: Inputs, most: int, npy: Path | None) -> None:
    base = RuleBase.of(subject)
    if npy is not None and not (isinstance(base.model, Tsk) and base.model.terms == 3):
        raise BadInput(
            "--npy: OpenFL-XAI knows rules of model.name=tsk with model.terms=3, not those of "
            "this run"
        )
    out.print(f"{subject.title}:\n{measures_in_words(base.measures())}", markup=False)
    if scale := scale_in_words(base.target, base.dataset.target_scaling):
        out.print(scale, markup=False)
    rules = base.table()
    for rule in rules[:most]:
        out.print(f"\n{row_in_words(rule)}", markup=False)
    if len(rules) > most:
        stored = f"in {short(subject.again.run.path / 'explanations.parquet')}"
        where = "--most shows more" if subject.suffix else stored
        out.print(f"\n… and {len(rules) - most} more, {where}", markup=False)
    for k, found in enumerate(base.why(inputs)):
        truth = "" if inputs.labels[k] is None else f", where {base.target} is {inputs.labels[k]}"
        out.print(f"\n{inputs.names[k]}{truth}:", markup=False)
        out.print(found.in_words(base.names, base.target), markup=False)

    def draw() -> list[Path]:
        written = base.draw(subject.folder)
        if npy is not None:
            write_published(npy, base.rules)
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
    from fedsim.analysis.audit import PrivacyAudit

    attacked = PrivacyAudit(load(folder))
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
    _, splits, _ = prepare(experiment)
    cohort = cohort_size(experiment.train.participation, len(splits))
    sizes = splits.train.lengths
    out.print(
        f"{experiment.name}: {len(splits)} clients with {sizes.min()} to {sizes.max()} training "
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
