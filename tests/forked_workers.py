"""Ray's workers forked from a process that has imported torch: 0.5 s each instead of two.

The file has three parts: `forked_workers` for the tests; as a script with the path of a socket,
the process that forks; as the script with which Ray sets workers up, one that passes the worker's
command on to it. Ray itself is imported by each worker, as it reads its settings from the
environment when it is.
"""

from __future__ import annotations

import json
import os
import pickle
import runpy
import signal
import socket
import sys

SOCKET = "FEDSIM_TESTS_FORK"  # the variable that names the socket


def fork(path: str) -> None:
    """Fork a worker for each command that is sent to a socket, as long as the parent lives."""
    import cachetools
    import numpy
    import pyarrow.parquet
    import pydantic
    import torch
    import yaml

    assert all((cachetools, numpy, pyarrow.parquet, pydantic, torch, yaml))
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a worker ended
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{path}.part")
        server.listen(64)
        server.settimeout(1.0)
        os.rename(f"{path}.part", path)
        while os.getppid() == parent:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            with connection:
                connection.setblocking(True)
                command = connection.makefile("rb").read()
            if os.fork() == 0:
                break
        else:
            return
    _become(*pickle.loads(command))


def _become(words: list[str], environment: dict[str, str], folder: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    found = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [os.path.dirname(words[0]), *filter(None, found), *sys.path[1:]]
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def pass_on(arguments: list[str]) -> None:
    """Send the command of a worker to the process that forks.

    A worker that is to run in another folder or by another Python is started as ever.
    """
    flag = "--serialized-runtime-env-context="
    context = next((json.loads(a[len(flag) :]) for a in arguments if a.startswith(flag)), {})
    if context.get("command_prefix") or context.get("py_executable", sys.executable) != (
        sys.executable
    ):
        from ray._private.workers import setup_worker

        os.execv(sys.executable, [sys.executable, setup_worker.__file__, *arguments])
    environment = dict(os.environ)
    for name, value in context.get("env_vars", {}).items():
        environment[name] = os.path.expandvars(value)
    words = [word for word in arguments if not word.startswith((flag, "--language="))]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET])
        connection.sendall(pickle.dumps((words, environment, os.getcwd())))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        fork(sys.argv[1])
    else:
        pass_on(sys.argv[1:])
