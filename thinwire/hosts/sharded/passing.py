"""Weights that are cut over ranks: each module's weights are gathered when they are needed, and freed afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from thinwire.hosts.sharded.bucket import FlatBucket, LiveUnit, Slot
from thinwire.hosts.sharded.guard import Hook
from thinwire.hosts.sharded.seeds import Seeds
from thinwire.hosts.sharded.weights import Weights, brings, moved, units_by_module, versions_of
from thinwire.state.replicas import fingerprint

# Units whose updated weights are under way while an earlier one computes: more would delay the gathers behind them.
AHEAD = 2


@dataclass
class Passage:
    """Where the weights of a unit are.

    Attributes:
        is_whole: gathered, or being gathered.
        is_kept: stay whole until the next backward, by request.
        versions: of each bucket's parameters, when this host last wrote them.
    """

    is_whole: bool = True
    is_kept: bool = False
    in_backward: bool = False
    gathering: list[Future[None]] = field(default_factory=list)
    versions: dict[FlatBucket, list[int]] = field(default_factory=dict)


class PassingWeights(Weights):
    """Weights that are cut over s1 ranks. A unit's weights are gathered on first use.

    They are freed after the unit's forward, and after its backward, when its gradients are sent.

    keeps: `keep` makes all of them whole, which takes the memory of the whole model. Otherwise they stay cut, and a
    forward is a collective at any time.
    """

    def __init__(
        self, units: Sequence[LiveUnit], seeds: Seeds, model: nn.Module, *, overlap: bool, keeps: bool = True
    ) -> None:
        super().__init__(units, seeds, AHEAD if overlap else None)
        self.keeps, self._units_of = keeps, units_by_module(model, units)
        brings(self, model)
        self._passages = {unit: Passage(bool(unit.buckets[0].live.untyped_storage().nbytes())) for unit in units}
        for unit in units:
            self._note(unit)
            assert unit.unit.module is not None
            module = model.get_submodule(unit.unit.module)
            module.register_forward_pre_hook(Hook(lambda *_, unit=unit: self._before_forward(unit)))
            module.register_forward_hook(Hook(lambda *given, unit=unit: self._after_forward(unit, given[-1])))
        self.free()

    def _before_forward(self, unit: LiveUnit) -> None:
        self.bring([unit])
        following = self._beside(unit, 1)
        # Not while recomputing, and not before its turn: its weights may still be on their way from the masters.
        if following and not (self._passages[unit].in_backward or self.is_coming(following)):
            self._start(following)

    def _after_forward(self, unit: LiveUnit, output: object) -> None:
        passage = self._passages[unit]
        if passage.in_backward or passage.is_kept:
            return
        if torch.is_grad_enabled():
            tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
            for tensor in tensors:
                tensor.register_hook(lambda _: self._before_backward(unit))
            # Of an output that can't be watched, nobody would know when the weights are needed again.
            if unit.unit.stays or not tensors:
                return
        self._free(unit)

    def _before_backward(self, unit: LiveUnit) -> None:
        if not self._passages[unit].in_backward:
            self._passages[unit].in_backward = True
            self.bring([unit])
            if previous := self._beside(unit, -1):
                self._start(previous)

    def _beside(self, unit: LiveUnit, step: int) -> LiveUnit | None:
        """The module before or after in order of forward. The root counts separately."""
        at = self.units.index(unit) + step
        is_inner = bool(unit.unit.module) and 0 <= at < len(self.units)
        return self.units[at] if is_inner and self.units[at].unit.module else None

    def _start(self, unit: LiveUnit) -> None:
        """Start to gather the unit's weights, unless they are whole or being gathered."""
        was_coming, passage = self.wait(unit), self._passages[unit]
        if not passage.is_whole:
            self.begin_gather(unit)
            for bucket in unit.buckets:
                set_whole(bucket, True)
                passage.gathering.append(bucket.comm.submit(bucket.gather))
            passage.is_whole = True
        # Behind the gather, which somebody waits for.
        if was_coming:
            self.send_next()

    def bring(self, units: Sequence[LiveUnit]) -> None:
        for unit in units:
            passage = self._passages[unit]
            if not passage.is_whole or passage.gathering or self.is_coming(unit) or self.unsent:
                self._start(unit)
                self._arrive(unit)

    def _arrive(self, unit: LiveUnit) -> None:
        passage = self._passages[unit]
        if passage.gathering:
            for future in passage.gathering:
                unit.buckets[0].comm.wait(future)
            passage.gathering.clear()
            self.end_gather(unit)
            self._note(unit)

    def begin_gather(self, unit: LiveUnit) -> None:
        """Note that this rank's part of the unit's weights is about to be sent, until `end_gather`."""

    def end_gather(self, unit: LiveUnit) -> None:
        """Note that the unit's weights are whole."""

    def keep(self) -> None:
        if not self.keeps:
            self.wait_all()
            return
        for unit in self.units:
            self._start(unit)
            self._passages[unit].is_kept = True
        for unit in self.units:
            self._arrive(unit)

    def settle(self) -> None:
        self.wait_all()
        for unit in self.units:
            if self._passages[unit].is_whole:
                self._arrive(unit)
                self._take_edited(unit)

    def free(self) -> None:
        self.wait_all()
        for unit in self.units:
            self._free(unit)

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """See `whole`."""
        self.settle()
        units = list(dict.fromkeys(unit for child in module.modules() for unit in self._units_of.get(child, [])))
        stay = {unit for unit in units if self._passages[unit].is_kept}
        seen = dict[Slot, int]()
        for unit in units:
            self._start(unit)
            self._arrive(unit)
            self._passages[unit].is_kept = True
            seen |= {slot: _print_of(slot) for slot in unit.slots}
        try:
            yield
        finally:
            edited = [slot for slot in seen if _print_of(slot) != seen[slot]]
            for bucket in dict.fromkeys(slot.bucket for slot in edited):
                self._adopt(bucket, [slot for slot in edited if slot.bucket is bucket])
            for unit in units:
                self._note(unit)
                if unit not in stay:
                    self._free(unit)

    def send(self, updated: Iterable[LiveUnit]) -> None:
        self.free()
        super().send(updated)

    def is_done_with(self, unit: LiveUnit) -> None:
        self._passages[unit].in_backward = False
        self.wait(unit)
        for slot in unit.slots:
            live = slot.bucket.live.untyped_storage()
            if self._passages[unit].is_whole and slot.param.untyped_storage().data_ptr() != live.data_ptr():
                raise moved(slot)
        self._free(unit)

    def _free(self, unit: LiveUnit) -> None:
        """Free the whole weights. This rank's 1/s1 stays, with any changes that other code made in place."""
        passage = self._passages[unit]
        if passage.is_whole:
            self._arrive(unit)
            self._take_edited(unit)
            for bucket in unit.buckets:
                set_whole(bucket, False)
            passage.is_whole = passage.is_kept = False

    def _note(self, unit: LiveUnit) -> None:
        self._passages[unit].versions = {bucket: versions_of(bucket) for bucket in unit.buckets}

    def _take_edited(self, unit: LiveUnit) -> None:
        for bucket, versions in self._passages[unit].versions.items():
            edited = [s for s, seen in zip(bucket.slots, versions, strict=True) if s.param._version != seen]
            if edited:
                self._adopt(bucket, edited)
        self._note(unit)

    def _adopt(self, bucket: FlatBucket, edited: Sequence[Slot]) -> None:
        """Take edited weights as the masters."""
        self.tell_of_edits(bucket, [slot.name for slot in edited])
        with self.held(bucket):
            for slot in edited:
                bucket.adopt(slot, slot.span.of(bucket.live))


def _print_of(slot: Slot) -> int:
    """A fingerprint of a parameter's whole weights."""
    return fingerprint(slot.span.of(slot.bucket.live).view(-1))


def set_whole(bucket: FlatBucket, is_whole: bool) -> None:
    """Give `live` its memory, with undefined content, or free it. The parameters stay views into it."""
    try:
        bucket.live.untyped_storage().resize_(bucket.live.nbytes if is_whole else 0)
    except RuntimeError as error:
        raise RuntimeError(
            f"the memory of weights between {bucket.slots[0].name!r} and {bucket.slots[-1].name!r} can't be freed: "
            "numpy holds it; clone weights before you give them to numpy"
        ) from error


def tensors_in(output: object) -> Iterator[Tensor]:
    """The tensors in a module's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from tensors_in(value)
