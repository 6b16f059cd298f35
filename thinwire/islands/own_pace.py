"""The trainer's optimizer for ranks without common steps: each rank is an island and steps at its own pace."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Protocol, Unpack, cast

import torch
from torch import Tensor, nn

# The contexts, which register themselves with `around`.
import thinwire.islands.meetings
import thinwire.islands.ticks  # noqa: F401
from thinwire import _compat
from thinwire.checkpoint import Source
from thinwire.hosts.agreeing import AgreeingOptimizer
from thinwire.hosts.interface import ParallelOptimizer, RankOptions, apply
from thinwire.hosts.ranks import Ranks, open_ranks
from thinwire.methods.front import around
from thinwire.methods.own_pace.base import OwnPaceMethod
from thinwire.state.agreement import StepStatus
from thinwire.state.replicas import fitting_parameters, in_order
from thinwire.table import Row

log = logging.getLogger("thinwire")
STOP_KEY = "thinwire/stop"
# A wish to stop is looked for so often, not in every step: that asks another machine.
LOOK_EVERY_S = 1.0


class Around(Protocol):
    """A context around training that runs a method; see methods.front."""

    @property
    def bytes_per_step(self) -> float: ...

    def begin(self) -> None: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *raised: Any) -> None: ...

    def describe(self) -> list[Row]: ...


class Stepped(Protocol):
    """An object with `step`: the user's optimizer, or the context of a method that has its own step."""

    def step(self) -> Any: ...


class OwnPaceOptimizer(AgreeingOptimizer):
    """The optimizer of one rank. Ranks act together only in the first step and in `finish`.

    Otherwise no rank waits for all. The loss is this rank's; only that of the first step is the mean over ranks, which
    is compared when a run is resumed. A step whose gradient is not finite is skipped on this rank only. context: runs
    the method beside training, and takes the steps in place of the user's optimizer if the method has its own step.
    """

    has_own_pace = True

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        ranks: Ranks,
        method: OwnPaceMethod,
        context: Around,
    ) -> None:
        trained = in_order(fitting_parameters(model, inner))
        num_parameters = sum(param.numel() for param in trained.values())
        rows: list[Row] = [(f"strategy {method.name}", "every rank is an island", ""), *context.describe(), *PACE_ROWS]
        super().__init__(model, inner, ranks, dict(trained), num_parameters, [*rows, *method.rows])
        self._context: Around = context
        self._stepped = cast(Stepped, context) if method.brings_step else inner
        self._has_entered = False
        self._looked_s = time.monotonic()

    @property
    def bytes_per_step(self) -> int:
        """Payload bytes that this rank sends in one step, on average."""
        return round(self._context.bytes_per_step)

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's weights, and add what others have sent meanwhile."""
        norm, is_first = self.reduce(), not self._has_entered
        if is_first:
            self._context.__enter__()
            self._has_entered = True
        if bool(torch.isfinite(norm)):
            self._update()
        else:
            self._skip()
        if is_first:
            self._agree(StepStatus(float(norm) ** 2, self._loss, self._stop))
        else:
            self.mean_loss = self._loss
        self._grad_norm = None
        self.steps += 1
        self._share_stop()

    def finish(self) -> None:
        """Wait until all ranks have taken their steps, and leave the method's result in the model. A collective.

        From then on `steps` is the fewest steps of any rank, and `stop_requested` is true if any was asked to stop.
        """
        if self._has_entered:
            self._context.__exit__(None, None, None)
        words = torch.tensor([self.steps, self.stop_requested], dtype=torch.int64)
        told = self.comm.wait(self.comm.all_gather_exact(words))
        self.steps, self.stop_requested = int(told[:, 0].min()), bool(told[:, 1].any())

    def restore(self, source: Source) -> None:
        """Continue from a checkpoint: from its weights, with each rank's own optimizer state if the ranks are the same.

        Other state of the method, such as ticks or second vectors, starts anew.
        """
        super().restore(source)
        self._context.begin()
        if source.is_same:
            source.is_same, source.is_exact = False, True
            source.note("weights, and the optimizer's state of each rank", "carried", "the same ranks")
        source.note("state of the method", "starts anew", "from the weights, which all ranks have in common")

    def _update(self) -> None:
        self._stepped.step()

    def _skip(self) -> None:
        self.skipped_steps += 1
        log.warning("thinwire: step %d skipped on this rank alone: a gradient is not finite", self.steps)

    def reduce(self) -> Tensor:
        """The norm of this rank's gradient. Call it once a step."""
        if self._grad_norm is None:
            grads = [tensor.grad for tensor in self.trained.values() if tensor.grad is not None]
            self._grad_norm = nn.utils.get_total_norm(grads).double()
        return self._grad_norm

    def _share_stop(self) -> None:
        """Tell all ranks that this one was asked to stop. They stop within LOOK_EVERY_S and a step."""
        now = time.monotonic()
        if self.comm.world_size == 1:
            self.stop_requested = bool(self._stop)
        elif self._stop and not self.stop_requested:
            _compat.default_store().set(STOP_KEY, "")
            self.stop_requested = True
        elif now - self._looked_s > LOOK_EVERY_S:
            self._looked_s = now
            self.stop_requested = self.stop_requested or _compat.default_store().check([STOP_KEY])

    def _own(self) -> dict[str, Any]:
        """The state of the user's optimizer, which differs between ranks."""
        return {"state": {str(number): state for number, state in self.inner.state_dict()["state"].items()}}

    def _load_own(self, own: Mapping[str, Any]) -> None:
        held = self.inner.state_dict()
        held["state"] = {int(number): state for number, state in own["state"].items()}
        self.inner.load_state_dict(held)


PACE_ROWS: list[Row] = [
    ("--steps", "taken by every rank at its own pace", "no rank waits for all; tokens count this rank's step as all's"),
    ("loss, grad_norm", "this rank's own", "the first step's loss is the mean over ranks"),
    ("--checkpoint-every", "one checkpoint, at the end", "in between the ranks have no weights in common"),
    ("--seed", "does not repeat a run bit for bit", "the clock decides what a step takes in"),
]


@apply.register
def _apply_own_pace(
    method: OwnPaceMethod, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Unpack[RankOptions]
) -> tuple[nn.Module, ParallelOptimizer]:
    timeout_s, checked = options["timeout_s"], options["checked"]
    ranks = open_ranks(None, local_size=options["local_size"], timeout_s=timeout_s, checked=checked)
    loop = (model,) if method.brings_step else (model, optimizer)
    context = around(
        method, *loop, seed=options["seed"], timeout_s=timeout_s, checked=checked, announce=False,
        meter=ranks.comm.meter,
    )  # fmt: skip
    return model, OwnPaceOptimizer(model, optimizer, ranks, method, context)
