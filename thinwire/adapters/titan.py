"""torchtitan: wraps a model's parallelize function, to compress the collectives of the sharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from thinwire.hosts.fsdp.compress import CompressedFSDP, compress_fsdp


class CompressedParallelize:
    """`parallelize_fn=CompressedParallelize(parallelize_llama, METHOD)` in the model's spec.

    It calls the function as torchtitan does, whatever its arguments, then `compress_fsdp(model, method, **options)`.
    torchtitan shards a model on the meta device and gives it memory later. Such a model is compressed in its first
    forward, when it has its weights. `handles`: one handle for each model.
    """

    def __init__(self, parallelize: Callable[..., nn.Module], method: Any, **options: Any) -> None:
        self.parallelize = parallelize
        self.method = method
        self.options = options
        self.handles: list[CompressedFSDP] = []

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the parallelized model. Raises ConfigError, now or in the first forward, as `compress_fsdp` does."""
        sharded = self.parallelize(model, *args, **kwargs)
        self.handles.append(compress_fsdp(sharded, self.method, **self.options))
        return sharded
