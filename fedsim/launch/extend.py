"""Continue a finished run for more rounds, as a new run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from fedsim.config.arguments import checked
from fedsim.config.file import RawConfig
from fedsim.errors import ExperimentError
from fedsim.experiment import Experiment
from fedsim.federation.checkpoint import read_tree, write_tree
from fedsim.launch.prepare import prepare
from fedsim.launch.run import begin, same_data
from fedsim.results.folder import REFERENCE, RunFolder, new_path
from fedsim.results.run import Run
from fedsim.results.tables import Table
from fedsim.results.verify import insist_on_finished
from fedsim.simulate import TABLES, Progress

# What may change when a run is continued, because no earlier round depends on it.
CHANGEABLE = ("name", "engine", "checkpoint", "loggers", "train.rounds", "evaluate.every")


@checked
def extend(
    run: Run | str | Path,
    overrides: Sequence[str] | Mapping[str, Any],
    out: str | Path = "runs",
    progress: bool | Callable[[Progress], None] = True,
    on_start: Callable[[Run], None] = lambda _: None,
) -> Run:
    """Continue a finished run for more rounds.

    The result is a new run with its own hash, whose tables begin with the rounds of the old one;
    `manifest["continues"]` says which that is. Its weights are those of a run that was as long
    from the start, unless learning rates depend on the number of rounds (`train.schedule`).
    A reference of its explanations (`explain.reference`) stays the one of the old run.

    Args:
        run: the finished run, or its folder (`runs/NAME` means the latest).
        overrides: `train.rounds=200`, or a dict of values by `section.key`. Besides the number of
            rounds, `name`, `engine`, `checkpoint`, `loggers` and `evaluate.every` may change.
        out: parent folder of the new run, `<out>/<name>/<id>`.
        progress: as of `fedsim.run`.
        on_start: called with the new run before its first round.

    Raises:
        BadInput: the run is not finished or damaged, its data have changed, something else is
            overridden, or there are no further rounds.
        RunError: the run failed; its folder can be resumed.

    Example:
        >>> run = fedsim.run(experiment, out=folder)
        >>> longer = fedsim.extend(run, {"train.rounds": 2 * len(run.rounds)}, out=folder)
        >>> len(longer.rounds) == 2 * len(run.rounds)
        True
    """
    old = RunFolder.open(Run.of(run).path)
    insist_on_finished(old, "only finished runs can be continued")
    experiment = RawConfig.read(old.path / "experiment.yaml", overrides).build(Experiment)
    known, wanted = (_fixed(each.model_dump(mode="json")) for each in (old.experiment, experiment))
    for key in known:
        if known[key] != wanted[key]:
            raise ExperimentError(
                f"{key} cannot change when a run is continued; only {', '.join(CHANGEABLE)} can"
            )
    done = Run(old).last_round
    if experiment.train.rounds <= done:
        raise ExperimentError(
            f"train.rounds={experiment.train.rounds}: the run has {done} rounds already; set more"
        )
    dataset, splits, spec = prepare(experiment, begun=True)
    if splits.sequence is not None:
        raise ExperimentError(
            "sequences of tasks are divided among all rounds; start a new run instead"
        )
    same_data(old, dataset, splits)

    fill = partial(copy_rounds, old, t=done, stopping_anew=True)
    path = new_path(out, experiment.name)
    return begin(experiment, dataset, splits, spec, path, progress, on_start, fill)


def _fixed(content: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for section, value in content.items():
        if section in CHANGEABLE:
            continue
        if isinstance(value, Mapping):
            found |= {f"{section}.{key}": own for key, own in value.items()}
        else:
            found[section] = value
    return {key: value for key, value in found.items() if key not in CHANGEABLE}


def copy_rounds(old: RunFolder, new: RunFolder, t: int, stopping_anew: bool = False) -> None:
    """Have a new run begin with the rounds of another one up to its checkpoint after round t.

    Args:
        stopping_anew: forget the best score so far, by which the old run was stopped early.
    """
    chains = {}
    for name in TABLES:
        source = old.path / f"{name}.parquet"
        table = Table(new.path, name)
        if source.exists():
            rows = pq.read_table(source, filters=[("round", "<=", t)])
            if len(rows):
                table.write_part(rows, t)
        chains[name] = table.chain
    weights = new.path / "weights"
    (weights / "clients").mkdir(parents=True)
    first, *clients = old.checkpoints().files(t)
    for path in clients:
        shutil.copyfile(path, weights / "clients" / path.name)
    content = read_tree(first) | {"run": new.checkpoints().run}
    content["progress"]["tables"] = chains
    if stopping_anew:
        content["progress"]["ledger"].pop("best", None)
    write_tree(weights / first.name, content)
    about = old.manifest
    copy_beginning(old, new)
    new.update(
        checkpoints=[t],
        continues={"folder": str(old.path), "round": t, "result_hash": about["result_hash"]},
    )


def copy_beginning(old: RunFolder, new: RunFolder) -> None:
    """Have a new run take over what another one found out before its first round."""
    about = old.manifest
    new.update(clients_per_step=about["clients_per_step"], halved=about.get("halved", []))
    if "reference" in about:
        shutil.copyfile(old.path / REFERENCE, new.path / REFERENCE)
        new.update(reference=about["reference"])
