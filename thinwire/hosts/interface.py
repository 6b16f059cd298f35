"""What a host offers: `apply`, and the optimizer that training then drives."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from functools import singledispatch
from typing import Any, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor, nn

from thinwire.checkpoint import Snapshot, Source
from thinwire.collectives import Communicator, Meter
from thinwire.errors import ConfigError
from thinwire.hosts.ranks import Axis, Ranks
from thinwire.state.clipping import clip_factor
from thinwire.state.portable import StateDict, load_param_groups, state_dict_of
from thinwire.table import Row

log = logging.getLogger("thinwire")


class ParallelOptimizer:
    """An optimizer whose step is one step of all ranks: the base of every host's.

    One step: backward (every one but the last inside `no_sync`), `note_loss`, `clip_grad_norm_`, `step`, `zero_grad`.
    A step whose gradient norm is not finite is skipped on all ranks.

    steps: taken or skipped. comm: the ranks of the method's axis; all of them where there is no other axis. ranks:
    these, and all ranks of the mesh. param_groups: those of the user's optimizer; the learning rate is set there.
    mean_loss: the mean over ranks of what they noted for the last step. stop_requested: whether any rank asked to stop;
    the same on all ranks after a step.

    has_own_pace: ranks have no step in common, but are together at the start and after `finish`; from then on `steps`
    is the fewest that any rank has taken, and `stop_requested` says whether any was asked to stop. has_islands: it
    trains together with islands that may be lost, and come. overlaps: weights may arrive during the next forward.
    """

    has_own_pace = False
    overlaps = False
    has_islands = False

    steps: int
    ranks: Ranks
    comm: Communicator
    param_groups: list[dict[str, Any]]
    skipped_steps = 0
    mean_loss = math.nan
    stop_requested = False
    _loss = math.nan
    _stop = False
    _grad_norm: Tensor | None = None

    @property
    def everyone(self) -> Communicator:
        """All ranks of the mesh."""
        return self.ranks.everyone

    @property
    def meter(self) -> Meter:
        """Payload bytes, and the seconds that communication took or kept the training thread waiting."""
        return self.comm.meter

    @property
    def bytes_per_step(self) -> int:
        """Payload this rank sends in one step."""
        raise NotImplementedError

    @property
    def uncompressed_bytes_per_step(self) -> float:
        """What fp32 gradients and weights of a sharded optimizer would need: 8 (P-1)/P bytes per parameter."""
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """Forward and backward passes inside only accumulate gradients."""
        raise NotImplementedError

    def send_accumulated(self) -> None:
        """Start to send gradients that were accumulated inside `no_sync`, where no backward outside of it follows.

        By default `reduce` sends them.
        """

    def note_loss(self, loss: float) -> None:
        """Say this rank's loss; after the step, `mean_loss` is the mean over ranks, at no message of its own."""
        self._loss = loss

    def request_stop(self) -> None:
        """Ask all ranks to stop; after the next step, `stop_requested` is true on every one of them."""
        self._stop = True

    def reduce(self) -> Tensor:
        """Wait for the mean gradient, and agree with all ranks on the step; the gradient's norm (fp64). Once a step."""
        raise NotImplementedError

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the mean gradient to a global 2-norm of at most `max_norm`; returns the norm before (fp64 scalar)."""
        norm = self.reduce()
        factor = clip_factor(float(norm), max_norm)
        if factor < 1.0:
            self._scale(factor)
            self._grad_norm = norm * factor
        return norm

    @torch.no_grad()
    def step(self) -> Any:
        """Update the weights with the mean gradient, unless it is not finite; a collective over all ranks."""
        if bool(torch.isfinite(self.reduce())):
            self._update()
        else:
            self._skip()
        self._grad_norm = None
        self.steps += 1

    def _scale(self, factor: float) -> None:
        """Multiply the mean gradient by `factor`."""
        raise NotImplementedError

    def _update(self) -> None:
        """Update the weights with the mean gradient."""
        raise NotImplementedError

    def _skip(self) -> None:
        """Count a step whose gradient is not finite."""
        self.skipped_steps += 1
        if self.comm.rank == 0:
            log.warning("thinwire: step %d skipped on all ranks: a gradient is not finite", self.steps)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Bring the whole updated weights to every rank: from here to the next backward no forward communicates."""
        raise NotImplementedError

    def all_mean(self, value: float) -> float:
        """The mean of a number over the ranks, the same bits on all; a collective."""
        values = self.comm.wait(self.comm.all_gather_exact(torch.tensor([value], dtype=torch.float64)))
        return float(values.mean())

    def check_replicas(self) -> None:
        """Raise ReplicaError, which names the ranks, where they no longer hold the same bits; a collective."""
        raise NotImplementedError

    def masters(self, names: Collection[str]) -> dict[str, Tensor]:
        """Copies of the fp32 weights that are stepped, whole, by parameter name; between steps, a collective."""
        raise NotImplementedError

    def adopt_weights(self, values: Mapping[str, Tensor]) -> None:
        """Take whole weights, the same bits on all ranks, as masters and replicas; between steps, a collective.

        The optimizer's state stays as it is.
        """
        raise NotImplementedError

    def handover_bytes(self, names: Collection[str]) -> tuple[int, int]:
        """Payload this rank sends in `masters` and in `adopt_weights` for these parameters."""
        raise NotImplementedError

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's part of what is needed to go on bit for bit on the same world, weights included."""
        return state_dict_of(self.snapshot(), self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; a collective.

        Raises ConfigError where the state belongs to another rank, world, model or strategy.
        """
        self.restore(StateDict(state_dict))
        load_param_groups(self.param_groups, state_dict)

    def snapshot(self) -> Snapshot:
        """This rank's state between two steps, in pieces that any layout can take: views of the live tensors."""
        raise NotImplementedError

    def restore(self, source: Source) -> None:
        """Go on from a checkpoint of any layout, and note what became of its parts; a collective.

        From the same layout, bit for bit.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Wait for all communication and give the process groups back."""
        self.ranks.close()

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

    def level(self, *, has_own: bool) -> Row:
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
    long one message may take. checked: every message carries what it is and a checksum. overlap: weights may arrive
    during the next forward. axis: of a mesh; None: all ranks.
    """

    overlap: bool
    local_size: int | None
    seed: int
    timeout_s: float
    checked: bool
    axis: NotRequired[Axis | None]


@singledispatch
def apply(
    method: object, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Unpack[RankOptions]
) -> tuple[nn.Module, ParallelOptimizer]:
    """The module to call in training, and the optimizer to step; a collective over all ranks.

    Each host registers itself for its kind of method. `model` itself shares the trained weights and may be called where
    nothing is trained. Raises ConfigError for what can't be trained so.
    """
    raise ConfigError(f"{type(method).__name__} is no method of training: no host knows it")
