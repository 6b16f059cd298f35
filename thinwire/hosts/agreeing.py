"""What DDP and FSDP2 leave to be done around an optimizer: the norm, skipped steps, agreement, state."""

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
from thinwire.table import Row

log = logging.getLogger("thinwire")


class AgreeingOptimizer(ParallelOptimizer):
    """The user's optimizer over gradients that another wrapper averages.

    trained: the tensors that the optimizer steps, by parameter name: whole parameters or this rank's shards of them.
    In every step all ranks of the mesh tell each other a StepStatus. ranks: the mesh as the method sees it.

    A subclass gives `_reduce`, which leaves the mean gradient in `.grad` of every trained tensor, and `bytes_per_step`.
    By default every rank holds the whole weights at all times, and a backward pass sends nothing.
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
        """Whether this rank counts its part of a parameter's gradient; one rank of the mesh counts each element."""
        return self.ranks.counts(name)

    def _forget(self) -> list[str]:
        """A step was skipped: drop what a method remembers of it that is not finite; of which parameters."""
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
            log.warning("thinwire: step %d: memory of %d parameter(s) dropped: not finite", self.steps, len(forgotten))

    def reduce(self) -> Tensor:
        if self._grad_norm is None:
            self._reduce()
            counted = [t.grad for name, t in self.trained.items() if t.grad is not None and self._counts(name)]
            agreed = self._agree(StepStatus(float(nn.utils.get_total_norm(counted)) ** 2, self._loss, self._stop))
            self._grad_norm = torch.tensor(agreed.norm, dtype=torch.float64)
        return self._grad_norm

    def _agree(self, word: StepStatus) -> Agreed:
        """Tell all ranks of the mesh this one's word, and keep what they agree on."""
        agreed = self.ranks.agree(word)
        self.mean_loss = agreed.loss
        self.stop_requested = self.stop_requested or agreed.stop
        return agreed

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        # Another list after the optimizer has loaded its state.
        return self.inner.param_groups

    @property
    def agreement_bytes(self) -> int:
        """Payload of the ranks' words in one step."""
        return self.ranks.word_bytes()

    @property
    def uncompressed_bytes_per_step(self) -> float:
        """What the strategy `zero` would send in fp32: 8 (P-1)/P bytes per parameter."""
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
        sent, plain = self.bytes_per_step / 1e6, self.uncompressed_bytes_per_step / 1e6
        topology = ("topology", str(self.comm.topology), self.comm.topology_reason)
        return [topology, *self._rows, ("sent per rank and step", f"{sent:.3f} MB", f"{plain:.3f} MB in fp32")]

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
        """Whether computing takes other weights than those that are saved."""
        return False

    def _held(self) -> dict[str, Held]:
        """What the user's optimizer steps, by parameter."""
        return {name: Held(tensor, tensor.numel(), is_copy=True) for name, tensor in self.trained.items()}

    def _own(self) -> dict[str, Any]:
        """What else must be there to go on bit for bit in the same layout."""
        return {}

    def _load_own(self, own: Mapping[str, Any]) -> None:
        """Restore what `_own` gave."""

    def _shares(self) -> list[Share]:
        """Of what `_own` gives, what another layout can take over."""
        return []

    def _left(self) -> dict[str, str]:
        """Why another layout can't take over the rest, by key of what `_own` gives, where there is more to say."""
        return {}

    def _adapt(self, source: Source) -> None:
        """Take over from another layout what can be; weights and optimizer are restored already."""
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
