"""Sums and copies over ranks that each hold some rows of a vocabulary, with the gradients that belong to them.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3, operators f and g.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinwire.losses.blocks import wide


class SumOfRanks(torch.autograd.Function):
    """x summed over the ranks of a group. What follows is the same on all ranks, so x gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class SameOnRanks(torch.autograd.Function):
    """x, which is the same on all ranks of a group and which each uses otherwise: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = grads[0].to(wide(grads[0].dtype), copy=True)
        dist.all_reduce(total, group=ctx.group)
        return total.to(grads[0].dtype), None


class ColumnsOfRanks(torch.autograd.Function):
    """[..., n] of each rank, one beside the other in the order of the ranks. Each gets the gradient of its columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own = grads[0].chunk(dist.get_world_size(ctx.group), -1)[dist.get_rank(ctx.group)]
        return own.contiguous(), None
