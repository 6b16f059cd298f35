"""Outer methods around strategies: real islands of two ranks, each a world of its own."""

from __future__ import annotations

import io
import os
import time
from concurrent.futures import wait
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from tests.conformance.strategy_suite import Net, batch, hash_of, make_optimizer
from tests.workers import run_workers
from thinwire.collectives import ElasticPeers, Topology, host_meeting
from thinwire.compose import apply
from thinwire.errors import ConfigError
from thinwire.islands.optimizer import IslandsOptimizer
from thinwire.methods.outer.base import IslandsMethod
from thinwire.registry import strategy_named

EVERY = 4
SPARSE = {"codec": "topk25%/64:(sign/16:bf16+twice)", "num_fragments": 2, "overlap_steps": 1, "mix": 0.5}


@dataclass(frozen=True)
class Row:
    """An outer method around a strategy, by their names and options."""

    outer: str
    inner: str
    options: dict[str, Any] = field(default_factory=dict)
    # Of the strategy inside, which has settled before the first exchange.
    inside: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"

    @property
    def strategy(self) -> IslandsMethod:
        inner = strategy_named(self.inner, **self.inside)
        strategy = strategy_named(self.outer, sync_every=EVERY, inner=inner, **self.options)
        assert isinstance(strategy, IslandsMethod)
        return strategy


# Every kind of host under the outer method of most parts, and every kind of inner state under that with a state of its
# own, in fragments that overlap.
ROWS = {
    **{f"streaming, {inner}": Row("streaming-diloco", inner) for inner in ("ddp", "sdp4bit", "zero-bf16", "fsdp")},
    **{f"sparse, {inner}": Row("sparseloco", inner, SPARSE) for inner in ("zero", "zero-compressed", "ef21")},
    "sparse, sdp4bit": Row("sparseloco", "sdp4bit", SPARSE, {"loco": True}, optimizer="muon"),
    "muloco, zero": Row(
        "muloco", "zero", {"codec": "sign/16:bf16+twice", "overlap_steps": 1, "mix": 0.5}, optimizer="muon"
    ),
    "sparse, powersgd": Row("sparseloco", "powersgd", SPARSE, {"start_step": 2, "rank": 2}),
    "sparse, demo": Row("sparseloco", "demo", SPARSE, optimizer="sgd-plain"),
    "sparse, dion": Row("sparseloco", "dion", SPARSE, optimizer="sgd-plain"),
    "sparse, dgc": Row("sparseloco", "dgc", SPARSE, {"warmup": ()}, optimizer="dgc-sgd"),
    "sparse, onebit-adam": Row("sparseloco", "onebit-adam", SPARSE, {"freeze": 2}, optimizer="onebit-adam"),
}
# The meeting of the islands, in the process that hosts it.
held: list[dist.TCPStore] = []


def become_island(rank: int, size: int, folder: str) -> ElasticPeers | None:
    """Leave the world of all workers for an island's; its peers, on its first rank."""
    # Whoever leaves first would break connections that a slower rank still makes.
    dist.barrier()
    dist.destroy_process_group()
    number, local_rank = divmod(rank, size)
    os.environ.update(RANK=str(local_rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    store = dist.FileStore(f"{folder}/island{number}", size)
    dist.init_process_group("gloo", store=store, rank=local_rank, world_size=size, timeout=timedelta(seconds=80))
    port = Path(folder, "port")
    if rank == 0:
        held.append(host_meeting())
        port.with_suffix(".new").write_text(str(held[0].port))
        port.with_suffix(".new").rename(port)
    if local_rank:
        return None
    while not port.exists():
        time.sleep(0.01)
    return ElasticPeers(f"127.0.0.1:{port.read_text()}", number, timeout_s=300, min_islands=2)


class Layered(Net):
    """The suite's model, of which two matrices are layers of their own, so that it has fragments."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.layers = nn.ModuleList([self.up, self.down])


class Replica:
    """One rank of one of two islands."""

    def __init__(
        self, strategy: IslandsMethod, rank: int, world_size: int, peers: Any, *, seed: int, kind: str = "adamw"
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.model = (Layered if strategy.name == "sparseloco" else Net)(seed)
        # Only what is trained is made equal at the start.
        self.model.fixed.load_state_dict(Net(0).fixed.state_dict())
        size = dist.get_world_size()
        self.optimizer: IslandsOptimizer
        self.wrapped, self.optimizer = apply(strategy.connected_to(peers),   # type: ignore[assignment]
            self.model, make_optimizer(self.model, kind), local_size=size, seed=0, timeout_s=300, checked=True,
            overlap=True,
        )  # fmt: skip

    def step(self, number: int) -> str:
        self.wrapped(batch(number).chunk(self.world_size)[self.rank], True).backward()
        self.optimizer.note_loss(0.0)
        self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer.synchronize()
        return hash_of(self.model)

    @property
    def outer(self) -> list[int]:
        return [outer.fingerprint for outer in self.optimizer.loop.exchanges.outer]


def train(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Three rounds of each row: what was sent and promised, and hashes."""
    peers = become_island(rank, 2, folder)
    found: dict[str, Any] = {}
    for name, row in ROWS.items():
        strategy = row.strategy
        # Peers are the optimizer's to close; here they go on to the next.
        own = Kept(peers) if peers else None
        replica = Replica(strategy, rank, world_size, own, seed=rank, kind=row.optimizer)
        optimizer = replica.optimizer
        hashes = [replica.step(step) for step in range(EVERY)]
        # Every fragment has two exchanges between this reading of the meter and the next.
        optimizer.loop.drain()
        wait(list(optimizer.comm._unfinished))
        start = optimizer.meter.snapshot()
        hashes += [replica.step(step) for step in range(EVERY, 3 * EVERY - 1)]
        # The last exchange brings it, whose result comes later.
        if rank == world_size - 1:
            optimizer.request_stop()
        hashes.append(replica.step(3 * EVERY - 1))
        assert not optimizer.stop_requested
        optimizer.loop.drain()
        assert optimizer.stop_requested
        wait(list(optimizer.comm._unfinished))
        sent = (optimizer.meter.snapshot() - start).sent_bytes
        promised = 2 * (EVERY * optimizer.inner.bytes_per_step + optimizer.traffic.bytes_per_round)
        plan = strategy.plan(replica.model, Topology(2, 2), 1)
        outer = peers.comm.meter.snapshot().operations if peers else {}
        optimizer.finish()
        optimizer.check_replicas()
        found[name] = (hashes, sent, promised, replica.outer, hash_of(replica.model), plan.sent, len(outer))
        optimizer.close()
    # Averaging after every step with plain SGD is data parallelism.
    replica = Replica(thinwire.strategy_named("local-sgd", sync_every=1), rank, world_size, peers, seed=0, kind="sgd")  # type: ignore[arg-type]
    for step in range(5):
        replica.wrapped(batch(step).chunk(world_size)[rank], True).backward()
        replica.optimizer.step()
        replica.optimizer.zero_grad()
    found["weights"] = {name: p.detach().clone() for name, p in replica.model.named_parameters()}
    replica.optimizer.close()
    return found


class Kept:
    """Peers that are not closed with their first user."""

    def __init__(self, peers: ElasticPeers) -> None:
        self._peers = peers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._peers, name)

    def close(self) -> None:
        pass


def test_islands_of_two_ranks_under_every_kind_of_inner_strategy(tmp_path: Path) -> None:
    results = run_workers(train, 4, str(tmp_path), local_size=2)
    reference = plain_sgd(5)
    for rank, found in enumerate(results):
        for name, value in found.pop("weights").items():
            torch.testing.assert_close(value, reference[name], rtol=0, atol=1e-6)
        assert found.keys() == ROWS.keys()
        for name, (hashes, sent, promised, outer, last, plan, _) in found.items():
            island = rank // 2 * 2
            assert hashes == results[island][name][0], f"replicas of an island differ: {name}"
            assert hashes != results[(rank + 2) % 4][name][0], f"islands do not train by themselves: {name}"
            assert last == results[0][name][4], f"islands end with other weights: {name}"
            assert outer in ([], results[0][name][3])
            assert sent == promised, name
            assert plan["outer", "inter"] > 0


def plain_sgd(steps: int) -> dict[str, Tensor]:
    model = Net(0)
    optimizer = make_optimizer(model, "sgd")
    for step in range(steps):
        model(batch(step), True).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def stop_and_go_on(rank: int, world_size: int, folder: str) -> tuple[list[str], list[str]]:
    """Hashes of the last steps, uninterrupted and by fresh objects that load a state."""
    peers = become_island(rank, 2, folder)
    strategy = thinwire.strategy_named("streaming-diloco", sync_every=EVERY, overlap_steps=2, inner=thinwire.SDP4Bit())
    assert isinstance(strategy, IslandsMethod)
    first = Replica(strategy, rank, world_size, Kept(peers) if peers else None, seed=0)
    for step in range(EVERY + 1):
        first.step(step)
    file = io.BytesIO()
    torch.save((first.optimizer.state_dict(), first.model.fixed.state_dict()), file)
    uninterrupted = [first.step(step) for step in range(EVERY + 1, 3 * EVERY)]
    second = Replica(strategy, rank, world_size, peers, seed=9)
    state, frozen = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    second.optimizer.load_state_dict(state)
    second.model.fixed.load_state_dict(frozen)
    resumed = [second.step(step) for step in range(EVERY + 1, 3 * EVERY)]
    second.optimizer.close()
    return uninterrupted, resumed


def test_a_loaded_state_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for uninterrupted, resumed in run_workers(stop_and_go_on, 4, str(tmp_path), local_size=2):
        assert uninterrupted == resumed


def test_what_can_not_be_inside_an_island_is_refused() -> None:
    with pytest.raises(ConfigError, match="islands have no islands"):
        strategy_named("diloco", inner=strategy_named("local-sgd"))
    with pytest.raises(ConfigError, match="keeps a log"):
        strategy_named("diloco", inner=strategy_named("one-byte"))
