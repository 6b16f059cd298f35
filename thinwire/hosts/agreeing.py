"""Optimizers around DDP and FSDP2: gradient norm, skipped steps, agreement of the ranks, state."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.checkpoint import Share, Snapshot, Source
from thinwire.hosts.interface import ParallelOptimizer
from thinwire.hosts.ranks import Ranks
from thinwire.state.agreement import Agreed, StepStatus
from thinwire.state.portable import REPLICA, Held, add_optimizer, restore_optimizer
from thinwire.state.replicas import compare_replicas, shapes_digest
from thinwire.table import Row, sent_row

log = logging.getLogger("thinwire")


class AgreeingOptimizer(ParallelOptimizer):
    """The user's optimizer over gradients that another wrapper averages.

    In every step all ranks of the mesh exchange a StepStatus. A subclass defines `_reduce`, which leaves the mean
    gradient in `.grad` of every trained tensor, and `bytes_per_step`. By default every rank holds the whole weights at
    all times, and a backward pass sends nothing.

    Args:
        trained: the tensors that the optimizer steps, by parameter name: whole parameters or this rank's shards.
        ranks: the mesh as the method sees it.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        ranks: Ranks,
        trained: dict[str, Tensor],
        num_parameters: int,
        rows: list[Row],
    ) -> None:
        self.model = model
        self.inner = inner
        self.ranks = ranks
        self.comm = ranks.comm
        self.trained = trained
        self.num_parameters = num_parameters
        self.steps = 0
        self._rows = rows

    def _reduce(self) -> None:
        """Wait until the mean gradient over all ranks is in `.grad` of the trained tensors."""
        raise NotImplementedError

    def _counts(self, name: str) -> bool:
        """Whether this rank counts its part of a parameter's gradient. One rank of the mesh counts each element."""
        return self.ranks.counts(name)

    def _forget(self) -> list[str]:
        """Drop the method's state that is not finite, after a skipped step. Return the names of its parameters."""
        return []

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self) -> None:
        pass

    def check_replicas(self) -> None:
        compare_replicas(self.comm, self.trained.values(), self.steps)

    def zero_grad(self) -> None:
        for tensor in self.trained.values():
            tensor.grad = None

    def _scale(self, factor: float) -> None:
        for tensor in self.trained.values():
            if tensor.grad is not None:
                tensor.grad.mul_(factor)

    def _update(self) -> None:
        self.inner.step()

    def _skip(self) -> None:
        super()._skip()
        if forgotten := self._forget():
            log.warning("thinwire: step %d: state of %d parameter(s) dropped: not finite", self.steps, len(forgotten))

    def reduce(self) -> Tensor:
        if self._grad_norm is None:
            self._reduce()
            counted = [t.grad for name, t in self.trained.items() if t.grad is not None and self._counts(name)]
            squares = float(nn.utils.get_total_norm(counted)) ** 2
            agreed = self._agree(StepStatus(squares, self._loss, self._stop, told=self.told))
            self._grad_norm = torch.tensor(agreed.norm, dtype=torch.float64)
        return self._grad_norm

    def _agree(self, word: StepStatus) -> Agreed:
        """Exchange this rank's status with all ranks of the mesh. Store the result."""
        agreed = self.ranks.agree(word)
        self.mean_loss, self.told = agreed.loss, agreed.told
        self.stop_requested = self.stop_requested or agreed.stop
        return agreed

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        # The optimizer makes a new list when it loads its state.
        return self.inner.param_groups

    @property
    def agreement_bytes(self) -> int:
        """Payload bytes of the ranks' statuses in one step."""
        return self.ranks.word_bytes()

    @property
    def uncompressed_bytes_per_step(self) -> float:
        """Bytes that the strategy `zero` would send in fp32: 8 (P-1)/P per parameter."""
        return 8 * self.num_parameters * (1 - 1 / self.comm.world_size)

    def masters(self, names: Collection[str]) -> dict[str, Tensor]:
        return {name: self.trained[name].detach().clone() for name in names}

    @torch.no_grad()
    def adopt_weights(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.trained[name].copy_(value)

    def handover_bytes(self, names: Collection[str]) -> tuple[int, int]:
        # Every rank holds the whole weights.
        return 0, 0

    def describe(self) -> list[Row]:
        topology = ("topology", str(self.comm.topology), self.comm.topology_reason)
        return [topology, *self._rows, sent_row(self.bytes_per_step, self.uncompressed_bytes_per_step)]

    def snapshot(self) -> Snapshot:
        common = {"steps": self.steps, "skipped_steps": self.skipped_steps, "lossy_weights": self._lossy_weights}
        snapshot = Snapshot(self._layout(), own=self._own(), common=common, shares=self._shares(), left=self._left())
        return add_optimizer(snapshot, self.inner, self._held())

    @torch.no_grad()
    def restore(self, source: Source) -> None:
        same = source.fits(self._layout())
        restore_optimizer(source, self.inner, self._held())
        self.steps, self.skipped_steps = source.common["steps"], source.common["skipped_steps"]
        if same:
            self._load_own({key: source.own(key) for key in self._own()})
        else:
            source.is_exact = not (self._lossy_weights or source.common["lossy_weights"])
            self._adapt(source)
        self.zero_grad()

    @property
    def _lossy_weights(self) -> bool:
        """Whether the weights in use differ from the weights that are saved."""
        return False

    def _held(self) -> dict[str, Held]:
        """Weights and state of the user's optimizer, by parameter."""
        return {name: Held(tensor, tensor.numel(), is_copy=True) for name, tensor in self.trained.items()}

    def _own(self) -> dict[str, Any]:
        """Further state that the same layout needs to continue bit for bit."""
        return {}

    def _load_own(self, own: Mapping[str, Any]) -> None:
        """Restore the state that `_own` returned."""

    def _shares(self) -> list[Share]:
        """The parts of `_own` that another layout can load."""
        return []

    def _left(self) -> dict[str, str]:
        """Why another layout can't load the rest of `_own`, by key, if there is a special reason."""
        return {}

    def _adapt(self, source: Source) -> None:
        """Load what is possible from another layout. Weights and optimizer are already restored."""
        if source.has_any(REPLICA):
            source.drop_replica("weights travel without one here")

    def _layout(self) -> dict[str, Any]:
        return {
            "rank": self.comm.rank,
            "world_size": self.comm.world_size,
            "local_size": self.comm.topology.local_size,
            "kind": type(self).__name__,
            "parameters": shapes_digest(self.trained),
        }
