"""The server's arguments as Ray objects; an argument that is sent again is not stored again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from fedsim.federation.wire import NotCounted


class ObjectCache:
    """Ray objects of the arguments of calls."""

    def __init__(self) -> None:
        self._sent: list[tuple[NDArray[np.generic], type, Any]] = []

    def put(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Objects of the arguments; arrays of the previous call (the weights) are reused."""
        known, self._sent = self._sent, []
        objects = []
        for value in arguments.values():
            array = value.value if isinstance(value, NotCounted) else value
            same = (ref for sent, kind, ref in known if sent is array and isinstance(value, kind))
            ref = next(same, None) or ray.put(value)
            # A frozen array has not changed, unless it is a view of a writable one.
            if isinstance(array, np.ndarray) and array.base is None:
                self._sent.append((array, type(value), ref))
            objects.append(ref)
        return objects
