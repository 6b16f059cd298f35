"""A training step as a graph: work, messages, and their order; independent of a machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

# Bytes that the network's own threads take from and to the sockets; rounds of messages that a thread begins and ends.
CARRY, ROUND = "carry", "round"
# Work stated in the seconds that a usual rank takes.
SECONDS = "seconds"


@dataclass(frozen=True)
class Work:
    """An amount of one kind of work, such as bytes of packets in "encode int4/64" or operations in "layer 256 fp32".

    name: what a trace calls it; empty: its kind.
    """

    kind: str
    amount: float
    name: str = ""

    @property
    def label(self) -> str:
        return self.name or self.kind


@dataclass(frozen=True)
class Message:
    """Payload for another rank. operation, level: names in the meter. name: what a trace calls it, as of Work."""

    target: int
    num_bytes: float
    operation: str
    level: str
    name: str = ""

    @property
    def label(self) -> str:
        return self.name or self.operation


@dataclass(frozen=True)
class GraphJob:
    """A collective on one rank, submitted after some tasks. A rank starts its jobs in the order of the graph."""

    rank: int
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Task:
    """Work or a message of a rank, which begins when the tasks `after` have ended.

    jobs: numbers of the jobs that must have started: the task's own and, for a message, also the receiver's, because
    nothing is sent before its receiver is ready. The communication thread does the work of jobs, the network's thread
    does CARRY, and the training thread all other work. Each thread does one task at a time, in the order of the graph.
    """

    rank: int
    does: Work | Message
    after: tuple[int, ...] = ()
    jobs: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepGraph:
    """One step of all ranks. slots: largest number of a rank's jobs under way at once."""

    num_ranks: int
    tasks: tuple[Task, ...]
    jobs: tuple[GraphJob, ...] = ()
    slots: int = 4

    def link_bytes(self) -> dict[tuple[int, int], float]:
        """Bytes of all messages, by (from, to)."""
        found: Counter[tuple[int, int]] = Counter()
        for task in self.tasks:
            if isinstance(task.does, Message):
                found[task.rank, task.does.target] += task.does.num_bytes  # type: ignore[assignment]
        return dict(found)

    def sent(self, rank: int) -> dict[tuple[str, str], float]:
        """Bytes that a rank sends, by (operation, level)."""
        found: Counter[tuple[str, str]] = Counter()
        for task in self.tasks:
            if task.rank == rank and isinstance(task.does, Message):
                found[task.does.operation, task.does.level] += task.does.num_bytes  # type: ignore[assignment]
        return dict(found)


class Drawing:
    """A graph under construction."""

    def __init__(self, num_ranks: int, slots: int = 4) -> None:
        self.num_ranks, self.slots = num_ranks, slots
        self.tasks: list[Task] = []
        self.jobs: list[GraphJob] = []

    def task(
        self, rank: int, does: Work | Message, after: tuple[int, ...] = (), jobs: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """Add a task. Return its number in a tuple. A task may only come after existing tasks."""
        self.tasks.append(Task(rank, does, after, jobs))
        return (len(self.tasks) - 1,)

    def job(self, rank: int, after: tuple[int, ...]) -> int:
        """Add a job. Return its number."""
        self.jobs.append(GraphJob(rank, after))
        return len(self.jobs) - 1

    def done(self) -> StepGraph:
        """The finished graph."""
        return StepGraph(self.num_ranks, tuple(self.tasks), tuple(self.jobs), self.slots)
