"""A reduction on chosen gradients, in this process or as one of several, without DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.collectives import Communicator
from thinwire.methods.ddp import DDPMethod
from thinwire.methods.reduction import Bucket, Step
from thinwire.state.memory import Place


class Alone:
    """Parameters with gradients that a method reduces; `put` is one step, or one that is skipped."""

    def __init__(
        self, method: DDPMethod, params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None = None,
        local_size: int = 1,
    ) -> None:  # fmt: skip
        optimizer = torch.optim.SGD(params.values(), lr=0.1) if optimizer is None else optimizer
        self.comm = Communicator(local_size=local_size)
        self.params, self.optimizer, self.steps = dict(params), optimizer, 0
        method.check(nn.Module(), optimizer)
        shapes = {name: param.shape for name, param in params.items()}
        self.reduction: Any = method.reduction(Place(shapes, self.comm.topology, self.comm.rank), 3)
        method.bind(self.reduction, params, optimizer)

    def put(self, gradients: Mapping[str, Tensor], lr: float = 0.1, *, skip: bool = False) -> dict[str, Tensor]:
        """What the method makes of this rank's gradients; then the optimizer's step."""
        flat = torch.cat([gradients[name].reshape(-1) for name in self.params])
        parts = flat.split([param.numel() for param in self.params.values()])
        grads = [part.view(param.shape) for part, param in zip(parts, self.params.values(), strict=True)]
        bucket = Bucket(0, list(self.params), flat, grads, True)
        step = Step(self.steps, dict.fromkeys(self.params, lr))
        self.comm.wait(self.comm.submit(lambda link: self.reduction.run(link, bucket, step)))
        self.steps += 1
        for param, grad in zip(self.params.values(), grads, strict=True):
            param.grad = grad
        if not skip:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        return dict(zip(self.params, grads, strict=True))


def parameters(**shapes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    """Parameters by name, normal and the same every time."""
    generator = torch.Generator().manual_seed(7)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def gradients(params: Mapping[str, Tensor], step: int, rank: int = 0) -> dict[str, Tensor]:
    """Normal gradients of a step and a rank."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {name: torch.randn(param.shape, generator=generator) for name, param in params.items()}
