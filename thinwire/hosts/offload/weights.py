"""Weights on every rank's disk, whole or cut over ranks. Updates are added to them as they pass through memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.hosts.offload.replicas import Replicas
from thinwire.hosts.sharded.bucket import FlatBucket, LiveUnit, Slot
from thinwire.hosts.sharded.guard import Hook
from thinwire.hosts.sharded.passing import PassingWeights, tensors_in
from thinwire.hosts.sharded.seeds import Seeds
from thinwire.hosts.sharded.weights import Weights, brings, units_by_module
from thinwire.state.replicas import fingerprint

# Buckets whose updated weights are under way while the next one is stepped.
IN_FLIGHT = 1


class StreamedUpdates(Weights):
    """Weights that pass through memory: an update takes buckets in order of forward.

    While one bucket's differences arrive, the next one is read and the last one is written. Where they are deferred, an
    update sends and receives them, and they are added when the weights are next in memory, behind the forward before.
    """

    replicas: Replicas
    _flying: deque[LiveUnit]

    def follow(self, model: nn.Module) -> None:
        """Let forwards of the model without gradients have an order of their own."""
        model.register_forward_pre_hook(Hook(lambda *_: self._begin_forward()), prepend=True)
        model.register_forward_hook(Hook(lambda *_: self.replicas.end_evaluation()), always_call=True)

    def _begin_forward(self) -> None:
        if not torch.is_grad_enabled():
            self.wait_all()
            self.replicas.begin_evaluation()

    def send(self, updated: Iterable[LiveUnit]) -> None:
        self.defers = bool(self.replicas.deferred)
        self.replicas.begin_update()
        super().send(updated)
        self.replicas.end_update()

    def send_next(self) -> None:
        if not self.unsent:
            return
        unit = self.unsent[0]
        if self.replicas.deferred.issuperset(unit.buckets):
            self._send_deferred(self.unsent.popleft())
            return
        for bucket in unit.buckets:
            if bucket.layout.adds_updates:
                self.replicas.bring(bucket)
                self.replicas.lock(bucket)
            else:
                self.replicas.claim(bucket)
        super().send_next()
        self._flying.append(unit)
        while len(self._flying) > IN_FLIGHT:
            self.wait(self._flying[0])

    def _send_deferred(self, unit: LiveUnit) -> None:
        """Send differences from this rank's own part of the weights. What comes in return waits for their next use."""
        coming = list[tuple[FlatBucket, Future[Any]]]()
        own = [self.replicas.own(bucket) for bucket in unit.buckets]
        for bucket in self.unsent[0].buckets if self.unsent else ():
            if bucket in self.replicas.deferred:
                self.replicas.expect_own(bucket)
        for bucket, before in zip(unit.buckets, own, strict=True):
            codec, n = bucket.layout.wire.weights, bucket.layout.shard_numel
            message = bucket.master if bucket.away is None else bucket.shard_grad
            packet = torch.empty(codec.packet_bytes(n), dtype=torch.uint8)
            bucket.encode(message - before, codec, self.seeds.weights(bucket.layout), packet)
            if bucket.away is not None:
                bucket.away.sent(bucket)
            future = bucket.comm.submit(partial(_exchanged, bucket, packet))
            coming.append((bucket, future))
            self.replicas.defer(bucket, partial(_add, bucket, future))
        self._coming[unit] = coming

    def wait(self, unit: LiveUnit) -> bool:
        was_coming = super().wait(unit)
        if unit in self._flying:
            self._flying.remove(unit)
            for bucket in unit.buckets:
                self.replicas.changed(bucket)
        return was_coming

    def is_away(self, bucket: FlatBucket) -> bool:
        return bucket in self.replicas.spots

    @contextmanager
    def held(self, bucket: FlatBucket) -> Iterator[FlatBucket]:
        with self.replicas.held(bucket):
            yield bucket

    def shard(self, bucket: FlatBucket) -> Tensor:
        self.replicas.bring(bucket)
        return bucket.shard

    def own(self, bucket: FlatBucket) -> Tensor:
        if not self.is_away(bucket):
            return bucket.own
        first = bucket.own.storage_offset()
        return self.replicas.mapped(bucket)[first : first + bucket.layout.shard_numel]


class WeightsOnDisk(StreamedUpdates):
    """Loads a bucket on first use of its weights, in forward, backward or recomputation.

    Of an embedding that is not in memory, only the rows of a batch's tokens are read.

    packs: what autograd saves of weights is packed here, see `Replicas.pack`; False: something else does it. defers:
    updates may be deferred.
    """

    def __init__(
        self, units: Sequence[LiveUnit], seeds: Seeds, model: nn.Module, replicas: Replicas, *, packs: bool = True,
        defers: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(units, seeds)
        self.replicas = replicas
        self._flying: deque[LiveUnit] = deque()
        self._contexts: list[torch.autograd.graph.saved_tensors_hooks] = []
        self.follow(model)
        if packs:
            model.register_forward_pre_hook(Hook(lambda *_: self._enter()))
            model.register_forward_hook(Hook(lambda *_: self._exit()), always_call=True)
        self._tables: set[nn.Module] = set()
        self._units_of: dict[nn.Module, list[LiveUnit]] = {}
        brings(self, model)
        for module, own in units_by_module(model, units).items():
            large = [unit for unit in own if unit.buckets[0] in replicas.spots]
            self._units_of[module] = large
            replicas.fit([unit.buckets[0] for unit in large])
            if large and looks_up(module):
                (slot,) = (slot for slot in large[0].slots if slot.param is module._parameters["weight"])
                replicas.add_rows(slot)
                self._tables.add(module)
                module.forward = partial(self._look_up, module, slot, large)  # type: ignore[method-assign]
            elif large:
                module.register_forward_hook(Hook(lambda *given, large=large: self._watch(large, given[-1])))
        if defers:
            # Of what is read by rows, the disk must have the present values.
            replicas.deferrable = [
                bucket for bucket, spot in replicas.spots.items() if bucket.layout.adds_updates and not spot.rows
            ]
        replicas.end_update()

    def _enter(self) -> None:
        context = torch.autograd.graph.saved_tensors_hooks(self.replicas.pack, self.replicas.unpack)
        context.__enter__()
        self._contexts.append(context)

    def _exit(self) -> None:
        self._contexts.pop().__exit__(None, None, None)

    def _watch(self, units: list[LiveUnit], output: object) -> None:
        """Load the weights when the module's backward begins: recomputation saves tensors without our hooks."""
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self.bring(units))

    def _look_up(self, module: nn.Embedding, slot: Slot, units: list[LiveUnit], tokens: Tensor) -> Tensor:
        """The forward of an embedding, which reads the rows of its tokens alone."""
        super().bring(units)
        with torch.no_grad():
            rows = self.replicas.rows(slot, tokens)
        if rows is None:
            return F.embedding(tokens, slot.param, module.padding_idx, scale_grad_by_freq=module.scale_grad_by_freq)
        return LookedUp.apply(slot.param, tokens, rows, module.padding_idx, module.scale_grad_by_freq)

    def bring(self, units: Sequence[LiveUnit]) -> None:
        super().bring(units)
        self.replicas.bring(*(bucket for unit in units for bucket in unit.buckets))

    def keep(self) -> None:
        self.wait_all()

    def reads_rows(self, module: nn.Module) -> bool:
        return module in self._tables

    def fit(self, module: nn.Module) -> None:
        """Let all weights of a module be in memory, which is used several times in a row."""
        self.replicas.fit(self._buckets_of(module))

    def _buckets_of(self, module: nn.Module) -> list[FlatBucket]:
        units = dict.fromkeys(unit for child in module.modules() for unit in self._units_of.get(child, []))
        return [bucket for unit in units for bucket in unit.buckets]

    def lacks(self, module: nn.Module) -> str | None:
        # One that happens to be in memory may wait for its update.
        passing = [bucket for bucket in self._buckets_of(module) if not self.replicas.spots[bucket].is_locked]
        return passing[0].slots[0].name if passing else None

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """See `whole`."""
        self.wait_all()
        buckets, seen = self._buckets_of(module), dict[FlatBucket, int]()
        for bucket in buckets:
            self.replicas.bring(bucket)
            self.replicas.lock(bucket)
            seen[bucket] = fingerprint(bucket.live)
        try:
            yield
        finally:
            for bucket in buckets:
                if fingerprint(bucket.live) != seen[bucket]:
                    self.tell_of_edits(bucket, [slot.name for slot in bucket.slots])
                    bucket.set_masters(bucket.own.float())
                self.replicas.changed(bucket)
            self.replicas.make_room()


class CutWeightsOnDisk(StreamedUpdates, PassingWeights):
    """Weights that are cut over ranks, each rank's part on its disk.

    A unit's weights come from all disks at once: every rank reads its part, and then the parts are gathered. Parts of
    the next units are read ahead meanwhile.

    Source: ZeRO-Infinity (SC 2021), section 6.1, bandwidth-centric partitioning.
    """

    def __init__(self, units: Sequence[LiveUnit], seeds: Seeds, model: nn.Module, replicas: Replicas) -> None:
        self.replicas, self._flying = replicas, deque()
        # Of one unit the parts are sent, of the next one they are read; a unit that was gathered needs none.
        sizes = [
            sum(replicas.spots[each].num_bytes for each in unit.buckets if each in replicas.spots) for unit in units
        ]
        replicas.capacity_bytes = max(replicas.capacity_bytes, 2 * max(sizes))
        replicas.holds_last = False
        super().__init__(units, seeds, model, overlap=False, keeps=False)
        self.follow(model)
        replicas.end_update()

    def begin_gather(self, unit: LiveUnit) -> None:
        self.replicas.bring(*unit.buckets)
        self.replicas.pinned.update(unit.buckets)

    def end_gather(self, unit: LiveUnit) -> None:
        self.replicas.pinned.difference_update(unit.buckets)


def _exchanged(bucket: FlatBucket, packet: Tensor, link: Link) -> Rounds[list[Tensor]]:
    """The packets of an update, in memory of their own."""
    rows = yield from bucket.exchange(link, packet, bucket.layout.wire.weights)
    return [row.clone() for row in rows]


def _add(bucket: FlatBucket, coming: Future[list[Tensor]]) -> None:
    """Wait for the packets of an update, and add them to the weights."""
    rows = bucket.comm.wait(coming)
    bucket.take(rows, bucket.layout.wire.weights, True, torch.empty(bucket.layout.shard_numel))


def looks_up(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether a module takes rows of its weight and does nothing else."""
    is_plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    return is_plain and module.max_norm is None and not module.sparse and "forward" not in vars(module)


class LookedUp(torch.autograd.Function):
    """Rows that were read of an embedding's weight, with the gradient that torch's embedding has."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, tokens: Tensor, rows: Tensor, padding_idx: int | None, by_frequency: bool
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.given = len(weight), -1 if padding_idx is None else padding_idx, by_frequency
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        return torch.ops.aten.embedding_dense_backward(grad, tokens, *ctx.given), None, None, None, None
