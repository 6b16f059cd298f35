"""Branches of low rank beside frozen weights (LoRA), whose inputs are sampled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thinwire.hosts.offload.sampling import RowSampler

DRAWS = 100


class LowRank(nn.Module):
    """W x + B A x, of which A and B are trained."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = LowRank(16, 4), LowRank(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.q(x)) * self.v(x)


class Adapted(nn.Module):
    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    model(x).square().mean().backward()
    assert x.grad is not None
    found = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    return {"input": x.grad, **found}


@pytest.mark.parametrize("again", [False, True])
def test_gradients_of_branches_are_estimates_without_bias(again: bool) -> None:
    """Those of A and B; frozen weights get none, and what goes back through both is exact."""
    model, x = Adapted(again=again), torch.randn(4, 12, 16, generator=torch.Generator().manual_seed(1))
    exact = gradients(model, x)
    sampler = RowSampler(model, 0.3)
    sums = {name: torch.zeros_like(gradient) for name, gradient in exact.items()}
    squares = dict.fromkeys(exact, 0.0)
    for step in range(DRAWS):
        sampler.seed = lambda step=step: step  # type: ignore[misc]
        found = gradients(model, x)
        assert found.keys() == exact.keys() and not any("base" in name for name in found)
        torch.testing.assert_close(found["input"], exact["input"])
        for name, gradient in found.items():
            sums[name] += gradient
            squares[name] += float((gradient - exact[name]).square().sum())
    for name, gradient in exact.items():
        if name == "input":
            continue
        apart, chance = float((sums[name] / DRAWS - gradient).norm()), (squares[name] / DRAWS) ** 0.5
        assert chance > 0.01 * float(gradient.norm()), f"{name} is not an estimate"
        assert apart < 2 * chance / DRAWS**0.5, f"{name} has a bias"
