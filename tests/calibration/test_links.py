"""How links and work are measured."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.workers import run_workers
from thinwire.calibration import calibrate, growth, links, machine
from thinwire.calibration.growth import bucket_of, grown
from thinwire.calibration.links import measured_rates, probed, rounds_of_pairs, rounds_on, shared_rates
from thinwire.calibration.machine import fitted
from thinwire.calibration.work import NUM_REPEATS, probes
from thinwire.collectives import Communicator, Topology
from thinwire.cost import Cores, Machine, Network
from thinwire.device import Device
from thinwire.errors import ConfigError
from thinwire.launch.calibrate import lines_on
from thinwire.models.llama import PRESETS, LlamaConfig


@pytest.mark.parametrize("num", range(2, 9))
def test_rounds_hold_each_pair_once_and_no_rank_twice(num: int) -> None:
    rounds = rounds_of_pairs(num)
    assert len(rounds) == num - 1 + num % 2
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(num), 2))
    for pairs in rounds:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)


def test_a_token_bucket_is_found_and_noise_makes_no_link_faster() -> None:
    rate, burst_s, delay_s = 1e6, 0.02, 0.003

    def took(num_bytes: float) -> float:
        return delay_s + num_bytes / rate - burst_s

    assert bucket_of(2e5, took(2e5), took(4e5), delay_s) == pytest.approx((rate, burst_s))
    # A first message that was held up by something else.
    assert bucket_of(2e5, 0.39, 0.4, 0.0)[0] == pytest.approx(1e6)


def test_a_short_message_that_was_held_up_is_not_taken_for_a_long_one() -> None:
    rate, burst_bytes, delay_s = 2.5e6, 1 << 17, 0.003
    held_up_s = [0.3]

    def probe(sizes: dict[str, int]) -> dict[str, float]:
        more_s = held_up_s.pop() if held_up_s else 0.0
        return {link: delay_s + more_s + max(0, num - burst_bytes) / rate for link, num in sizes.items()}

    sizes, once_s = grown(probe, {"slow": delay_s})
    assert once_s["slow"] == probe(sizes)["slow"] > growth.PROBE_S
    twice_s = probe({"slow": 2 * sizes["slow"]})["slow"]
    assert bucket_of(sizes["slow"], once_s["slow"], twice_s, delay_s)[0] == pytest.approx(rate)


def test_no_round_uses_a_link_of_a_node_twice() -> None:
    grid = Topology(4, 2)
    rounds = list(rounds_on(grid))
    assert len(rounds) == 3 + 1
    for pairs in rounds:
        nodes = [grid.node(rank) for a, b in pairs for rank in {grid.rank(grid.node(each), 0) for each in (a, b)}]
        assert len(nodes) == len(set(nodes))
    # A ring of nodes takes two rounds, and ranks inside nodes that send nothing take none.
    ring = {(2 * node, (2 * node + 3) % 8) for node in range(4)}
    assert [len(pairs) for pairs in rounds_on(grid, ring)] == [2, 2]
    assert list(rounds_on(grid, {(5, 4)})) == [[(4, 5)]]


class Ranks:
    """What stands for a communicator where `_swap` is replaced."""

    def __init__(self, world_size: int, local_size: int = 1) -> None:
        self.world_size, self.topology = world_size, Topology(world_size // local_size, local_size)


def test_links_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {(0, 1): 4e6, (1, 0): 2e6, (0, 2): 1e6, (2, 0): 1e6, (1, 2): 8e6, (2, 1): 8e6}

    def swap(comm: Any, peer: dict[int, int], num_bytes: dict[int, int]) -> torch.Tensor:
        took = [num_bytes[rank] / rates[peer[rank], rank] if rank in peer else 0.0 for rank in range(3)]
        return torch.tensor(took, dtype=torch.float64)

    monkeypatch.setattr(links, "_swap", swap)
    ranks: Any = Ranks(3)
    found = measured_rates(ranks)
    for (a, b), rate in rates.items():
        assert found.rates[a][b] == pytest.approx(rate, rel=1e-3)
    assert found.burst_s == pytest.approx(0.0, abs=1e-6)
    some = measured_rates(ranks, {(2, 1)})
    assert some.rates[1][2] == pytest.approx(8e6) and some.rates[0][1] == float("inf")


def test_what_is_left_while_all_send_is_that_of_the_best_of_some_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three messages leave each node over a link of 10 MB/s; packets that are lost make most tries slower."""
    late, own_s = iter([2.0, 1.25, 5.0, 2.0]), torch.full((4,), 0.01, dtype=torch.float64)
    sent = 0

    def spread(comm: Any, packet: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal sent
        sent = packet.numel()
        return torch.tensor([1.0, 1.0, 1.0, next(late)], dtype=torch.float64) * 3 * sent / 1e7, own_s

    monkeypatch.setattr(links, "_spread_s", spread)
    ranks: Any = Ranks(4)
    share, carried = shared_rates(ranks, Network.even(4, 1e7))
    assert share == pytest.approx(1 / 1.25) and carried == pytest.approx(6 * sent / 0.01)


def test_a_long_way_is_no_slow_link_and_a_nodes_ranks_share_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links of 10 MB/s with a delay of 0.2 s, between nodes with a burst of 0.02 s.

    Every other message to rank 0 takes 10% longer.
    """
    probes = itertools.count()

    def swap(comm: Any, peer: dict[int, int], num_bytes: dict[int, int]) -> torch.Tensor:
        crossing = [rank for rank in peer if rank // 2 != peer[rank] // 2]
        uplinks = [rank // 2 for rank in crossing]
        shared = max(map(uplinks.count, uplinks), default=1)
        late = 1.1 if next(probes) % 2 else 1.0
        took = [num_bytes.get(rank, 0) * shared * (late if rank == 0 else 1.0) / 1e7 for rank in range(4)]
        took = [0.2 + max(0.0, each_s - (0.02 if rank in crossing else 0.0)) for rank, each_s in enumerate(took)]
        return torch.tensor(took, dtype=torch.float64)

    monkeypatch.setattr(links, "_swap", swap)
    ranks: Any = Ranks(4, 2)
    found, scatter = probed(ranks)
    for a, b in found.pairs:
        assert found.rates[a][b] == pytest.approx(1e7, rel=1e-3), (a, b)
        assert found.delays_s[a][b] == pytest.approx(0.2, rel=1e-3)
        # Of the link to rank 0's node, and of that inside it.
        is_late = b == 0 or (b == 1 and a > 1)
        assert scatter[a][b] == pytest.approx(0.05 if is_late else 0.0, abs=0.03)
    # Four of the six links that were probed lie inside a node, and have no burst.
    assert found.nodes == (0, 0, 1, 1) and found.burst_s == pytest.approx(0.02, rel=0.01)
    # So they do where a run takes each rank for a node of its own, and is told the machines.
    flat: Any = Ranks(4)
    told = measured_rates(flat, grid=Topology(2, 2))
    assert told.nodes == found.nodes and told.rates[1][2] == pytest.approx(1e7, rel=1e-3)
    assert measured_rates(flat).rates[1][2] == pytest.approx(5e6, rel=0.05)


def test_a_pass_is_its_operations_and_a_launch() -> None:
    layers = {"layer 8 fp32": (4e9, 0.41), "launch 8 fp32": (1e9, 0.11)}
    assert fitted(layers) == pytest.approx({"layer 8 fp32": 1e10, "launch 8 fp32": 100.0})
    # Noise: a short pass that was slower than the long one.
    noisy = fitted({"layer 8 fp32": (4e9, 0.4), "launch 8 fp32": (1e9, 0.5)})
    assert 1e10 <= noisy["layer 8 fp32"] <= 2e10 and noisy["launch 8 fp32"] > 0
    # No time is left for a launch, and no number is told of one.
    unseen = fitted({"layer 8 fp32": (4e9, 0.4), "launch 8 fp32": (1e9, 0.1)})
    made = Machine(("a",), Network.even(1, 1.0, 0.0), Cores((0,), (1.0,)), unseen)
    assert any(line.split() == ["launch", "8", "fp32", "not", "seen"] for line in lines_on(made))


def test_arguments_that_can_not_be_measured_are_refused() -> None:
    """Before anything is sent: there is no communicator."""
    with pytest.raises(ConfigError) as error:
        calibrate(None, layers=["demo"], dtypes=["fp12"], codecs=["itn4"], folder="/none", longest_s=math.nan)  # type: ignore[arg-type, list-item]
    told = str(error.value)
    for part in (
        "PRESETS['demo']",
        "dtypes fp12: must be fp32 or bf16; did you mean",
        "itn4",
        "/none",
        "longest_s nan",
    ):
        assert part in told
    for more, part in (
        ({"layers": []}, "layers: none"),
        ({"dtypes": []}, r"dtypes \[\]"),
        ({"dtypes": "bf16"}, "'bf16'"),
    ):
        with pytest.raises(ConfigError, match=part):
            calibrate(None, **more)  # type: ignore[arg-type]


def test_a_pass_is_not_free_where_long_passes_are_slower() -> None:
    """One layer of tiny: 0.75 ms and its operations, which a long pass of 14.15 ms does more slowly."""
    config = replace(PRESETS["tiny"], num_hidden_layers=1, vocab_size=256)
    long, short = probes([config], ["fp32"], [], Device())[:2]
    took_s = (14.15e-3, 0.75e-3 + short.amount / 7e10)
    found = fitted({probe.kind: (probe.amount, each_s) for probe, each_s in zip((long, short), took_s, strict=True)})
    assert 1 / found["launch 64 fp32"] == pytest.approx(0.75e-3, rel=0.2)
    assert found["layer 64 fp32"] == pytest.approx(long.amount / took_s[0], rel=0.1)


def measured(rank: int, world_size: int, folder: str) -> str:
    growth.LARGEST_BYTES = links.LARGEST_BYTES = 1 << 18
    machine.DISK_BYTES = 1 << 20
    comm = Communicator(local_size=1)
    layer = LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    alone, said = machine._alone, list[str]()
    machine._alone = lambda *args: (*alone(*args)[:2], 0.24)
    made = calibrate(comm, layers=[layer], codecs=["int4/64"], folder=folder, say=said.append)
    assert any("warning: other programs kept the cores busy" in line and "24%" in line for line in said)
    return made.to_json()


def test_all_ranks_have_the_same_machine(tmp_path: Any) -> None:
    first, second = run_workers(measured, 2, str(tmp_path))
    assert first.split('"measured_at"')[0] == second.split('"measured_at"')[0]
    found = Machine.from_json(first)
    assert found.network.nodes == (0, 1) and found.cores.hosts == (0, 0)
    assert {"layer 16 fp32", "launch 16 fp32", "encode int4/64", "decode int4/64", "copy"} <= found.rates.keys()
    assert 0 < found.share <= 1 and found.base_bytes > 1e6 and min(found.disk) > 0
    assert not list(tmp_path.iterdir())
    assert len(found.scatter) == 2 and found.scatter[0][1] >= 0 and found.part([1]).scatter == ((0.0,),)
    assert found.core_share == 0.24
    assert found.repeats["copy"] == found.repeats["encode int4/64"] == NUM_REPEATS
    assert found.device == "cpu" and "two probes of a link differ by" in "\n".join(lines_on(found))
    assert [line for line in lines_on(found) if "from (row)" in line] == [
        "Mbit/s from (row) to (column):", "ms of delay from (row) to (column):",
    ]  # fmt: skip
    assert not any("from (row)" in line for line in lines_on(found.part([0])))
