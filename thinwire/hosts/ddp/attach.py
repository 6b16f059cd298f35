"""Compressed gradients for a model that is already in DistributedDataParallel, in its own loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import _compat
from thinwire.collectives import Communicator, Meter
from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.errors import ConfigError
from thinwire.hosts.arguments import check_arguments, check_instance, check_max_norm
from thinwire.hosts.ddp.hook import hand_over
from thinwire.hosts.ddp.reducer import BucketReducer, learning_rates
from thinwire.hosts.dense import SPARSE
from thinwire.methods.ddp import DDPMethod
from thinwire.state.clipping import clip_factor
from thinwire.state.given import optimizer_options, same_on_all_ranks
from thinwire.state.memory import Place
from thinwire.state.replicas import arithmetic_rows, check_layout, check_updates, refuse_spread, unwrapped
from thinwire.table import Row, announce as announce_table, sent_row

log = logging.getLogger("thinwire")
# Options of DDP that keep some gradients from reaching its hook as fp32 buckets, and whether each is set.
WAYS_AROUND: dict[str, Callable[[DistributedDataParallel], bool]] = {
    "torch._dynamo.config.optimize_ddp set to a python reducer": _compat.has_python_reducer,
    "mixed_precision": lambda ddp: ddp.mixed_precision is not None,
    "delay_all_reduce_named_params": _compat.delays_parameters,
}

# Options that decide which ranks wait for which messages.
SAME_IN_DDP = ("find_unused_parameters", "static_graph")


def compress_ddp(
    model: DistributedDataParallel,
    method: DDPMethod,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    local_size: int | None = None,
    seed: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    checked: bool = False,
    announce: bool = True,
) -> CompressedDDP:
    """Average the gradients of a DDP model by `method`. A collective over its process group.

    After every backward outside `model.no_sync()` the gradients are the same on all ranks, as without the method.

    Args:
        model: in DistributedDataParallel, with fp32 parameters and no hook.
        method: how gradients are averaged, such as `thinwire.PowerSGD()`.
        optimizer: needed by methods that weight errors by the learning rate, or that need an optimizer of their own.
        local_size: ranks per node; None: detected.
        seed: of the method's random numbers.
        timeout_s, checked: see Communicator.
        announce: rank 0 prints the table of what is in effect.

    Raises ConfigError for a model that is not in DDP, has a hook already or has parameters that are not fp32; for
    options of DDP that bypass its hook; for a model or an optimizer that the method can't use; and for ranks that were
    given different options.
    """
    check_arguments("compress_ddp", model, unwrapped(optimizer), local_size=local_size, seed=seed, timeout_s=timeout_s,
        checked=checked, announce=announce,
    )  # fmt: skip
    check_instance(method)
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"compress_ddp got a {type(model).__name__}: wrap it in torch.nn.parallel.DistributedDataParallel first; "
            "for fully_shard there is compress_fsdp"
        )
    if not isinstance(method, DDPMethod):
        raise ConfigError(
            f"{type(method).__name__} does not average gradients in DistributedDataParallel: give a method that does, "
            "such as thinwire.PowerSGD(), or shard the model with fully_shard, for which there is compress_fsdp"
        )
    optimizer = unwrapped(optimizer)
    with same_on_all_ranks(model.process_group, timeout_s) as given:
        refuse_spread(model)
        _check_model(model, method)
        if optimizer is not None:
            check_updates(optimizer, list(model.module.parameters()), "DistributedDataParallel")
        method.check(model.module, optimizer)
        given |= {"method": method, "local_size": local_size, "seed": seed, "checked": checked}
        given |= {f"DDP's {option}": getattr(model, option) for option in SAME_IN_DDP}
        given |= optimizer_options(optimizer, model.module)
    comm = Communicator(model.process_group, local_size=local_size, timeout_s=timeout_s, checked=checked)
    handle = CompressedDDP(model, method, optimizer, comm, seed)
    if announce and comm.rank == 0:
        announce_table(handle.describe())
    return handle


def _check_model(model: DistributedDataParallel, method: DDPMethod) -> None:
    """Raise ConfigError for a DDP whose gradients the method can't average."""
    for option, around in WAYS_AROUND.items():
        if around(model):
            raise ConfigError(f"compress_ddp can't compress gradients of a DDP with {option}: make the DDP without it")
    for name, param in model.module.named_parameters():
        if param.requires_grad and param.dtype != torch.float32:
            raise ConfigError(f"{name!r} is {param.dtype}: gradients of parameters must be float32; use autocast")
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ConfigError(SPARSE.format(f"{name}.weight".removeprefix(".")))
    if method.whole_step and model.find_unused_parameters:
        raise ConfigError(
            f"{method.name} may send gradients that an earlier step held back, so all parameters must take part in "
            "every step: give DDP find_unused_parameters=False"
        )


class CompressedDDP:
    """A DDP model whose gradients travel by a method; made by `compress_ddp`."""

    def __init__(
        self,
        model: DistributedDataParallel,
        method: DDPMethod,
        optimizer: torch.optim.Optimizer | None,
        comm: Communicator,
        seed: int,
    ) -> None:
        trained = {name: param for name, param in model.module.named_parameters() if param.requires_grad}
        self.comm = comm
        self.method = method
        self.optimizer = optimizer
        self._trained = trained
        self._shapes = {name: param.shape for name, param in trained.items()}
        self.reduction = method.reduction(Place(self._shapes, comm.topology, comm.rank), seed)
        method.bind(self.reduction, trained, optimizer)
        self._arithmetic = arithmetic_rows(comm, method.sample())
        self._reducer = BucketReducer(comm, self.reduction, trained, self._lrs, alone=method.whole_step)
        self._waits = False
        self._ddp = model
        try:
            model.register_comm_hook(self, hand_over)
        except RuntimeError as error:
            comm.close()
            raise ConfigError(f"DDP refuses the hook: {error}") from error

    def launch(self, bucket: dist.GradBucket) -> None:
        """Average a complete bucket in the background, and wait for all of them where backward ends; DDP's hook.

        In the first step of a static graph, DDP passes all buckets when backward has ended, and reads them at once.
        """
        if not self._waits and not self._ddp.static_graph:
            self._waits = True
            _compat.at_end_of_backward(self.finish)
        if self.method.single_bucket and bucket.index() > 0:
            raise ConfigError(f"{self.method.name} takes all gradients at once: give DDP bucket_cap_mb=10000")
        self._reducer.launch(bucket)
        if self._ddp.static_graph and bucket.is_last():
            self.finish()

    def finish(self) -> None:
        """Wait until every gradient of this backward is the mean. backward itself calls this at its end."""
        self._waits = False
        if not all(bool(torch.isfinite(mean.sum())) for mean in self._reducer.finish()):
            forgotten = self.reduction.state.forget()
            log.warning("thinwire: a mean gradient is not finite; state of %d parameter(s) dropped", len(forgotten))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the mean gradient after a backward. Return its norm before clipping.

        Residuals are scaled with it, see Clipping. A method that clips before it compresses only measures the norm
        here.
        """
        check_max_norm(max_norm)
        grads = [param.grad for param in self._trained.values() if param.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        factor = 1.0 if self.method.whole_step else clip_factor(float(norm), max_norm)
        if factor < 1.0:
            torch._foreach_mul_(grads, factor)
        self._reducer.note_clipping(float(norm), max_norm)
        return norm

    @property
    def meter(self) -> Meter:
        """Bytes and seconds of the group."""
        return self.comm.meter

    @property
    def bytes_per_step(self) -> int:
        """Payload bytes that this rank sends in one step, after any warm-up of the method."""
        return sum(self.reduction.sent_bytes().values())

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        plain = 8 * sum(shape.numel() for shape in self._shapes.values()) * (1 - 1 / self.comm.world_size)
        return [
            ("topology", str(self.comm.topology), self.comm.topology_reason),
            (f"method {self.method.name}", "hook of DistributedDataParallel", ""),
            *self.reduction.rows(),
            *self._arithmetic,
            *self._rows_on_learning_rates(),
            ("overlap", "buckets travel while backward goes on", "backward ends when all have arrived"),
            sent_row(self.bytes_per_step, plain),
        ]

    def _rows_on_learning_rates(self) -> list[Row]:
        if not self.method.uses_learning_rates or self.optimizer is not None:
            return []
        return [("errors weighted by learning rates", "not weighted", "give compress_ddp the optimizer")]

    def residuals(self) -> dict[str, torch.Tensor]:
        """Parts of this rank's gradients that the method has not sent yet, by parameter."""
        held = self.reduction.state.residuals()
        return {name: held[name] if name in held else torch.zeros(shape) for name, shape in self._shapes.items()}

    def state_dict(self) -> dict[str, Any]:
        """The method's state on this rank. Every rank must save its own, beside model and optimizer."""
        return self._place() | self._reducer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state_dict. Raises ConfigError if it belongs to other options, another world or another rank."""
        check_layout(self._place(), state)
        self._reducer.load_state_dict(state)

    def _place(self) -> dict[str, Any]:
        return {
            "method": repr(self.method),
            "world_size": self.comm.world_size,
            "local_size": self.comm.topology.local_size,
            "rank": self.comm.rank,
        }

    def close(self) -> None:
        """Wait for all communication and give the process group back."""
        self.comm.close()

    def _lrs(self) -> dict[str, float]:
        return learning_rates(self._trained, self.optimizer)
