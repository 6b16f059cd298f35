"""DistributedDataParallel with its reductions on the communication thread."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives import Communicator, staging
from thinwire.collectives.algorithms import Link, all_gather_exact
from thinwire.data_parallel.agreeing import AgreeingOptimizer
from thinwire.data_parallel.ddp.hook import hand_over
from thinwire.data_parallel.ddp.on_host import on_host
from thinwire.data_parallel.ddp.reductions import OPERATION, Bucket, Reduction
from thinwire.data_parallel.ddp.strategies import OnDDP
from thinwire.data_parallel.replicas import Row, digest, odd_ranks, same_start, trained_parameters
from thinwire.data_parallel.zero import ReplicaError
from thinwire.errors import ConfigError

MIB = 1 << 20


class Entry(nn.Module):
    """What DDP wraps: the model, or a pass that touches every parameter without it."""

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
    strategy: OnDDP,
    *,
    local_size: int | None,
    seed: int,
    timeout_s: float,
    checked: bool,
) -> tuple[nn.Module, DDPOptimizer]:
    """The module to call in training, and the optimizer; a collective over the default group.

    Raises ConfigError for models and optimizers that do not fit each other.
    """
    trained = trained_parameters(model, optimizer)
    comm = Communicator(local_size=local_size, timeout_s=timeout_s, checked=checked)
    shapes = [param.shape for param in trained.values()]
    reduction = strategy.reduction(comm.world_size, seed)
    rows: list[Row] = [(f"strategy {strategy.name}", "torch's DistributedDataParallel", ""), *reduction.rows(shapes)]
    rows.append(("bytes sent", "by formula: 2 (P-1)/P of what is reduced", "torch's collectives are not metered"))
    if checked:
        rows.append(("--checked", "no effect on gradients", "torch's collectives put nothing in front of a message"))
    rows.append(same_start(model, comm))
    entry = Entry(model, list(trained.values()))
    whole_mb = sum(shape.numel() * 4 for shape in shapes) // MIB + 1
    with warnings.catch_warnings():
        # Its successor, forward_sync_buffers, is unknown to older versions.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
        ddp = DistributedDataParallel(
            entry,
            broadcast_buffers=False,
            init_sync=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=strategy.find_unused_parameters,
            bucket_cap_mb=whole_mb if strategy.single_bucket else None,
        )
    wrapped = DDPOptimizer(model, optimizer, comm, trained, ddp, reduction, rows)
    if not strategy.find_unused_parameters:
        wrapped.settle_buckets(entry)
    return ddp, wrapped


class DDPOptimizer(AgreeingOptimizer):
    """The user's optimizer over gradients that DDP's buckets average while backward goes on; made by `wrap_ddp`."""

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        comm: Communicator,
        trained: dict[str, nn.Parameter],
        ddp: DistributedDataParallel,
        reduction: Reduction,
        rows: list[Row],
    ) -> None:
        super().__init__(model, inner, comm, dict(trained), sum(p.numel() for p in trained.values()), rows)
        self.ddp = ddp
        self.reduction = reduction
        self._reducing: dict[int, Future[None]] = {}
        self._settling = False
        self._all_launched = False
        ddp.register_comm_hook(self, hand_over)

    def settle_buckets(self, entry: Entry) -> None:
        """Let DDP lay out its buckets before the first step, which it does after the first backward it sees.

        The rounding of a sum depends on where in a bucket an element lies: a run that is resumed would differ in its
        first step from the one that was not stopped.
        """
        self._settling = entry.only_touch = True
        self.ddp().backward()
        self._settling = entry.only_touch = False
        self.zero_grad()

    def launch(self, bucket: Bucket) -> None:
        """Average a complete bucket in the background; called by DDP's hook."""
        if self._settling:
            return
        self._all_launched = self._all_launched or bucket.last
        if self.comm.world_size == 1:
            return
        if bucket.number in self._reducing:
            raise RuntimeError(
                "a second backward reached gradients that were sent already: wrap every forward and backward but the "
                "last of a step in `with optimizer.no_sync():`"
            )
        self._reducing[bucket.number] = self.comm.submit(self._job(bucket))

    def _job(self, bucket: Bucket) -> Callable[[Link], Generator[Any, None, None]]:
        def job(link: Link) -> Generator[Any, None, None]:
            try:
                held = yield from on_host(link, bucket)
                num_bytes = yield from self.reduction.run(link, held)
                if held is not bucket:
                    staging.to_device(held.flat, bucket.flat)
            except RuntimeError:
                # gloo does not say which rank is missing; asking each of them for a message does.
                yield from all_gather_exact(link, torch.zeros(1))
                raise
            sent = self._ring_bytes(num_bytes)
            link.wire.meter.count(OPERATION, "inter" if link.topology.num_nodes > 1 else "intra", sent, sent)

        return job

    def _ring_bytes(self, num_bytes: int) -> int:
        """Payload of a ring all_reduce: P-1 of P parts to sum, then again to spread."""
        return 2 * (self.comm.world_size - 1) * num_bytes // self.comm.world_size

    @property
    def bytes_per_step(self) -> int:
        """Payload this rank sends in one step, gradients by formula; once the method is under way."""
        shapes = [param.shape for param in self.trained.values()]
        return self._ring_bytes(self.reduction.num_bytes(shapes)) + self.agreement_bytes

    def no_sync(self) -> AbstractContextManager[None]:
        """Forward and backward passes inside only accumulate gradients."""
        return self.ddp.no_sync()

    def synchronize(self) -> None:
        """Every rank holds the whole weights at all times."""

    def check_replicas(self) -> None:
        """Compare the weights of all ranks bit for bit; raises ReplicaError that names the ranks; a collective."""
        if odd := odd_ranks(self.comm, digest(self.trained.values())):
            raise ReplicaError(f"after step {self.steps} the weights of rank(s) {odd} differ from rank 0's")

    def _reduce(self) -> None:
        if not self._all_launched:
            unused = [name for name, param in self.trained.items() if param.grad is None]
            raise ConfigError(
                f"DDP waits for every parameter, and {len(unused)} took no part in this step, such as {unused[:1]}: "
                "use them, or set find_unused_parameters to True"
            )
        for reducing in self._reducing.values():
            self.comm.wait(reducing)
        self._reducing.clear()
        self._all_launched = False

    def _global_norm(self, squares: float) -> float:
        return squares**0.5

    def _forget(self) -> None:
        self.reduction.forget()

    def state_dict(self) -> dict[str, Any]:
        """As AgreeingOptimizer's, everything whole on every rank, with what the reduction remembers."""
        return super().state_dict() | {"reduction": self.reduction.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what state_dict gave; raises ConfigError where it does not fit."""
        super().load_state_dict(state_dict)
        self.reduction.load_state_dict(state_dict["reduction"])

    def _layout(self) -> dict[str, Any]:
        return super()._layout() | {"reduction": type(self.reduction).__name__}
