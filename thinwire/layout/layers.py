"""Finds a model's layers by structure, not by class name."""

from __future__ import annotations

from torch import nn


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Children of the outermost ModuleLists that have parameters to train, in order of registration."""
    layers: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
            if not (isinstance(module, nn.ModuleList) and is_called):
                visit(child)
            elif any(param.requires_grad for param in child.parameters()):
                layers.append(child)

    visit(model)
    return list(dict.fromkeys(layers))
