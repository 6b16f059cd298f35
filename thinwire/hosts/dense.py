"""What no host can send: a gradient that torch keeps as indices and values."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.errors import ConfigError


def check_dense(name: str, grad: Tensor | None) -> None:
    """Raise ConfigError for a sparse gradient."""
    if grad is not None and grad.layout != torch.strided:
        raise ConfigError(
            f"the gradient of {name!r} is sparse, and gradients travel dense here: make its nn.Embedding with "
            "sparse=False"
        )
