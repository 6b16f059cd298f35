"""`thinwire.compress_fsdp`: compressed communication for a model that was given to fully_shard, in one line."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook

from thinwire._compat import FSDPGroup, fsdp_groups
from thinwire.codecs import warm
from thinwire.collectives import Communicator, Meter
from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.errors import ConfigError
from thinwire.hosts.fsdp.collectives import AllGather, DifferenceGather, ReduceScatter
from thinwire.hosts.fsdp.layout import Unit, check_layout_of
from thinwire.hosts.watchdog import DEFAULT_DEAD_STEPS, Watchdog
from thinwire.layout.formats import Strategy, describe_formats
from thinwire.methods.data.frontier import Frontier
from thinwire.methods.data.loco import LoCo
from thinwire.methods.data.zeropp import ZeroPP
from thinwire.state.replicas import (
    Row,
    check_layout,
    check_updates,
    unwrapped,
    updates_any,
)
from thinwire.table import announce as announce_table

# Groups of torch live as long as their modules.
_compressed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def compress_fsdp(
    model: nn.Module,
    strategy: Strategy | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    local_size: int | None = None,
    overlap: bool = True,
    dead_steps: int = DEFAULT_DEAD_STEPS,
    seed: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    checked: bool = False,
    announce: bool = True,
) -> CompressedFSDP:
    """Compress what FSDP2 sends for a model that was given to fully_shard; loop and optimizer stay as they are.

    strategy: what travels and how, `ZeroPP()` by default. optimizer: to be watched, so that a run whose gradient is
    zero or not finite for `dead_steps` steps in a row stops with a reason (0: never). local_size: ranks per node,
    found by itself if None. overlap: gather the next module while one computes. seed: of stochastic rounding.
    timeout_s, checked: see Communicator. announce: rank 0 prints to stderr what was asked for, what is in effect, and
    why they differ.

    Call it on every rank, after fully_shard and after the weights have their values. Gradients are complete when
    backward returns. Raises ConfigError for a model that it can't compress, LayoutError for a torch that lays out
    FSDP2's buffers in an unknown way.
    Source: ZeRO++ (ICLR 2024).
    """
    strategy = _checked(strategy if strategy is not None else ZeroPP())
    groups = fsdp_groups(model)
    mesh, dog = mesh_of(model, groups), Watchdog(dead_steps)
    optimizer = unwrapped(optimizer)
    if optimizer is not None:
        check_updates(optimizer, weights_of(groups), "fully_shard")
    comm = Communicator(mesh, local_size=local_size, timeout_s=timeout_s, checked=checked)
    compressed = CompressedFSDP(model, groups, strategy, comm, seed=seed, overlap=overlap)
    if optimizer is not None:
        compressed.watch(optimizer, dog)
    if announce and comm.rank == 0:
        announce_table(compressed.describe())
    return compressed


def _checked(strategy: object) -> Strategy:
    """The strategy; raises ConfigError for what gives no codecs for FSDP2's collectives."""
    if isinstance(strategy, type) or not (hasattr(strategy, "matrix") and hasattr(strategy, "vector")):
        given = strategy.__name__ if isinstance(strategy, type) else repr(strategy)
        raise ConfigError(
            f"compress_fsdp got {given}: must be a strategy of codecs for weights and gradients, such as "
            "thinwire.ZeroPP() or thinwire.SDP4Bit()"
        )
    if isinstance(strategy, Frontier):
        raise ConfigError("frontier cuts a model in its own way, not FSDP2's: use `thinwire train --strategy frontier`")
    return cast(Strategy, strategy)


def mesh_of(model: nn.Module, groups: Sequence[FSDPGroup]) -> DeviceMesh:
    """The ranks over which FSDP2 shards the model; raises ConfigError for a model that can't be compressed."""
    if not groups:
        raise ConfigError(
            f"no part of this {type(model).__name__} was given to fully_shard: call "
            "torch.distributed.fsdp.fully_shard first (FSDP1 has no place for other collectives), or use thinwire.zero"
        )
    if any(group.module in _compressed for group in groups):
        raise ConfigError("this model is compressed already: call compress_fsdp once, or close() what it gave before")
    if len({id(group.module) for group in groups}) < len(groups):
        raise ConfigError(
            "a module with parameters on several meshes has two buffers, and FSDP2 one place for a plug-in"
        )
    meshes: list[DeviceMesh] = []
    for group in groups:
        group.module.reshard()
        for param in group.params:
            meshes.append(_mesh_of_parameter(param.sharded))
    if any(mesh != meshes[0] for mesh in meshes):
        raise ConfigError(
            "the model's parameters are sharded over several meshes: compress each part with its own call"
        )
    return meshes[0]


def weights_of(groups: Iterable[FSDPGroup]) -> list[Tensor]:
    """The user's parameters, and this rank's parts of them, in whose memory they lie."""
    return [tensor for group in groups for param in group.params for tensor in (param.sharded, param.shard_data)]


def _mesh_of_parameter(param: nn.Parameter) -> DeviceMesh:
    assert isinstance(param, DTensor)
    mesh, placements = param.device_mesh, param.placements
    if mesh.ndim != 1 or not isinstance(placements[0], Shard):
        raise ConfigError(
            f"a parameter of shape {tuple(param.shape)} lies on a mesh of {mesh.ndim} dimension(s) as {placements}: "
            "must be sharded over one; for HSDP shard over all ranks instead, the secondary partition keeps "
            "backward inside a node"
        )
    if param.is_meta:
        raise ConfigError("the model is on the meta device: give it memory and values first (to_empty, then init)")
    return mesh


class CompressedFSDP:
    """FSDP2's collectives over a strategy's codecs; made by `compress_fsdp`.

    units: what FSDP2 gathers together, in order of registration. comm: the group of ranks, with the meter.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[FSDPGroup],
        strategy: Strategy,
        comm: Communicator,
        *,
        seed: int,
        overlap: bool,
    ) -> None:
        self.model, self.strategy, self.comm, self.overlap = model, strategy, comm, overlap
        # What a strategy without a word on it gets: the method's own way.
        self.secondary = bool(getattr(strategy, "secondary", True)) and comm.topology.num_nodes > 1
        self.units = build_units(model, groups, strategy, comm.world_size)
        for unit in self.units:
            check_layout_of(unit)
        warm((*strategy.matrix().codecs, *strategy.vector().codecs), self.units[0].params[0].sharded.device)
        under_way: deque[Future[None]] = deque()
        self.differences = strategy.matrix().differences or strategy.vector().differences
        kind = DifferenceGather if self.differences else AllGather
        self.gathers = [kind(comm, unit, seed, self.secondary, self._note_order) for unit in self.units]
        self.reductions = [ReduceScatter(comm, unit, seed, under_way, loco_of(strategy, unit)) for unit in self.units]
        self._order: list[Unit] | None = [] if overlap else None
        # Loaded weights are far from those before; FSDP2's modules load one by one.
        self._hooks: list[Any] = [
            unit.group.module.register_load_state_dict_post_hook(self._note_load) for unit in self.units
        ]
        self._watched: Watched | None = None
        self._before = [
            unit.group.set_comms(gather, reduction)
            for unit, gather, reduction in zip(self.units, self.gathers, self.reductions, strict=True)
        ]
        self._hooks.append(register_optimizer_step_post_hook(self._note_step))
        for unit in self.units:
            unit.group.set_async(overlap)
            _compressed.add(unit.group.module)
            for number in unit.trained():
                hook = unit.reached_hook(number)
                self._hooks.append(unit.params[number].whole.register_post_accumulate_grad_hook(hook))

    # ---------------------------------------------------------------- the user's side

    @property
    def meter(self) -> Meter:
        """Bytes and seconds: "weights", "weights_again" (from the secondary partition) and "gradients", by level."""
        return self.comm.meter

    def weights_changed(self, *, replaced: bool = True) -> None:
        """Say that weights were written in a way that torch doesn't count, such as `param.data[0] = 1`; on all ranks.

        Changes through the optimizer, under no_grad, or by loading are noticed without it. replaced: by quite other
        values, so that weight differences start anew, too.
        """
        for gather in self.gathers:
            gather.forget(replaced=replaced)

    def watch(self, optimizer: torch.optim.Optimizer, dog: Watchdog) -> None:
        """Stop with DeadGradientError when the gradient was zero or not finite too often in a row."""
        if dog.limit:
            self._watched = Watched(self, dog)
            self._hooks.append(optimizer.register_step_pre_hook(self._watched.before_step))

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, whole and without padding."""
        return sum(param.sharded.numel() for unit in self.units for param in unit.params)

    @property
    def bytes_per_step(self) -> int:
        """Payload this rank sends in a step of one forward and one backward in which every parameter has a gradient."""
        backward = sum(map(self._backward_bytes, self.units, self.gathers))
        gathers = sum(gather.gather_bytes() for gather in self.gathers)
        return gathers + backward + sum(r.reduce_bytes() for r in self.reductions) + self._watch_bytes

    @property
    def uncompressed_bytes_per_step(self) -> float:
        """What fp32 gradients and weights of a sharded optimizer would need: 8 (P-1)/P bytes per parameter."""
        return 8 * self.num_parameters * (1 - 1 / self.comm.world_size)

    @property
    def kept_bytes(self) -> int:
        """Memory of this rank's part of the secondary partition."""
        return sum(gather.kept_bytes for gather in self.gathers)

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        cut = f"{len(self.units)} FSDP2 module(s), {self.num_parameters:,} parameters"
        rows: list[Row] = [
            (f"strategy {self.strategy.name}", cut, "torch's layout checked with a pattern"),
            ("topology", str(self.comm.topology), self.comm.topology_reason),
        ]
        if self.comm.world_size == 1:
            return [*rows, ("compression", "none", "a group of one sends nothing and stays exact")]
        rows += describe_formats(self.strategy, self.comm.topology)
        rows += [self._describe_secondary(), self._describe_loco(), *self._describe_overlap(), self._describe_watch()]
        sent, plain = self.bytes_per_step / 1e6, self.uncompressed_bytes_per_step / 1e6
        return [*rows, ("sent per rank and step", f"{sent:.3f} MB", f"{plain:.3f} MB in fp32, gathered once")]

    def close(self) -> None:
        """Give FSDP2 its own collectives back, which are exact; a collective."""
        for hook in self._hooks:
            hook.remove()
        for unit, before in zip(self.units, self._before, strict=True):
            unit.group.set_comms(*before)
            unit.group.set_async(False)
            _compressed.discard(unit.group.module)
        self.comm.close()

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of what is needed to go on bit for bit, besides weights and optimizer; between steps.

        Tensors are the live ones: save or copy them before the next step.
        """
        return {
            "gathers": [(gather.count, gather.state()) for gather in self.gathers],
            "reductions": [reduction.count for reduction in self.reductions],
            "loco": [r.loco.state_dict() if r.loco is not None else {} for r in self.reductions],
            "layout": self._layout(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what state_dict gave, after the weights were loaded; raises ConfigError where it does not fit."""
        check_layout(self._layout(), state_dict["layout"])
        for gather, (count, state) in zip(self.gathers, state_dict["gathers"], strict=True):
            gather.count = count
            gather.load(state)
        for reduction, count, errors in zip(self.reductions, state_dict["reductions"], state_dict["loco"], strict=True):
            reduction.count = count
            if reduction.loco is not None:
                reduction.loco.load_state_dict(errors, count)

    def _layout(self) -> dict[str, Any]:
        shapes = repr(
            [(name, tuple(p.sharded.shape)) for u in self.units for name, p in zip(u.names, u.params, strict=True)]
        )
        return {
            "rank": self.comm.rank,
            "world_size": self.comm.world_size,
            "local_size": self.comm.topology.local_size,
            "strategy": repr((self.strategy.matrix(), self.strategy.vector(), getattr(self.strategy, "loco", False))),
            "parameters": hashlib.sha256(shapes.encode()).hexdigest()[:16],
        }

    # ---------------------------------------------------------------- inside

    def _note_order(self, unit: Unit) -> None:
        """Learn from the first forward which module follows which, and let each gather the next one's weights."""
        if self._order is None:
            return
        if unit not in self._order:
            self._order.append(unit)
            return
        for earlier, later in pairwise(self._order):
            if not earlier.group.prefetches_forward:
                earlier.group.module.set_modules_to_forward_prefetch([later.group.module])
        self._order = None

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """After a step of any optimizer: fused ones don't count their writes."""
        if updates_any(optimizer, weights_of(unit.group for unit in self.units)):
            self.weights_changed(replaced=False)

    def _note_load(self, *_: object) -> None:
        self.weights_changed()

    def _backward_bytes(self, unit: Unit, gather: AllGather) -> int:
        size = unit.group.backward_group_size(self.model)
        if size in (0, self.comm.world_size):
            return gather.again_bytes() if size else 0
        return (size - 1) * (unit.shard_numel * self.comm.world_size // size) * unit.dtype.itemsize

    @property
    def _watch_bytes(self) -> int:
        return 8 * (self.comm.world_size - 1) if self._watched is not None else 0

    def _describe_secondary(self) -> Row:
        asked = "secondary partition"
        if self.differences:
            return (
                "reference of differences",
                f"{self.kept_bytes / 1e6:.3f} MB a rank",
                "fp32, once a node; it gathers inside",
            )
        if self.secondary:
            return (
                asked,
                f"{self.kept_bytes / 1e6:.3f} MB a rank",
                "packets; gathers of unchanged weights stay in a node",
            )
        if not getattr(self.strategy, "secondary", True):
            return asked, "off", "every gather crosses between nodes"
        return asked, "off", "all ranks are on one node"

    def _describe_loco(self) -> Row:
        locos = [reduction.loco for reduction in self.reductions if reduction.loco is not None]
        if not locos:
            return "error feedback", "off", "loco=True: what codecs lose in one step is added to the next"
        memory = self.num_parameters * (1 + 1 / self.comm.topology.local_size) / 1e6
        return "error feedback", f"LoCo, beta {locos[0].beta}", f"about {memory:.3f} MB a rank, 8 bits"

    def _describe_overlap(self) -> list[Row]:
        gathers = (
            "gathers overlap",
            "on" if self.overlap else "off",
            "one module ahead, in the order of the first forward",
        )
        waits: Counter[str] = Counter()
        for reduction in self.reductions:
            waits.update(reduction.waits)
        known = {u.group.reads_gradient_at_once(u.reduce_dtype) for u in self.units} - {""}
        why = "; ".join(known) or "; ".join(f"{n} waited: {reason}" for reason, n in waits.items())
        return [gathers, ("reductions overlap", "off" if known else "on", why or "backward ends when all are complete")]

    def _describe_watch(self) -> Row:
        if self._watched is None:
            return "dead gradients", "not watched", "give compress_fsdp the optimizer, and dead_steps above 0"
        return "dead gradients", f"stop after {self._watched.dog.limit} in a row", "8 bytes a peer and step"


def build_units(model: nn.Module, groups: Iterable[FSDPGroup], strategy: Strategy, world_size: int) -> list[Unit]:
    """What FSDP2 gathers together, with a wire for each parameter: vector() up to one dimension, matrix() above."""
    if any(codec.has_variable_length for wire in (strategy.matrix(), strategy.vector()) for codec in wire.codecs):
        raise ConfigError(f"entropy coding of {strategy.name}: FSDP2's buffers are of fixed length; leave it out")
    named = {id(param): name for name, param in model.named_parameters(remove_duplicate=False)}
    units: list[Unit] = []
    for index, group in enumerate(groups):
        params = [param.sharded for param in group.params]
        wires = [strategy.vector() if param.dim() < 2 else strategy.matrix() for param in params]
        units.append(Unit(index, group, [named.get(id(param), "?") for param in params], wires, world_size))
    return units


def loco_of(strategy: Strategy, unit: Unit) -> LoCo | None:
    """The memory that the strategy asks for."""
    if not isinstance(strategy, ZeroPP) or not strategy.loco:
        return None
    return LoCo([param.shard_numel for param in unit.params], strategy.loco_beta, strategy.loco_reset)


class Watched:
    """The global norm of the gradient before every step, which the ranks tell each other behind the step's back.

    What they say of a step is read in the next, so nobody waits for it.
    """

    def __init__(self, compressed: CompressedFSDP, dog: Watchdog) -> None:
        self.compressed, self.dog = compressed, dog
        self.steps = 0
        self._said: Future[Tensor] | None = None

    def before_step(self, *_: object) -> None:
        """An optimizer's step pre-hook; raises DeadGradientError."""
        comm = self.compressed.comm
        if self._said is not None:
            self.dog.note(float(comm.wait(self._said).sum()) ** 0.5, self.steps)
        self.steps += 1
        grads = [param.sharded.grad for unit in self.compressed.units for param in unit.params]
        locals_ = [grad.to_local() for grad in grads if isinstance(grad, DTensor)]
        norm = nn.utils.get_total_norm(locals_) if locals_ else torch.zeros(())
        self._said = comm.all_gather_exact(norm.double().square().view(1))
