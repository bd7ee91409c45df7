"""Figures and HTML of runs, grids and searches; the modules that make them register here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from fedsim.config.arguments import checked
from fedsim.config.registry import nearest
from fedsim.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Draws results onto axes, by a column of the rounds if the figure shows one.
Draw = Callable[[Any, "Axes", str | None], None]

FIGURES: dict[str, dict[str, Draw]] = {}  # by kind of results, and by name
WITHOUT_METRIC = {"labels", "confusion", "pareto", "importance"}
PAGES: dict[str, Callable[[Any], str]] = {}  # HTML for notebooks, by kind of results
loaders: list[Callable[[], None]] = []  # import the modules that fill both, at the first use


class Displayed:
    """Runs, grids and searches, which notebooks show as HTML, and their figures.

    Attributes:
        kind: `run`, `grid` or `search`.
    """

    kind: ClassVar[str]

    def _repr_html_(self) -> str:
        _load()
        return PAGES[self.kind](self)

    @checked
    def plot(
        self, figure: str | None = None, *, metric: str | None = None, ax: Axes | None = None
    ) -> Axes:
        """Draw a figure.

        Args:
            figure: by default the first of these. Of a run: `curves` (a column of `rounds` over
                the rounds), `clients` (each client's score on its own test examples, in the last
                round that has such scores), `labels` (how many examples of each class, or of each
                bin of targets, each client holds) or `confusion` (the global model's confusion
                matrix in the last evaluated round, if `evaluate.metrics` includes `confusion`).
                Of a grid: `curves` (a line for each cell, mean ± standard deviation over seeds) or
                `summary` (the last round of each cell, in the same way). Of a search: `history`
                (an objective over the trials, and the best so far), `pareto` (the trials by their
                first two objectives, with the Pareto front) or `importance` (the share of each
                objective's variance that each hyper-parameter explains).
            metric: a column of `rounds`, or an objective; by default the primary or first one.
            ax: what to draw on; by default a figure is made.

        Returns:
            The axes, to be changed further.

        Raises:
            BadInput: there is no such figure or column, or nothing to be shown.
        """
        _load()
        figures = FIGURES[self.kind]
        figure = figure or next(iter(figures))
        if figure not in figures:
            raise BadInput(f"plot: there is no figure '{figure}'{nearest(figure, figures)}")
        if metric is not None and figure in WITHOUT_METRIC:
            raise BadInput(f"plot: '{figure}' shows no metric; leave out metric={metric}")
        import matplotlib as mpl
        from matplotlib import pyplot as plt
        from matplotlib.axes import Axes

        own = None
        if not isinstance(ax, Axes | None):
            raise TypeError(f"plot: ax must be matplotlib's Axes, not {ax!r:.80}")
        if ax is None:
            own, ax = plt.subplots(layout="constrained")
        try:
            with mpl.rc_context({"text.parse_math": False}):  # a $ in a name is a dollar
                figures[figure](self, ax, metric)
        except BadInput:
            if own is not None:
                plt.close(own)
            raise
        return ax


def _load() -> None:
    while loaders:
        loaders.pop()()
