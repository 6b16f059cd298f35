"""The tensor axis: shows parameters that torch's parallelize_module has cut to all other hosts as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from thinwire.checkpoint import Piece, Share
from thinwire.collectives import Communicator
from thinwire.errors import ConfigError
from thinwire.hosts.draws import OwnDraws
from thinwire.optim import DionOptimizer, MatrixOptimizer, Muon
from thinwire.optim.dion import FACTOR, basis_of
from thinwire.optim.muon import orthogonalised
from thinwire.optim.sums import Part, Shards
from thinwire.state.elementwise import needs_whole_tensors
from thinwire.state.portable import OPTIMIZER, group_of
from thinwire.state.replicas import digest, odd_ranks


@dataclass(frozen=True)
class TensorPlacement:
    """Placement of a parameter on the tensor axis: `shape` of the whole, cut along dimension `dim`, None for a copy."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def dim(self) -> int | None:
        (placement,) = self.placements
        return placement.dim if isinstance(placement, Shard) else None

    def whole(self, local: Tensor) -> DTensor:
        """The DTensor whose part on this rank is `local`. Gradients flow back to `local`."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


@dataclass
class TensorAxis:
    """The cut parameters of a model, by name: DTensors while their module's forward runs, else local tensors.

    Hosts, optimizers and hooks see this rank's part of a parameter as a plain leaf tensor. In forward the module's
    attribute is a DTensor made from that leaf, so torch's tensor parallelism works as before, and the gradient of the
    part arrives at the leaf. The DTensor is made when the module is called. If weights are gathered for a module's
    forward, they have arrived by then.
    """

    mesh: DeviceMesh
    cuts: dict[str, TensorPlacement] = field(default_factory=dict)
    # {module: {attribute: its placement}}
    places: dict[nn.Module, dict[str, TensorPlacement]] = field(default_factory=dict)
    # {DTensor that was a parameter: the local tensor in its place}
    leaves: dict[Tensor, nn.Parameter] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    def counts(self, name: str) -> bool:
        """Whether this rank counts its part. If all ranks of the axis hold a parameter whole, the first counts it."""
        cut = self.cuts.get(name)
        return self.rank == 0 or (cut is not None and cut.dim is not None)

    @property
    def matrices(self) -> dict[nn.Module, int | None]:
        """The dimension along which the weight of each nn.Linear is cut."""
        found = ((module, cuts.get("weight")) for module, cuts in self.places.items() if isinstance(module, nn.Linear))
        return {module: cut.dim for module, cut in found if cut is not None}

    @property
    def parts(self) -> set[nn.Parameter]:
        """The local tensors that are this rank's part of a parameter, and no copy."""
        placed = ((module._parameters[name], cut) for module, cuts in self.places.items() for name, cut in cuts.items())
        return {param for param, cut in placed if param is not None and cut.dim is not None}

    def local(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Parameters as they are now: of a DTensor its local tensor."""
        return [self.leaves.get(param, param) for param in params]

    def local_names(self) -> list[str]:
        """Names of the parameters that are cut over the axis."""
        return [name for name, cut in self.cuts.items() if cut.dim is not None]

    def piece_of_whole(self, key: str, piece: Piece, number: int = 0, count: int = 1) -> Piece:
        """Turn a piece of this rank's part of a parameter into a piece of the whole.

        Args:
            key: KIND/.../NAME of a checkpoint.
            number, count: this rank's place among the ranks that hold the same part, if they share the saving.
        """
        name = next((name for name in self.local_names() if key.endswith(f"/{name}")), None)
        # A rank's own state covers only its part.
        if name is None or key.startswith("own/"):
            return piece
        shape, dim = self.cuts[name].shape, self.cuts[name].dim
        if key.startswith(f"{OPTIMIZER}/{FACTOR}/"):
            # [matrices, columns, r], which all ranks have whole where rows are cut.
            if (side := self.cut_side(name)) == -2:
                return piece
            stack, columns = shape[:-2].numel(), shape[-1]
            shape = torch.Size([stack, columns, piece.numel * self.mesh.size() // (stack * columns)])
            dim = 0 if side is None else 1
        return replace(piece.share(number, count), is_copy=False, **self._lies(shape, dim))

    def share_of_whole(self, share: Share) -> Share | None:
        """A share of this rank's part of a parameter as a share of the whole; None if another rank's copy counts."""
        if not self.counts(share.name):
            return None
        if share.name not in self.local_names():
            return share
        return replace(share, **self._lies(self.cuts[share.name].shape, self.cuts[share.name].dim))

    def _lies(self, shape: torch.Size, dim: int | None) -> dict[str, Any]:
        """Place of this rank's part of a tensor that is cut along a dimension; see Piece."""
        assert dim is not None
        # A part of dimension d is a run of elements in every row of the dimensions before it.
        row = shape[dim:].numel()
        run = row // self.mesh.size()
        return {"numel": shape.numel(), "run": run, "row": row, "first": self.rank * run}

    def show_whole(self, module: nn.Module) -> None:
        """Replace a module's attributes by DTensors. The registered parameters do not change."""
        for attribute, cut in self.places[module].items():
            local = module._parameters[attribute]
            assert local is not None
            module.__dict__[attribute] = cut.whole(local)

    def show_local(self, module: nn.Module) -> None:
        """Remove the DTensors again."""
        for attribute in self.places[module]:
            module.__dict__.pop(attribute, None)

    def gather(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors from every rank's part. A collective over the axis."""
        return {
            name: self.cuts[name].whole(value.contiguous()).full_tensor() if name in self.cuts else value
            for name, value in values.items()
        }

    def cut_side(self, name: str) -> int | None:
        """Which side of its matrices the axis cuts of a parameter, -1: columns, -2: rows; None: they are whole."""
        cut = self.cuts.get(name)
        dim = None if cut is None or cut.dim is None else cut.dim - len(cut.shape)
        return dim if dim in (-1, -2) else None

    def orthogonalised(self, name: str, x: Tensor) -> Tensor:
        """This rank's part of the orthogonalised matrix, or stack of them, of which `x` is a part. A collective."""
        # From the end, so that a stack's matrices may come one by one; a stack cut into whole ones needs nobody else.
        if (side := self.cut_side(name)) is None:
            return orthogonalised(x)
        at = x.dim() + side
        return self._own(orthogonalised(self._joined(x, Shard(at))), at)

    def basis(self, name: str, x: Tensor) -> Tensor:
        """See Beyond: of rows that are gathered, or terms that are added up."""
        if (side := self.cut_side(name)) == -2:
            return self._own(basis_of(self._joined(x, Shard(0))), 0)
        return basis_of(x if side is None else self._joined(x, Partial()))

    def total(self, name: str, x: Tensor) -> Tensor:
        """See Beyond."""
        return self._joined(x, Partial()) if self.cut_side(name) == -2 else x

    def lengths(self, name: str, x: Tensor) -> Tensor:
        """See Beyond."""
        own = x.norm(dim=1)
        return self._joined(own.square(), Partial()).sqrt() if self.cut_side(name) == -1 else own

    def first_column(self, name: str, columns: int) -> int:
        """See Beyond."""
        return self.rank * columns if self.cut_side(name) == -1 else 0

    def _joined(self, x: Tensor, placement: Placement) -> Tensor:
        """A whole, fp32, of what all ranks of the axis have of it, by torch's collective."""
        return DTensor.from_local(x.contiguous(), self.mesh, [placement], run_check=False).full_tensor()

    def _own(self, whole: Tensor, dim: int) -> Tensor:
        return whole.chunk(self.mesh.size(), dim)[self.rank]

    def part(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of whole tensors."""
        found: dict[str, Tensor] = {}
        for name, value in values.items():
            cut = self.cuts.get(name)
            dim = None if cut is None else cut.dim
            found[name] = value if dim is None else value.chunk(self.mesh.size(), dim)[self.rank].contiguous()
        return found

    def part_of_flat(self, name: str, values: Tensor) -> Tensor:
        """This rank's part of a whole parameter's values, both flat."""
        return self.part({name: values.view(self.cuts[name].shape)})[name].flatten() if name in self.cuts else values


@torch.no_grad()
def cut_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, beside: Iterable[nn.Module] = ()
) -> TensorAxis:
    """Replace the model's DTensors by local tensors, in modules and optimizer; see TensorAxis.

    mesh: the tensor axis; `misfits` must be empty for it. beside: modules that this rank runs besides the model's, with
    parameters that another rank steps. Raises ConfigError for an optimizer that needs whole tensors, other than Muon
    and Dion.
    """
    if needs_whole_tensors(optimizer) and not isinstance(optimizer, MatrixOptimizer):
        nearest = "thinwire.Muon or " if isinstance(optimizer, torch.optim.Muon) else ""
        raise ConfigError(
            f"{type(optimizer).__name__} needs whole tensors, which a tensor axis cuts: take {nearest}an elementwise "
            "optimizer, such as AdamW or SGD"
        )
    turned = {id(param) for param in optimizer.matrices} if isinstance(optimizer, MatrixOptimizer) else set[int]()
    orthogonal = {name: param.shape for name, param in model.named_parameters() if id(param) in turned}
    groups = group_of(optimizer)
    options = {name: groups[id(param)] for name, param in model.named_parameters() if name in orthogonal}
    axis = TensorAxis(mesh)
    for prefix, module in model.named_modules():
        for attribute, param in list(module._parameters.items()):
            if isinstance(param, DTensor) and param not in axis.leaves:
                axis.cuts[f"{prefix}.{attribute}" if prefix else attribute] = placement_of(param, mesh)
            place_local(axis, module, attribute)
    for module in chain.from_iterable(each.modules() for each in beside):
        for attribute in list(module._parameters):
            place_local(axis, module, attribute)
    leaves = axis.leaves
    for group in optimizer.param_groups:
        group["params"] = [leaves.get(param, param) for param in group["params"]]
    for param in [param for param in optimizer.state if param in leaves]:
        held = optimizer.state.pop(param)
        optimizer.state[leaves[param]] = {
            key: value.to_local() if isinstance(value, DTensor) else value for key, value in held.items()
        }
    if isinstance(optimizer, MatrixOptimizer):
        # Hosts that cut the parts further put their own in the place of these, which one rank of each axis has whole.
        local = dict(model.named_parameters())
        parts: dict[Tensor, Part] = {
            local[name]: Part(name, local[name].shape, ((0, local[name].numel()),), 0, options[name])
            for name in orthogonal
        }
        optimizer.join(Shards(parts))
        optimizer.shapes = orthogonal
        if isinstance(optimizer, Muon):
            optimizer.orthogonalise = axis.orthogonalised
        elif isinstance(optimizer, DionOptimizer):
            optimizer.beyond = axis
    for module in axis.places:
        module.register_forward_pre_hook(lambda module, *_: axis.show_whole(module))
        module.register_forward_hook(lambda module, *_: axis.show_local(module), always_call=True)
    OwnDraws(axis.rank).draw_apart(model, axis.matrices)
    return axis


def placement_of(param: DTensor, mesh: DeviceMesh) -> TensorPlacement:
    """Where a DTensor lies on the tensor axis."""
    return TensorPlacement(mesh, tuple(param.placements), param.shape, tuple(param.stride()))


def place_local(axis: TensorAxis, module: nn.Module, attribute: str) -> None:
    """Put a local leaf in the place of a module's DTensor, the same one for each place of a tied parameter."""
    param = module._parameters[attribute]
    if not isinstance(param, DTensor):
        return
    if param not in axis.leaves:
        axis.leaves[param] = nn.Parameter(param.to_local().detach(), requires_grad=param.requires_grad)
    axis.places.setdefault(module, {})[attribute] = placement_of(param, axis.mesh)
    module._parameters[attribute] = axis.leaves[param]


class CopiedGradients:
    """Compares the gradients of parameters that all ranks of the axis hold whole, in the first step that is finite.

    A parameter between a matrix that is cut by columns and one that is cut by rows, such as a norm of the queries of
    all heads, gets on each rank the gradient of that rank's columns alone. Its copies would drift apart. FSDP2 runs no
    hooks of parameters: of its parameters, this rank's part of the mean over replicas is compared.
    """

    # Part of a gradient's norm by which ranks may differ: on a GPU, sums may depend on the order of threads.
    TOLERANCE = 1e-3

    def __init__(self, model: nn.Module, axis: TensorAxis) -> None:
        self.group = axis.mesh.get_group()
        # {name: (norm, sum / sqrt(number of elements)) of the first gradient}
        self.seen: dict[str, tuple[float, float]] = {}
        # By identity, since wrappers such as DDP put a prefix before names.
        cut = {
            id(module._parameters[attribute])
            for module, cuts in axis.places.items()
            for attribute, place in cuts.items()
            if place.dim is not None
        }
        self._whole = {n: p for n, p in model.named_parameters() if id(p) not in cut and p.requires_grad}
        self._hooks = [param.register_hook(partial(self._see, name)) for name, param in self._whole.items()]

    def _see(self, name: str, gradient: Tensor) -> None:
        if name not in self.seen:
            values = gradient.detach().double()
            self.seen[name] = float(values.norm()), float(values.sum()) / max(1, values.numel()) ** 0.5

    def compare(self) -> None:
        """Raise ConfigError on all ranks if any gradient differs. A collective over the axis until it has compared."""
        if not self._hooks:
            return
        for name, param in self._whole.items():
            if name not in self.seen and isinstance(param.grad, DTensor):
                self._see(name, param.grad.to_local())
        told: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(told, self.seen, group=self.group)
        self.seen = {}
        if not all(math.isfinite(value) for seen in told for pair in seen.values() for value in pair):
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        names = sorted(set(chain(*told)))
        if odd := [name for name in names if any(self._differ(told[0].get(name), seen.get(name)) for seen in told)]:
            has_hooks = not any(isinstance(self._whole[name], DTensor) for name in odd)
            hook = ", or sum it over the axis in a hook that is registered before parallelize" if has_hooks else ""
            raise ConfigError(
                f"{', '.join(odd)}: whole on all ranks of the tensor axis, and each rank has another gradient, that of "
                f"its own columns or heads; nearest: name it in the plan of parallelize_module{hook}"
            )

    def _differ(self, first: tuple[float, float] | None, own: tuple[float, float] | None) -> bool:
        if first is None or own is None:
            return first is not own
        return any(abs(a - b) > self.TOLERANCE * max(first[0], own[0]) for a, b in zip(first, own, strict=True))


def misfits(model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Reasons why a model does not fit the tensor axis `mesh`, a message for each; empty if it fits."""
    found = {name: param for name, param in model.named_parameters() if isinstance(param, DTensor)}
    messages = [why for name, param in found.items() if (why := misfit(name, param, mesh))]
    if mesh.size() > 1 and not any(isinstance(at, Shard) for param in found.values() for at in param.placements):
        messages.append(
            f"the mesh has a tensor axis of {mesh.size()} ranks, and no parameter is cut over it: call "
            'torch.distributed.tensor.parallel.parallelize_module(model, mesh["tensor"], plan) before the optimizer is '
            "made, or leave the axis out"
        )
    return messages


def misfit(name: str, param: DTensor, mesh: DeviceMesh) -> str:
    """Reason why a DTensor can't be a parameter on the tensor axis `mesh`; empty if it can."""
    if param.device_mesh != mesh:
        return (
            f"{name!r} lies on the mesh {param.device_mesh}, which is not the tensor axis: a model of fully_shard is "
            "compressed by thinwire.compress_fsdp; parallelize_module must be given mesh['tensor']"
        )
    (placement,) = param.placements
    if not (placement.is_replicate() or isinstance(placement, Shard)):
        return f"{name!r} is placed as {placement}: must be Shard or Replicate"
    if isinstance(placement, Shard) and (length := param.shape[placement.dim]) % mesh.size():
        return (
            f"{name!r} of shape {tuple(param.shape)} is cut along dimension {placement.dim}, whose {length} elements "
            f"do not divide among {mesh.size()} ranks: choose a width that is a multiple of {mesh.size()}"
        )
    return ""


def check_same_copies(model: nn.Module, axis: TensorAxis, comm: Communicator) -> list[str]:
    """Copy the first rank's values of uncut parameters to all ranks of the axis. Return the names that differed.

    A collective over `comm`, the ranks of the axis.
    """
    local = set(axis.local_names())
    tensors = {n: t.data for n, t in [*model.named_parameters(), *model.named_buffers()] if n not in local}
    if not odd_ranks(comm, digest(tensors.values())):
        return []
    for tensor in tensors.values():
        whole = tensor.contiguous()
        comm.wait(comm.broadcast_(whole))
        tensor.copy_(whole)
    return list(tensors)
