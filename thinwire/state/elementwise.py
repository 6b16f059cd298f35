"""Tests whether an optimizer is elementwise.

Sharding cuts tensors anywhere, so an update must not depend on neighbours.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.optim import SummingOptimizer


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError unless two steps on halves of a tensor equal two steps on the whole, for every parameter group.

    The halves get gradients of very different size, so any norm, factorisation or matrix operation shows. A
    SummingOptimizer such as thinwire.Muon passes, because hosts add up the sums over its pieces.
    """
    if isinstance(optimizer, SummingOptimizer):
        return
    name = type(optimizer).__name__
    # Flat pieces of a parameter, on which it is tried below, are no matrices.
    if needs_whole_tensors(optimizer):
        nearest = "thinwire.Muon, " if isinstance(optimizer, torch.optim.Muon) else ""
        raise ConfigError(
            f"{name} can't be sharded: its update of one element depends on others of the same tensor; take {nearest}a "
            "method with whole weights on every rank, such as DDP, or an elementwise optimizer such as AdamW or SGD"
        )
    for group in optimizer.param_groups:
        try:
            whole = _stepped(optimizer, group, [slice(0, 8)])
            halves = _stepped(optimizer, group, [slice(0, 4), slice(4, 8)])
        except Exception as error:  # an optimizer may fail in its own way on flat tensors
            raise ConfigError(
                f"{name} can't be sharded: it fails on flat pieces of a parameter ({type(error).__name__}: {error}); "
                "use an elementwise optimizer such as AdamW or SGD"
            ) from None
        if not torch.allclose(whole, halves, rtol=1e-6, atol=1e-12):
            raise ConfigError(
                f"{name} can't be sharded: its update of one element depends on others of the same tensor; "
                "use an elementwise optimizer such as AdamW or SGD"
            )


def needs_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer declares that its update of an element depends on other elements."""
    return getattr(optimizer, "needs_whole_tensors", False) or isinstance(optimizer, torch.optim.Muon)


def state_kinds(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> list[dict[str, Any]]:
    """For each parameter, the state that `optimizer` holds after a step: by kind, an example of a few elements."""
    if isinstance(optimizer, SummingOptimizer):
        return [optimizer.kinds(param) for param in params]
    groups = optimizer.param_groups
    number_of = {id(param): number for number, group in enumerate(groups) for param in group["params"]}
    found: dict[tuple[int, bool], dict[str, Any]] = {}
    keys: list[tuple[int, bool]] = []
    for param in params:
        key = number_of.get(id(param), 0), needs_whole_tensors(optimizer) and param.dim() in (2, 3)
        if key not in found:
            twin, pieces = _stepped_twin(
                optimizer, groups[key[0]], [slice(0, 8)], torch.Size([2, 4]) if key[1] else None, param
            )
            found[key] = dict(twin.state[pieces[0]])
        keys.append(key)
    return [found[key] for key in keys]


def _stepped(optimizer: torch.optim.Optimizer, group: dict, pieces: list[slice]) -> Tensor:
    """The values after two steps of a copy of `optimizer`."""
    _, params = _stepped_twin(optimizer, group, pieces)
    return torch.cat([param.detach() for param in params])


def _stepped_twin(
    optimizer: torch.optim.Optimizer,
    group: dict,
    pieces: list[slice],
    shape: torch.Size | None = None,
    like: Tensor | None = None,
) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """A copy of `optimizer` that shares nothing with it, on its device, after two steps; and the copy's parameters.

    shape: of the copy's only parameter; None: flat. like: the parameter whose state the copy starts with, if it has
    any and has dimensions; else the first of the group that has some.
    """
    device = group["params"][0].device if group["params"] else None
    values = torch.linspace(-1.0, 1.0, 8, device=device)
    gradients = torch.tensor([1e-3, -2e-3, 3e-3, 1e-3, 2.0, -1.0, 4.0, 3.0], device=device)
    if shape is not None:
        values, gradients = values.view(shape), gradients.view(shape)
    params = [values[piece].clone() for piece in pieces]
    twin = object.__new__(type(optimizer))
    # An instance attribute `step` is a scheduler's wrapper around the original.
    twin.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    twin.state = defaultdict(dict)
    candidates = [] if like is None else [like]
    candidates += [*group["params"], *(param for other in optimizer.param_groups for param in other["params"])]
    # In the state of a parameter without dimensions a value of its element looks like one of the whole, such as a step.
    first = next((param for param in candidates if param.dim()), None)
    if first is not None and (held := optimizer.state.get(first)):
        # Some optimizers fill their state when they are made, and expect to find it.
        twin.state.update({param: _state_like(held, first, param) for param in params})
    # A schedule may start at a rate of zero, at which every update looks elementwise.
    twin.param_groups = [{**group, "params": params, "lr": 0.1}]
    for scale in (1.0, 0.5):
        for param, piece in zip(params, pieces, strict=True):
            param.grad = gradients[piece] * scale
        twin.step()
    return twin, params


def _state_like(held: dict[str, Any], param: Tensor, values: Tensor) -> dict[str, Any]:
    """The state of `param`, resized for `values`: every element gets the first element's value."""
    return {
        key: torch.full_like(values, float(value.flatten()[0]))
        if is_elementwise(value, param)
        else copy.deepcopy(value)
        for key, value in held.items()
    }


def is_elementwise(value: object, param: Tensor) -> bool:
    """Whether a value in an optimizer's state has one entry for each element of the parameter."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == param.shape and value.numel() > 0


def elementwise_kinds(optimizer: torch.optim.Optimizer) -> set[str]:
    """Kinds of state that the optimizer holds for each element, by what it holds of parameters with dimensions."""
    return {
        key for param, held in optimizer.state.items() for key, value in held.items() if is_elementwise(value, param)
    }
