"""Import torchvision beside any build of torch.

A registry build of torchvision is compiled for the registry's torch. Beside a CPU build of torch
its C++ operators are not loaded, and its Python half then fails while it registers shape functions
for them («operator torchvision::nms does not exist»). fedsim needs none of those operators, so
the registration is skipped when, and only when, the operators are not there.

Import torchvision (and zennit, which imports it) through this module, nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any


def import_torchvision(name: str = "torchvision") -> ModuleType:
    """`torchvision`, one of its modules, or a package that imports it (zennit)."""
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    return _import_without_operators(name)


def _import_without_operators(name: str) -> ModuleType:
    import torch

    def skip(*_args: Any, **_kwargs: Any) -> Callable[[Any], Any]:
        return lambda function: function

    original = torch.library.register_fake
    torch.library.register_fake = skip
    try:
        return importlib.import_module(name)
    finally:
        torch.library.register_fake = original
