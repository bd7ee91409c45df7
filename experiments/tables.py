"""What the READMEs of experiments print: means, tests, tables."""

from __future__ import annotations

import pandas as pd
from scipy.stats import ttest_ind


def better(a: pd.Series, b: pd.Series) -> float:
    """p of a one-tailed Welch's t-test that a's mean is not above b's."""
    return float(ttest_ind(a, b, equal_var=False, alternative="greater").pvalue)


def spread(values: pd.Series, digits: int = 3) -> str:
    """Mean ± standard deviation."""
    values = values.dropna()
    if not len(values):
        return "–"
    std = f" ± {values.std():.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{std}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(header) + " |", "| --- " * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
