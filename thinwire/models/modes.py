"""Whether each module of a model trains, which may differ from module to module: a frozen norm evaluates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Context in which a whole model evaluates. Afterwards each module has the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield model.eval()
    finally:
        for module, mode in modes.items():
            module.training = mode


def follow(copy: nn.Module, model: nn.Module) -> None:
    """Give each module of a copy the mode of the module of that name in a model, or else the model's own."""
    modes = {name: module.training for name, module in model.named_modules(remove_duplicate=False)}
    for name, module in copy.named_modules(remove_duplicate=False):
        module.training = modes.get(name, model.training)
