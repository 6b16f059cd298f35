"""Models whose weights never lie in memory all at once, not even at the start."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from thinwire.hosts.offload.room import give_pages_back

Model = TypeVar("Model", bound=nn.Module)


def hollow(model: Model) -> Model:
    """Replace the parameters of a model on the meta device by CPU parameters that have shapes but no memory.

    Same object.

    Make the optimizer next, then call `thinwire.zero` with `initial`, which fills one parameter after another.
    """
    give_pages_back()
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta:
                if param not in made:
                    values = torch.empty(param.shape, dtype=param.dtype)
                    values.untyped_storage().resize_(0)
                    made[param] = nn.Parameter(values, requires_grad=param.requires_grad)
                module._parameters[name] = made[param]
    return model
