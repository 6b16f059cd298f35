"""The interface of a host: `apply`, and the optimizer that training drives."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import singledispatch
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor, nn

from thinwire.checkpoint import Snapshot, Source
from thinwire.collectives import Communicator, Meter
from thinwire.errors import ConfigError
from thinwire.hosts.arguments import check_max_norm
from thinwire.hosts.ranks import Axis, Ranks
from thinwire.methods.memory import Residency
from thinwire.methods.outer.ascent import Ascent
from thinwire.state.clipping import clip_factor
from thinwire.state.portable import StateDict, load_param_groups, state_dict_of
from thinwire.table import Row
from thinwire.tiers import TierMeter

if TYPE_CHECKING:
    from thinwire.hosts.offload.journal import Journal

log = logging.getLogger("thinwire")


class ParallelOptimizer:
    """An optimizer whose step is one step of all ranks: the base class of every host's optimizer.

    One step: backward (every one but the last inside `no_sync`), `note_loss`, `clip_grad_norm_`, `step`, `zero_grad`.
    A step whose gradient norm is not finite is skipped on all ranks.

    Attributes:
        steps: number of steps, taken or skipped.
        skip_reason: why the last skipped step was skipped.
        comm: the ranks of the method's axis; all ranks if there is no other axis.
        ranks: these ranks, and all ranks of the mesh.
        param_groups: those of the user's optimizer; the learning rate is set there.
        mean_loss: the mean over ranks of the losses noted for the last step.
        stop_requested: whether any rank asked to stop; the same on all ranks after a step.
        told: on the first rank, a number up to MOST_TOLD that the next step's word carries; after it, on all ranks.
        has_own_pace: ranks step independently, except at the start and after `finish`. From then on `steps` is the
            fewest steps of any rank, and `stop_requested` is true if any was asked to stop.
        has_islands: it trains together with islands, which may be lost and may join.
        overlaps: weights may arrive during the next forward.
        tiers: bytes and seconds of this rank's disk; None: everything lies in memory.
        journal: keeps every step on this rank's disk; None: only checkpoints are kept.
        weights_pass: weights lie on a disk, and pass through memory in every forward.
        weights_stay_cut: `synchronize` leaves weights cut over ranks, so that a forward of one rank is one of all.
        climb: the ascent of a step that also computes gradients at a point uphill; None: only at the weights.
    """

    has_own_pace = False
    overlaps = False
    has_islands = False

    steps: int
    ranks: Ranks
    comm: Communicator
    param_groups: list[dict[str, Any]]
    skipped_steps = 0
    skip_reason = "a gradient is not finite"
    mean_loss = math.nan
    tiers: TierMeter | None = None
    journal: Journal | None = None
    weights_pass = False
    weights_stay_cut = False
    climb: Ascent | None = None
    stop_requested = False
    told = 0
    _loss = math.nan
    _stop = False
    _grad_norm: Tensor | None = None

    @property
    def everyone(self) -> Communicator:
        """Communicator of all ranks of the mesh."""
        return self.ranks.everyone

    @property
    def meter(self) -> Meter:
        """Payload bytes, and the seconds that communication took or made the training thread wait."""
        return self.comm.meter

    @property
    def bytes_per_step(self) -> int:
        """Payload bytes that this rank sends in one step."""
        raise NotImplementedError

    @property
    def uncompressed_bytes_per_step(self) -> float:
        """Bytes that a sharded optimizer would send with fp32 gradients and weights: 8 (P-1)/P per parameter."""
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """Context whose forward and backward passes only accumulate gradients."""
        raise NotImplementedError

    def send_accumulated(self) -> None:
        """Start to send gradients that were accumulated inside `no_sync`, where no backward outside of it follows.

        By default `reduce` sends them.
        """

    def note_loss(self, loss: float) -> None:
        """Record this rank's loss. After the step, `mean_loss` is the mean over ranks, without a message of its own.

        Raises RuntimeError after `clip_grad_norm_` or `reduce` of the step, which send it.
        """
        if self._grad_norm is not None:
            raise RuntimeError(
                "note_loss after clip_grad_norm_ or reduce: these send the loss, which would be taken for that of the "
                "next step; call note_loss before them"
            )
        self._loss = loss

    def request_stop(self) -> None:
        """Ask all ranks to stop. After the next step, `stop_requested` is true on all of them."""
        self._stop = True

    def reduce(self) -> Tensor:
        """Wait for the mean gradient and agree with all ranks on the step. Return the gradient's norm, fp64.

        Call it once a step.
        """
        raise NotImplementedError

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the mean gradient to a global 2-norm of at most `max_norm`. Return the norm before (fp64 scalar)."""
        check_max_norm(max_norm)
        norm = self.reduce()
        factor = clip_factor(float(norm), max_norm)
        if factor < 1.0:
            self._scale(factor)
            self._grad_norm = norm * factor
        return norm

    @torch.no_grad()
    def step(self) -> Any:
        """Update the weights with the mean gradient, unless it is not finite. A collective over all ranks."""
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
            log.warning("thinwire: step %d skipped on all ranks: %s", self.steps, self.skip_reason)

    def zero_grad(self) -> None:
        """Clear the gradients."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Bring the whole updated weights to every rank. Until the next backward, no forward communicates.

        See `weights_stay_cut` for the exception.
        """
        raise NotImplementedError

    def all_mean(self, value: float) -> float:
        """Mean of a number over the ranks, the same bits on all. A collective."""
        values = self.comm.wait(self.comm.all_gather_exact(torch.tensor([value], dtype=torch.float64)))
        return float(values.mean())

    def check_replicas(self) -> None:
        """Raise ReplicaError, which names the ranks, if they no longer hold the same bits. A collective."""
        raise NotImplementedError

    def masters(self, names: Collection[str]) -> dict[str, Tensor]:
        """Copies of the whole fp32 master weights, by parameter name. A collective, to be called between steps."""
        raise NotImplementedError

    def adopt_weights(self, values: Mapping[str, Tensor]) -> None:
        """Take whole weights, the same bits on all ranks, as masters and replicas. A collective, called between steps.

        The optimizer's state does not change.
        """
        raise NotImplementedError

    def handover_bytes(self, names: Collection[str]) -> tuple[int, int]:
        """Payload bytes that this rank sends in `masters` and in `adopt_weights` for these parameters."""
        raise NotImplementedError

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's part of what is needed to go on bit for bit on the same world, weights included."""
        return state_dict_of(self.snapshot(), self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state_dict. A collective.

        Raises ConfigError if it belongs to another rank, world, model or strategy.
        """
        self.restore(StateDict(state_dict))
        load_param_groups(self.param_groups, state_dict)

    def snapshot(self) -> Snapshot:
        """This rank's state between two steps, in pieces that any layout can load: views of the live tensors."""
        raise NotImplementedError

    def restore(self, source: Source) -> None:
        """Continue from a checkpoint of any layout, and note what became of its parts. A collective.

        From the same layout, it continues bit for bit.
        """
        raise NotImplementedError

    def commit(
        self, own: Mapping[str, Any], common: Mapping[str, Any] | None = None, about: Mapping[str, Any] | None = None
    ) -> None:
        """Write the step that was just taken to this rank's disk, for a killed run to go on from. A collective.

        The next run finds it in `journal.found`. Raises ConfigError without a durable residency.

        Args:
            own: what the caller needs of this rank, as containers of tensors and numbers.
            common: numbers that are the same on all ranks.
            about: see Manifest.
        """
        raise NotImplementedError

    def note_sequences(self, numbers: Tensor) -> None:
        """Say which sequences the next forward is given. A collective; without effect if nothing is kept by sequence.

        numbers: int64 [batch], from 0 on, the same for a sequence whenever it is seen; as many on every rank.
        """

    def close(self) -> None:
        """Wait for all communication and give the process groups back."""
        self.ranks.close()

    def break_off(self) -> None:
        """Close all connections after a loss, here and on the peers. Only `state_dict` can be called afterwards.

        Weights that were on their way, and have not all come, are as they were before.
        """
        for comm in dict.fromkeys([self.comm, self.everyone]):
            comm.break_off()

    @property
    def position(self) -> int | None:
        """Steps that the islands have taken, counting this one if it missed none; None without other islands."""
        return None

    def catch_up(self) -> int:
        """Take the steps that others took, if no checkpoint is loaded. Return the number of steps. A collective."""
        return 0

    def finish(self) -> None:
        """Leave the result in the model. Training can't continue afterwards. A collective over all ranks."""

    def take_changes(self) -> list[Any]:
        """Changes among the islands since the last call, with the cost of each."""
        return []

    def level(self, *, has_own: bool) -> Row:
        """Continue from one common state with the other islands if a restore left them apart.

        Returns a line of the load report. has_own: whether this island has restored its own state, which then counts.
        """
        return "islands", "none", ""

    def mean_over_islands(self, value: float) -> float:
        """Mean of a number over all islands. A collective."""
        return value

    def abandon(self) -> None:
        """Leave the other islands at once, after a failure."""


class RankOptions(TypedDict):
    """Options of the ranks, the same for every host.

    Args:
        local_size: ranks per node; None: detected from the launcher or host names.
        seed: of all randomness.
        timeout_s: how long one message may take.
        checked: put a header and a checksum in front of every message.
        overlap: weights may arrive during the next forward.
        axis: of a mesh; None: all ranks.
        residency: what lies on a disk, for a host that supports it; None: nothing.
        initial: gives the first values of a parameter, by name, where the model has no memory for them.
    """

    overlap: bool
    local_size: int | None
    seed: int
    timeout_s: float
    checked: bool
    axis: NotRequired[Axis | None]
    residency: NotRequired[Residency | None]
    initial: NotRequired[Callable[[str], Tensor] | None]


@singledispatch
def apply(
    method: object, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Unpack[RankOptions]
) -> tuple[nn.Module, ParallelOptimizer]:
    """Return the module to call in training, and the optimizer to step. A collective over all ranks.

    Each host registers itself for its kind of method. `model` itself shares the trained weights and may be called where
    nothing is trained. Raises ConfigError for a combination that can't be trained.
    """
    raise ConfigError(f"{type(method).__name__} is not a training method: no host knows it")
