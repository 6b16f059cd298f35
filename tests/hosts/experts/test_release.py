"""Gradients that leave while experts compute: each once, none before it is there, and the same sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.workers import run_workers
from thinwire import ExpertParallel
from thinwire.errors import ConfigError
from thinwire.hosts.sharded.held import HeldGradients
from thinwire.models.moe import MoEConfig, MoELlama

CONFIG = MoEConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16,
)  # fmt: skip
ROOM = 3000


def trained(
    rank: int, release: Any, move: Any = "tokens", once: bool = False
) -> tuple[list[tuple[str, int]], list[Tensor], int, int]:
    """What happened in the second step: messages that were ready, that left, and layers' pauses; the weights; bytes."""
    events: list[tuple[str, int]] = []
    model = MoELlama(CONFIG, 0)
    ep = thinwire.expert_parallel(model, ExpertParallel(2, move=move, release=release), local_size=2)
    if once:
        ep.take(replace(ep.options, once_a_step=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    module, sharded = thinwire.zero(
        model, optimizer, thinwire.Zero(), group_for=ep.group_for, bucket_numel=256, local_size=2, announce=False
    )
    ep.follow(sharded)
    if release != "now":
        ep.hold(sharded, release)
        pace, gradients = sharded._gradients.pace, sharded._gradients
        assert pace is not None
        start, ready, release_of = gradients._start, pace.add, pace.release

        def started(bucket: Any, job: Any) -> None:
            events.append(("left", id(bucket)))
            start(bucket, job)

        def added(num_bytes: int, call: Any) -> None:
            events.append(("ready", num_bytes))
            ready(num_bytes, call)

        def paused() -> None:
            events.append(("pause", 0))
            release_of()
            events.append(("goes on", 0))

        gradients._start, pace.add, ep.wire.between = started, added, paused  # type: ignore[method-assign, assignment]
    draws = torch.Generator().manual_seed(rank)
    for _ in range(2):
        events.clear()
        for number in range(2):
            text = torch.randint(0, 64, (2, 17), generator=draws)
            last = number == 1
            if last:
                module(text[:, :-1], text[:, 1:]).backward()
            else:
                with sharded.no_sync():
                    module(text[:, :-1], text[:, 1:]).backward()
        events.append(("end", 0))
        sharded.step()
        sharded.zero_grad()
    sharded.synchronize()
    sent = sharded.meter.snapshot().sent_by("gradients")
    weights = [param.detach().clone() for param in model.parameters()]
    moved = ep.comm.meter.snapshot()
    ep.close()
    sharded.close()
    return events, weights, sent, moved.sent_by("expert_weights") + moved.sent_by("expert_weight_gradients")


def variants(rank: int, world_size: int) -> Any:
    return [
        trained(rank, *each)
        for each in (("now",), (0,), (ROOM,), (1 << 30,), ("now", "experts"), ("now", "experts", True))
    ]


def test_gradients_leave_between_rows_and_the_sums_are_the_same() -> None:
    for now, nothing, some, all_, moved, once in run_workers(variants, 4, local_size=2):
        for other in (nothing, some, all_):
            assert all(map(torch.equal, now[1], other[1])) and other[2] == now[2] > 0
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(now[1], moved[1], strict=True))
        # Weights that are gathered once a step, not in each of its two micro-batches, are half as many bytes.
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(moved[1], once[1], strict=True))
        assert moved[3] == 2 * once[3] > 0 == now[3]
        for events, *_ in (nothing, some, all_):
            left = [at for at, (what, _) in enumerate(events) if what == "left"]
            ready = [at for at, (what, _) in enumerate(events) if what == "ready"]
            # Each once, and in the order in which they were ready: none before.
            assert len(left) == len(ready) and len({events[at][1] for at in left}) == len(left)
            assert all(a < b for a, b in zip(ready, left, strict=True))
            assert [what for what, _ in events].count("pause") == 6
        kinds = {name: [what for what, _ in each[0]] for name, each in (("no", nothing), ("some", some), ("all", all_))}
        assert "left" not in kinds["no"][: kinds["no"].index("end")]
        inside = [between(kinds[name]) for name in ("some", "all")]
        # The first micro-batch's backward has none, and the room of a layer takes some of what is there.
        assert inside[0][:3] == inside[1][:3] == [0, 0, 0]
        assert 0 < sum(inside[0]) < sum(inside[1]) and max(inside[0]) < max(inside[1])


def between(kinds: list[str]) -> list[int]:
    """How many messages left in each pause."""
    found = []
    for at, what in enumerate(kinds):
        if what == "pause":
            found.append(kinds[at : kinds.index("goes on", at)].count("left"))
    return found


def test_a_message_that_exceeds_the_room_counts_against_the_next_one() -> None:
    pace, left = HeldGradients(10), list[int]()
    for number in (6, 25, 1):
        pace.add(number, lambda number=number: left.append(number))  # type: ignore[misc]
    for expected in ([6, 25], [6, 25], [6, 25], [6, 25, 1]):
        pace.release()
        assert left == expected
    pace.add(3, lambda: left.append(3))
    pace.finish()
    assert left[-1] == 3 and pace._debt == 0


def test_a_release_without_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="release 5 with move 'experts': there are no rows between which to be"):
        ExpertParallel(2, move="experts", release=5)
    with pytest.raises(ConfigError, match="release -1: must be at least 0"):
        ExpertParallel(2, release=-1)
