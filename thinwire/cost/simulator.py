"""Simulates a step on a machine: when each task of its graph begins and ends."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from thinwire.cost.clock import Clock
from thinwire.cost.graph import CARRY, Message, StepGraph, Task, Work
from thinwire.cost.machine import Machine
from thinwire.cost.trace import SENDING, TraceSpan, trace_events
from thinwire.errors import ConfigError

TRAINING, COMMUNICATION, NETWORK = "training", "communication", "network"


@dataclass(frozen=True)
class Timeline:
    """When each task of a graph begins and ends, in seconds."""

    graph: StepGraph
    spans: tuple[tuple[float, float], ...]

    @property
    def makespan_s(self) -> float:
        """Seconds of the whole step."""
        return max((end for _, end in self.spans), default=0.0)

    def busy_s(self, rank: int, lane: str) -> float:
        """Seconds in which one of a rank's threads works, on cores that may be shared."""
        return sum(end - begin for task, begin, end in self._of[rank] if lane == _lane(task.jobs, task.does))

    def kinds_s(self, rank: int) -> dict[str, float]:
        """Seconds of a rank's work, by the first word of its name, such as layer, encode, decode."""
        found: dict[str, float] = defaultdict(float)
        for task, begin, end in self._of[rank]:
            if isinstance(task.does, Work):
                found[task.does.label.split()[0]] += end - begin
        return dict(found)

    def pieces(self, ranks: Sequence[int] | None = None) -> Iterator[TraceSpan]:
        """Yield a span for each task. ranks: names of the graph's ranks."""
        place = range(self.graph.num_ranks) if ranks is None else ranks
        for task, (begin, end) in zip(self.graph.tasks, self.spans, strict=True):
            rank, does = place[task.rank], task.does
            if isinstance(does, Message):
                yield TraceSpan(rank, SENDING, does.label, begin, end, place[does.target], does.num_bytes)
            else:
                yield TraceSpan(rank, _lane(task.jobs, does), does.label, begin, end)

    def trace(self) -> list[dict[str, Any]]:
        """Events in Chrome's trace format, which Perfetto reads too; one process per rank."""
        return trace_events(self.pieces())

    @cached_property
    def _of(self) -> list[list[tuple[Task, float, float]]]:
        """The tasks of each rank."""
        found: list[list[tuple[Task, float, float]]] = [[] for _ in range(self.graph.num_ranks)]
        for task, (begin, end) in zip(self.graph.tasks, self.spans, strict=True):
            found[task.rank].append((task, begin, end))
        return found


def _lane(jobs: tuple[int, ...], does: Work | Message) -> str:
    """The thread that does the work; empty for a message."""
    if isinstance(does, Message):
        return ""
    if does.kind == CARRY:
        return NETWORK
    return COMMUNICATION if jobs else TRAINING


def simulate(graph: StepGraph, machine: Machine) -> Timeline:
    """When each task of a step begins and ends. The same graph and machine give the same times.

    Ranks of a machine share its cores, and messages share the ports on their way. Raises ConfigError for a machine with
    another number of ranks, and for a graph whose tasks wait for each other.
    """
    if machine.num_ranks != graph.num_ranks:
        raise ConfigError(f"a machine of {machine.num_ranks} ranks for a step of {graph.num_ranks}")
    run = _Run(graph, machine)
    run.go()
    if run.num_ended < len(graph.tasks):
        raise ConfigError(f"{len(graph.tasks) - run.num_ended} tasks of the step wait for each other for ever")
    return Timeline(graph, tuple(zip(run.begun, run.ended, strict=True)))


class _Run:
    """A simulation under way: what each task and job waits for, and what each thread has to do."""

    def __init__(self, graph: StepGraph, machine: Machine) -> None:
        self.graph, self.machine = graph, machine
        self.clock: Clock[int] = Clock(machine.fabric, machine.cores)
        num = len(graph.tasks)
        self.begun, self.ended = [math.nan] * num, [math.nan] * num
        self.num_ended = 0
        self.waits = [len(set(task.after)) + len(task.jobs) for task in graph.tasks]
        self.followers: dict[int, list[int]] = defaultdict(list)
        self.members: dict[int, list[int]] = defaultdict(list)
        for number, task in enumerate(graph.tasks):
            for before in set(task.after):
                self.followers[before].append(number)
            for job in task.jobs:
                self.members[job].append(number)
        self.job_waits = [len(set(job.after)) for job in graph.jobs]
        self.submits: dict[int, list[int]] = defaultdict(list)
        self.in_order: dict[int, list[int]] = defaultdict(list)
        for number, one in enumerate(graph.jobs):
            self.in_order[one.rank].append(number)
            for before in set(one.after):
                self.submits[before].append(number)
        self.job_left = [len(self.members[number]) for number in range(len(graph.jobs))]
        self.num_open = [0] * graph.num_ranks
        self.next_job = [0] * graph.num_ranks
        self.queues: dict[tuple[int, str], list[int]] = defaultdict(list)
        self.is_busy: set[tuple[int, str]] = set()

    def go(self) -> None:
        for number, waits in enumerate(self.waits):
            if not waits:
                self._ready(number)
        for rank in range(self.graph.num_ranks):
            self._open_jobs(rank)
        while self.clock.next_s() < math.inf:
            arrived, worked = self.clock.advance()
            for number in sorted([*arrived, *worked]):
                self._end(number)
            while landed := self.clock.landed():
                for number in landed:
                    self._end(number)

    def _ready(self, number: int) -> None:
        task = self.graph.tasks[number]
        if isinstance(task.does, Message):
            self.begun[number] = self.clock.now_s
            self.clock.send((task.rank, task.does.target), task.does.num_bytes, number)
            return
        lane = (task.rank, _lane(task.jobs, task.does))
        heapq.heappush(self.queues[lane], number)
        self._work(lane)

    def _work(self, lane: tuple[int, str]) -> None:
        """Let a free thread do its next task."""
        if lane in self.is_busy or not self.queues[lane]:
            return
        number = heapq.heappop(self.queues[lane])
        task = self.graph.tasks[number]
        assert isinstance(task.does, Work)
        self.is_busy.add(lane)
        self.begun[number] = self.clock.now_s
        threads = self.machine.threads_of(task.does.kind, trains=lane[1] == TRAINING)
        self.clock.work(task.rank, self.machine.seconds(task.rank, task.does), number, threads)

    def _end(self, number: int) -> None:
        task = self.graph.tasks[number]
        self.ended[number] = self.clock.now_s
        self.num_ended += 1
        for following in self.followers[number]:
            self._one_less(following)
        for job in self.submits[number]:
            self.job_waits[job] -= 1
            self._open_jobs(self.graph.jobs[job].rank)
        for job in task.jobs:
            self.job_left[job] -= 1
            if not self.job_left[job]:
                self.num_open[self.graph.jobs[job].rank] -= 1
                self._open_jobs(self.graph.jobs[job].rank)
        if isinstance(task.does, Work):
            lane = (task.rank, _lane(task.jobs, task.does))
            self.is_busy.discard(lane)
            self._work(lane)

    def _one_less(self, number: int) -> None:
        self.waits[number] -= 1
        if not self.waits[number]:
            self._ready(number)

    def _open_jobs(self, rank: int) -> None:
        """Start the jobs whose turn it is while slots are free."""
        order = self.in_order[rank]
        while self.next_job[rank] < len(order) and self.num_open[rank] < self.graph.slots:
            job = order[self.next_job[rank]]
            if self.job_waits[job]:
                return
            self.next_job[rank] += 1
            if self.job_left[job]:
                self.num_open[rank] += 1
                for number in self.members[job]:
                    self._one_less(number)
