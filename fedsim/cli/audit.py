"""`fedsim attack`: privacy attacks on a finished run."""

from __future__ import annotations

from typing import Annotated

import typer

from fedsim.cli.components import complete_explainer
from fedsim.cli.console import RunArgument, Trust, app, latest, out, say_written, writing


@app.command("attack")
def attack_command(
    folder: RunArgument,
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

    found = audit(
        latest(folder, "run", trust),
        explainer or None,
        shadows=shadows,
        noise=noise or None,
        progress=lambda line: out.print(line),
    )
    out.print(f"\n{found.text()}")
    with writing():
        written = found.save()
    say_written(written)
