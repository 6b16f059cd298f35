"""Weights that are still on their way are waited for by whoever touches them first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def guard(module: nn.Module, wait: Callable[[], None]) -> None:
    """Call `wait` before anything gets at the module's own parameters through the module.

    A forward hook alone would miss a parent that uses a child's weight without calling the child, and code that reads
    weights between steps. Therefore the module's class becomes a subclass, of the same name, in which attributes,
    `parameters()`, `state_dict()` and `load_state_dict()` wait too: the first looks parameters up by name, the others
    go through `_parameters`. Tensors that were taken out of the module before are beyond reach.
    """
    base = type(module)

    def __getattr__(self: nn.Module, name: str) -> Any:
        if name in self.__dict__.get("_parameters", ()):
            wait()
        return base.__getattr__(self, name)

    def get_parameters(self: nn.Module) -> dict[str, nn.Parameter | None]:
        wait()
        return self.__dict__["_parameters"]

    def set_parameters(self: nn.Module, parameters: dict[str, nn.Parameter | None]) -> None:
        self.__dict__["_parameters"] = parameters

    body = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__getattr__": __getattr__,
        "_parameters": property(get_parameters, set_parameters),
    }
    module.__class__ = type(base.__name__, (base,), body)
    # Recurrent layers keep a list of their weights and read that.
    module.register_forward_pre_hook(lambda *_: wait())
