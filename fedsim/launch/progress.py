"""Progress bars for runs, grids and searches started from Python.

In a terminal it is rich's, on stderr. In a notebook it is an HTML element that is updated in
place: rich and tqdm would need ipywidgets there. Elsewhere nothing is shown.
"""

from __future__ import annotations

import html
import importlib
import math
import re
import sys
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedsim.objectives import Metric
from fedsim.results.run import Run
from fedsim.results.summary import digits
from fedsim.support.words import duration, size, visible

PAUSE = 0.1  # minimum seconds between updates of a notebook's bar


class RoundLine:
    """A round in one line: score, traffic, speed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._first, self._began = 0, time.monotonic()

    @cached_property
    def _metric(self) -> Metric:
        # Loaded again, because the driver has written to the manifest.
        return Run.open(self._run.path).primary_metric

    def __call__(self, row: dict[str, Any]) -> str:
        if not self._first:
            self._first, self._began = row["round"], time.monotonic()
        score = row.get(self._metric.column, math.nan)
        parts = [] if math.isnan(score) else [f"{self._metric.label} {digits(score)}"]
        parts.append(f"{size(row['total_bytes_up'] + row['total_bytes_down'])} sent")
        if "total_simulated_seconds" in row:
            parts.append(f"{duration(row['total_simulated_seconds'])} simulated")
        if "epsilon" in row:
            parts.append(f"ε {row['epsilon']:.3g}")
        if "explain_epsilon" in row:
            parts.append(f"ε of explanations {row['explain_epsilon']:.3g}")
        if row["round"] > self._first:
            rate = (row["round"] - self._first) / (time.monotonic() - self._began)
            parts.append(f"{rate:.2g} rounds/s")
        return "  ".join(parts)


class LineProgress:
    """Progress in lines: "[3/12] …" for each finished step, and others next to the bar."""

    def __init__(self, progress: bool | Callable[[Any], None]) -> None:
        self._tell = progress if callable(progress) else None
        self._bar = _bar() if progress is True else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.close()

    def __call__(self, event: Any) -> None:
        if self._tell:
            self._tell(event)
        elif self._bar:
            self._show(self._bar, event)

    def _show(self, bar: TerminalBar | _NotebookBar, event: Any) -> None:
        if ended := re.match(r"\[(\d+)/(\d+)\] ", event):
            bar.update(int(ended[1]), int(ended[2]), event[ended.end() :])
        else:
            bar.note(event)


class RunProgress(LineProgress):
    """Progress of a run; see `fedsim.run`."""

    def start(self, run: Run) -> None:
        self._rounds, self._line = run.experiment.train.rounds, RoundLine(run)
        if self._bar:
            self._bar.update(0, self._rounds, "starting")

    def _show(self, bar: TerminalBar | _NotebookBar, event: Any) -> None:
        if isinstance(event, str):
            bar.note(event)
        else:
            bar.update(event["round"], self._rounds, self._line(event))


def _bar() -> TerminalBar | _NotebookBar | None:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if getattr(shell, "kernel", None) is not None:
        return _NotebookBar()
    console = Console(stderr=True, soft_wrap=True, emoji=False, highlight=False)
    return TerminalBar(console) if console.is_terminal else None


class TerminalBar:
    """A bar in a terminal."""

    def __init__(self, console: Console, unit: str = "", transient: bool = False) -> None:
        self._progress = Progress(
            *([TextColumn(unit)] if unit else []),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=transient,
        )
        self._task = self._progress.add_task("", total=None)
        self._progress.start()

    def update(self, done: int, total: int, text: str) -> None:
        self._progress.update(self._task, completed=done, total=total, description=visible(text))

    def note(self, line: str) -> None:
        self._progress.console.print(visible(line), markup=False)

    def close(self) -> None:
        self._progress.stop()


class _NotebookBar:
    def __init__(self) -> None:
        self._ipython: Any = importlib.import_module("IPython.display")
        self._handle = self._ipython.display(self._ipython.HTML(""), display_id=True)
        self._content, self._notes, self._drawn = "", "", 0.0

    def update(self, done: int, total: int, text: str) -> None:
        self._content = (
            f'<progress value="{done}" max="{total}" style="width: 16em"></progress> '
            f"{done}/{total}&ensp;{html.escape(text)}"
        )
        if time.monotonic() - self._drawn >= PAUSE or done in (0, total):
            self._draw()

    def note(self, line: str) -> None:
        self._notes += f"<div>{html.escape(line)}</div>"
        self._draw()

    def close(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._handle.update(self._ipython.HTML(f"{self._notes}<div>{self._content}</div>"))
