"""A training step as a graph: work, messages, and what must come before what; no machine yet."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

# Bytes that the network's own threads take from and to the sockets; rounds of messages that a thread begins and ends.
CARRY, ROUND = "carry", "round"


@dataclass(frozen=True)
class Work:
    """So much of one kind of work, such as bytes of packets in "encode int4/64", or operations in "layer 256 fp32"."""

    kind: str
    amount: float


@dataclass(frozen=True)
class Message:
    """Payload to another rank. operation, level: as the meter calls them."""

    target: int
    num_bytes: float
    operation: str
    level: str


@dataclass(frozen=True)
class GraphJob:
    """A collective on one rank, submitted after some tasks; a rank starts its jobs in the order of the graph."""

    rank: int
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Task:
    """What a rank does once the tasks `after` have ended.

    jobs: numbers of the jobs that must have started, of which it is a part: its own, and of a message the receiver's
    too, for nothing leaves before it is awaited. Work of a job is for the communication thread, CARRY for the network's
    own, other work for the training thread; each thread does one task at a time, the first in the graph first.
    """

    rank: int
    does: Work | Message
    after: tuple[int, ...] = ()
    jobs: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepGraph:
    """One step of all ranks. slots: jobs of a rank that may be under way at once."""

    num_ranks: int
    tasks: tuple[Task, ...]
    jobs: tuple[GraphJob, ...] = ()
    slots: int = 4

    def sent(self, rank: int) -> dict[tuple[str, str], float]:
        """Bytes that a rank sends, by (operation, level)."""
        found: Counter[tuple[str, str]] = Counter()
        for task in self.tasks:
            if task.rank == rank and isinstance(task.does, Message):
                found[task.does.operation, task.does.level] += task.does.num_bytes  # type: ignore[assignment]
        return dict(found)


class Drawing:
    """A graph in the making."""

    def __init__(self, num_ranks: int, slots: int = 4) -> None:
        self.num_ranks, self.slots = num_ranks, slots
        self.tasks: list[Task] = []
        self.jobs: list[GraphJob] = []

    def task(
        self, rank: int, does: Work | Message, after: tuple[int, ...] = (), jobs: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """Add a task; its number, alone in a tuple. A task may only come after tasks that are there already."""
        self.tasks.append(Task(rank, does, after, jobs))
        return (len(self.tasks) - 1,)

    def job(self, rank: int, after: tuple[int, ...]) -> int:
        """Add a job; its number."""
        self.jobs.append(GraphJob(rank, after))
        return len(self.jobs) - 1

    def done(self) -> StepGraph:
        """What has been drawn."""
        return StepGraph(self.num_ranks, tuple(self.tasks), tuple(self.jobs), self.slots)
