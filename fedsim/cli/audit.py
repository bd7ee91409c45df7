"""`fedsim attack`: how a finished run withstands attacks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.components import complete_explainer
from fedsim.cli.console import Trust, app, out, say_written, writing


@app.command("attack")
def attack_command(
    folder: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    shadows: Annotated[
        int, typer.Option(help="Shadow models for LiRA, a training each; 0 leaves it out.")
    ] = 0,
    explainer: Annotated[
        list[str] | None,
        typer.Option(
            help="Attack explanations by this one (`fedsim list explainers`), or your own: "
            r"package.module:Name. \[default: those of the run's `explain` section]",
            autocompletion=complete_explainer,
        ),
    ] = None,
    noise: Annotated[
        list[float] | None,
        typer.Option(
            help="Scale explanations to one length, and add noise of this share of it; several "
            r"levels share their shadow models. \[default: as they are]"
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Attack a run: who was trained on, and what shared images and explanations show.

    Says first what it will do, and about how long it takes.
    """
    from fedsim.analysis.audit import audit
    from fedsim.results.folder import RunFolder
    from fedsim.results.run import load

    if trust:
        RunFolder.open(folder).trust()
    found = audit(
        load(folder),
        explainer or None,
        shadows=shadows,
        noise=noise or None,
        progress=lambda line: out.print(line, markup=False),
    )
    out.print(f"\n{found.text()}", markup=False)
    with writing():
        written = found.save()
    say_written(written)
