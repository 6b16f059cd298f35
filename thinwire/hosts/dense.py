"""What no host can send: a gradient that torch keeps as indices and values."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.errors import ConfigError

SPARSE = (
    "the gradient of {!r} is sparse, and gradients travel dense here: make its nn.Embedding or nn.EmbeddingBag with "
    "sparse=False"
)


def check_dense(name: str, grad: Tensor | None) -> None:
    """Raise ConfigError for a sparse gradient."""
    if grad is not None and grad.layout != torch.strided:
        raise ConfigError(SPARSE.format(name))
