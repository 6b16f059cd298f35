"""Links that are down are found before a process group needs them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from thinwire.calibration.reach import all_connected, links_down


def test_a_rank_that_nobody_reaches_is_named() -> None:
    # A broadcast address takes no connection.
    addresses = ["127.0.0.1", "127.0.0.1", "255.255.255.255"]
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda rank: links_down(store, rank, 3, addresses[rank]), range(3)))
    assert found == [[(0, 2), (1, 2)]] * 3


def test_the_fewest_nodes_are_left_out_and_never_the_first() -> None:
    assert all_connected([], (0, 1, 2)) == [0, 1, 2]
    assert all_connected([(0, 2)], (0, 1, 2, 3)) == [0, 1, 3]
    # Node 1, not its three neighbours.
    assert all_connected([(1, 2), (1, 3), (1, 4)], (0, 1, 2, 3, 4)) == [0, 2, 3, 4]
    # The other rank of a node goes with it; nodes of unequal size can't train.
    assert all_connected([(1, 2)], (0, 0, 1, 1)) == [0, 1]
