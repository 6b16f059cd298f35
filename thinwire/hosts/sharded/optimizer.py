"""The user's optimizer on this rank's shards, and the communication around it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thinwire import _compat
from thinwire.checkpoint import Snapshot, Source
from thinwire.collectives import Communicator
from thinwire.errors import ConfigError
from thinwire.hosts.interface import ParallelOptimizer
from thinwire.hosts.ranks import Ranks
from thinwire.hosts.sharded.bucket import FlatBucket, LiveUnit, Slot
from thinwire.hosts.sharded.describe import rows_on_messages
from thinwire.hosts.sharded.gradients import Gradients
from thinwire.hosts.sharded.guard import guard
from thinwire.hosts.sharded.held import HeldGradients
from thinwire.hosts.sharded.memory import Memory
from thinwire.hosts.sharded.norms import Norms
from thinwire.hosts.sharded.owned import Owned, States, StatesInMemory
from thinwire.hosts.sharded.passing import PassingWeights, set_whole
from thinwire.hosts.sharded.seeds import Seeds
from thinwire.hosts.sharded.state import ShardedState, layout_of
from thinwire.hosts.sharded.weights import Weights
from thinwire.hosts.sums import JoinedSums, looking_across
from thinwire.layout.buckets import BucketLayout, Unit, sent_by
from thinwire.methods.interface import Cuts
from thinwire.methods.sharded import ShardedMethod, cut_by
from thinwire.methods.sums import ParamGroups, parts_of
from thinwire.optim import SummingOptimizer
from thinwire.optim.sums import Bring, PagedRecords
from thinwire.state.agreement import StepStatus
from thinwire.state.clipping import Clipping
from thinwire.state.replicas import compare_replicas
from thinwire.table import Row, sent_row

if TYPE_CHECKING:
    from thinwire.hosts.offload.at_once import StepsAtOnce
    from thinwire.hosts.offload.residence import Residence
    from thinwire.hosts.offload.tiling import TileMap

log = logging.getLogger("thinwire")


class ShardedOptimizer(_compat.WithoutScaler, ParallelOptimizer, torch.optim.Optimizer):
    """The user's optimizer on this rank's shards, and the communication around it; made by `thinwire.zero`.

    One step, for the shard p that rank r owns, with gradient g of this rank, C_g and C_w the method's codecs:
        backward        g_p = (1/P) sum_ranks C_g(g)_p       unit by unit, while backward goes on; a parameter with a
                                                             group of its own is summed over that group
        step            master_p = optimizer(master_p, g_p)
        gather          weights += C_w(master - weights)     (differences)  or  weights = C_w(master)
    All ranks add the same decoded packets, so replicas stay equal bit for bit. What C_w loses stays in
    master - weights and is part of the next difference.

    With error feedback, what C_g loses is added to the next gradient on the hop that lost it. The method's levels say
    over which ranks weights and gradients are cut, see Levels.

    If any rank's gradient has an infinity or NaN, all ranks skip the step, with a warning. `param_groups` and `state`
    are those of the user's optimizer, over flat fp32 pieces of the parameters that this rank owns.
    """

    overlaps = True
    _at_once: StepsAtOnce | None = None

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        method: ShardedMethod,
        units: Sequence[Unit],
        ranks: Ranks,
        comms: Sequence[Communicator],
        *,
        overlap: bool,
        seed: int,
        notes: list[Row],
        residence: Residence | None = None,
        initial: Callable[[str], Tensor] | None = None,
        tiling: TileMap | None = None,
    ) -> None:
        """Move the model's parameters into buckets.

        comms: the groups to which the numbers in layouts refer; the first has all ranks. residence: the disk; None:
        everything lies in memory. initial: gives the first values of a parameter that has no memory yet. tiling: where
        parameters lie in the matrices of checkpoints, if those are cut.
        """
        params = dict(model.named_parameters())
        self.model, self.inner, self.method, self.overlap = model, inner, method, overlap
        self.ranks, self.comm, self._comms, self._notes = ranks, ranks.comm, comms, notes
        self.tiling = tiling
        has_masters = residence is None or not residence.holds_states

        def made(layout: BucketLayout) -> FlatBucket:
            if initial is not None:
                for name in layout.names:
                    params[name].data = initial(name)
            bucket = FlatBucket(layout, params, comms[layout.group], ranks.comm.world_size, has_masters)
            if initial is not None and layout.levels.weights_over > 1:
                # No rank ever has all of them.
                set_whole(bucket, False)
            if residence is not None:
                residence.take(bucket)
            return bucket

        self.units = [LiveUnit(unit, [made(layout) for layout in unit.layouts]) for unit in units]
        self.buckets = [bucket for unit in self.units for bucket in unit.buckets]
        self._slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self._frozen = [p for group in inner.param_groups for p in group["params"] if not p.requires_grad]
        self._clipping = Clipping()
        self._seeds = Seeds(seed)
        across = looking_across(inner, {slot.name: slot.param for slot in self._slots})
        self.states: States
        self._sums = None
        if has_masters:
            self.states = held = StatesInMemory(inner, self.units)
            if isinstance(inner, SummingOptimizer):
                self._sums = self._join(inner, held.owned, across)
        self.memory = Memory(method, self.buckets)
        # The base class gives step hooks and profiling; params and state stay the inner optimizer's.
        self._complete = False
        super().__init__([torch.zeros(1)], inner.defaults)
        self._adopt_inner()
        self._complete = True
        is_cut = any(bucket.layout.levels.weights_over > 1 for bucket in self.buckets)
        self.weights_pass = residence is not None and residence.replicas is not None
        self._weights = self._made_weights(residence, is_cut=is_cut)
        self.weights_stay_cut = not self._weights.keeps
        comes_and_goes = is_cut or self.weights_pass
        if residence is not None:
            self.tiers = residence.meter
            if not has_masters and isinstance(inner, SummingOptimizer):
                cuts = [(comm.rank, own) for comm, own in self._cuts(across)]
                parts = {name: part for rank, own in cuts for name, part in parts_of(own, rank, across).items()}
                layout = layout_of(method, self.comm, self.buckets)
                self.states = pieces = residence.pieces(inner, self._weights, parts, layout, seed)
                self._sums = self._join(inner, pieces.owned, across, pieces.bring, pieces.paged)
            elif not has_masters:
                self.states = residence.states(inner, self._weights, layout_of(method, self.comm, self.buckets), seed)
        self._saved = ShardedState(
            method, self.states, self._weights, self.comm, self.buckets, self.memory.state, tiling
        )
        releases = self.weights_pass or (residence is not None and residence.steps_at_once)
        self._gradients = Gradients(self.units, self._weights, self._seeds, releases=releases)
        self._norms = Norms(ranks, self.buckets, self._gradients)
        if overlap or comes_and_goes:
            self._guard_weights()
        self._residence = residence
        if residence is not None:
            self._join_residence(residence, across)

    def _made_weights(self, residence: Residence | None, *, is_cut: bool) -> Weights:
        """What brings weights: from the disk, from the ranks over which they are cut, or from the masters alone."""
        if residence is not None and residence.replicas is not None:
            return residence.weights(self.units, self._seeds, self.model)
        if is_cut:
            keeps = residence is None or residence.options.memory is None
            return PassingWeights(self.units, self._seeds, self.model, overlap=self.overlap, keeps=keeps)
        return Weights(self.units, self._seeds)

    def _join_residence(self, residence: Residence, across: ParamGroups) -> None:
        """Give the disk what it asks of the optimizer, and go on from the step that it holds, if it holds one."""
        if residence.gradients is not None:
            self._gradients.keeper = residence.gradients
            residence.gradients.norms_of = self._norms.of
        if residence.steps_at_once:
            at_once = residence.at_once(self.inner, self.states, self.buckets, across, self._seeds.updates)
            self._at_once = self._gradients.keeper = at_once
            at_once.norms_of, at_once.used = self._norms.of, self._gradients.used
        if residence.sampler is not None:
            residence.sampler.seed = partial(self._seeds.activations, self.comm.rank)
        if residence.journal is not None:
            self.journal = residence.journal
            if (found := self.journal.found) is not None:
                self._saved.go_on(found)
                residence.restore(found)
                self._go_on(found.common)

    def _cuts(self, across: ParamGroups) -> list[tuple[Communicator, Cuts]]:
        """How each group of ranks cuts the parameters that are looked across."""
        return [(c, cut_by((b.layout for b in self.buckets if b.comm is c), across)) for c in self._comms]

    def _join(
        self, inner: SummingOptimizer, owned: Sequence[Owned], across: ParamGroups, bring: Bring | None = None,
        paged: PagedRecords | None = None,
    ) -> JoinedSums:  # fmt: skip
        held = {each.slot.name: each.master for each in owned if each.slot.name in across}
        return JoinedSums.of(inner, held, self._cuts(across), across, self._seeds.updates, bring, paged)

    def _guard_weights(self) -> None:
        unit_of = {id(slot.param): unit for unit in self.units for slot in unit.slots}
        for module in self.model.modules():
            own = [unit_of[id(param)] for param in module.parameters(recurse=False) if id(param) in unit_of]
            if own:
                wait = partial(self._weights.bring, list(dict.fromkeys(own)))
                guard(module, wait, forward=not self._weights.reads_rows(module))

    @property
    def steps(self) -> int:
        """Number of steps, including those that were skipped."""
        return self._seeds.step

    @steps.setter
    def steps(self, number: int) -> None:
        self._seeds.step = number

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Reduce the remaining gradients, update this rank's shards, and send the weights. A collective over all ranks.

        Raises RuntimeError if gradients were changed after they were sent, PeerLostError if a rank is missing.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step()
        self._gradients.reset()
        return loss

    def hold_gradients(self, room_bytes: float | None) -> HeldGradients | None:
        """Hold back gradients that are ready until they are released, or until `reduce`.

        room_bytes: what it lets leave at a time; None: gradients leave as soon as they are ready, from now on. To be
        called between two steps.
        """
        self._gradients.pace = None if room_bytes is None else HeldGradients(room_bytes)
        return self._gradients.pace

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's parameters."""
        for slot in self._slots:
            if set_to_none:
                slot.param.grad = None
            elif slot.param.grad is not None:
                slot.param.grad.zero_()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate, in fp32; the first one outside sends the sum.

        If gradients are cut over some ranks, those ranks add up the gradients after each backward.
        """
        return self._gradients.no_sync()

    @property
    def accumulates(self) -> bool:
        """Whether a backward now is inside of `no_sync`, so that others follow in the step."""
        return self._gradients.accumulates

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the mean gradient to a global 2-norm of at most `max_norm`; returns the norm before (fp64 scalar).

        Error feedback is scaled too, see Clipping. Call it between backward and step, on all ranks. Don't use
        torch.nn.utils.clip_grad_norm_: it sees only this rank's gradients, which were sent already, and `step` raises
        RuntimeError after it.
        """
        if self._at_once is not None and max_norm != math.inf:
            raise ConfigError(
                f"max_norm {max_norm}: gradients are stepped as they arrive, before the norm of all is known; nearest: "
                "math.inf, or a Residency with gradients='memory'"
            )
        norm = super().clip_grad_norm_(max_norm)
        self.memory.state.scale_residuals(self._clipping.note(float(norm), max_norm))
        return norm

    def note_sequences(self, numbers: Tensor) -> None:
        if self._residence is not None:
            self._residence.note_sequences(numbers)

    def synchronize(self) -> None:
        """Bring the whole updated weights to this rank, where they stay until the next backward.

        Under a memory budget, and on disks, weights that are cut over ranks stay cut: it waits until they are up to
        date. A forward of one rank is then one of all; see `whole` to read them.

        With overlap=True, call it before you read weights other than through the model.
        """
        self._weights.keep()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises RuntimeError: the layout is fixed when zero() is called."""
        if self._complete:
            raise RuntimeError("parameters can't be added to a sharded optimizer: add them before calling zero()")
        super().add_param_group(param_group)

    @torch.no_grad()
    def check_replicas(self) -> None:
        """Compare the weights of all ranks that hold the same bit for bit. Raises ReplicaError. A collective."""
        held = {comm: [bucket for bucket in self.buckets if bucket.comm is comm] for comm in self._comms}
        kinds = {comm: own[0].layout.levels.weights_over for comm, own in held.items() if own}
        # To read weights that nobody else holds would only take time.
        shared = {comm: num_kinds for comm, num_kinds in kinds.items() if comm.world_size > num_kinds}
        if shared:
            self._weights.settle()
        for comm, num_kinds in shared.items():
            compare_replicas(comm, map(self._weights.shard, held[comm]), self.steps, num_kinds)

    def close(self) -> None:
        self._weights.wait_all()
        if self._residence is not None:
            self._residence.close()
        for comm in dict.fromkeys([*self._comms, self.ranks.everyone]):
            comm.close()

    def break_off(self) -> None:
        for comm in dict.fromkeys([*self._comms, self.ranks.everyone]):
            comm.break_off()
        self._weights.forget()

    def reduce(self) -> Tensor:
        if self._grad_norm is None:
            if any(param.requires_grad for param in self._frozen):
                raise RuntimeError("a parameter was frozen when zero() was called and is not now: call zero() again")
            if self._residence is not None:
                self._residence.before_update()
            self._gradients.finish()
            self._release()
            self._grad_norm = self._agree()
            self._gradients.refuse_changed()
            self._gradients.refuse_replaced(self.model)
        return self._grad_norm

    def _update(self) -> None:
        self._weights.settle()
        at_once = self._at_once
        self._weights.send(self.states.step(self._gradients.used) if at_once is None else at_once.states.ready())
        if not self.overlap or (self.weights_pass and not self._weights.defers):
            self._weights.wait_all()
            self._release()
        if self._residence is not None:
            self._residence.after_update()

    def _release(self) -> None:
        """Between two phases of a step, free what packets were made in, if weights do not fit in memory either."""
        for comm in self._comms if self.weights_pass else ():
            comm.release()

    def _scale(self, factor: float) -> None:
        if self._gradients.keeper is not None:
            self._gradients.keeper.scale(factor)
            return
        for bucket in self.buckets:
            bucket.shard_grad.mul_(factor)

    def _skip(self) -> None:
        self.memory.forget()
        grads = {slot.name: slot.param.grad for slot in self._slots if slot.param.grad is not None}
        bad = [name for name, grad in grads.items() if not bool(torch.isfinite(grad).all())]
        if bad:
            rank, more = self.comm.global_ranks[self.comm.rank], f" and {len(bad) - 3} more" if len(bad) > 3 else ""
            log.warning("thinwire: rank %d: non-finite gradient in %s%s", rank, ", ".join(map(repr, bad[:3])), more)
        super()._skip()
        if self._at_once is not None:
            # Some buckets were stepped. A checkpoint of masters alone stands for the weights, too.
            self._update()

    def _slots_of(self, comm: Communicator) -> list[Slot]:
        return [slot for slot in self._slots if slot.bucket.comm is comm]

    def _ranks_of(self, comm: Communicator) -> Ranks:
        """The ranks that agree on a group's parameters; for the main group, the whole mesh."""
        return self.ranks if comm is self.comm else Ranks(comm, comm)

    def _agree(self) -> Tensor:
        """Agree with all ranks on the global norm, the parameters with gradients, the mean loss, and stopping."""
        norm, edited = math.nan, False
        for comm in self._comms:
            slots = self._slots_of(comm)
            squares = self._norms.squares if comm is self.comm else 0.0
            used = [slot.name in self._gradients.used for slot in slots]
            word = StepStatus(squares, self._loss, self._stop, used, self.told, self._weights.edited)
            agreed = self._ranks_of(comm).agree(word)
            of_slots = zip(slots, agreed.used, strict=True)
            self._gradients.used.update(slot.name for slot, is_used in of_slots if is_used)
            if comm is self.comm:
                norm, self.mean_loss, self.told = agreed.norm, agreed.loss, agreed.told
                self.stop_requested, edited = self.stop_requested or agreed.stop, agreed.edited
        if edited:
            self._weights.edited = False
            self.check_replicas()
        return torch.tensor(norm, dtype=torch.float64)

    @property
    def bytes_per_step(self) -> int:
        """Payload bytes that this rank sends in a step of one micro-batch.

        An upper bound if packets are entropy-coded.
        """
        words = sum(self._ranks_of(comm).word_bytes(len(self._slots_of(comm))) for comm in self._comms)
        sent = sum(sent_by([unit.unit for unit in self.units], 1).values())
        sums = self._at_once or self._sums
        return words + sent + (sums.bytes_per_step if sums is not None else 0)

    @property
    def uncompressed_bytes_per_step(self) -> float:
        return sum(8 * slot.span.numel * (1 - 1 / slot.bucket.comm.world_size) for slot in self._slots)

    def masters(self, names: Collection[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for bucket in self._holding(names):
            whole = bucket.whole_masters
            found |= {slot.name: slot.span.of(whole).clone() for slot in bucket.slots if slot.name in names}
        return found

    @torch.no_grad()
    def adopt_weights(self, values: Mapping[str, Tensor]) -> None:
        self._weights.free()
        values = values if self.tiling is None else self.tiling.part(values)
        for bucket in self._holding(values):
            for slot in (slot for slot in bucket.slots if slot.name in values):
                with self._weights.held(bucket):
                    bucket.adopt(slot, values[slot.name])
                    bucket.note()

    def handover_bytes(self, names: Collection[str]) -> tuple[int, int]:
        held = self._holding(names)
        return sum(4 * bucket.layout.shard_numel * (bucket.comm.world_size - 1) for bucket in held), 0

    def _holding(self, names: Collection[str]) -> list[FlatBucket]:
        """The buckets that hold any of these parameters."""
        return [bucket for bucket in self.buckets if any(slot.name in names for slot in bucket.slots)]

    def describe(self) -> list[Row]:
        rows = [*rows_on_messages(self.method, self.comm, self.units, self.memory, self._sums)]
        varies = any(codec.has_variable_length for bucket in self.buckets for codec in bucket.layout.wire.codecs)
        bound = "at most " if varies else ""
        rows.append(sent_row(self.bytes_per_step, self.uncompressed_bytes_per_step, bound))
        away = [] if self._residence is None else self._residence.describe()
        away += [] if self.tiling is None else [self.tiling.row]
        return [*rows, *away, *self._notes]

    def snapshot(self) -> Snapshot:
        self._weights.settle()
        snapshot = self._saved.snapshot(self._numbers())
        if self._residence is not None:
            self._residence.add_to(snapshot)
        return snapshot

    @torch.no_grad()
    def restore(self, source: Source) -> None:
        self._weights.free()
        self._saved.restore(source)
        if self._residence is not None:
            self._residence.restore(source)
        self._go_on(source.common)

    def commit(
        self, own: Mapping[str, Any], common: Mapping[str, Any] | None = None, about: Mapping[str, Any] | None = None
    ) -> None:
        if self._residence is None or self.journal is None:
            raise ConfigError("commit: no residency keeps steps; nearest: thinwire.Residency(store=..., durable=True)")
        self._weights.settle()
        snapshot = self._saved.without_states(self._numbers())
        snapshot.own |= own
        snapshot.common |= common or {}
        self._residence.commit(self.steps, snapshot, about or {})

    def _numbers(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "clipped": self._clipping.last,
            "seed": self._seeds.base,
        }

    def _go_on(self, numbers: Mapping[str, Any]) -> None:
        """Begin the next step with the result of `_numbers`.

        Checkpoints of other hosts have neither clipping nor seed.
        """
        self._seeds.step, self.skipped_steps = numbers["steps"], numbers["skipped_steps"]
        self._seeds.base = numbers.get("seed", self._seeds.base)
        self._clipping.last = numbers.get("clipped", 1.0)
        self._adopt_inner()
        self._grad_norm = None
        self._gradients.reset()

    def _adopt_inner(self) -> None:
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state
        self.defaults = self.inner.defaults
