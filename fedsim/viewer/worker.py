"""The process that makes models again and explains them, so that its server keeps answering.

It reads requests from a pipe, one after another, and ends when the pipe does.
"""

from __future__ import annotations

import os
import threading
import warnings
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from fedsim.errors import FedsimError, in_own_code
from fedsim.results.run import Run
from fedsim.viewer.decisions import Asked, Decisions

_RUNS = 4  # whose models are kept at a time


class Request(NamedTuple):
    """What is wanted of a run: a method of `Decisions`, and its arguments."""

    run: str
    what: str
    arguments: tuple[Any, ...]

    @classmethod
    def seen(cls, asked: Asked) -> Request:
        return cls(asked.run, "seen", (asked,))


class Answer(NamedTuple):
    """What became of a request: `working` on it, `done`, `failed`, or it `gave way`."""

    status: str
    content: Any


class _GaveWay(Exception):
    pass


def main(descriptor: int) -> None:
    """Answer what comes through a pipe until it is closed.

    Requests come one at a time, each with whether it only prepares for what may be asked next.
    That stops when anything else comes, such as None.
    """
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    pipe = Connection(descriptor)
    runs: dict[str, Decisions] = {}
    while True:
        try:
            received: tuple[Request, bool] | None = pipe.recv()
            if received is not None:
                request, ahead = received
                pipe.send(_answered(request, ahead, runs, pipe))
        except (EOFError, BrokenPipeError):  # the server has ended
            return


def _end_with_the_server() -> None:
    """End at once when the server has, however that was: one explanation may take hours."""
    os.read(0, 1)  # nothing is ever written there
    os._exit(1)


def _answered(
    request: Request, ahead: bool, runs: dict[str, Decisions], pipe: Connection
) -> Answer:
    def tell(line: str) -> None:
        if ahead and pipe.poll():
            raise _GaveWay
        pipe.send(Answer("working", line))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were said when the run was made
            decisions = runs.pop(request.run, None) or Decisions(Run.open(request.run))
            found = getattr(decisions, request.what)(*request.arguments, tell)
    except _GaveWay:
        return Answer("gave way", "")
    except (EOFError, BrokenPipeError):
        raise
    except Exception as error:  # a user's model or data may raise anything
        known = isinstance(error, FedsimError)
        # Without its models: what was interrupted may be half done.
        return Answer("failed", str(error) if known else in_own_code(error))
    while len(runs) >= _RUNS:
        del runs[next(iter(runs))]
    runs[request.run] = decisions  # the latest is the last
    return Answer("done", found)
