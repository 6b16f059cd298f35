"""What lies in memory and what on a disk: options and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinwire.codecs import Codec
from thinwire.errors import ConfigError, Problems
from thinwire.methods.memory.units import read_byte_rate, read_bytes
from thinwire.methods.options import check_types
from thinwire.tiers.coding import PLAIN, Coding

FP32_BYTES = 4
# How moments lie on a disk, by name, and the kinds of state that are sums or means of squares.
CODECS = {"fp32": "fp32", "int8": "int8/64"}
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta")
# Elements of a sub-group where nothing is stated, and the most of the budget that the passing ones may take.
SUB_GROUP, PASSING_SHARE = 1 << 22, 1 / 32
# Sub-groups begin where blocks of the disk do.
LEAST_SUB_GROUP = 1024


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
    """Folder for what does not fit, on a disk of this machine. `thinwire train` takes RUN_DIR/store by default."""
    weights: Literal["auto", "memory", "disk"] = "auto"
    """Where whole weights lie: memory, disk, or auto: on the disk if the budget is too small for them and their
    gradients."""
    optimizer: Literal["auto", "memory", "disk"] = "auto"
    """Where masters and optimizer state lie: memory, disk, or auto: on the disk, except what fits in the budget."""
    states: Literal["fp32", "int8"] = "fp32"
    """Form of the optimizer's moments on the disk: fp32, or int8: integers of 8 bits in groups of 64 with unbiased
    rounding, second moments as square roots. Masters stay fp32."""
    activations: Literal["auto", "keep", "recompute"] = "auto"
    """What a forward keeps for its backward: keep: everything.

    recompute: only each layer's input, and the rest is computed
    again; auto: in `thinwire train`, recompute if the budget needs it."""
    sub_group: int | None = None
    """Elements that are stepped at once; a multiple of 1024. By default 4 million, fewer with a small budget."""
    disk_rate: str | None = None
    """Limit reads and writes together to a rate such as 500MB/s, to try out a slower disk."""

    def __post_init__(self) -> None:
        problems = Problems()
        with problems.collect():
            check_types(self)
            if self.memory is not None and not read_bytes(self.memory):
                raise ConfigError(f"memory {self.memory!r}: must be above 0")
        with problems.collect():
            if self.disk_rate is not None:
                read_byte_rate(self.disk_rate)
        if isinstance(self.sub_group, int) and (self.sub_group < 1 or self.sub_group % LEAST_SUB_GROUP):
            near = max(1, round(self.sub_group / LEAST_SUB_GROUP)) * LEAST_SUB_GROUP
            rule = f"must be a multiple of {LEAST_SUB_GROUP}"
            problems.messages.append(f"--residency.sub-group {self.sub_group}: {rule}; nearest: {near}")
        if self.states != "fp32" and self.optimizer == "memory":
            problems.messages.append(
                f"--residency.states {self.states}: moments on a disk, and --residency.optimizer is memory; nearest: "
                "--residency.optimizer disk, or --residency.states fp32"
            )
        problems.raise_any()

    @property
    def memory_bytes(self) -> int | None:
        """The budget in bytes; None: no budget."""
        return None if self.memory is None else read_bytes(self.memory)

    @property
    def rate(self) -> float | None:
        """Bytes per second to which the disk is limited; None: no limit."""
        return None if self.disk_rate is None else read_byte_rate(self.disk_rate)

    @property
    def folder(self) -> Path:
        """The folder on the disk. Raises ConfigError if none is stated."""
        if self.store is None:
            raise ConfigError("residency: no store is stated for what does not fit in memory: name a folder on a disk")
        return Path(self.store).expanduser()

    def coding(self, kind: str) -> Coding:
        """How a kind of optimizer state is stored on the disk."""
        return PLAIN if self.states == "fp32" else Coding(Codec.parse(CODECS[self.states]), of_roots=kind in SQUARES)

    @property
    def state_share(self) -> float:
        """Size of masters and two moments on the disk, divided by their size in fp32."""
        return (1 + 2 * Codec.parse(CODECS[self.states]).bits_per_element / (8 * FP32_BYTES)) / 3

    def disk_bytes(self, state_bytes: int) -> int:
        """Bytes on the disk for masters and two moments of `state_bytes` bytes in fp32.

        Moments that are stored as integers have a second place on the disk, where they are fp32 for a checkpoint.
        """
        if self.states == "fp32":
            return state_bytes
        return int(self.state_share * state_bytes) + state_bytes * 2 // 3

    def sub_group_numel(self, num_kinds: int) -> int:
        """Elements of a sub-group with `num_kinds` fp32 numbers each; three sub-groups are in memory at a time."""
        if self.sub_group is not None:
            return self.sub_group
        if self.memory_bytes is None:
            return SUB_GROUP
        return max(1, min(SUB_GROUP, int(self.memory_bytes * PASSING_SHARE) // (3 * num_kinds * FP32_BYTES)))
