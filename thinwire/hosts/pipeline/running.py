"""One call of a runner in progress: takes what arrives, does an action, and sends what others need of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.hosts.pipeline.visits import VisitState, as_tuple
from thinwire.hosts.pipeline.vocabulary import HeadPass
from thinwire.hosts.pipeline.wiring import Wiring
from thinwire.methods.pipeline import Action
from thinwire.methods.pipeline.border import LastMessages
from thinwire.methods.pipeline.plan import (
    AGREE,
    BACKWARD,
    EMBED,
    FORWARD,
    INPUT,
    RECOMPUTE,
    SCATTER,
    SCORE,
    SPREAD_KINDS,
    TRAIN,
    WEIGHT,
    Arrival,
    Bridged,
    PlanMessage,
    Shared,
    Visit,
    direction_of,
)
from thinwire.methods.pipeline.vocabulary import wide


class RunningStep:
    """The progress of one call of `run` or `evaluate`."""

    def __init__(
        self, runner: Wiring, micro_batches: Sequence[Any], shares: Sequence[float], first_number: int | None
    ) -> None:
        self.runner, self.micro_batches, self.shares = runner, micro_batches, shares
        self.first_number = first_number
        self.loss = torch.zeros((), device=runner.device)
        # What went from one chunk of this rank to another.
        self._handed: dict[PlanMessage, Tensor] = {}
        self._visits: dict[Visit, VisitState] = {}
        # What came over bridges for the action that is to run.
        self._over_bridges: list[Tensor] = []
        # Micro-batches between S and T.
        self._passes: dict[int, HeadPass] = {}

    def arrived(self, action: Action) -> list[Tensor]:
        """Wait for the tensors that an action needs from other ranks, and return them without those of bridges."""
        needs = self.runner.plan.routes.needs(action)
        found = [(need, self._taken(need)) for need in needs if isinstance(need, PlanMessage)]
        self._over_bridges = [value for need, value in found if isinstance(need, Bridged)]
        return [value for need, value in found if not isinstance(need, Bridged)]

    def _taken(self, arrival: PlanMessage) -> Tensor:
        if arrival in self._handed:
            return self._handed.pop(arrival)
        runner, direction = self.runner, direction_of(arrival)
        if isinstance(arrival, Shared):
            return self._taken_of_shared(arrival)
        packet = runner.mailbox.take(runner.label(arrival), lambda packet: runner.crossing.length(direction, packet))
        micro_batch, border = self.micro_batches[arrival.micro_batch], runner.border(arrival)
        shape, packet = runner.shape_of(arrival, micro_batch), packet.to(runner.device)
        if (last := self._last(direction, border)) is not None:
            return last.unpack(runner.crossing, packet, shape, runner.dtype, self._keys(micro_batch))
        return runner.crossing.unpack(direction, packet, shape, runner.dtype)

    def _taken_of_shared(self, arrival: Shared) -> Tensor:
        runner, direction = self.runner, direction_of(arrival)
        if not runner.num_bytes(arrival, self.micro_batches):
            return torch.empty(0, dtype=runner.dtype, device=runner.device)
        if arrival.kind == "scores":
            return runner.mailbox.take(runner.label(arrival)).to(runner.device).view(wide(runner.dtype))
        packet = runner.mailbox.take(runner.label(arrival), lambda packet: runner.crossing.length(direction, packet))
        return self._unpacked(arrival, packet.to(runner.device))

    def _unpacked(self, arrival: Shared, packet: Tensor) -> Tensor:
        runner, micro_batch = self.runner, self.micro_batches[arrival.micro_batch]
        shape = torch.Size(runner.shape(0, micro_batch))
        if arrival.kind in ("rows", "gradient"):
            rank = arrival.source if arrival.kind == "rows" else arrival.target
            shape = torch.Size((runner.vocabulary.count(rank, micro_batch), shape[-1]))
        return runner.crossing.unpack(direction_of(arrival), packet, shape, runner.dtype)

    def _last(self, direction: str, border: int) -> LastMessages | None:
        """The last messages over a border, to which differences refer; None if none are sent, or in evaluation."""
        return self.runner.last.get(border) if direction == "forward" and torch.is_grad_enabled() else None

    def _keys(self, micro_batch: Any) -> Sequence[bytes]:
        assert self.runner.keys is not None
        return self.runner.keys(micro_batch)

    def do(self, action: Action, arrived: Sequence[Tensor]) -> None:
        """Run one action, and send its results to the ranks that need them."""
        visit = action.visit
        if action.kind in SPREAD_KINDS:
            self._give(action, self._spread(action, arrived))
            return
        if action.kind == FORWARD:
            output, *given = self._forward(visit, arrived)
            if self.runner.plan.routes.gives(action):
                self._give(action, output, given)
            elif self.shares[visit.micro_batch]:
                # The mean over no token at all is no number.
                self.loss = self.loss + self.shares[visit.micro_batch] * output
            return
        state = self._visits[visit]
        # Where nothing arrives a path ends in the loss, of which this micro-batch has a share.
        gradient = sum(arrived[1:], arrived[0]) if arrived else self.shares[visit.micro_batch]
        if action.kind == RECOMPUTE:
            with self.runner.statistics.paused():
                state.recompute()
        elif action.kind == WEIGHT:
            state.backward_weight()
        elif action.kind == INPUT:
            self._give(action, state.backward_input(gradient))
        elif action.kind == BACKWARD:
            self._give(action, state.backward(gradient, self._over_bridges), state.gradients_of_given)
        if action.kind in (BACKWARD, WEIGHT):
            del self._visits[visit]

    def _forward(self, visit: Visit, arrived: Sequence[Tensor]) -> Sequence[Tensor]:
        """The chunk's output, and what it gives over bridges."""
        chunk, micro_batch = self.runner.chunks[visit.chunk], self.micro_batches[visit.micro_batch]
        if self.runner.plan.barriers and self.runner.plan.routes.before[visit] is None:
            arrived = [self.runner.vocabulary.joined(micro_batch, arrived)]
        hidden = arrived[0] if arrived else None
        if not torch.is_grad_enabled():
            return as_tuple(chunk(hidden, micro_batch, *self._over_bridges))
        recomputed = visit in self.runner.recomputed
        bridged = self._over_bridges
        state = self._visits[visit] = VisitState(chunk, hidden, micro_batch, bridged, recomputed=recomputed)
        return state.forward()

    def _spread(self, action: Action, arrived: Sequence[Tensor]) -> Tensor | None:
        """Run this rank's part of an action on embedding or head. Return what other ranks need of it."""
        vocabulary, number = self.runner.vocabulary, action.micro_batch
        micro_batch, share = self.micro_batches[number], self.shares[number]
        if action.kind == EMBED:
            return vocabulary.embed(micro_batch)
        if action.kind == SCATTER:
            vocabulary.scatter(micro_batch, arrived[0])
        elif action.kind == SCORE:
            if micro_batch[1] is None:
                self.loss = self.loss + share * vocabulary.logits(micro_batch, arrived[0])
                return None
            self._passes[number] = HeadPass(vocabulary, micro_batch, share, self.runner.plan.barriers)
            return self._passes[number].score(arrived[0])
        elif action.kind == AGREE and number in self._passes:
            loss, part = self._passes[number].agree(arrived)
            if self.runner.mailbox.rank == self.runner.plan.home[self.runner.plan.paths[number][-1]]:
                self.loss = self.loss + loss
            if not torch.is_grad_enabled():
                del self._passes[number]
            return part
        elif action.kind == TRAIN:
            return self._passes.pop(number).train()
        return None

    def _give(self, action: Action, value: Tensor | None, over_bridges: Sequence[Tensor] = ()) -> None:
        given = self.runner.plan.routes.gives(action)
        bridges = [each for each in given if isinstance(each, Bridged)]
        for bridge, own in zip(bridges, over_bridges, strict=True):
            self._pass_on(bridge, own)
        if value is None:
            return
        shared = [each for each in given if isinstance(each, Shared)]
        if shared:
            self._share(shared, value)
        else:
            for arrival in given:
                if isinstance(arrival, Arrival):
                    self._pass_on(arrival, value)

    def _share(self, shared: Sequence[Shared], value: Tensor) -> None:
        """Send the same value to several ranks, this one included, or to each its part of a gradient."""
        runner, number = self.runner, shared[0].micro_batch
        values = [value] * len(shared)
        if shared[0].kind == "gradient":
            values = runner.vocabulary.parted(self.micro_batches[number], value)
        packet: Tensor | None = None
        for each, own in zip(shared, values, strict=True):
            direction = direction_of(each)
            if not own.numel():
                continue
            if each.kind == "scores":
                packet = own.to(wide(runner.dtype)).contiguous().view(-1).view(torch.uint8)
            elif packet is None or each.kind == "gradient":
                drawn = 0 if self.first_number is None else self.first_number + number
                packet = runner.crossing.pack(direction, own.to(runner.dtype), runner.border(each), drawn)
            if each.target == runner.mailbox.rank:
                # As the others have it.
                kept = packet.view(wide(runner.dtype)) if each.kind == "scores" else self._unpacked(each, packet)
                self._handed[each] = kept
            else:
                length = packet.numel() if each.kind == "scores" else runner.crossing.length(direction, packet)
                runner.mailbox.send(each.target, runner.label(each), packet, length)

    def _pass_on(self, arrival: Arrival | Bridged, value: Tensor) -> None:
        runner = self.runner
        target = runner.target(arrival)
        if target == runner.mailbox.rank:
            self._handed[arrival] = value
            return
        number = 0 if self.first_number is None else self.first_number + arrival.micro_batch
        border = runner.border(arrival)
        if (last := self._last(arrival.kind, border)) is not None:
            keys = self._keys(self.micro_batches[arrival.micro_batch])
            packet = last.pack(runner.crossing, value, border, number, keys)
            # As the other side has it.
            last.unpack(runner.crossing, packet, value.shape, value.dtype, keys)
        else:
            packet = runner.crossing.pack(arrival.kind, value, border, number)
        runner.mailbox.send(target, runner.label(arrival), packet, runner.crossing.length(arrival.kind, packet))
