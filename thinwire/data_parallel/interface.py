"""What the trainer asks of a strategy, and of the optimizer that the strategy gives it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any, Protocol, TypedDict, Unpack, runtime_checkable

import torch
from torch import Tensor, nn

from thinwire.checkpoint import Snapshot, Source
from thinwire.codecs import Codec
from thinwire.collectives import Communicator, Meter, Topology
from thinwire.collectives.algorithms import gather_bytes
from thinwire.errors import ConfigError

# The reason of strategies that shard the optimizer.
CUTS_TENSORS = "cuts tensors anywhere, so that the update of one element must not depend on others"


class ParallelOptimizer(Protocol):
    """An optimizer whose step is one step of all ranks.

    One step: backward (every one but the last inside `no_sync`), `note_loss`, `clip_grad_norm_`, `step`, `zero_grad`.
    A step whose gradient norm is not finite is skipped on all ranks.
    """

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped."""
        ...

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


class RankOptions(TypedDict):
    """What every host is told of the ranks.

    local_size: ranks per node; None: found from the launcher or host names. seed: of all randomness. timeout_s: how
    long one message may take. checked: every message carries what it is and a checksum.
    """

    local_size: int | None
    seed: int
    timeout_s: float
    checked: bool


@runtime_checkable
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
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, overlap: bool, **options: Unpack[RankOptions]
    ) -> tuple[nn.Module, ParallelOptimizer]:
        """The module to call in training, and the optimizer to step; a collective over all ranks.

        `model` itself shares the trained weights and may be called where nothing is trained. overlap: weights may
        arrive during the next forward. Raises ConfigError for what can't be trained so.
        """
        ...


class NotExplainedError(ConfigError):
    """A strategy that does not say what it holds and sends."""


@dataclass(frozen=True)
class Footprint:
    """What one rank holds and sends, known before anything runs; bytes.

    weights, gradients: fp32, at their largest: whole where a forward, or the end of a backward, needs them whole.
    optimizer: with AdamW, whose two moments are fp32: masters, where they are not the weights, and moments. other: what
    else stays, by name, such as an error that is fed back. sent: in one step, by the meter's (operation, level).
    passing: weights and gradients that are whole for one part of the model at a time, besides those above. crossing:
    what all ranks of a node together send to other nodes, where that is less than the meter's level says: one rank's
    part of a ring.
    """

    weights: int
    gradients: int
    optimizer: int
    sent: Mapping[tuple[str, str], int]
    passing: int = 0
    crossing: int | None = None
    other: Mapping[str, int] = field(default_factory=dict)

    @property
    def memory(self) -> dict[str, int]:
        """All that is held, by name."""
        held = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        return held | {"passing": self.passing} | dict(self.other)

    def sent_on(self, level: str) -> int:
        """Bytes on one level."""
        return sum(num_bytes for (_, at), num_bytes in self.sent.items() if at == level)


@singledispatch
def footprint(strategy: object, model: nn.Module, topology: Topology, micro_batches: int) -> Footprint:
    """What a rank would hold and send under `strategy`; each registers the function that knows, beside itself.

    model: its shapes alone are used, so it may lie on the device "meta". micro_batches: backward passes of one step.
    Raises ConfigError where the strategy can't run on this grid; NotExplainedError where it has no such function.
    """
    raise NotExplainedError(f"strategy {getattr(strategy, 'name', strategy)} does not say what it holds and sends")


def trained_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """The shapes of the parameters that are trained, by name."""
    return {name: param.shape for name, param in model.named_parameters() if param.requires_grad}


def agreement_sent(topology: Topology, word_bytes: int = 24) -> dict[tuple[str, str], int]:
    """What the ranks' words about a step take, by the meter's (operation, level)."""
    return {("all_gather_exact", level): sent for level, sent in gather_bytes(topology, word_bytes).items()}


@runtime_checkable
class CatchesUp(Protocol):
    """An optimizer that may begin with steps that others took, where no checkpoint is loaded."""

    def catch_up(self) -> int:
        """Take them; the number of steps done; a collective."""
        ...


@runtime_checkable
class Finishing(Protocol):
    """A ParallelOptimizer whose result is not the weights that it trains on the way."""

    def finish(self) -> None:
        """Leave the result in the model; training can't go on from there. A collective over all ranks."""
        ...


@runtime_checkable
class ComingAndGoing(Protocol):
    """A ParallelOptimizer that trains together with others that may be lost, and come."""

    @property
    def position(self) -> int:
        """Steps that the others have taken, and this one where it didn't miss them; between steps."""
        ...

    def level(self, *, has_own: bool) -> tuple[str, str, str]:
        """Go on from one state with the others, where a restore left them apart; a line of the load report.

        has_own: whether what this one has restored was its own, and counts.
        """
        ...

    def mean_over_islands(self, value: float) -> float:
        """The mean of a number over all of them; a collective."""
        ...

    def take_changes(self) -> list[Any]:
        """What has changed among them since the last call, with its cost: of `islands.recovery.Change`."""
        ...

    def abandon(self) -> None:
        """Leave them at once, after a failure."""
        ...


@runtime_checkable
class PlannedByRun(Protocol):
    """A strategy whose options may be shares of a run."""

    def for_run(self, num_steps: int, num_warmup_steps: int) -> TrainingStrategy:
        """The strategy for a run of so many steps, during the first of which the learning rate rises.

        Raises ConfigError where its options do not fit them.
        """
        ...
