"""SIGTERM and SIGHUP end a command as Ctrl-C does: what it began can be resumed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def orderly_end() -> Iterator[None]:
    """Context in which the first of these signals is a KeyboardInterrupt; a second one kills.

    The exit code is that of a shell: 128 and the number of the signal.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for each in caught:
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt

    def stop_like_ctrl_c(number: int, frame: FrameType | None) -> None:
        # Ray Tune handles Ctrl-C itself and ends all trials first.
        others = signal.getsignal(signal.SIGINT)
        if others is stop or not callable(others):
            stop(number, frame)
            return
        received.append(number)
        signal.signal(number, signal.SIG_DFL)
        others(signal.SIGINT, frame)

    handlers = {signal.SIGINT: stop, signal.SIGTERM: stop_like_ctrl_c}
    handlers[signal.SIGHUP] = stop_like_ctrl_c
    # Ignored signals stay ignored, for `nohup` and background processes. But a job must be
    # stoppable by SIGINT, even on a cluster that was started in the background.
    is_job = os.environ.get("RAY_JOB_STOP_SIGNAL") == "SIGINT"
    caught = [
        each
        for each in handlers
        if signal.getsignal(each) is not signal.SIG_IGN or (is_job and each == signal.SIGINT)
    ]
    before = {each: signal.signal(each, handlers[each]) for each in caught}
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if received:
            sys.exit(128 + received[0])
        raise
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
