"""What the probes of a pipeline's links find."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thinwire.hosts.pipeline import links


def test_rate_delay_and_burst_of_a_token_bucket_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, delay_s, burst_s = torch.tensor([2.5e6, 5e6, 2.5e6], dtype=torch.float64), 0.003, 0.02

    def around(comm: Any, mailbox: Any, num_bytes: list[int], distance: int) -> torch.Tensor:
        return delay_s + (distance * torch.tensor(num_bytes) / rates - burst_s).clamp(min=0.0)

    monkeypatch.setattr(links, "_around", around)
    ranks: Any = SimpleNamespace(world_size=3)
    box: Any = SimpleNamespace(topology=SimpleNamespace(node=lambda rank: rank))
    found = links.measured_links(ranks, box)
    assert found.rates[0][1] == found.rates[1][0] == pytest.approx(5e6, rel=1e-6)
    assert found.rates[1][2] == found.rates[2][0] == pytest.approx(2.5e6, rel=1e-6)
    assert found.delays_s[0][1] == pytest.approx(delay_s) and found.burst_s == pytest.approx(burst_s, rel=1e-6)
    # Of four ranks, pairs that are no neighbours: as slow as the slowest, unless they are measured too.
    rates = torch.tensor([2.5e6] * 4, dtype=torch.float64)
    ranks.world_size = 4
    assert links.measured_links(ranks, box).rates[0][2] == pytest.approx(2.5e6, rel=1e-6)
    found = links.measured_links(ranks, box, all_pairs=True)
    assert found.rates[0][2] == found.rates[3][1] == pytest.approx(1.25e6, rel=1e-6)
    assert found.rates[0][3] == pytest.approx(2.5e6, rel=1e-6)
