"""Rows are rounded alike on any number of ranks: what they draw follows from their tokens' numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from tests.hosts.experts.test_parallel import filled
from tests.workers import run_workers
from thinwire import ExpertParallel
from thinwire.errors import ConfigError

NUM, WIDTH = 20, 32
EVEN = {1: [20], 2: [10, 10], 4: [5, 5, 5, 5]}
UNEVEN = [10, 3, 0, 7]


def scaled(rows: Tensor, counts: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """What experts do here: one multiplication, with the same bits beside any other rows."""
    return rows * (1 + weights[0].detach().mean((1, 2))).repeat_interleave(counts)[:, None]


def passed(rank: int, group: Any, cut: Sequence[int], options: ExpertParallel, says: bool, plain: bool) -> list[Tensor]:
    """This rank's outputs and gradients of inputs and weights; and, if experts are not `plain`, whole gradients."""
    draws = torch.Generator().manual_seed(5)
    x, chosen = torch.randn(NUM, WIDTH, generator=draws).double(), torch.rand(NUM, 8, generator=draws)
    index, weights = chosen.topk(2, -1).indices, torch.rand(NUM, 2, generator=draws).double()
    model, own = torch.nn.Module(), slice(sum(cut[:rank]), sum(cut[: rank + 1]))
    model.experts = experts = filled(0)
    if plain:
        experts.product = scaled  # type: ignore[method-assign]
    ep = thinwire.expert_parallel(model, options, group, local_size=2 if len(cut) == 4 else 1, timeout_s=60)
    if says:
        ep.tokens = lambda num: own.start + torch.arange(num)
    x, weights = x[own].clone().requires_grad_(), weights[own].clone().requires_grad_()
    y = experts(x, index[own], weights)
    (y * torch.arange(1.0, 1 + NUM * WIDTH).double().view(NUM, WIDTH).cos()[own]).sum().backward()
    assert x.grad is not None and weights.grad is not None
    found = [y.detach(), x.grad, weights.grad]
    if not plain:
        replicas = list(range(rank % ep.placement.ranks, len(cut), ep.placement.ranks))
        for name, param in experts.named_parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            every = ep.everyone.wait(ep.everyone.all_gather_exact(grad))
            found += ep.gather({f"experts.{name}": every[replicas].sum(0)}).values()
    ep.close()
    return found


def cases() -> dict[str, list[tuple[Sequence[int], ExpertParallel, bool]]]:
    """By name: layouts in which the same batch of tokens lies, and whether each rank says which tokens it has."""
    found: dict[str, list[tuple[Sequence[int], ExpertParallel, bool]]] = {}
    for codec in ("int8/32", "int4/16:bf16", "e3m0/32"):
        how: Any = {"dispatch": codec, "combine": codec, "gradients": codec}
        found[codec] = [(cut, ExpertParallel(n, **how), False) for n, cut in EVEN.items()]
        found[codec] += [
            (EVEN[4], ExpertParallel(2, **how), False),
            (UNEVEN, ExpertParallel(4, **how), True),
            ([13, 7], ExpertParallel(2, chunks=2, chunks_back=6, **how), True),
            (EVEN[4], ExpertParallel(4, route="2dh", chunks=3, **how), False),
        ]
    # Of an expert in slices each part is rounded; with `once`, the sum of each node.
    how = {"dispatch": "int8/32", "combine": "int4/32", "gradients": "int8/32"}
    halves = [(EVEN[2], 2, False), (EVEN[4], 4, False), (EVEN[4], 2, False), (UNEVEN, 4, True)]
    found["slices"] = [(cut, ExpertParallel(n, slices=2, **how), says) for cut, n, says in halves]
    found["once"] = [(cut, ExpertParallel(4, route="once", **how), True) for cut in (EVEN[4], UNEVEN)]
    return found


def in_layouts(rank: int, world_size: int) -> dict[str, list[list[Tensor]]]:
    groups = {num: dist.new_group(range(num)) for num in EVEN}
    return {
        f"{name} {'plain' if plain else 'real'}": [
            passed(rank, groups[len(cut)], cut, options, says, plain) if rank < len(cut) else []
            for cut, options, says in layouts
        ]
        for name, layouts in cases().items()
        for plain in (True, False)
    }


def test_rows_are_rounded_alike_on_any_number_of_ranks() -> None:
    every = run_workers(in_layouts, 4, local_size=2)
    for name, of_first in every[0].items():
        whole = []
        for number in range(len(of_first)):
            of_ranks = [found[name][number] for found in every if found[name][number]]
            whole.append([torch.cat(parts) for parts in zip(*(each[:3] for each in of_ranks), strict=True)])
            whole[-1] += of_ranks[0][3:]
        for other in whole[1:]:
            for a, b in zip(whole[0], other, strict=True):
                if name.endswith("plain"):
                    assert torch.equal(a, b), name
                else:
                    # Products with other numbers of rows differ in their last bits, sums of rows too.
                    assert float((a - b).abs().max() / a.abs().max()) < 1e-12, name


def refused(rank: int, world_size: int) -> list[str]:
    """What is said of numbers that are not one for each token."""
    model, told = torch.nn.Module(), list[str]()
    model.experts = experts = filled(0)
    ep = thinwire.expert_parallel(model, ExpertParallel(1, dispatch="int8/32"), timeout_s=60)
    x, index, weights = torch.randn(4, WIDTH).double(), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2).double()
    wrong: list[Any] = [
        lambda n: torch.arange(n + 1),
        lambda n: torch.arange(n).float(),
        lambda n: None,
        torch.arange(4),
    ]
    for tokens in wrong:
        ep.tokens = tokens
        with pytest.raises(ConfigError, match=r"ep\.tokens: gave .*nearest: lambda") as error:
            experts(x, index, weights)
        told.append(str(error.value))
    ep.close()
    return told


def test_numbers_that_are_not_one_for_each_token_are_refused() -> None:
    ((more, floats, nothing, _),) = run_workers(refused, 1)
    assert "gave torch.int64 [5] for 4 tokens" in more
    assert "torch.float32 [4]" in floats and "NoneType" in nothing
