"""Running statistics of batch normalisation, moved once for all micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase


def tracking(chunks: Iterable[nn.Module]) -> list[_BatchNorm]:
    """The modules of some chunks that keep running statistics."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return [module for module in modules if isinstance(module, _BatchNorm) and module.track_running_stats]


def counts_forwards(chunks: Iterable[nn.Module]) -> str:
    """The first module that keeps statistics of each forward, which must not be computed twice; empty: none does."""
    counting = (
        name or type(module).__name__
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, _NormBase) and module.track_running_stats and not isinstance(module, _BatchNorm)
    )
    return next(counting, "")


class StepStatistics:
    """Moments of all micro-batches of a step, for each of some modules.

    In a forward a micro-batch is normalised by its own mean and variance. With n elements of a channel in all
    micro-batches of the step together, their mean m and variance v n / (n - 1) move the running ones:

        mean <- (1 - a) mean + a m        var <- (1 - a) var + a v n / (n - 1)

    where a is the module's momentum, or 1 / steps where that is None. Source: Huang et al., GPipe (2019), section 2.2.
    """

    def __init__(self) -> None:
        self._sums: dict[_BatchNorm, tuple[int, Tensor, Tensor]] = {}
        self._counts = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context for forwards whose statistics were counted before."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    @torch.no_grad()
    def note(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Count a forward of a module; used as a forward pre-hook."""
        if not self._counts or not module.training:
            return
        assert isinstance(module, _BatchNorm)
        x = args[0].detach().double().transpose(0, 1).flatten(1)
        number, total, squares = self._sums.get(module, (0, x.new_zeros(len(x)), x.new_zeros(len(x))))
        self._sums[module] = number + x.shape[1], total + x.sum(1), squares + x.square().sum(1)

    @torch.no_grad()
    def commit(self) -> None:
        """Move the running statistics of the modules that had a forward."""
        for module, (number, total, squares) in self._sums.items():
            assert module.running_mean is not None and module.running_var is not None
            steps = 1
            if module.num_batches_tracked is not None:
                steps = int(module.num_batches_tracked.add_(1))
            factor = 1 / steps if module.momentum is None else module.momentum
            mean = total / number
            variance = (squares / number - mean.square()).clamp(min=0) * number / max(1, number - 1)
            module.running_mean.lerp_(mean.to(module.running_mean.dtype), factor)
            module.running_var.lerp_(variance.to(module.running_var.dtype), factor)


@contextmanager
def once(modules: Sequence[_BatchNorm], *, commits: bool) -> Iterator[StepStatistics]:
    """Context in which forwards don't move statistics. At its end they move once, for all forwards, if `commits`."""
    found = StepStatistics()
    hooks = [module.register_forward_pre_hook(found.note) for module in modules] if commits else []
    for module in modules:
        module.track_running_stats = False
    try:
        yield found
    finally:
        for module in modules:
            module.track_running_stats = True
        for hook in hooks:
            hook.remove()
    if commits:
        found.commit()
