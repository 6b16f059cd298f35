"""A run that measures its links names those that are down, on every rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from thinwire.errors import ThinwireError
from thinwire.launch import reached


def test_links_that_are_down_are_named_before_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    plain = reached.links_down
    # A broadcast address takes no connection.
    addresses = ["127.0.0.1", "127.0.0.1", "255.255.255.255"]
    monkeypatch.setattr(
        reached, "links_down", lambda store, rank, world_size, address: plain(store, rank, world_size, addresses[rank])
    )

    def told(rank: int) -> str:
        with pytest.raises(ThinwireError) as caught:
            reached.require_links(store, rank, 3, "--strategy auto")
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        (said,) = set(pool.map(told, range(3)))
    assert said.startswith("--strategy auto: the link between ranks 0 and 2 is down") and "ranks 1 and 2" in said
