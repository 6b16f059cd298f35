"""Masters and optimizer state on a disk. They pass through memory in sub-groups, in order of forward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint import WEIGHTS, Piece, Snapshot, Source
from thinwire.hosts.offload.gradients import GradientsOnDisk
from thinwire.hosts.offload.journal import SHELF, Journal
from thinwire.hosts.sharded.bucket import FlatBucket, LiveUnit, Slot
from thinwire.hosts.sharded.owned import slots_of, state_of_piece
from thinwire.hosts.sharded.weights import Weights
from thinwire.methods.memory import Residency
from thinwire.state.elementwise import elementwise_kinds, is_elementwise, state_kinds
from thinwire.state.portable import OPTIMIZER, Held, add_betas, report_optimizer, rescale, state_for
from thinwire.tiers import Pace, Shelf, TierMeter

MASTER = "master"
# Name of the optimizer's numbers by parameter, in a rank's own state.
NUMBERS = "numbers"


@dataclass(eq=False)
class StatePart:
    """The part of a parameter in one sub-group: elements [start, end) of this rank's flat masters.

    Attributes:
        group: the optimizer's group.
        bucket_start: first element of its bucket in these masters.
        is_known: whether the optimizer has state for it.
        numbers: optimizer state that is not a tensor with one entry for each element.
    """

    slot: Slot
    group: int
    start: int
    end: int
    bucket_start: int
    is_known: bool = False
    numbers: dict[str, Any] = field(default_factory=dict)

    def of(self, flat: Tensor, start: int) -> Tensor:
        """Its elements in a tensor whose first element is element `start` of the flat masters."""
        return flat[self.start - start : self.end - start]

    @property
    def grad(self) -> Tensor:
        """Its mean gradient."""
        return self.slot.bucket.shard_grad[self.start - self.bucket_start : self.end - self.bucket_start]

    def held(self, values: Tensor) -> Held:
        """`values`, shaped like this part, as a part of the parameter."""
        offset = self.slot.offset + self.start - self.bucket_start - self.slot.owned.start
        return Held(values, self.slot.span.numel, offset)


class StatesOnDisk:
    """This rank's masters, bucket after bucket, and the optimizer's state for each of their elements, on a disk.

    The user's optimizer steps one sub-group after another. Only three sub-groups are in memory, plus those that stay
    there. Updated masters lie in the `shard_grad` of their bucket until all ranks have them.

    Attributes:
        gradients: brings mean gradients from the disk; None: they are in memory.

    Raises ConfigError if the disk has not enough space.
    """

    def __init__(
        self, residency: Residency, inner: torch.optim.Optimizer, weights: Weights, meter: TierMeter, pace: Pace,
        journal: Journal | None, layout: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.inner, self.units = inner, weights.units
        self.gradients: GradientsOnDisk | None = None
        self._starts: dict[FlatBucket, int] = {}
        numel = 0
        for bucket in (bucket for unit in self.units for bucket in unit.buckets):
            self._starts[bucket] = numel
            numel += bucket.layout.shard_numel
        grouped = slots_of(inner, list(self._starts))
        # What the optimizer holds of a parameter, by group: a group without momentum has no buffer of it.
        self._like = [next(iter(state_kinds(inner, [slot.param for slot in slots[:1]])), {}) for slots in grouped]
        states = [
            kind for likes in self._like for kind, like in likes.items() if isinstance(like, Tensor) and like.dim()
        ]
        kinds = {MASTER: residency.master_coding} | {kind: residency.coding(kind) for kind in states}
        size = residency.sub_group_numel(len(kinds), numel)
        folder = residency.folder if journal is None else journal.folder
        self.shelf = Shelf(folder, kinds, numel, size, meter, pace, is_durable=journal is not None)
        self._parts: dict[int, list[StatePart]] = defaultdict(list)
        before = self._lay_out(grouped)
        self._twin = twin_of(inner)
        found = None
        if journal is not None:
            found, self.shelf.before_put = journal.find(self.shelf, layout), journal.forget_older
        if found is None:
            self._fill(before, weights)
        else:
            self._go_on(found.own(NUMBERS))
        for bucket in self._starts:
            bucket.away = self

    def _lay_out(self, grouped: Sequence[Sequence[Slot]]) -> dict[str, dict[str, Any]]:
        """Cut every parameter's elements into sub-groups. Take the optimizer's state for each out of the optimizer."""
        before: dict[str, dict[str, Any]] = {}
        kinds = elementwise_kinds(self.inner)
        for number, slots in enumerate(grouped):
            self.inner.param_groups[number]["params"] = []
            for slot in slots:
                if held := self.inner.state.pop(slot.param, None):
                    before[slot.name] = state_of_piece(held, slot, kinds)
                first = self._starts[slot.bucket]
                start, end = first + slot.owned.start, first + slot.owned.stop
                for record in self.shelf.records(start, end) if start < end else ():
                    low, high = self.shelf.span(record)
                    self._parts[record].append(StatePart(slot, number, max(start, low), min(end, high), first))
        return before

    def _fill(self, before: Mapping[str, dict[str, Any]], weights: Weights) -> None:
        """Write masters and the optimizer's present state to the disk."""
        for record in self.shelf.each():
            tensors, (start, end) = self.shelf.take(record), self.shelf.span(record)
            for bucket, low, high in self._buckets_in(start, end):
                first = self._starts[bucket]
                tensors[MASTER][low - start : high - start] = weights.own(bucket)[low - first : high - first]
            for part in self._parts[record]:
                held = before.get(part.slot.name, {})
                at = part.start - part.bucket_start - part.slot.owned.start
                for kind, value in held.items():
                    if kind in tensors:
                        part.of(tensors[kind], start).copy_(value[at : at + part.end - part.start])
                part.is_known = bool(held)
                part.numbers = {kind: _copied(value) for kind, value in held.items() if kind not in tensors}
            self.shelf.put(record)
        self.shelf.flush()

    def keep(self) -> dict[str, Any]:
        """Wait until all of it is on a durable shelf. Return the numbers from which another process goes on."""
        known = (parts[0] for parts in _by_parameter(self._parts).values() if parts[0].is_known)
        numbers = {part.slot.name: {kind: _number(value) for kind, value in part.numbers.items()} for part in known}
        return {SHELF: self.shelf.keep(), NUMBERS: numbers}

    def _go_on(self, numbers: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue from what is on the shelf, with the numbers that `keep` returned."""
        for part in (part for parts in self._parts.values() for part in parts):
            part.is_known = part.slot.name in numbers
            for kind, number in numbers.get(part.slot.name, {}).items():
                like = self._like[part.group][kind]
                part.numbers[kind] = torch.tensor(number, dtype=like.dtype) if isinstance(like, Tensor) else number

    def _buckets_in(self, start: int, end: int) -> Iterator[tuple[FlatBucket, int, int]]:
        """Yield buckets of which elements [first, last) lie in [start, end)."""
        for bucket, first in self._starts.items():
            low, high = max(first, start), min(first + bucket.layout.shard_numel, end)
            if low < high:
                yield bucket, low, high

    def step(self, used: Collection[str]) -> Iterator[LiveUnit]:
        """See States. A unit is ready when its last element was updated; the next unit starts right after it."""
        coming = iter(self.units)
        unit = next(coming, None)
        for record in self.shelf.each():
            tensors, (start, end) = self.shelf.take(record), self.shelf.span(record)
            if self.gradients is not None:
                for bucket, _, _ in self._buckets_in(start, end):
                    self.gradients.bring(bucket)
            self._step_parts(record, tensors, start, used)
            # What is sent is what the next step begins with.
            self.shelf.settle(record, MASTER)
            for bucket, low, high in self._buckets_in(start, end):
                first = self._starts[bucket]
                bucket.shard_grad[low - first : high - first] = tensors[MASTER][low - start : high - start]
            self.shelf.put(record, ())
            while unit is not None and self._end(unit) <= end:
                yield unit
                unit = next(coming, None)

    def expect(self) -> None:
        """Note that a step comes next: its first sub-group is read meanwhile."""
        self.shelf.begin()

    def _end(self, unit: LiveUnit) -> int:
        last = unit.buckets[-1]
        return self._starts[last] + last.layout.shard_numel

    def _step_parts(self, record: int, tensors: Mapping[str, Tensor], start: int, used: Collection[str]) -> None:
        """One step of the user's optimizer over the parts of a sub-group."""
        twin, stepped = self._twin, [part for part in self._parts[record] if part.slot.name in used]
        values = {part: part.of(tensors[MASTER], start) for part in stepped}
        twin.param_groups = [
            {**group, "params": [values[part] for part in stepped if part.group == number]}
            for number, group in enumerate(self.inner.param_groups)
        ]
        for part, value in values.items():
            # The masters lie in the memory of the host, wherever gradients do.
            value.grad = part.grad.to(value.device)
            if part.is_known:
                twin.state[value] = part.numbers | {
                    kind: part.of(tensors[kind], start) for kind in self._like[part.group] if kind in tensors
                }
        twin.step()
        for part, value in values.items():
            state = twin.state.pop(value, {})
            part.is_known, part.numbers = bool(state), {}
            for kind, now in state.items():
                if kind in tensors:
                    place = part.of(tensors[kind], start)
                    # The first step makes tensors of its own.
                    if now is not None and now.data_ptr() != place.data_ptr():
                        place.copy_(now)
                elif is_elementwise(now, value):
                    raise RuntimeError(f"{type(self.inner).__name__} began to hold {kind!r}, which has no place")
                else:
                    part.numbers[kind] = now
            value.grad = None

    def masters(self, bucket: FlatBucket) -> Tensor:
        """See Away."""
        first, found = self._starts[bucket], torch.empty_like(bucket.shard_grad)
        for record in self.shelf.records(first, first + found.numel()):
            tensors, (start, end) = self.shelf.take(record, [MASTER]), self.shelf.span(record)
            low, high = max(first, start), min(first + found.numel(), end)
            found[low - first : high - first] = tensors[MASTER][low - start : high - start]
            self.shelf.leave(record)
        return found

    def set_masters(self, bucket: FlatBucket, values: Tensor, first: int) -> None:
        """See Away."""
        first += self._starts[bucket]
        for record in self.shelf.records(first, first + values.numel()) if values.numel() else ():
            tensors, (start, end) = self.shelf.take(record, [MASTER]), self.shelf.span(record)
            low, high = max(first, start), min(first + values.numel(), end)
            tensors[MASTER][low - start : high - start] = values[low - first : high - first]
            self.shelf.put(record, [MASTER])

    def sent(self, bucket: FlatBucket) -> None:
        """See Away."""
        if self.gradients is not None:
            self.gradients.free(bucket)

    def add_to(self, snapshot: Snapshot) -> Snapshot:
        """See States. The pieces lie on the disk and are saved from there, while training waits."""
        self.shelf.write_out()
        snapshot.in_place = True
        for parts in _by_parameter(self._parts).values():
            first, last = parts[0], parts[-1]
            wanted = {f"{WEIGHTS}/{first.slot.name}": MASTER}
            kinds = [kind for kind in self._like[first.group] if kind in self.shelf.kinds and first.is_known]
            wanted |= {f"{OPTIMIZER}/{kind}/{first.slot.name}": kind for kind in kinds}
            for name, kind in wanted.items():
                snapshot.pieces[name] = first.held(self.shelf.mapped(kind, first.start, last.end)).piece()
            add_betas(snapshot, first.slot.name, self.inner.param_groups[first.group])
            for kind, value in first.numbers.items():
                if value is not None:
                    snapshot.scalars.setdefault(kind, {})[first.slot.name] = _number(value)
        return snapshot

    @torch.no_grad()
    def restore(self, source: Source) -> None:
        """See States."""
        fresh: dict[str, bool] = {}
        rescaled: set[str] = set()
        for record in self.shelf.each():
            tensors, (start, _) = self.shelf.take(record), self.shelf.span(record)
            pieces: dict[str, Piece] = {}
            states: dict[StatePart, dict[str, Any]] = {}
            for part in self._parts[record]:
                name, value = part.slot.name, part.of(tensors[MASTER], start)
                held = part.held(value)
                pieces[f"{WEIGHTS}/{name}"] = held.piece()
                into = {kind: part.of(tensors[kind], start) for kind in tensors if kind != MASTER}
                like = self._like[part.group]
                states[part] = state = state_for(source, like, name, held, pieces, into)
                part.numbers = {kind: value for kind, value in state.items() if kind not in tensors}
                part.is_known, fresh[name] = bool(state), not state and bool(like)
            source.read(pieces)
            for part, state in states.items():
                rescaled.update(rescale(source, part.slot.name, state, self.inner.param_groups[part.group]))
            self.shelf.put(record)
        self.shelf.flush()
        report_optimizer(
            source, {kind for like in self._like for kind in like}, sum(fresh.values()), len(fresh), rescaled
        )


def _by_parameter(parts: Mapping[int, Sequence[StatePart]]) -> dict[str, list[StatePart]]:
    """The parts of each parameter, in order."""
    found: dict[str, list[StatePart]] = defaultdict(list)
    for record in sorted(parts):
        for part in parts[record]:
            found[part.slot.name].append(part)
    return found


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def twin_of(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class and options over other tensors, with a state of its own."""
    twin = object.__new__(type(inner))
    # An instance attribute `step` is a scheduler's wrapper around the original.
    twin.__dict__.update({key: value for key, value in inner.__dict__.items() if key != "step"})
    twin.state = defaultdict(dict)
    return twin
