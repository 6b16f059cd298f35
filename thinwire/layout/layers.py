"""Finds a model's layers and tables by structure, not by name."""

from __future__ import annotations

from torch import nn


def looked_up(model: nn.Module) -> set[str]:
    """The names of the weights that only embeddings use, which take single rows of them."""
    uses = [
        (f"{path}.{name}".removeprefix("."), param, module)
        for path, module in model.named_modules()
        for name, param in module.named_parameters(recurse=False)
    ]
    elsewhere = {id(param) for _, param, module in uses if not isinstance(module, nn.Embedding)}
    return {name for name, param, _ in uses if id(param) not in elsewhere}


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


def names_by_layer(model: nn.Module) -> list[set[str]]:
    """The names of the parameters in each layer."""
    layers = {id(layer) for layer in layers_of(model)}
    found = {id(module): (path, module) for path, module in model.named_modules() if id(module) in layers}
    return [{f"{path}.{name}" for name, _ in module.named_parameters()} for path, module in found.values()]
