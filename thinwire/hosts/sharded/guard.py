"""Makes every access to a module's weights wait until they have arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Waiting(dict[str, nn.Parameter | None]):
    """A module's `_parameters`, which waits for the weights before any access.

    `nn.Module` reads its parameters from the dictionary `_parameters`: by name for an attribute, through its items for
    `parameters()`, `state_dict()`, `load_state_dict()` and `to()`. This class replaces that dictionary. A copy of the
    module, by copy or pickle, gets the weights after all have arrived, and a plain dictionary.
    """

    def __init__(self, parameters: dict[str, nn.Parameter | None], wait: Callable[[], None]) -> None:
        super().__init__(parameters)
        self.wait = wait

    def __getitem__(self, name: str) -> nn.Parameter | None:
        self.wait()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.wait()
        return super().get(name, default)

    def items(self) -> Any:
        self.wait()
        return super().items()

    def values(self) -> Any:
        self.wait()
        return super().values()

    def pop(self, name: str, *default: Any) -> Any:
        self.wait()
        return super().pop(name, *default)

    def copy(self) -> dict[str, nn.Parameter | None]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: object) -> tuple[type, tuple[dict[str, nn.Parameter | None]]]:
        return dict, (self.copy(),)


class Hook:
    """A hook of a module in this process only: in a copy of the module it does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *given: Any) -> None:
        self.call(*given)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _copy_of_hook, ()


def _do_nothing(*given: Any) -> None:
    """Stands in for a Hook in a copied module."""


def _copy_of_hook() -> Callable[..., None]:
    return _do_nothing


def guard(module: nn.Module, wait: Callable[[], None], *, forward: bool = True) -> None:
    """Call `wait` before any access to the module's own parameters through the module.

    A forward hook alone would miss a parent module that uses a child's weight without calling the child, and code that
    reads weights between steps. Recurrent layers read their weights from a list of their own, which the hook covers.
    Tensors that were taken out of the module earlier are not guarded. forward: False for a module whose forward waits
    for what it needs itself.
    """
    module._parameters = Waiting(module._parameters, wait)
    if forward:
        module.register_forward_pre_hook(Hook(lambda *_: wait()))
