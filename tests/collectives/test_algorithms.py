"""Collectives on real processes, held to sums and copies computed from all ranks' inputs in one place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from tests.workers import run_workers
from thinwire.codecs import Hadamard, Identity, Integer
from thinwire.collectives import Communicator, Topology, gather
from thinwire.collectives.feedback import Lost
from thinwire.collectives.link import Link
from thinwire.collectives.reduce import all_reduce, slice_length
from thinwire.collectives.rounds import Rounds
from thinwire.errors import ConfigError

# World sizes, and the ranks per node to try there.
GRIDS = {1: (1,), 2: (1, 2), 4: (1, 2, 4)}


def rank_input(rank: int, num_elements: int) -> torch.Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(100 + rank))


def on_grids(rank: int, world_size: int, function: Callable, local_sizes: Sequence[int], *args: Any) -> list[Any]:
    """One grid after the other in the same processes."""
    return [function(rank, world_size, local_size, *args) for local_size in local_sizes]


def by_grid(function: Callable, world_size: int, local_sizes: Sequence[int], *args: Any) -> list[tuple[int, list[Any]]]:
    """The ranks' results for every number of ranks per node."""
    told = run_workers(on_grids, world_size, function, local_sizes, *args)
    return list(zip(local_sizes, map(list, zip(*told, strict=True)), strict=True))


def all_operations(rank: int, world_size: int, local_size: int, checked: bool) -> dict:
    comm = Communicator(local_size=local_size, checked=checked)
    num_elements = 32 * world_size
    x = rank_input(rank, num_elements)
    kept = x.clone()
    scattered = comm.wait(comm.reduce_scatter(x, Identity()))
    gathered = comm.wait(comm.all_gather(scattered, Identity()))
    reduced = comm.wait(comm.all_reduce(x[:37], Identity()))
    sent_to_all = torch.full((5,), float(rank), dtype=torch.float64)
    source = world_size - 1
    comm.wait(comm.broadcast_(sent_to_all, source))
    exact = comm.wait(comm.all_gather_exact(torch.tensor([[rank, 7]])))
    comm.barrier()
    comm.close()
    assert torch.equal(x, kept), "an input was written"
    return {
        "scattered": scattered,
        "gathered": gathered,
        "reduced": reduced,
        "broadcast": sent_to_all,
        "exact": exact,
    }


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("world_size", GRIDS)
def test_exact_codec_equals_plain_sums(world_size: int, checked: bool) -> None:
    inputs = torch.stack([rank_input(rank, 32 * world_size) for rank in range(world_size)])
    total = inputs.sum(0)
    for local_size, results in by_grid(all_operations, world_size, GRIDS[world_size], checked):
        for rank, result in enumerate(results):
            expected = {"scattered": total.view(world_size, 32)[rank], "gathered": total.view(world_size, 32)}
            expected["reduced"] = inputs[:, :37].sum(0)
            for key, values in expected.items():
                found = result[key].view(values.shape)
                torch.testing.assert_close(found, values, rtol=1e-6, atol=1e-6, msg=f"{key}, {local_size} a node")
            assert torch.equal(result["gathered"], results[0]["gathered"])
            assert torch.equal(result["reduced"], results[0]["reduced"])
            assert torch.equal(result["broadcast"], torch.full((5,), world_size - 1.0, dtype=torch.float64))
            assert result["exact"].tolist() == [[[r, 7]] for r in range(world_size)]


def rank_coded(rank: int, world_size: int, local_size: int) -> torch.Tensor:
    """Slice j holds 1000 * j + rank + 1: the sum tells which slice arrived and that every rank was in it once.

    Returns all slices, gathered at once and in turns.
    """
    comm = Communicator(local_size=local_size)
    x = torch.arange(world_size).repeat_interleave(32) * 1000.0 + rank + 1
    total = comm.wait(comm.reduce_scatter(x, Identity()))
    at_once = comm.wait(comm.all_gather(total, Identity()))
    usual, gather.LARGE_BYTES = gather.LARGE_BYTES, 1
    packet = total.view(torch.uint8)
    gathered = comm.wait(comm.submit(lambda link: gather.all_gather_packets(link, packet, in_turns=True))).clone()
    in_turns = gathered.transpose(0, 1).reshape(world_size, -1).view(torch.float32)
    gather.LARGE_BYTES = usual
    comm.close()
    assert torch.equal(at_once.view(world_size, -1), in_turns)
    return in_turns


@pytest.mark.parametrize(("world_size", "local_sizes"), [(4, (1, 2)), (6, (1, 2, 3)), (8, (1, 2, 4))])
def test_slice_j_goes_to_rank_j(world_size: int, local_sizes: tuple[int, ...]) -> None:
    for local_size, results in by_grid(rank_coded, world_size, local_sizes):
        expected = torch.arange(world_size)[:, None].expand(-1, 32) * world_size * 1000.0 + sum(
            range(1, world_size + 1)
        )
        for result in results:
            assert torch.equal(result, expected), f"{local_size} a node"


def reopen(rank: int, world_size: int) -> list[float]:
    sums = []
    for round_ in range(3):
        comm = Communicator(local_size=1 + round_ % 2)
        sums.append(float(comm.wait(comm.all_reduce(torch.tensor([1.0 + rank]), Identity()))))
        comm.close()
    return sums


def test_a_closed_communicator_can_be_followed_by_another() -> None:
    assert run_workers(reopen, 2) == [[3.0] * 3] * 2


def compressed(rank: int, world_size: int, local_size: int) -> tuple:
    comm = Communicator(local_size=local_size)
    num_elements = 1 << 16
    intra, inter = Hadamard(Integer(bits=8, group=128)), Hadamard(Integer(bits=4, group=128))
    before = comm.meter.snapshot()
    shard = comm.wait(comm.reduce_scatter(rank_input(rank, num_elements), intra, inter, seed=5))
    middle = comm.meter.snapshot()
    full = comm.wait(comm.all_gather(shard, Integer(bits=4, group=2048), seed=6))
    after = comm.meter.snapshot()
    comm.close()
    return shard, full, middle - before, after - middle


@pytest.mark.parametrize(("world_size", "errors"), [(4, {1: 0.2, 2: 0.2, 4: 0.02}), (2, {1: 0.2})])
def test_bytes_and_error_of_the_compressed_sum(world_size: int, errors: dict[int, float]) -> None:
    total = torch.stack([rank_input(rank, 1 << 16) for rank in range(world_size)]).sum(0)
    for local_size, results in by_grid(compressed, world_size, tuple(errors)):
        shards = torch.cat([result[0] for result in results])
        assert (shards - total).norm() / total.norm() < errors[local_size]
        check_bytes(results, world_size, local_size)


def check_bytes(results: list[tuple], world_size: int, local_size: int) -> None:
    """What each rank counted is what the codecs promise, hop by hop."""
    n, nodes = 1 << 16, world_size // local_size
    hop_intra = n * (local_size - 1) / local_size * 8.25 / 8
    hop_inter = n / local_size * (nodes - 1) / nodes * 4.25 / 8
    gather = n * (world_size - 1) / world_size * (4 + 32 / 2048) / 8
    for _, full, reduce_reading, gather_reading in results:
        assert torch.equal(full, results[0][1]), "replicas differ"
        assert reduce_reading.sent_bytes == hop_intra + hop_inter
        assert reduce_reading.received_bytes == hop_intra + hop_inter
        assert gather_reading.sent_bytes == gather
        by_level = {level: op.sent_bytes for (_, level), op in reduce_reading.operations.items()}
        assert by_level.get("intra", 0) == hop_intra
        assert by_level.get("inter", 0) == hop_inter


def repeated(rank: int, world_size: int) -> list[torch.Tensor]:
    comm = Communicator(local_size=2)
    x = rank_input(rank, 1 << 12)
    inputs = [(Integer(bits=8, group=32), Integer(bits=4, group=32)), (Identity(), Hadamard(Integer(bits=4)))]
    return [
        comm.wait(comm.reduce_scatter(x, intra, inter, seed=seed))
        for seed, (intra, inter) in itertools.product([1, 1, 2], inputs)
    ]


def test_same_seed_same_bits() -> None:
    for first, mixed_first, again, mixed_again, other, mixed_other in run_workers(repeated, 4):
        assert torch.equal(first, again)
        assert torch.equal(mixed_first, mixed_again)
        assert not torch.equal(first, other)
        assert not torch.equal(mixed_first, mixed_other)


def test_group_of_one_needs_no_process_group() -> None:
    comm = Communicator()
    x = torch.randn(100)
    assert torch.equal(comm.wait(comm.reduce_scatter(x, Integer(bits=4))), x)
    assert torch.equal(comm.wait(comm.all_reduce(x, Integer(bits=4))), x)
    assert comm.meter.snapshot().sent_bytes == 0


def refuse_uneven(rank: int, world_size: int) -> list[str]:
    messages = []
    with pytest.raises(ConfigError) as caught:
        Communicator(local_size=3)
    messages.append(str(caught.value))
    comm = Communicator(local_size=1)
    with pytest.raises(ConfigError) as caught:
        comm.reduce_scatter(torch.zeros(130), Integer(bits=4, group=128))
    return [*messages, str(caught.value)]


def test_misfits_are_refused_with_the_nearest_fit() -> None:
    for grid, slices in run_workers(refuse_uneven, 2):
        assert "local size 3" in grid
        assert "nearest that does: 2" in grid
        assert "pad to 256" in slices


def feed_back(rank: int, world_size: int, local_size: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Totals of five sums with codecs of 2 and 3 bits, and this rank's residual after them."""
    comm = Communicator(local_size=local_size)
    fine, coarse = Integer(3, 16, "nearest"), Integer(2, 8, "nearest")
    lost = Lost.zeros(comm.topology, slice_length(100, world_size, fine, coarse))
    totals = []
    for step in range(5):
        job = partial(all_reduce, x=own_input(rank, step), intra=fine, inter=coarse, gather=coarse, lost=lost)
        totals.append(comm.wait(comm.submit(job)))
    residual = lost.by_slices(comm.topology, rank).view(-1)[:100]
    comm.close()
    return totals, residual


def own_input(rank: int, step: int) -> torch.Tensor:
    return torch.randn(100, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize(("world_size", "local_sizes"), [(2, (1, 2)), (4, (2,))])
def test_what_a_sum_loses_comes_back(world_size: int, local_sizes: tuple[int, ...]) -> None:
    put_in = sum(own_input(rank, step) for rank in range(world_size) for step in range(5))
    for _, told in by_grid(feed_back, world_size, local_sizes):
        came_out, residual = sum(told[0][0]), sum(one[1] for one in told)
        assert float(residual.norm()) > 1
        torch.testing.assert_close(came_out + residual, put_in, rtol=0, atol=1e-4)
        assert all(torch.equal(a, b) for one in told for a, b in zip(one[0], told[0][0], strict=True))


def in_three_rounds(link: Link) -> Rounds[torch.Tensor]:
    """Pass bytes to and fro, each message made of the one before."""
    peer, passed = 1 - link.rank, torch.full((4,), link.rank, dtype=torch.uint8)
    for _ in range(3):
        arrived = torch.empty(4, dtype=torch.uint8)
        round_ = link.exchange("to and fro", "inter", {peer: arrived})
        round_.send(peer, passed)
        yield from round_.finish()
        passed = arrived + 1
    return passed


def ahead_of_the_other(rank: int, world_size: int) -> list[int]:
    comm = Communicator(local_size=1)
    first = comm.submit(in_three_rounds)
    if rank == 1:
        comm.wait(first)
    second = comm.submit(in_three_rounds)
    return [int(comm.wait(future)[0]) for future in (first, second)]


def test_a_rank_may_submit_more_before_the_other_has_its_result() -> None:
    assert run_workers(ahead_of_the_other, 2) == [[4, 4], [3, 3]]


def test_the_grid_of_some_ranks_has_as_many_ranks_and_is_flat_where_nodes_hold_unequal_numbers() -> None:
    for world_size, local_size, ranks in itertools.product((6, 12), (1, 2, 3, 4), (1, 2, 3, 4, 6)):
        grid = Topology(world_size // local_size, local_size)
        for first in range(0, grid.world_size - ranks + 1, ranks):
            assert grid.subgroup(range(first, first + ranks)).world_size == ranks
    two, three = Topology(3, 2), Topology(4, 3)
    assert [two.subgroup(each) for each in ([0, 1, 2], [3, 4, 5])] == [Topology(3, 1)] * 2
    assert three.subgroup(range(4)) == Topology(4, 1)
    assert two.subgroup([2, 3, 4, 5]) == Topology(2, 2)
    assert two.subgroup([0, 2, 1, 3]) == Topology(4, 1)
