"""Weights on a disk are read as rarely as can be, and ahead of their use; in another order, on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
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

LAYERS, WIDTH = 6, 64
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


FORWARD, MOST_S = list(range(LAYERS)), 60.0


def made(method: Any, residency: Residency | None) -> tuple[Ordered, Any]:
    model = Ordered()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    _, optimizer = thinwire.zero(model, sgd, method, residency=residency, local_size=1, overlap=True, announce=False)
    return model, optimizer


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))


def stepped(model: Ordered, optimizer: Any, x: Tensor, order: list[int]) -> float:
    loss = model(x, order)
    loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def replica_of(optimizer: Any) -> dict[str, Tensor]:
    pieces = optimizer.snapshot().pieces
    return {name: pieces[name].values.clone() for name in sorted(pieces) if name.startswith("replica/")}


def readers(rank: int, model: Ordered, optimizer: Any, told: list[Any]) -> Iterator[Any]:
    """What is read of weights whose updates wait, by all who may read them. told: how many wait before each."""

    def waiting() -> None:
        held = None if optimizer._residence is None else optimizer._residence.replicas
        told.append(held and sum(spot.update is not None for spot in held.spots.values()))

    def weights() -> list[Tensor]:
        with thinwire.whole(model):
            return [param.detach().clone() for param in model.parameters()]

    for step in range(3):
        waiting()
        yield stepped(model, optimizer, batch_of(rank, step), FORWARD)
    waiting()
    # What waits of the last layer is added before its next update is sent, though no forward has used it.
    for step in (3, 4):
        yield stepped(model, optimizer, batch_of(rank, step), FORWARD[:-1])
    waiting()
    yield weights()
    yield stepped(model, optimizer, batch_of(rank, 5), FORWARD)
    waiting()
    yield replica_of(optimizer)
    yield stepped(model, optimizer, batch_of(rank, 6), FORWARD)
    yield stepped(model, optimizer, batch_of(rank, 7) * float("nan"), FORWARD[:3])
    waiting()
    with torch.inference_mode():
        yield float(model(batch_of(rank, 8), FORWARD))
    yield stepped(model, optimizer, batch_of(rank, 9), FORWARD)
    waiting()
    with thinwire.whole(model.layers[2]):
        model.layers[2].get_parameter("weight").data.mul_(0.5)
    yield stepped(model, optimizer, batch_of(rank, 10), FORWARD)
    waiting()
    optimizer.check_replicas()
    yield stepped(model, optimizer, batch_of(rank, 11), FORWARD)
    waiting()
    yield weights()


def read_while_updates_wait(rank: int, world_size: int, folder: Path) -> tuple[list[Any], ...]:
    """What memory and the disk show to each reader, and how many updates wait before each on the disk."""
    cut_small()
    shown, told = [], list[Any]()
    for residency in (None, Residency(store=str(folder), weights="disk", gradients="disk", sub_group=1024)):
        told.clear()
        model, optimizer = made(thinwire.SDP4Bit(), residency)
        shown.append(list(readers(rank, model, optimizer, told)))
        optimizer.close()
    return (*shown, told)


def test_whoever_reads_weights_sees_them_behind_an_update_that_waits(tmp_path: Path) -> None:
    for memory, disk, told in run_workers(read_while_updates_wait, 2, tmp_path):
        for number, (one, other) in enumerate(zip(memory, disk, strict=True)):
            torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True, msg=f"reader {number}")
        # Of a step that was skipped, behind a forward over three layers, those of the others wait still.
        assert told == [0, LAYERS, LAYERS, LAYERS, LAYERS, LAYERS, 3, LAYERS, LAYERS, LAYERS]


def moved_by_steps(rank: int, world_size: int, folder: Path) -> dict[str, list[tuple[int, int]]]:
    """Bytes that each step reads and writes: an update that overwrites weights, one that waits, one that can't."""
    cut_small(2)
    ways = {"zero": (thinwire.Zero(), 1.0), "waits": (thinwire.SDP4Bit(), 1.0), "half": (thinwire.SDP4Bit(), 0.5)}
    told = {}
    for name, (method, share) in ways.items():
        model, optimizer = made(method, Residency(store=str(folder), weights="disk", optimizer="memory"))
        held = optimizer._residence.replicas
        if share < 1:
            held.defer_within(int(share * sum(bucket.layout.update_bytes for bucket in held.deferrable)))
        found = []
        for step in range(5):
            before = optimizer.tiers.snapshot()
            stepped(model, optimizer, batch_of(rank, step), FORWARD)
            for spot in held.spots.values():
                spot.finish()
            moved = optimizer.tiers.snapshot() - before
            found.append((moved.read_bytes, moved.written_bytes))
        told[name] = found
        optimizer.close()
    return told


def test_an_update_reads_no_weights_that_it_overwrites_and_few_to_which_it_adds(tmp_path: Path) -> None:
    """Of L layers with room for c, forward and backward read 2 (L - c); an update that waits (L - c) / 2 on two ranks.

    One that overwrites weights needs the room while one layer is sent and the next one made, so one less stays.
    """
    for told in run_workers(moved_by_steps, 2, tmp_path):
        away = (LAYERS - 2) * LAYER_BYTES
        assert told["waits"][2:] == [(2 * away + away // 2, LAYERS * LAYER_BYTES)] * 3
        assert told["zero"][2:] == [(2 * (away + LAYER_BYTES), LAYERS * LAYER_BYTES)] * 3
        assert all(2.5 * away < read <= 3.5 * away for read, _ in told["half"][2:]), told


def ahead_of_messages(rank: int, world_size: int, folder: Path) -> list[float]:
    """Two steps; of the first one, a rank sends its update when the other one's step has returned."""
    cut_small()
    model, optimizer = made(thinwire.SDP4Bit(), Residency(store=str(folder / "store"), weights="disk"))
    losses, passed, end = [], folder / "passed", time.monotonic() + MOST_S
    for step in range(2):
        loss = model(batch_of(rank, step), FORWARD)
        loss.backward()
        optimizer.reduce()
        while rank == 1 and not passed.exists():
            assert time.monotonic() < end, "a step waits for the updates of other ranks"
            time.sleep(0.01)
        optimizer.step()
        passed.touch()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    optimizer.close()
    return losses


def test_a_step_does_not_wait_for_updates_of_other_ranks(tmp_path: Path) -> None:
    assert len(run_workers(ahead_of_messages, 2, tmp_path)[0]) == 2
