"""Types of a communication job."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Awaited(Protocol):
    """A pending operation that a job needs before it can go on."""

    def wait(self) -> None:
        """Block until it is done. Raises its error."""
        ...


@dataclass(frozen=True)
class Computed:
    """Work of a job on other threads of this process."""

    future: Future[Any]

    def wait(self) -> None:
        self.future.result()


# A job that is under way: it gives up the thread until all that it needs has arrived, and ends with its result. Once a
# round, not once a message: on busy cores it takes milliseconds until the thread runs again.
Rounds = Generator[Sequence[Awaited], None, T]
