"""Models whose weights never lie in memory all at once, not even at the start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Model = TypeVar("Model", bound=nn.Module)
# A prime: rows of two matrices, or two rows of one, hold no equal values in the same places. And elements by which
# parameters lie apart, aligned for every kernel.
PERIOD, APART = 65_537, 64


def hollow(model: Model, device: torch.device | str = "cpu") -> Model:
    """Replace the parameters of a model on the meta device by parameters on `device` with shapes but no memory.

    Same object.

    Make the optimizer next, then call `thinwire.zero`, `thinwire.pipeline` or `thinwire.parallelize` with `initial`,
    which fills one parameter after another.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta:
                if param not in made:
                    values = torch.empty(param.shape, dtype=param.dtype, device=device)
                    values.untyped_storage().resize_(0)
                    made[param] = nn.Parameter(values, requires_grad=param.requires_grad)
                module._parameters[name] = made[param]
    return model


def is_hollow(param: Tensor) -> bool:
    """Whether a parameter has a shape, but no memory."""
    if param.is_meta or isinstance(param, DTensor):
        return False
    return bool(param.numel()) and not param.untyped_storage().nbytes()


@contextmanager
def any_values(model: nn.Module) -> Iterator[None]:
    """A context in which the hollow parameters of a model have some values, so that it can be tried on a few tokens.

    All are views of one memory, little larger than that of the largest.
    """
    shapes = {param: param.data for param in model.parameters() if is_hollow(param)}
    pools: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    for number, param in enumerate(shapes):
        kind = param.dtype, param.device
        if kind not in pools:
            largest = max(other.numel() for other in shapes if (other.dtype, other.device) == kind)
            numel = largest + APART * len(shapes)
            values = torch.randn(PERIOD, generator=torch.Generator().manual_seed(0)) * 0.02
            pools[kind] = values.to(param.dtype).repeat(-(-numel // PERIOD)).to(param.device)
        param.data = pools[kind][APART * number :][: param.numel()].view(param.shape)
    try:
        yield
    finally:
        for param, empty in shapes.items():
            param.data = empty
