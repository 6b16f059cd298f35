"""Decides which parts of a sharded optimizer lie on this rank's disk, and how much fits the memory budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.checkpoint import Snapshot, Source
from thinwire.collectives import Communicator
from thinwire.errors import ConfigError, Problems, ThinwireError
from thinwire.hosts.offload.activations import recompute
from thinwire.hosts.offload.at_once import StepsAtOnce
from thinwire.hosts.offload.gradients import GradientsOnDisk
from thinwire.hosts.offload.journal import Journal
from thinwire.hosts.offload.norms import SeenNorms
from thinwire.hosts.offload.pieces import PiecesOnDisk
from thinwire.hosts.offload.replicas import Replicas, is_large
from thinwire.hosts.offload.room import MemoryRoom, hold_to
from thinwire.hosts.offload.sampling import RowSampler, linear_layers
from thinwire.hosts.offload.spill import ActivationsOnDisk
from thinwire.hosts.offload.states import StatesOnDisk
from thinwire.hosts.offload.weights import CutWeightsOnDisk, WeightsOnDisk
from thinwire.hosts.sharded.bucket import FlatBucket, LiveUnit
from thinwire.hosts.sharded.seeds import Seeds
from thinwire.hosts.sharded.weights import Weights
from thinwire.layout.buckets import Unit
from thinwire.layout.layers import layers_of
from thinwire.methods.memory import Residency, check_across, check_at_once
from thinwire.methods.memory.floor import num_held
from thinwire.methods.memory.placement import stays, waits_unbounded
from thinwire.methods.memory.residency import AT_ONCE
from thinwire.optim import Part, SummingOptimizer
from thinwire.table import Row
from thinwire.tiers import Pace, TierMeter

# Steps after which the room that is left is known: the first one allocates what stays.
MEASURED_STEPS = 2
DAY_S = 86_400


def check_device(residency: Residency, device: torch.device, *, looks_across: bool) -> None:
    """Raise ConfigError for what can't go from a device to a disk. looks_across: of the optimizer, across matrices."""
    if device.type == "cpu":
        return
    problems = Problems()
    for what, is_asked, near in (
        ("weights", residency.weights == "disk", "weights='memory'"),
        ("gradients", residency.gradients == "disk", "gradients='memory'"),
        ("activations", residency.spills, "activations='recompute'"),
        ("matrices", looks_across and residency.optimizer != "memory", "optimizer='memory'"),
    ):
        if is_asked:
            problems.messages.append(f"residency: {what} that lie on {device} can't lie on a disk; nearest: {near}")
    problems.raise_any()


def check_model(residency: Residency, model: nn.Module) -> None:
    """Raise ConfigError for activations of layers that the model does not have. model: may be on meta."""
    what, kind = f"residency: activations {residency.activations}", type(model).__name__
    if residency.recomputes and not layers_of(model):
        raise ConfigError(
            f"{what}: layers are computed again, and {kind} has no ModuleList of layers that are trained; nearest: "
            "activations='keep', without slices"
        )
    if residency.sampled is not None and not linear_layers(model):
        raise ConfigError(
            f"{what}: linear layers keep samples, and {kind} has none in a ModuleList of layers that are trained; "
            "nearest: activations='keep'"
        )


class Residence:
    """The disk of a rank: its files, its meter, and what lies on it.

    Attributes:
        holds_states: masters and the optimizer's state lie on the disk.
        replicas: the weights on the disk; None: all weights are in memory.
        num_layers: number of layers that are recomputed in backward.
        gradients: the mean gradients on the disk; None: all are in memory.
        sampler: keeps a sample of activations; None: all are kept.
        seen: norms of gradients by sequence; None: no sequence was seen.
        activations: moves activations to the disk; None: they stay in memory.
        journal: makes every step durable; None: only checkpoints are.
    """

    def __init__(
        self, residency: Residency, units: Sequence[Unit], *, weights: bool, states: bool, num_layers: int,
        sampler: RowSampler | None, comm: Communicator, model: nn.Module, moves: tuple[int, int],
    ) -> None:  # fmt: skip
        self._moves = moves
        self.num_layers, self.sampler, self._comm = num_layers, sampler, comm
        self.options, self.meter, self.pace = residency, TierMeter(), Pace(residency.rate)
        self.room, self.holds_states, self._num_updates = MemoryRoom(residency.memory_bytes), states, 0
        self.seen: SeenNorms | None = None
        self.journal = Journal(residency.folder, comm) if residency.durable else None
        budget = residency.memory_bytes
        self._give_limit_back = hold_to(budget, is_sliced=residency.is_sliced) if budget is not None else lambda: None
        self.replicas: Replicas | None = None
        self.gradients: GradientsOnDisk | None = None
        self._states: StatesOnDisk | None = None
        self._pieces: PiecesOnDisk | None = None
        held = [layout for unit in units for layout in unit.layouts]
        if weights and any(map(is_large, held)):
            self.replicas = Replicas(residency.folder, held, self.meter, self.pace, num_held(residency))
        self.activations: ActivationsOnDisk | None = None
        if residency.spills:
            given = () if self.replicas is None else (self.replicas.pack, self.replicas.unpack)
            self.activations = ActivationsOnDisk(model, residency.folder, self.meter, self.pace, *given)

    @classmethod
    def of(
        cls, residency: Residency, model: nn.Module, *, inner: torch.optim.Optimizer, units: Sequence[Unit],
        device: torch.device, comm: Communicator, moves: tuple[int, int] = (0, 0),
    ) -> Residence | None:  # fmt: skip
        """The disk that the options ask for; None if everything lies in memory.

        moves: bytes that a step of one micro-batch reads and writes, as planned.

        Raises ConfigError for tensors that can't lie on a disk, and for a folder that can't hold them.
        """
        weights, states = residency.weights == "disk", residency.optimizer != "memory"
        if states and isinstance(inner, SummingOptimizer):
            check_across(residency, type(inner).__name__, streams=inner.streams)
        limits = isinstance(inner, SummingOptimizer) and inner.limits_itself
        check_at_once(residency, type(inner).__name__, limits=limits)
        check_device(residency, device, looks_across=isinstance(inner, SummingOptimizer))
        check_model(residency, model)
        # What a layer computes again is sampled again.
        sampler = RowSampler(model, residency.sampled) if residency.sampled is not None else None
        num_layers = recompute(model, residency.slices or 1) if residency.recomputes else 0
        computes = num_layers or sampler or residency.gradients == AT_ONCE
        if not (computes or residency.needs_store or residency.memory is not None):
            return None
        return cls(
            residency, units, weights=weights, states=states, num_layers=num_layers, sampler=sampler, comm=comm,
            model=model, moves=moves,
        )  # fmt: skip

    def note_sequences(self, numbers: Tensor) -> None:
        """See ParallelOptimizer."""
        if self.sampler is not None:
            # Norms of a checkpoint have no use until sequences have numbers.
            self.sampler.seen = self.seen = self.seen or self._no_norms()
            self.seen.begin(numbers)

    def _no_norms(self) -> SeenNorms:
        folder = None if self.options.store is None else self.options.folder
        return SeenNorms(self._comm, folder, self.meter, self.pace)

    def add_to(self, snapshot: Snapshot) -> None:
        """Add what lies here and neither weights nor states have: the norms of seen sequences."""
        if self.seen is not None:
            self.seen.add_to(snapshot)

    def restore(self, source: Source) -> None:
        """Go on with the norms of seen sequences that a checkpoint has, and no others."""
        if self.sampler is None:
            return
        self.sampler.begin_anew()
        if self.seen is not None:
            self.seen.close()
            self.seen = None
        if source.norms is not None:
            self.seen = self._no_norms()
            self.seen.restore(source)
            source.note("norms of seen sequences", "carried", "rows are drawn by them when their sequence comes again")

    def take(self, bucket: FlatBucket) -> None:
        """Register a new bucket."""
        if self.replicas is not None:
            self.replicas.take(bucket)
        if self.options.gradients in ("disk", AT_ONCE):
            # Those of the next bucket take its place.
            bucket.shard_grad.untyped_storage().resize_(0)
        for slot in bucket.slots:
            slot.param.register_post_accumulate_grad_hook(lambda _: self.room.look())

    def weights(self, units: Sequence[LiveUnit], seeds: Seeds, model: nn.Module) -> Weights:
        """The object that loads weights from the disk, which has some."""
        assert self.replicas is not None
        if any(bucket.layout.levels.weights_over > 1 for unit in units for bucket in unit.buckets):
            return CutWeightsOnDisk(units, seeds, model, self.replicas)
        # A durable step has all weights on the disk.
        packs, defers = self.activations is None, not self.options.durable
        found = WeightsOnDisk(units, seeds, model, self.replicas, packs=packs, defers=defers)
        for layer in layers_of(model) if self.options.is_sliced else ():
            found.fit(layer)
        if self.options.memory is None:
            self.replicas.defer_within(waits_unbounded(self.replicas.total_bytes))
        return found

    def states(
        self, inner: torch.optim.Optimizer, weights: Weights, layout: Mapping[str, Any], seed: int
    ) -> StatesOnDisk:
        """The object that holds masters and the optimizer's state on the disk.

        layout: see `layout_of`. seed: of the run.
        """
        self._known_by(inner, seed)
        self._states = StatesOnDisk(self.options, inner, weights, self.meter, self.pace, self.journal, layout)
        if self.options.gradients == "disk":
            held = [bucket for unit in weights.units for bucket in unit.buckets]
            self.gradients = GradientsOnDisk(self.options.folder, held, self.meter, self.pace)
            self._states.gradients = self.gradients
        return self._states

    def pieces(
        self, inner: SummingOptimizer, weights: Weights, parts: Mapping[str, Part], layout: Mapping[str, Any], seed: int
    ) -> PiecesOnDisk:
        """The same of an optimizer that looks across matrices. parts: what this rank has of them, by parameter."""
        self._known_by(inner, seed)
        self._pieces = PiecesOnDisk(
            self.options, inner, weights, self.meter, self.pace, parts, self.journal, layout
        )  # fmt: skip
        return self._pieces

    def _known_by(self, inner: torch.optim.Optimizer, seed: int) -> None:
        """Tell the journal which runs it may continue."""
        if self.journal is not None:
            self.journal.by = {"optimizer": type(inner).__name__, "seed": seed}

    @property
    def steps_at_once(self) -> bool:
        """Whether each bucket is stepped when its mean gradients arrive."""
        return self.options.gradients == AT_ONCE

    def at_once(
        self, inner: torch.optim.Optimizer, states: Any, buckets: Sequence[FlatBucket], across: Mapping[str, Any],
        seed: Callable[[], int],
    ) -> StepsAtOnce:  # fmt: skip
        """What steps them. states: BucketStates."""
        assert isinstance(inner, SummingOptimizer)
        return StepsAtOnce(inner, states, buckets, across, seed)

    def commit(self, step: int, snapshot: Snapshot, about: Mapping[str, Any]) -> None:
        """Write a step of a durable run, of which the snapshot lacks masters and states. Raises ThinwireError."""
        states = self._states or self._pieces
        assert self.journal is not None and states is not None
        if self.seen is not None:
            self.seen.add_to(snapshot)
        with self.meter.waiting():
            try:
                snapshot.own |= states.keep()
                self.journal.write(step, snapshot, about)
            except OSError as error:
                raise ThinwireError(f"store {self.journal.folder}: step {step} can't be kept: {error}") from error

    def before_update(self) -> None:
        """Read the first states while gradients are on their way."""
        if self._states is not None:
            self._states.expect()

    def after_update(self) -> None:
        """After the first steps have shown how much memory they need, keep in memory what fits.

        What an update sends comes first: it takes few bytes, and saves the reading of weights to which it is added.
        Weights come next: they pass through memory most often.
        """
        self.room.look()
        self._num_updates += 1
        if self._num_updates != MEASURED_STEPS:
            return
        left = stays(self.room.left_bytes)
        if self.replicas is not None:
            if self.options.memory is not None:
                left -= self.replicas.defer_within(left)
            more = max(0, min(left, self.replicas.total_bytes - self.replicas.capacity_bytes))
            self.replicas.capacity_bytes += more
            left -= more
        if self._states is not None and self.options.optimizer == "auto":
            shelf = self._states.shelf
            shelf.stay(left // shelf.pool.slot_bytes)
        if self._pieces is not None and self.options.optimizer == "auto":
            self._pieces.stay(left)

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why)."""
        options, rows = self.options, list[Row]()
        measures = options.memory_bytes is not None and "auto" in (options.optimizer, options.weights)
        why = f"what fits in {options.memory} stays in memory after the first steps" if measures else ""
        if options.memory is not None:
            rows.append(("memory", f"at most {options.memory}", "of this process's data, enforced by the kernel"))
        if self._states is not None:
            shelf = self._states.shelf
            where = f"{shelf.num_bytes / 1e6:.3f} MB on this rank's disk, {options.folder}"
            rows.append(("masters and optimizer state", where, why))
            rows.append((
                "sub-groups", f"{shelf.num_records} of {shelf.record_numel:,} elements",
                f"{', '.join(map(self._told, shelf.kinds))}; {shelf.pool.num_bytes / 1e6:.1f} MB of memory for those "
                "in passing",
            ))  # fmt: skip
        if self._pieces is not None:
            where = f"{self._pieces.num_bytes / 1e6:.3f} MB on this rank's disk, {options.folder}"
            coded = f"masters in {options.masters}; " if options.codes_masters else ""
            why = why or "a piece of a tensor is stepped while the next one is read and the last one written"
            rows.append(("masters and optimizer state", where, f"{coded}{why}"))
        if self.journal is not None:
            rows.append(self.journal.row)
        if self.gradients is not None:
            where = f"{self.gradients.num_bytes / 1e6:.3f} MB on this rank's disk"
            rows.append(("gradients", where, "each bucket's mean waits there for its update"))
        if options.gradients == AT_ONCE:
            rows.append(("gradients", "none waits", "each bucket is stepped when its mean arrives; nothing is clipped"))
        if self.replicas is not None:
            replicas = self.replicas
            rows.append((
                "weights", f"{replicas.total_bytes / 1e6:.3f} MB on this rank's disk, in {len(replicas.spots)} buckets",
                f"{replicas.capacity_bytes / 1e6:.1f} MB in memory at a time; gradients are freed when they leave",
            ))  # fmt: skip
        if self.sampler is not None:
            what = f"{self.sampler.ratio:g} of the rows of what {self.sampler.num_layers} linear layers are given"
            rows.append(("activations", what, "the gradient of their weights is an estimate without bias"))
            rows.append(self.sampler.attention_row)
            where = "in memory" if options.store is None else f"in {options.folder}"
            what = f"2 bytes of each token and input that is sampled, {where}"
            rows.append(("norms of sequences that come again", what, "ranks send each other as much, on both ways"))
        if self.activations is not None:
            what = f"{self.num_layers} layers' inputs " if self.num_layers else ""
            rows.append(("activations", f"{what}on this rank's disk, {options.folder}", "each storage is written once"))
        if self.num_layers:
            rows.append(("activations", f"{self.num_layers} layers keep their inputs", "the rest is computed again"))
        if options.is_sliced:
            what = f"{options.slices} parts of a micro-batch, one after another in each layer"
            rows.append(("slices", what, "weights are read once for all of them"))
        files = list(self._states.shelf.files.values()) if self._states is not None else []
        files += [each.file for each in (self.replicas, self.gradients, self.activations) if each is not None]
        files += [] if self._pieces is None else [self._pieces.slots.file]
        if not all(file.is_direct for file in files):
            rows.append(("O_DIRECT", "no", "this file system refuses it: pages are dropped after each write"))
        if options.rate is not None:
            rows.append(("disk", f"held to {options.disk_rate}", "reads and writes together, as is asked for"))
        return [*rows, *self._wear()]

    def _wear(self) -> list[Row]:
        """A row on what is written in a step, and at most in a day, at the rate of what was written so far."""
        done, (read, written) = self.meter.snapshot(), self._moves
        if not written or not done.write_s:
            return []
        besides = " besides activations" if self.activations is not None else ""
        what = f"{written / 1e6:.1f} MB written in a step{besides}, {read / 1e6:.1f} MB read by one micro-batch"
        rate = done.written_bytes / done.write_s
        most = DAY_S * rate * written / (read + written)
        why = f"at most {most / 1e12:.2f} TB a day, if nothing but the disk bounds it: it wrote {rate / 1e6:.0f} MB/s"
        return [("wear of the disk", what, why)]

    def _told(self, kind: str) -> str:
        """How a kind of the shelf is stored on the disk, as text."""
        assert self._states is not None
        coding = self._states.shelf.kinds[kind]
        return f"{kind} in {coding.codec}{' of its square root' if coding.of_roots else ''}"

    def close(self) -> None:
        """Free memory and disk space."""
        self._give_limit_back()
        if self.journal is not None:
            self.journal.close()
        if self.seen is not None:
            self.seen.close()
        if self._states is not None:
            self._states.shelf.close()
        if self.gradients is not None:
            self.gradients.close()
        if self.activations is not None:
            self.activations.close()
        if self._pieces is not None:
            self._pieces.close()
        if self.replicas is not None:
            self.replicas.close()
