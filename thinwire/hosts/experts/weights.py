"""Sends experts' weights instead of rows: gathered for a forward; their gradients go back and are summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec, derive_seed
from thinwire.collectives.all_to_all import all_to_all_rows
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.hosts.experts.trip import ExpertWire
from thinwire.methods.experts import ExpertPlacement
from thinwire.methods.experts.choice import MOVED, MOVED_GRADIENTS


@dataclass
class Gathered:
    """One layer's gathered tensors, and the sum of their gradients, from a step's first micro-batch to its last.

    Attributes:
        step: number of the step; those of an earlier one are nothing.
        accumulates: whether a backward is of a micro-batch that others follow.
    """

    step: Callable[[], int]
    accumulates: Callable[[], bool]
    whole: tuple[Tensor, ...] = ()
    grads: list[Tensor] = field(default_factory=list)
    _of: int = -1

    def held(self) -> tuple[Tensor, ...]:
        """What this step has gathered; empty: nothing yet."""
        if self._of != self.step():
            self._of, self.whole, self.grads = self.step(), (), []
        return tuple(tensor.detach() for tensor in self.whole)

    def add(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Add a micro-batch's gradients. Returns the sums of all of them, of the last one; else nothing."""
        self.grads = [a + b for a, b in zip(self.grads, grads, strict=True)] if self.grads else list(grads)
        if self.accumulates():
            return []
        found, self.whole, self.grads = self.grads, (), []
        return found


class Gather(torch.autograd.Function):
    """The tensors of all experts of some ranks, [E, I, H] each, gathered from each rank's part with `wire.weights`.

    kept: what is gathered once a step, and whose gradients return once; None: in each forward and backward.

    A rank's own part is rounded too, so that outputs are the same wherever experts lie. The gradient of a rank's part
    is the sum, in rank order, of the gradients on all these ranks; other ranks send theirs with `wire.gradients`.
    """

    @staticmethod
    def forward(
        ctx: Any, wire: ExpertWire, members: Sequence[int], placement: ExpertPlacement, kept: Gathered | None,
        *parts: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.how = wire, members, placement, kept
        if kept is not None and (held := kept.held()):
            return held
        # One message carries them all.
        own = torch.stack([part.detach() for part in parts])
        sends = own[None].expand(len(members), *own.shape)
        found = _exchange(wire, members, sends, wire.weights, 0, MOVED, rounds_own=True)
        whole = tuple(placement.joined(found[:, number]) for number in range(len(parts)))
        if kept is None:
            return whole
        kept.whole = whole
        return kept.held()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wire, members, placement, kept = ctx.how
        if kept is not None and not (grads := tuple(kept.add(grads))):
            return None, None, None, None, *(each.new_zeros(placement.part(each, 0).shape) for each in kept.grads)
        sends = torch.stack(
            [torch.stack([placement.part(grad, rank) for grad in grads]) for rank in range(len(members))]
        )
        # What two ranks draw for the same weights must not be the same.
        seed = 0 if wire.gradients is None else derive_seed(wire.draw(), wire.own_number)
        found = _exchange(wire, members, sends, wire.gradients, seed, MOVED_GRADIENTS)
        # Views of one tensor would count their writes together, and one that is sent would seem changed by the next.
        return None, None, None, None, *(found[:, number].sum(0) for number in range(found.shape[1]))


def _exchange(
    wire: ExpertWire, members: Sequence[int], sends: Tensor, codec: Codec | None, seed: int, operation: str, *,
    rounds_own: bool = False,
) -> Tensor:  # fmt: skip
    """Send element i of `sends` to member i. Return what each member sent, in the same shape."""
    rows = sends.reshape(-1, sends.shape[-1])
    counts = [len(rows) // len(members)] * len(members)

    def job(link: Link) -> Rounds[Tensor]:
        return all_to_all_rows(
            link.subgroup(members), rows, counts, counts, codec, seed=seed, rounds_own=rounds_own, operation=operation
        )

    return wire.comm.wait(wire.comm.submit(job, urgent=True)).view(sends.shape)
