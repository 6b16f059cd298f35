"""A run that survives the loss of a stage: the state that ranks take along, and their agreement."""

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
from thinwire.device import RandomState, random_state, set_random_state
from thinwire.errors import ThinwireError
from thinwire.methods.pipeline.recover import SWAP, beyond_recovery, healthy_replica, sources
from thinwire.report.metrics import MembershipEvent, StepMetrics
from thinwire.training.engine import Engine
from thinwire.training.reporter import Reporter


@dataclass(frozen=True)
class StepStart:
    """The state of a rank at the beginning of a step.

    Attributes:
        step: number of steps taken.
        loader: position in the data.
        num_before: micro-batches that the pipeline has processed.
        random: states of the random generators, of a GPU too.
        row: what all ranks agreed on in the step before; None before the first one.
    """

    step: int
    loader: dict[str, Any]
    num_before: int
    random: RandomState
    row: StepMetrics | None

    @classmethod
    def of(cls, step: int, engine: Engine, row: StepMetrics | None) -> StepStart:
        """The start of the step after `step`."""
        pipeline = engine.stage.pipeline
        assert pipeline is not None
        return cls(step, engine.loader.state_dict(), pipeline.num_before, random_state(), row)


@dataclass(frozen=True)
class Survivor:
    """The state that a rank takes along after the loss of another rank.

    Attributes:
        state: of its optimizer, weights included.
        weights: whole, by name, if its stage has replicas.
        norm, copies, recoveries: see PipelineStage.recover.
        plan: see StagePlans.kept.
        lost_at: when it noticed the loss, on time.monotonic's clock.
        reporter: rank 0's.
    """

    start: StepStart
    state: dict[str, Any]
    weights: dict[str, Tensor]
    norm: float
    copies: dict[int, Tensor]
    recoveries: dict[int, int]
    plan: dict[str, Any]
    reporter: Reporter | None
    lost_at: float = field(default_factory=time.monotonic)

    @classmethod
    def of(
        cls, start: StepStart, row: StepMetrics | None, engine: Engine, saver: Saver, reporter: Reporter | None
    ) -> Survivor:
        """Take the state out of a run that can't continue, and leave its process groups.

        row: of the last step on which all ranks agreed.
        """
        lost_at, pipeline, optimizer = time.monotonic(), engine.stage.pipeline, engine.optimizer
        assert pipeline is not None and pipeline.ends is not None
        # First of all: others need not wait for this rank, nor this one for what may never come.
        pipeline.break_off()
        optimizer.break_off()
        saver.abandon()
        copies = pipeline.rescue()
        forget_groups()
        dist.destroy_process_group()
        if optimizer.steps > start.step:
            # The loss came between the update and the end of its step.
            start = StepStart.of(optimizer.steps, engine, row)
        state = optimizer.state_dict()
        has_replicas = optimizer.comm.world_size > 1
        weights = {name: value.detach().clone() for name, value in pipeline.weights.items()} if has_replicas else {}
        plan = pipeline.plans.kept()
        return cls(start, state, weights, pipeline.norm, copies, pipeline.recoveries, plan, reporter, lost_at)


@dataclass(frozen=True)
class Reunion:
    """What the ranks of a new incarnation know about each other. Rank s * replicas + r is replica r of stage s.

    Attributes:
        generation: number of the incarnation.
        there: ranks that have kept their state.
        start: where all continue: at the step of the most advanced rank.
        norms, recoveries: see PipelineStage.recover.
        plan: of the first of the most advanced ranks, along which all repeat the step; see StagePlans.kept.
        behind: stages that lack the last update before that, on some or all replicas.
        why_not: why the run must continue from a checkpoint; empty: it need not.
    """

    generation: int
    replicas: int
    there: dict[int, StepStart]
    lost: list[int]
    healthy: int
    start: StepStart | None
    norms: list[float]
    recoveries: dict[int, int]
    plan: dict[str, Any]
    behind: list[int]
    why_not: str

    @classmethod
    def of(cls, survivor: Survivor | None, generation: int, *, replicas: int, tied: bool) -> Reunion:
        """Exchange the ranks' states. tied: see `beyond_recovery`. A collective over the default group."""
        mine = None if survivor is None else (survivor.start, survivor.norm, survivor.recoveries, survivor.plan)
        told = of_all_ranks(mine, "what it brings along")
        words = {rank: word for rank, word in enumerate(told) if word is not None}
        num_stages = len(told) // replicas
        there = {rank: word[0] for rank, word in words.items()}
        if not there:
            return cls(generation, replicas, there, [], 0, None, [], {}, {}, [], "no stage has a state")
        left = [[rank for rank in there if rank // replicas == stage] for stage in range(num_stages)]
        lost = [stage for stage, ranks in enumerate(left) if not ranks]
        start, _, _, plan = max(words.values(), key=lambda word: word[0].step)
        norms = [words[ranks[0]][1] if ranks else 0.0 for ranks in left]
        recoveries = next(iter(words.values()))[2]
        behind = [stage for stage, ranks in enumerate(left) if any(there[rank].step < start.step for rank in ranks)]
        places = {divmod(rank, replicas) for rank in there}
        healthy = healthy_replica(lost, places, num_stages, tied=tied)
        why_not = beyond_recovery(lost, num_stages, tied=tied)
        if healthy is None and not why_not:
            why_not = f"no replica of the pipeline has all neighbours of stage {', '.join(map(str, lost))}"
        return cls(generation, replicas, there, lost, healthy or 0, start, norms, recoveries, plan, behind, why_not)

    @property
    def copied(self) -> dict[int, int]:
        """For each rank that lost its state, a rank of the same stage whose weights it can copy, if there is one."""
        num_ranks = len(self.norms) * self.replicas
        found = {}
        for rank in set(range(num_ranks)) - set(self.there):
            alike = [other for other in self.there if other // self.replicas == rank // self.replicas]
            if alike:
                found[rank] = max(alike, key=lambda other: self.there[other].step)
        return found

    def restore(self, survivor: Survivor | None, engine: Engine, seed_after: Callable[[int], int]) -> int:
        """Continue: survivors with their state, lost ranks as copies of a replica, lost stages from their neighbours.

        Returns the number of steps taken. seed_after: step -> seed for a rank that lost its random state. A collective
        over all ranks.
        """
        pipeline, start, optimizer = engine.stage.pipeline, self.start, engine.optimizer
        assert pipeline is not None and start is not None
        sources = {self.copied[rank] for rank in self.copied if rank // self.replicas == pipeline.number}
        for source in sources:
            # All lost replicas of a stage take the weights of the same one.
            pipeline.copy_replica(source % self.replicas, pipeline.weights if survivor is None else survivor.weights)
        if survivor is not None:
            optimizer.load_state_dict(survivor.state)
        elif sources:
            # The other replicas get from each rank what it owns: from this one what it has just copied.
            optimizer.load_state_dict(optimizer.state_dict())
        copies = survivor.copies if survivor is not None else {}
        pipeline.recover(self.lost, self.norms, copies, self.recoveries, self.healthy)
        optimizer.steps = start.step
        engine.loader.load_state_dict(start.loader)
        if survivor is None:
            torch.manual_seed(seed_after(start.step))
        else:
            set_random_state(survivor.start.random)
        pipeline.restore(start.num_before)
        pipeline.plans.take(self.plan)
        return start.step

    def event(self, how: str, lost_at: float) -> MembershipEvent:
        """The event for the metrics file. how: name of the recovery."""
        assert self.start is not None
        num_stages, copied = len(self.norms), self.copied
        told = [f"stage {stage} {described(how, sources(how, stage, num_stages))}" for stage in self.lost]
        for rank, source in sorted(copied.items()):
            stage, replica = divmod(rank, self.replicas)
            told.append(f"replica {replica} of stage {stage} is a copy of replica {source % self.replicas}")
        part = "a part of " if self.replicas > 1 else ""
        told += [f"stage {stage} has missed {part}the last update" for stage in self.behind]
        gone = sorted({*self.lost, *(rank // self.replicas for rank in copied)})
        # The ranks that met first are generation 1, as with islands.
        return MembershipEvent(
            self.start.step, self.generation + 1, list(range(num_stages)), gone, gone,
            round(time.monotonic() - lost_at, 3), "; ".join(told) or "all have their state", "stage",
        )  # fmt: skip


def described(how: str, stages: Sequence[int]) -> str:
    """How a stage begins whose layers come from other stages."""
    if not stages:
        return "begins as a new model's"
    return (
        f"is a copy of {stages[0]}"
        if len(stages) == 1
        else (f"is the {'average' if how == SWAP else how} of {stages[0]} and {stages[1]}")
    )


def fallback(reunion: Reunion, step: int) -> str:
    """The message of a run that continues from the checkpoint of a step; 0: none. Raises ThinwireError if it can't."""
    if not step and reunion.start is not None:
        raise ThinwireError(f"{reunion.why_not}, and there is no checkpoint to go on from: start anew")
    return f"{reunion.why_not}: the run goes on from " + (f"the checkpoint of step {step}" if step else "its beginning")
