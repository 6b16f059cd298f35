"""`thinwire.compress_fsdp`: compressed communication for a model that was given to fully_shard, in one line."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from thinwire._compat.fsdp import FSDPGroup, fsdp_groups
from thinwire.codecs import warm
from thinwire.collectives import Communicator, Meter
from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.errors import ConfigError
from thinwire.hosts.arguments import check_arguments, check_instance
from thinwire.hosts.fsdp.describe import rows_of
from thinwire.hosts.fsdp.gather import AllGather, DifferenceGather
from thinwire.hosts.fsdp.mesh import RankGroup, mesh_ranks
from thinwire.hosts.fsdp.pattern import check_layout_of
from thinwire.hosts.fsdp.reduce import ReduceScatter, ReplicaGroup
from thinwire.hosts.fsdp.unit import GatheredUnit
from thinwire.hosts.fsdp.watch import Watched
from thinwire.methods.interface import GatheredMethod
from thinwire.state.given import optimizer_options, parameters_of, same_on_all_ranks
from thinwire.state.replicas import (
    ReplicaError,
    check_layout,
    check_state,
    check_updates,
    digest,
    refuse_spread,
    short_digest,
    unwrapped,
    updates_any,
)
from thinwire.state.watchdog import DEFAULT_DEAD_STEPS, Watchdog
from thinwire.table import Row, announce as announce_table

# torch's groups live as long as their modules.
_compressed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def compress_fsdp(
    model: nn.Module,
    method: GatheredMethod,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    local_size: int | None = None,
    overlap: bool = True,
    dead_steps: int = DEFAULT_DEAD_STEPS,
    seed: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    checked: bool = False,
    announce: bool = True,
) -> CompressedFSDP:
    """Compress the communication of a model that was given to fully_shard. Loop and optimizer stay as they are.

    Call it on every rank, after fully_shard. Gradients are complete when backward returns.

    Args:
        model: sharded over one dimension of a mesh, or sharded over one and replicated over another (HSDP); also under
            tensor parallelism. On the meta device it is compressed in its first forward, when it has its values.
        method: the codecs of weights and gradients, such as `ZeroPP()`.
        optimizer: the optimizer to watch. A run then stops, with the reason, if its gradient is zero or not finite for
            `dead_steps` steps in a row (0: never), or if ranks did not use the same parameters.
        local_size: ranks of the mesh per node; None: detected.
        overlap: gather the next module while one computes.
        seed: of stochastic rounding.
        timeout_s, checked: see Communicator.
        announce: rank 0 prints to stderr what was asked for, what is in effect, and why they differ.

    Raises ConfigError for a model that it can't compress and for ranks that ask for different things, ReplicaError for
    replicas of HSDP that start with different weights, LayoutError for a torch version whose FSDP2 buffers have an
    unknown layout.
    Source: ZeRO++ (ICLR 2024).
    """
    check_arguments("compress_fsdp", model, unwrapped(optimizer), local_size=local_size, overlap=overlap,
        dead_steps=dead_steps, seed=seed, timeout_s=timeout_s, checked=checked, announce=announce,
    )  # fmt: skip
    method = _checked(method)
    refuse_spread(model)
    groups = groups_of(model)
    ranks, dog, optimizer = mesh_ranks(groups), Watchdog(dead_steps), unwrapped(optimizer)
    with same_on_all_ranks(ranks, timeout_s) as given:
        if optimizer is not None:
            _check_optimizer(optimizer, model, groups)
        given |= {"method": method, "local_size": local_size, "overlap": overlap, "seed": seed}
        given |= {"dead_steps": dead_steps, "checked": checked} | optimizer_options(optimizer, model)
        given |= parameters_of(dict(model.named_parameters()))
    comm = Communicator(ranks, local_size=local_size, timeout_s=timeout_s, checked=checked)

    def started(compressed: CompressedFSDP) -> None:
        check_start(compressed)
        if announce and comm.rank == 0:
            announce_table(compressed.describe())

    compressed = CompressedFSDP(model, groups, method, comm, seed=seed, overlap=overlap, started=started)
    if optimizer is not None:
        compressed.watch(optimizer, dog)
    compressed.start_or_wait()
    return compressed


def _checked(method: object) -> GatheredMethod:
    """The method. Raises ConfigError if it has no codecs for FSDP2's collectives."""
    check_instance(method)
    if why := getattr(method, "not_on_fsdp", ""):
        raise ConfigError(f"{getattr(method, 'name', method)} {why}")
    needed = ("matrix", "vector", "secondary", "gradient_memory")
    if not all(hasattr(method, name) for name in needed):
        raise ConfigError(
            f"compress_fsdp got {method!r}: must be a strategy of codecs for weights and gradients, such as "
            "thinwire.ZeroPP() or thinwire.SDP4Bit()"
        )
    return cast(GatheredMethod, method)


def groups_of(model: nn.Module) -> list[FSDPGroup]:
    """The current FSDP2 parameter groups. Raises ConfigError for a model that can't be compressed."""
    groups = fsdp_groups(model)
    if not groups:
        raise ConfigError(
            f"no part of this {type(model).__name__} was given to fully_shard: call "
            "torch.distributed.fsdp.fully_shard first (FSDP1 has no place for other collectives), or use thinwire.zero"
        )
    if any(group.module in _compressed for group in groups):
        raise ConfigError("this model is compressed already: call compress_fsdp once, or close() its earlier result")
    if len({id(group.module) for group in groups}) < len(groups):
        raise ConfigError(
            "a module with parameters on several meshes has two buffers, but FSDP2 takes only one plug-in for it"
        )
    for group in groups:
        group.module.reshard()
        if not is_meta(model):
            group.take_up()
    return groups


def is_meta(model: nn.Module) -> bool:
    """Whether some parameters of the model are on the meta device and have no values yet."""
    return any(param.is_meta for param in model.parameters())


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, groups: Sequence[FSDPGroup]) -> None:
    if is_meta(model):
        raise ConfigError(
            "the model is on the meta device, and to_empty() replaces the parameters that the optimizer holds: call "
            "fully_shard, to_empty, init the weights, make the optimizer, compress_fsdp, in this order; or call "
            "compress_fsdp before to_empty without the optimizer"
        )
    check_updates(optimizer, weights_of(groups), "fully_shard")


def weights_of(groups: Iterable[FSDPGroup]) -> list[Tensor]:
    """The user's parameters and this rank's parts of them, which share memory."""
    return [tensor for group in groups for param in group.params for tensor in (param.sharded, param.shard_data)]


def check_start(compressed: CompressedFSDP) -> None:
    """Raise ReplicaError where the bits of HSDP's replicas differ. A collective."""
    comm, replicas = compressed.comm, compressed.replicas
    weights = [param.shard_data for unit in compressed.units for param in unit.params] if replicas.size > 1 else []
    words = comm.wait(comm.all_gather_exact(digest(weights)))
    first = replicas.members[0]
    odd = [comm.global_ranks[rank] for rank in replicas.members if not torch.equal(words[rank], words[first])]
    if odd:
        raise ReplicaError(
            f"the weights of rank(s) {odd} are not those of rank {comm.global_ranks[first]}, which holds the same "
            "part: give all ranks the same seed before the weights are made, or load the same checkpoint on all"
        )


class CompressedFSDP:
    """FSDP2's collectives over a method's codecs; made by `compress_fsdp`.

    Args:
        units: FSDP2's parameter groups, in order of registration.
        comm: all ranks of the mesh, with the meter.
        shards: the ranks that cut a parameter together.
        replicas: the ranks that hold the same part, in HSDP.
        started: called when the weights have their values, before FSDP2 gets its collectives.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[FSDPGroup],
        method: GatheredMethod,
        comm: Communicator,
        *,
        seed: int,
        overlap: bool,
        started: Callable[[CompressedFSDP], None] = lambda compressed: None,
    ) -> None:
        self.model, self.method, self.comm, self.overlap = model, method, comm, overlap
        self.shards, self.replicas = (
            RankGroup.of(comm, groups[0].shard_ranks),
            RankGroup.of(comm, groups[0].replica_ranks),
        )
        self.secondary = method.secondary and self.shards.grid.num_nodes > 1
        self.units = build_units(model, groups, method, self.shards.size)
        self.differences = method.matrix().differences or method.vector().differences
        kind, under_way = DifferenceGather if self.differences else AllGather, deque[Future[None]]()
        self.gathers = [kind(self.shards, unit, seed, self.secondary, self._note_order) for unit in self.units]
        self.reductions = [
            ReduceScatter(self.shards, self.replicas, unit, seed, under_way, method.gradient_memory)
            for unit in self.units
        ]
        self.watched: Watched | None = None
        self._started = started
        self._order: list[GatheredUnit] | None = [] if overlap else None
        self._hooks: list[Any] = []
        self._undo: list[Callable[[], object]] = []

    def start_or_wait(self) -> None:
        """Give FSDP2 its collectives now, or before the first forward if the model is on the meta device."""
        if not is_meta(self.model):
            self._start()
            return

        def before_forward(*_: object) -> None:
            hook.remove()
            for unit in self.units:
                unit.group.module.reshard()
                unit.group.take_up()
                if unit.dtypes != [param.dtype for param in unit.params]:
                    raise ConfigError("the model was converted after compress_fsdp: convert it before")
            self._start()

        # This must run before FSDP2's own hook, which gathers the first weights.
        hook = self.model.register_forward_pre_hook(before_forward, prepend=True)
        self._hooks.append(hook)
        _compressed.update(unit.group.module for unit in self.units)

    def _start(self) -> None:
        for unit in self.units:
            check_layout_of(unit)
        warm((*self.method.matrix().codecs, *self.method.vector().codecs), self.units[0].params[0].shard_data.device)
        self._started(self)
        for unit, gather, reduction in zip(self.units, self.gathers, self.reductions, strict=True):
            self._undo.append(partial(unit.group.set_comms, *unit.group.set_comms(gather, reduction)))
            if self.replicas.size > 1:
                self._undo.append(partial(unit.group.set_replicas, unit.group.set_replicas(ReplicaGroup(reduction))))
            unit.group.set_async(self.overlap)
            # Loaded weights are far from the old ones; FSDP2's modules load one by one.
            self._hooks.append(unit.group.module.register_load_state_dict_post_hook(self._note_load))
            for number in unit.trained():
                hook = unit.reached_hook(number)
                self._hooks.append(unit.params[number].whole.register_post_accumulate_grad_hook(hook))
        self._hooks.append(register_optimizer_step_post_hook(self._note_step))
        _compressed.update(unit.group.module for unit in self.units)

    @property
    def meter(self) -> Meter:
        """Bytes and seconds: "weights", "weights_again" (from the secondary partition) and "gradients", by level."""
        return self.comm.meter

    def weights_changed(self, *, replaced: bool = True) -> None:
        """Note that weights were written in a way that torch doesn't count, such as `param.data[0] = 1`.

        Call it on all ranks. Changes through the optimizer, under no_grad, or by loading are noticed without it.
        replaced: the new values are far from the old ones, so weight differences start again.
        """
        for gather in self.gathers:
            gather.forget(replaced=replaced)

    def watch(self, optimizer: torch.optim.Optimizer, dog: Watchdog) -> None:
        """Raise DeadGradientError or UnequalStepError, one step late; see Watched."""
        self.watched = Watched(self.comm, self.units, dog)
        for reduction in self.reductions:
            reduction.note_present = self.watched.note_reduction
        self._hooks.append(optimizer.register_step_pre_hook(self.watched.before_step))

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, whole and without padding. Under tensor parallelism, of this rank's part."""
        return sum(param.shape.numel() for unit in self.units for param in unit.params)

    @property
    def bytes_per_step(self) -> int:
        """Payload bytes that this rank sends in a step of one forward and one backward that uses every parameter."""
        backward = sum(map(self._backward_bytes, self.units, self.gathers))
        gathers = sum(gather.gather_bytes() for gather in self.gathers)
        watch = self.watched.bytes_per_step if self.watched is not None else 0
        return gathers + backward + sum(r.reduce_bytes() for r in self.reductions) + watch

    @property
    def uncompressed_bytes_per_step(self) -> float:
        """Bytes that a sharded optimizer would send with fp32 gradients and weights: 8 (P-1)/P per parameter.

        With R replicas, 8 (R-1)/R bytes per parameter of this rank's part are added.
        """
        part = self.num_parameters / self.shards.size
        return 8 * (self.num_parameters * (1 - 1 / self.shards.size) + part * (1 - 1 / self.replicas.size))

    @property
    def kept_bytes(self) -> int:
        """Bytes of this rank's part of the secondary partition."""
        return sum(gather.kept_bytes for gather in self.gathers)

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        return rows_of(self)

    def close(self) -> None:
        """Give FSDP2 its own, exact collectives back. A collective."""
        for hook in self._hooks:
            hook.remove()
        for undo in self._undo:
            undo()
        for unit in self.units:
            unit.group.set_async(False)
            _compressed.discard(unit.group.module)
        self.comm.close()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, besides weights and optimizer, for continuing bit for bit. Call it between steps.

        The tensors are the live ones: save or copy them before the next step.
        """
        return {
            "gathers": [(gather.count, gather.state()) for gather in self.gathers],
            "reductions": [reduction.count for reduction in self.reductions],
            "memories": [[m.state.state_dict() if m is not None else {} for m in r.memories] for r in self.reductions],
            "layout": self._layout(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state_dict, after the weights were loaded. Raises ConfigError if it does not fit."""
        check_state(state_dict, "layout", "gathers", "reductions", "memories")
        check_layout(self._layout(), state_dict["layout"])
        for gather, (count, state) in zip(self.gathers, state_dict["gathers"], strict=True):
            gather.count = count
            gather.load(state)
        for reduction, count, held in zip(
            self.reductions, state_dict["reductions"], state_dict["memories"], strict=True
        ):
            reduction.count = count
            for memory, remembered in zip(reduction.memories, held, strict=True):
                if memory is not None:
                    memory.state.load_state_dict(remembered)

    def _layout(self) -> dict[str, Any]:
        named = [pair for unit in self.units for pair in zip(unit.names, unit.params, strict=True)]
        return {
            "rank": self.comm.rank,
            "world_size": self.comm.world_size,
            "local_size": self.comm.topology.local_size,
            "shards": self.shards.members,
            "replicas": self.replicas.members,
            "method": repr(self.method),
            "parameters": short_digest([(name, tuple(param.sharded.shape)) for name, param in named]),
        }

    def _note_order(self, unit: GatheredUnit) -> None:
        """Record the order of modules in the first forward, so that each gather starts the next module's gather."""
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
        """Hook after a step of any optimizer: fused optimizers don't count their writes."""
        if updates_any(optimizer, weights_of(unit.group for unit in self.units)):
            self.weights_changed(replaced=False)

    def _note_load(self, *_: object) -> None:
        self.weights_changed()
        if self.watched is not None:
            self.watched.note_load()

    def _backward_bytes(self, unit: GatheredUnit, gather: AllGather) -> int:
        size = unit.group.backward_group_size(self.model)
        if size in (0, self.shards.size):
            return gather.again_bytes() if size else 0
        return (size - 1) * (unit.shard_bytes * self.shards.size // size)


def build_units(
    model: nn.Module, groups: Iterable[FSDPGroup], method: GatheredMethod, num_shards: int
) -> list[GatheredUnit]:
    """FSDP2's parameter groups, with a codec for each parameter: vector() up to one dimension, matrix() above."""
    if any(codec.has_variable_length for wire in (method.matrix(), method.vector()) for codec in wire.codecs):
        raise ConfigError(
            f"packets of {method.name} that vary in length: FSDP2's buffers do not; leave out '+zstd' and '+rows'"
        )
    named = {id(param): name for name, param in model.named_parameters(remove_duplicate=False)}
    units: list[GatheredUnit] = []
    for index, group in enumerate(groups):
        params = [param.sharded for param in group.params]
        wires = [method.vector() if param.dim() < 2 else method.matrix() for param in params]
        units.append(GatheredUnit(index, group, [named.get(id(param), "?") for param in params], wires, num_shards))
    return units
