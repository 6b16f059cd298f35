"""compress_ddp under each option of DDP: plain DDP's gradients, or a refusal; and ranks that were told otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.workers import run_workers
from thinwire import ConfigError, compress_ddp

STEPS = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph, gradient_as_bucket_view": {"static_graph": True, "gradient_as_bucket_view": True},
}


class Layers(nn.Module):
    """Several buckets; with `skips`, a parameter that takes no part."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.unused = nn.Linear(16, 16) if skips else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def gradients(ddp: DistributedDataParallel, rank: int) -> list[list[Tensor]]:
    """The gradients of each step."""
    told = []
    for step in range(STEPS):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(x).backward()
        told.append([param.grad.clone() for param in ddp.parameters() if param.grad is not None])
        ddp.zero_grad()
    return told


def both(rank: int, world_size: int) -> dict[str, tuple[list[list[Tensor]], list[list[Tensor]]]]:
    """By option: the gradients of plain DDP, and those under compress_ddp with an exact mean."""
    told = {}
    for name, options in OPTIONS.items():
        torch.manual_seed(0)
        model = Layers(skips="find_unused_parameters" in options)
        plain = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.002, **options)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.002, **options)
        handle = compress_ddp(ddp, thinwire.DDP(), announce=False)
        told[name] = gradients(plain, rank), gradients(ddp, rank)
        handle.close()
    return told


def test_gradients_are_those_of_plain_ddp() -> None:
    ranks = run_workers(both, 2)
    for name in OPTIONS:
        for plain, ours in (rank[name] for rank in ranks):
            for step in range(STEPS):
                torch.testing.assert_close(ours[step], plain[step], rtol=1e-5, atol=1e-7, msg=f"{name}, step {step}")
        first, second = (rank[name][1] for rank in ranks)
        assert all(torch.equal(a, b) for step in range(STEPS) for a, b in zip(first[step], second[step], strict=True))


def refusals(rank: int, world_size: int) -> dict[str, str]:
    said = {}
    half = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        traced = DistributedDataParallel(Layers(skips=False))
    mixed = DistributedDataParallel(Layers(skips=False))
    # Set afterwards: its constructor wants a GPU where torch is built for them.
    mixed.mixed_precision = half
    for name, ddp in {"python reducer": traced, "mixed_precision": mixed}.items():
        with pytest.raises(ConfigError) as caught:
            compress_ddp(ddp, thinwire.EFTopK(), announce=False)
        said[name] = str(caught.value)
    return said


def test_ways_around_the_hook_are_refused() -> None:
    for said in run_workers(refusals, 2):
        for name, words in said.items():
            assert name in words and "make the DDP without it" in words


def disagreements(rank: int, world_size: int) -> dict[str, str]:
    said = {}
    cases: dict[str, Callable[[], tuple[float, dict[str, Any]]]] = {
        "lr": lambda: (0.1 * (1 + rank), {}),
        "local_size": lambda: (0.1, {"local_size": 1 + rank}),
        "seed": lambda: (0.1, {"seed": rank}),
        "method": lambda: (0.1, {"method": thinwire.EFTopK(f"topk{10 * (1 + rank)}%")}),
    }
    for name, make in cases.items():
        lr, options = make()
        ddp = DistributedDataParallel(Layers(skips=False))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
        with pytest.raises(ConfigError) as caught:
            compress_ddp(ddp, options.pop("method", thinwire.EFTopK()), optimizer=optimizer, announce=False, **options)
        said[name] = str(caught.value)
    return said


def test_a_rank_that_was_told_otherwise_is_named_on_all() -> None:
    for said in run_workers(disagreements, 2):
        assert said["lr"].startswith("lr of parameter group 0 of rank 1 is 0.2, and of rank 0 0.1")
        assert said["local_size"].startswith("local_size of rank 1 is 2, and of rank 0 1")
        assert "seed of rank 1 is 1" in said["seed"] and "codec='topk20%'" in said["method"]
