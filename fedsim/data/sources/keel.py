"""Regression data in KEEL's format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedsim.config.registry import nearest
from fedsim.data.dataset import Dataset, TestFraction, of_parts
from fedsim.data.encoding import Preprocessing, Scale
from fedsim.data.source import OfficialFiles, Source, datasets
from fedsim.data.sources import files
from fedsim.errors import DataError


class Numbers(NamedTuple):
    """A table of numbers: inputs x (N, features), targets y (N,), and their names."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    features: tuple[str, ...]
    target: str


# A quoted name may contain anything; an unquoted one spaces, but no comma.
_KEEL_NAME = re.compile(r"""\s*('[^']*'|"[^"]*"|[^,]+)""")
_KEEL_ATTRIBUTE = re.compile(
    r"""(?P<name>'[^']*'|"[^"]*"|.+?)(\s+(real|integer)\s*(\[[^]]*\])?|\s*(?P<nominal>\{.*))""",
    re.IGNORECASE,
)
_KEEL_KEYWORDS = ("@relation", "@attribute", "@inputs", "@outputs", "@data")
_KEEL_MISSING = ("?", "<null>", "")


def read_keel(path: Path) -> Numbers:
    """A regression in KEEL's format: a header of attributes, and rows of numbers.

    All attributes are real or integer; ranges in the header are ignored. Without `@outputs` the
    last attribute is the target, without `@inputs` all others are inputs.
    """
    lines = [
        line.strip() for line in files.read_bytes(path).decode("utf-8-sig", "replace").splitlines()
    ]
    told = ((i, line) for i, line in enumerate(lines, 1) if line and not line.startswith("%"))
    attributes: list[str] = []
    listed: dict[str, tuple[int, list[str]]] = {}  # line and names of @inputs and @outputs
    for number, line in told:
        where = f"{path}:{number}"
        keyword, _, rest = line.replace("\t", " ").partition(" ")
        keyword = keyword.lower()
        if keyword in ("@input", "@output"):
            keyword += "s"
        if keyword not in _KEEL_KEYWORDS:
            hint = nearest(keyword, _KEEL_KEYWORDS)
            raise DataError(f"{where}: '{keyword}' above @data is not a keyword of KEEL{hint}")
        if keyword == "@attribute":
            attributes.append(_keel_attribute(where, rest.strip(), attributes))
        elif keyword in ("@inputs", "@outputs"):
            listed[keyword] = number, [_unquoted(name) for name in _KEEL_NAME.findall(rest)]
        elif keyword == "@data":
            break
    else:
        raise DataError(f"{path}:{max(len(lines), 1)}: the file ends without @data")
    if len(attributes) < 2:
        raise DataError(
            f"{where}: {len(attributes)} attributes above @data, expected an input and an output"
        )
    inputs, output = _keel_roles(path, attributes, listed)
    rows = [_keel_row(f"{path}:{i}", line, attributes) for i, line in told]
    if not rows:
        raise DataError(f"{where}: no rows after @data")
    values = np.array(rows)
    column = {name: values[:, i] for i, name in enumerate(attributes)}
    x = np.stack([column[name] for name in inputs], axis=1)
    return Numbers(x, column[output].copy(), tuple(inputs), output)


def _unquoted(name: str) -> str:
    name = name.strip()
    quoted = len(name) > 1 and name[0] == name[-1] and name[0] in "'\""
    return name[1:-1] if quoted else name


def _keel_attribute(where: str, text: str, known: Sequence[str]) -> str:
    """The name in a line `@attribute <name> real|integer [a, b]`."""
    match = _KEEL_ATTRIBUTE.fullmatch(text)
    if match is None:
        raise DataError(
            f"{where}: '@attribute {text}' is not a name and a type, real or integer, with or "
            f"without its range [a, b]"
        )
    name = _unquoted(match["name"])
    if match["nominal"]:
        raise DataError(
            f"{where}: attribute '{name}' is nominal; a regression takes real or integer ones"
        )
    if name in known:
        raise DataError(f"{where}: attribute '{name}' is declared twice")
    return name


def _keel_roles(
    path: Path, attributes: Sequence[str], listed: Mapping[str, tuple[int, list[str]]]
) -> tuple[list[str], str]:
    """The names of the inputs and of the output."""
    for keyword, (number, names) in listed.items():
        for i, name in enumerate(names):
            where = f"{path}:{number}: {keyword} names '{name}'"
            if name not in attributes:
                raise DataError(f"{where}, which is not an attribute{nearest(name, attributes)}")
            if name in names[:i]:
                raise DataError(f"{where} twice")
    number, outputs = listed.get("@outputs", (0, [attributes[-1]]))
    if len(outputs) != 1:
        raise DataError(f"{path}:{number}: @outputs names {len(outputs)} attributes, expected 1")
    (output,) = outputs
    others = [name for name in attributes if name != output]
    number, inputs = listed.get("@inputs", (0, others))
    if not inputs:
        raise DataError(f"{path}:{number}: @inputs names no attribute")
    if output in inputs:
        raise DataError(f"{path}:{number}: @inputs names '{output}', which is the output")
    return inputs, output


def _keel_row(where: str, line: str, attributes: Sequence[str]) -> list[float]:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(attributes):
        raise DataError(f"{where}: {len(cells)} values for {len(attributes)} attributes")
    for name, cell in zip(attributes, cells, strict=True):
        if cell.lower() in _KEEL_MISSING:
            raise DataError(f"{where}: no value of '{name}'")
        if not files.is_number(cell):
            raise DataError(f"{where}: '{name}' is '{cell}', expected a finite number")
    return [float(cell) for cell in cells]


@datasets.register
class Mortgage(OfficialFiles):
    """Mortgage: the weekly 30-year mortgage rate from 15 figures of the US economy (KEEL).

    1,049 rows. Each input and the target are always scaled to [0, 1] by the minimum and maximum of
    the training rows. In the file that KEEL published, the column names seem shifted relative to
    their values (its `1Y-CMaturityRate` lies between 77 and 143); they are kept as they are.

    Args:
        test_fraction: share of the rows in the test set.
    """

    niche: ClassVar[bool] = True
    name: str = "mortgage"
    test_fraction: TestFraction = 0.2

    def load(self) -> Dataset:
        """x is float64 (N, 15), y float64 (N,)."""
        path = files.find(["mortgage.dat"], self.name, self.root)
        return _load(path, self.test_fraction, "minmax")


@datasets.register
class Keel(Source):
    """Your own regression data in a file of KEEL's format, `.dat`.

    Args:
        path: the file. Attributes are real or integer; `@outputs` names the target (by default the
            last attribute), `@inputs` the inputs (by default all others).
        test_fraction: share of the rows in the test set.
        scale: `none`; or each input and the target scaled by the training rows, in the same way
            for all clients: `minmax` to [0, 1], outside of which test rows may fall, `standard` to
            mean 0 and standard deviation 1. Constant columns become 0.
    """

    niche: ClassVar[bool] = True
    name: str = "keel"
    path: Path
    test_fraction: TestFraction = 0.2
    scale: Scale = "none"

    def load(self) -> Dataset:
        """x is float64 (N, inputs), y float64 (N,)."""
        return _load(self.path, self.test_fraction, self.scale)


def _load(path: Path, test_fraction: float, scale: Scale) -> Dataset:
    x, y, features, target = read_keel(path)
    data = of_parts((x, y), None, (), test_fraction, str(path))
    preprocessing = Preprocessing(scale=scale) if scale != "none" else None
    return replace(data, features=features, target=target, preprocessing=preprocessing)
