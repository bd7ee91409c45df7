"""`fedsim attack`: privacy attacks on a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.components import complete_explainer
from fedsim.cli.console import Trust, app, latest, out, say_written, writing


@app.command("attack")
def attack_command(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A run's folder; of one with several runs the latest.", show_default=False
        ),
    ],
    shadows: Annotated[
        int, typer.Option(help="Number of shadow models to train for LiRA; 0 skips this attack.")
    ] = 0,
    explainer: Annotated[
        list[str] | None,
        typer.Option(
            help="Explainer whose explanations are attacked (`fedsim list explainers`), or your "
            "own: package.module:Name; with settings: 'occlusion: {size: 1}'. "
            r"\[default: those of the run's `explain` section]",
            autocompletion=complete_explainer,
        ),
    ] = None,
    noise: Annotated[
        list[float] | None,
        typer.Option(
            help="Scale explanations to unit length and add noise of this relative size; several "
            r"levels share the shadow models. \[default: unchanged]"
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Attack a run: membership inference, and reconstruction of images.

    Announces the attacks and their approximate duration first.
    """
    from fedsim.analysis.attacks.audit import audit
    from fedsim.results.folder import RunFolder
    from fedsim.results.run import Run

    folder = latest(folder, "run")
    if trust:
        RunFolder.open(folder).trust()
    found = audit(
        Run.open(folder),
        explainer or None,
        shadows=shadows,
        noise=noise or None,
        progress=lambda line: out.print(line),
    )
    out.print(f"\n{found.text()}")
    with writing():
        written = found.save()
    say_written(written)
