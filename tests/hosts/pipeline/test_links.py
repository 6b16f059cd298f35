"""What the probes of a pipeline's links find."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thinwire.hosts.pipeline import links


def test_rate_delay_and_burst_of_a_token_bucket_are_found_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    delay_s, burst_s, known, on_node = 0.003, 0.02, dict[tuple[int, int], float](), 1

    def around(comm: Any, mailbox: Any, num_bytes: Any, distance: int) -> torch.Tensor:
        size = comm.world_size
        pairs = [((rank - distance) % size, rank) for rank in range(size)]
        rates = torch.tensor([known[pair] for pair in pairs], dtype=torch.float64)
        # Links inside a node let no burst pass.
        bursts = torch.tensor([burst_s * (a // on_node != b // on_node) for a, b in pairs], dtype=torch.float64)
        return delay_s + (torch.as_tensor(num_bytes) / rates - bursts).clamp(min=0.0)

    monkeypatch.setattr(links, "_around", around)
    ranks: Any = SimpleNamespace(world_size=3)
    box: Any = SimpleNamespace(topology=SimpleNamespace(node=lambda rank: rank // on_node))
    # Down is half as fast as up.
    known.update({(a, b): 5e6 if a < b else 2.5e6 for a, b in permutations(range(4), 2)})
    found = links.measured_links(ranks, box)
    assert all(found.rates[a][b] == pytest.approx(known[a, b], rel=1e-6) for a, b in permutations(range(3), 2))
    assert found.delays_s[0][1] == pytest.approx(delay_s) and found.burst_s == pytest.approx(burst_s, rel=1e-6)
    ranks.world_size = 2
    found = links.measured_links(ranks, box)
    assert found.rates[0][1] == pytest.approx(5e6) and found.rates[1][0] == pytest.approx(2.5e6)
    # Of four ranks, pairs that are no neighbours: as slow as the slowest, unless they are measured too.
    ranks.world_size, known[0, 2] = 4, 1.25e6
    assert links.measured_links(ranks, box).rates[0][2] == pytest.approx(2.5e6, rel=1e-6)
    found = links.measured_links(ranks, box, all_pairs=True)
    assert found.rates[0][2] == pytest.approx(1.25e6, rel=1e-6) != found.rates[2][0]
    assert all(found.rates[a][b] == pytest.approx(known[a, b], rel=1e-6) for a, b in permutations(range(4), 2))
    on_node = 2
    found = links.measured_links(ranks, box)
    assert found.nodes == (0, 0, 1, 1) and found.burst_s == pytest.approx(burst_s, rel=1e-6)
