"""Ranks that were given different things are told so, on all ranks, before a message fits no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.workers import run_workers
from thinwire.methods.data.zero import Zero
from thinwire.state.replicas import ReplicaError


def by_zero(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
    return thinwire.zero(model, optimizer, Zero(), announce=False)  # type: ignore[arg-type]


def by_ddp(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
    return thinwire.compress_ddp(DistributedDataParallel(model), thinwire.EFInteger(), optimizer, announce=False)


def by_fsdp(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
    return thinwire.compress_fsdp(model, thinwire.ZeroPP(), optimizer, announce=False)


FRONTS: dict[str, Callable[..., Any]] = {"zero": by_zero, "ddp": by_ddp, "fsdp": by_fsdp}


def refusals(rank: int, world_size: int) -> dict[str, str]:
    said = {}
    for front, start in FRONTS.items():
        for case in ("groups", "shape", "frozen", "refused"):
            if (front, case) in (("ddp", "shape"), ("ddp", "frozen")):
                continue  # DistributedDataParallel itself refuses these.
            model = nn.Sequential(nn.Linear(8, 8 * (1 + rank) if case == "shape" else 8))
            model[0].bias.requires_grad_(not (case == "frozen" and rank))
            if front == "fsdp":
                fully_shard(model)
            weight, bias = model.parameters()
            first, second = ([weight, bias], []) if case == "groups" and rank else ([weight], [bias])
            optimizer: Any = torch.optim.SGD([{"params": first}, {"params": second}], lr=0.1)
            if case == "refused" and rank:
                optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
            with pytest.raises(thinwire.ConfigError) as refused:
                start(model, optimizer)
            said[f"{front} {case}"] = str(refused.value)
    sparse = nn.EmbeddingBag(10, 8, sparse=True)
    with pytest.raises(thinwire.ConfigError) as refused:
        by_ddp(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1))
    said["sparse"] = str(refused.value)
    return said


def test_all_ranks_are_told_what_differs_or_what_one_of_them_refuses() -> None:
    for rank, said in enumerate(run_workers(refusals, 2)):
        assert "'weight' is sparse" in said.pop("sparse")
        for case, message in said.items():
            if case.endswith("groups"):
                assert message.startswith("parameter group of '0.bias' of rank 1 is 0, and of rank 0 1"), message
            elif case.endswith("shape"):
                assert message.startswith("parameter '0.weight' of rank 1 is float32 [16, 8], and of rank 0"), message
            elif case.endswith("frozen"):
                assert message.startswith("parameter '0.bias' of rank 1 is float32 [8], frozen, and"), message
            else:
                assert message.startswith("rank 1 can't start: ") == (rank == 0), message


def loaded(rank: int, world_size: int, everywhere: bool) -> str:
    """What the step after the next one says where one rank, or all, load other weights between two steps."""
    model = nn.Linear(8, 8)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = thinwire.zero(model, optimizer, thinwire.SDP4Bit(), local_size=1, announce=False)
    for step in range(4):
        if step == 2 and (everywhere or rank == 1):
            with torch.no_grad():
                model.weight.fill_(1.0)
        model(torch.ones(1, 8)).sum().backward()
        try:
            optimizer.step()
        except ReplicaError as error:
            return str(error)
        optimizer.zero_grad()
    return ""


@pytest.mark.parametrize("everywhere", [False, True])
def test_weights_that_one_rank_loads_alone_end_the_run_on_all(everywhere: bool) -> None:
    for said in run_workers(loaded, 2, everywhere):
        assert said.startswith("after step 3 the weights of rank(s) [1] differ from rank 0's") != everywhere, said
