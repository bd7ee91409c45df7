"""`fedsim attack`: how a finished run withstands attacks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table

from fedsim import atomic
from fedsim.cli.console import Trust, app, out, say_written, writing
from fedsim.errors import BadInput

if TYPE_CHECKING:  # these bring torch: imported by the commands that need them
    from fedsim.analysis.audit import Inversion
    from fedsim.explain.explainer import FeatureExplainer
    from fedsim.explain.section import Explain
    from fedsim.privacy.inversion import Fidelity


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
            r"package.module:Name. \[default: those of the run's `explain` section]"
        ),
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            help="Scale explanations to one length, and add noise of this share of it. "
            r"\[default: as they are]"
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Attack a run: who was trained on, and what shared images and explanations show."""
    from fedsim import load
    from fedsim.analysis.audit import PrivacyAudit
    from fedsim.results.folder import RunFolder

    if trust:
        RunFolder.open(folder).trust()
    run = load(folder)
    explainers = _found(explainer, run.experiment.explain)
    if noise is not None and not explainers:
        raise BadInput("--noise is for explanations; say which by --explainer")
    attacked = PrivacyAudit(run)
    found: dict[str, Any] = {"membership": {}}
    table = _table("membership by", "AUC", "balanced accuracy", "TPR at 1 % FPR")
    for name, outcome in attacked.infer_membership(shadows, explainers, noise).items():
        found["membership"][name] = asdict(outcome)
        table.add_row(name, *(f"{value:.3f}" for value in astuple(outcome)))
    table.add_row("guessing", "0.500", "0.500", "0.010")
    out.print(table)
    pictures: dict[str, tuple[str, Inversion]] = {}
    if attacked.shares_images:
        inversion = attacked.invert_shared()
        close = {"shared": inversion.shared, "reconstructed": inversion.reconstructed}
        found |= {name: asdict(one) for name, one in close.items()}
        _print_fidelity("of shared images", {**close, "the mean image": inversion.mean_image})
        pictures["reconstructed"] = attacked.experiment.method.name, inversion
    if explainers:
        found["noise"] = noise
    if explainers and attacked.explains_images:
        close = {}
        for one in explainers:
            inversion = attacked.invert_explanations(one, noise)
            close[one.name] = inversion.reconstructed
            pictures[f"reconstructed-{one.name}"] = one.name, inversion
        found["from_explanations"] = {name: asdict(each) for name, each in close.items()}
        found["mean_image"] = asdict(inversion.mean_image)
        _print_fidelity("from explanations", {**close, "the mean image": inversion.mean_image})

    paths = [folder / "attacks.json"]
    with writing():
        atomic.write(paths[0], (json.dumps(found, indent=2) + "\n").encode())
        for stem, (name, inversion) in pictures.items():
            (folder / "explanations").mkdir(exist_ok=True)
            paths.append(folder / "explanations" / f"{stem}.png")
            inversion.draw(name, paths[-1])
    say_written(paths)


def _found(names: Sequence[str] | None, section: Explain | None) -> Sequence[FeatureExplainer]:
    """The explainers of these names, as the run's section sets those that it has, or all of its.

    Raises:
        BadInput: there is none of a name, or it gives no relevances.
    """
    from fedsim.explain.section import Explain

    usual = () if section is None else section.explainers
    if not names:
        return usual
    known = {explainer.name: explainer for explainer in usual}
    try:
        return Explain.model_validate({"explainers": [known.get(n, n) for n in names]}).explainers
    except ValidationError as error:
        raise BadInput(f"--explainer: {error.errors()[0]['msg']}") from None


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    return table


def _print_fidelity(what: str, rows: dict[str, Fidelity]) -> None:
    table = _table(what, "MSE", "PSNR", "SSIM")
    for name, close in rows.items():
        table.add_row(name, f"{close.mse:.4f}", f"{close.psnr:.1f} dB", f"{close.ssim:.3f}")
    out.print("")
    out.print(table)
