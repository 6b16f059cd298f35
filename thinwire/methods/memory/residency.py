"""What lies in memory and what on a disk: options and arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinwire.codecs import Cast, Codec, Identity, Integer
from thinwire.errors import ConfigError, Problems, similar
from thinwire.methods.memory.tiling import TileGrid
from thinwire.methods.memory.units import read_byte_rate, read_bytes
from thinwire.methods.options import FP32, CodecRule, check_types, codec_of
from thinwire.tiers.coding import Coding

FP32_BYTES = 4
# The kinds of state that are sums or means of squares.
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta")
# What a forward keeps; SAMPLE stands before a share.
KEEP, RECOMPUTE, RECOMPUTE_FROM_DISK, OFFLOAD, SAMPLE = "keep", "recompute", "recompute:disk", "offload", "sample"
# Of counts: all that a forward keeps, and all that it keeps if layers are computed again.
SAVED, SAVED_INPUTS = "saved", "inputs"
ACTIVATIONS = ("auto", KEEP, RECOMPUTE, RECOMPUTE_FROM_DISK, OFFLOAD)
# Of gradients: each bucket is stepped when its mean arrives.
AT_ONCE = "step"
# Elements of a sub-group where nothing is stated, the most of the budget that the passing ones may take, and the least
# number of sub-groups, so that reading, stepping and writing overlap.
SUB_GROUP, PASSING_SHARE, LEAST_NUMBER = 1 << 22, 1 / 32, 8
# Sub-groups begin where blocks of the disk do.
LEAST_SUB_GROUP = 1024


def keeps_numbers(codec: Codec) -> bool:
    """Whether masters and moments can lie on a disk in a codec.

    A step changes them by less than it rounds, so that rounding must be unbiased; second moments divide, so that none
    may become zero, which `Coding` prevents where integers have a level between; groups end where sub-groups end.
    """
    if not isinstance(codec, Integer):
        # `Coding` rounds bf16 at random.
        return isinstance(codec, Identity) or codec == Cast("bf16")
    return codec.traits.unbiased and codec.levels > 1 and LEAST_SUB_GROUP % codec.group == 0


def rule_of(what: str) -> CodecRule:
    """The rule for a codec of masters, or of moments."""
    return CodecRule(
        keeps_numbers,
        f"{what} must be fp32, bf16, or integers of 3 bits or more, rounded at random, in groups that divide "
        f"{LEAST_SUB_GROUP}",
        nearest="int8/64",
    )


@dataclass(frozen=True)
class Residency:
    """A budget of memory, and a folder on a disk for everything that does not fit.

    Optimizer state and fp32 masters pass through memory in sub-groups: one is read while another is stepped and a third
    is written. With `auto`, as many of them stay in memory as fit the budget, which is measured after the first steps.
    Results do not depend on where tensors lie, but on the rounding of `states`.

    Raises ConfigError for values that can't work.
    Source: ZeRO-Infinity (SC 2021), sections 5 and 6.
    """

    memory: str | None = None
    """Most memory of each process, such as 2gb. By default the process's own limit (ulimit -d), or none."""
    store: str | None = None
    """Folder for what does not fit, on a disk of this machine. `thinwire train` takes RUN_DIR/store by default;
    elsewhere it is a folder of this user's among temporary files."""
    weights: Literal["auto", "memory", "disk"] = "auto"
    """Where weights lie: memory, disk, or auto: where a step takes fewer seconds, of what fits the budget."""
    gradients: Literal["auto", "memory", "disk", "step"] = "auto"
    """Where mean gradients wait for the update: memory, disk, or step: nowhere, each bucket is stepped when its mean
    arrives, by Apollo, whose limit stands for clipping; auto: as the budget needs it."""
    optimizer: Literal["auto", "memory", "disk"] = "auto"
    """Where masters and the optimizer's state lie: memory, disk, or auto: on disk but for what fits in the budget."""
    states: str = FP32
    """Codec of the optimizer's moments on the disk: fp32; bf16, rounded at random; or integers rounded at random, such
    as int8/64, of second moments their square roots."""
    masters: str = FP32
    """Codec of the masters, on the disk and where they stay in memory: fp32; bf16 or integers, such as int8/128. Each
    step rounds them at random, so that its update is right in the mean. Weights then take these values, too."""
    activations: str = "auto"
    """What a forward keeps for its backward: keep: everything; recompute: only each layer's input, and the rest is
    computed again; recompute:disk: the same, and the inputs lie on the disk; offload: everything, on the disk;
    sample:0.3: that share of the rows of what linear layers are given, by which the gradient of weights is estimated
    without bias; recompute+sample:0.3: layers keep their inputs, and a sample while they are computed again; auto: in
    `thinwire train`, recompute, from the disk too, if the budget needs it."""
    slices: int | None = None
    """Parts of a micro-batch that a layer computes one after another, so that its weights are read once for all of
    them. Layers are then recomputed."""
    tile: str | None = None
    """Cut large matrices into parts of their inputs x parts of their outputs, such as 1x8, or lm_head=1x16 for those
    whose name has lm_head in it. A tile is fetched, used and evicted by itself, so that no such matrix is ever whole in
    memory. none: no tiles, where a run that is resumed had some."""
    sub_group: int | None = None
    """Elements that are stepped at once; a multiple of 1024. By default 4 million, fewer with a small budget, and at
    most an eighth of a rank's."""
    durable: bool = False
    """Keep every step on the disk, in two slots, so that a killed run goes on behind its last one."""
    disk_rate: str | None = None
    """Limit reads and writes together to a rate such as 500MB/s, to try out a slower disk."""

    def __post_init__(self) -> None:
        problems = Problems()
        with problems.collect():
            check_types(self)
            if self.memory is not None and not read_bytes(self.memory):
                raise ConfigError(f"memory {self.memory!r}: must be above 0; nearest: '1gb'")
            if self.store == "":
                raise ConfigError("store '': must name a folder; nearest: '/var/tmp/thinwire', or none")
            if isinstance(self.store, str) and self.store.startswith("~") and not expands(self.store):
                raise ConfigError(f"store {self.store!r}: there is no such user; nearest: '/var/tmp/thinwire'")
            if isinstance(self.activations, str):
                share_of(self.activations)
        with problems.collect():
            if self.tile in ("", "none"):
                # A resumed run states it in place of the tiles that it had.
                object.__setattr__(self, "tile", None)
            elif isinstance(self.tile, str):
                TileGrid.parse(self.tile)
        with problems.collect():
            if self.disk_rate is not None:
                read_byte_rate(self.disk_rate)
        if isinstance(self.sub_group, int) and (self.sub_group < 1 or self.sub_group % LEAST_SUB_GROUP):
            near = max(1, round(self.sub_group / LEAST_SUB_GROUP)) * LEAST_SUB_GROUP
            rule = f"must be a multiple of {LEAST_SUB_GROUP}"
            problems.messages.append(f"--residency.sub-group {self.sub_group}: {rule}; nearest: {near}")
        if isinstance(self.slices, int) and self.slices < 1:
            problems.messages.append(f"--residency.slices {self.slices}: must be at least 1; nearest: 1")
        elif self.is_sliced and self.activations != "auto" and not self.recomputes:
            problems.messages.append(
                f"--residency.slices {self.slices}: with activations {self.activations} a layer keeps those of all "
                "slices; nearest: --residency.activations recompute"
            )
        for name, what in (("states", "moments"), ("masters", "masters")):
            codec = problems.note(codec_of, self, name, rule_of(what))
            if codec is not None and not codec.traits.lossless and self.optimizer == "memory":
                problems.messages.append(
                    f"--residency.{name} {getattr(self, name)}: {what} on a disk, and --residency.optimizer is memory; "
                    f"nearest: --residency.optimizer disk, or --residency.{name} fp32"
                )
        if self.durable is True and self.optimizer == "memory":
            problems.messages.append(
                "--residency.durable: keeps what lies on a disk, and --residency.optimizer is memory; nearest: "
                "--residency.optimizer disk"
            )
        if self.gradients == "disk" and self.optimizer == "memory":
            problems.messages.append(
                "--residency.gradients disk: they wait there for states that pass through memory, and "
                "--residency.optimizer is memory; nearest: --residency.optimizer disk, or --residency.gradients memory"
            )
        problems.raise_any()

    @property
    def memory_bytes(self) -> int | None:
        """The budget in bytes; None: no budget."""
        return None if self.memory is None else read_bytes(self.memory)

    @property
    def sampled(self) -> float | None:
        """The share of rows that is kept of the inputs of linear layers; None: all."""
        return share_of(self.activations)

    @property
    def way(self) -> str:
        """What becomes of activations, without a share."""
        return self.activations.partition("+")[0]

    @property
    def recomputes(self) -> bool:
        """Whether layers keep their inputs alone."""
        return self.way in (RECOMPUTE, RECOMPUTE_FROM_DISK)

    @property
    def only_recomputes(self) -> bool:
        """Whether layers are computed again, and all else is as without a residency."""
        plain = self.memory is None and self.tile is None and not self.is_sliced
        return plain and self.activations == RECOMPUTE and self.gradients != AT_ONCE and not self.needs_store

    @property
    def spills(self) -> bool:
        """Whether what a forward keeps lies on the disk."""
        return self.way in (OFFLOAD, RECOMPUTE_FROM_DISK)

    def spilled(self, kept: Mapping[str, int]) -> int:
        """Bytes that a micro-batch's forward leaves on the disk. kept: see `kept_ways`."""
        return kept[SAVED_INPUTS if self.recomputes else SAVED] if self.spills else 0

    @property
    def is_sliced(self) -> bool:
        """Whether layers compute a micro-batch in several parts."""
        return isinstance(self.slices, int) and self.slices > 1

    @property
    def rate(self) -> float | None:
        """Bytes per second to which the disk is limited; None: no limit."""
        return None if self.disk_rate is None else read_byte_rate(self.disk_rate)

    @property
    def needs_store(self) -> bool:
        """Whether something lies on a disk."""
        return self.weights == "disk" or self.gradients == "disk" or self.optimizer != "memory" or self.spills

    @property
    def folder(self) -> Path:
        """The folder on the disk. Raises ConfigError if none is stated."""
        if self.store is None:
            raise ConfigError(
                "residency: no store is stated, and a durable run must find it again: name a folder on a disk"
            )
        return Path(self.store).expanduser()

    @property
    def codec(self) -> Codec:
        """That of moments on the disk."""
        return codec_of(self, "states", rule_of("moments"))

    @property
    def master_codec(self) -> Codec:
        """That of masters."""
        return codec_of(self, "masters", rule_of("masters"))

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs whose kernels are compiled before the workers start."""
        return self.codec, self.master_codec

    def coding(self, kind: str) -> Coding:
        """How a kind of the optimizer's state lies on the disk."""
        return Coding(self.codec, of_roots=kind in SQUARES and isinstance(self.codec, Integer))

    @property
    def master_coding(self) -> Coding:
        """How masters lie on the disk."""
        return Coding(self.master_codec)

    @property
    def codes_masters(self) -> bool:
        """Whether masters are stored as something else than fp32."""
        return not self.master_codec.traits.lossless

    @property
    def master_share(self) -> float:
        """What masters take on the disk, of what they take as fp32."""
        return self.master_codec.bits_per_element / (8 * FP32_BYTES)

    @property
    def state_share(self) -> float:
        """What masters and two moments take on the disk, of what they take as fp32."""
        return (self.master_share + 2 * self.codec.bits_per_element / (8 * FP32_BYTES)) / 3

    def disk_bytes(self, state_bytes: int) -> int:
        """Bytes on the disk for masters and two moments of `state_bytes` bytes in fp32.

        What is not stored as fp32 has a second place on the disk, where it is fp32 for a checkpoint. A durable step has
        two slots of all, and of the weights that belong to the masters.
        """
        coded = 2 * (not self.codec.traits.lossless) + self.codes_masters
        return coded * state_bytes // 3 + self._in_slots(int(self.state_share * state_bytes), state_bytes // 3)

    def piece_disk_bytes(self, piece_bytes: int, master_bytes: int) -> int:
        """Bytes on the disk for pieces of tensors that take so many bytes there with fp32 masters.

        Of masters in a codec, each slot has a place for the fp32 numbers of a checkpoint.
        """
        return self._in_slots(piece_bytes + self.coded_bytes(master_bytes), master_bytes)

    def _in_slots(self, num_bytes: int, master_bytes: int) -> int:
        """Bytes of all slots, each with the weights that belong to the masters of a durable step."""
        return 2 * (num_bytes + master_bytes) if self.durable else num_bytes

    def coded_bytes(self, master_bytes: int) -> int:
        """What masters of so many bytes in fp32 are stored as, in bytes; 0: they are stored as they are.

        Pieces of tensors have it beside a place for the fp32 numbers of a checkpoint.
        """
        return int(self.master_share * master_bytes) if self.codes_masters else 0

    def sub_group_numel(self, num_kinds: int, numel: int) -> int:
        """Elements of a sub-group with `num_kinds` fp32 numbers each; three sub-groups are in memory at a time.

        numel: of all that a rank steps.
        """
        most = self.most_sub_group_numel(numel)
        if self.sub_group is None and self.memory_bytes is not None:
            most = min(most, int(self.memory_bytes * PASSING_SHARE) // (3 * num_kinds * FP32_BYTES))
        return max(1, most)

    def most_sub_group_numel(self, numel: int) -> int:
        """The same under the largest budget."""
        return self.sub_group or min(SUB_GROUP, -(-numel // LEAST_NUMBER))


def same_everywhere(residency: Residency | None) -> dict[str, object]:
    """What of a residency must be the same on all ranks; None: nothing lies on a disk."""
    tile, at_once = (None, False) if residency is None else (residency.tile, residency.gradients == AT_ONCE)
    return {"tile": tile, "gradients that are stepped as they arrive": at_once}


def expands(folder: str) -> bool:
    """Whether the user that a folder such as ~/store names has a home."""
    try:
        return bool(Path(folder).expanduser())
    except RuntimeError:
        return False


def share_of(activations: str) -> float | None:
    """The share of sample:SHARE; None for another word. Raises ConfigError for what is neither, or out of range."""
    if activations in ACTIVATIONS:
        return None
    way, _, sample = activations.rpartition("+")
    word, _, text = (sample if way in (RECOMPUTE, RECOMPUTE_FROM_DISK) else activations).partition(":")
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if word != SAMPLE or math.isnan(share):
        known = (*ACTIVATIONS, f"{SAMPLE}:0.3", f"{RECOMPUTE}+{SAMPLE}:0.3")
        raise ConfigError(
            f"activations {activations!r}: must be one of {', '.join(known)}{similar(activations, known)}"
        )
    if not 0 < share <= 1:
        close = 0.1 if share <= 0 else 1
        raise ConfigError(f"activations {activations!r}: the share must be above 0 and at most 1; nearest: {close}")
    return share
