"""The private state that FSDP2 keeps for a module that was given to fully_shard; torch 2.11 to 2.13 have it.

Only these classes know the order of parameters in FSDP2's buffers; hosts/fsdp/pattern.py checks that order before it is
used. In HSDP the group of replicas is private too: the public all_reduce hook runs after FSDP2's own all_reduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from thinwire.errors import ConfigError


@dataclass(frozen=True, eq=False)
class FSDPParameter:
    """One parameter of a module that was given to fully_shard; under tensor parallelism, this rank's part of it."""

    _held: Any

    @property
    def sharded(self) -> nn.Parameter:
        """The user's DTensor. Loading a state may replace it by another."""
        return self._held.sharded_param

    @property
    def whole(self) -> nn.Parameter:
        """The gathered parameter. It exists from the first gather on; its memory exists only while it is gathered."""
        return self._held._unsharded_param

    @property
    def whole_data(self) -> Tensor:
        """The gathered values, without the DTensor of tensor parallelism around them."""
        return self.whole.to_local() if isinstance(self.whole, DTensor) else self.whole.data

    @property
    def shape(self) -> torch.Size:
        """The shape of the gathered values."""
        return self._held._orig_size

    @property
    def shard_dim(self) -> int:
        """The dimension along which FSDP2 cuts it."""
        return self._held.fsdp_placement.dim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gathered values."""
        dtype = self._held.mp_policy.param_dtype
        return dtype if dtype is not None and self.sharded.dtype.is_floating_point else self.sharded.dtype

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's part, padded: the same on all ranks that gather it together."""
        return self._held._sharded_param_data.numel()

    @property
    def most_numel(self) -> int:
        """The largest `shard_numel` on any rank of the mesh: tensor parallelism may leave ranks unequal parts."""
        if self.shape == self.sharded.shape:
            return self.shard_numel
        spec = self._held._unsharded_dtensor_spec
        shape = list(self.sharded.shape)
        for size, placement in zip(spec.mesh.shape, spec.placements, strict=True):
            if not placement.is_replicate():
                shape[placement.dim] = -(-shape[placement.dim] // size)
        shape[self.shard_dim] = -(-shape[self.shard_dim] // getattr(self._held.mesh_info, "shard_mesh_size", 1))
        return torch.Size(shape).numel()

    @property
    def shard_data(self) -> Tensor:
        """This rank's part, flat and padded, which FSDP2 reads when it gathers."""
        return self._held._sharded_param_data

    def version(self) -> tuple[nn.Parameter, int, Tensor, int]:
        """The tensors that hold the weights, and how many writes to each torch has counted.

        torch counts operations on the DTensor and on its local part. It does not count fused operations on lists of
        tensors, such as an optimizer's, or writes through `.data`.
        """
        param: Any = self.sharded
        return param, param._version, self.shard_data, param._local_tensor._version


@dataclass(frozen=True, eq=False)
class FSDPGroup:
    """One module, or several, whose parameters FSDP2 gathers and reduces together.

    module: an nn.Module that is also an FSDPModule, which its type can't express.
    """

    module: Any
    _state: Any
    _held: Any

    @property
    def params(self) -> list[FSDPParameter]:
        """The parameters, in the order in which they lie in FSDP2's buffers."""
        return [FSDPParameter(held) for held in self._held.fsdp_params]

    @property
    def shard_ranks(self) -> list[int]:
        """The global ranks that shard the parameters among them; a single rank if parameters are only replicated."""
        group = getattr(self._held.mesh_info, "shard_process_group", None)
        return dist.get_process_group_ranks(group) if group is not None else [dist.get_rank()]

    @property
    def replica_ranks(self) -> list[int]:
        """The global ranks that hold the same shard, in HSDP."""
        mesh = self._held.mesh_info
        if mesh.replicate_mesh_dim is None:
            return [dist.get_rank()]
        return dist.get_process_group_ranks(mesh.mesh.get_group(mesh.replicate_mesh_dim))

    @property
    def all_reduces_at_once(self) -> bool:
        """Whether HSDP's all_reduce follows each reduce_scatter directly, with nothing added in between."""
        return bool(self._held.all_reduce_grads) and self._held._partial_reduce_output is None

    def replica_factor(self, op: Any, num_replicas: int) -> float:
        """The factor by which the sum over replicas is scaled if the sum over shards was requested with `op`."""
        return 1 / num_replicas if op == dist.ReduceOp.AVG and self._held.gradient_divide_factor is None else 1.0

    def set_replicas(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Replace the process group that FSDP2 uses for its all_reduce over replicas. Return the previous one.

        torch has no public way: an all_reduce hook runs after FSDP2's own all_reduce, not instead of it.
        """
        before = self._held.mesh_info.replicate_process_group
        self._held.mesh_info.replicate_process_group = group
        return before

    def take_up(self) -> None:
        """Make FSDP2 read its parameters again, as its first forward does: loading a state may have replaced them.

        Raises ConfigError for parameters that FSDP2 can't reduce together.
        """
        try:
            self._held.lazy_init()
        except AssertionError as error:
            raise ConfigError(
                f"FSDP2 refuses the parameters of a {type(self.module).__name__.removeprefix('FSDP')}: {error}; make "
                "them of one type, or give the parts of each type to fully_shard by themselves first"
            ) from error

    def backward_group_size(self, root: nn.Module) -> int:
        """Number of ranks that gather in backward; 0 if the whole weights are kept after forward.

        reshard_after_forward decides. If it was not set, FSDP2 keeps the root's weights from the first forward on.
        """
        is_kept = self._state._auto_reshard_after_forward and self.module is root
        mesh = self._held.post_forward_mesh_info
        return 0 if is_kept or mesh is None else mesh.shard_mesh_size

    @property
    def prefetches_forward(self) -> bool:
        """Whether set_modules_to_forward_prefetch was called."""
        return bool(self._state._states_to_forward_prefetch)

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are summed, known from the first gather on. None: the gradients' own dtype."""
        return self._held._reduce_dtype

    def set_async(self, enable: bool) -> None:
        """Set whether FSDP2 starts gathers that it waits for later."""
        self.module._set_unshard_async_op(enable)

    def set_comms(self, all_gather: Any, reduce_scatter: Any) -> tuple[Any, Any]:
        """Replace FSDP2's collectives. Return the previous ones."""
        before = self._held._all_gather_comm, self._held._reduce_scatter_comm
        self.module.set_custom_all_gather(all_gather)
        self.module.set_custom_reduce_scatter(reduce_scatter)
        return before

    def reads_gradient_at_once(self, dtype: torch.dtype) -> str:
        """Why a mean gradient in `dtype` must be complete when reduce_scatter returns; empty if it need not be."""
        if self._held._all_reduce_hook is not None:
            return "an all_reduce hook reads it"
        if dtype != self._held._orig_dtype:
            return f"it is reduced in {dtype} and kept in {self._held._orig_dtype}"
        params = [param.sharded for param in self.params]
        if any(param.grad is not None for param in params):
            return "it is added to a gradient that was there"
        if any(param._post_accumulate_grad_hooks for param in params):
            return "a hook of a parameter reads it"
        return ""


def fsdp_groups(model: nn.Module) -> list[FSDPGroup]:
    """The groups of `model` that FSDP2 gathers together and that have parameters, in order of registration."""
    groups: list[FSDPGroup] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups += [FSDPGroup(module, state, held) for held in _param_groups(state)]
    first = {id(group._held): group for group in reversed(groups)}
    return [group for group in groups if first[id(group._held)] is group and group.params]


def _param_groups(state: Any) -> list[Any]:
    # Up to 2.11 a state had one group at most, under the singular name.
    held = getattr(state, "_fsdp_param_groups", None)
    return list(held) if held is not None else [g for g in [state._fsdp_param_group] if g is not None]
