"""Compress what a model exchanges that Accelerate, or anyone, has wrapped already."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import ConfigError
from thinwire.hosts.ddp.attach import CompressedDDP, compress_ddp
from thinwire.hosts.fsdp.compress import CompressedFSDP, compress_fsdp


def attach(
    model: nn.Module, optimizer: torch.optim.Optimizer, method: Any, **options: Any
) -> CompressedFSDP | CompressedDDP:
    """Give a wrapped model's communication to `method`, a collective over its ranks; returns the handle.

    The wrappers and the training loop stay.

    Args:
        model, optimizer: what `accelerator.prepare` returned, or a model given by hand to `fully_shard` or to
            DistributedDataParallel.
        method, options: as for `compress_fsdp` where FSDP2 modules are found, such as `ZeroPP()`; else as for
            `compress_ddp`.

    Raises ConfigError where nothing that can be compressed is found: FSDP1, a model that is not wrapped.
    """
    # torch.compile's wrapper holds the module that it calls, which is the one that was sharded.
    module = getattr(model, "_orig_mod", model)
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        return compress_fsdp(module, method, optimizer, **options)
    if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        raise ConfigError(
            "the model is in FullyShardedDataParallel, the first FSDP, which has no place for other collectives: use "
            "FSDP2, in Accelerate FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    if isinstance(module, DistributedDataParallel):
        return compress_ddp(module, method, optimizer=optimizer, **options)
    raise ConfigError(
        f"nothing of this {type(module).__name__} is sharded: call accelerator.prepare(model, optimizer) or "
        "torch.distributed.fsdp.fully_shard first"
    )
