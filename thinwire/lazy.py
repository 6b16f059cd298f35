"""Packages that load a module when one of its names is first used, because some of their modules load torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A package's `__getattr__`, which loads each name from its module on first use.

    names: for each module of the package, the names that the package exports from it.
    """
    module_of = {name: module for module, offered in names.items() for name in offered}

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return find
