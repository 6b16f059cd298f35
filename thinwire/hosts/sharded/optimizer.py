"""ZeRO-1/2: every rank holds the whole model, its own slice of the fp32 masters and of the optimizer's state."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.checkpoint import Snapshot, Source
from thinwire.codecs import derive_seed
from thinwire.collectives import Communicator, Meter
from thinwire.collectives.gather import all_gather_packets
from thinwire.collectives.link import Link
from thinwire.collectives.reduce import reduce_scatter
from thinwire.collectives.rounds import Rounds
from thinwire.hosts.ranks import Ranks
from thinwire.hosts.sharded.guard import guard
from thinwire.layout.buckets import Bucket, SentGradient, Slot
from thinwire.layout.formats import Strategy, describe_formats
from thinwire.layout.pieces import shard_param_groups
from thinwire.state.agreement import Agreed, Word
from thinwire.state.clipping import Clipping
from thinwire.state.portable import REPLICA, Held, add_optimizer, restore_optimizer
from thinwire.state.replicas import check_layout, compare_replicas, fingerprint

log = logging.getLogger("thinwire")
GRADIENTS, WEIGHTS = 0, 1


class ZeroOptimizer(torch.optim.Optimizer):
    """The user's optimizer on this rank's shards, and the communication around it; made by `thinwire.zero`.

    One step, for the shard p that rank r owns, with gradient g of this rank, C_g and C_w the strategy's codecs:
        backward        g_p = (1/P) sum_ranks C_g(g)_p       bucket by bucket, while backward goes on
        step            master_p = optimizer(master_p, g_p)
        gather          replica += C_w(master - replica)     (differences)  or  replica = C_w(master)
    All ranks add the same decoded packets, so replicas stay equal bit for bit. What C_w loses stays in
    master - replica and comes back in the next difference.

    With error feedback, what C_g loses is added to the next gradient on the hop that lost it.

    A step whose gradients hold an infinity or NaN on any rank is skipped on all ranks, with a warning. `param_groups`
    and `state` are those of the user's optimizer, over flat fp32 pieces of the parameters that this rank owns.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        strategy: Strategy,
        buckets: list[Bucket],
        ranks: Ranks,
        *,
        overlap: bool,
        seed: int,
        notes: list[tuple[str, str, str]],
    ) -> None:
        self.model = model
        self.inner = inner
        self.strategy = strategy
        self.buckets = buckets
        self.ranks = ranks
        self.comm = ranks.comm
        self.overlap = overlap
        self.seed = seed
        self.steps = 0
        self.skipped_steps = 0
        self._clipping = Clipping()
        self.stop_requested = False
        self.mean_loss = float("nan")
        self._notes = notes
        self._comms = list(dict.fromkeys([self.comm, *(bucket.comm for bucket in buckets)]))
        self._slots = [slot for bucket in buckets for slot in bucket.slots]
        self._frozen = [p for group in inner.param_groups for p in group["params"] if not p.requires_grad]
        self._complete = False
        self._accumulating = False
        self._launched = 0
        self._grad_norm: Tensor | None = None
        self._used: set[int] = set()
        self._stop = False
        self._loss = float("nan")
        self._pieces = shard_param_groups(inner, buckets)
        # The base class gives step hooks and profiling; params and state stay the inner optimizer's.
        super().__init__([torch.zeros(1)], inner.defaults)
        self._adopt_inner()
        for slot in self._slots:
            if slot.param.dtype != torch.float32:
                slot.param.grad_dtype = torch.float32
            slot.param.register_post_accumulate_grad_hook(self._grad_hook(slot))
        for bucket in buckets:
            bucket.live_fingerprint = fingerprint(bucket.live_shard)
        if overlap:
            for module, owned in self._owned_buckets().items():
                guard(module, partial(self._await_all, owned))
        self._complete = True

    # ---------------------------------------------------------------- the user's side

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Reduce what is left, update this rank's shards, send the weights; a collective over all ranks.

        Raises RuntimeError if gradients were changed after they were sent, PeerLostError if a rank is missing.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._finish_reduction()
        assert self._grad_norm is not None
        if bool(torch.isfinite(self._grad_norm)):
            self._update_shards()
            self._send_weights()
        else:
            self._skip()
        self._reset()
        self.steps += 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the model's parameters."""
        for slot in self._slots:
            if set_to_none:
                slot.param.grad = None
            elif slot.param.grad is not None:
                slot.param.grad.zero_()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate, in fp32; the first one outside sends the sum."""
        self._accumulating, before = True, self._accumulating
        try:
            yield
        finally:
            self._accumulating = before

    def reduce(self) -> Tensor:
        """Wait for the mean gradient, and agree with all ranks on the step; the gradient's norm (fp64 scalar)."""
        self._finish_reduction()
        assert self._grad_norm is not None
        return self._grad_norm

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the mean gradient to a global 2-norm of at most `max_norm`; returns the norm before (fp64 scalar).

        What error feedback owes follows, see Clipping. Call it between backward and step, on all ranks.
        torch.nn.utils.clip_grad_norm_ sees only this rank's gradients, which have been sent already: step refuses to go
        on after it.
        """
        norm = self.reduce()
        scale = max_norm / (float(norm) + 1e-6)
        if scale < 1.0:
            for bucket in self.buckets:
                bucket.shard_grad.mul_(scale)
            self._grad_norm = norm * scale
        share = self._clipping.note(float(norm), max_norm).share
        if share < 1.0:
            for error in (error for bucket in self.buckets for error in bucket.errors):
                error.mul_(share)
        return norm

    def synchronize(self) -> None:
        """Return when all weights have arrived; needed with overlap=True before weights are read outside forward."""
        self._await_all(self.buckets)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the layout is fixed when zero() is called. Raises RuntimeError."""
        if self._complete:
            raise RuntimeError("parameters can't be added to a sharded optimizer: add them before calling zero()")
        super().add_param_group(param_group)

    def request_stop(self) -> None:
        """Ask all ranks to stop; after the next step, `stop_requested` is true on every one of them."""
        self._stop = True

    def note_loss(self, loss: float) -> None:
        """Say this rank's loss; with the next step, `mean_loss` is the mean over ranks, at no message of its own."""
        self._loss = loss

    def all_mean(self, value: float) -> float:
        """The mean of a number over the ranks, the same bits on all; a collective."""
        values = self.comm.wait(self.comm.all_gather_exact(torch.tensor([value], dtype=torch.float64)))
        return float(values.mean())

    @torch.no_grad()
    def check_replicas(self) -> None:
        """Compare the weights of all ranks bit for bit; raises ReplicaError that names the ranks; a collective."""
        self.synchronize()
        for comm in self._comms:
            compare_replicas(comm, (bucket.live for bucket in self.buckets if bucket.comm is comm), self.steps)

    @property
    def meter(self) -> Meter:
        """Bytes and seconds of the main group."""
        return self.comm.meter

    @property
    def bytes_per_step(self) -> int:
        """Payload this rank sends in one step: gradients, weights, agreement; the most it can be, if entropy-coded."""
        messages = sum((self._speaks_on(comm).world_size - 1) * self._word(comm).pack().numel() for comm in self._comms)
        return messages + sum(sum(bucket.sent_bytes().values()) for bucket in self.buckets)

    @property
    def uncompressed_bytes_per_step(self) -> float:
        """What fp32 gradients and fp32 weights would need: 8 (P-1)/P bytes per parameter, without padding."""
        return sum(8 * s.param.numel() * (1 - 1 / s.bucket.comm.world_size) for s in self._slots)

    def masters(self, names: Collection[str]) -> dict[str, Tensor]:
        """Copies of the fp32 masters, whole, by parameter name; between steps, a collective."""
        found: dict[str, Tensor] = {}
        for bucket in self._holding(names):
            whole = bucket.comm.wait(bucket.comm.all_gather_exact(bucket.master)).view(-1)
            found |= {slot.name: slot.view(whole).clone() for slot in bucket.slots if slot.name in names}
        return found

    @torch.no_grad()
    def adopt_weights(self, values: Mapping[str, Tensor]) -> None:
        """Take whole weights, the same bits on all ranks, as masters and replicas; between steps, a collective."""
        self.synchronize()
        for bucket in self._holding(values):
            for slot in (slot for slot in bucket.slots if slot.name in values):
                value = values[slot.name]
                slot.view(bucket.live).copy_(value)
                start, end = bucket.shard_range(slot)
                first = start + bucket.shard_start - slot.start
                bucket.master[start:end].copy_(value.flatten()[first : first + end - start])
            bucket.live_fingerprint = fingerprint(bucket.live_shard)

    def handover_bytes(self, names: Collection[str]) -> tuple[int, int]:
        """Payload this rank sends in `masters` and in `adopt_weights` for these parameters."""
        held = self._holding(names)
        return sum(4 * bucket.shard_numel * (bucket.comm.world_size - 1) for bucket in held), 0

    def _holding(self, names: Collection[str]) -> list[Bucket]:
        """The buckets in which any of these parameters lies."""
        return [bucket for bucket in self.buckets if any(slot.name in names for slot in bucket.slots)]

    def describe(self) -> list[tuple[str, str, str]]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        sent, plain = self.bytes_per_step / 1e6, self.uncompressed_bytes_per_step / 1e6
        varies = any(codec.has_variable_length for bucket in self.buckets for codec in bucket.wire.codecs)
        bound = "at most " if varies else ""
        promised = ("sent per rank and step", f"{bound}{sent:.3f} MB", f"{plain:.3f} MB in fp32")
        return [*_describe_strategy(self.strategy, self.buckets, self.comm), promised, *self._notes]

    def close(self) -> None:
        """Wait for all communication and give the process groups back."""
        self.synchronize()
        for comm in dict.fromkeys([*self._comms, self.ranks.everyone]):
            comm.close()

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of all that is needed to go on bit for bit on the same world: tensors, numbers, strings.

        As with every torch optimizer the tensors are the live ones: save or copy them before the next step.
        """
        self.synchronize()
        return {
            "inner": self.inner.state_dict(),
            "masters": [bucket.master for bucket in self.buckets],
            # Copies: torch.save would write the whole replica for a view of it.
            "replica_shards": [bucket.live_shard.clone() for bucket in self.buckets],
            "errors": [bucket.errors for bucket in self.buckets],
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "clipped": self._clipping.last,
            "seed": self.seed,
            "layout": self._layout(),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what state_dict gave, the model's weights included; a collective over all ranks.

        Raises ConfigError where the state belongs to another rank, world, model or strategy.
        """
        check_layout(self._layout(), state_dict["layout"])
        self.synchronize()
        self.inner.load_state_dict(state_dict["inner"])
        self._adopt_inner()
        self.steps, self.skipped_steps = state_dict["steps"], state_dict["skipped_steps"]
        self._clipping.last = state_dict["clipped"]
        self.seed = state_dict["seed"]
        for bucket, master, shard in zip(
            self.buckets, state_dict["masters"], state_dict["replica_shards"], strict=True
        ):
            bucket.master.copy_(master)
            shards = bucket.comm.wait(bucket.comm.all_gather_exact(shard.to(bucket.dtype)))
            bucket.live.copy_(shards.view(-1))
            bucket.live_fingerprint = fingerprint(bucket.live_shard)
        for bucket, saved in zip(self.buckets, state_dict["errors"], strict=True):
            for error, value in zip(bucket.errors, saved, strict=True):
                error.copy_(value)
        self._reset()

    def snapshot(self) -> Snapshot:
        """This rank's state between two steps, in pieces that any layout can take: views of the live tensors."""
        self.synchronize()
        common = {
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "clipped": self._clipping.last,
            "seed": self.seed,
            "lossy_weights": False,
        }
        debts = [debt for number, bucket in enumerate(self.buckets) for debt in bucket.debts(f"errors/{number}")]
        own = {"errors": [bucket.errors for bucket in self.buckets]}
        snapshot = Snapshot(self._layout(), own=own, common=common, debts=debts)
        for slot, _, start, end in self._pieces:
            if slot.bucket.has_replica:
                replica = slot.bucket.live_shard[start:end]
                snapshot.pieces[f"{REPLICA}/{slot.name}"] = slot.held(replica, start).piece()
        return add_optimizer(snapshot, self.inner, self._held())

    @torch.no_grad()
    def restore(self, source: Source) -> None:
        """Go on from a checkpoint of any layout; from the same, bit for bit. A collective over all ranks."""
        self.synchronize()
        same = source.fits(self._layout())
        restore_optimizer(source, self.inner, self._held())
        self._adopt_inner()
        self.steps, self.skipped_steps = source.common["steps"], source.common["skipped_steps"]
        self.seed = source.common.get("seed", self.seed)
        self._clipping.last = source.common.get("clipped", 1.0)
        self._restore_replicas(source)
        if same:
            for bucket, saved in zip(self.buckets, source.own("errors"), strict=True):
                for error, value in zip(bucket.errors, saved, strict=True):
                    error.copy_(value)
        else:
            for bucket in self.buckets:
                bucket.owe(source.owed)
        self._reset()

    def _restore_replicas(self, source: Source) -> None:
        """Read what the weights were that computed, or take the masters; then bring them to all ranks."""
        has_replica = [bucket.has_replica for bucket in self.buckets]
        is_there = source.has_any(REPLICA)
        for bucket in self.buckets:
            bucket.live_shard.copy_(bucket.master)
        if any(has_replica) and is_there:
            pieces = [(slot, slot.bucket.live_shard[start:end], start, end) for slot, _, start, end in self._pieces]
            source.read(
                {
                    f"{REPLICA}/{slot.name}": slot.held(values, start).piece()
                    for slot, values, start, end in pieces
                    if source.has(f"{REPLICA}/{slot.name}")
                }
            )
        elif any(has_replica):
            source.note("replicas that weight differences refer to", "transformed", "rebuilt from the weights")
        elif is_there:
            source.drop_replica("weights travel whole and exactly here")
        source.is_exact = source.is_exact and not source.common["lossy_weights"]
        for bucket in self.buckets:
            shards = bucket.comm.wait(bucket.comm.all_gather_exact(bucket.live_shard.clone()))
            bucket.live.copy_(shards.view(-1))
            bucket.live_fingerprint = fingerprint(bucket.live_shard)

    def _held(self) -> dict[str, Held]:
        return {slot.name: slot.held(piece, start) for slot, piece, start, _ in self._pieces}

    def _layout(self) -> dict[str, Any]:
        shapes = hashlib.sha256(
            repr([(s.name, tuple(s.param.shape), str(s.param.dtype)) for s in self._slots]).encode()
        )
        return {
            "rank": self.comm.rank,
            "world_size": self.comm.world_size,
            "local_size": self.comm.topology.local_size,
            "strategy": repr((self.strategy.matrix(), self.strategy.vector())),
            "parameters": shapes.hexdigest()[:16],
            "bucket_numels": [bucket.numel for bucket in self.buckets],
        }

    def _adopt_inner(self) -> None:
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state
        self.defaults = self.inner.defaults

    # ---------------------------------------------------------------- gradients

    def _grad_hook(self, slot: Slot) -> Callable[[Tensor], None]:
        def hook(param: Tensor) -> None:
            if not self._accumulating:
                self._mark_ready(slot)

        return hook

    def _mark_ready(self, slot: Slot) -> None:
        bucket = slot.bucket
        if bucket.reducing is not None:
            raise RuntimeError(
                f"a second backward reached {slot.name!r} after its gradient was sent: wrap every backward but the "
                "last of a step in `with optimizer.no_sync():`, and call optimizer.step() after the last"
            )
        bucket.ready.add(slot.index)
        # All ranks launch in the same order, the reverse of forward, whatever order gradients come in.
        while self._launched < len(self.buckets):
            following = self.buckets[-1 - self._launched]
            if len(following.ready) < len(following.slots):
                break
            self._launch_reduction(following)

    def _launch_reduction(self, bucket: Bucket) -> None:
        self._launched += 1
        bucket.sent = [SentGradient.of(slot.param) for slot in bucket.slots]
        seed = derive_seed(self.seed, self.steps, bucket.stream, GRADIENTS)

        def job(link: Link) -> Rounds[None]:
            wire = bucket.wire
            gradient = bucket.flat_gradient(link, [sent.grad for sent in bucket.sent])
            total = yield from reduce_scatter(
                link, gradient, wire.intra, wire.inter, seed=seed, counter=bucket.first_counter,
                operation="gradients", lost=bucket.lost,
            )  # fmt: skip
            torch.mul(total, 1.0 / bucket.comm.world_size, out=bucket.shard_grad)

        bucket.reducing = bucket.comm.submit(job)

    def _finish_reduction(self) -> None:
        """Wait for all gradients and agree on the norm, on who has gradients, and on stopping."""
        if self._grad_norm is not None:
            return
        self._refuse_changed_parameters()
        while self._launched < len(self.buckets):
            self._launch_reduction(self.buckets[-1 - self._launched])
        for bucket in reversed(self.buckets):
            assert bucket.reducing is not None
            bucket.comm.wait(bucket.reducing)
        self._agree()
        self._refuse_touched()

    def _slots_of(self, comm: Communicator) -> list[Slot]:
        return [slot for slot in self._slots if slot.bucket.comm is comm]

    def _speaks_on(self, comm: Communicator) -> Communicator:
        """Where the word on a group's parameters is said: the main group's on the whole mesh."""
        return self.ranks.everyone if comm is self.comm else comm

    def _word(self, comm: Communicator) -> Word:
        """This rank's word on the step; the squares, of all parameters, are the main group's."""
        squares = self._squares() if comm is self.comm and self._launched else 0.0
        return Word(squares, self._loss, self._stop, [slot.param.grad is not None for slot in self._slots_of(comm)])

    def _squares(self) -> float:
        """The sum of squares of those elements of this rank's slices of the mean gradient that it counts."""
        total = torch.zeros(1, dtype=torch.float64)
        for bucket in self.buckets:
            ranges = [bucket.shard_range(slot) for slot in bucket.slots if self.ranks.counts(slot.name)]
            is_whole = len(ranges) == len(bucket.slots)
            for start, end in [(0, bucket.shard_numel)] if is_whole else ranges:
                total += torch.linalg.vector_norm(bucket.shard_grad[start:end], dtype=torch.float64).cpu() ** 2
        return float(total)

    def _agree(self) -> None:
        for comm in self._comms:
            speaks_on, word, slots = self._speaks_on(comm), self._word(comm), self._slots_of(comm)
            agreed = Agreed.of(speaks_on.wait(speaks_on.all_gather_exact(word.pack())), len(slots))
            self._used.update(slot.index for slot, used in zip(slots, agreed.used, strict=True) if used)
            if comm is self.comm:
                self._grad_norm = torch.tensor(agreed.norm, dtype=torch.float64)
                self.mean_loss = agreed.loss
                self.stop_requested = self.stop_requested or agreed.stop

    def _refuse_changed_parameters(self) -> None:
        for slot in self._slots:
            if slot.param.data_ptr() != slot.view(slot.bucket.live).data_ptr():
                raise RuntimeError(
                    f"{slot.name!r} no longer lies where zero() put it, so training would not reach it: convert, move "
                    "or load with assign=True before calling zero(), and copy new values in place after"
                )
        if any(param.requires_grad for param in self._frozen):
            raise RuntimeError("a parameter was frozen when zero() was called and is not now: call zero() again")

    def _refuse_touched(self) -> None:
        sent = ((slot.param, as_sent) for b in self.buckets for slot, as_sent in zip(b.slots, b.sent, strict=True))
        if not all(as_sent.is_still_that_of(param) for param, as_sent in sent):
            raise RuntimeError(
                "gradients were changed after they were sent, which has no effect on the step: clip with "
                "optimizer.clip_grad_norm_(max_norm), not torch.nn.utils; scale the loss instead of gradients"
            )

    # ---------------------------------------------------------------- weights

    def _update_shards(self) -> None:
        self._take_edited_weights()
        for slot, piece, start, end in self._pieces:
            piece.grad = slot.bucket.shard_grad[start:end] if slot.index in self._used else None
        self.inner.step()
        for _, piece, _, _ in self._pieces:
            piece.grad = None

    def _take_edited_weights(self) -> None:
        """Weights that were changed from outside since the last step, say by loading them, become the masters."""
        for bucket in self.buckets:
            self._await_weights(bucket)
            if fingerprint(bucket.live_shard) != bucket.live_fingerprint:
                log.warning(
                    "thinwire: rank %d: weights between %r and %r were changed outside the optimizer; "
                    "their new values are taken as the fp32 masters",
                    self.comm.global_ranks[self.comm.rank],
                    bucket.slots[0].name,
                    bucket.slots[-1].name,
                )
                bucket.master.copy_(bucket.live_shard)

    def _send_weights(self) -> None:
        for bucket in self.buckets:
            seed = derive_seed(self.seed, self.steps, bucket.stream, WEIGHTS)
            bucket.gathering = bucket.comm.submit(self._gather_job(bucket, seed))
        if not self.overlap:
            self._await_all(self.buckets)

    @staticmethod
    def _gather_job(bucket: Bucket, seed: int) -> Callable[[Link], Rounds[None]]:
        def job(link: Link) -> Rounds[None]:
            grid, codec, n = link.topology, bucket.wire.weights, bucket.shard_numel
            if grid.world_size == 1:
                bucket.live.copy_(bucket.master)
                bucket.live_fingerprint = fingerprint(bucket.live_shard)
                return
            message, device = bucket.master, bucket.live.device
            with link.timed("encode_s", "weights"):
                if bucket.wire.differences:
                    message = link.scratch("difference", n, dtype=torch.float32, device=device)
                    torch.sub(bucket.master, bucket.live_shard, out=message)
                counter = bucket.first_counter + bucket.shard_start
                packet = link.scratch("weights", codec.packet_bytes(n), device=device)
                codec.encode(message, seed=seed, counter=counter, out=packet)
            gathered = yield from all_gather_packets(link, packet, "weights", codec.length)
            with link.timed("decode_s", "weights"):
                for rank in range(grid.world_size):
                    shard = bucket.live[rank * n : (rank + 1) * n]
                    _apply(bucket, gathered[grid.local_rank(rank), grid.node(rank)], shard, link)
            bucket.live_fingerprint = fingerprint(bucket.live_shard)

        return job

    def _await_weights(self, bucket: Bucket) -> None:
        future: Future | None = bucket.gathering
        if future is not None:
            bucket.comm.wait(future)
            bucket.gathering = None

    def _await_all(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            self._await_weights(bucket)

    def _owned_buckets(self) -> dict[nn.Module, list[Bucket]]:
        """The buckets in which each module's own parameters lie."""
        bucket_of = {id(slot.param): slot.bucket for slot in self._slots}
        owned: dict[nn.Module, list[Bucket]] = {}
        for module in self.model.modules():
            buckets = [bucket_of[id(p)] for p in module.parameters(recurse=False) if id(p) in bucket_of]
            if buckets:
                owned[module] = list(dict.fromkeys(buckets))
        return owned

    # ---------------------------------------------------------------- ends of a step

    def _skip(self) -> None:
        self.skipped_steps += 1
        for error in (error for bucket in self.buckets for error in bucket.errors):
            torch.nan_to_num(error, nan=0.0, posinf=0.0, neginf=0.0, out=error)
        bad = [
            slot.name
            for slot in self._slots
            if slot.param.grad is not None and not bool(torch.isfinite(slot.param.grad).all())
        ]
        if bad:
            log.warning(
                "thinwire: rank %d: non-finite gradient in %s",
                self.comm.global_ranks[self.comm.rank],
                _few(bad),
            )
        if self.comm.rank == 0:
            log.warning("thinwire: step %d skipped on all ranks: a gradient is not finite", self.steps)

    def _reset(self) -> None:
        self._grad_norm = None
        self._used.clear()
        self._launched = 0
        for bucket in self.buckets:
            bucket.ready.clear()
            bucket.sent.clear()
            bucket.reducing = None


def _apply(bucket: Bucket, packet: Tensor, shard: Tensor, link: Link) -> None:
    """Add the decoded difference to a slice of the replica, in fp32; or put the decoded weights in its place."""
    codec, exact = bucket.wire.weights, shard.dtype == torch.float32
    if exact and bucket.wire.differences:
        codec.decode_add(packet, shard)
    elif exact:
        codec.decode(packet, shard.numel(), out=shard)
    else:
        values = link.scratch("decoded", shard.numel(), dtype=torch.float32, device=shard.device)
        codec.decode(packet, shard.numel(), out=values)
        shard.copy_(values.add_(shard) if bucket.wire.differences else values)


def _describe_strategy(strategy: Strategy, buckets: list[Bucket], comm: Communicator) -> list[tuple[str, str, str]]:
    grid, rows = comm.topology, []
    rows.append((f"strategy {strategy.name}", strategy.name, ""))
    rows.append(("topology", str(grid), comm.topology_reason))
    if grid.world_size == 1:
        return [*rows, ("compression", "none", "a group of one sends nothing and stays exact")]
    rows += describe_formats(strategy, grid)
    for kind, wire in {"matrices": strategy.matrix(), "norms and biases": strategy.vector()}.items():
        if wire.feedback:
            held = sum(error.nbytes for bucket in buckets if bucket.wire == wire for error in bucket.errors)
            rows.append((f"{kind}: error feedback", "on", f"{held / 1e6:.3f} MB on this rank"))
    kernels = {codec.backend(bucket.live.device) for bucket in buckets for codec in bucket.wire.codecs}
    rows.append(("codec kernels", ", ".join(sorted(kernels)), f"on {buckets[0].live.device}"))
    padded, true = sum(b.numel for b in buckets), sum(s.param.numel() for b in buckets for s in b.slots)
    rows.append(("buckets", f"{len(buckets)}, {true:,} parameters", f"{padded / max(true, 1) - 1:.2%} padding"))
    return rows


def _few(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
