"""Who has which tokens and heads, what each attention sends, and which one `auto` takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from thinwire.cost import Line, Links, Network
from thinwire.cost.links import ALL_TO_ALL, INTER, INTRA
from thinwire.errors import ConfigError
from thinwire.methods.sequence import (
    SequenceLayout,
    SequenceParallel,
    Shape,
    choose_layout,
    facts,
    head_shares,
    kv_share,
    network_of,
    sent,
    tokens_of,
    visible,
)


@pytest.mark.parametrize(
    "layout", [SequenceLayout(4, 1), SequenceLayout(1, 4), SequenceLayout(2, 2), SequenceLayout(2, 3)]
)
def test_every_pair_of_tokens_meets_once_under_a_causal_mask(layout: SequenceLayout) -> None:
    length = 2 * layout.unit
    positions = [tokens_of(layout, rank, length) for rank in range(layout.size)]
    assert torch.equal(torch.cat(positions).sort().values, torch.arange(length))
    groups = [torch.cat([positions[r] for r in layout.heads_group(k * layout.ulysses)]) for k in range(layout.ring)]
    met, work = torch.zeros(length, length, dtype=torch.int64), []
    for group, queries in enumerate(groups):
        assert torch.equal(queries, queries.sort().values)
        products = 0
        for source, keys in enumerate(groups):
            for rows, columns, masked in visible(group, source, len(queries), True):
                block = torch.ones(len(queries[rows]), len(keys[columns]), dtype=torch.int64)
                products += block.numel() // (1 + masked)
                met[queries[rows][:, None], keys[columns][None]] += block.tril() if masked else block
        work.append(products)
    assert torch.equal(met, torch.ones_like(met).tril())
    assert len(set(work)) == 1, "all groups of a ring compute alike"


def test_heads_go_around() -> None:
    assert [share.stop - share.start for share in head_shares(7, 4)] == [2, 2, 2, 1]
    # 8 queries read 2 key heads: ranks 0 and 1 the first, ranks 2 and 3 the second.
    assert [kv_share(share, 8, 2) for share in head_shares(8, 4)] == [slice(0, 1)] * 2 + [slice(1, 2)] * 2
    # 6 queries on 4 ranks, in groups of 3: rank 1's heads 2 and 3 read both.
    assert [kv_share(share, 6, 2) for share in head_shares(6, 4)][1] == slice(0, 2)
    with pytest.raises(ConfigError, match="4 heads on 8 ranks"):
        head_shares(4, 8)


def test_bytes_are_the_papers() -> None:
    shape = Shape(heads=8, kv_heads=8, head_size=16, tokens=1024)
    for ranks in (2, 4, 8):
        of_first = sum(n for (a, _), n in sent(SequenceLayout(ranks, 1), shape).items() if a == 0)
        assert of_first == 2 * 4 * 4 * (ranks - 1) * 1024 * 128 // ranks**2
        of_first = sum(n for (a, _), n in sent(SequenceLayout(1, ranks), shape).items() if a == 0)
        assert of_first == 3 * 4 * (ranks - 1) * 2 * 128 * 1024 // ranks
        # Layers that are computed again: a forward is a half of the exchange of heads, and a third of a ring's bytes.
        for layout, more in ((SequenceLayout(ranks, 1), 3 / 2), (SequenceLayout(1, ranks), 4 / 3)):
            once, twice = (sum(sent(layout, replace(shape, forwards=num)).values()) for num in (1, 2))
            assert twice == more * once


def test_bytes_of_a_rank_are_nearly_constant_where_ranks_grow_with_the_sequence() -> None:
    """Of hidden size 64 and two sequences: those of each of the four exchanges of a forward."""

    def exchange(ranks: int, length: int) -> float:
        shape = Shape(heads=8, kv_heads=8, head_size=8, tokens=2 * length)
        return sum(n for (a, _), n in sent(SequenceLayout(ranks, 1), shape).items() if a == 0) / 8

    assert (exchange(4, 256), exchange(8, 256)) == (24_576, 14_336)
    assert exchange(8, 512) / exchange(4, 256) == 7 / 6


def test_auto_takes_what_the_links_carry_soonest() -> None:
    auto = SequenceParallel(4)
    few_keys, many = Shape(32, 4, 128, 4096), Shape(32, 32, 128, 4096)
    # On one switch: keys and values are few, or all heads are.
    assert str(choose_layout(auto, few_keys, 1)[0]) == "ring"
    assert str(choose_layout(auto, many, 1)[0]) == "ulysses"
    # Two nodes of two ranks: few keys and values cross, heads are exchanged inside a node.
    assert str(choose_layout(auto, few_keys, 2)[0]) == "ulysses=2,ring=2"
    assert str(choose_layout(auto, many, 2)[0]) == "ulysses"
    # Each round waits: latency makes the ring dear.
    slow = Network.even(4, 125e9, 0.05)
    assert str(choose_layout(auto, few_keys, 1, slow)[0]) == "ulysses"
    # Of measured links each rank of a node has its share of the node's port, in a line of alpha and beta.
    lines = {(ALL_TO_ALL, INTER): Line(0.05, 2e-9), (ALL_TO_ALL, INTRA): Line(0.0, 1e-10)}
    measured = network_of(Links(lines), 4, 2)
    assert measured.port_rates()["up", 0] == pytest.approx(1e9) and measured.delays_s[0][2] == 0.05
    assert measured.rates[0][1] == pytest.approx(1e10) and network_of(Links({}), 2, 2).delays_s[0][1] == 0
    assert str(choose_layout(auto, few_keys, 2, measured)[0]) == "ulysses"
    # Where ranks have no head of their own, keys must travel.
    assert choose_layout(SequenceParallel(8), Shape(4, 4, 64, 4096), 1)[0].ulysses <= 4
    assert choose_layout(SequenceParallel(4, method="ring"), few_keys, 1)[1] == "", "a run that chose it states it too"
    rows = facts(auto, few_keys, 4096, 2, 1)
    assert rows[0][:2] == ("sequence method auto", "ring") and "75.497 MB" in rows[1][1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parallel": 0}, "nearest: 1"),
        ({"parallel": 4, "method": "ulysses=2"}, "nearest: 'ulysses=2,ring=2'"),
        ({"parallel": 4, "method": "rings"}, "must be auto, ulysses, ring"),
        ({"parallel": 4, "wire": "int8/64:stochastic"}, "nearest: 'int8/64:nearest'"),
        ({"parallel": 4, "gradients": "bf17"}, "bf17"),
        ({"parallel": "4"}, "must be"),
    ],
)
def test_options_that_can_not_work_name_the_nearest(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SequenceParallel(**options)


def test_groups_fill_nodes_or_lie_inside_one() -> None:
    with pytest.raises(ConfigError, match=r"must fill nodes of 2 ranks.*nearest: method 'ring'"):
        choose_layout(SequenceParallel(6, method="ulysses=3,ring=2"), Shape(6, 6, 16, 60), 2)
