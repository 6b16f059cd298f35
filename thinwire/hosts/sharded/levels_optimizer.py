"""The optimizer of three-level sharding: weights come and go with the modules, gradients leave with backward."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.checkpoint import Snapshot, Source
from thinwire.codecs import Identity, derive_seed
from thinwire.collectives import Communicator
from thinwire.hosts.agreeing import AgreeingOptimizer
from thinwire.hosts.ranks import Ranks
from thinwire.hosts.sharded.guard import guard
from thinwire.layout.buckets import Slot
from thinwire.layout.levels import Levels
from thinwire.layout.pieces import shard_param_groups
from thinwire.layout.units import Part, Unit, sent_by
from thinwire.state.agreement import Agreed, Word
from thinwire.state.portable import REPLICA, Held
from thinwire.state.replicas import ReplicaError, digest
from thinwire.table import Row

log = logging.getLogger("thinwire")
GRADIENTS, WEIGHTS = 0, 1
# Units whose refresh is under way while an earlier one computes: more would delay the gathers queued behind them.
AHEAD = 2


class FrontierOptimizer(AgreeingOptimizer):
    """The user's optimizer on this rank's 1/P, under weights cut over s1 ranks and gradients over s2.

    A unit's weights are gathered by whoever touches them first, and freed after its forward and after its backward,
    when its gradients leave. `trained` are this rank's pieces of the fp32 masters.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        comm: Communicator,
        units: list[Unit],
        levels: Levels,
        *,
        overlap: bool,
        seed: int,
        rows: list[Row],
    ) -> None:
        self.units, self.levels, self.overlap, self.seed = units, levels, overlap, seed
        self._parts = [part for unit in units for part in unit.parts]
        self._slots = [slot for unit in units for slot in unit.slots]
        self._pieces = shard_param_groups(inner, self._parts)
        trained = {slot.name: piece for slot, piece, _, _ in self._pieces}
        super().__init__(
            model, inner, Ranks(comm, comm), trained, sum(slot.param.numel() for slot in self._slots), rows
        )
        self._accumulating = False
        self._used: set[int] = set()
        # Units whose refreshed weights have not been asked for yet, in order of forward.
        self._unsent: deque[Unit] = deque()
        for unit in units:
            self._watch(unit)
        self._guard_weights()
        for unit in units:
            self._free(unit)

    # ---------------------------------------------------------------- hooks

    def _watch(self, unit: Unit) -> None:
        for slot in unit.slots:
            slot.param.register_post_accumulate_grad_hook(partial(self._mark_ready, unit, slot))
        if self.levels.weights_over > 1:
            unit.module.register_forward_pre_hook(lambda *_: self._before_forward(unit))
            unit.module.register_forward_hook(lambda _, __, output: self._after_forward(unit, output))

    def _guard_weights(self) -> None:
        unit_of = {id(slot.param): unit for unit in self.units for slot in unit.slots}
        for module in self.model.modules():
            found = [unit_of[id(param)] for param in module.parameters(recurse=False) if id(param) in unit_of]
            if found:
                guard(module, partial(self._bring_all, list(dict.fromkeys(found))))

    def _before_forward(self, unit: Unit) -> None:
        self._bring(unit)
        following = self._beside(unit, 1)
        # Not while recomputing, and not before its turn: its weights may still be on their way from the masters.
        if following and not (unit.in_backward or following.refreshing or following in self._unsent):
            self._start(following)

    def _after_forward(self, unit: Unit, output: object) -> None:
        if unit.in_backward or unit.is_kept:
            return
        if torch.is_grad_enabled():
            tensors = [tensor for tensor in _tensors(output) if tensor.grad_fn is not None]
            for tensor in tensors:
                tensor.register_hook(lambda _: self._before_backward(unit))
            # Of an output that can't be watched, nobody would know when the weights are needed again.
            if unit.stays or not tensors:
                return
        self._free(unit)

    def _before_backward(self, unit: Unit) -> None:
        if unit.in_backward:
            return
        unit.in_backward = True
        self._bring(unit)
        previous = self._beside(unit, -1)
        if previous:
            self._start(previous)

    def _mark_ready(self, unit: Unit, slot: Slot, param: Tensor) -> None:
        if unit.is_sent:
            raise RuntimeError(
                f"a second backward reached {slot.name!r} after its gradient was sent: wrap every backward but the "
                "last of a step in `with optimizer.no_sync():`, and call optimizer.step() after the last"
            )
        unit.ready.add(slot.index)
        if len(unit.ready) == len(unit.slots):
            self._send_gradients(unit, last=not self._accumulating)

    def _beside(self, unit: Unit, step: int) -> Unit | None:
        """The module before or after, in order of forward; the root has a time of its own."""
        at = self.units.index(unit) + step
        is_inner = unit.module is not self.model and 0 <= at < len(self.units)
        return self.units[at] if is_inner and self.units[at].module is not self.model else None

    # ---------------------------------------------------------------- weights

    def _start(self, unit: Unit) -> None:
        """Let the unit's weights come, unless they are here or on their way."""
        was_awaited = self._await_refresh(unit)
        if not unit.is_whole:
            for part in unit.parts:
                part.set_whole(True)
                unit.gathering.append(self.comm.submit(part.gather))
            unit.is_whole = True
        # Behind the gather, which somebody waits for.
        if was_awaited and self._unsent:
            self._submit_refresh(self._unsent.popleft())

    def _bring(self, unit: Unit) -> None:
        """Return when the unit's weights are whole."""
        if unit.is_whole and not (unit.gathering or unit.refreshing or self._unsent):
            return
        self._start(unit)
        self._settle(unit)

    def _bring_all(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._bring(unit)

    def _settle(self, unit: Unit) -> None:
        if unit.gathering:
            for future in unit.gathering:
                self.comm.wait(future)
            unit.gathering.clear()
            for part in unit.parts:
                part.note_versions()

    def _free(self, unit: Unit) -> None:
        """Keep this rank's 1/s1 of the weights, with what others have changed in place."""
        if not unit.is_whole:
            return
        self._settle(unit)
        self._take_edited_weights(unit)
        if self.levels.weights_over > 1:
            for part in unit.parts:
                part.set_whole(False)
            unit.is_whole = unit.is_kept = False

    def _take_edited_weights(self, unit: Unit) -> None:
        for part in unit.parts:
            edited = part.edited()
            if edited:
                log.warning(
                    "thinwire: rank %d: %r was changed outside the optimizer; its new values are taken as the masters",
                    self.comm.global_ranks[self.comm.rank], ", ".join(slot.name for slot in edited),
                )  # fmt: skip
            for slot in edited:
                part.adopt(slot)
            part.note_versions()

    def _send_weights(self) -> None:
        self._unsent = deque(self.units)
        # Whole weights need no gather, which would queue behind.
        num_ahead = AHEAD if self.overlap and self.levels.weights_over > 1 else len(self.units)
        for _ in range(min(num_ahead, len(self.units))):
            self._submit_refresh(self._unsent.popleft())
        if not self.overlap:
            self._finish_refresh()

    def _submit_refresh(self, unit: Unit) -> None:
        for part in unit.parts:
            seed = derive_seed(self.seed, self.steps, part.stream, WEIGHTS)
            codec, differences = part.wire.weights, part.wire.differences
            job = partial(part.refresh, message=part.master, codec=codec, differences=differences, seed=seed)
            unit.refreshing.append(self.comm.submit(job))

    def _await_refresh(self, unit: Unit) -> bool:
        """Return when the unit's shards are up to date; whether they were not."""
        while unit in self._unsent:
            self._submit_refresh(self._unsent.popleft())
        was_awaited = bool(unit.refreshing)
        for future in unit.refreshing:
            self.comm.wait(future)
        unit.refreshing.clear()
        return was_awaited

    def _finish_refresh(self) -> None:
        for unit in self.units:
            self._await_refresh(unit)

    def synchronize(self) -> None:
        """Bring the whole weights to every rank, where they stay until the next backward."""
        for unit in self.units:
            self._start(unit)
            unit.is_kept = True
        for unit in self.units:
            self._settle(unit)

    # ---------------------------------------------------------------- gradients

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to the block's sums; the first one outside sends those between blocks."""
        self._accumulating, before = True, self._accumulating
        try:
            yield
        finally:
            self._accumulating = before

    def _send_gradients(self, unit: Unit, *, last: bool) -> None:
        """Reduce what backward has left, and free the unit's weights."""
        self._await_refresh(unit)
        self._refuse_moved_parameters(unit)
        for part in unit.parts:
            grads = [slot.param.grad for slot in part.slots]
            self._used.update(slot.index for slot in part.slots if slot.param.grad is not None)
            for slot in part.slots:
                slot.param.grad = None
            # Sums are taken in the order of micro-batches.
            if part.reducing is not None:
                self.comm.wait(part.reducing)
            seed = derive_seed(self.seed, self.steps, part.stream, GRADIENTS, unit.num_reduced)
            job = partial(part.reduce, grads=grads, seed=seed, first=unit.num_reduced == 0, last=last)
            part.reducing = self.comm.submit(job)
        unit.num_reduced += 1
        unit.ready.clear()
        unit.in_backward, unit.is_sent = False, last
        if self.levels.weights_over > 1:
            self._free(unit)

    def _refuse_moved_parameters(self, unit: Unit) -> None:
        for part in unit.parts:
            storage = part.live.untyped_storage()
            for slot in part.slots:
                if unit.is_whole and slot.param.untyped_storage().data_ptr() != storage.data_ptr():
                    raise RuntimeError(
                        f"{slot.name!r} no longer lies where it was put, so training would not reach it: convert, move "
                        "or load with assign=True before the strategy is applied, and copy new values in place after"
                    )

    def _reduce(self) -> None:
        for unit in reversed(self.units):
            if not unit.is_sent:
                self._send_gradients(unit, last=True)
        for part in self._parts:
            assert part.reducing is not None
            self.comm.wait(part.reducing)
            part.reducing = None
        for slot, piece, start, end in self._pieces:
            piece.grad = slot.bucket.shard_grad[start:end]

    def _agree(self, word: Word) -> Agreed:
        agreed = super()._agree(replace(word, used=[slot.index in self._used for slot in self._slots]))
        # A parameter that no rank used is left alone, as by the plain optimizer.
        for slot, piece, _, _ in self._pieces:
            if not agreed.used[slot.index]:
                piece.grad = None
        return agreed

    # ---------------------------------------------------------------- a step

    def _update(self) -> None:
        for unit in self.units:
            self._free(unit)
        super()._update()
        self._send_weights()

    def step(self) -> None:
        """Update this rank's masters, unless the gradient is not finite, and send them; a collective over all ranks."""
        super().step()
        for unit in self.units:
            unit.num_reduced, unit.is_sent = 0, False
        self._used.clear()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        super().zero_grad()
        for slot in self._slots:
            slot.param.grad = None

    def check_replicas(self) -> None:
        """Compare the compute weights of all copies of a shard bit for bit; raises ReplicaError; a collective."""
        self._finish_refresh()
        for unit in self.units:
            if unit.is_whole:
                self._settle(unit)
                self._take_edited_weights(unit)
        mine = digest([repr(self.steps).encode(), *(part.shard for part in self._parts)])
        digests = self.comm.wait(self.comm.all_gather_exact(mine))
        pairs = [(rank, rank % self.levels.weights_over) for rank in range(self.comm.world_size)]
        odd = [(rank, first) for rank, first in pairs if not torch.equal(digests[rank], digests[first])]
        if odd:
            ranks = ", ".join(f"{self.comm.global_ranks[a]} from rank {self.comm.global_ranks[b]}'s" for a, b in odd)
            raise ReplicaError(f"after step {self.steps} weights differ: those of rank {ranks}")

    # ---------------------------------------------------------------- whole weights by hand

    def masters(self, names: Collection[str]) -> dict[str, Tensor]:
        """Copies of the fp32 masters, whole, by parameter name; between steps, a collective."""
        found: dict[str, Tensor] = {}
        for part in self._holding(names):
            gathered = self.comm.wait(self.comm.all_gather_exact(part.master))
            whole = torch.empty_like(gathered)
            for rank, piece in enumerate(gathered):
                whole[self.levels.piece(rank)] = piece
            found |= {slot.name: slot.view(whole.view(-1)).clone() for slot in part.slots if slot.name in names}
        return found

    @torch.no_grad()
    def adopt_weights(self, values: Mapping[str, Tensor]) -> None:
        """Take whole weights, the same bits on all ranks, as masters and compute weights; between steps."""
        self._finish_refresh()
        for unit in self.units:
            self._free(unit)
        for part in self._holding(values):
            part.set_whole(True)
            for slot in (slot for slot in part.slots if slot.name in values):
                slot.view(part.live).copy_(values[slot.name])
                part.adopt(slot)
            if self.levels.weights_over > 1:
                part.set_whole(False)
            part.note_versions()

    def handover_bytes(self, names: Collection[str]) -> tuple[int, int]:
        """Payload this rank sends in `masters` and in `adopt_weights` for these parameters."""
        return sum(4 * part.shard_numel * (self.comm.world_size - 1) for part in self._holding(names)), 0

    def _holding(self, names: Collection[str]) -> list[Part]:
        """The parts in which any of these parameters lies."""
        return [part for part in self._parts if any(slot.name in names for slot in part.slots)]

    # ---------------------------------------------------------------- what is known

    @property
    def bytes_per_step(self) -> int:
        """Payload this rank sends in a step of one micro-batch."""
        return self._bytes_of(1)

    def _bytes_of(self, micro_batches: int) -> int:
        bits = (self.comm.world_size - 1) * -(-len(self._slots) // 8)
        return sum(sent_by(self.units, micro_batches).values()) + self.agreement_bytes + bits

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        further = (self._bytes_of(2) - self._bytes_of(1)) / 1e6
        return [*super().describe(), ("each further micro-batch", f"{further:.3f} MB", "none of it between blocks")]

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of all that is needed to go on bit for bit on the same world."""
        self._settle_all()
        return super().state_dict() | {"shards": [part.own.clone() for part in self._parts], "seed": self.seed}

    def snapshot(self) -> Snapshot:
        """This rank's state between two steps, in pieces that any layout can take: views of the live tensors."""
        self._settle_all()
        snapshot = super().snapshot()
        own = {id(part): part.own for part in self._parts}
        for slot, _, start, end in self._pieces:
            snapshot.pieces[f"{REPLICA}/{slot.name}"] = slot.held(own[id(slot.bucket)][start:end], start).piece()
        return snapshot

    @torch.no_grad()
    def restore(self, source: Source) -> None:
        """Go on from a checkpoint of any layout; from the same, bit for bit. A collective."""
        self._finish_refresh()
        for unit in self.units:
            self._free(unit)
        super().restore(source)
        shards = {id(part): part.master.clone() for part in self._parts}
        if source.has_any(REPLICA):
            source.read(
                {
                    f"{REPLICA}/{slot.name}": slot.held(shards[id(slot.bucket)][start:end], start).piece()
                    for slot, _, start, end in self._pieces
                    if source.has(f"{REPLICA}/{slot.name}")
                }
            )
        for part in self._parts:
            self._spread(part, shards[id(part)])

    def _held(self) -> dict[str, Held]:
        return {slot.name: slot.held(piece, start) for slot, piece, start, _ in self._pieces}

    def _adapt(self, source: Source) -> None:
        if not source.has_any(REPLICA):
            source.note("compute weights", "transformed", "rebuilt from the masters")

    @property
    def _lossy_weights(self) -> bool:
        return self.levels.weights_over > 1 and not all(part.wire.shards.traits.lossless for part in self._parts)

    def _settle_all(self) -> None:
        self._finish_refresh()
        for unit in self.units:
            if unit.is_whole:
                self._settle(unit)
                self._take_edited_weights(unit)

    def _spread(self, part: Part, shard: Tensor) -> None:
        """Give the compute weights of all ranks these values of this one's."""
        job = partial(part.refresh, message=shard, codec=Identity(), differences=False, seed=0)
        self.comm.wait(self.comm.submit(job))
        part.note_versions()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what state_dict gave; a collective. Raises ConfigError where it does not fit."""
        self._finish_refresh()
        for unit in self.units:
            self._free(unit)
        super().load_state_dict(dict(state_dict))
        self.seed = state_dict["seed"]
        for part, shard in zip(self._parts, state_dict["shards"], strict=True):
            self._spread(part, shard)

    def _layout(self) -> dict[str, Any]:
        levels = self.levels
        return super()._layout() | {
            "levels": [levels.weights_over, levels.gradients_over],
            "formats": [repr(wire) for wire in dict.fromkeys(part.wire for part in self._parts)],
            "numels": [part.numel for part in self._parts],
        }


def _tensors(output: object) -> Iterator[Tensor]:
    """The tensors in what a module returned."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)
