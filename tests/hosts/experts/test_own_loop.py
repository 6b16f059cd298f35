"""Spread experts in a loop of one's own: `thinwire.zero` finds their replicas, and what can't train them refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.workers import run_workers
from thinwire.errors import ConfigError
from thinwire.models import build_model


def spread_model() -> tuple[nn.Module, thinwire.ExpertRanks, torch.optim.Optimizer]:
    model = build_model("moe-tiny", vocab_size=64, seq_len=16, overrides={"num_hidden_layers": 2})
    ep = thinwire.expert_parallel(model, thinwire.ExpertParallel(2), local_size=1)
    return model, ep, torch.optim.AdamW(model.parameters(), lr=1e-2)


def refused(call: object, *args: object, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **options)  # type: ignore[operator]
    return str(caught.value)


def own_loop(rank: int, *, states_group: bool) -> tuple[list[float], dict[str, list[float]], int, list[str]]:
    """Losses of some steps, this rank's part of the experts, bytes of rows, and the first words of the table."""
    model, ep, adamw = spread_model()
    group_for = ep.group_for if states_group else None
    module, optimizer = thinwire.zero(model, adamw, thinwire.Zero(), local_size=1, announce=False, group_for=group_for)
    losses, draws = [], torch.Generator().manual_seed(rank)
    for _ in range(3):
        text = torch.randint(0, 64, (2, 17), generator=draws)
        loss = module(text[:, :-1], text[:, 1:])
        loss.backward()
        optimizer.note_loss(float(loss.detach()))
        optimizer.clip_grad_norm_(1.0)
        with pytest.raises(RuntimeError, match="call note_loss before"):
            optimizer.note_loss(0.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(optimizer.mean_loss)
    parts = {name: model.get_parameter(name).flatten().tolist() for name in ep.shapes}
    told = [row[0] for row in optimizer.describe()]
    rows = optimizer.meter.snapshot().sent_by("dispatch")
    ep.close()
    optimizer.close()
    return losses, parts, rows, told


def both_loops(rank: int, world_size: int) -> list[tuple]:
    return [own_loop(rank, states_group=stated) for stated in (False, True)]


def refusals(rank: int, world_size: int) -> list[str]:
    """What averages all weights over all ranks, and a `group_for` that forgets the experts."""
    model, ep, adamw = spread_model()
    found = [
        refused(thinwire.zero, model, adamw, thinwire.Zero(), group_for=lambda name, tensor: None, announce=False),
        refused(thinwire.DiLoCo, model, adamw, announce=False),
        refused(thinwire.compress_ddp, DistributedDataParallel(model), thinwire.PowerSGD(), adamw, announce=False),
    ]
    ep.close()
    return found


def test_zero_finds_the_replicas_of_spread_experts_and_counts_their_rows() -> None:
    (alone, stated), (other, _) = run_workers(both_loops, 2)
    assert alone[0] == stated[0] and alone[1] == stated[1]
    assert all(alone[1][name] != other[1][name] for name in alone[1])
    # Two layers of rows in three steps, those of the other rank's experts alone.
    assert alone[2] == stated[2] > 0
    assert "experts over 2 ranks" in alone[3]


def test_what_averages_weights_over_all_ranks_refuses_spread_experts() -> None:
    for forgets, islands, ddp in run_workers(refusals, 2):
        assert forgets.startswith("group_for: gives no group for 'model.layers.0") and "leave group_for out" in forgets
        for words in (islands, ddp):
            assert words.startswith("the experts lie on several ranks") and "nearest: thinwire.zero" in words
