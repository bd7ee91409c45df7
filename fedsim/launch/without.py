"""What becomes of a run without some of its clients, as a run of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fedsim.config.arguments import checked
from fedsim.config.file import RawConfig
from fedsim.data import ClientSplits, Dataset
from fedsim.errors import RunFolderError
from fedsim.experiment import Experiment
from fedsim.federation import Condition, RunSpec, Without, draw_cohort
from fedsim.launch.extend import copy_beginning, copy_rounds
from fedsim.launch.prepare import prepare
from fedsim.launch.run import begin, resume, same_data
from fedsim.results.folder import RunFolder
from fedsim.results.manifest import is_at
from fedsim.results.run import Run
from fedsim.results.verify import damage_of_run, insist_on_finished
from fedsim.simulate import Progress

LONGEST = 60  # characters of the name of a folder


@checked
def without(
    run: Run | str | Path,
    clients: int | Iterable[int],
    replace: bool | None = None,
    out: str | Path | None = None,
    progress: bool | Callable[[Progress], None] = True,
    on_start: Callable[[Run], None] = lambda _: None,
) -> Run:
    """The run of the federation that some clients never joined.

    It begins with the rounds of `run` before any of them takes part, from the latest checkpoint
    there, if a client takes part in no other way than in its cohort. A run that is there already,
    because it was asked for before, is not made again, and one that was interrupted continues.

    Args:
        run: the finished run, or its folder (`runs/NAME` means the latest).
        clients: whom to leave out, beside those whom the run leaves out already.
        replace: fill their places in cohorts with others, drawn at random; by default as the run
            does, and else they stay empty. See `fedsim.federation.Without`.
        out: parent folder of the new run; by default the folder `without` in that of `run`.
        progress: as of `fedsim.run`.
        on_start: called with the new run before its first round.

    Raises:
        BadInput: the run is not finished or damaged, its data have changed, there is no such
            client, nobody would be left, or another section cannot do without them.
        RunError: the run failed; asking again continues it.

    Example:
        >>> run = fedsim.run(experiment, out=folder)
        >>> alone = fedsim.without(run, range(1, 10))
        >>> set(alone.clients["client"])
        {0}
    """
    old = whole(run)
    experiment = experiment_without(old.experiment, clients, replace)
    return alternative(old, experiment, out, progress, on_start)


def whole(run: Run | str | Path) -> RunFolder:
    """The folder of a run of which it can be told what would have become of it.

    Raises:
        BadInput: the run is not finished, or damaged.
    """
    folder = RunFolder.open(Run.of(run).path)
    insist_on_finished(folder, "what would have become of it is known of finished runs")
    return folder


def alternative(
    old: RunFolder,
    experiment: Experiment,
    out: str | Path | None = None,
    progress: bool | Callable[[Progress], None] = False,
    on_start: Callable[[Run], None] = lambda _: None,
    loaded: Dataset | None = None,
) -> Run:
    """The run of an experiment from `experiment_without`, beside a whole one; see `without`.

    Args:
        loaded: the data of the experiment, if already loaded.
    """
    assert experiment.without is not None
    path = Path(out or old.path / "without", folder_name(experiment.without)).absolute()
    if is_at(path):
        return _there(path, experiment, progress, on_start)
    dataset, splits, spec = prepare(experiment, loaded, begun=True)
    same_data(old, dataset, splits)
    shared = common_rounds(Run(old), experiment, splits, spec)
    known = [t for t in old.checkpoints().rounds() if t <= shared]
    copy = partial(copy_rounds, old, t=known[-1]) if known else partial(copy_beginning, old)
    return begin(experiment, dataset, splits, spec, path, progress, on_start, copy)


def experiment_without(
    experiment: Experiment, clients: int | Iterable[int], replace: bool | None = None
) -> Experiment:
    """The experiment without these clients and those that it leaves out already."""
    wanted = list(map(int, clients if isinstance(clients, Iterable) else [clients]))
    if experiment.without is not None:
        wanted = [*wanted, *(k for k in experiment.without.clients if k not in wanted)]
        replace = experiment.without.replace if replace is None else replace
    section = {"clients": wanted, "replace": bool(replace)}
    return RawConfig(experiment.model_dump(mode="json") | {"without": section}).build(Experiment)


def folder_name(without: Without) -> str:
    """The name of the folder of a run without these clients."""
    name = "-".join(map(str, without.clients))
    if len(name) > LONGEST:
        name = f"{len(without.clients)}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    return f"{name}-replaced" if without.replace else name


def common_rounds(run: Run, experiment: Experiment, splits: ClientSplits, spec: RunSpec) -> int:
    """For how many rounds a run is that of an experiment with other clients left out.

    0 unless all that clients do is what they are asked for as part of a cohort, which is drawn
    without regard to them.
    """
    if not joins_by_cohort(experiment, spec):
        return 0
    here, there = (asked(run, splits, spec, own.without) for own in (run.experiment, experiment))
    for (t, before, others), (_, now, _) in zip(here, there, strict=True):
        # Where others were asked as well, so might be those that are left out.
        if t > run.last_round or before != now or others:
            return t - 1
    return run.last_round


def asked(
    run: Run, splits: ClientSplits, spec: RunSpec, without: Without | None
) -> Iterator[tuple[int, list[int], bool]]:
    """Each round with its cohort, drawn at random, and whether others were asked in the run, too.

    Also the rounds for which a run was not carried on because it was stopped early.
    """
    rows = run.clients
    for t, cohort in cohorts(splits, spec, without):
        found = set() if rows.empty else set(rows["client"][rows["round"] == t])
        yield t, cohort, not found <= set(cohort)


def cohorts(
    splits: ClientSplits, spec: RunSpec, without: Without | None
) -> Iterator[tuple[int, list[int]]]:
    """Each round with its cohort, drawn at random."""
    train = spec.train
    independent = any(condition.independent_draws for condition in spec.conditions)
    draw = partial(draw_cohort, spec.seed, train.participation, len(splits), without=without)
    for t in range(1, train.rounds + 1):
        yield t, draw(t=t, independent=independent).tolist()


def joins_by_cohort(experiment: Experiment, spec: RunSpec) -> bool:
    """Whether clients affect a run only by what they do as part of a cohort drawn at random.

    What is not fedsim's own may read more of them, such as who holds what, which no record tells.
    """
    method, explain = experiment.method, experiment.explain
    own = ":" in method.name or any(":" in condition.name for condition in spec.conditions)
    chosen = any(type(each).sample is not Condition.sample for each in spec.conditions)
    everybody = explain is not None and (
        "personal" in explain.of if explain.of else method.keeps_models
    )
    return not (own or chosen or everybody or "data" in method.learns.asks)


def _there(
    path: Path,
    experiment: Experiment,
    progress: bool | Callable[[Progress], None],
    on_start: Callable[[Run], None],
) -> Run:
    """The run that is there already, or was interrupted."""
    folder = RunFolder.open(path)
    if _content(folder.experiment) != _content(experiment):
        raise RunFolderError(f"{path}: is a run of another experiment; choose another folder")
    if folder.manifest["status"] == "finished" and not damage_of_run(folder):
        return Run(folder)
    return resume(path, progress, on_start)


def _content(experiment: Experiment) -> dict[str, Any]:
    return experiment.model_dump(mode="json", exclude={"name", "engine", "checkpoint", "loggers"})
