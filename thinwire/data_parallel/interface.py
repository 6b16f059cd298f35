"""What the trainer asks of a strategy, and of the optimizer that the strategy gives it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec
from thinwire.collectives import Communicator, Meter

# The reason of strategies that shard the optimizer.
CUTS_TENSORS = "cuts tensors anywhere, so that the update of one element must not depend on others"


class ParallelOptimizer(Protocol):
    """An optimizer whose step is one step of all ranks.

    One step: backward (every one but the last inside `no_sync`), `note_loss`, `clip_grad_norm_`, `step`, `zero_grad`.
    A step whose gradient norm is not finite is skipped on all ranks.
    """

    skipped_steps: int

    @property
    def comm(self) -> Communicator:
        """The group of all ranks."""
        ...

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the user's optimizer: the learning rate is set there."""
        ...

    @property
    def mean_loss(self) -> float:
        """The mean over ranks of what they noted for the last step."""
        ...

    @property
    def stop_requested(self) -> bool:
        """Whether any rank wished to stop; the same on all ranks after a step."""
        ...

    @property
    def meter(self) -> Meter:
        """Payload bytes, and the seconds that communication took or kept the training thread waiting."""
        ...

    @property
    def bytes_per_step(self) -> int:
        """Payload this rank sends in one step."""
        ...

    @property
    def uncompressed_bytes_per_step(self) -> float:
        """What fp32 gradients and weights of a sharded optimizer would need: 8 (P-1)/P bytes per parameter."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Forward and backward passes inside only accumulate gradients."""
        ...

    def note_loss(self, loss: float) -> None:
        """Say this rank's loss."""
        ...

    def request_stop(self) -> None:
        """Ask all ranks to stop after the next step."""
        ...

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the mean gradient to a global 2-norm of at most `max_norm`; returns the norm before."""
        ...

    def step(self) -> float | None:
        """Update the weights; a collective over all ranks."""
        ...

    def zero_grad(self) -> None:
        """Forget the gradients."""
        ...

    def synchronize(self) -> None:
        """Bring the whole updated weights to every rank: from here to the next backward no forward communicates."""
        ...

    def all_mean(self, value: float) -> float:
        """The mean of a number over the ranks; a collective."""
        ...

    def check_replicas(self) -> None:
        """Raise ReplicaError where the ranks no longer hold the same bits; a collective."""
        ...

    def describe(self) -> list[tuple[str, str, str]]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of what is needed to go on bit for bit, the trained weights included."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; a collective."""
        ...

    def close(self) -> None:
        """Wait for all communication and give the process groups back."""
        ...


class TrainingStrategy(Protocol):
    """A way to train one model on many ranks: what `--strategy` names."""

    @property
    def name(self) -> str:
        """What `--strategy` calls it."""
        ...

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Whose kernels are compiled before the workers start."""
        ...

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Names in `thinwire.optim.OPTIMIZERS` that it can drive; the first is its own choice."""
        ...

    @property
    def optimizers_reason(self) -> str:
        """Why it can't drive others, to follow "a strategy that ..."."""
        ...

    @property
    def settled_after(self) -> int:
        """Steps at the start of a run that are another method's, and say nothing of this one's speed."""
        ...

    def apply(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        local_size: int | None,
        seed: int,
        timeout_s: float,
        checked: bool,
        overlap: bool,
    ) -> tuple[nn.Module, ParallelOptimizer]:
        """The module to call in training, and the optimizer to step; a collective over all ranks.

        `model` itself shares the trained weights and may be called where nothing is trained. local_size: ranks per
        node. overlap: weights may arrive during the next forward. Raises ConfigError for what can't be trained so.
        """
        ...
