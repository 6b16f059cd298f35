"""`thinwire.zero`: turn a model and its optimizer into a sharded, compressed pair, in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.codecs import warm
from thinwire.collectives import Communicator
from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.collectives.groups import ranks_of
from thinwire.device import name_of
from thinwire.errors import ConfigError
from thinwire.hosts.arguments import check_arguments, check_instance
from thinwire.hosts.interface import ParallelOptimizer, RankOptions, apply
from thinwire.hosts.ranks import Axis, along, meter_of, open_ranks, sharing_of, spread_over, with_spread
from thinwire.hosts.sharded.optimizer import ShardedOptimizer
from thinwire.hosts.sums import across_of
from thinwire.layout.buckets import Unit
from thinwire.layout.levels import Levels
from thinwire.methods.memory import Residency, Setup, placed, same_everywhere
from thinwire.methods.sharded import ShardedMethod
from thinwire.state.elementwise import check_elementwise, needs_whole_tensors
from thinwire.state.given import Given, optimizer_options, parameters_of, same_on_all_ranks
from thinwire.state.replicas import check_device, digest, equal_bits, odd_ranks
from thinwire.table import Row, announce as announce_table

if TYPE_CHECKING:
    from thinwire.hosts.offload.residence import Residence
    from thinwire.hosts.offload.tiling import TileMap

Model = TypeVar("Model", bound=nn.Module)
Group = dist.ProcessGroup | DeviceMesh | None
# Global ranks.
PartGroup = Group | Sequence[int]


def zero(
    model: Model,
    optimizer: torch.optim.Optimizer,
    method: ShardedMethod,
    *,
    group: Group = None,
    local_size: int | None = None,
    axis: Axis | None = None,
    group_for: Callable[[str, Tensor], PartGroup] | None = None,
    bucket_numel: int | None = None,
    overlap: bool = False,
    seed: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    checked: bool = False,
    residency: Residency | None = None,
    initial: Callable[[str], Tensor] | None = None,
    announce: bool = True,
) -> tuple[Model, ShardedOptimizer]:
    """Shard an optimizer over data-parallel ranks and compress what they exchange. The model object stays the same.

    Call it on every rank, after you make the optimizer and before you train. Ranks may start with different weights:
    rank 0's are used. It trains the parameters that the optimizer holds and that require gradients.

    Args:
        model: the same on all ranks; parameters in fp32, bf16 or fp16.
        optimizer: elementwise, such as AdamW, or thinwire.Muon, Apollo or MFAC. It then steps flat fp32 pieces of
            the parameters.
        method: what travels and how, such as `thinwire.SDP4Bit()`.
        group: the ranks that hold replicas of this model: a process group, one dimension of a DeviceMesh, None for all.
        local_size: ranks per node; None: found from the launcher or host names.
        axis: from `parallelize`, in place of a group.
        group_for: (name, parameter or buffer) -> another group inside `group`, or global ranks, for some of them such
            as experts; None for the main group. Their gradients are summed over that group and divided by the number of
            ranks of the main group, so the mean of all losses is trained. By default the experts of `expert_parallel`
            have the group of their replicas.
        bucket_numel: elements of a bucket.
        overlap: let weights arrive during the next forward; then call optimizer.synchronize() before you read weights.
        seed: of stochastic rounding.
        timeout_s, checked: see Communicator.
        residency: which parts lie on a disk; None: none. Its `memory` becomes the process's limit (RLIMIT_DATA) until
            `optimizer.close()`.
        initial: for a model made by `thinwire.hollow`: returns the first values of a parameter by name, the same on all
            ranks. Each is asked for once: matrices in order of registration, vectors separately. If it has a method
            `part(name, rows, columns)`, that is asked for tiles.
        announce: rank 0 prints to stderr what was asked for, what is in effect, and why they differ.

    Raises ConfigError for a model or optimizer that can't be sharded, with the reason, and for ranks that were given
    different options.
    Source: ZeRO (SC 2020), stages 1 and 2.
    """
    check_arguments("zero", model, optimizer, local_size=local_size, bucket_numel=bucket_numel, overlap=overlap,
        seed=seed, timeout_s=timeout_s, checked=checked, announce=announce,
    )  # fmt: skip
    # `parallelize` has compared what is given with an axis.
    spread = spread_over(model) if axis is None else None
    with same_on_all_ranks(group, timeout_s) if axis is None else nullcontext(Given()) as given:
        _check_method(method)
        if spread is not None:
            group_for = with_spread(model, spread, group_for)
        named = _trained_parameters(model, optimizer)
        check_elementwise(optimizer)
        given |= {"method": method, "local_size": local_size, "bucket_numel": bucket_numel, "overlap": overlap}
        given |= same_everywhere(residency)
        given |= {"seed": seed, "checked": checked} | optimizer_options(optimizer, model)
        alike = {n: p for n, p in model.named_parameters() if group_for is None or group_for(n, p) is None}
        given |= parameters_of(alike)
    ranks = open_ranks(
        axis, group=group, local_size=local_size, timeout_s=timeout_s, checked=checked, meter=meter_of(model)
    )
    group_for = group_for or (axis.group_for if axis is not None else None)
    comms, chosen = _groups(model, ranks.comm, group_for, timeout_s=timeout_s, checked=checked)
    levels = [method.levels(own.topology) for own in comms]
    if any(own.weights_over > 1 for own in levels):
        _check_cut(method, named, levels)
    tiling = None
    if residency is not None and residency.tile is not None:
        tiling, named, chosen = _tiled(model, optimizer, residency.tile, levels, chosen)
        initial = initial if initial is None else tiling.first(initial)
    device = next(iter(named.values())).device
    if device.type == "cuda":
        # On the CPU the launcher has done it, or the first message waits a second.
        warm(set(method.codecs), device)
    notes = _same_start(model, named, method, comms, chosen)
    notes += _notes_on_parameters(model, named, overlap)
    if axis is None:
        notes += [row for each in sharing_of(model) for row in each.describe()]
    units = method.units(model, named, levels, chosen.__getitem__, bucket_numel)
    residence = None
    if residency is not None:
        residence, rows = _residence(residency, Setup(method, model, ranks.comm.topology), optimizer, units, ranks.comm)
        notes += rows
    sharded = ShardedOptimizer(
        model, optimizer, method, units, ranks, comms, overlap=overlap, seed=seed, notes=notes,
        residence=residence, initial=initial, tiling=tiling,
    )  # fmt: skip
    if spread is not None:
        spread.follow(sharded)
    if announce and ranks.comm.rank == 0:
        announce_table(sharded.describe())
    return model, sharded


def _groups(
    model: nn.Module, main: Communicator, group_for: Callable[[str, Tensor], PartGroup] | None, **options: Any
) -> tuple[list[Communicator], dict[str, int]]:
    """The main group and those of `group_for`, and the number of each parameter's and buffer's group among them."""
    comms, numbers, chosen = [main], dict[tuple[int, ...], int](), dict[str, int]()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        special = group_for(name, tensor) if group_for is not None else None
        if special is None:
            chosen[name] = 0
            continue
        members = tuple(ranks_of(special))
        if members not in numbers:
            numbers[members] = len(comms)
            own = along(main.topology, [main.global_ranks.index(rank) for rank in members])
            comms.append(Communicator(members, local_size=own, meter=main.meter, **options))
        chosen[name] = numbers[members]
    return comms, chosen


def _residence(
    residency: Residency, setup: Setup, optimizer: torch.optim.Optimizer, units: Sequence[Unit], comm: Communicator
) -> tuple[Residence | None, list[Row]]:
    """The disk of this rank, and rows on what of its options was not stated. setup: without its optimizer."""
    # Few runs need it.
    from thinwire.hosts.offload.budget import fitted
    from thinwire.hosts.offload.residence import Residence

    model = setup.model
    setup = replace(setup, across=across_of(optimizer, model))
    residency, rows = fitted(residency, setup)
    parts = list(placed(residency, setup))
    moves = sum(part.read for part in parts), sum(part.written for part in parts)
    device = next(param.device for param in model.parameters() if param.requires_grad)
    made = Residence.of(residency, model, inner=optimizer, units=units, device=device, comm=comm, moves=moves)
    return made, rows


def _check_method(method: object) -> None:
    """Raise ConfigError for a method of another host, and for anything that is no method."""
    if isinstance(method, ShardedMethod):
        return
    check_instance(method)
    name = getattr(method, "name", None)
    if name is None:
        raise ConfigError(f"thinwire.zero got {method!r}: must be a ShardedMethod, such as thinwire.SDP4Bit()")
    why = getattr(method, "not_on_zero", "belongs to another wrapper")
    way = f"thinwire.{method.own_way} or " if hasattr(method, "own_way") else ""
    raise ConfigError(f"thinwire.zero can't run {name}, which {why}; use {way}`thinwire train --strategy {name}`")


def _check_cut(method: ShardedMethod, named: dict[str, nn.Parameter], levels: list[Levels]) -> None:
    """Raise ConfigError for options that don't work if weights are cut over ranks."""
    if len(levels) > 1:
        raise ConfigError(f"group_for: {method.name} cuts weights over ranks of one group; leave it out")
    for name, param in named.items():
        if param.dtype != torch.float32:
            raise ConfigError(f"{name!r} is {param.dtype}: {method.name} cuts weights over ranks only in float32")


def _tiled(
    model: nn.Module, optimizer: torch.optim.Optimizer, text: str, levels: list[Levels], chosen: dict[str, int]
) -> tuple[TileMap, dict[str, nn.Parameter], dict[str, int]]:
    """Cut matrices into tiles. Returns also the trained parameters, and the group of each, as they are then.

    Raises ConfigError if weights are cut over ranks, and for optimizers that look across a matrix.
    """
    from thinwire.hosts.offload.tiling import tile

    if any(own.weights_over > 1 for own in levels):
        raise ConfigError("tile: weights that are cut over ranks are gathered by layers, whole; leave it out")
    if needs_whole_tensors(optimizer):
        name = type(optimizer).__name__
        raise ConfigError(f"tile: {name} looks across matrices, and a tile would be one to it; nearest: adamw")
    tiling = tile(model, text, optimizer)
    groups = {name: chosen[tiling.name_of(name)] for name, _ in model.named_parameters()}
    return tiling, _trained_parameters(model, optimizer), groups


def _trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The parameters to shard, in order of registration. Raises ConfigError for parameters that can't be sharded."""
    if isinstance(model, DistributedDataParallel):
        raise ConfigError(
            "the model is wrapped in DistributedDataParallel, which would reduce gradients too: give its .module"
        )
    if isinstance(optimizer, ShardedOptimizer):
        raise ConfigError("this optimizer is sharded already; call zero() once")
    held = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    named = {name: param for name, param in model.named_parameters() if id(param) in held}
    if len(named) < len(held):
        raise ConfigError(
            f"the optimizer holds {len(held) - len(named)} parameter(s) that the model does not have: make it "
            "last, after parallelize_module and whatever else replaces parameters"
        )
    named = {name: param for name, param in named.items() if param.requires_grad}
    if not named:
        raise ConfigError("the optimizer holds no parameter that requires a gradient: nothing to train")
    check_device(named)
    memory: dict[int, str] = {}
    for name, param in named.items():
        if isinstance(param, DTensor):
            raise ConfigError(
                f"{name!r} is a DTensor, sharded already; zero() takes whole parameters; a model of "
                "parallelize_module goes to thinwire.parallelize, one of fully_shard to thinwire.compress_fsdp"
            )
        if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(f"{name!r} is {param.dtype}; zero() takes float32, bfloat16 and float16")
        has_memory = param.untyped_storage().nbytes() > 0
        twin = memory.setdefault(param.data_ptr(), name) if has_memory else name
        if twin != name:
            raise ConfigError(f"{name!r} and {twin!r} share memory: tie them as one nn.Parameter")
    return named


def _same_start(
    model: nn.Module,
    named: dict[str, nn.Parameter],
    method: ShardedMethod,
    comms: list[Communicator],
    chosen: dict[str, int],
) -> list[Row]:
    """Give all ranks rank 0's weights and buffers, sending them only if they differ."""
    # Decoding rounds differently on another kind of device, and replicas would drift apart.
    device, comm = next(iter(named.values())).device, comms[0]
    kind = name_of(device)
    shapes = kind + repr([(name, tuple(p.shape), str(p.dtype)) for name, p in named.items()])
    shapes += repr((method.matrix(), method.vector(), str(method.gradient_memory([])), method.tables(model, named)))
    if odd := odd_ranks(comm, digest([shapes.encode()])):
        raise ConfigError(
            f"rank {odd[0]} has other parameters, another strategy or another kind of device than rank "
            f"{comm.global_ranks[0]}: names, shapes, dtypes, options and devices must be the same on all ranks"
        )
    sent: list[str] = []
    tensors_of = [*model.named_parameters(), *model.named_buffers()]
    # What has no memory yet is filled alike.
    everything = [(name, t.data) for name, t in tensors_of if not t.is_meta and t.untyped_storage().nbytes()]
    for number, own in enumerate(comms):
        tensors = [(name, tensor) for name, tensor in everything if chosen.get(name, 0) == number]
        if not equal_bits(own, [tensor for _, tensor in tensors]):
            sent += [name for name, _ in tensors]
    effect = f"{len(sent)} tensors sent by rank 0" if sent else "nothing sent"
    return [("equal replicas at start", effect, "they differed" if sent else "they were equal already")]


def _notes_on_parameters(model: nn.Module, named: dict[str, nn.Parameter], overlap: bool) -> list[Row]:
    known = {id(param) for param in named.values()}
    left = [name for name, param in model.named_parameters() if id(param) not in known and param.requires_grad]
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    rows = [
        (
            "overlap of weights with forward",
            "on" if overlap else "off",
            "call optimizer.synchronize() before reading weights by hand"
            if overlap
            else "pass overlap=True to hide them",
        )
    ]
    if left:
        rows.append(("train all parameters", f"{len(left)} left out", f"not in the optimizer: {', '.join(left[:3])}"))
    if frozen:
        rows.append(("frozen parameters", f"{len(frozen)} not sent", "requires_grad is off"))
    return rows


@apply.register
def _apply_sharded(
    method: ShardedMethod, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Unpack[RankOptions]
) -> tuple[nn.Module, ParallelOptimizer]:
    return zero(model, optimizer, method, announce=False, **options)
