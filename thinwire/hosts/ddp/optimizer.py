"""DistributedDataParallel with its reductions on the communication thread."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.checkpoint import Share, Source
from thinwire.errors import ConfigError
from thinwire.hosts.agreeing import AgreeingOptimizer
from thinwire.hosts.ddp.hook import hand_over
from thinwire.hosts.ddp.reducer import BucketReducer, learning_rates
from thinwire.hosts.interface import ParallelOptimizer, RankOptions, apply
from thinwire.hosts.ranks import Axis, Ranks, open_ranks
from thinwire.methods.ddp import DDPMethod
from thinwire.methods.reduction import Reduction
from thinwire.state.memory import Place
from thinwire.state.replicas import arithmetic_rows, same_start, trained_parameters
from thinwire.table import Row

MIB = 1 << 20


class WrappedModel(nn.Module):
    """The module inside DDP: the model, or a pass that touches every parameter without calling the model."""

    def __init__(self, model: nn.Module, trained: list[nn.Parameter]) -> None:
        super().__init__()
        self.model = model
        self._trained = trained
        self.only_touch = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output; or the sum of all trained elements, whose backward reaches the last parameter first."""
        if self.only_touch:
            return torch.stack([param.sum() for param in self._trained]).sum()
        return self.model(*args, **kwargs)


def wrap_ddp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: DDPMethod,
    *,
    local_size: int | None,
    seed: int,
    timeout_s: float,
    checked: bool,
    axis: Axis | None = None,
) -> tuple[nn.Module, DDPOptimizer]:
    """Return the module to call in training, and the optimizer. A collective over the default group.

    Raises ConfigError for models and optimizers that do not fit each other.
    """
    trained = trained_parameters(model, optimizer)
    strategy.check(model, optimizer)
    ranks = open_ranks(axis, local_size=local_size, timeout_s=timeout_s, checked=checked)
    comm = ranks.comm
    shapes = {name: param.shape for name, param in trained.items()}
    reduction = strategy.reduction(Place(shapes, comm.topology, comm.rank), seed)
    strategy.bind(reduction, trained, optimizer)
    rows: list[Row] = [(f"strategy {strategy.name}", "on torch's DistributedDataParallel", ""), *reduction.rows()]
    if checked and not reduction.is_metered:
        rows.append(("--checked", "no effect on gradients", "torch's collectives put nothing in front of a message"))
    rows += [same_start(model, comm), *arithmetic_rows(comm, strategy.sample())]
    entry = WrappedModel(model, list(trained.values()))
    whole_mb = sum(shape.numel() * 4 for shape in shapes.values()) // MIB + 1
    with warnings.catch_warnings():
        # Older versions of torch do not have its successor, forward_sync_buffers.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
        ddp = DistributedDataParallel(
            entry,
            broadcast_buffers=False,
            init_sync=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=strategy.find_unused_parameters,
            bucket_cap_mb=whole_mb if strategy.single_bucket else None,
            process_group=None if axis is None else axis.group.get_group(),
        )
    wrapped = DDPOptimizer(model, optimizer, ranks, trained, ddp, reduction, rows, whole_step=strategy.whole_step)
    if not strategy.find_unused_parameters:
        wrapped.settle_buckets()
    return ddp, wrapped


class DDPOptimizer(AgreeingOptimizer):
    """The user's optimizer over gradients that are averaged in DDP's buckets during backward; made by `wrap_ddp`."""

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        ranks: Ranks,
        trained: dict[str, nn.Parameter],
        ddp: DistributedDataParallel,
        reduction: Reduction,
        rows: list[Row],
        *,
        whole_step: bool,
    ) -> None:
        super().__init__(model, inner, ranks, dict(trained), sum(p.numel() for p in trained.values()), rows)
        self.ddp = ddp
        self._clips = not whole_step
        self._reducer = BucketReducer(
            self.comm, reduction, trained, lambda: learning_rates(trained, inner), alone=whole_step
        )
        ddp.register_comm_hook(self, hand_over)

    def settle_buckets(self) -> None:
        """Let DDP lay out its buckets before the first step. By itself, DDP does so after the first backward.

        The rounding of a sum depends on an element's place in its bucket. Without this, the first step of a resumed run
        would differ from the same step of an uninterrupted run.
        """
        self._reducer.is_idle = True
        self._touch()
        self._reducer.is_idle = False
        self.zero_grad()

    def send_accumulated(self) -> None:
        """DDP sends in a backward of its own forward: in one that adds zeros to all gradients."""
        self._touch(0.0)

    def _touch(self, factor: float = 1.0) -> None:
        """A backward that gives every element of every parameter this gradient, without the model."""
        entry: WrappedModel = self.ddp.module
        entry.only_touch = True
        try:
            (self.ddp() * factor).backward()
        finally:
            entry.only_touch = False

    def launch(self, bucket: dist.GradBucket) -> None:
        """Average a complete bucket in the background; called by DDP's hook."""
        self._reducer.launch(bucket)

    @property
    def bytes_per_step(self) -> int:
        """Payload bytes that this rank sends in one step, after any warm-up of the method."""
        return sum(self._reducer.reduction.sent_bytes().values()) + self.agreement_bytes

    def no_sync(self) -> AbstractContextManager[None]:
        return self.ddp.no_sync()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip as AgreeingOptimizer does; only measure the norm if the method has clipped before it compressed."""
        norm = super().clip_grad_norm_(max_norm if self._clips else math.inf)
        self._reducer.note_clipping(float(norm), max_norm)
        return norm

    def _reduce(self) -> None:
        if not self._reducer.all_launched:
            unused = [name for name, param in self.trained.items() if param.grad is None]
            if len(unused) == len(self.trained):
                raise ConfigError("no backward has run in this step: call `loss.backward()` before `optimizer.step()`")
            if not unused:
                raise ConfigError(
                    "no backward that sends has reached every parameter in this step: call the module that was "
                    "returned beside the optimizer, and leave the last backward of a step outside `optimizer.no_sync()`"
                )
            way = "set find_unused_parameters to True"
            if not self._clips:
                way = "freeze them with requires_grad_(False), since the method sends parts of earlier gradients of all"
            raise ConfigError(
                f"DDP waits for every parameter, and {len(unused)} took no part in this step, such as {unused[:1]}: "
                f"use them in every step, or {way}"
            )
        self._reducer.finish()

    def _counts(self, name: str) -> bool:
        # Every rank of the axis holds the same mean.
        return self.comm.rank == 0 and super()._counts(name)

    def _forget(self) -> list[str]:
        return self._reducer.reduction.state.forget()

    def _own(self) -> dict[str, Any]:
        return {"reducer": self._reducer.state_dict()}

    def _load_own(self, own: Mapping[str, Any]) -> None:
        self._reducer.load_state_dict(own["reducer"])

    def _shares(self) -> list[Share]:
        return [share.below("reducer/reduction") for share in self._reducer.reduction.state.shares()]

    def _adapt(self, source: Source) -> None:
        super()._adapt(source)
        reduction = self._reducer.reduction
        self._reducer.steps = self.steps
        if source.layout.get("reduction") == type(reduction).__name__:
            # State that is the same on all ranks, such as a plan or a basis; residuals follow.
            reduction.state.load_state_dict(source.own("reducer", rank=0)["reduction"])
        reduction.state.take_over(source.mean_of)

    def _layout(self) -> dict[str, Any]:
        return super()._layout() | {"reduction": type(self._reducer.reduction).__name__}


@apply.register
def _apply_ddp(
    method: DDPMethod, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Unpack[RankOptions]
) -> tuple[nn.Module, ParallelOptimizer]:
    own: Any = {key: value for key, value in options.items() if key != "overlap"}
    return wrap_ddp(model, optimizer, method, **own)
