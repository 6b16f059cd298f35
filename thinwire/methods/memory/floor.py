"""The least memory in which a process can train, part by part."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from thinwire.calibration.process import USUAL
from thinwire.device import num_gpus
from thinwire.errors import ConfigError
from thinwire.methods.memory.residency import AT_ONCE, FP32_BYTES, KEEP, PASSING_SHARE, Residency
from thinwire.methods.memory.setup import NUM_STATES, SMALL_NUMEL, Setup

# Temporary tensors of kernels, and what the allocator can't give back; and how much of it is touched.
KERNEL_BYTES, TOUCHED_BYTES = 64_000_000, 48_000_000
# Sub-groups that are in memory at a time.
NUM_PASSING = 3
# Buckets of weights in memory at a time, and of gradients: one computes, one travels.
NUM_BUCKETS = 2
# Of weights without a budget: others are read, sent and written while one computes.
NUM_UNBOUNDED = 4
# Of mean gradients that wait on a disk: two are written, or read and stepped, while one is reduced or sent.
NUM_MEANS = 3
# Memory through which rows of an embedding pass, and the stack of the thread that reads them.
ROWS_BYTES = 4 << 20
# Scratch memory of the messages of a bucket, over its size: gradients as sent, and packets; and messages under way.
PACKET_SHARE, NUM_SENT = 1.5, 2


@dataclass(frozen=True)
class Floor:
    """Bytes that a process needs, by part, under its residency.

    Attributes:
        disk: bytes on the disk.
        is_whole: activations are among the parts.
        passing: bytes of sub-groups, of which a larger budget may have larger ones.
        most_passing: those of the largest sub-groups.
        start: bytes before the first step, if the model is built whole; 0: it is not.
    """

    parts: dict[str, int]
    disk: int
    is_whole: bool
    passing: int = 0
    most_passing: int = 0
    start: int = 0

    @classmethod
    def of(cls, residency: Residency, setup: Setup) -> Floor:
        """The least memory of a rank."""
        plan, states, kept = setup.plan, setup.states, setup.kept
        parts = {"process": setup.process.data, "kernels": KERNEL_BYTES} | plan.memory | {"optimizer": states.whole}
        parts |= setup.outer
        disk = passing = most_passing = 0
        if residency.optimizer != "memory" and states.disk:
            disk = residency.piece_disk_bytes(states.disk, states.masters)
            parts["optimizer"] = states.piece + residency.coded_bytes(min(states.piece, states.masters))
        elif residency.optimizer != "memory":
            each = NUM_STATES * FP32_BYTES
            numel = states.whole // each
            groups = residency.sub_group_numel(NUM_STATES, numel), residency.most_sub_group_numel(numel)
            passing, most_passing = (min(NUM_PASSING * each * group, states.whole) for group in groups)
            disk, parts["optimizer"] = residency.disk_bytes(states.whole), passing
        parts["sums"] = states.at_once if residency.gradients == AT_ONCE else states.sums
        largest, mean, world_size = setup.largest_bytes, setup.mean_bytes, setup.topology.world_size
        own = plan.gradients - mean
        # Those of weights that are used at both ends of the model wait from one to the other.
        passing_grads = NUM_BUCKETS * largest + max(0, setup.tied_bytes - largest)
        if residency.weights == "disk":
            disk += plan.weights
            over = setup.method.levels(setup.topology).weights_over
            # Of parts of buckets one more: the next one is gathered while another computes.
            held = held_bytes(residency, setup) if over == 1 else (num_held(residency) + 1) * largest // over
            parts["weights"] = min(held, plan.weights)
            embeddings = [module for module in setup.model.modules() if isinstance(module, nn.Embedding)]
            num_tables = sum(module.weight.numel() >= SMALL_NUMEL for module in embeddings)
            # That of one is among the process's.
            parts["rows"] = ROWS_BYTES * max(0, num_tables - 1)
            if setup.micro_batches == 1 and over == 1:
                own = min(own, passing_grads)
        if residency.gradients == "disk":
            disk, mean = disk + mean, min(mean, NUM_MEANS * largest // world_size)
        if residency.gradients == AT_ONCE:
            mean = min(mean, NUM_MEANS * largest // world_size)
            own = min(own, passing_grads) if setup.micro_batches == 1 else own
        parts["gradients"] = own + mean
        if world_size > 1:
            parts["packets"] = int(NUM_SENT * PACKET_SHARE * largest)
        if kept is not None:
            disk += residency.spilled(kept)
            parts["activations"] = kept.get(residency.way, kept[KEEP])
        found = {name: num_bytes for name, num_bytes in parts.items() if num_bytes}
        # A bucket is filled beside the model that it is taken from.
        start = setup.process.data + setup.model_bytes + largest if setup.is_built_whole else 0
        return cls(found, disk, kept is not None, passing, most_passing, start)

    @property
    def step_bytes(self) -> int:
        """What a step needs."""
        return sum(self.parts.values())

    @property
    def num_bytes(self) -> int:
        """What the start needs, or a step."""
        return max(self.start, self.step_bytes)

    def least_bytes(self, more: float = 0.0) -> float:
        """The smallest budget that suffices, in bytes. more: what a process holds beyond a usual one."""
        # A larger budget has larger sub-groups, up to the largest, or to their share of it.
        rest = self.step_bytes - self.passing + more
        return max(self.num_bytes + more, min(rest + self.most_passing, rest / (1 - PASSING_SHARE)))

    def check(self, memory_bytes: int | None, spelled: str = "--memory {}") -> None:
        """Raise ConfigError, listing all parts, for a budget below it. spelled: how a budget is stated."""
        if memory_bytes is None or memory_bytes >= self.num_bytes:
            return
        process = self.parts["process"]
        listed = ", ".join(f"{name} {num_bytes / 1e6:.0f} MB" for name, num_bytes in self.parts.items())
        if self.start == self.num_bytes:
            model_mb = (self.start - process) / 1e6
            listed = f"the model is built whole at first, {model_mb:.0f} MB; process {process / 1e6:.0f} MB"
        least = math.ceil(self.least_bytes() / 1e6)
        ranks = ", or more ranks" if self.num_bytes > max(self.start, 2 * process) else ""
        budget = f"{memory_bytes // 10**6} MB" if memory_bytes >= 10**6 else f"{memory_bytes:,} B"
        raise ConfigError(
            f"{'--' if '--' in spelled else ''}memory of {budget} is below the floor of "
            f"{math.ceil(self.num_bytes / 1e6)} MB: {listed}{'' if self.is_whole else ', before activations'}; "
            f"nearest: {spelled.format(f'{least}mb')}{ranks}{cuda_build(process)}"
        )


def num_held(residency: Residency) -> int:
    """Buckets of weights in memory at a time. Under a budget, those that fit stay besides, after the first steps."""
    return NUM_UNBOUNDED if residency.memory_bytes is None else NUM_BUCKETS


def held_bytes(residency: Residency, setup: Setup) -> int:
    """Bytes of weights in memory at a time, where they are not cut. Slices take turns with a whole layer's weights."""
    layer = max(setup.layer_bytes, default=0) + setup.largest_bytes if residency.is_sliced else 0
    return max(num_held(residency) * setup.largest_bytes, layer)


def cuda_build(process_bytes: int) -> str:
    """What of a process torch's CUDA build takes, in words; empty: it is another build, or there is a GPU for it."""
    more = process_bytes - USUAL.data
    if torch.version.cuda is None or num_gpus() or more <= 0:
        return ""
    return (
        f", or torch's CPU build: this one is for CUDA {torch.version.cuda}, and about {more / 1e6:.0f} MB of the "
        "process are there for GPUs, of which it sees none"
    )
