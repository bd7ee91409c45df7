"""The report as a page, and as tables and figures for papers."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from fedsim.config.registry import nearest
from fedsim.errors import BadInput, RunFolderError
from fedsim.results.figures.look import Drawing
from fedsim.results.report import classes, contributions, curves, explanations, overview, results
from fedsim.results.report.clients import ClientScores
from fedsim.results.report.comparison import ReportData
from fedsim.results.report.curves import Plot
from fedsim.results.report.page import capital
from fedsim.results.report.searches import search_result


class Report:
    """Runs and grids, compared; searches, shown. Its arguments are those of `ReportData`."""

    def __init__(self, folders: Sequence[str | Path], **chosen: Any) -> None:
        self.compared = ReportData(folders, **chosen)
        self._pivot_wanted = not {chosen.get("rows"), chosen.get("columns")} <= {None}

    def html(self, refresh: float | None = None) -> str:
        """The page. The same folders give the same bytes.

        Args:
            refresh: seconds after which a browser loads it again; by default it does not.
        """
        compared = self.compared
        template = templates().get_template("report.html")
        return template.render(
            refresh=refresh,
            compared=compared,
            lead=overview.lead(compared),
            finding=results.finding(compared),
            overview=overview.overview(compared),
            hyper_parameters=overview.hyper_parameters(compared),
            missing=results.missing(compared),
            all_scores=results.all_scores(compared),
            pivots=results.pivots,
            results=results.results,
            notes=results.notes,
            about_all=results.about_all(compared),
            legend=curves.legend(compared),
            band=curves.band(compared),
            plots=self.plots,
            clients=self.clients,
            explanations=explanations.explanations(compared),
            about_explanations=explanations.about(compared),
            searches=self.searches,
            grids=[(grid.path.name, overview.experiment(grid.path)) for grid in compared.grids],
            experiments=overview.experiments(compared),
            provenance=overview.provenance(compared),
            environments=overview.environments(compared),
        )

    @cached_property
    def clients(self) -> ClientScores:
        return ClientScores(self.compared)

    @cached_property
    def searches(self) -> list[dict[str, Any]]:
        return [search_result(folder) for folder in self.compared.searches]

    @cached_property
    def plots(self) -> dict[str, list[Plot]]:
        compared = self.compared
        return {
            "labels": overview.label_counts(compared),
            "contributions": contributions.contributions(compared),
            "curves": curves.curves(compared),
            "costs": curves.costs(compared),
            "classes": classes.figures(compared),
            "of_clients": curves.of_clients(compared),
            "clients": self.clients.figures(),
            "explanations": explanations.curves(compared),
        }

    def figures(self, names: Sequence[str] = ()) -> dict[str, Drawing]:
        """The figures by the names of their files: all, or some.

        Args:
            names: of figures, or how these begin, up to a hyphen.

        Raises:
            RunFolderError: there are none.
            BadInput: there is none of such a name.
        """
        plots = [plot for of_section in self.plots.values() for plot in of_section]
        plots += [plot for search in self.searches for plot in search["figures"]]
        if not plots:
            raise RunFolderError("no figure to write: no rounds and no trials are on disk")
        found: dict[str, Drawing] = {}
        for name, drawing in [file for plot in plots for file in plot.files()]:
            free, number = name, 2
            while free in found:
                free, number = f"{name}-{number}", number + 1
            found[free] = drawing
        for name in names:
            if not any(f"{known}-".startswith(f"{name}-") for known in found):
                raise BadInput(f"figure: there is no '{name}'{nearest(name, found)}")
        return {
            known: drawing
            for known, drawing in found.items()
            if not names or any(f"{known}-".startswith(f"{name}-") for name in names)
        }

    def csv(self) -> str:
        """The summary, a row per cell, in full precision; the pivot if its axes were named."""
        compared = self._with_rounds()
        pivot = self._pivot_wanted and compared.layout.columns is not None
        table = results.pivot_frame(compared) if pivot else compared.summary
        return str(table.to_csv(index=False))

    def latex(self) -> str:
        """The tables of results for a paper: of each score the pivots, if any, and the summary.

        Of a single cell the further scores are in one table.
        """
        compared = self._with_rounds()
        several = len(compared.cells) > 1
        tables = []
        for view in (compared, *(compared.views if several else ())):
            pivots = results.pivots(view)
            tables += [pivot.latex(results.notes(view, True)) for pivot in pivots]
            tables.append(results.results(view).latex(results.notes(view, False)))
        if compared.further and not several:
            tables.append(results.all_scores(compared).latex(results.about_all(compared)))
        return "\n".join(tables)

    def _with_rounds(self) -> ReportData:
        if self.compared.summary.empty:
            raise RunFolderError("no table to write: no rounds of runs or grids are on disk")
        return self.compared


def templates(*folders: Path) -> jinja2.Environment:
    """Templates of a report, and of other pages in these folders, that have its look."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, Path(__file__).parent]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"sha256": _sha256, "breakable": _breakable, "capital": capital}
    return environment


def _breakable(text: str) -> Markup:
    """Text whose names may be broken between their parts ("partition.alpha", "file:Class")."""
    return Markup(re.sub(r"(?<=\w[.:/_])(?=[A-Za-z])", "<wbr>", escape(text)))


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
