"""Let torchvision be imported beside any build of torch.

A registry build of torchvision is compiled for the registry's torch. Beside a CPU build of torch
its C++ operators are not loaded, and `import torchvision` then fails while it registers shape
functions for them ("operator torchvision::nms does not exist"). Data sets, transforms and most
models need none of these operators, so that one module is left empty when, and only when, the
operators are missing. Calling an operator still fails, as torchvision itself words it.

This holds for every import of torchvision in a process that has imported fedsim: by users' own
modules and by other libraries (zennit) as well as by fedsim.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Empty(Loader):
    def exec_module(self, module: ModuleType) -> None:
        pass


class _Registrations(MetaPathFinder):
    """Finds an empty module in place of the registrations that would fail."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision._meta_registrations":
            return None
        # torchvision itself imports it first, to find out.
        if importlib.import_module("torchvision.extension")._has_ops():
            return None
        return ModuleSpec(fullname, _Empty())


def import_beside_any_torch() -> None:
    """Install the hook, once. It imports nothing itself."""
    if not any(isinstance(finder, _Registrations) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Registrations())
