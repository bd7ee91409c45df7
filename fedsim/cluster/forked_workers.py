"""Workers of a private Ray, forked from a process that has imported fedsim.

Ray starts a Python process for each worker, which takes two seconds of a core, mostly to import
torch. A forked worker takes a quarter of that, and shares the memory of imported modules.

This file is also a script: with `serve` it is the fork server; otherwise Ray starts it in place of
a worker, and it passes the worker's command to the fork server. It therefore imports only the
standard library.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

SOCKET = "FEDSIM_FORK_SERVER"  # environment variable with the path of the fork server's socket
TIMEOUT = 5.0  # seconds to pass on a command
DONE = b"1"  # answer to a command
# Linux's priority for killing a process when out of memory: Ray's workers go before Ray itself.
BADNESS = Path("/proc/self/oom_score_adj")
# Further modules that Ray, client actors and drivers import.
NEEDED = (
    *("google.protobuf.reflection", "jsonschema", "requests", "filelock", "wcwidth"),
    *("pydantic.v1", "scipy.linalg", "scipy.special", "pandas", "pyarrow.dataset"),
)
# Environment variables without effect at import time; Ray Tune sets them for trials.
LATE = {"PL_DISABLE_FORK"}


@contextmanager
def fork_server(folder: str) -> Iterator[str]:
    """Run a fork server as long as the context lasts, with its socket in a private folder.

    Yields:
        The path of the socket, for the variable `SOCKET` of Ray's processes; empty on systems
        where a process that has imported torch cannot be forked safely.
    """
    if sys.platform != "linux":
        yield ""
        return
    path = os.path.join(folder, "fork")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)  # commands queue there during the imports
        command = [sys.executable, "-P", __file__, "serve", str(listener.fileno()), path]
        # In its own session, so that Ctrl-C does not reach it before its workers end.
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], start_new_session=True
        )
    try:
        yield path
    finally:
        server.terminate()
        server.communicate()


def serve(listener: socket.socket) -> None:
    """Fork a worker for each command that arrives, until standard input is closed."""
    gc.disable()  # imports make no garbage
    # Without Ray, which reads the environment of its worker when it is imported, and never again.
    importlib.import_module("fedsim.launch.run")  # and everything that runs need
    for module in NEEDED:
        with suppress(ImportError):  # if this version of Ray does without
            importlib.import_module(module)
    gc.freeze()  # collecting would write to the shared memory
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are not waited for
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        streams: list[int] = []
        is_child = False
        with connection:
            connection.settimeout(TIMEOUT)
            try:
                _, streams, _, _ = socket.recv_fds(connection, 1, 3)
                content = connection.makefile("rb").read()
                words, variables, folder, badness = json.loads(content)
                is_child = os.fork() == 0
                if not is_child:
                    connection.sendall(DONE)
            except (OSError, ValueError):  # out of memory, or the caller has ended
                pass
        if is_child:
            listener.close()
            _become(words, variables, folder, badness, streams)
            return
        for stream in streams:
            os.close(stream)


def _become(
    words: Sequence[str],
    variables: dict[str, str],
    folder: str,
    badness: str,
    streams: Sequence[int],
) -> None:
    """Turn this process into the one that the command would have started."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    with suppress(OSError):  # not supported here
        BADNESS.write_text(badness)
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    sys.argv = list(words)
    sys.path.insert(0, os.path.dirname(words[0]))
    runpy.run_path(words[0], run_name="__main__")


def pass_on(arguments: Sequence[str]) -> None:
    """Pass a worker's command to the fork server.

    If that has ended, or the worker needs its own environment, start the worker as Ray would.
    """
    flag = "--serialized-runtime-env-context="
    contexts = [json.loads(a.removeprefix(flag)) for a in arguments if a.startswith(flag)]
    variables = {k: v for context in contexts for k, v in context.get("env_vars", {}).items()}
    own = any(context.get("command_prefix") for context in contexts) or variables.keys() - LATE
    other = any(context.get("py_executable") != sys.executable for context in contexts)
    words = [word for word in arguments if not word.startswith((flag, "--language="))]
    badness = BADNESS.read_text() if BADNESS.exists() else ""
    command = [words, {**os.environ, **variables}, os.getcwd(), badness]
    if not own and not other:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.environ[SOCKET])
            socket.send_fds(connection, [b"\0"], [0, 1, 2])
            connection.sendall(json.dumps(command).encode())
            connection.shutdown(socket.SHUT_WR)
            if connection.recv(1) == DONE:
                return
    from ray._private.workers import setup_worker

    os.execv(sys.executable, [sys.executable, setup_worker.__file__, *arguments])


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        pass_on(sys.argv[1:])
