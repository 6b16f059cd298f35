"""Packages whose names are loaded when they are asked for, since some of their modules load torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """What a package needs as its `__getattr__`.

    names: of each module in the package, what the package offers.
    """
    module_of = {name: module for module, offered in names.items() for name in offered}

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return find
