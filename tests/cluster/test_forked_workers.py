"""Workers are forked, and are what Ray's own command would have started."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._private.workers import setup_worker

from fedsim.cluster import forked_workers

# Tells what it is, and ends.
WORKER = """
import json, os, signal, sys
print(json.dumps({
    "words": sys.argv, "variables": [os.environ.get("VARIABLE"), os.environ["PL_DISABLE_FORK"]],
    "folder": os.getcwd(),
    "beside": sys.path[0], "imported": [name in sys.modules for name in ("torch", "ray")],
    "parent": os.getppid(),
    "session": os.getsid(0) == os.getpid(), "name": __name__,
    "children": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
    "badness": open("/proc/self/oom_score_adj").read(),
}))
"""


def context(**fields: Any) -> str:
    plain = {"command_prefix": [], "env_vars": {}, "py_executable": sys.executable}
    return f"--serialized-runtime-env-context={json.dumps({**plain, **fields})}"


@pytest.fixture
def server() -> Iterator[str]:
    with forked_workers.fork_server("") as path:  # that of all tests
        yield path


def test_a_forked_worker_is_as_its_command_says(server: str, tmp_path: Path) -> None:
    own = context(env_vars={"PL_DISABLE_FORK": "1"})  # as Ray Tune's trials have it
    script, folder = tmp_path / "worker.py", tmp_path / "folder"
    folder.mkdir()
    script.write_text(WORKER)
    said = subprocess.run(  # ends when the worker does, which has its streams
        [sys.executable, forked_workers.__file__, own, "--language=PYTHON", script, "--a=1"],
        env={**os.environ, forked_workers.SOCKET: server, "VARIABLE": "ä=\n"},
        cwd=folder,
        preexec_fn=lambda: forked_workers.BADNESS.write_text("500"),  # as Ray's workers have it
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stderr == ""
    found = json.loads(said.stdout)
    forker = psutil.Process(found.pop("parent"))
    assert forker.cmdline()[-1] == server
    assert found == {
        "words": [str(script), "--a=1"],
        "variables": ["ä=\n", "1"],
        "folder": str(folder),
        "beside": str(tmp_path),
        "imported": [True, False],
        "session": True,
        "name": "__main__",
        "children": True,
        "badness": "500\n",
    }


@pytest.mark.parametrize(
    "fields", [{"env_vars": {"A": "1"}}, {"command_prefix": ["nice"]}, {"py_executable": "other"}]
)
def test_a_worker_with_an_environment_of_its_own_is_started_as_ever(
    server: str, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    assert executed(monkeypatch, server, context(**fields))


def test_so_are_workers_if_nobody_forks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert executed(monkeypatch, str(tmp_path / "fork"), context())
    monkeypatch.setattr(sys, "platform", "darwin")
    with forked_workers_here(tmp_path) as path:
        assert executed(monkeypatch, path, context())


def test_so_are_workers_if_it_ends_before_it_has_forked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = str(tmp_path / "fork")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)

        def end() -> None:
            connection, _ = listener.accept()
            connection.makefile("rb").read()
            connection.close()

        thread = threading.Thread(target=end)
        thread.start()
        assert executed(monkeypatch, path, context())
        thread.join()


def forked_workers_here(folder: Path) -> Any:
    """The context manager itself, not the one that all tests share."""
    return runpy.run_path(forked_workers.__file__)["fork_server"](str(folder))


def executed(monkeypatch: pytest.MonkeyPatch, path: str, *arguments: str) -> bool:
    """Whether Ray's own script is executed with these arguments."""
    commands = []
    monkeypatch.setattr(os, "execv", lambda program, words: commands.append((program, words)))
    monkeypatch.setenv(forked_workers.SOCKET, path)
    forked_workers.pass_on(arguments)
    return commands == [(sys.executable, [sys.executable, setup_worker.__file__, *arguments])]


def test_the_process_that_forks_ends_with_a_killed_command(tmp_path: Path) -> None:
    command = (
        "import runpy, sys, time; "
        f"fork_server = runpy.run_path({forked_workers.__file__!r})['fork_server']; "
        f"opened = fork_server({str(tmp_path)!r}); opened.__enter__(); "
        "print('started', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        (server,) = psutil.Process(process.pid).children()
        process.kill()
    server.wait(60)
