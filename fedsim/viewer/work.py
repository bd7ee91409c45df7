"""What a server has asked its worker for, and the answers, which are kept."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from fedsim.viewer.worker import Answer, Request

_KEPT = 300  # answers
_MOST_WAITING = 100
_START = """
import gc, sys
gc.disable()  # imports make many objects and no garbage
from fedsim.viewer.worker import main
gc.enable()
main(int(sys.argv[1]))
"""


class Work:
    """Requests to a process of its own, which is started when it is needed.

    What somebody asked for last comes first, as pages ask again until they have their answer: one
    that moved on to another round does not wait for those in between. Then what is prepared.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._answers: OrderedDict[Request, Answer] = OrderedDict()
        self._waiting: list[Request] = []  # what was asked for last is the last
        self._ahead: list[Request] = []
        self._current: Request | None = None
        self._line = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="fedsim-view", daemon=True)
        self._thread.start()

    def ask(self, request: Request, seconds: float = 0) -> Answer:
        """The answer, or how far it is after some seconds at most."""
        with self._changed:
            if request not in self._answers:
                others = [each for each in self._waiting if each != request]
                self._waiting = [*others[1 - _MOST_WAITING :], request]
                if self._pipe is not None and self._current not in (None, *self._waiting):
                    self._send(None)  # what is only being prepared gives way
                self._changed.notify_all()
            self._changed.wait_for(lambda: request in self._answers or self._closed, seconds)
            if request in self._answers:
                self._answers.move_to_end(request)
                return self._answers[request]
            if request == self._current:
                return Answer("working", self._line)
            return Answer("working", "finishing something else first")

    def prepare(self, requests: Iterable[Request]) -> None:
        """Have these answered when there is nothing else to do, instead of earlier ones."""
        with self._changed:
            self._ahead = [*requests]
            self._changed.notify_all()

    def cancel(self, request: Request) -> None:
        """Do not answer a request that waits; if it is being worked on, end the process."""
        with self._changed:
            if request not in self._answers:
                self._answers[request] = Answer("failed", "cancelled")
                self._waiting = [each for each in self._waiting if each != request]
                self._ahead = []
                if request == self._current:
                    self._stop()
            self._changed.notify_all()

    def again(self, request: Request) -> None:
        """Forget that a request failed or was cancelled, so that it can be asked again."""
        with self._changed:
            if self._answers.get(request, Answer("", "")).status == "failed":
                del self._answers[request]

    def close(self) -> None:
        """End the process and the thread."""
        with self._changed:
            self._closed = True
            self._stop()
            self._changed.notify_all()
        self._thread.join()
        if self._pipe is not None:
            self._pipe.close()

    def _run(self) -> None:
        with self._changed:
            if not self._closed:
                self._started()  # it imports what it needs while somebody opens the page
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._next()))
                if self._closed:
                    return
                self._current, self._line = self._next(), "starting"
                assert self._current is not None
                request, ahead = self._current, self._current not in self._waiting
                pipe = self._started()
                self._send((request, ahead))
            answer = self._received(pipe)
            with self._changed:
                self._current = None
                self._ahead = [each for each in self._ahead if each != request]
                if answer.status != "gave way" and request not in self._answers:
                    self._waiting = [each for each in self._waiting if each != request]
                    self._answers[request] = answer
                    while len(self._answers) > _KEPT:
                        self._answers.popitem(last=False)
                self._changed.notify_all()

    def _next(self) -> Request | None:
        if self._waiting:
            return self._waiting[-1]
        return next((each for each in self._ahead if each not in self._answers), None)

    def _received(self, pipe: Connection) -> Answer:
        """The answer to the current request."""
        while True:
            try:
                answer: Answer = pipe.recv()
            except (EOFError, OSError):  # it was stopped, or was killed for its memory
                return Answer("failed", "the process that was to answer has ended")
            if answer.status != "working":
                return answer
            self._line = answer.content

    def _started(self) -> Connection:
        if self._pipe is not None and self._process is not None:
            if self._process.poll() is None:
                return self._pipe
            self._process.communicate()  # closes its input
            self._pipe.close()
        self._pipe, other = Pipe()
        number = other.fileno()
        # Not among those that Ctrl-C in a terminal reaches: the server ends it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, str(number)],
            pass_fds=[number],
            stdin=subprocess.PIPE,  # is closed when the server ends, however that is
            start_new_session=True,
        )
        other.close()
        return self._pipe

    def _send(self, content: tuple[Request, bool] | None) -> None:
        assert self._pipe is not None
        with suppress(OSError):  # it has ended, as `_received` will find
            self._pipe.send(content)

    def _stop(self) -> None:
        """End the process; the pipe is closed by the thread, which may be reading from it."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
