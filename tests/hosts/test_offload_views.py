"""What autograd saves of weights on a disk, edits of them by hand, and rows that are read of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import thinwire
from tests.hosts.on_disk import Views, cut_small
from tests.workers import run_workers
from thinwire import Residency


def edited(rank: int, world_size: int, folder: Path) -> list[list[Any]]:
    """Input gradients, weights after a step, and weights after an edit by hand and another one; memory, then disk."""
    cut_small()
    told = []
    for residency in (None, Residency(store=str(folder), weights="disk")):
        model = Views()
        adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
        _, optimizer = thinwire.zero(model, adamw, thinwire.Zero(), residency=residency, announce=False)
        found: list[Any] = []
        for _ in range(3):
            x = torch.linspace(-1, 1, 64).view(4, 16).requires_grad_()
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            with thinwire.whole(model), torch.no_grad():
                found += [x.grad, [param.clone() for param in model.parameters()]]
                model.get_parameter("views.1.weight").mul_(0.5)
            if optimizer._residence is not None:
                held = optimizer._residence.replicas
                assert held is not None and held.used_bytes <= held.capacity_bytes == held.total_bytes // 3
        told.append(found)
        optimizer.close()
    return told


def test_saved_views_and_edits_by_hand_are_those_of_memory(tmp_path: Path) -> None:
    (told,) = run_workers(edited, 1, tmp_path)
    for here, there in zip(*told, strict=True):
        for one, other in zip(here, there, strict=True):
            assert torch.equal(one, other)


class Tables(torch.nn.Module):
    """Three embeddings, of which two fit in memory, and a small layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(4096, 64, padding_idx=number) for number in range(3))
        self.layer = torch.nn.Linear(64, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = sum(table(tokens * (number + 3) % 4096) for number, table in enumerate(self.tables))
        assert isinstance(x, torch.Tensor)
        return self.layer(x.tanh()).square().mean()


def looked_up(rank: int, world_size: int, folder: Path) -> list[list[Any]]:
    """Losses and weights of three steps in memory, then on the disk; there, bytes read by forward and backward too."""
    cut_small()
    told = []
    for residency in (None, Residency(store=str(folder), weights="disk")):
        model = Tables()
        adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
        method = thinwire.SDP4Bit(embedding_rows="on")
        _, optimizer = thinwire.zero(model, adamw, method, residency=residency, announce=False)
        found: list[Any] = []
        for step in range(3):
            optimizer.synchronize()
            before = optimizer.tiers.snapshot() if optimizer.tiers is not None else None
            tokens = torch.randint(0, 4096, (2, 9), generator=torch.Generator().manual_seed(2 * step + rank))
            tokens[0, :3] = torch.tensor([0, 4095, 0])
            loss = model(tokens)
            loss.backward()
            if optimizer.tiers is not None and before is not None:
                assert 0 < (optimizer.tiers.snapshot() - before).read_bytes < 4096 * 64 * 4 // 2
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        with thinwire.whole(model), torch.no_grad():
            found += [param.clone() for param in model.parameters()]
        told.append(found)
        optimizer.close()
    return told


def test_an_embedding_on_the_disk_is_that_of_memory_and_only_its_rows_are_read(tmp_path: Path) -> None:
    for told in run_workers(looked_up, 2, tmp_path):
        for one, other in zip(*told, strict=True):
            assert torch.equal(one, other)
