"""`fedsim explain`: models of a run, or the run as a whole, in words and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.components import complete_explainer
from fedsim.cli.console import Trust, app, out, say_written, writing
from fedsim.errors import BadInput


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
            help="How (`fedsim list explainers`), or your own: package.module:Name.",
            autocompletion=complete_explainer,
        ),
    ] = None,
    row: Annotated[
        list[int] | None,
        typer.Option(help="Explain the prediction for this row of the test set, from 0 on."),
    ] = None,
    input: Annotated[
        Path | None,
        typer.Option(
            help="Explain the predictions for what is in this file instead, or for the pictures "
            "in this folder. Pictures are converted and resized as the model needs them."
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Explain the prediction for this document instead.")
    ] = None,
    most: Annotated[
        int | None, typer.Option(help=r"Rules to print, the weightiest first. \[default: 10]")
    ] = None,
    npy: Annotated[
        Path | None,
        typer.Option(help="Write the rules to this folder, as OpenFL-XAI's three .npy files."),
    ] = None,
    pictures: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help=r"Draw pictures into this folder. \[default: explanations, in the run's folder]",
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Explain a run's global model, or any client's, after any round, in words and pictures.

    Models of earlier rounds are made once more from what the run has stored. Without options:
    what there is to see of the whole run.
    """
    from fedsim.analysis.explanations import explanations
    from fedsim.explain.explainer import Exportable
    from fedsim.results.folder import RunFolder
    from fedsim.results.run import load

    if trust:
        RunFolder.open(folder).trust()
    run = load(folder)
    with out.status("") as status:
        found = explanations(
            run,
            explainer,
            client=client,
            after=round,
            row=row,
            input=input,
            text=text,
            settings={} if most is None else {"most": most},
            progress=status.update,
        )
    if npy is not None:
        if len(found) > 1:
            raise BadInput("--npy writes the rules of one model; name one --client and --round")
        if not isinstance(found[0], Exportable):
            raise BadInput("--npy writes rules, and this explains no rules")
        with writing():
            found[0].export(npy)
    out.print(found.text(), markup=False)
    with writing():
        drawn = found.save(pictures)
    say_written([*drawn, *([npy] if npy else [])])
