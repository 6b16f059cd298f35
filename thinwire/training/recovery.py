"""A run that goes on after the loss of a stage: what a rank brings along, and what all ranks agree on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.checkpoint import Saver
from thinwire.collectives.groups import forget_groups
from thinwire.collectives.store_gather import of_all_ranks
from thinwire.errors import ThinwireError
from thinwire.hosts.interface import ParallelOptimizer
from thinwire.hosts.pipeline.stage import PipelineStage
from thinwire.methods.pipeline.recover import beyond_recovery, sources
from thinwire.report.metrics import MembershipEvent
from thinwire.training.engine import Engine
from thinwire.training.reporter import Reporter


@dataclass(frozen=True)
class StepStart:
    """Where a rank stands at the beginning of a step.

    step: how many were taken. loader: its place in the data. num_before: micro-batches that the pipeline had. random:
    the state of the random numbers.
    """

    step: int
    loader: dict[str, Any]
    num_before: int
    random: Tensor

    @classmethod
    def of(cls, step: int, engine: Engine) -> StepStart:
        """That of the step after `step`."""
        pipeline = engine.stage.pipeline
        assert pipeline is not None
        return cls(step, engine.loader.state_dict(), pipeline.num_before, torch.get_rng_state())


@dataclass(frozen=True)
class Survivor:
    """What a rank that has outlived another brings along.

    state: of its optimizer, weights included. norm, copies, recoveries: see PipelineStage.recover. lost_at: when it
    noticed, as time.monotonic() has it. reporter: rank 0's.
    """

    start: StepStart
    state: dict[str, Any]
    norm: float
    copies: dict[int, Tensor]
    recoveries: dict[int, int]
    reporter: Reporter | None
    lost_at: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, start: StepStart, engine: Engine, saver: Saver, reporter: Reporter | None) -> Survivor:
        """Take all of it from a run that can't go on, and leave its process groups."""
        lost_at, pipeline, optimizer = time.monotonic(), engine.stage.pipeline, engine.optimizer
        assert pipeline is not None and pipeline.ends is not None
        copies = pipeline.rescue()
        leave(pipeline, optimizer, saver)
        if optimizer.steps > start.step:
            # The loss came between the update and the end of its step.
            start = StepStart.of(optimizer.steps, engine)
        state = optimizer.state_dict()
        return cls(start, state, pipeline.norm, copies, pipeline.recoveries, reporter, lost_at)


def leave(pipeline: PipelineStage, optimizer: ParallelOptimizer, saver: Saver) -> None:
    """Break off all connections, so that other ranks need not wait for this one, and destroy the process groups."""
    pipeline.break_off()
    for comm in dict.fromkeys([optimizer.comm, optimizer.everyone]):
        comm.break_off()
    saver.abandon()
    forget_groups()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Reunion:
    """What the ranks of a new incarnation tell each other. Ranks of a pipeline without replicas are its stages.

    generation: number of the incarnation. lost: stages without a state. start: where all go on: at the step of the one
    that has come farthest. norms, recoveries: see PipelineStage.recover. behind: stages that have not taken the last
    update before that. why_not: why the run can only go on from a checkpoint; empty: it need not.
    """

    generation: int
    lost: list[int]
    start: StepStart | None
    norms: list[float]
    recoveries: dict[int, int]
    behind: list[int]
    why_not: str

    @classmethod
    def of(cls, survivor: Survivor | None, generation: int, *, tied: bool) -> Reunion:
        """Exchange what the ranks bring along; a collective over the default group. tied: see `beyond_recovery`."""
        mine = None if survivor is None else (survivor.start, survivor.norm, survivor.recoveries)
        told = of_all_ranks(mine, "what it brings along")
        there = {stage: word for stage, word in enumerate(told) if word is not None}
        lost = [stage for stage in range(len(told)) if stage not in there]
        if not there:
            return cls(generation, lost, None, [], {}, [], "no stage has a state")
        start = max((start for start, _, _ in there.values()), key=lambda one: one.step)
        norms = [there[stage][1] if stage in there else 0.0 for stage in range(len(told))]
        recoveries = next(iter(there.values()))[2]
        behind = [stage for stage, (own, _, _) in there.items() if own.step < start.step]
        return cls(generation, lost, start, norms, recoveries, behind, beyond_recovery(lost, len(told), tied=tied))

    def restore(self, survivor: Survivor | None, engine: Engine, seed_after: Callable[[int], int]) -> int:
        """Go on: survivors as they were, lost stages from their neighbours. Returns the steps taken so far.

        seed_after: of the random numbers, after a step, of a rank that has lost its own. A collective over all ranks.
        """
        pipeline, start = engine.stage.pipeline, self.start
        assert pipeline is not None and start is not None
        if survivor is not None:
            engine.optimizer.load_state_dict(survivor.state)
        copies = survivor.copies if survivor is not None else {}
        pipeline.recover(self.lost, self.norms, copies, self.recoveries)
        engine.optimizer.steps = start.step
        engine.loader.load_state_dict(start.loader)
        if survivor is None:
            torch.manual_seed(seed_after(start.step))
        else:
            torch.set_rng_state(survivor.start.random)
        pipeline.restore(start.num_before)
        return start.step

    def event(self, how: str, num_stages: int, lost_at: float) -> MembershipEvent:
        """For the metrics file. how: the recovery's name."""
        assert self.start is not None
        told = [f"stage {stage} {described(how, sources(how, stage, num_stages))}" for stage in self.lost]
        told += [f"stage {stage} has missed the last update" for stage in self.behind]
        return MembershipEvent(
            self.start.step, self.generation, list(range(num_stages)), self.lost, self.lost,
            round(time.monotonic() - lost_at, 3), "; ".join(told) or "all have their state", "stage",
        )  # fmt: skip


def described(how: str, stages: Sequence[int]) -> str:
    """How a stage begins whose layers come from others."""
    if not stages:
        return "begins as a new model's"
    return f"is a copy of {stages[0]}" if len(stages) == 1 else f"is the {how} of {stages[0]} and {stages[1]}"


def fallback(reunion: Reunion, step: int) -> str:
    """What a run says that goes on from the checkpoint of a step, 0 for none. Raises ThinwireError where it can't."""
    if not step and reunion.start is not None:
        raise ThinwireError(f"{reunion.why_not}, and there is no checkpoint to go on from: start anew")
    return f"{reunion.why_not}: the run goes on from " + (f"the checkpoint of step {step}" if step else "its beginning")
