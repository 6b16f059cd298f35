"""Whole tensors to and from where they lie: plain ones, and those that a mesh of ranks shards (DTensor)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor, plain; a collective over the mesh of one that is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def local_tensor(tensor: Tensor) -> Tensor:
    """What of it lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def write_whole(tensor: Tensor, value: Tensor) -> None:
    """Write `value`, whole and the same on all ranks, in place; where the tensor is sharded, this rank's part of it."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(value)
        return
    value = value.to(tensor.device, tensor.dtype)
    # No rank sends anything: all have the whole.
    part = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.to_local().copy_(part.to_local())
