"""Commands that list and compare results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsim.cli.components import complete_method
from fedsim.cli.console import AsJson, app, latest, out, print_json, print_table, short
from fedsim.config.registry import nearest
from fedsim.errors import BadInput

if TYPE_CHECKING:  # these bring torch: imported by the commands that need them
    import pandas as pd

    from fedsim.results.listing import Listed


def _goodness(row: Listed) -> float:
    if row.score is None:
        return float("-inf")
    return row.score if row.best == "max" else -row.score


# What a list can be sorted by. Without a score, or a start, a row comes last.
ORDERS: dict[str, Callable[[Listed], Any]] = {
    "started": lambda row: row.created,
    "name": lambda row: (row.name, str(row.folder)),
    "method": lambda row: (row.method, str(row.folder)),
    "status": lambda row: (row.status, str(row.folder)),
    "score": _goodness,
}
GREATEST_FIRST = {"started", "score"}
MOST_SIDE_BY_SIDE = 4  # runs that are compared in columns; more are in rows


@app.command("ls")
def ls_command(
    folder: Annotated[Path, typer.Argument(help="Folder to search.")] = Path("runs"),
    sort: Annotated[str, typer.Option(help=f"One of: {', '.join(ORDERS)}.")] = "started",
    status: Annotated[
        str | None, typer.Option(help="Only those with this status: finished, running, failed …")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="Only those with this method.", autocompletion=complete_method),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs, grids and searches below a folder, latest or best first."""
    from fedsim.results.listing import list_results
    from fedsim.results.summary import digits

    if sort not in ORDERS:
        raise BadInput(f"--sort: there is no order '{sort}'{nearest(sort, ORDERS)}")
    rows = [
        row
        for row in list_results(folder)
        if status in (None, row.status) and method in (None, row.method)
    ]
    rows.sort(key=ORDERS[sort], reverse=sort in GREATEST_FIRST)
    if as_json:
        print_json([{**asdict(row), "folder": str(folder / row.folder)} for row in rows])
        return
    if not rows:
        out.print(f"{short(folder.absolute())}: nothing to list")
        return
    shown = []
    for row in rows:
        score = "" if row.score is None else f"{row.metric} {digits(row.score)}"
        unit = {"run": "rounds", "grid": "runs", "search": "trials"}.get(row.kind, "")
        done = f"{row.done}/{'?' if row.of is None else row.of} {unit}" if row.created else ""
        started = row.created[:16].replace("T", " ")
        place = short((folder / row.folder).absolute())
        cells = (place, row.kind, row.method, row.status, done, score, started, row.result_hash)
        shown.append(map(_in_cell, cells))
    columns = ("folder", "what", "method", "status", "done", "score", "started", "hash")
    print_table(columns, shown, whole=columns[1:])


@app.command("compare")
def compare_command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of two or more runs; a grid or a search counts as all its runs, a "
            "folder with several as the latest.",
            metavar="FOLDER",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Compare the experiments, versions, hardware and results of runs."""
    from fedsim import compare

    compared = compare(*map(latest, folders))
    if as_json:
        tables = {  # as nested dicts: of each run, what each column has
            about: table.astype(object).where(table.notna(), None).to_dict("index")
            for about, table in compared.tables.items()
        }
        print_json({"runs": {n: str(run.path) for n, run in compared.runs.items()}, **tables})
        return
    labels = [f"[{number}]" for number in range(1, len(compared.runs) + 1)]
    for label, run in zip(labels, compared.runs.values(), strict=True):
        out.print(f"{label}  {short(run.path)}")
    for about, frame in compared.texts.items():
        if frame.columns.empty:
            out.print(f"\n{about}: the same")
        else:
            out.print("")
            _print_side_by_side(about, frame, labels)
    first, *others = compared.results["result_hash"]
    if first is not None and all(other == first for other in others):
        out.print("\nthe results are the same, to the bit")


def _in_cell(text: str) -> str:
    """A text in one line; the console shows other control characters."""
    return text.replace("\n", r"\n")


def _print_side_by_side(about: str, frame: pd.DataFrame, labels: Sequence[str]) -> None:
    """A column for each run. If they are many, a row for each, without what all share."""
    lines = [[str(key), *texts] for key, texts in frame.items()]
    header, shared = [about, *labels], []
    if len(labels) > MOST_SIDE_BY_SIDE:
        shared = [line for line in lines if len(set(line[1:])) == 1]
        varied = [line for line in lines if line not in shared]
        header, *lines = (list(line) for line in zip(header, *varied, strict=True))
    print_table([*map(_in_cell, header)], (map(_in_cell, line) for line in lines))
    if shared:
        out.print(f"of all: {', '.join(f'{key} {cell}' for key, cell, *_ in shared)}")
