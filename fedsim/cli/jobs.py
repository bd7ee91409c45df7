"""Commands that submit jobs to a cluster and fetch their results."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.console import File, OutFolder, Overrides, app, err, out, print_table, short
from fedsim.support.words import visible

Address = Annotated[
    str | None,
    typer.Option(
        help="Address of the cluster's dashboard: http://head:8265. "
        r"\[default: RAY_API_SERVER_ADDRESS, or RAY_ADDRESS]"
    ),
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]


@app.command("submit")
def submit_command(
    file: File,
    overrides: Overrides = None,
    address: Address = None,
    env: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE in the job's environment; can be repeated.")
    ] = None,
    out_folder: Annotated[
        str, typer.Option("--out", help="Folder for the jobs' results on the cluster.")
    ] = "~/fedsim-jobs",
) -> None:
    """Submit a run, grid or search to a Ray cluster, and follow its log."""
    from fedsim.sweep.submit import follow, submit

    cluster, job = submit(address, file, overrides or [], env or [], out_folder)
    where = f"{job.id} --address {address}" if address else job.id
    out.print(f"job {job.id}: fedsim {job.kind}, into {job.folder} on the cluster")
    try:
        follow(cluster, job, lambda text: typer.echo(visible(text), nl=False))
    except KeyboardInterrupt:
        err.print(
            "\nthe job continues in the background; to stop it, or fetch its results:\n  fedsim "
            f"stop {where}\n  fedsim fetch {where}"
        )
        sys.exit(130)
    out.print(f"to fetch the results:\n  fedsim fetch {where}")


@app.command("jobs")
def jobs_command(address: Address = None) -> None:
    """List the jobs submitted to a cluster."""
    from fedsim.sweep.submit import Cluster, jobs

    rows = []
    for job in jobs(Cluster(address)):
        began = job.started or time.time()
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))
        took = f"{(job.ended or time.time()) - began:.0f} s"
        rows.append((job.id, f"{job.kind} {job.name}", job.status.lower(), date, took))
    if not rows:
        out.print("no jobs")
        return
    print_table(("job", "what", "status", "started", "took"), rows, whole=("job",))


@app.command("stop")
def stop_command(job: JobId, address: Address = None) -> None:
    """Stop a job; its results so far are kept."""
    from fedsim.sweep.submit import Cluster, stop

    stop(Cluster(address), job)
    out.print(f"stopped: {job}")


@app.command("fetch")
def fetch_command(
    job: JobId, address: Address = None, out_folder: OutFolder = Path("runs")
) -> None:
    """Fetch the results of a job, finished or still running."""
    from fedsim.sweep.submit import Cluster, fetch

    for folder in fetch(Cluster(address), job, out_folder):
        out.print(f"fetched: {short(folder)}")
