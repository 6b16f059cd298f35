"""Every private name of torch that thinwire uses, and everything that differs between torch versions, in one place.

- default_store: torch.distributed.distributed_c10d._get_default_store is private; 2.11 to 2.13 have it.
- FSDPGroup, FSDPParameter: the private state that FSDP2 keeps for a module that was given to fully_shard. Only these
  classes know the order of parameters in FSDP2's buffers; layout/pattern.py checks that order before it is used. In
  HSDP the group of replicas is private too: the public all_reduce hook runs after FSDP2's own all_reduce.
- has_python_reducer, delays_parameters: options that a DDP keeps under private names.
- at_end_of_backward: the autograd engine's queue_callback, private, used as FSDP2 itself uses it.
- DCP_METADATA_CLASSES: names of the classes in a checkpoint's .metadata, a pickle; three of them are private.
- factor_of: the state of a ReduceOp, which holds the factor of a PREMUL_SUM.
- Rendezvous: torchrun's dynamic rendezvous. Its list of nodes, leaving it while others stay, and the interval at which
  it looks are private.
- agent_starts_by: the private function by which torchrun's agent starts a worker.
- compiler_problem: the private search of torch.compile for a C++ compiler, and its private test of Triton.
- set_timeout: ProcessGroupGloo._set_default_timeout, private, used as torch itself uses it.
- named_group: distributed_c10d._new_process_group_helper and _world, private: torch names a group of some ranks by the
  number of groups that its maker is in, in which ranks may differ.
- place_in_file: torch.distributed.checkpoint.filesystem._StorageInfo, private; 2.11 to 2.13 have it.
- no_record_checksums: a private name shows whether an option of torch.save can be set for one thread, as in 2.13.
- input_gradients, weight_gradients: torch.distributed.pipelining._backward, private: the two halves of a backward, as
  torch's own schedules compute them.
- cpu_flash_forward, cpu_flash_backward: aten's private attention for the CPU, the only one that returns the softmax's
  sums.
- flop_counter: the same attention, which torch's counter of operations leaves out.
- DispatchMode: torch.utils._python_dispatch.TorchDispatchMode: the module is private; torch's documentation names it.
- WithoutScaler: the private attribute of an optimizer that a GradScaler reads first.
- pipeline_table: torch.distributed.pipelining._schedule_visualizer.get_schedule_ops, private; 2.11 to 2.13 have it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing import api as elastic_processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode  # noqa: F401
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.serialization import config as serialization

from thinwire.errors import ConfigError

DCP_METADATA_CLASSES = frozenset(
    {
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    }
    | {("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")}
    | {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}
    | {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}
)  # fmt: skip


def compiler_problem(kind: str) -> str:
    """Why torch.compile's inductor can't work on a device of this kind; an empty string if it can."""
    if kind == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "Triton does not work here, which torch.compile needs on a GPU"
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "torch.compile needs a C++ compiler on the CPU, such as g++, and finds none"
    return ""


class WithoutScaler:
    """An optimizer that a `torch.amp.GradScaler` can't step: the scaler's `step` raises ConfigError."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise ConfigError(
            "a GradScaler can't step a sharded optimizer: backward has sent the gradients, and a step that is not "
            "finite is skipped on all ranks without it. Leave the scaler out, and use autocast to bfloat16"
        )


def default_store() -> dist.Store:
    """The key-value store in which the ranks of the default group met. Raises ValueError if there is no such group."""
    return distributed_c10d._get_default_store()


def timeout_of(store: dist.Store) -> float:
    """Seconds for which a store waits for a key."""
    seconds: float = getattr(store, "timeout").total_seconds()  # noqa: B009
    return seconds


def is_of_gloo(error: BaseException) -> bool:
    """Whether gloo raised an error. torch gives most of gloo's errors no type of their own."""
    marks = ("gloo/", "Gloo ", "pair closure")
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in marks)


def place_in_file(file: str, offset: int, num_bytes: int) -> Any:
    """Where DCP's file reader finds a tensor: the file, relative to the checkpoint, and the offset in bytes."""
    return filesystem._StorageInfo(file, offset, num_bytes)


def no_record_checksums() -> AbstractContextManager[Any]:
    """A context in which torch.save on this thread computes no CRC-32 of its records, if torch can do so per thread."""
    config: Any = serialization
    is_per_thread = isinstance(config._config["save.compute_crc32"].user_override, ContextVar)
    return config.patch({"save.compute_crc32": False}) if is_per_thread else nullcontext()


def at_end_of_backward(call: Callable[[], None]) -> bool:
    """Call `call` at the end of the backward that is running on this thread. Return False if none is running."""
    try:
        Variable._execution_engine.queue_callback(call)
    except RuntimeError:
        return False
    return True


def has_python_reducer(ddp: DistributedDataParallel) -> bool:
    """Whether compiled autograd's Python hooks reduce the gradients instead of DDP's buckets."""
    return bool(getattr(ddp, "_use_python_reducer", False))


def delays_parameters(ddp: DistributedDataParallel) -> bool:
    """Whether DDP reduces the gradients of some parameters outside its buckets."""
    return bool(getattr(ddp, "_delay_all_reduce_params", ()))


def factor_of(op: Any, world_size: int) -> float:
    """The factor by which a reduction scales the sum over ranks. Raises ValueError unless AVG, SUM or PREMUL_SUM."""
    if op == dist.ReduceOp.AVG:
        return 1.0 / world_size
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.PREMUL_SUM:
        return float(op.__getstate__()[1])
    raise ValueError(f"{op} is no sum")


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


class Rendezvous:
    """torchrun's dynamic rendezvous among nodes that come and go; raises its RendezvousError.

    Args:
        state: a store connection that nothing else uses. Waiting for a key keeps a connection busy, and a node that
            can't send its heartbeat counts as dead.
        store: where the nodes of one round exchange values.
        name: decides the order of the nodes.
        dead_after_s: a node without a heartbeat for this long is removed, by the nodes' own clocks.
        last_call_s: a round is complete this long after its first node came, or when max_nodes are there.
        look_every_s: at most 1.
    """

    def __init__(
        self, state: dist.Store, store: dist.Store, *, name: str, max_nodes: int, dead_after_s: float,
        last_call_s: float, look_every_s: float, patience_s: float,
    ) -> None:  # fmt: skip
        self._look_every_s = look_every_s
        backend, attempts = C10dRendezvousBackend(state, "thinwire"), 4
        timeout = RendezvousTimeout(
            join=timedelta(seconds=patience_s), last_call=timedelta(seconds=last_call_s),
            heartbeat=timedelta(seconds=dead_after_s),
        )  # fmt: skip
        settings = dynamic_rendezvous.RendezvousSettings(
            "thinwire", 1, max_nodes, timeout, timedelta(seconds=dead_after_s / attempts), attempts
        )
        node = DynamicRendezvousHandler._node_desc_generator.generate(name)
        # By default what was seen is taken for true for a second more, in which a node that waits would seem dead.
        holder = dynamic_rendezvous._BackendRendezvousStateHolder(backend, settings, cache_duration=0)
        self._handler = DynamicRendezvousHandler(node, settings, backend.name, store, holder)
        # Each of them notes events, with the name of the caller, for which Python reads the sources of the whole stack:
        # a large part of a second for every heartbeat.
        for part in (holder, self._handler, self._handler._op_executor):
            vars(part)["_record"] = lambda *args, **kwargs: None

    def meet(self) -> tuple[dist.Store, int, int]:
        """Leave the last round and wait for the next. Return its store, this node's rank, and the number of nodes."""
        with _store_not_shared(), _looking_every(self._look_every_s):
            info = self._handler.next_rendezvous()
        self._round = set(self._handler._state_holder.state.participants)
        return info.store, info.rank, info.world_size

    def look(self) -> tuple[bool, int, int, int]:
        """Whether this node is in the round; nodes in the round, nodes that wait for the next, and those in both."""
        num_waiting = self._handler.num_nodes_waiting()
        state, node = self._handler._state_holder.state, self._handler._this_node
        return node in state.participants, len(state.participants), num_waiting, len(self._round & state.wait_list)

    def fall_silent(self) -> None:
        """Stop sending heartbeats until the next round."""
        self._handler._stop_heartbeats()

    def leave(self) -> None:
        """Leave the rendezvous at once and stop sending heartbeats."""
        handler = self._handler
        self.fall_silent()
        deadline = handler._get_deadline(handler.settings.timeout.heartbeat)
        handler._op_executor.run(dynamic_rendezvous._RendezvousExitOp(), deadline)


@contextmanager
def agent_starts_by(start: Callable[..., Any]) -> Iterator[None]:
    """Make torchrun's agent start workers by `start(words, env, stdout, stderr)`, which returns a Popen's like."""

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple, env: dict[str, str]) -> Any:
            return start(args, env, self._stdout, self._stderr)

    module: Any = elastic_processes
    before, module.get_subprocess_handler = module.get_subprocess_handler, Handler
    try:
        yield
    finally:
        module.get_subprocess_handler = before


def set_timeout(group: dist.ProcessGroupGloo, timeout_s: float) -> None:
    """Set how long a message of this group may take from now on, in seconds."""
    group._set_default_timeout(timedelta(seconds=timeout_s))


def named_group(name: str, ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """A gloo group of these global ranks, this one among them, which meet under the name. A collective over them."""
    module: Any = distributed_c10d
    group, _ = module._new_process_group_helper(
        len(ranks), ranks.index(dist.get_rank()), list(ranks), dist.Backend("gloo"), default_store(), name,
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip
    module._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    found: dist.ProcessGroup = group
    return found


@contextmanager
def _looking_every(every_s: float) -> Iterator[None]:
    """A node that waits looks so often, for which torch has a second."""
    before = dynamic_rendezvous._delay
    dynamic_rendezvous._delay = lambda seconds: before(every_s if seconds == 1 else seconds)
    try:
        yield
    finally:
        dynamic_rendezvous._delay = before


@contextmanager
def _store_not_shared() -> Iterator[None]:
    """A node that is first among others would start a store for their default group, for which newcomers then wait."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks of a mesh as one dimension; torch has no public function for it."""
    return mesh._flatten()


def pipeline_table(
    schedule: str, num_ranks: int, num_micro_batches: int, chunks_per_rank: int
) -> list[list[tuple[str, int, int]]]:
    """The actions of each rank in a schedule of torch.distributed.pipelining: (F, B, I or W, stage, micro-batch).

    Needs no process group. Raises ValueError for numbers that the schedule does not support.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = get_schedule_ops(schedule, num_ranks, num_micro_batches, num_stages_per_rank=chunks_per_rank)
    return [[action for row in rank if row is not None for action in _computed(row)] for rank in rows]


def _computed(row: Any) -> list[tuple[str, int, int]]:
    if row.sub_actions is not None:
        return [action for part in row.sub_actions for action in _computed(part)]
    if not row.is_compute_op:
        return []
    return [(row.computation_type.value, row.stage_index, row.microbatch_index)]


def input_gradients(
    output: Tensor, gradient: Tensor, input: Tensor, weights: list[nn.Parameter]
) -> list[dict[str, Any]]:
    """Add the gradient of `input` alone to its `.grad`. Return what `weight_gradients` needs for the other half."""
    from torch.distributed.pipelining._backward import stage_backward_input

    _, groups = stage_backward_input([output], [gradient], [input], iter(weights))
    return groups


def weight_gradients(weights: list[nn.Parameter], groups: list[dict[str, Any]]) -> None:
    """Add to the weights' `.grad` what `input_gradients` left out. Hooks of the weights are not called."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(weights), groups)


def cpu_flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention on the CPU: the output, and the logarithm of the softmax's sums.

    Shape:
        q, k, v: [batch, heads, tokens, d]. Results: as q; [batch, heads, tokens].
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)


def cpu_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of `cpu_flash_forward`, which returned `out` and `sums`.

    Shape:
        grad, q, k, v, out: [batch, heads, tokens, d]; grad is the gradient of `out`. sums: [batch, heads, tokens].
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, sums, 0.0, is_causal, scale=scale
    )


def flop_counter() -> FlopCounterMode:
    """torch's counter of operations, with a CPU's fused attention; of a causal one too, all products count."""

    def of_attention(q: torch.Size, k: torch.Size, v: torch.Size, *args: Any, **kwargs: Any) -> int:
        return 2 * q[:-1].numel() * k[-2] * (q[-1] + v[-1])

    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={fused: of_attention})
