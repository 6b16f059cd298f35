"""torch's FSDP2 with its collectives on the communication thread."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from thinwire.checkpoint import Source
from thinwire.codecs import derive_seed
from thinwire.errors import ConfigError
from thinwire.hosts.agreeing import AgreeingOptimizer
from thinwire.hosts.fsdp.compress import CompressedFSDP, groups_of
from thinwire.hosts.interface import ParallelOptimizer, RankOptions, apply
from thinwire.hosts.ranks import Axis, Ranks, open_ranks
from thinwire.hosts.sums import JoinedSums, looking_across
from thinwire.layout.layers import layers_of
from thinwire.methods.fsdp import FSDPMethod, ShardingStrategy, cut_by_rows
from thinwire.methods.sums import ParamGroups
from thinwire.optim import SummingOptimizer
from thinwire.state.elementwise import check_elementwise
from thinwire.state.portable import Held
from thinwire.state.replicas import ReplicaError, digest, odd_ranks, same_start, trained_parameters
from thinwire.table import Row


def wrap_fsdp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: ShardingStrategy,
    *,
    local_size: int | None,
    seed: int,
    timeout_s: float,
    checked: bool,
    overlap: bool,
    axis: Axis | None = None,
) -> tuple[nn.Module, FSDPOptimizer]:
    """Shard model and optimizer in place. A collective over the axis, by default all ranks.

    Raises ConfigError for a model and an optimizer that do not fit each other, for scalar parameters, and for an
    optimizer that is not elementwise.
    """
    trained = trained_parameters(model, optimizer)
    scalars = [name for name, param in trained.items() if param.dim() == 0]
    if scalars:
        raise ConfigError(f"{scalars[0]!r} is a scalar, which FSDP2 can't cut: give it one dimension")
    check_elementwise(optimizer)
    ranks = open_ranks(axis, local_size=local_size, timeout_s=timeout_s, checked=checked)
    comm = ranks.comm
    start = same_start(model, comm)
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (comm.world_size,)) if axis is None else axis.group
    modules = shard_modules(model, mesh, strategy.reshard_after_forward)
    across, shapes = looking_across(optimizer, trained), {name: param.shape for name, param in trained.items()}
    shards = shard_param_groups(model, optimizer, trained)
    compressed = CompressedFSDP(model, groups_of(model), strategy, comm, seed=seed, overlap=overlap)
    compressed.start_or_wait()
    kind = type(modules[-1]).__name__.removeprefix("FSDP")
    cut = f"the root and {len(modules) - 1} x {kind}" if len(modules) > 1 else "the root alone"
    rows: list[Row] = [
        ("FSDP2 modules", cut, "children of ModuleLists"),
        ("collectives", "thinwire's, through FSDP2's plug-ins", "gloo's reduce_scatter moves twice the bytes"),
        start,
    ]
    return model, FSDPOptimizer(
        model, optimizer, ranks, compressed, shards, modules, strategy.reshard_after_forward, rows, across, shapes,
        seed,
    )  # fmt: skip


def shard_modules(model: nn.Module, mesh: DeviceMesh, reshard_after_forward: bool) -> list[nn.Module]:
    """Give the model's parts to fully_shard. Return them, the root first, then in order of forward."""
    frozen = {param for param in model.parameters() if not param.requires_grad}
    modules = layers_of(model)
    for module in (*modules, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward, ignored_params=frozen)
    return [model, *modules]


def shard_param_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, trained: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Replace the optimizer's parameters by this rank's shards, group by group. Return all shards by name."""
    names = {id(param): name for name, param in trained.items()}
    sharded = {name: param for name, param in model.named_parameters() if isinstance(param, DTensor)}
    shards = {name: sharded[name].to_local().detach() for name in trained}
    for group in optimizer.param_groups:
        own = [names[id(param)] for param in group["params"] if id(param) in names]
        group["params"] = [shards[name] for name in own if shards[name].numel()]
    return shards


class FSDPOptimizer(AgreeingOptimizer):
    """The user's optimizer on this rank's shards, which FSDP2 gathers and reduces; made by `wrap_fsdp`.

    `trained` holds the local tensors of FSDP2's sharded parameters: plain fp32, so the optimizer does not pay DTensor's
    cost for every operation. If whole weights are kept through a step, the gather for the next step starts when the
    step ends, and modules wait for their weights in the next forward. If they are dropped, each is gathered one module
    ahead.
    """

    overlaps = True

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        ranks: Ranks,
        compressed: CompressedFSDP,
        shards: dict[str, Tensor],
        modules: list[nn.Module],
        reshard_after_forward: bool,
        rows: list[Row],
        across: ParamGroups,
        shapes: Mapping[str, torch.Size],
        seed: int,
    ) -> None:
        """across: of the optimizer. shapes: of the whole parameters. seed: of the codec of the optimizer's sums."""
        super().__init__(model, inner, ranks, shards, compressed.num_parameters, rows)
        self.compressed = compressed
        self.modules: list[FSDPModule] = [module for module in modules if isinstance(module, FSDPModule)]
        self.reshard_after_forward = reshard_after_forward
        self._sharded = {name: param for name, param in model.named_parameters() if name in shards}
        self._sums = None
        if isinstance(inner, SummingOptimizer):
            held = {name: shards[name] for name in across if shards[name].numel()}
            cuts = {name: (shapes[name], cut_by_rows(shapes[name], self.comm.world_size)) for name in across}
            self._sums = JoinedSums.of(inner, held, [(self.comm, cuts)], across, lambda: derive_seed(seed, self.steps))
            self._rows += self._sums.rows()

    @property
    def bytes_per_step(self) -> int:
        """Payload bytes that this rank sends in one step of one micro-batch that uses every parameter."""
        summed = self._sums.bytes_per_step if self._sums is not None else 0
        return self.compressed.bytes_per_step + self.agreement_bytes + summed

    def describe(self) -> list[Row]:
        *rows, sent = super().describe()
        # The topology and the bytes, which include the agreement, already have a row.
        own = [
            row
            for row in self.compressed.describe()
            if row[0] not in (rows[0][0], sent[0], "dead and unequal gradients")
        ]
        return [*own, *rows, sent]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context whose forward and backward passes only accumulate gradients, whole and in fp32, on whole weights."""
        root = self.modules[0]
        root.set_requires_gradient_sync(False)
        root.set_reshard_after_backward(False)
        self._drop_after_forward(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)
            self._drop_after_forward(True)

    def _drop_after_forward(self, drop: bool) -> None:
        if self.reshard_after_forward:
            self.modules[0].set_reshard_after_forward(drop)

    def step(self) -> None:
        """Update this rank's shards, unless the gradient is not finite, and send them. A collective over all ranks."""
        super().step()
        self._drop_after_forward(True)
        # A rank with only empty shards has written nothing, but the weights have changed.
        self.compressed.weights_changed(replaced=False)
        self._start_gathers()

    def _start_gathers(self) -> None:
        """Start the gathers of the next step's weights at once, if whole weights are kept."""
        if not self.reshard_after_forward:
            for module in self.modules:
                module.unshard(async_op=self.compressed.overlap)

    def zero_grad(self) -> None:
        super().zero_grad()
        for param in self._sharded.values():
            param.grad = None

    def synchronize(self) -> None:
        """Bring the whole weights to every rank until the next backward."""
        self._drop_after_forward(False)
        for module in self.modules:
            module.unshard()

    def check_replicas(self) -> None:
        """Compare the ranks' numbers of steps. Weights need no comparison: each has one owner, which sends it."""
        if odd := odd_ranks(self.comm, digest([repr(self.steps).encode()])):
            raise ReplicaError(f"rank(s) {odd} have not taken as many steps as rank 0, which took {self.steps}")

    def masters(self, names: Collection[str]) -> dict[str, Tensor]:
        mine = torch.cat([self._padded(name) for name in names])
        gathered = self.comm.wait(self.comm.all_gather_exact(mine))
        pieces = gathered.split([self._shard_numel(name) for name in names], dim=1)
        shapes = [self._sharded[name].shape for name in names]
        return {
            name: piece.reshape(-1)[: shape.numel()].view(shape).clone()
            for name, piece, shape in zip(names, pieces, shapes, strict=True)
        }

    @torch.no_grad()
    def adopt_weights(self, values: Mapping[str, Tensor]) -> None:
        if not self.reshard_after_forward:
            # The running gather carries the old weights.
            self.synchronize()
        for name, value in values.items():
            shard, start = self.trained[name], self.comm.rank * self._shard_numel(name)
            shard.copy_(value.reshape(-1)[start : start + shard.numel()].view_as(shard))
        self.compressed.weights_changed(replaced=False)
        for module in self.modules:
            module.reshard()
        self._start_gathers()

    def handover_bytes(self, names: Collection[str]) -> tuple[int, int]:
        # Kept weights must be gathered again.
        shards = sum(4 * self._shard_numel(name) for name in names)
        again = 0 if self.reshard_after_forward else sum(gather.gather_bytes() for gather in self.compressed.gathers)
        return shards * (self.comm.world_size - 1), again

    def _shard_numel(self, name: str) -> int:
        """Elements of one rank's rows, padded; the same on all ranks."""
        shape = self._sharded[name].shape
        return -(-shape[0] // self.comm.world_size) * shape[1:].numel()

    def _padded(self, name: str) -> Tensor:
        shard = self.trained[name].detach().reshape(-1)
        return nn.functional.pad(shard, (0, self._shard_numel(name) - shard.numel()))

    def close(self) -> None:
        self.compressed.close()
        if self.everyone is not self.comm:
            self.everyone.close()

    def _reduce(self) -> None:
        for name, param in self._sharded.items():
            shard, grad = self.trained[name], param.grad
            shard.grad = grad.to_local() if isinstance(grad, DTensor) and shard.numel() else None

    def restore(self, source: Source) -> None:
        # A gather that is under way carries the old weights.
        self.synchronize()
        super().restore(source)
        for module in self.modules:
            module.reshard()

    @property
    def _lossy_weights(self) -> bool:
        wires = [wire for unit in self.compressed.units for wire in unit.wires]
        return self.comm.world_size > 1 and not all(wire.weights.traits.lossless for wire in wires)

    def _held(self) -> dict[str, Held]:
        return {name: self._part_of(name, shard) for name, shard in self.trained.items()}

    def _part_of(self, name: str, shard: Tensor) -> Held:
        shape = self._sharded[name].shape
        return Held(shard, shape.numel(), cut_by_rows(shape, self.comm.world_size)[self.comm.rank][0])

    def _own(self) -> dict[str, Any]:
        return {"wires": self.compressed.state_dict()}

    def _load_own(self, own: Mapping[str, Any]) -> None:
        self.compressed.load_state_dict(own["wires"])

    def _left(self) -> dict[str, str]:
        if all(memory is None for reduction in self.compressed.reductions for memory in reduction.memories):
            return {}
        return {"wires": "LoCo's errors are moving averages over few steps, of these pieces alone, and no sums"}

    def _adapt(self, source: Source) -> None:
        super()._adapt(source)
        self.compressed.weights_changed()
        if self.compressed.differences:
            source.note("reference of weight differences", "transformed", "the first gather sends the weights exactly")


@apply.register
def _apply_fsdp(
    method: FSDPMethod, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Unpack[RankOptions]
) -> tuple[nn.Module, ParallelOptimizer]:
    return wrap_fsdp(model, optimizer, method, **options)  # type: ignore[arg-type, misc]
