"""Concepts: attributes of examples that a model can predict on its way to the label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.config.registry import nearest
from fedsim.errors import DataError

Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Concept:
    """An attribute with a value for each example, or NaN where it is not known.

    Args:
        name: of its column.
        binary: its values are 0 and 1; otherwise numbers.
        mean, std: of the known values of training examples, of numbers.
    """

    name: str
    binary: bool
    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def of(cls, name: str, values: NDArray[Any]) -> Concept:
        """Of a column of the training examples."""
        known = values[~np.isnan(values)].astype(np.float64)
        if np.isin(known, (0, 1)).all():
            return cls(name, binary=True)
        return cls(name, False, float(known.mean()), float(known.std()) or 1.0)


def targets(
    concepts: Sequence[Concept], columns: Columns, rows: NDArray[np.int64] | slice
) -> NDArray[np.float32]:
    """(n, J) what models predict: 0 and 1, and numbers with mean 0 and standard deviation 1."""
    found = [(columns[c.name][rows].astype(np.float64) - c.mean) / c.std for c in concepts]
    return np.stack(found, axis=1).astype(np.float32)


def check_concepts(
    names: Sequence[str], of_parts: Mapping[str, Columns], inputs: Sequence[str], where: str
) -> None:
    """Refuse concepts that are no columns of numbers in all parts, or that are inputs as well."""
    for name in names:
        if list(names).count(name) > 1:
            raise DataError(f"{where}: concepts has '{name}' twice")
        if name in inputs:
            raise DataError(f"{where}: the concept '{name}' is a feature as well; leave one out")
        for part, columns in of_parts.items():
            if name not in columns:
                near = nearest(name, columns)
                raise DataError(f"{where}: concepts: '{name}' is not one of {part}{near}")
            values = columns[name]
            if values.dtype.kind not in "biuf" or np.isinf(values).any():
                raise DataError(
                    f"{where}: concepts: {part}['{name}'] must hold finite numbers, or NaN where "
                    "they are not known"
                )
        if np.isnan(of_parts["columns"][name]).all():
            raise DataError(f"{where}: concepts: '{name}' is known of no training example")
