"""Commands that attack and explain finished runs, cluster explanations, and detect drift."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedsim.cli.components import complete_explainer
from fedsim.cli.console import RunArgument, Trust, app, latest, out, say_written, writing
from fedsim.errors import BadInput

OneExplainer = Annotated[
    str | None,
    typer.Option(
        help="Explainer (`fedsim list explainers`), or your own: package.module:Name; with "
        r"settings: 'occlusion: {size: 1}'. \[default: the model's usual one]",
        autocompletion=complete_explainer,
    ),
]
Pictures = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Folder for the pictures, or a file (.png, .pdf, .svg, .jpg, …). "
        r"\[default: explanations, in the run's folder]",
    ),
]


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
    """Attack a run: membership inference, and reconstruction of images."""
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


@app.command("explain")
def explain_command(
    folder: RunArgument,
    round: Annotated[
        list[int] | None,
        typer.Option(help=r"Explain the model after this round. \[default: the last]"),
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(
            help="Explain this client's model, or shared images; by number, or by name if the "
            r"data name clients. \[default: the global model]"
        ),
    ] = None,
    of: Annotated[
        Literal["cohort", "personal"] | None,
        typer.Option(
            help=r"Which of the client's models: as trained and sent, or as it predicts with. "
            r"\[default: personal if the method has personal models]"
        ),
    ] = None,
    explainer: OneExplainer = None,
    row: Annotated[
        list[int] | None,
        typer.Option(help="Explain the prediction for this row of the test set, counted from 0."),
    ] = None,
    input: Annotated[
        Path | None,
        typer.Option(
            help="Explain the predictions for the inputs in this file, or the pictures in this "
            "folder, instead. Pictures are converted and resized for the model."
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Explain the prediction for this text instead.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Check the explainer instead: compare its maps with those of the network as its "
            "layers get random weights, one after the other from the top.",
        ),
    ] = False,
    strip: Annotated[
        bool,
        typer.Option(
            "--strip",
            help="Put the explanations of one input side by side, in PNG and SVG: a line for the "
            "global model and for each --client, a column for each --round, by default 6.",
        ),
    ] = False,
    most: Annotated[
        int | None,
        typer.Option(help=r"How many rules to print, by decreasing weight. \[default: 10]"),
    ] = None,
    npy: Annotated[
        Path | None,
        typer.Option(help="Write the rules to this folder as .npy files in OpenFL-XAI's format."),
    ] = None,
    pictures: Pictures = None,
    trust: Trust = False,
) -> None:
    """Explain the global model or a client's model after any round, in text and pictures.

    Models of earlier rounds are recomputed from the run's checkpoints. Without options, explain
    the run as a whole if its method or partition has an explainer for that, else the last global
    model.
    """
    from fedsim.analysis.explanations import explanations, file_format
    from fedsim.explain.explainer import Exportable

    if pictures is not None:
        file_format(pictures)
    run = latest(folder, "run", trust)
    with out.status("") as status:
        found = explanations(
            run,
            explainer,
            client=client,
            after=round,
            of=of,
            row=row,
            input=input,
            text=text,
            settings={} if most is None else {"most": most},
            check=check,
            strip=strip,
            progress=status.update,
        )
    if npy is not None:
        if len(found) > 1:
            raise BadInput("--npy writes the rules of one model; name one --client and --round")
        if not isinstance(found[0], Exportable):
            raise BadInput("--npy writes rules, and this explains no rules")
        with writing():
            found[0].export(npy)
    out.print(found.text())
    with writing():
        drawn = found.save(pictures)
    say_written([*drawn, *([npy] if npy else [])])


@app.command("clusters")
def clusters_command(
    folder: RunArgument,
    explainer: OneExplainer = None,
    round: Annotated[
        int | None,
        typer.Option(help=r"Explain with the model after this round. \[default: the last]"),
    ] = None,
    of: Annotated[
        Literal["cohort", "personal"] | None,
        typer.Option(
            help="Explain each client's examples by its own model: as trained and sent, or as it "
            r"predicts with. \[default: by the global model]"
        ),
    ] = None,
    inputs: Annotated[
        int, typer.Option(help="Most training examples of a client for each class.")
    ] = 16,
    most: Annotated[int, typer.Option(help="Most clusters of a class.")] = 8,
    pictures: Pictures = None,
    trust: Trust = False,
) -> None:
    """Cluster the explanations of clients' training examples: whose are decided otherwise?

    Names clients with more maps in a cluster of few clients than chance explains, as a scanner's
    mark would cause.
    """
    from fedsim.analysis.clusters import clusters

    run = latest(folder, "run", trust)
    with out.status("") as status:
        found = clusters(
            run,
            explainer,
            after=round,
            of=of,
            inputs=inputs,
            most=most,
            progress=status.update,
        )
    out.print(found.text())
    with writing():
        drawn = found.save(pictures)
    say_written(drawn)


@app.command("drifts")
def drifts_command(
    folder: RunArgument,
    explainer: OneExplainer = None,
    inputs: Annotated[
        int, typer.Option(help="Most examples of a client that are compared with as many.")
    ] = 100,
    pictures: Pictures = None,
    trust: Trust = False,
) -> None:
    """Watch clients' data for drift: whose have changed, in which round, in which features?

    By losses (ADWIN), inputs (Kolmogorov-Smirnov tests) and losses attributed to features. If the
    data drift (`data.name=drift`), say how well that was found. The run's rounds are recomputed.
    """
    from fedsim.analysis.drifts import drifts

    run = latest(folder, "run", trust)
    with out.status("") as status:
        found = drifts(run, explainer, inputs=inputs, progress=status.update)
    out.print(found.text())
    with writing():
        drawn = found.save(pictures)
    say_written(drawn)
