"""Commands that inspect data, the cluster, folders, and write the report."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsim.cli.console import (
    File,
    FolderArgument,
    Overrides,
    RunArgument,
    Trust,
    app,
    latest,
    out,
    print_table,
    say_written,
    short,
    size,
    writing,
)

if TYPE_CHECKING:  # these import torch: imported by the commands that need them
    import numpy as np
    from numpy.typing import NDArray

    from fedsim.cluster.placement import Node
    from fedsim.data import ClientSplits, Dataset, Ragged
    from fedsim.data.skew import Skew
    from fedsim.experiment import Experiment

MOST_CLIENTS = 30  # rows of a table
MOST_CLASSES = 12  # columns of a table
MOST_NAMED = 3  # classes that are named for each client if there are more
WIDTH = 100  # of a table that not every screen would show otherwise
MOST_VARIANTS = 6  # tables and pictures of a grid or a search


@app.command("data")
def data_command(
    file: File,
    overrides: Overrides = None,
    picture: Annotated[
        Path | None, typer.Option(help=r"File for the picture. \[default: <name>-labels.png]")
    ] = None,
) -> None:
    """Show which labels each client holds, as a table and a picture, and how clients differ.

    Of a grid or a search, for each variant of its data and partition.
    """
    from fedsim import Experiment
    from fedsim.config.file import RawConfig, flat
    from fedsim.data.labels import picture_format
    from fedsim.results.report.entries import differing
    from fedsim.sweep.start import sweep_of

    if picture is not None:
        picture_format(picture)
    config = RawConfig.read(file, overrides or [])
    sweep = sweep_of(config)  # of whose runs it has all or representative ones
    experiments = [config.build(Experiment)] if sweep is None else sweep.experiments
    settings = [
        flat(e.model_dump(mode="json", include={"data", "partition"})) for e in experiments
    ]
    keys = differing(settings)
    variants: dict[str, Experiment] = {}  # by what they differ in
    for experiment, each in zip(experiments, settings, strict=True):
        words = ", ".join(f"{key}={each[key]}" for key in keys if key in each)
        variants.setdefault(words, experiment)
    whole = picture or Path(f"{experiments[0].name}-labels.png")
    for number, (heading, experiment) in enumerate(list(variants.items())[:MOST_VARIANTS], 1):
        if heading:
            out.print(f"{heading}:\n")
        several = len(variants) > 1
        path = whole.with_stem(f"{whole.stem}-{number}") if several else whole
        _show_labels(experiment, path)
        if several:
            out.print()
    if len(variants) > MOST_VARIANTS:
        more = list(variants)[MOST_VARIANTS:]
        out.print(f"… and {len(more)} more variants: {'; '.join(more)}")
    seeds = {experiment.seed for experiment in experiments}
    if len(seeds) > 1:
        out.print(f"partitioned with seed {experiments[0].seed}, the first of {len(seeds)}")


def _show_labels(experiment: Experiment, path: Path) -> None:
    import numpy as np

    from fedsim.data import load_dataset
    from fedsim.data.labels import draw_labels, label_names, label_table
    from fedsim.launch.prepare import dealt, prepare

    loaded = load_dataset(experiment.data)
    dataset, splits, _ = prepare(experiment, loaded)
    if dataset.note:
        out.print(f"{dataset.note}\n")
    several = dataset.y.ndim > 1  # targets of each example
    sizes = np.sum([part.lengths for part in _parts(splits).values()], axis=0)
    names = () if several else label_names(dataset)
    between = " to " if any(" to " in name for name in names) else "-"  # ends of ranges
    ranges = [name.replace(between, f"{between.rstrip()}\n") for name in names]
    heads = names if dataset.classes else ranges
    counts = np.zeros((len(splits), 0), int) if several else label_table(dataset, splits)
    shown = min(len(counts), MOST_CLIENTS)
    columns, rows = _held(splits, heads, counts[:shown], each=len(names) <= MOST_CLASSES)
    if names and _width(columns, rows) > WIDTH:
        columns, rows = _held(splits, names, counts[:shown], each=False)
    print_table(columns, rows, right=columns)
    if shown < len(counts):
        out.print(f"… and {len(counts) - shown} more clients")
    axis, groups = "class", "classes"
    if not dataset.classes:
        axis, groups = "target", "parts of the target's range"
    each = f", and {(counts > 0).sum(axis=1).mean():.1f} of {len(names)} {groups} on average"
    out.print(
        f"\n{len(counts)} clients, {sizes.sum():,} of {dataset.num_loaded:,} training examples; "
        f"a client holds {sizes.min()} to {sizes.max()}{'' if several else each}"
    )
    if len(splits.held_out):
        out.print(f"{len(splits.held_out):,} are held out for validation")
    _show_skew(dataset, loaded, dealt(experiment, loaded)[1])
    if several:
        out.print(f"not drawn, nor compared: labels, as there are {dataset.y.shape[1]} targets")
        return
    with writing():
        draw_labels(counts, names, path, axis, splits.names)
    out.print(f"drawn: {path}")


def _parts(splits: ClientSplits) -> dict[str, Ragged]:
    return {"labelled": splits.train, "unlabelled": splits.unlabelled, "test": splits.test}


def _held(
    splits: ClientSplits, names: Sequence[str], counts: NDArray[np.int64], each: bool
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table of who holds what."""
    import numpy as np

    parts = {name: part for name, part in _parts(splits).items() if len(part.values)}
    shown = {} if {*parts} == {"labelled"} else parts
    labels = names if each else ["most frequent", "classes"] if names else []
    columns = ["client", *(["name"] if splits.names else []), *labels, "all", *shown]
    rows = []
    for k, count in enumerate(counts):
        words = [splits.names[k]] if splits.names else []
        if each:
            cells = list(count)
        else:
            largest = np.argsort(-count, kind="stable")[:MOST_NAMED]
            words.append(", ".join(f"{names[c]}: {count[c]}" for c in largest if count[c]))
            cells = [(count > 0).sum()]
        cells += [sum(part.lengths[k] for part in parts.values())]
        cells += [part.lengths[k] for part in shown.values()]
        rows.append([str(k), *words, *(str(n) if n else "·" for n in cells)])
    return columns, rows


def _width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    cells = zip(columns, *rows, strict=True)
    return sum(max(len(line) for cell in of for line in cell.split("\n")) + 2 for of in cells) - 2


def _show_skew(dataset: Dataset, loaded: Dataset, splits: ClientSplits) -> None:
    import numpy as np

    from fedsim.data.skew import BLANK, feature_skew, label_skew
    from fedsim.support.words import client_name

    rows = []
    for skew in (*label_skew(dataset, splits), *feature_skew(loaded, splits)):
        if skew.name == BLANK:
            _show_blanks(skew, splits)
        known = skew.values[~np.isnan(skew.values)]
        if len(known) and len(splits) > 1:
            k, *f = np.unravel_index(np.nanargmax(skew.values), skew.values.shape)
            place = ", ".join([client_name(int(k), splits.names), *(skew.features[i] for i in f)])
            finite = known[np.isfinite(known)]  # nothing varies where it is infinite
            both = finite.mean() if len(finite) else np.inf, known.max()
            numbers = [f"{v:.3f}" if v < 100 else f"{v:.3g}" for v in both]
            rows.append((skew.name, *numbers, place))
    if rows:
        out.print()
        print_table(("how clients differ", "mean", "most", "at"), rows, right=("mean", "most"))
        out.print()


def _show_blanks(shares: Skew, splits: ClientSplits) -> None:
    from fedsim.data.skew import missing_features
    from fedsim.errors import FedsimWarning
    from fedsim.support.words import client_name, in_short

    names = [client_name(k, splits.names) for k in range(len(splits))]
    columns = ("blank cells", *names)
    cells = [[f"{v:.0%}" if v else "·" for v in of] for of in shares.values.T.tolist()]
    rows = [[feature, *of] for feature, of in zip(shares.features, cells, strict=True)]
    if _width(columns, rows) <= WIDTH:
        out.print()
        print_table(columns, rows, right=names)
    for clients, features in missing_features(shares).items():
        warnings.warn(
            f"data: {in_short(features)}: all cells are blank at {len(clients)} of {len(names)} "
            f"clients ({in_short([names[k] for k in clients])})",
            FedsimWarning,
            stacklevel=2,
        )


@app.command("report")
def report_command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs, grids and searches, or one with several, of which the latest "
            "counts; several are compared.",
            metavar="FOLDER",
        ),
    ],
    page: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The page. By default report.html, in the folder if there is only one."
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            help=r"Axis for the rows of a results table (methods × α). \[default: the method]",
            metavar="AXIS",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Axis for its columns, such as partition.alpha. "
            r"\[default: the other axis, if two vary]",
            metavar="AXIS",
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="A score to show instead of all on record, such as macro_f1, gradient/deletion "
            "or client_accuracy; may be repeated. Runs are judged by the first.",
            metavar="COLUMN",
        ),
    ] = None,
    latex: Annotated[
        Path | None, typer.Option(help="Also write the results tables as LaTeX.")
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(help="Also write the summary as CSV; with --rows or --columns, that table."),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            help="Also write each figure as PDF and PNG to this folder, one column wide."
        ),
    ] = None,
    figure: Annotated[
        list[str] | None,
        typer.Option(
            help="A figure to write there instead of all, by its file's name or how that begins, "
            "such as test-accuracy; may be repeated.",
            metavar="NAME",
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Keep rewriting the page until everything has finished, or Ctrl-C."
        ),
    ] = False,
) -> None:
    """Write one web page with the curves, tables and settings of runs."""
    from fedsim.results.report import report

    if watch:
        out.print("updating the page until everything has finished; stop with Ctrl-C")
    found = map(latest, folders)
    written = report(*found, out=page, rows=rows, columns=columns, metric=metric or (),
                     latex=latex, csv=csv, figures=figures, figure=figure or (),
                     watch=watch)  # fmt: skip
    say_written(path for path in (written, latex, csv, figures) if path is not None)


@app.command("view")
def view_command(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run, grid or search, or one above several.")
    ] = Path("runs"),
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the page; 0 for any that is free.")
    ] = 0,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    trust: Trust = False,
) -> None:
    """Look at runs in a browser: any model of any round, and why it decides as it does."""
    from fedsim.viewer.view import view

    page = view(folder, port=port, trust=trust)
    try:
        out.print(f"{page.url}\nstop with Ctrl-C")
        if show:
            typer.launch(page.url)
        page.wait()
    except KeyboardInterrupt:
        pass  # that is how one stops looking
    finally:
        page.close()


@app.command("verify")
def verify_command(folder: FolderArgument) -> None:
    """Check that the files of a folder are unchanged since they were written."""
    from fedsim.results.verify import insist_on_whole

    out.print(f"no damage found ({insist_on_whole(latest(folder))} folder(s))")


@app.command("pack")
def pack_command(
    folder: FolderArgument,
    path: Annotated[
        Path | None,
        typer.Option("--out", help="The .zip archive. By default named like the folder."),
    ] = None,
) -> None:
    """Verify a folder and pack it into one archive to share."""
    from fedsim.results.archive import pack_results

    packed = pack_results(latest(folder), path)
    if packed.unfinished:
        ends = ", ".join(f"{n} {status}" for status, n in sorted(packed.unfinished.items()))
        out.print(f"not all runs are finished; packed anyway: {ends}")
    out.print(f"written: {short(packed.path.absolute())}")
    out.print(f"{packed.files} files, {size(packed.path.stat().st_size)}")
    out.print(f"sha256: {packed.sha256}")


@app.command("merge")
def merge_command(
    folder: RunArgument,
    path: Annotated[Path, typer.Option("--out", help="A new folder.")] = Path("merged"),
    trust: Trust = False,
) -> None:
    """Write a run's final network as a whole checkpoint, with its adapters merged into it."""
    from fedsim.analysis.merging import merge

    with writing():
        say_written(merge(latest(folder, "run", trust), path))


@app.command("doctor")
def doctor_command(
    file: Annotated[Path | None, typer.Argument(help="An experiment file (YAML).")] = None,
    overrides: Overrides = None,
) -> None:
    """Show the resources Ray sees, and which of them an experiment would get."""
    import ray
    import torch

    from fedsim import Experiment
    from fedsim.cluster.connection import connected
    from fedsim.cluster.placement import Node

    experiment = Experiment.load(file, overrides or []) if file else None
    out.print(f"python {sys.version.split()[0]}, torch {torch.__version__}, ray {ray.__version__}")
    cards = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    out.print(f"GPUs that torch sees in this process: {', '.join(cards) or 'none'}")
    with connected(experiment.engine if experiment else None, out.print):
        nodes = [Node.of(node) for node in ray.nodes() if node["Alive"]]
        out.print(f"Ray at {ray.get_runtime_context().gcs_address}: {len(nodes)} node(s)")
        for node in nodes:
            out.print(f"  {node.describe()}")
        if experiment is not None:
            _diagnose(experiment, nodes)


def _diagnose(experiment: Experiment, nodes: Sequence[Node]) -> None:
    import numpy as np
    import psutil
    import ray

    from fedsim.cluster.placement import ACTOR_BYTES, actors_on, plan_actors
    from fedsim.federation import cohort_size
    from fedsim.federation.cohort import cut_blocks
    from fedsim.launch.prepare import prepare

    dataset, splits, spec = prepare(experiment)
    cohort = cohort_size(experiment.train.participation, len(splits))
    sizes = splits.train.lengths
    out.print(
        f"{experiment.name}: {len(splits)} clients with {sizes.min()} to {sizes.max()} training "
        f"examples, {cohort} of them a round"
    )
    each = ACTOR_BYTES + spec.worker_bytes(experiment.engine.clients_per_step)
    out.print(
        f"about {size(each)} of memory an actor, and "
        f"{size(dataset.x.nbytes + dataset.test_x.nbytes)} of data"
        f"{f' and {size(spec.node_bytes)} of frozen weights' * (spec.node_bytes > 0)} on each "
        "node; "
        f"{size(psutil.virtual_memory().available)} of memory and "
        f"{size(shutil.disk_usage(Path.cwd()).free)} of disk are free here"
    )
    if experiment.engine.kind == "local":
        out.print("engine.kind=local: everything in one process, Ray is not used")
        return
    out.print(
        f"{size(ray.cluster_resources().get('object_store_memory', 0))} of object store; if each "
        f"client keeps a vector as long as the weights, {size(4 * spec.size * len(splits))} of it"
    )
    nodes = [node.without(spec.node_bytes) for node in nodes]
    actors = plan_actors(experiment.engine, nodes, each, cohort)
    blocks = len(cut_blocks(np.arange(cohort), sizes[:cohort]))
    out.print(
        f"{actors} client actor(s) of {experiment.engine.cpus_per_actor} CPU(s) and "
        f"{experiment.engine.gpus_per_actor:g} GPU(s); at most "
        f"{' + '.join(str(actors_on(node, experiment.engine, each)) for node in nodes)} fit"
    )
    out.print(f"{blocks} blocks of clients a round, about {cohort / actors:.1f} clients an actor")
    if blocks < actors:
        out.print(f"{actors - blocks} actor(s) will idle: a round has {blocks} blocks only")
