"""Memory of a process."""

import ctypes
from contextlib import suppress


def give_back_memory() -> None:
    """Return memory that was freed to the system, which others of the node may need."""
    with suppress(OSError, AttributeError):  # other C libraries have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
