"""Copies and pickles of optimizers: they go on as the original does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.optim import Muon, OneBitAdamW, Part, Shards, SummingOptimizer, make_optimizer

OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {},
    "dion": {"rank": 3, "codec": "bf16"},
    "apollo": {"matrices": "0", "rank": 2, "codec": "int8/64"},
    "apollo-mini": {"matrices": "0", "seed": 5},
    "onebit-adam": {},
}
WAYS: dict[str, Callable[[Any], Any]] = {"copy": copy.deepcopy, "pickle": lambda pair: pickle.loads(pickle.dumps(pair))}


def steps(model: nn.Module, optimizer: Any, first: int) -> list[torch.Tensor]:
    for step in range(first, first + 2):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_copy_goes_on_as_the_original_to_the_bit(name: str, way: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    optimizer = make_optimizer(name, [{"params": list(model.named_parameters())}], lr=0.02, **OPTIONS[name])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    steps(model, optimizer, 0)
    if isinstance(optimizer, OneBitAdamW):
        optimizer.freeze_after_step(model.parameters())
    other_model, other = WAYS[way]((model, optimizer))
    assert all(map(torch.equal, steps(model, optimizer, 2), steps(other_model, other, 2)))
    if isinstance(optimizer, SummingOptimizer):
        parts = {"cut": Part("0.weight", torch.Size([8, 6]), ((0, 20), (20, 48)), 0, optimizer.param_groups[0])}
        assert other.sums(parts) == optimizer.sums(parts)


def test_what_sums_over_ranks_has_no_copy() -> None:
    optimizer = Muon([torch.zeros(3, 3)])
    optimizer.join(Shards({}))
    with pytest.raises(ConfigError, match="muon sums over ranks"):
        copy.deepcopy(optimizer)
