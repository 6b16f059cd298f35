"""Every private name of torch that thinwire uses, and everything that differs between torch versions, in one place.

Those of FSDP2 are in `fsdp`, those of torchrun's agent in `elastic`. Here are the others:

- default_store: torch.distributed.distributed_c10d._get_default_store is private; 2.11 to 2.13 have it.
- has_python_reducer, delays_parameters: options that a DDP keeps under private names.
- at_end_of_backward: the autograd engine's queue_callback, private, used as FSDP2 itself uses it.
- DCP_METADATA_CLASSES: names of the classes in a checkpoint's .metadata, a pickle; three of them are private.
- factor_of: the state of a ReduceOp, which holds the factor of a PREMUL_SUM.
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
- saved_tensors_hooks: the innermost torch.autograd.graph.saved_tensors_hooks, which torch keeps under a private name.
- WithoutScaler: the private attribute of an optimizer that a GradScaler reads first.
- is_compiled: the private attribute of what torch.compile makes of a module, whose class loads the compiler.
- without_hooks, skip_hooks_of_none: a tensor's _backward_hooks, private: the gradient hooks of a leaf by their number.
- pipeline_table: torch.distributed.pipelining._schedule_visualizer.get_schedule_ops, private; 2.11 to 2.13 have it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
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


def saved_tensors_hooks() -> Any:
    """The hooks of the innermost torch.autograd.graph.saved_tensors_hooks; None: none are in effect."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


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
    # It takes about as long to load as all of torch, and a refused command waits for it.
    from torch.distributed.checkpoint import filesystem

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


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile, or the module's own `compile`, made this of a module."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


@contextmanager
def without_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Meanwhile no gradient hook of these leaves is called."""
    before = [(leaf, leaf._backward_hooks) for leaf in leaves if leaf._backward_hooks]
    for leaf, _ in before:
        leaf._backward_hooks = None
    try:
        yield
    finally:
        for leaf, hooks in before:
            leaf._backward_hooks = hooks


class _HooksOfGradients(OrderedDict[int, Callable[[Tensor], Tensor | None]]):
    """Gradient hooks that are called for gradients alone, and not for None."""

    def __init__(self, hooks: Any) -> None:
        super().__init__({number: partial(self._called, hook) for number, hook in hooks.items()})

    @staticmethod
    def _called(hook: Callable[[Tensor], Tensor | None], gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else hook(gradient)


def skip_hooks_of_none(leaves: Iterable[Tensor]) -> None:
    """To the end of the running backward, call gradient hooks of these leaves only if there is a gradient."""
    for leaf in leaves:
        hooks = leaf._backward_hooks
        if hooks and not isinstance(hooks, _HooksOfGradients):
            leaf._backward_hooks = _HooksOfGradients(hooks)
            at_end_of_backward(partial(setattr, leaf, "_backward_hooks", hooks))


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


class _NoView(torch.autograd.Function):
    """The same memory, as a tensor that autograd does not know as a view; gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def input_gradients(
    output: Tensor, gradient: Tensor, input: Tensor, weights: list[nn.Parameter]
) -> list[dict[str, Any]]:
    """Add the gradient of `input` alone to its `.grad`. Return what `weight_gradients` needs for the other half."""
    from torch.distributed.pipelining._backward import stage_backward_input

    # It detaches the output in place, which no view allows.
    _, groups = stage_backward_input([_NoView.apply(output)], [gradient], [input], iter(weights))
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
