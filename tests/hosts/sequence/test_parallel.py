"""Training with sequences over several ranks equals training in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import thinwire
from tests.workers import run_workers
from thinwire.hosts.sequence.parallel import IGNORED
from thinwire.models.llama import Llama, LlamaConfig

STEPS, BATCH, LENGTH = 20, 2, 30
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=LENGTH,
)  # fmt: skip


def batch_of(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Tokens and what follows them; in odd steps, only a few early tokens of one sequence count."""
    draw = torch.Generator().manual_seed(100 * step + replica)
    tokens = torch.randint(CONFIG.vocab_size, (BATCH, LENGTH + 1), generator=draw)
    targets = tokens[:, 1:].clone()
    if step % 2:
        targets[:, 3 + replica :], targets[1:] = IGNORED, IGNORED
    return tokens[:, :-1], targets


def total_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=IGNORED)


def alone(num_replicas: int) -> tuple[list[float], dict[str, Tensor]]:
    """One process takes the tokens of all replicas: the mean is over all that count."""
    model = Llama(CONFIG)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(STEPS):
        tokens, targets = (torch.cat(x) for x in zip(*(batch_of(step, r) for r in range(num_replicas)), strict=True))
        loss = total_loss(model(tokens), targets) / (targets != IGNORED).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def train(rank: int, world_size: int, ranks: int, method: str, local_positions: bool) -> Any:
    """By hand: split, mean_loss, and a strategy over all ranks."""
    model = Llama(CONFIG)
    options = thinwire.SequenceParallel(ranks, method=method)
    seq = thinwire.sequence_parallel(model, options, local_size=2, timeout_s=120)
    if local_positions:
        model.model.positions = lambda tokens: torch.arange(tokens.shape[1])
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    module, optimizer = thinwire.zero(model, inner, thinwire.Zero(), local_size=2, timeout_s=120)
    losses = []
    for step in range(STEPS):
        tokens, targets = seq.split(*batch_of(step, rank // ranks))
        loss = seq.mean_loss(total_loss(module(tokens), targets), (targets != IGNORED).sum())
        loss.backward()
        optimizer.note_loss(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(optimizer.mean_loss)
    optimizer.check_replicas()
    weights = optimizer.masters([name for name, _ in model.named_parameters()])
    seq.close()
    optimizer.close()
    return losses, weights


def several(rank: int, world_size: int) -> list[Any]:
    return [
        train(rank, world_size, 4, "ulysses", False), train(rank, world_size, 2, "ring", False),
        train(rank, world_size, 4, "ulysses=2,ring=2", False), train(rank, world_size, 4, "ulysses", True)[0][:3],
    ]  # fmt: skip


def close_to(found: tuple[list[float], dict[str, Tensor]], truth: tuple[list[float], dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], truth[0], rtol=1e-5, atol=0)
    for name, value in truth[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=2e-4, msg=name)


def test_twenty_steps_are_those_of_one_process_with_very_unequal_tokens() -> None:
    four, pairs = alone(1), alone(2)
    for whole, two, both, misplaced in run_workers(several, 4, local_size=2):
        close_to(whole, four)
        close_to(two, pairs)
        close_to(both, four)
        # Positions that count from 0 on each rank train something else.
        with pytest.raises(AssertionError):
            torch.testing.assert_close(misplaced, four[0][:3], rtol=1e-5, atol=0)


def on_meshes(rank: int, world_size: int, method: thinwire.Method, sizes: dict[str, int]) -> list[float]:
    """A Stage on the mesh: called with whole sequences."""
    model = Llama(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    stage = thinwire.parallelize(model, optimizer, mesh, [method], local_size=2, timeout_s=120, announce=False)
    replica = rank // sizes.get("sequence", 1)
    losses = []
    for step in range(0, 8, 2):
        stage.forward_backward([batch_of(step, replica), batch_of(step + 100, replica)])
        stage.step(1.0)
        losses.append(stage.optimizer.mean_loss)
    with torch.no_grad():
        logits = model(batch_of(0, replica)[0])
        losses.append(float(total_loss(logits, batch_of(0, replica)[1])))
    stage.close()
    return losses


def each_strategy(rank: int, world_size: int) -> list[Any]:
    found = []
    for method in (thinwire.SDP4Bit(), thinwire.Zero(), thinwire.FSDP(), thinwire.DDP()):
        found.append(on_meshes(rank, world_size, method, {"data": 2, "sequence": 2}))
    return found


def as_pairs(rank: int, world_size: int) -> list[float]:
    return on_meshes(rank, world_size, thinwire.Zero(), {"data": 2})


def test_every_strategy_sees_all_ranks() -> None:
    truth = run_workers(as_pairs, 2)
    for rank, (fourbit, *exact) in enumerate(run_workers(each_strategy, 4, local_size=2)):
        for losses in exact:
            torch.testing.assert_close(losses, truth[rank // 2], rtol=1e-5, atol=0)
        torch.testing.assert_close(fourbit, truth[rank // 2], rtol=0.05, atol=0)
