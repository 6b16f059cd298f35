"""How links and work are measured."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.workers import run_workers
from thinwire.calibration import calibrate, links, machine
from thinwire.calibration.links import bucket_of, measured_rates, rounds_of_pairs
from thinwire.calibration.machine import fitted
from thinwire.collectives import Communicator
from thinwire.cost import Machine
from thinwire.models.llama import LlamaConfig


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


def test_links_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {(0, 1): 4e6, (1, 0): 2e6, (0, 2): 1e6, (2, 0): 1e6, (1, 2): 8e6, (2, 1): 8e6}

    def swap(comm: Any, peer: dict[int, int], num_bytes: dict[int, int]) -> torch.Tensor:
        took = [num_bytes[rank] / rates[peer[rank], rank] if rank in peer else 0.0 for rank in range(3)]
        return torch.tensor(took, dtype=torch.float64)

    monkeypatch.setattr(links, "_swap", swap)

    class Ranks:
        world_size = 3

        class topology:
            node = staticmethod(lambda rank: rank)

    ranks: Any = Ranks()
    found = measured_rates(ranks)
    for (a, b), rate in rates.items():
        assert found.rates[a][b] == pytest.approx(rate, rel=1e-3)
    assert found.burst_s == pytest.approx(0.0, abs=1e-6)


def test_a_pass_is_its_operations_and_a_launch() -> None:
    layers = {"layer 8 fp32": (4e9, 0.41), "launch 8 fp32": (1e9, 0.11)}
    assert fitted(layers) == pytest.approx({"layer 8 fp32": 1e10, "launch 8 fp32": 100.0})
    # Noise: a short pass that was slower than the long one.
    noisy = fitted({"layer 8 fp32": (4e9, 0.4), "launch 8 fp32": (1e9, 0.5)})
    assert 1e10 <= noisy["layer 8 fp32"] <= 2e10 and noisy["launch 8 fp32"] > 0


def measured(rank: int, world_size: int, folder: str) -> str:
    links.LARGEST_BYTES, machine.DISK_BYTES = 1 << 18, 1 << 20
    comm = Communicator(local_size=1)
    layer = LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    return calibrate(comm, layers=[layer], codecs=["int4/64"], folder=folder).to_json()


def test_all_ranks_have_the_same_machine(tmp_path: Any) -> None:
    first, second = run_workers(measured, 2, str(tmp_path))
    assert first.split('"measured_at"')[0] == second.split('"measured_at"')[0]
    found = Machine.from_json(first)
    assert found.network.nodes == (0, 1) and found.cores.hosts == (0, 0)
    assert {"layer 16 fp32", "launch 16 fp32", "encode int4/64", "decode int4/64", "copy"} <= found.rates.keys()
    assert 0 < found.share <= 1 and found.base_bytes > 1e6 and min(found.disk) > 0
    assert not list(tmp_path.iterdir())
