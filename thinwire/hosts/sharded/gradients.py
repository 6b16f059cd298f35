"""Sends gradients from backward to the ranks that own their mean."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.hosts.dense import check_dense
from thinwire.hosts.sharded.bucket import FlatBucket, LiveUnit, Slot
from thinwire.hosts.sharded.held import HeldGradients
from thinwire.hosts.sharded.seeds import Seeds
from thinwire.hosts.sharded.weights import Weights, moved
from thinwire.layout.buckets import BucketLayout

# Reductions under way where gradients are released.
MOST_IN_FLIGHT = 2
# Elements of a gradient that are looked at again, as torch counts no writes through `.data` or numpy.
NUM_SAMPLES = 16


@dataclass(frozen=True, eq=False)
class SentGradient:
    """A sample of a parameter's gradient when it was sent, to notice later changes. None: it had no gradient."""

    param: nn.Parameter
    grad: Tensor | None
    version: int
    sampled: Tensor | None

    @classmethod
    def of(cls, param: nn.Parameter) -> SentGradient:
        if param.grad is None:
            return cls(param, None, -1, None)
        return cls(param, param.grad, param.grad._version, sample(param.grad))

    @property
    def is_unchanged(self) -> bool:
        if self.param.grad is not self.grad:
            return False
        if self.grad is None or self.sampled is None:
            return True
        return self.grad._version == self.version and torch.equal(sample(self.grad), self.sampled)


def sample(grad: Tensor) -> Tensor:
    """uint8: the bits of a few evenly spread elements.

    They stay on the device, so that backward need not wait for a GPU.
    """
    flat = grad.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // NUM_SAMPLES)].clone().view(torch.uint8)


def crossing_bytes(layout: BucketLayout) -> int:
    """Bytes of a layout's gradients that a rank sends to other nodes; with one node, to other ranks."""
    sent = {level: num for operation, level, num in layout.sent(1, 1) if operation == "gradients"}
    return sent["inter"] or sent["intra"]


class Keeper(Protocol):
    """Keeps mean gradients outside the buckets' own memory, from their reduction to the update.

    norms: what the optimizer needs of a bucket's gradients before the update.
    """

    norms: dict[FlatBucket, list[float]]

    def leave(self, bucket: FlatBucket) -> None:
        """Take the gradients of a bucket, whose `shard_grad` has no memory from then on."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply all of them by a factor."""
        ...

    def end(self) -> None:
        """Begin a new step."""
        ...


class Gradients:
    """Reduces each unit's gradients when backward has written them to `.grad`.

    A module's gradients are sent after every backward and removed from `.grad`. A bucket's are summed in `.grad` until
    the step's last backward and stay there, unless they are released to save memory. pace: says when they leave; None:
    as soon as they are ready. keeper: takes mean gradients away; None: they stay in `shard_grad`.
    """

    def __init__(self, units: Sequence[LiveUnit], weights: Weights, seeds: Seeds, *, releases: bool = False) -> None:
        self.units, self.weights, self.seeds, self.releases = units, weights, seeds, releases
        self.used: set[str] = set()
        self._accumulating = False
        self._num_launched = 0
        self._sent: list[SentGradient] = []
        self._reducing: dict[FlatBucket, Future[None]] = {}
        self._flying: deque[tuple[FlatBucket, bool]] = deque()
        self.keeper: Keeper | None = None
        self.pace: HeldGradients | None = None
        for unit in units:
            for slot in unit.slots:
                if slot.param.dtype != torch.float32:
                    slot.param.grad_dtype = torch.float32
                slot.param.register_post_accumulate_grad_hook(partial(self._mark_ready, unit, slot))

    @property
    def accumulates(self) -> bool:
        """Whether a backward only accumulates now."""
        return self._accumulating

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the first one outside sends the sum."""
        self._accumulating, before = True, self._accumulating
        try:
            yield
        finally:
            self._accumulating = before

    def _mark_ready(self, unit: LiveUnit, slot: Slot, param: Tensor) -> None:
        check_dense(slot.name, param.grad)
        is_modules = unit.unit.module is not None
        if self._accumulating and not is_modules:
            return
        if unit.is_sent:
            raise RuntimeError(
                f"a second backward reached {slot.name!r} after its gradient was sent: wrap every backward but the "
                "last of a step in `with optimizer.no_sync():`, and call optimizer.step() after the last"
            )
        unit.ready.add(slot.name)
        if not is_modules:
            self._launch_ready()
        elif len(unit.ready) == len(unit.slots):
            self._send(unit, last=not self._accumulating)

    def _launch_ready(self) -> None:
        # All ranks launch in the same order, the reverse of forward, whatever order gradients come in.
        while self._num_launched < len(self.units):
            following = self.units[-1 - self._num_launched]
            if len(following.ready) < len(following.slots):
                break
            self._num_launched += 1
            self._send(following, last=True)

    def _send(self, unit: LiveUnit, *, last: bool) -> None:
        self.weights.is_done_with(unit)
        self.used.update(slot.name for slot in unit.slots if slot.param.grad is not None)
        for bucket in unit.buckets:
            grads = [slot.param.grad for slot in bucket.slots]
            if unit.unit.module is None and not self.releases:
                self._sent += [SentGradient.of(slot.param) for slot in bucket.slots]
            else:
                for slot in bucket.slots:
                    slot.param.grad = None
            # Sums are taken in the order of micro-batches.
            if bucket in self._reducing:
                bucket.comm.wait(self._reducing[bucket])
            seed, first = self.seeds.gradients(bucket.layout, unit.num_sent), unit.num_sent == 0
            job = partial(bucket.reduce, grads=grads, seed=seed, first=first, last=last)
            if self.pace is not None:
                self.pace.add(crossing_bytes(bucket.layout), partial(self._start, bucket, job))
            else:
                self._start(bucket, job)
            if self.releases or self.keeper is not None:
                del grads
                self._flying.append((bucket, last))
                if self.pace is None:
                    self._wait_for_earlier(MOST_IN_FLIGHT)
        unit.num_sent += 1
        unit.ready.clear()
        unit.is_sent = last

    def _start(self, bucket: FlatBucket, job: Callable[[Link], Rounds[None]]) -> None:
        self._reducing[bucket] = bucket.comm.submit(job)

    def _wait_for_earlier(self, most: int) -> None:
        """Limit the reductions under way: on a slow link, backward would otherwise fill the memory with gradients."""
        while len(self._flying) > most:
            earlier, is_last = self._flying.popleft()
            earlier.comm.wait(self._reducing[earlier])
            if self.keeper is not None and is_last:
                self.keeper.leave(earlier)

    def finish(self) -> None:
        """Wait until the mean gradients have arrived."""
        for unit in reversed(self.units):
            if not unit.is_sent:
                self._send(unit, last=True)
        self._num_launched = len(self.units)
        if self.pace is not None:
            self.pace.finish()
        self._wait_for_earlier(0)
        for bucket, future in self._reducing.items():
            bucket.comm.wait(future)

    def refuse_changed(self) -> None:
        """Raise RuntimeError if gradients were changed after they were sent."""
        if not all(sent.is_unchanged for sent in self._sent):
            raise RuntimeError(
                "gradients were changed after they were sent, which has no effect on the step: clip with "
                "optimizer.clip_grad_norm_(max_norm), not torch.nn.utils; scale the loss instead of gradients"
            )

    def refuse_replaced(self, model: nn.Module) -> None:
        """Raise RuntimeError if the model computes with other parameters than those that are trained."""
        unused = [slot for unit in self.units for slot in unit.slots if slot.name not in self.used]
        if unused:
            # The dictionaries of guarded modules would wait for weights.
            held = {id(param) for module in model.modules() for param in dict.values(module._parameters)}
            for slot in unused:
                if id(slot.param) not in held:
                    raise moved(slot)

    def reset(self) -> None:
        """Begin a new step."""
        self.used.clear()
        self._sent.clear()
        self._reducing.clear()
        self._flying.clear()
        if self.keeper is not None:
            self.keeper.end()
        self._num_launched = 0
        for unit in self.units:
            unit.ready.clear()
            unit.num_sent, unit.is_sent = 0, False
