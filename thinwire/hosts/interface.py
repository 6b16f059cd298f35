"""What a host offers: `apply`, and the optimizer that training then drives."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from functools import singledispatch
from typing import Any, NotRequired, Protocol, TypedDict, Unpack

import torch
from torch import Tensor, nn

from thinwire.checkpoint import Snapshot, Source
from thinwire.collectives import Communicator, Meter
from thinwire.errors import ConfigError
from thinwire.hosts.ranks import Axis


class ParallelOptimizer(Protocol):
    """An optimizer whose step is one step of all ranks.

    One step: backward (every one but the last inside `no_sync`), `note_loss`, `clip_grad_norm_`, `step`, `zero_grad`.
    A step whose gradient norm is not finite is skipped on all ranks.
    """

    @property
    def steps(self) -> int:
        """Steps that were taken or skipped."""
        ...

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped."""
        ...

    @property
    def comm(self) -> Communicator:
        """The ranks of the method's axis: all of them where there is no other axis."""
        ...

    @property
    def everyone(self) -> Communicator:
        """All ranks of the mesh."""
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

    def reduce(self) -> Tensor:
        """Wait for the mean gradient, and agree with all ranks on the step; the gradient's norm. Once a step."""
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

    def masters(self, names: Collection[str]) -> dict[str, Tensor]:
        """Copies of the fp32 weights that are stepped, whole, by parameter name; between steps, a collective."""
        ...

    def adopt_weights(self, values: Mapping[str, Tensor]) -> None:
        """Take whole weights, the same bits on all ranks, as masters and replicas; between steps, a collective.

        The optimizer's state stays as it is.
        """
        ...

    def handover_bytes(self, names: Collection[str]) -> tuple[int, int]:
        """Payload this rank sends in `masters` and in `adopt_weights` for these parameters."""
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

    def snapshot(self) -> Snapshot:
        """This rank's state between two steps, in pieces that any layout can take: views of the live tensors."""
        ...

    def restore(self, source: Source) -> None:
        """Go on from a checkpoint of any layout, and note what became of its parts; a collective.

        From the same layout, bit for bit.
        """
        ...

    def close(self) -> None:
        """Wait for all communication and give the process groups back."""
        ...

    @property
    def has_own_pace(self) -> bool:
        """See InStep, as for all that follows."""
        ...

    @property
    def has_islands(self) -> bool: ...

    @property
    def position(self) -> int | None: ...

    def catch_up(self) -> int: ...

    def finish(self) -> None: ...

    def take_changes(self) -> list[Any]: ...

    def level(self, *, has_own: bool) -> tuple[str, str, str]: ...

    def mean_over_islands(self, value: float) -> float: ...

    def abandon(self) -> None: ...


class InStep:
    """An optimizer whose ranks take all steps together, from the first to the last; others override what is said here.

    has_own_pace: ranks have no step in common, but are together at the start and after `finish`; from then on `steps`
    is the fewest that any rank has taken, and `stop_requested` says whether any was asked to stop. has_islands: it
    trains together with islands that may be lost, and come.
    """

    has_own_pace = False
    has_islands = False

    @property
    def position(self) -> int | None:
        """Steps that the other islands have taken, and this one where it missed none; None without other islands."""
        return None

    def catch_up(self) -> int:
        """Take the steps that others took, where no checkpoint is loaded; the number of steps done; a collective."""
        return 0

    def finish(self) -> None:
        """Leave the result in the model; training can't go on from there. A collective over all ranks."""

    def take_changes(self) -> list[Any]:
        """What has changed among the islands since the last call, with its cost."""
        return []

    def level(self, *, has_own: bool) -> tuple[str, str, str]:
        """Go on from one state with the other islands, where a restore left them apart; a line of the load report.

        has_own: whether what this one has restored was its own, and counts.
        """
        return "islands", "none", ""

    def mean_over_islands(self, value: float) -> float:
        """The mean of a number over all islands; a collective."""
        return value

    def abandon(self) -> None:
        """Leave the other islands at once, after a failure."""


class RankOptions(TypedDict):
    """What every host is told of the ranks.

    local_size: ranks per node; None: found from the launcher or host names. seed: of all randomness. timeout_s: how
    long one message may take. checked: every message carries what it is and a checksum. axis: of a mesh; None: all
    ranks.
    """

    local_size: int | None
    seed: int
    timeout_s: float
    checked: bool
    axis: NotRequired[Axis | None]


@singledispatch
def apply(
    method: object,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    overlap: bool,
    **options: Unpack[RankOptions],
) -> tuple[nn.Module, ParallelOptimizer]:
    """The module to call in training, and the optimizer to step; a collective over all ranks.

    Each host registers itself for its kind of method. `model` itself shares the trained weights and may be called where
    nothing is trained. overlap: weights may arrive during the next forward. Raises ConfigError for what can't be
    trained so.
    """
    raise ConfigError(f"{type(method).__name__} is no method of training: no host knows it")
