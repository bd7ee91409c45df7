"""The report as a whole: a page, and tables for papers."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from fedsim.errors import RunFolderError
from fedsim.results.report import curves, explanations, overview, provenance, results
from fedsim.results.report.clients import ClientScores
from fedsim.results.report.comparison import Comparison
from fedsim.results.report.page import capital
from fedsim.results.report.searches import SearchResult
from fedsim.results.summary import LAST


class Report:
    """Runs and grids, compared; searches, shown.

    Args:
        folders: of runs, grids and searches.

    Raises:
        RunFolderError: one of the folders is none of these.
    """

    def __init__(self, folders: Sequence[str | Path]) -> None:
        self.compared = Comparison(folders)

    def html(self) -> str:
        """The page. The same folders give the same bytes."""
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        environment.filters |= {"sha256": _sha256, "breakable": _breakable, "capital": capital}
        compared = self.compared
        return environment.get_template("report.html").render(
            last=LAST,
            compared=compared,
            lead=overview.lead(compared),
            finding=results.finding(compared),
            overview=overview.overview(compared),
            missing=results.missing(compared),
            results=results.results(compared),
            legend=curves.legend(compared),
            band=curves.band(compared),
            curves=curves.curves(compared),
            traffic=curves.traffic(compared),
            clients=ClientScores(compared),
            explanations=explanations.explanations(compared),
            explanation_curves=explanations.curves(compared),
            searches=[SearchResult.read(folder) for folder in compared.searches],
            grids=provenance.grids(compared),
            experiments=provenance.experiments(compared),
            provenance=provenance.provenance(compared),
            environments=provenance.environments(compared),
        )

    def csv(self) -> str:
        """The summary table, in full precision.

        Raises:
            RunFolderError: there is none.
        """
        self._insist()
        return str(self.compared.summary.to_csv(index=False))

    def latex(self) -> str:
        """The table of results for a paper.

        Raises:
            RunFolderError: there is none.
        """
        self._insist()
        return results.results(self.compared).latex(self.compared.score)

    def _insist(self) -> None:
        if self.compared.summary.empty:
            raise RunFolderError("no table to write: no rounds of runs or grids are on disk")


def _breakable(text: str) -> Markup:
    """A name that may be broken between its parts («partition.alpha»)."""
    return Markup(re.sub(r"\.(?=[A-Za-z])", ".<wbr>", escape(text)))


def _sha256(text: str) -> str:
    """As a content security policy wants it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
