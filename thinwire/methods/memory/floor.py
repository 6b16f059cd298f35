"""The least memory in which a process can train, part by part."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.layout.buckets import Unit
from thinwire.methods.interface import MethodPlan
from thinwire.methods.memory.residency import (
    AT_ONCE,
    FP32_BYTES,
    PASSING_SHARE,
    RECOMPUTE,
    RECOMPUTE_FROM_DISK,
    Residency,
)
from thinwire.methods.sharded import ShardedMethod

# Torch, gloo, compiled kernels and the stacks of threads, before there is a model.
PROCESS_BYTES = 480_000_000
# Temporary tensors of kernels, and what the allocator can't give back.
KERNEL_BYTES = 64_000_000
# Sub-groups that are in memory at a time.
NUM_PASSING = 3
# Master, and AdamW's two moments.
NUM_STATES = 3
# Buckets of weights in memory at a time, and of gradients: one computes, one travels.
NUM_BUCKETS = 2
# Of mean gradients that wait on a disk: two are written, or read and stepped, while one is reduced or sent.
NUM_MEANS = 3
# Buckets of fewer elements stay in memory.
SMALL_NUMEL = 100_000
# Memory through which rows of an embedding pass, and the stack of the thread that reads them.
ROWS_BYTES = 4 << 20
# Where weights and gradients would leave less than a third of the budget to all else, they are better on a disk.
MOST_SHARE = 2 / 3
# Scratch memory of the messages of a bucket, over its size: gradients as sent, and packets; and messages under way.
PACKET_SHARE, NUM_SENT = 1.5, 2
# Of the budget, what the floor may take for a way to be chosen.
FULL_SHARE = 0.9
# Bytes that a forward keeps in memory for its backward, by what becomes of activations; and "inputs", those of layers.
KeptBytes = Mapping[str, int]


@dataclass(frozen=True)
class Floor:
    """Bytes that a process needs, by part, under its residency.

    Attributes:
        disk: bytes on the disk.
        is_whole: activations are among the parts.
        passing: bytes of sub-groups, a share of the budget that is part of the floor.
    """

    parts: dict[str, int]
    disk: int
    is_whole: bool
    passing: int = 0

    @classmethod
    def of(
        cls, residency: Residency, method: ShardedMethod, model: nn.Module, topology: Topology, micro_batches: int,
        kept: KeptBytes | None = None,
    ) -> Floor:  # fmt: skip
        """The least memory of a rank. model: only its shapes are used. kept: see `settled`."""
        plan = method.plan(model, topology, micro_batches)
        parts = {"process": PROCESS_BYTES, "kernels": KERNEL_BYTES} | plan.memory
        disk = passing = 0
        if residency.optimizer != "memory":
            passing = NUM_PASSING * NUM_STATES * FP32_BYTES * residency.sub_group_numel(NUM_STATES)
            disk, parts["optimizer"] = residency.disk_bytes(plan.optimizer), min(passing, plan.optimizer)
        largest = max((FP32_BYTES * unit.numel for unit in units_of(method, model, topology)), default=0)
        mean = mean_bytes(plan)
        own = plan.gradients - mean
        # Those of weights that are used at both ends of the model wait from one to the other.
        passing_grads = NUM_BUCKETS * largest + max(0, tied_bytes(model) - largest)
        if residency.weights == "disk":
            disk += plan.weights
            parts["weights"] = min(NUM_BUCKETS * largest, plan.weights)
            embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
            num_tables = sum(module.weight.numel() >= SMALL_NUMEL for module in embeddings)
            # That of one is among the process's.
            parts["rows"] = ROWS_BYTES * max(0, num_tables - 1)
            if micro_batches == 1:
                own = min(own, passing_grads)
        if residency.gradients == "disk":
            disk, mean = disk + mean, min(mean, NUM_MEANS * largest // topology.world_size)
        if residency.gradients == AT_ONCE:
            mean = min(mean, NUM_MEANS * largest // topology.world_size)
            own = min(own, passing_grads) if micro_batches == 1 else own
        parts["gradients"] = own + mean
        if topology.world_size > 1:
            parts["packets"] = int(NUM_SENT * PACKET_SHARE * largest)
        if kept is not None:
            disk += residency.spilled(kept)
            parts["activations"] = kept.get(residency.activations, kept["keep"])
        found = {name: num_bytes for name, num_bytes in parts.items() if num_bytes}
        return cls(found, disk, kept is not None, 0 if residency.sub_group else passing)

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())

    def check(self, memory_bytes: int | None) -> None:
        """Raise ConfigError, listing all parts, for a budget below it."""
        if memory_bytes is None or memory_bytes >= self.num_bytes:
            return
        listed = ", ".join(f"{name} {num_bytes / 1e6:.0f} MB" for name, num_bytes in self.parts.items())
        # A larger budget has larger sub-groups.
        least = math.ceil(max(self.num_bytes, (self.num_bytes - self.passing) / (1 - PASSING_SHARE)) / 1e6)
        ranks = ", or more ranks" if self.num_bytes > 2 * PROCESS_BYTES else ""
        raise ConfigError(
            f"--memory of {memory_bytes / 1e6:.0f} MB is below the floor of {self.num_bytes / 1e6:.0f} MB: {listed}"
            f"{'' if self.is_whole else ', before activations'}; nearest: --memory {least}mb{ranks}"
        )


def mean_bytes(plan: MethodPlan) -> int:
    """Bytes of the mean gradients of which a rank has the masters."""
    return plan.optimizer // NUM_STATES


def tied_bytes(model: nn.Module) -> int:
    """Bytes of the gradients of trained weights that several modules share."""
    uses = Counter(param for module in model.modules() for param in module._parameters.values() if param is not None)
    return sum(FP32_BYTES * param.numel() for param, num in uses.items() if num > 1 and param.requires_grad)


def units_of(method: ShardedMethod, model: nn.Module, topology: Topology) -> tuple[Unit, ...]:
    """The buckets of a model, of which only shapes are used."""
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    return method.units(model, trained, [method.levels(topology)], lambda _: 0, None)


def settled(
    residency: Residency, method: ShardedMethod, model: nn.Module, topology: Topology, micro_batches: int = 1,
    kept: KeptBytes | None = None, *, across: bool = False, at_once: bool = False,
) -> Residency:  # fmt: skip
    """The residency with `auto` decided for weights, gradients and activations.

    Gradients move less than what a step moves anyway; to compute layers again takes a third more time. So of the ways
    that fit, the first of these is taken: both in memory; gradients on the disk; layers computed again; both; the
    inputs of layers on the disk, too.

    Args:
        model: only its shapes are used.
        kept: bytes that a forward keeps in memory for its backward, by what becomes of activations; None: not known.
        across: the optimizer looks across matrices, and its gradients do not wait on a disk.
        at_once: buckets may be stepped as gradients arrive; they are where the budget asks for it.
    """
    residency = _with_weights(residency, method, model, topology, micro_batches)
    gradients, activations = [residency.gradients], [residency.activations]
    if residency.gradients == "auto":
        gradients = ["memory"] if across or residency.optimizer == "memory" else ["memory", "disk"]
        gradients += ["step"] if at_once else []
    if residency.activations == "auto":
        activations = ["keep"] if kept is None else ["keep", RECOMPUTE]
        activations = [RECOMPUTE] if residency.is_sliced else activations
        activations += [RECOMPUTE_FROM_DISK] if kept is not None and RECOMPUTE_FROM_DISK in kept else []
    ways = [replace(residency, gradients=g, activations=a) for a in activations for g in gradients]
    budget = residency.memory_bytes
    if budget is None:
        return ways[0]
    least = {way: Floor.of(way, method, model, topology, micro_batches, kept).num_bytes for way in ways}
    return next((way for way in ways if least[way] <= FULL_SHARE * budget), min(ways, key=least.__getitem__))


def _with_weights(
    residency: Residency, method: ShardedMethod, model: nn.Module, topology: Topology, micro_batches: int
) -> Residency:
    if residency.weights != "auto":
        return residency
    whole = Floor.of(replace(residency, weights="memory"), method, model, topology, micro_batches).num_bytes
    budget = residency.memory_bytes
    is_tight = budget is not None and whole > MOST_SHARE * budget
    is_cut = method.levels(topology).weights_over > 1
    return replace(residency, weights="disk" if is_tight and not is_cut else "memory")
