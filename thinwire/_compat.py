"""What differs between torch versions, and every private name of torch that thinwire uses, in one place.

- all_gather_single: public from 2.13; before, all_gather_into_tensor (deprecated in 2.13).
- reduce_scatter_single: public from 2.13; before, reduce_scatter_tensor (deprecated in 2.13).
- after_backward: torch.autograd.Variable._execution_engine.queue_callback, private; 2.11 to 2.13 have it.
- default_store: torch.distributed.distributed_c10d._get_default_store, private; 2.11 to 2.13 have it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


def all_gather_single(
    output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Gather `input` of every rank into `output`, whose first dimension is world_size times as long."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, input, group=group, async_op=async_op)


def reduce_scatter_single(
    output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Sum `input` over the ranks and keep this rank's slice of it in `output`."""
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return reduce_scatter(output, input, op=dist.ReduceOp.SUM, group=group, async_op=async_op)


def default_store() -> dist.Store:
    """The key-value store in which the ranks of the default group met; raises ValueError before that."""
    return distributed_c10d._get_default_store()


def after_backward(function: Callable[[], None]) -> None:
    """Call `function` where the backward pass that is under way ends, before it returns; what it raises comes out."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
