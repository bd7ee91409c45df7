"""Federated methods, one module each, or a package if a method has several parts."""

from importlib import import_module
from pkgutil import iter_modules

from fedsim.methods.method import Method, State, methods

__all__ = ["Method", "State", "methods"]

for _module in iter_modules(__path__):  # they fill the registry
    import_module(f"{__name__}.{_module.name}")
