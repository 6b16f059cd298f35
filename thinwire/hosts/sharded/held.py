"""Holds gradients back until the link has time for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class HeldGradients:
    """Messages that wait for their turn, in the order in which they were ready; see `ShardedOptimizer.hold_gradients`.

    room_bytes: what may leave at each `release`. Of a message that is only partly within it, the rest counts against
    the next room.
    """

    room_bytes: float
    _waiting: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)
    _debt: float = 0.0

    def add(self, num_bytes: int, start: Callable[[], None]) -> None:
        """A message is ready, and waits."""
        self._waiting.append((num_bytes, start))

    def release(self) -> None:
        """Start the messages that there is room for."""
        left = self.room_bytes - self._debt
        while self._waiting and left > 0:
            num_bytes, start = self._waiting.popleft()
            left -= num_bytes
            start()
        self._debt = max(0.0, -left)

    def finish(self) -> None:
        """Start all that still wait."""
        while self._waiting:
            self._waiting.popleft()[1]()
        self._debt = 0.0
