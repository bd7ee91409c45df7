"""Commands of fedsim as processes that start at once: importing all it needs takes seconds."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self, TextIO

from fedsim.cluster import forked_workers

# Not the command line, which looks at the terminal and the environment when it is imported.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["fedsim.launch.run", "fedsim.sweep", *forked_workers.NEEDED])


class Command:
    """`python -m fedsim`, forked from a process that has imported its modules.

    It has what tests use of `subprocess.Popen`, and heeds SIGINT and SIGHUP, also where those who
    started the tests ignore them, as `nohup` does. As in the tests, it does not wait for the disk.

    Attributes:
        stdout: what it prints; complaints as well, unless they are kept apart.
        stderr: its complaints, if they are.
    """

    stdin: None = None

    def __init__(
        self,
        *words: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        complaints_apart: bool = False,
        shares_workers: bool = False,
        module: str = "fedsim",
    ) -> None:
        """
        Args:
            cwd, env: those of this process by default.
            shares_workers: Ray's workers are forked from the process that does it for these
                tests, rather than from one that the command starts; they are not below it then.
            module: what is run in place of fedsim.
        """
        pipes = [os.pipe() for _ in range(1 + complaints_apart)]
        outputs = [Connection(writable, readable=False) for _, writable in pipes]
        folder, variables = str(cwd or Path.cwd()), dict(os.environ if env is None else env)
        with forked_workers.fork_server("") if shares_workers else nullcontext("") as workers:
            self._process = CONTEXT.Process(
                target=_carry_out, args=(module, words, folder, variables, outputs, workers)
            )
            self._process.start()
        for output in outputs:
            output.close()
        self.stdout, *rest = self._streams = [
            os.fdopen(readable, encoding="utf-8") for readable, _ in pipes
        ]
        self.stderr: TextIO | None = rest[0] if rest else None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None as long as it runs; negative if a signal has ended it."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        return self.returncode

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self.returncode is not None, "it does not end"
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it still prints and complains of until it ends."""
        with ThreadPoolExecutor() as pool:
            reading = [pool.submit(stream.read) for stream in self._streams]
            try:
                printed, *complaints = [each.result(timeout) for each in reading]
            except BaseException:
                self.kill()
                raise
        self.wait(timeout)
        return printed, "".join(complaints)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.close()
        self.wait()


def _carry_out(
    module: str,
    words: Sequence[str],
    folder: str,
    variables: Mapping[str, str],
    outputs: Sequence[Connection],
    workers: str,
) -> None:
    for number, output in zip((1, 2), [*outputs, outputs[0]], strict=False):
        os.dup2(output.fileno(), number)
    for output in outputs:
        output.close()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    added = variables.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder, *filter(None, added)]
    sys.argv = [module, *words]
    os.fsync = lambda fd: None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if workers:
        forked_workers.fork_server = lambda folder: nullcontext(workers)  # type: ignore[assignment]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # a process that was forked leaves without
