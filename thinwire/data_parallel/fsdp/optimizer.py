"""torch's FSDP2 with its collectives on the communication thread."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from thinwire.codecs import Codec
from thinwire.collectives import Communicator
from thinwire.data_parallel.agreeing import AgreeingOptimizer
from thinwire.data_parallel.fsdp.collectives import AllGather, ReduceScatter
from thinwire.data_parallel.fsdp.strategies import FSDP, WIRES
from thinwire.data_parallel.replicas import Row, digest, odd_ranks, same_start, trained_parameters
from thinwire.data_parallel.zero import ReplicaError
from thinwire.data_parallel.zero.elementwise import check_elementwise
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Unit:
    """A module that is gathered and reduced by itself. shapes: of the trained parameters that are its own."""

    module: FSDPModule
    shapes: list[torch.Size]
    reduce_scatter: ReduceScatter

    def packet_bytes(self, world_size: int) -> int:
        """One rank's part on the wire: FSDP2 cuts every parameter along its first dimension, padded to equal parts."""
        rows = [-(-shape[0] // world_size) * math.prod(shape[1:]) for shape in self.shapes]
        return self.reduce_scatter.codec.packet_bytes(sum(rows))


def wrap_fsdp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: FSDP,
    *,
    local_size: int | None,
    timeout_s: float,
    checked: bool,
    overlap: bool,
) -> tuple[nn.Module, FSDPOptimizer]:
    """Shard model and optimizer in place; a collective over the default group.

    Raises ConfigError for a model and an optimizer that do not fit each other, for scalar parameters, and for an
    optimizer that looks across the elements of a tensor.
    """
    trained = trained_parameters(model, optimizer)
    scalars = [name for name, param in trained.items() if param.dim() == 0]
    if scalars:
        raise ConfigError(f"{scalars[0]!r} is a scalar, which FSDP2 can't cut: give it one dimension")
    check_elementwise(optimizer)
    comm = Communicator(local_size=local_size, timeout_s=timeout_s, checked=checked)
    start = same_start(model, comm)
    codec = WIRES[strategy.wire]
    units = shard_units(model, comm, codec)
    shards = shard_param_groups(model, optimizer, trained)
    kind = type(units[-1].module).__name__.removeprefix("FSDP")
    cut = f"the root and {len(units) - 1} x {kind}" if len(units) > 1 else "the root alone"
    rows: list[Row] = [
        (f"strategy {strategy.name}", "torch's fully_shard", "reshard_after_forward=False: one gather a step"),
        ("FSDP2 modules", cut, "children of ModuleLists"),
        ("weights and gradients", str(codec), f"{codec.bits_per_element:.4g} bits an element, sums in fp32"),
        ("collectives", "thinwire's, through FSDP2's plug-ins", "gloo's reduce_scatter moves twice the bytes"),
        ("overlap of weights with forward", "on" if overlap else "off", ""),
        start,
    ]
    return model, FSDPOptimizer(model, optimizer, comm, shards, units, overlap, rows)


def shard_units(model: nn.Module, comm: Communicator, codec: Codec) -> list[Unit]:
    """Give the model's parts to fully_shard, and FSDP2 its collectives; the root first, then in order of forward."""
    frozen = {param for param in model.parameters() if not param.requires_grad}
    mesh = init_device_mesh(next(model.parameters()).device.type, (comm.world_size,))
    modules = wrap_modules(model)
    inside = {param for module in modules for param in module.parameters()}
    rest = [param for param in model.parameters() if param not in inside]
    owned = [*(list(module.parameters()) for module in modules), rest]
    all_shapes = [[param.shape for param in own if param not in frozen] for own in owned]
    units: list[Unit] = []
    for module, shapes in zip((*modules, model), all_shapes, strict=True):
        fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=frozen)
        unit = Unit(cast(FSDPModule, module), shapes, ReduceScatter(comm, codec))
        unit.module.set_custom_all_gather(cast(Any, AllGather(comm, codec)))
        unit.module.set_custom_reduce_scatter(cast(Any, unit.reduce_scatter))
        units.append(unit)
    return [units[-1], *units[:-1]]


def shard_param_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, trained: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Put this rank's shards in the place of the parameters, group by group; the shards by name, also empty ones."""
    names = {id(param): name for name, param in trained.items()}
    sharded = {name: param for name, param in model.named_parameters() if isinstance(param, DTensor)}
    shards = {name: sharded[name].to_local().detach() for name in trained}
    for group in optimizer.param_groups:
        own = [names[id(param)] for param in group["params"] if id(param) in names]
        group["params"] = [shards[name] for name in own if shards[name].numel()]
    return shards


def wrap_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are gathered and reduced one by one: children of the outermost ModuleLists, with parameters."""
    modules: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
            if not (isinstance(module, nn.ModuleList) and is_called):
                visit(child)
            elif any(param.requires_grad for param in child.parameters()):
                modules.append(child)

    visit(model)
    return list(dict.fromkeys(modules))


class FSDPOptimizer(AgreeingOptimizer):
    """The user's optimizer on this rank's shards, which FSDP2 gathers and reduces; made by `wrap_fsdp`.

    `trained` are the local tensors of FSDP2's sharded parameters: plain fp32, without DTensor's cost for every
    operation of the optimizer. The gather of a step's weights starts when the step ends; the modules wait for theirs in
    the next forward.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        comm: Communicator,
        shards: dict[str, Tensor],
        units: list[Unit],
        overlap: bool,
        rows: list[Row],
    ) -> None:
        super().__init__(model, inner, comm, shards, sum(s.numel() for unit in units for s in unit.shapes), rows)
        self.overlap = overlap
        self.units = units
        self._sharded = {name: param for name, param in model.named_parameters() if name in shards}

    @property
    def bytes_per_step(self) -> int:
        """Payload this rank sends in one step in which every parameter has a gradient."""
        grid = self.comm.topology
        messages = grid.world_size - 1 + (grid.local_size - 1) * grid.num_nodes + grid.num_nodes - 1
        return messages * sum(unit.packet_bytes(grid.world_size) for unit in self.units) + self.agreement_bytes

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward and backward passes inside only accumulate gradients, whole and in fp32, on whole weights."""
        root = self.units[0].module
        root.set_requires_gradient_sync(False)
        root.set_reshard_after_backward(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)

    def step(self) -> None:
        """Update this rank's shards, unless the gradient is not finite, and send them; a collective over all ranks."""
        super().step()
        for unit in self.units:
            unit.module.unshard(async_op=self.overlap)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        super().zero_grad()
        for param in self._sharded.values():
            param.grad = None

    def synchronize(self) -> None:
        """Bring the whole weights to every rank, where they stay until the next backward."""
        for unit in self.units:
            unit.module.unshard()

    def check_replicas(self) -> None:
        """Every weight has one owner, from whom the others take it anew: compares the ranks' numbers of steps."""
        if odd := odd_ranks(self.comm, digest([repr(self.steps).encode()])):
            raise ReplicaError(f"rank(s) {odd} have not taken as many steps as rank 0, which took {self.steps}")

    def _reduce(self) -> None:
        for unit in self.units:
            unit.reduce_scatter.finish()
        for name, param in self._sharded.items():
            shard, grad = self.trained[name], param.grad
            shard.grad = grad.to_local() if isinstance(grad, DTensor) and shard.numel() else None

    def _global_norm(self, squares: float) -> float:
        return float(self._hear()[:, 0].sum()) ** 0.5

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what state_dict gave; a collective. Raises ConfigError where it does not fit."""
        # A gather that is under way carries the old weights.
        self.synchronize()
        super().load_state_dict(state_dict)
        for unit in self.units:
            unit.module.reshard()

    def _layout(self) -> dict[str, Any]:
        return super()._layout() | {"codec": repr(self.units[0].reduce_scatter.codec)}
