"""This rank's pieces of the masters. The user's optimizer steps them in place of the parameters."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.checkpoint import Snapshot, Source
from thinwire.hosts.sharded.bucket import FlatBucket, LiveUnit, Slot
from thinwire.state.elementwise import elementwise_kinds, is_elementwise
from thinwire.state.portable import Held, add_optimizer, restore_optimizer


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
        """This piece as a part of the parameter."""
        return Held(self.master, self.slot.span.numel, self.slot.offset)


class States(Protocol):
    """This rank's masters and optimizer state, wherever they lie."""

    def step(self, used: Collection[str]) -> Iterator[LiveUnit]:
        """Update the masters of the parameters `used`. Yield each unit, in order, when its masters are updated."""
        ...

    def add_to(self, snapshot: Snapshot) -> Snapshot:
        """Add everything to the snapshot, in pieces by parameter."""
        ...

    def restore(self, source: Source) -> None:
        """Load everything from a checkpoint of any layout."""
        ...


class StatesInMemory:
    """Masters and optimizer state in memory. owned: the pieces of the masters, as views into the buckets' masters."""

    def __init__(self, inner: torch.optim.Optimizer, units: Sequence[LiveUnit]) -> None:
        self.inner, self.units = inner, units
        self.owned = take_over(inner, [bucket for unit in units for bucket in unit.buckets])

    def step(self, used: Collection[str]) -> Iterator[LiveUnit]:
        for owned in self.owned:
            # A parameter that no rank used is left alone, as by the plain optimizer.
            owned.master.grad = owned.grad if owned.slot.name in used else None
        self.inner.step()
        for owned in self.owned:
            owned.master.grad = None
        yield from self.units

    def step_bucket(self, bucket: FlatBucket, used: Collection[str]) -> None:
        """See BucketStates."""
        own = [owned for owned in self.owned if owned.slot.bucket is bucket]
        for owned in own:
            owned.master.grad = owned.grad if owned.slot.name in used else None
        self.inner.step()
        for owned in own:
            owned.master.grad = None

    def ready(self) -> Iterator[LiveUnit]:
        """See BucketStates."""
        yield from self.units

    def add_to(self, snapshot: Snapshot) -> Snapshot:
        return add_optimizer(snapshot, self.inner, self._held())

    def restore(self, source: Source) -> None:
        restore_optimizer(source, self.inner, self._held())

    def _held(self) -> dict[str, Held]:
        return {owned.slot.name: owned.held for owned in self.owned}


def take_over(inner: torch.optim.Optimizer, buckets: Sequence[FlatBucket]) -> list[Owned]:
    """Replace the optimizer's parameters by this rank's pieces of the masters, group by group."""
    found: list[Owned] = []
    kinds = elementwise_kinds(inner)
    for group, slots in zip(inner.param_groups, slots_of(inner, buckets), strict=True):
        group["params"] = []
        for slot in slots:
            held = inner.state.pop(slot.param, None)
            piece = slot.bucket.master[slot.owned]
            if piece.numel():
                found.append(Owned(slot, piece))
                group["params"].append(piece)
                if held:
                    inner.state[piece] = state_of_piece(held, slot, kinds)
    return found


def slots_of(inner: torch.optim.Optimizer, buckets: Sequence[FlatBucket]) -> list[list[Slot]]:
    """The trained parameters of each of the optimizer's groups."""
    slots = {id(slot.param): slot for bucket in buckets for slot in bucket.slots}
    return [[slots[id(p)] for p in group["params"] if id(p) in slots] for group in inner.param_groups]


def state_of_piece(held: dict[str, Any], slot: Slot, kinds: Collection[str]) -> dict[str, Any]:
    """The optimizer's state of a parameter, cut to the flat elements for which this rank has the masters.

    kinds: see `elementwise_kinds`; a parameter without dimensions does not tell them from others.
    """
    piece = slice(slot.offset, slot.offset + slot.owned.stop - slot.owned.start)
    return {
        key: value.flatten()[piece].float().clone()
        if (is_elementwise(value, slot.param) if slot.param.dim() else key in kinds)
        else copy.deepcopy(value)
        for key, value in held.items()
    }
