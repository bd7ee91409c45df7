"""Commands about what single clients have done to a run."""

from __future__ import annotations

from typing import Annotated

import typer

from fedsim.cli.components import complete_unlearning
from fedsim.cli.console import RunArgument, Trust, app, latest, out, say_written, writing
from fedsim.cli.explain import OneExplainer, Pictures
from fedsim.errors import BadInput


@app.command("contributions")
def contributions_command(
    folder: RunArgument,
    score: Annotated[
        str | None,
        typer.Option(
            help="A column of the run's rounds, whose last value counts. "
            r"\[default: the primary metric]"
        ),
    ] = None,
    how: Annotated[
        str | None,
        typer.Option(
            help="shapley (exact), permutations (random orders), leave_one_out; or an estimate "
            "from the run's updates: multi_rounds, gtg_shapley, shapfed, cosine. "
            r"\[default: exact for up to 10 clients, else permutations]"
        ),
    ] = None,
    permutations: Annotated[int, typer.Option(help="Number of random orders.")] = 50,
    tolerance: Annotated[
        float,
        typer.Option(help="End an order once its score is this close to that of all clients."),
    ] = 0.0,
    budget: Annotated[
        int, typer.Option(help="Most federations that may have to be played.")
    ] = 1100,
    trust: Trust = False,
) -> None:
    """What each client contributes to a score: play the federation without it, to the bit.

    Outcomes are kept in the run's folder, so that asking again continues or takes no time.
    """
    from fedsim.analysis.contributions.contributions import contributions

    run = latest(folder, "run", trust)
    with out.status("") as status:
        found = contributions(
            run,
            score,
            how=how,
            permutations=permutations,
            tolerance=tolerance,
            budget=budget,
            progress=status.update,
        )
    out.print(found.text())


@app.command("influence")
def influence_command(
    folder: RunArgument,
    row: Annotated[int, typer.Option(help="Index of an example of the test set.")],
    explainer: OneExplainer = None,
    estimate: Annotated[
        bool, typer.Option(help="Also estimate influence from the run's updates.")
    ] = True,
    pictures: Pictures = None,
    trust: Trust = False,
) -> None:
    """Which clients made the global model decide so about one input, and for which reasons.

    The run without each client is made, and kept in the run's folder.
    """
    from fedsim.analysis.contributions.influence import influence

    run = latest(folder, "run", trust)
    with out.status("") as status:
        found = influence(run, row, explainer, estimate=estimate, progress=status.update)
    out.print(found.text())
    with writing():
        drawn = found.save(pictures)
    say_written(drawn)


@app.command("unlearn")
def unlearn_command(
    folder: RunArgument,
    client: Annotated[
        list[int], typer.Option(help="The client to forget, by number; can be repeated.")
    ],
    method: Annotated[
        str,
        typer.Option(
            help="How (`fedsim list unlearning`), or your own: package.module:Name.",
            autocompletion=complete_unlearning,
        ),
    ] = "fed_eraser",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A hyper-parameter of the method: key=value; can be repeated."),
    ] = None,
    explainer: OneExplainer = None,
    shadows: Annotated[
        int,
        typer.Option(
            help="Number of shadow models for LiRA, each of which takes about as long as the run; "
            "0 skips this score."
        ),
    ] = 0,
    trust: Trust = False,
) -> None:
    """Make a run's model forget clients, and compare it with the run that never had them."""
    from fedsim.analysis.unlearning.unlearn import unlearn
    from fedsim.config.file import RawConfig

    for each in settings or ():
        if "=" not in each:
            raise BadInput(f"--set {each}: must read key=value")
    content = RawConfig({"name": method}).overridden(settings or []).content
    run = latest(folder, "run", trust)
    with out.status("") as status:
        found = unlearn(
            run, client, content, explainer=explainer, shadows=shadows, progress=status.update
        )
    out.print(found.text())
    say_written([found.path])
