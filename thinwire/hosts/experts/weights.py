"""Weights of experts that travel in place of rows: gathered for a forward; their gradients go back and are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives import Communicator
from thinwire.collectives.all_to_all import all_to_all_rows
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.methods.experts import Placement


class Gather(torch.autograd.Function):
    """The tensors of all experts of some ranks, [E, I, H] each, of this rank's parts of them.

    Their gradients are sums over these ranks of what each one has of this rank's parts, in rank order.
    """

    @staticmethod
    def forward(
        ctx: Any, comm: Communicator, members: Sequence[int], placement: Placement, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.how = comm, members, placement
        # One message carries them all.
        own = torch.stack([part.detach() for part in parts])
        found = _exchange(comm, members, own[None].expand(len(members), *own.shape), "expert_weights")
        return tuple(placement.joined(found[:, number]) for number in range(len(parts)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        comm, members, placement = ctx.how
        sends = torch.stack(
            [torch.stack([placement.part(grad, rank) for grad in grads]) for rank in range(len(members))]
        )
        found = _exchange(comm, members, sends, "expert_weight_gradients")
        return None, None, None, *found.sum(0).unbind()


def _exchange(comm: Communicator, members: Sequence[int], sends: Tensor, operation: str) -> Tensor:
    """Element i of `sends` to member i; what came from each, in the same shape."""
    rows = sends.reshape(-1, sends.shape[-1])
    counts = [len(rows) // len(members)] * len(members)

    def job(link: Link) -> Rounds[Tensor]:
        return all_to_all_rows(link.subgroup(members), rows, counts, counts, operation=operation)

    return comm.wait(comm.submit(job, urgent=True)).view(sends.shape)
