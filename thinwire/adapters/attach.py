"""Compress what a model exchanges that Accelerate, or anyone, has wrapped already."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from thinwire.data_parallel import CompressedFSDP, compress_fsdp
from thinwire.errors import ConfigError


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, method: Any, **options: Any) -> CompressedFSDP:
    """Give a wrapped model's communication to `method`, a collective over its ranks; returns the handle.

    model, optimizer: what `accelerator.prepare` returned, or a model given to `fully_shard` by hand. method: as for
    `compress_fsdp`, where FSDP2 modules are found. options: as there. The wrappers and the training loop stay.

    Raises ConfigError where nothing that can be compressed is found: FSDP1, a model that is not wrapped.
    """
    # torch.compile's wrapper holds the module that it calls, which is the one that was sharded.
    module = getattr(model, "_orig_mod", model)
    held = getattr(optimizer, "optimizer", None)
    stepped = held if isinstance(held, torch.optim.Optimizer) else optimizer
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        return compress_fsdp(module, method, optimizer=stepped, **options)
    if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        raise ConfigError(
            "the model is in FullyShardedDataParallel, the first FSDP, which has no place for other collectives: use "
            "FSDP2, in Accelerate FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    if isinstance(module, DistributedDataParallel):
        raise ConfigError(
            "the model is in DistributedDataParallel: shard it with FSDP2, in Accelerate "
            "FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    raise ConfigError(
        f"nothing of this {type(module).__name__} is sharded: call accelerator.prepare(model, optimizer) or "
        "torch.distributed.fsdp.fully_shard first"
    )
