"""Reads and writes whole tensors, whether plain or sharded over a mesh of ranks (DTensor)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """A plain copy of the whole tensor. For a sharded tensor, a collective over its mesh."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def write_whole(tensor: Tensor, value: Tensor) -> None:
    """Write a whole tensor, the same on all ranks, in place. A sharded tensor takes this rank's part; nothing is sent.

    Shape:
        tensor: any, also a DTensor. value: the shape of the whole tensor.
    """
    if not isinstance(tensor, DTensor):
        tensor.copy_(value)
        return
    value = value.to(tensor.device, tensor.dtype)
    # No rank sends anything: all have the whole.
    part = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.to_local().copy_(part.to_local())
