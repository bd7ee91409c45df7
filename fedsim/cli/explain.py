"""`fedsim explain`: models of a run, or the run as a whole, in words and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.status import Status

from fedsim.cli.components import complete_explainer
from fedsim.cli.console import Trust, app, out, say_written, writing
from fedsim.errors import BadInput
from fedsim.registry import first_line, nearest

if TYPE_CHECKING:  # these bring torch: imported by the commands that need them
    from fedsim.data import Dataset
    from fedsim.explain import Explainer, Explanation
    from fedsim.explain.inputs import Inputs
    from fedsim.results.run import Run

MOST_WORDS = 20  # that are named as unknown


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
        typer.Option(help="Explain the predictions for what is in this file instead."),
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
    trust: Trust = False,
) -> None:
    """Explain a run's global model, or any client's, after any round, in words and pictures.

    Models of earlier rounds are made once more from what the run has stored. Without options:
    what there is to see of the whole run.
    """
    from fedsim import load
    from fedsim.analysis.replay import ModelSnapshot, explain_run
    from fedsim.data import load_dataset
    from fedsim.explain import explainers
    from fedsim.results.folder import RunFolder

    if trust:
        RunFolder.open(folder).trust()
    run = load(folder)
    method = run.experiment.method
    ways = sum(way is not None for way in (input, text, row or None))
    if ways > 1:
        raise BadInput("--row, --input and --text are three ways to say what is to be explained")
    chosen = None
    if explainer is None and not round and not ways and npy is None:
        partition = run.experiment.partition.overview
        chosen = method.overview() or (
            explainers.parse({"name": partition}) if partition else None
        )
        if chosen is not None and client and not chosen.takes_clients:
            chosen = None
    chosen = chosen or _find(run, explainer)
    if most is not None:
        chosen = _with_setting(chosen, "most", most)
    if ways and not chosen.takes_inputs:
        what = first_line(type(chosen))
        raise BadInput(
            "--row, --input and --text say which inputs are explained, and "
            f"--explainer={chosen.name} takes none: {what[:1].lower()}{what[1:]}"
        )
    if chosen.whole_run:
        if round or (client and not chosen.takes_clients):
            which = "--round" if round else "--client"
            raise BadInput(f"{which}: --explainer={chosen.name} explains the run as a whole")
        _show(run, explain_run(run, chosen, client or ()), npy)
        return
    run.result_hash  # noqa: B018  # raises if it is not finished
    times: list[int | None] = [*(round or [])]
    times = times or [None]
    if npy is not None and len(times) * len(client or [None]) > 1:
        raise BadInput("--npy writes the rules of one model; name one --client and --round")
    dataset = load_dataset(run.experiment.data)
    inputs = _inputs(dataset, chosen, row, input, text)
    for t in times:
        whose = client or ([] if explainer else _usual_clients(run, t))
        with out.status("") as status:

            def tell(t: int, status: Status = status) -> None:
                status.update(f"making round {t} once more")

            if whose:
                snapshots = ModelSnapshot.of_clients(run, whose, t, tell, dataset)
            else:
                snapshots = [ModelSnapshot.of(run, None, t, tell, dataset)]
        for snapshot in snapshots:
            _show(run, snapshot.explain(chosen, inputs), npy)


def _find(run: Run, name: str | None) -> Explainer:
    """The explainer of that name, or the usual one of the run, which has settings of its own.

    Raises:
        BadInput: there is none of that name.
    """
    from fedsim.explain import explainers

    experiment = run.experiment
    usual: Explainer = experiment.method.explainer() or explainers.parse(
        {"name": experiment.model.explainer}
    )
    if name in (None, usual.name):
        return usual
    assert name is not None
    known = [known for known, _ in explainers.items()]
    if name not in known and ":" not in name:  # which names one of the user's own
        raise BadInput(f"no explainer is called '{name}'{nearest(name, known)}")
    try:
        found: Explainer = explainers.parse({"name": name})
    except ValidationError as error:
        raise BadInput(f"--explainer {name}: {error}") from None
    return found


def _with_setting(explainer: Explainer, key: str, value: Any) -> Explainer:
    """The explainer with one field changed.

    Raises:
        BadInput: it has no such field, or takes no such value.
    """
    if key not in type(explainer).model_fields:
        raise BadInput(f"--{key} is no setting of --explainer={explainer.name}")
    try:
        return type(explainer).model_validate({**dict(explainer), key: value})
    except ValidationError as error:
        raise BadInput(f"--explainer {explainer.name}: {error}") from None


def _inputs(
    dataset: Dataset,
    explainer: Explainer,
    rows: Sequence[int] | None,
    file: Path | None,
    text: str | None,
) -> Inputs:
    """What the person names; else what the explainer usually explains."""
    from fedsim.analysis.replay import usual_inputs
    from fedsim.explain.inputs import Inputs

    if file is not None:
        inputs = Inputs.of_file(dataset, file)
    elif text is not None:
        inputs = Inputs.of_texts(dataset, [text], ["text"])
    else:
        return Inputs.of_rows(dataset, rows) if rows else usual_inputs(explainer, dataset)
    words = inputs.unknown
    if words:
        rest = f" … and {len(words) - MOST_WORDS} more" if len(words) > MOST_WORDS else ""
        named = " ".join(words[:MOST_WORDS])
        out.print(f"words that the run's data have not: {named}{rest}", markup=False)
    return inputs


def _usual_clients(run: Run, t: int | None) -> list[int]:
    """Whose models are explained after a round, if nobody says whose."""
    rows = run.clients
    if t is not None and not rows.empty:
        rows = rows[rows["round"] <= t]
    return run.experiment.method.explained_clients(rows)


def _show(run: Run, explanation: Explanation, npy: Path | None) -> None:
    """Print an explanation, and draw it into the run's folder; export it first, if asked to."""
    from fedsim.explain.explainer import Exportable

    exported = []
    if npy is not None:
        if not isinstance(explanation, Exportable):
            raise BadInput("--npy writes rules, and this explains no rules")
        with writing():
            explanation.export(npy)
        exported.append(npy)
    out.print(explanation.text(), markup=False)
    folder = run.path / "explanations"
    with writing():
        folder.mkdir(exist_ok=True)
        pictures = explanation.save(folder)
    say_written([*pictures, *exported])
