"""Sends experts' weights instead of rows: gathered for a forward; their gradients go back and are summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.codecs import Codec, derive_seed
from thinwire.collectives.all_to_all import all_to_all_rows
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.hosts.experts.trip import ExpertWire
from thinwire.methods.experts import ExpertPlacement
from thinwire.methods.experts.choice import MOVED, MOVED_GRADIENTS
from thinwire.models.experts import Experts
from thinwire.models.fused import FusedExperts
from thinwire.models.seam import module_of


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


class KeptBits:
    """Which weights of one layer's experts are kept, a bit for each: the zeros of pruned ones need not travel.

    experts: all of them, whole.
    """

    @torch.no_grad()
    def __init__(self, experts: Experts | FusedExperts) -> None:
        kept = list(module_of(experts).parameters())
        values = [param.data for param in kept]
        for param in kept:
            param.data = torch.ones_like(param)
        masks = torch.stack([weight != 0 for weight in experts.weights])
        for param, value in zip(kept, values, strict=True):
            param.data = value
        self._shape, self._bits = masks.shape, np.packbits(masks.cpu().numpy())

    def of(self, placement: ExpertPlacement, device: torch.device) -> list[Tensor]:
        """The mask of each rank's part, bool [tensors, experts, I, H]."""
        bits = np.unpackbits(self._bits, count=self._shape.numel())
        masks = torch.from_numpy(bits).bool().view(self._shape).to(device)
        parts = range(placement.ranks)
        return [torch.stack([placement.part(mask, rank) for mask in masks]) for rank in parts]


class Gather(torch.autograd.Function):
    """The tensors of all experts of some ranks, [E, I, H] each, gathered from each rank's part with `wire.weights`.

    kept: what is gathered once a step, and whose gradients return once; None: in each forward and backward. bits: of
    pruned experts, what is kept of them, which alone travels; None: all.

    A rank's own part is rounded too, so that outputs are the same wherever experts lie. The gradient of a rank's part
    is the sum, in rank order, of the gradients on all these ranks; other ranks send theirs with `wire.gradients`.
    """

    @staticmethod
    def forward(
        ctx: Any, wire: ExpertWire, members: Sequence[int], placement: ExpertPlacement, kept: Gathered | None,
        bits: KeptBits | None, *parts: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.how = wire, members, placement, kept, bits
        if kept is not None and (held := kept.held()):
            return held
        # One message carries them all.
        own = torch.stack([part.detach() for part in parts])
        sends = own[None].expand(len(members), *own.shape)
        masks = None if bits is None else bits.of(placement, own.device)
        here = None if masks is None else [masks[wire.comm.rank]] * len(masks)
        found = _exchange(wire, members, sends, here, masks, wire.weights, 0, MOVED, rounds_own=True)
        whole = tuple(placement.joined(found[:, number]) for number in range(len(parts)))
        if kept is None:
            return whole
        kept.whole = whole
        return kept.held()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wire, members, placement, kept, bits = ctx.how
        if kept is not None and not (grads := tuple(kept.add(grads))):
            return None, None, None, None, None, *(each.new_zeros(placement.part(each, 0).shape) for each in kept.grads)
        sends = torch.stack(
            [torch.stack([placement.part(grad, rank) for grad in grads]) for rank in range(len(members))]
        )
        # What two ranks draw for the same weights must not be the same.
        seed = 0 if wire.gradients is None else derive_seed(wire.draw(), wire.own_number)
        masks = None if bits is None else bits.of(placement, sends.device)
        here = None if masks is None else [masks[wire.comm.rank]] * len(masks)
        found = _exchange(wire, members, sends, masks, here, wire.gradients, seed, MOVED_GRADIENTS)
        # Views of one tensor would count their writes together, and one that is sent would seem changed by the next.
        return None, None, None, None, None, *(found[:, number].sum(0) for number in range(found.shape[1]))


def _exchange(
    wire: ExpertWire, members: Sequence[int], sends: Tensor, leave: Sequence[Tensor] | None,
    come: Sequence[Tensor] | None, codec: Codec | None, seed: int, operation: str, *, rounds_own: bool = False,
) -> Tensor:  # fmt: skip
    """Send element i of `sends` to member i. Return what each member sent, in the same shape.

    leave, come: for each member, which numbers are sent to it, and which come from it, as many; others are 0. They
    travel as rows, the last one filled up with zeros. None: all.
    """
    width = sends.shape[-1]
    if leave is None:
        rows = sends.reshape(-1, width)
    else:
        some = [own[mask] for own, mask in zip(sends, leave, strict=True)]
        rows = torch.cat([F.pad(each, (0, -len(each) % width)).view(-1, width) for each in some])
    counts = [len(rows) // len(members)] * len(members)

    def job(link: Link) -> Rounds[Tensor]:
        return all_to_all_rows(
            link.subgroup(members), rows, counts, counts, codec, seed=seed, rounds_own=rounds_own, operation=operation
        )

    found = wire.comm.wait(wire.comm.submit(job, urgent=True))
    if come is None:
        return found.view(sends.shape)
    whole = torch.zeros_like(sends)
    for own, mask, came in zip(whole, come, found.view(len(members), -1), strict=True):
        own[mask] = came[: int(mask.sum())]
    return whole
