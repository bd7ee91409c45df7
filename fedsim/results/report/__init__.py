"""The report: runs and grids on one HTML page that needs nothing but a browser."""

from fedsim.results.report.html import Report

__all__ = ["Report"]
