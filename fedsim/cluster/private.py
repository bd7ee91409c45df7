"""A private Ray cluster on this machine, which leaves nothing behind."""

from __future__ import annotations

import fcntl
import glob
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from fedsim.cluster import forked_workers
from fedsim.cluster.ray_compat import lean_start
from fedsim.errors import ClusterError, FedsimError, RunError, in_one_line

PATIENCE = 5.0  # seconds for processes to end by themselves
CORE = ("gcs_server", "raylet")  # Ray's essential processes
WATCH = 0.5  # seconds between checks
CONFIG: dict[str, Any] = {  # of the raylet
    "enable_metrics_collection": False,
    "task_events_report_interval_ms": 0,  # none: only a dashboard would show them
    # By default workers have low priority (nice 15): on a busy machine, rounds took seven times as
    # long.
    "worker_niceness": 0,
    # Otherwise `ray.init` waits for a worker per CPU, and forever if one is lost.
    "prestart_worker_first_driver": False,
    # Agents notice the raylet's end by a pipe; see `idle_agent`.
    "enable_pipe_based_agent_to_parent_health_check": True,
}
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


# The folder of a private Ray that will be started, and the socket of its fork server.
_AHEAD: ContextVar[tuple[str, str] | None] = ContextVar("_AHEAD", default=None)


class _Lost(RunError):
    """One of Ray's own processes was lost."""


@contextmanager
def fork_server_ahead(variables: Mapping[str, str]) -> Iterator[None]:
    """Start the fork server of this context's `private_ray`, whose imports take as long as Ray."""
    with ExitStack() as stack:
        with suppress(ClusterError, OSError):  # `private_ray` will say so
            token = _AHEAD.set(stack.enter_context(_fork_server(variables)))
            stack.callback(_AHEAD.reset, token)
        yield


@contextmanager
def _fork_server(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    with scratch("fsray-") as folder, ExitStack() as stack:
        # Not as a runtime environment, with which workers would not be forked.
        with _starting(), environment(variables):
            fork = stack.enter_context(forked_workers.fork_server(folder))
        yield folder, fork


@contextmanager
def private_ray(cpus: int, variables: Mapping[str, str]) -> Iterator[None]:
    """Start a Ray, and end it with the context.

    Its logs and sockets are in a folder that only this user can read and that is removed at the
    end.

    Raises:
        ClusterError: it does not start.
        RunError: one of Ray's own processes was lost.
    """
    import ray

    _make_token()
    with ExitStack() as stack:
        folder, fork = _AHEAD.get() or stack.enter_context(_fork_server(variables))
        _AHEAD.set(None)  # it serves one Ray
        patience = PATIENCE
        started: set[psutil.Process] = set()
        try:
            with (
                _starting(),
                environment({**variables, forked_workers.SOCKET: fork}),
                lean_start(forked_workers.__file__),
                handlers_kept(),
            ):
                ray.init(
                    address="local",
                    num_cpus=cpus,
                    include_dashboard=False,
                    _temp_dir=folder,
                    _system_config=CONFIG,
                    **QUIET,
                )
            started = _family(folder)
            with _watched(started):
                yield
        except _Lost:
            patience = 0.0  # workers would look for the process that was lost
            raise
        finally:
            family = started | _family(folder)
            ray.shutdown()
            # Agents look for their node for a minute.
            for ask, wait in ((psutil.Process.terminate, patience), (psutil.Process.kill, 1.0)):
                for process in filter(is_alive, family):
                    with suppress(psutil.NoSuchProcess):
                        ask(process)
                wait_for_end(family, wait)


@contextmanager
def _starting() -> Iterator[None]:
    try:
        yield
    except FedsimError:
        raise
    except Exception as error:  # Ray raises any
        hint = "set RAY_TMPDIR to a shorter path" if "AF_UNIX" in str(error) else ""
        raise ClusterError(
            f"Ray does not start below {_base()}: {in_one_line(error)}"
            f"; {hint or 'engine.kind=local does without'}"
        ) from error


def _base() -> Path:
    return Path(os.environ.get("RAY_TMPDIR") or "/tmp").absolute()


@contextmanager
def scratch(prefix: str) -> Iterator[str]:
    """A private folder with a short path (for sockets), removed at the end.

    Folders of the same prefix left by killed processes are removed, too: their locks ended.
    """
    base = _base()
    for old in glob.iglob(f"{glob.escape(str(base))}/{prefix}*"):  # of no folder, there are none
        try:
            if os.stat(old, follow_symlinks=False).st_uid == os.getuid():
                with _locked(old):
                    shutil.rmtree(old, ignore_errors=True)
        except OSError:  # in use, or removed meanwhile
            continue
    try:
        new = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=base))
    except OSError as error:
        raise ClusterError(
            f"RAY_TMPDIR={base}: no folder can be made there: {error.strerror}"
        ) from error
    with _locked(new):
        folder = new.rename(new.with_name(new.name[1:]))  # safe from removal: it is locked
        try:
            yield str(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: str | Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises BlockingIOError if another process has it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _make_token() -> None:
    """Make the user's token for Ray; Ray itself would make one that everybody can read."""
    token = Path.home() / ".ray" / "auth_token"
    try:
        token.parent.mkdir(parents=True, exist_ok=True)
        new = os.open(token, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        if token.is_file() and not token.is_symlink() and token.stat().st_uid == os.getuid():
            token.chmod(0o600)
    except OSError:  # not writable; Ray will report what it needs
        return
    else:
        with open(new, "w") as file:
            file.write(secrets.token_hex(32))


def _family(folder: str) -> set[psutil.Process]:
    """The processes of the Ray with that folder, and all their descendants."""
    found: set[psutil.Process] = set()
    for child in psutil.Process().children():
        try:
            if any(folder in word for word in child.cmdline()):
                found |= {child, *child.children(recursive=True)}
        except psutil.Error:  # it has ended
            continue
    return found


@contextmanager
def _watched(family: set[psutil.Process]) -> Iterator[None]:
    """Context in which the loss of one of Ray's own processes ends the work, as Ctrl-C would.

    Ray itself retries for up to a minute, and then ends this process without a message. Processes
    that they start are added within half a second: without a raylet they lose their parent.
    """
    core = {}
    for each in family:
        with suppress(psutil.NoSuchProcess):  # a worker may just have ended
            core[each.name()] = each
    main = threading.main_thread()
    asked, over = threading.Event(), threading.Event()

    def lost() -> str | None:
        return next((name for name in CORE if name in core and not is_alive(core[name])), None)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not over.is_set():
            asked.set()
            raise KeyboardInterrupt

    def watch() -> None:
        wait = WATCH
        while not over.wait(wait):
            for name in CORE:
                with suppress(KeyError, psutil.Error):
                    family.update(core[name].children())
            if lost():
                signal.pthread_kill(main.ident or 0, signal.SIGUSR2)
                wait = PATIENCE  # before the next interrupt

    if threading.current_thread() is not main:  # signals arrive only there
        yield
        return
    before = signal.signal(signal.SIGUSR2, interrupt)
    watcher = threading.Thread(target=watch, daemon=True, name="watch Ray")
    watcher.start()
    try:
        try:
            yield
            if asked.is_set():  # Ray Tune ends normally after an interrupt
                raise KeyboardInterrupt
        except (Exception, KeyboardInterrupt) as error:
            over.set()
            name = lost()
            if name is None:
                raise
            raise _Lost(
                f"Ray's {name} process on this machine was lost (killed, or out of memory?)"
            ) from error
    finally:
        over.set()
        watcher.join()
        signal.signal(signal.SIGUSR2, before)


def wait_for_end(processes: Iterable[psutil.Process], seconds: float) -> None:
    left, until = list(processes), time.monotonic() + seconds
    while any(map(is_alive, left)) and time.monotonic() < until:
        time.sleep(0.01)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs; zombies do not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Keep this process's signal handlers: Ray's exit, or abort with a dump, at a SIGTERM."""
    if threading.current_thread() is not threading.main_thread():  # handlers cannot be set here
        yield
        return
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    ended = False
    try:
        yield
    except SystemExit:  # by Ray's own handler
        ended = True
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        if ended:
            signal.raise_signal(signal.SIGTERM)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
