"""`fedsim attack`: how a finished run withstands attacks."""

from __future__ import annotations

import json
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedsim import atomic
from fedsim.cli.console import Trust, app, out, say_written, writing
from fedsim.results.folder import RunFolder
from fedsim.results.run import load


@app.command("attack")
def attack_command(
    folder: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    shadows: Annotated[
        int, typer.Option(help="Shadow models for LiRA, a training each; 0 leaves it out.")
    ] = 0,
    trust: Trust = False,
) -> None:
    """Attack a run: who was trained on, and what shared images show."""
    from fedsim.analysis.audit import PrivacyAudit

    if trust:
        RunFolder.open(folder).trust()
    attacked = PrivacyAudit(load(folder))
    found: dict[str, Any] = {"membership": {}}
    table = Table(box=None, pad_edge=False)
    for column in ("membership by", "AUC", "balanced accuracy", "TPR at 1 % FPR"):
        table.add_column(column, justify="left" if column == "membership by" else "right")
    for name, outcome in attacked.infer_membership(shadows).items():
        found["membership"][name] = asdict(outcome)
        table.add_row(name, *(f"{value:.3f}" for value in astuple(outcome)))
    table.add_row("guessing", "0.500", "0.500", "0.010")
    out.print(table)
    if attacked.shares_images:
        inversion = attacked.invert_shared()
        table = Table(box=None, pad_edge=False)
        for column in ("of shared images", "MSE", "PSNR", "SSIM"):
            table.add_column(column, justify="left" if column[0] == "o" else "right")
        for name in ("shared", "reconstructed"):
            close = getattr(inversion, name)
            found[name] = asdict(close)
            table.add_row(name, f"{close.mse:.4f}", f"{close.psnr:.1f} dB", f"{close.ssim:.3f}")
        out.print("")
        out.print(table)

    paths = [folder / "attacks.json"]
    with writing():
        atomic.write(paths[0], (json.dumps(found, indent=2) + "\n").encode())
        if attacked.shares_images:
            (folder / "explanations").mkdir(exist_ok=True)
            paths.append(folder / "explanations" / "reconstructed.png")
            inversion.draw(attacked.experiment.method.name, paths[1])
    say_written(paths)
