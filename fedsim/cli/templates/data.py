"""A data set of your own: it starts as measurements that are drawn at random."""

from __future__ import annotations

import numpy as np

from fedsim.data import Dataset, Source

CLASSES = ("healthy", "ill")


class Template(Source):
    """Measurements of patients in several hospitals, and who is ill.

    Args:
        hospitals: how many there are.
        patients: in all, for training.
    """

    name: str = "template:Template"
    hospitals: int = 10
    patients: int = 1000

    def load(self) -> Dataset:
        """Read your own files here. The result must be the same each time."""
        rng = np.random.default_rng(0)
        count = self.patients + 200  # the last 200 are the test set
        y = rng.integers(0, len(CLASSES), size=count)
        x = rng.normal(size=(count, 8)).astype(np.float32)
        x[:, :3] += y[:, None]
        hospital = rng.integers(0, self.hospitals, size=count)
        n = self.patients
        return Dataset(
            *(x[:n], y[:n], x[n:], y[n:]),
            classes=CLASSES,
            columns={"hospital": hospital[:n]},  # what partition.column can name
        )
