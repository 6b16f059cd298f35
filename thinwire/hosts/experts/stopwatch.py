"""The seconds that layers of experts take on the training thread, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor


class Stopwatch:
    """Adds up the seconds between `begins` and `ends`, in training, and those of the backward between them.

    gap_s: before the last `take`, the median seconds of a backward between one layer and the next.
    wait: called before the time is read, such as `Device.synchronize`, since a GPU computes what is queued; None: what
    is queued counts where it is waited for.
    """

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, 0.0
        self.gap_s, self._gaps = 0.0, list[float]()
        self._is_in_backward = False
        self.wait: Callable[[], None] | None = None

    def begins(self, x: Tensor) -> Tensor:
        """The input of a layer."""
        return Mark.apply(self, False, x) if torch.is_grad_enabled() else x

    def ends(self, y: Tensor) -> Tensor:
        """The output of a layer."""
        return Mark.apply(self, True, y) if torch.is_grad_enabled() else y

    def note(self, *, is_end: bool, is_backward: bool) -> None:
        """A layer's forward or backward begins or ends now."""
        if self.wait is not None:
            self.wait()
        now = perf_counter()
        if is_end:
            self._seconds += now - self._since
        elif is_backward and self._is_in_backward:
            self._gaps.append(now - self._since)
        self._since, self._is_in_backward = now, is_backward

    def take(self) -> float:
        """The seconds since the last call."""
        found, self._seconds = self._seconds, 0.0
        self.gap_s, self._gaps = median(self._gaps or [0.0]), []
        return found


class Mark(torch.autograd.Function):
    """Tells a Stopwatch that a layer ends, or begins; its backward goes the other way."""

    @staticmethod
    def forward(ctx: Any, watch: Stopwatch, is_end: bool, x: Tensor) -> Tensor:
        ctx.watch, ctx.is_end = watch, is_end
        watch.note(is_end=is_end, is_backward=False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.watch.note(is_end=not ctx.is_end, is_backward=True)
        return None, None, grads[0]
