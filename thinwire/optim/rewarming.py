"""Warm-up of the learning rate on an island that has joined others."""

from __future__ import annotations

from typing import Any

import torch


class Rewarming:
    """Multiplies the learning rate of the next n steps by 1/(n + 1), 2/(n + 1), ...

    N/(n + 1), whatever the schedule sets.

    For an island that joins others: its optimizer's moments are still empty.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
        self._num_steps, self._step = num_steps, 0
        self._stated: list[Any] = []
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._step += 1
        self._stated = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * min(1.0, self._step / (self._num_steps + 1))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group, lr in zip(optimizer.param_groups, self._stated, strict=True):
            group["lr"] = lr
