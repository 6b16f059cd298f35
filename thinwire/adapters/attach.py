"""Compresses the communication of a model that Accelerate or the user has already wrapped."""

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
    """Give a wrapped model's communication to `method`. A collective over its ranks. Return the handle.

    The wrappers and the training loop stay.

    Args:
        model, optimizer: the results of `accelerator.prepare`, or a model given by hand to `fully_shard` or to
            DistributedDataParallel.
        method, options: as for `compress_fsdp` if the model has FSDP2 modules, such as `ZeroPP()`; else as for
            `compress_ddp`.

    Raises ConfigError if there is nothing to compress: for FSDP1 and for a model that is not wrapped.
    """
    # torch.compile's wrapper holds the sharded module.
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
        "torch.distributed.fsdp.fully_shard first; in a Trainer, load the model with "
        "from_pretrained(..., distributed_config=DistributedConfig(fsdp_size=RANKS)), or on GPUs set "
        "TrainingArguments(fsdp=True)"
    )
