"""Start runs, in this process or as a driver actor on Ray."""

from __future__ import annotations

import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from fedsim.cluster.connection import imports_ahead, planned_actors
from fedsim.cluster.placement import node_is_lost, starting
from fedsim.cluster.private import wait_for_end
from fedsim.cluster.ray_compat import actor_id, actor_table
from fedsim.config.arguments import checked
from fedsim.config.modules import enter
from fedsim.data import ClientSplits, Dataset
from fedsim.errors import ExperimentError, FedsimError, FedsimWarning, RunError, RunFolderError
from fedsim.experiment import Experiment
from fedsim.federation import Engine, LocalEngine, RunSpec, cohort_size, limit_threads
from fedsim.launch.loggers import environment, with_loggers
from fedsim.launch.prepare import prepare
from fedsim.launch.progress import RunProgress
from fedsim.launch.train_reference import with_reference
from fedsim.results.folder import RunFolder, alone, new_path
from fedsim.results.manifest import is_at
from fedsim.results.records import facts, hashes
from fedsim.results.run import Run
from fedsim.simulate import Progress, simulate

PATIENCE = 60.0  # seconds without an event before the user is notified
KILLED = 2.0  # seconds that a killed driver may take to end
MAX_DRIVER_DEATHS = 3  # in a row, without progress between them


@checked
def run(
    experiment: Experiment | str | Path | Mapping[str, Any],
    out: str | Path = "runs",
    progress: bool | Callable[[Progress], None] = True,
    on_start: Callable[[Run], None] = lambda _: None,
) -> Run:
    """Run an experiment from the beginning.

    Args:
        experiment: the experiment to run: an `Experiment`, an experiment file, or its content as
            nested dicts, which may hold objects as `Experiment` takes them.
        out: parent folder; the run is written to `<out>/<name>/<id>`.
        progress: True shows a progress bar in a terminal or a notebook, False shows nothing. A
            function is called with the record of each round (a row of `Run.rounds`, as a dict) and
            with messages for the user. An exception that it raises ends the run, which can be
            resumed.
        on_start: called with the run before its first round.

    Returns:
        The run, loaded.

    Raises:
        BadInput: the experiment is invalid; nothing is left running or written.
        RunError: the run failed; its folder can be resumed.
    """
    experiment = Experiment.of(experiment)
    engine = experiment.engine
    if engine.kind == "local" and engine.actors != "auto":
        warnings.warn(
            f"engine.actors={engine.actors} has no effect with engine.kind=local: everything is "
            "computed in one process",
            FedsimWarning,
            stacklevel=2,
        )
    path = new_path(out, experiment.name)
    with imports_ahead(engine):
        return begin(experiment, *prepare(experiment), path, progress, on_start)


def begin(
    experiment: Experiment,
    dataset: Dataset,
    splits: ClientSplits,
    spec: RunSpec,
    path: Path,
    progress: bool | Callable[[Progress], None],
    on_start: Callable[[Run], None],
    fill: Callable[[RunFolder], None] = lambda _: None,
) -> Run:
    """Create the folder of a prepared run, and carry out the run; see `run`."""
    check_disk(experiment, spec, path.parents[1])
    with RunProgress(progress) as shown, planned(experiment, splits, spec, shown) as actors:
        about = facts(dataset, splits, experiment)
        folder = RunFolder.create(experiment, path, about)
        with folder.alone():
            fill(folder)
            _announce(folder, shown, on_start)
            if dataset.note:
                shown(dataset.note)
            return _carry_out(folder, dataset, splits, spec, actors, shown)


def resume(
    path: str | Path,
    progress: bool | Callable[[Progress], None] = True,
    on_start: Callable[[Run], None] = lambda _: None,
) -> Run:
    """Continue an interrupted run; see `fedsim.resume`."""
    with RunFolder.open(path).alone(), RunProgress(progress) as shown:
        folder = RunFolder.open(path)  # after any other process has released it
        if folder.manifest["status"] == "finished" and not folder.damage():
            raise RunFolderError(f"{folder.path}: the run is finished; there is nothing to resume")
        for line in folder.repaired:
            shown(line)
        dataset, splits, spec = prepare(folder.experiment, begun=True)
        same_data(folder, dataset, splits)
        with planned(folder.experiment, splits, spec, shown) as actors:
            _announce(folder, shown, on_start)
            if changed := folder.rounds_otherwise():
                shown(
                    f"the run began on another system ({changed}): further rounds may round "
                    "differently and change the hash"
                )
            return _carry_out(folder, dataset, splits, spec, actors, shown)


def _announce(folder: RunFolder, shown: RunProgress, on_start: Callable[[Run], None]) -> None:
    run = Run(folder)
    shown.start(run)
    on_start(run)


def drive(
    experiment: Experiment,
    path: Path,
    actors: int,
    data: Any,
    on_progress: Callable[[Progress], None],
) -> Run:
    """Carry out or continue the run at `path`, with this process as its driver."""
    import ray

    loaded = ray.get(data)
    dataset, splits, spec = prepare(experiment, loaded, begun=is_at(path))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be made: {error}") from error
    # A lost process may still be running, and another trial may have the same run.
    with alone(path):
        if is_at(path):
            folder = RunFolder.open(path)
            folder.trust()  # its experiment came with the call
            same_data(folder, dataset, splits)
        else:
            folder = RunFolder.create(experiment, path, facts(dataset, splits, experiment))
        if folder.manifest["status"] == "finished" and not folder.damage():
            return Run.open(path)
        if experiment.engine.kind == "local":
            events = _locally(folder, dataset, splits, spec)
        else:
            # The source may have changed them for these clients.
            reference = data if dataset is loaded else ray.put(dataset)
            events = _with_actors(folder, spec, actors, [reference, ray.put(splits)])
        return _carry_through(folder, events, actors, on_progress)


def check_disk(experiment: Experiment, spec: RunSpec, out: Path) -> None:
    """Raise ExperimentError if checkpoints, even without clients' states, would fill the disk."""
    each, rounds = 4.0 * spec.size, experiment.train.rounds
    every, keep = experiment.checkpoint.every, experiment.checkpoint.keep
    count = 1 + (rounds // every if keep == "all" and every else min(rounds, 2))
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    total, _, free = shutil.disk_usage(there)
    if count * each > free and total:  # a missing disk is reported elsewhere
        raise ExperimentError(
            f"checkpoint: {count} times the weights, {each / 1e9:.3g} GB each, are "
            f"{count * each / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free below {there}; raise "
            "checkpoint.every, or set checkpoint.keep=last"
        )


def planned(
    experiment: Experiment, splits: ClientSplits, spec: RunSpec, tell: Callable[[str], None]
) -> AbstractContextManager[int]:
    """Context with the number of client actors on Ray, 0 for this process."""
    engine = experiment.engine
    cohort = cohort_size(experiment.train.participation, len(splits))
    each = spec.worker_bytes(engine.clients_per_step)
    return planned_actors(engine, each, cohort, tell, spec.node_bytes)


def same_data(folder: RunFolder, dataset: Dataset, splits: ClientSplits) -> None:
    """Raise RunFolderError if the data changed since the run started."""
    found = hashes(dataset, splits, folder.experiment)
    if any(folder.manifest.get(name) != h for name, h in found.items()):
        raise RunFolderError(f"{folder.path}: the data changed since the run started")


def _carry_out(
    folder: RunFolder,
    dataset: Dataset,
    splits: ClientSplits,
    spec: RunSpec,
    actors: int,
    on_progress: Callable[[Progress], None],
) -> Run:
    if folder.experiment.engine.kind == "local":
        events = _locally(folder, dataset, splits, spec)
    else:
        events = _on_ray(folder, dataset, splits, spec, actors)
    return _carry_through(folder, events, actors, on_progress)


def _carry_through(
    folder: RunFolder,
    events: Generator[Progress],
    actors: int,
    on_progress: Callable[[Progress], None],
) -> Run:
    started = time.monotonic()
    before = folder.manifest.get("wall_seconds", 0.0)

    def end(status: str, error: str | None = None) -> None:
        # Opened again, because the driver has written to the manifest.
        wall_seconds = before + time.monotonic() - started
        RunFolder.open(folder.path).update(status=status, error=error, wall_seconds=wall_seconds)

    folder.update(status="running", actors=actors, error=None)
    try:
        with closing(events):  # ends the driver in any case
            for event in events:
                on_progress(event)
    except BaseException as error:
        if isinstance(error, SystemExit):  # a stopped trial, which is recorded elsewhere
            raise
        # If the folder itself is damaged, this must not hide the cause.
        with suppress(RunError, RunFolderError):
            interrupted = isinstance(error, KeyboardInterrupt | GeneratorExit)
            end("interrupted" if interrupted else "failed", None if interrupted else str(error))
        raise
    end("finished")
    return Run.open(folder.path)


def _locally(
    folder: RunFolder, dataset: Dataset, splits: ClientSplits, spec: RunSpec
) -> Generator[Progress]:
    engine = LocalEngine(folder.experiment.engine, spec, dataset, splits)
    yield from _logged(folder, spec, dataset, splits, engine)


class Driver:
    """The actor that carries out a run: server state, rounds, checkpoints, records.

    If it dies, its launcher starts another one, which continues from the last checkpoint.
    """

    def __init__(
        self,
        path: Path,
        spec: RunSpec,
        actors: int,
        data: list[Any],
        variables: Mapping[str, str],
        folder: str,
    ) -> None:
        enter(folder)
        # References in a list are not resolved by Ray and can be passed on.
        self._path, self._setup, self._actors, self._data = path, spec, actors, data
        os.environ.update(variables)

    def run(self) -> Iterator[Progress | tuple[int, float]]:
        """This process's id and start time, and `simulate`, on as many actors as planned."""
        yield os.getpid(), psutil.Process().create_time()
        folder = RunFolder.open(self._path)
        yield from _with_actors(folder, self._setup, self._actors, self._data)


def _with_actors(
    folder: RunFolder, spec: RunSpec, actors: int, data: list[Any]
) -> Generator[Progress]:
    import ray

    from fedsim.federation.ray_engine import RayEngine

    # The server uses as many threads as a client actor, like the local engine.
    limit_threads(folder.experiment.engine.cpus_per_actor)
    dataset, splits = ray.get(data)
    engine = RayEngine(folder.experiment.engine, actors, len(splits), spec, *data)
    yield from _logged(folder, spec, dataset, splits, engine)


def _on_ray(
    folder: RunFolder, dataset: Dataset, splits: ClientSplits, spec: RunSpec, actors: int
) -> Generator[Progress]:
    import ray
    from ray.exceptions import RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from fedsim.cluster.faults import LOST, failed_to_start, first_line

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    driver_actor = ray.remote(Driver).options(num_cpus=0, scheduling_strategy=here)
    data = [ray.put(dataset), ray.put(splits)]
    deaths, furthest = 0, 0
    while True:
        driver = driver_actor.remote(folder.path, spec, actors, data, environment(), os.getcwd())
        process: psutil.Process | None = None
        try:
            events = driver.run.options(num_returns="streaming").remote()
            while True:
                while not ray.wait([events], timeout=PATIENCE, fetch_local=False)[0]:
                    yield _silence(folder, driver)
                try:
                    event = next(events)
                except StopIteration:
                    return
                progress = ray.get(event)
                if isinstance(progress, tuple):
                    process = _process(*progress)
                    continue
                if isinstance(progress, dict) and progress["round"] > furthest:
                    deaths, furthest = 0, progress["round"]
                yield progress
        except RayTaskError as error:  # before LOST: it is of the type of its cause, too
            if isinstance(error.cause, FedsimError):
                raise error.cause from None
            raise
        except LOST as error:
            if failed_to_start(error):
                raise RunError(f"the driver cannot start: {error}") from error
            if node_is_lost():
                raise RunError(
                    "Ray's raylet process on this machine was lost (killed, or out of memory?)"
                ) from error
            deaths += 1
            if deaths == MAX_DRIVER_DEATHS:
                raise RunError(
                    f"the driver died {deaths} times in a row without progress (out of memory?): "
                    f"{first_line(error)}"
                ) from error
            yield "the driver was lost; a new one continues from the last checkpoint"
        finally:
            try:
                ray.kill(driver)
            finally:
                if process is not None:  # until it has ended, it writes to the run's folder
                    wait_for_end([process], KILLED)
                    with suppress(psutil.Error):  # without Ray's own processes, Ray kills nothing
                        process.kill()
                    wait_for_end([process], KILLED)


def _process(id: int, started: float) -> psutil.Process | None:
    """The process, if it still runs and its number is not one of another container."""
    with suppress(psutil.Error):
        process = psutil.Process(id)
        if process.create_time() == started:
            return process
    return None


def _silence(folder: RunFolder, driver: Any) -> str:
    table = actor_table()
    me = table.get(actor_id(driver))
    if me is None or me["State"] != "ALIVE":
        why = "the driver has not started yet"
    else:
        mine = [
            actor
            for actor in table.values()
            if actor["OwnerAddress"] == me["Address"] and actor["State"] != "DEAD"
        ]
        why = starting(mine, folder.experiment.engine) or (
            f"the driver and {len(mine)} client actors are running"
        )
    return (
        f"no round has ended for {PATIENCE:.0f} s: {why}; {folder.path / 'log.txt'} may say more"
    )


@contextmanager
def _log_file(folder: RunFolder) -> Iterator[None]:
    with folder.writing():
        handler = logging.FileHandler(folder.path / "log.txt", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger("fedsim")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    except Exception:
        root.exception("the run was interrupted")
        raise
    finally:
        root.removeHandler(handler)
        handler.close()


def _logged(
    folder: RunFolder, spec: RunSpec, dataset: Dataset, splits: ClientSplits, engine: Engine
) -> Generator[Progress]:
    """`simulate` on an engine, which is closed at the end, with a log of its events."""
    log = logging.getLogger(__name__)
    try:
        with _log_file(folder):
            spec = yield from with_reference(folder, spec, dataset, splits, engine)
            events = simulate(folder, spec, dataset, splits, engine)
            for event in with_loggers(folder, events):
                if isinstance(event, str):
                    log.info(event)
                else:
                    log.info("round %(round)d, %(clients)d clients, %(seconds).3f s", event)
                yield event
    finally:
        engine.close()
