"""Significance of differences over seeds: two-tailed t-tests, their intervals, Holm's method."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # slow to import, and so is scipy.stats: only where they are needed
    import pandas as pd

LEVELS = (0.05, 0.01, 0.001)  # of a star each
_ROUNDING = 1e-9  # values that vary by less of their size are equal


@dataclass(frozen=True)
class Difference:
    """The mean difference of two settings, ours less theirs, with the degrees of freedom of t.

    `sem` is its standard error, NaN if there is no variance to test against; `pairs` are runs that
    share a seed, and so partition and initial weights, 0 if none do.
    """

    mean: float
    sem: float
    freedom: float
    pairs: int = 0

    @property
    def low(self) -> float:
        """The lower end of the 95 % confidence interval; NaN without variance."""
        return self.mean - self._critical * self.sem

    @property
    def high(self) -> float:
        """The upper end of the 95 % confidence interval; NaN without variance."""
        return self.mean + self._critical * self.sem

    @property
    def _critical(self) -> float:
        from scipy.stats import t

        return float(t.ppf(0.975, self.freedom))

    @property
    def detectable(self) -> float:
        """The difference that as many runs find with a probability of 0.8 at p < 0.05."""
        from scipy.optimize import brentq
        from scipy.stats import nct

        if math.isnan(self.sem):
            return math.nan
        freedom, critical = self.freedom, self._critical
        in_errors = brentq(lambda x: nct.sf(critical, freedom, x) - 0.8, 0.1, 50)
        return float(in_errors) * self.sem

    def p(self, size: float = 0.0) -> float:
        """Of a two-tailed t-test that the difference is of this size; NaN without variance."""
        from scipy.stats import t

        return float(2 * t.sf(abs(self.mean - size) / self.sem, self.freedom))

    def __str__(self) -> str:
        text = f"{self.mean:+z.3f}"
        if not math.isnan(self.sem):
            text += f" ({self.low:+z.3f} to {self.high:+z.3f})"
        return text.replace("-", "−")


def paired(ours: pd.Series[float], theirs: pd.Series[float]) -> Difference:
    """Compare two series of scores by their common index, such as the seed.

    Scores on a test set are multiples of 1/n: a few seeds may all differ by the same amount. Then
    there is no variance to test against.
    """
    difference = (ours - theirs).dropna()
    pairs = len(difference)
    return Difference(float(difference.mean()), _sem(difference) or math.nan, pairs - 1, pairs)


def compared(ours: pd.Series[float], theirs: pd.Series[float]) -> Difference:
    """Compare two series of scores, by seed: paired if they share seeds, else by Welch's test.

    Of several runs with the same seed the mean counts. With a single pair, or fewer than two runs
    on a side, there is a difference but no test.
    """
    ours, theirs = (each.dropna().groupby(level=0).mean() for each in (ours, theirs))
    pairs = paired(ours, theirs)
    if pairs.pairs or min(len(ours), len(theirs)) < 2:
        return pairs
    parts = [_sem(each) ** 2 for each in (ours, theirs)]
    of_each = (p**2 / (len(s) - 1) for p, s in zip(parts, (ours, theirs), strict=True))
    variance = sum(parts) or math.nan
    freedom = variance**2 / (sum(of_each) or math.nan)  # by Welch and Satterthwaite
    return Difference(float(ours.mean() - theirs.mean()), math.sqrt(variance), freedom)


def _sem(scores: pd.Series[float]) -> float:
    """The standard error of their mean: 0 if they are equal but for rounding, NaN for one."""
    if len(scores) < 2:
        return math.nan
    alike = np.ptp(scores) <= _ROUNDING * scores.abs().max()
    return 0.0 if alike else math.sqrt(scores.var(ddof=1) / len(scores))


def holm(p: Iterable[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979); NaN stands for no test."""
    values: NDArray[np.float64] = np.array(list(p), dtype=np.float64)
    order = np.argsort(values)[: np.isfinite(values).sum()]  # NaN comes last
    corrected = np.full(len(values), np.nan)
    steps = values[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return corrected.tolist()


def shown_p(p: float) -> str:
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def stars(p: float) -> str:
    """`*` for p < 0.05, `**` for p < 0.01, `***` for p < 0.001."""
    return "*" * sum(p < level for level in LEVELS)
