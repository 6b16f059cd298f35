"""Rows to every rank, and the lane of urgent jobs, on real processes."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from tests.workers import run_workers
from thinwire.codecs import Codec
from thinwire.collectives import Communicator
from thinwire.collectives.all_to_all import NUMBER_BYTES, Room, RowCodec, all_to_all_counted, rows_bytes
from thinwire.collectives.communicator import NUM_SLOTS
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Awaited, Rounds

WIDTH = 64
# Rows from rank i to rank j; rank 3 has none at all.
COUNTS = [[2, 0, 5, 3], [1, 4, 1, 1], [0, 0, 0, 3], [0, 0, 0, 0]]
CODECS = {"exact": None, "int8": "int8/64:nearest", "int4": "int4/32"}


def block(source: int, target: int) -> Tensor:
    """The rows from one rank to another, numbered over all ranks."""
    draw = torch.Generator().manual_seed(10 * source + target)
    return torch.randn(COUNTS[source][target], WIDTH, generator=draw, dtype=torch.float64).float()


def numbers_of(source: int, target: int) -> list[int]:
    """Of the rows from one rank to another, in no order."""
    return [(1000003 * source + 70001 * target - 7919 * i) % (1 << 32) for i in range(COUNTS[source][target])]


def send_rows(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rows = torch.cat([block(rank, target) for target in range(world_size)])
    numbers = torch.tensor([number for target in range(world_size) for number in numbers_of(rank, target)]).long()
    how: Any = {"numbers": numbers, "rounds_own": True}
    for local_size, checked in ((4, False), (2, True)):
        comm = Communicator(local_size=local_size, checked=checked)
        for name, text in CODECS.items():
            codec = Codec.parse(text) if text else None
            receives = [COUNTS[source][rank] for source in range(world_size)]
            before = comm.meter.snapshot().sent_by("all_to_all")
            got = comm.wait(comm.all_to_all_rows(rows, COUNTS[rank], receives, codec, seed=3, **how))
            sent = comm.meter.snapshot().sent_by("all_to_all") - before
            found[f"{local_size} {name} known"] = got, receives, sent
            room, notes = Room(), torch.arange(8).view(4, 2) + 100 * rank
            # The second time there is room for all in the first message; the third time for all but the last rank's.
            for case in ("first", "second", "third"):
                if case == "third" and rank == 3:
                    room.of[0] = 1
                if case == "third" and rank == 0:
                    room.to[3] = 1

                def job(link: Link, codec: Any = codec, notes: Tensor = notes, room: Room = room) -> Rounds[Any]:
                    coded = RowCodec(WIDTH, rows.dtype, codec, 3, tells=True)
                    return all_to_all_counted(link, rows, COUNTS[rank], notes, room, coded, **how)

                before = comm.meter.snapshot().sent_by("all_to_all")
                got, their_numbers, came, told = comm.wait(comm.submit(job, urgent=True))
                sent = comm.meter.snapshot().sent_by("all_to_all") - before
                assert told.tolist() == [[100 * r + 2 * rank, 100 * r + 2 * rank + 1] for r in range(4)]
                assert their_numbers.tolist() == [n for source in range(world_size) for n in numbers_of(source, rank)]
                found[f"{local_size} {name} {case}"] = got, came, sent
        levels = {level for _, level in comm.meter.snapshot().operations}
        assert levels == ({"intra"} if local_size == 4 else {"intra", "inter"})
        comm.close()
    wide = Communicator(local_size=4)
    doubles = torch.arange(2.0 * world_size, dtype=torch.float64).view(-1, 1) + 100 * rank
    found["doubles"] = wide.wait(wide.all_to_all_rows(doubles, [2] * 4, [2] * 4))
    wide.close()
    return found


def test_every_row_arrives_with_its_own_rounding_and_its_bytes() -> None:
    for rank, found in enumerate(run_workers(send_rows, 4, local_size=4)):
        doubles = found.pop("doubles")
        assert doubles.flatten().tolist() == [100 * r + 2 * rank + i for r in range(4) for i in range(2)]
        for case, (got, came, sent) in found.items():
            _, name, known = case.split()
            text = CODECS[name]
            codec = Codec.parse(text) if text else None
            parts = []
            for source in range(4):
                part = block(source, rank)
                if codec is not None and len(part):
                    # Row by row, as on any other number of ranks.
                    rounded = [
                        codec.decode(codec.encode(row, seed=3, counter=number * WIDTH), WIDTH)
                        for number, row in zip(numbers_of(source, rank), part, strict=True)
                    ]
                    part = torch.stack(rounded)
                parts.append(part)
            assert came == [COUNTS[source][rank] for source in range(4)], case
            assert torch.equal(got, torch.cat(parts)), case
            sizes = [n for target, n in enumerate(COUNTS[rank]) if target != rank]
            heads = 0 if known == "known" else 3 * 3 * NUMBER_BYTES
            tells = known != "known"
            assert sent == heads + sum(rows_bytes(n, WIDTH, torch.float32, codec, tells=tells) for n in sizes if n), (
                case
            )


class Gate:
    """Work that ends when it is told."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def wait(self) -> None:
        assert self.opened.wait(60)


def pass_gates(rank: int, world_size: int) -> list[float]:
    """All slots of gradients are taken on rank 0 alone, which then waits for what is urgent."""
    comm, gate = Communicator(local_size=2), Gate()

    def stuck(link: Link) -> Rounds[None]:
        if rank == 0:
            awaited: Awaited = gate
            yield [awaited]

    gradients = [comm.submit(stuck) for _ in range(NUM_SLOTS + 1)]
    rows = torch.tensor([[float(rank)], [10.0 + rank]])
    got = comm.wait(comm.all_to_all_rows(rows, [1, 1], [1, 1]))
    if rank == 0:
        assert not any(future.done() for future in gradients)
    gate.opened.set()
    for future in gradients:
        comm.wait(future)
    comm.close()
    return got.flatten().tolist()


def test_urgent_rows_do_not_wait_behind_gradients() -> None:
    assert run_workers(pass_gates, 2) == [[0.0, 1.0], [10.0, 11.0]]
