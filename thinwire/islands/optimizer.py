"""The optimizer of an island under an outer method, for the trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack, cast

import torch
from torch import nn

from thinwire.checkpoint import Snapshot, Source
from thinwire.collectives.peers import Meters
from thinwire.hosts.interface import ParallelOptimizer, RankOptions, apply
from thinwire.islands.island import CutHost
from thinwire.islands.loop import OuterLoop, Whole
from thinwire.islands.recovery import Change
from thinwire.islands.traffic import LoopTraffic
from thinwire.methods.outer.base import Connected, IslandsMethod
from thinwire.table import Row, sent_text

# Of a checkpoint: what an island's outer method holds.
OUTER = "outer"
# Why a step with an ascent has two.
TWICE = "of each micro-batch: the gradient is also taken uphill, so computing takes twice as long"
# In front of what the inner strategy says of itself.
INSIDE = "inside an island: "
# Steps that the islands have taken.
POSITION = "position"


class IslandsOptimizer:
    """A ParallelOptimizer that takes the inner strategy's steps, and outer steps with other islands.

    Everything else is the inner strategy's: there, "all ranks" means those of this island. The next exchange carries a
    request to stop, after which all islands stop at the same step.
    """

    has_islands = True
    # Of this one's snapshot, not of the inner strategy's.
    state_dict: Any = ParallelOptimizer.state_dict
    load_state_dict: Any = ParallelOptimizer.load_state_dict

    def __init__(self, inner: ParallelOptimizer, loop: OuterLoop, method: IslandsMethod) -> None:
        self.inner, self.loop, self.method = inner, loop, method
        self.traffic = LoopTraffic(loop)
        self.meter = Meters(inner.meter, loop.exchanges.connected)
        self.climb = method.climb

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def stop_requested(self) -> bool:
        """Whether the islands have agreed to stop."""
        return self.loop.exchanges.stop_agreed

    @property
    def bytes_per_step(self) -> int:
        """Payload bytes that this rank sends in one step.

        An exchange's bytes are spread over the steps between exchanges.
        """
        return self.inner.bytes_per_step + self.traffic.bytes_per_step

    @property
    def uncompressed_bytes_per_step(self) -> float:
        """Bytes that a rank would send in one step with fp32 gradients and weights, sharded over all islands' ranks."""
        num_parameters = sum(param.numel() for param in self.loop.whole.model.parameters() if param.requires_grad)
        return 8 * num_parameters * (1 - 1 / max(1, self.comm.world_size * self.traffic.num_islands))

    def step(self) -> None:
        """Take an inner step, then send and receive what is due between islands."""
        self.inner.step()
        self.loop.wishes_stop = self.inner.stop_requested
        self.loop.after_step()

    @property
    def position(self) -> int:
        """Steps that the islands have taken. It jumps if this island has caught up with others."""
        return self.loop.steps

    def take_changes(self) -> list[Change]:
        """Changes of membership since the last call. Only on the island's first rank."""
        taken, self.loop.changes = self.loop.changes, []
        return taken

    def abandon(self) -> None:
        self.loop.exchanges.abandon()

    def finish(self) -> None:
        """Exchange what is left, and leave the outer parameters in the model, the same on all islands."""
        self.loop.finish()
        self.inner.synchronize()

    def describe(self) -> list[Row]:
        per_step, every = self.traffic.bytes_per_step, self.loop.method.sync_every
        shown = sent_text(per_step), f"the mean over {every} steps, besides what an island's ranks send each other"
        ascent = [(f"ascent {self.climb.rho:g}", "two forwards and backwards", TWICE)] if self.climb else []
        return [
            (f"strategy {self.method.name}", f"{self.method.inner.name} inside each island", ""),
            *ascent,
            *self.traffic.rows(),
            ("sent for exchanges per step", *shown),
            *((f"{INSIDE}{asked}", effect, why) for asked, effect, why in self.inner.describe()),
        ]

    def snapshot(self) -> Snapshot:
        """The inner strategy's snapshot with the outer method's state. Waits for exchanges under way."""
        snapshot = self.inner.snapshot()
        common = {**snapshot.common, POSITION: self.position}
        return replace(snapshot, own={**(snapshot.own or {}), OUTER: self.loop.state_dict()}, common=common)

    def restore(self, source: Source) -> None:
        """Continue from a checkpoint of any layout. A collective over all islands.

        If an island finds another island's state, method or model, or none, the outer method keeps only the weights to
        start from, and error feedback. Both may differ between islands: call `level` next.
        """
        self.inner.restore(source)
        outer = source.own(OUTER) if source.is_same else None
        num_fitting, num_islands = self.loop.sum_over_islands([outer is not None and self.loop.fits(outer), 1])
        if outer is not None and num_fitting == num_islands:
            self.loop.load_state_dict(outer)
            return
        self.loop.begin()
        if self.loop.island.is_first and self.method.outer().error_decay is not None:
            saved = source.own(OUTER, rank=0)
            if saved and self.loop.owe(saved):
                source.note(
                    "error feedback of outer gradients", "transformed", "the mean over islands that have theirs"
                )
        source.is_same = False
        # An island that was away has taken fewer steps itself than the islands have.
        self.loop.go_on_from(source.common.get(POSITION, source.common["steps"]))
        source.note("outer parameters", "start anew", "from the weights: of another method, more islands, or none")

    def level(self, *, has_own: bool) -> Row:
        """If islands differ, give all of them the mean weights of those that have weights of their own.

        A collective.
        """
        count = self.loop.level(has_own=has_own)
        if count:
            return "weights of the islands", "transformed", f"all start from the mean of {count} islands' weights"
        return "weights of the islands", "carried", "they are the same bits on all islands"

    def mean_over_islands(self, value: float) -> float:
        """Mean over islands of their first ranks' values. A collective over all islands."""
        total, count = self.loop.sum_over_islands([value, 1.0])
        return total / count

    def close(self) -> None:
        """Wait for all communication, leave the other islands, and give the process groups back."""
        self.loop.exchanges.close()
        if isinstance(self.loop.host, CutHost):
            self.loop.host.close()
        self.inner.close()


@apply.register
def _apply_connected(
    connected: Connected, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Unpack[RankOptions]
) -> tuple[nn.Module, ParallelOptimizer]:
    method = connected.method
    # Those who have begun wait for whoever has met them.
    wrapped, inner = apply(method.inner, model, optimizer, **options)
    peers = connected.peers() if callable(connected.peers) else connected.peers
    axis = options.get("axis")
    tensor, stages, parts = (axis.tensor, axis.stages, axis.parts) if axis is not None else (None, None, None)
    shapes = {name: cut.shape for name, cut in tensor.cuts.items()} if tensor is not None else {}
    shapes |= {} if parts is None else parts.shapes
    is_whole = tensor is stages is parts is None
    loop = OuterLoop(
        inner if is_whole else CutHost(inner, tensor, stages, parts), model, method.outer(), peers,
        options=connected.options, torch_optimizer=optimizer, whole=Whole(stages.skeleton if stages else model, shapes),
        seed=options["seed"],
    )  # fmt: skip
    return wrapped, cast(ParallelOptimizer, IslandsOptimizer(inner, loop, method))


@apply.register
def _apply_only_island(
    method: IslandsMethod, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Unpack[RankOptions]
) -> tuple[nn.Module, ParallelOptimizer]:
    return apply(method.connected_to(None), model, optimizer, **options)
