"""Weights on a disk are read as rarely as can be, and ahead of their use; in another order, on demand."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.hosts.on_disk import cut_small
from tests.workers import run_workers
from thinwire import Residency
from thinwire.methods.memory import floor

LAYERS, WIDTH = 6, 32
LAYER_BYTES = 4 * WIDTH * WIDTH


class Ordered(nn.Module):
    """Layers of one size, used in any order."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        with torch.no_grad():
            for layer in self.layers:
                layer.get_parameter("weight").copy_(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5)

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for number in order:
            x = self.layers[number](x).tanh()
        return x.square().mean()


def read_by_order(rank: int, world_size: int, folder: Path, num_held: int) -> tuple[list[list[float]], list[int], int]:
    """Losses in memory and on the disk; bytes that each second micro-batch reads; when that many layers stayed."""
    cut_small(num_held)
    forward = list(range(LAYERS))
    orders = [forward, forward, forward, forward[::-1], [3, 1, 4, 1, 5, 2, 0], forward]
    losses, read, full = list[list[float]](), list[int](), 0
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    for residency in (None, Residency(store=str(folder), weights="disk", optimizer="memory")):
        model = Ordered()
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        _, optimizer = thinwire.zero(model, sgd, thinwire.Zero(), residency=residency, announce=False)
        held = None if optimizer._residence is None else optimizer._residence.replicas

        def read_so_far(held: Any = held, tiers: Any = optimizer.tiers) -> int:
            for spot in held.spots.values() if held is not None else ():
                spot.finish()
            return 0 if tiers is None else int(tiers.snapshot().read_bytes)

        found = []
        for order in orders:
            with optimizer.no_sync():
                model(x, order).backward()
            before = read_so_far()
            loss = model(x, order)
            loss.backward()
            found.append(float(loss.detach()))
            if held is not None:
                read.append(read_so_far() - before)
                full += sum(spot.is_here for spot in held.spots.values()) == num_held
                assert held.used_bytes <= held.capacity_bytes == num_held * LAYER_BYTES
            optimizer.step()
            optimizer.zero_grad()
        losses.append(found)
        optimizer.close()
    return losses, read, full


@pytest.mark.parametrize("num_held", [2, floor.NUM_UNBOUNDED])
def test_a_micro_batch_reads_the_minimum_and_any_order_is_served(tmp_path: Path, num_held: int) -> None:
    """Forward and backward over L layers with room for c of them read 2 (L - c), behind the first step."""
    ((memory, disk), read, full) = run_workers(read_by_order, 1, tmp_path, num_held)[0]
    assert memory == disk
    assert read[1] == read[2] == 2 * (LAYERS - num_held) * LAYER_BYTES
    # Another order may read what it had better not; never more than once for each use.
    assert all(num <= 2 * 7 * LAYER_BYTES for num in read[3:])
    assert full == len(read)


def ahead_of_a_held_disk(rank: int, world_size: int, folder: Path, room: int) -> list[tuple[int, list[int]]]:
    """Of each layer of a forward in which the disk stands still until the layer computes: its number, and the reads
    that were begun before."""
    cut_small()
    model, x = Ordered(), torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    residency = Residency(store=str(folder), weights="disk", optimizer="memory")
    _, optimizer = thinwire.zero(model, sgd, thinwire.Zero(), residency=residency, announce=False)
    held: Any = None if optimizer._residence is None else optimizer._residence.replicas
    held.capacity_bytes = room * LAYER_BYTES
    forward, numbers = list(range(LAYERS)), {bucket: number for number, bucket in enumerate(held.spots)}
    for _ in range(2):
        model(x, forward).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    stands, read, found = threading.Event(), held._read, list[tuple[int, list[int]]]()

    def held_read(bucket: Any, spot: Any) -> None:
        stands.wait()
        read(bucket, spot)

    def note(number: int) -> None:
        # What the layer itself waits for passes; all else waits for the next one.
        found.append((number, [numbers[b] for b, spot in held.spots.items() if spot.reading is not None]))
        stands.clear()

    held._read = held_read
    bring = held.bring

    def brought(*buckets: Any) -> None:
        stands.set()
        bring(*buckets)

    held.bring = brought
    for number, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda *_, number=number: note(number))
    with torch.no_grad():
        model(x, forward)
    stands.set()
    optimizer.close()
    return found


def test_reads_are_ahead_as_far_as_the_budget_allows(tmp_path: Path) -> None:
    """The disk moves only while a layer waits for it; with room for four layers three reads are begun behind each."""
    for room in (2, 4):
        (found,) = run_workers(ahead_of_a_held_disk, 1, tmp_path, room)
        assert [number for number, _ in found] == list(range(LAYERS))
        depths = [len([other for other in begun if other > number]) for number, begun in found]
        assert max(depths) == room - 1, found
