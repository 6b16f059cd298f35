"""This rank's pieces of the masters, which the user's optimizer steps in the place of the parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.hosts.sharded.bucket import FlatBucket, Slot
from thinwire.state.elementwise import is_elementwise
from thinwire.state.portable import Held


@dataclass(frozen=True, eq=False)
class Owned:
    """A piece of the fp32 masters: `slot.owned` of a rank's shard, flat."""

    slot: Slot
    master: Tensor

    @property
    def grad(self) -> Tensor:
        """Its mean gradient."""
        return self.slot.bucket.shard_grad[self.slot.owned]

    @property
    def held(self) -> Held:
        """It as a part of the parameter."""
        return Held(self.master, self.slot.span.numel, self.slot.offset)


def take_over(inner: torch.optim.Optimizer, buckets: Sequence[FlatBucket]) -> list[Owned]:
    """Put this rank's pieces of the masters in the place of the parameters, group by group."""
    slots = {id(slot.param): slot for bucket in buckets for slot in bucket.slots}
    found: list[Owned] = []
    for group in inner.param_groups:
        own = [slots[id(param)] for param in group["params"] if id(param) in slots]
        group["params"] = []
        for slot in own:
            held = inner.state.pop(slot.param, None)
            piece = slot.bucket.master[slot.owned]
            if piece.numel():
                found.append(Owned(slot, piece))
                group["params"].append(piece)
                if held:
                    offset = found[-1].held.offset
                    inner.state[piece] = _piece_of_state(held, slot.param, slice(offset, offset + piece.numel()))
    return found


def _piece_of_state(held: dict[str, Any], param: Tensor, piece: slice) -> dict[str, Any]:
    """What the optimizer remembers of a parameter, for a piece of its flat elements."""
    return {
        key: value.flatten()[piece].float().clone() if is_elementwise(value, param) else copy.deepcopy(value)
        for key, value in held.items()
    }
