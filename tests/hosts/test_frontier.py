"""Three-level sharding on eight processes, two nodes of two pairs: values, bytes, memory, and what it refuses."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.conformance.strategy_suite import hash_of, make_optimizer
from tests.workers import run_workers
from thinwire.collectives import Topology
from thinwire.compose import apply
from thinwire.errors import ConfigError
from thinwire.hosts.sharded.optimizer import ShardedOptimizer
from thinwire.layout.levels import levels_on
from thinwire.methods.data.frontier import Frontier
from thinwire.state.replicas import ReplicaError

EXACT: dict[str, Any] = dict.fromkeys(("weights", "intra_gradients", "inter_gradients", "refresh"), "fp32")
# (1, 1) is ZeRO-1, (1, 8) ZeRO-2, (8, 8) ZeRO-3; (2, 4) has pairs in nodes.
LEVELS, MORE_LEVELS = ((1, 8), (2, 4), (4, 4), (8, 8)), ((1, 1), (1, 4), (2, 2), (2, 8))
STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up = nn.Linear(24, 50)
        self.down = nn.Linear(50, 24, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x + self.down(torch.tanh(self.up(self.norm(x))))}


class Stack(nn.Module):
    """Three layers, tied embeddings, a weight that two layers share, and a layer that odd steps alone use."""

    def __init__(self, seed: int, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(37, 24)
            self.layers = nn.ModuleList(Block() for _ in range(3))
            self.side = nn.Linear(24, 24)
            self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.embed.weight
        self.layers[2].down.weight = self.layers[0].down.weight  # type: ignore[union-attr]

    def forward(self, tokens: torch.Tensor, use_side: bool) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))["x"]
        x = x + torch.tanh(self.side(x)) if use_side else x
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 37, (32, 9), generator=torch.Generator().manual_seed(step))


def reference() -> tuple[dict[str, torch.Tensor], list[float]]:
    """Plain PyTorch over the whole batch, and the norms of its gradients."""
    model, norms = Stack(0), []
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        model(batch(step), step % 2 == 1).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, norms


class Rank:
    """One rank's model under a strategy."""

    def __init__(self, strategy: Frontier, rank: int, world_size: int, **options: Any) -> None:
        self.rank, self.world_size = rank, world_size
        self.model = Stack(options.pop("seed", 0), options.pop("recompute", False))
        settings = {"local_size": 4, "seed": 0, "timeout_s": 60, "checked": True, "overlap": False} | options
        self.wrapped, optimizer = apply(strategy, self.model, make_optimizer(self.model), **settings)
        assert isinstance(optimizer, ShardedOptimizer)
        self.optimizer = optimizer

    def step(self, step: int, micro_batches: int) -> float:
        *first, last = batch(step).chunk(self.world_size)[self.rank].chunk(micro_batches)
        for tokens in first:
            with self.optimizer.no_sync():
                (self.wrapped(tokens, step % 2 == 1) / micro_batches).backward()
        (self.wrapped(last, step % 2 == 1) / micro_batches).backward()
        norm = float(self.optimizer.clip_grad_norm_(1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def held(self) -> dict[str, int]:
        """Bytes of the tensors that stay, counted by their storages."""
        parts = self.optimizer.buckets
        tensors = {
            "weights": [t for part in parts for t in (part.live, part.shard)],
            "gradients": [t for part in parts for t in (part.sums, part.shard_grad)],
            "optimizer": [part.master for part in parts],
        }
        tensors["optimizer"] += [
            value for state in self.optimizer.inner.state.values() for value in state.values() if value.dim()
        ]
        storages = {
            key: {t.untyped_storage().data_ptr(): t.untyped_storage() for t in ts} for key, ts in tensors.items()
        }
        return {key: sum(storage.nbytes() for storage in found.values()) for key, found in storages.items()}


def exact(rank: int, world_size: int, choices: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Steps of 1, 2, 1, 2 micro-batches under each choice of levels."""
    found = []
    for levels in choices:
        strategy = Frontier(*levels, **EXACT)
        own = Rank(strategy, rank, world_size, seed=rank)
        norms, sent, held = [], [], []
        for step in range(STEPS):
            before = own.optimizer.meter.snapshot()
            norms.append(own.step(step, micro_batches=1 + step % 2))
            operations = (own.optimizer.meter.snapshot() - before).operations
            sent.append({key: reading.sent_bytes for key, reading in operations.items() if reading.sent_bytes})
            held.append(own.held())
        own.optimizer.check_replicas()
        formulas = [strategy.plan(own.model, Topology(2, 4), k) for k in (1, 2)]
        own.optimizer.synchronize()
        weights = {name: p.detach().clone() for name, p in own.model.named_parameters()}
        own.optimizer.close()
        found.append({"weights": weights, "norms": norms, "sent": sent, "held": held[-1], "formulas": formulas})
    return found


@pytest.fixture(scope="module")
def eight() -> list[dict[str, Any]]:
    """All that eight processes are asked, from one start of them."""
    return run_workers(all_of_eight, 8)


def all_of_eight(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "exact": exact(rank, world_size, LEVELS),
        "plain": quantised(rank, world_size, False, False),
        "overlapped": quantised(rank, world_size, True, True),
    }


def test_equals_data_parallel_training_in_the_bytes_and_the_memory_of_the_formula(eight: list[dict[str, Any]]) -> None:
    check_exact(LEVELS, [told["exact"] for told in eight])


@pytest.mark.whole
def test_so_do_other_levels() -> None:
    check_exact(MORE_LEVELS, run_workers(exact, 8, MORE_LEVELS))


def check_exact(choices: Sequence[tuple[int, int]], told: list[list[dict[str, Any]]]) -> None:
    weights, norms = reference()
    for results in told:
        for levels, found in zip(choices, results, strict=True):
            for name, weight in found["weights"].items():
                torch.testing.assert_close(weight, weights[name], rtol=1e-6, atol=1e-6, msg=f"{levels}: {name}")
            assert found["norms"] == pytest.approx(norms, rel=1e-5), levels
            for step, sent in enumerate(found["sent"]):
                formula = {key: num for key, num in found["formulas"][step % 2].sent.items() if num}
                assert sent == formula, f"{levels}, step {step}"
            one, two = ({k: v for k, v in f.sent.items() if k[1] == "inter"} for f in found["formulas"])
            if levels[1] <= 4:
                assert one == two, "bytes between nodes depend on the number of micro-batches"
                assert not one["weights", "inter"] and one["refresh", "inter"] > 0
            plan = found["formulas"][0]
            assert (found["held"]["weights"], found["held"]["gradients"]) == (plan.weights, plan.gradients), levels
            # The formula counts moments of the padding too.
            assert 0.9 * plan.optimizer <= found["held"]["optimizer"] <= plan.optimizer, levels


def quantised(rank: int, world_size: int, overlap: bool, recompute: bool) -> tuple[list[str], dict[str, torch.Tensor]]:
    own = Rank(Frontier(2, 4), rank, world_size, overlap=overlap, recompute=recompute)
    hashes = []
    for step in range(STEPS):
        own.step(step, micro_batches=2)
        own.optimizer.check_replicas()
        if step == 1:
            # The state is loaded into another model, which goes on in its place.
            first = own
            own = Rank(Frontier(2, 4), rank, world_size, overlap=overlap, recompute=recompute, seed=rank + 7)
            own.optimizer.load_state_dict(first.optimizer.state_dict())
            first.optimizer.close()
        if step % 2:
            own.optimizer.synchronize()
            hashes.append(hash_of(own.model))
    weights = {name: p.detach().clone() for name, p in own.model.named_parameters()}
    own.optimizer.close()
    return hashes, weights


def test_quantised_and_overlapped_and_recomputed_are_the_same_training(eight: list[dict[str, Any]]) -> None:
    weights, _ = reference()
    start = {name: p.detach() for name, p in Stack(0).named_parameters()}
    plain = [told["plain"] for told in eight]
    assert len({tuple(hashes) for hashes, _ in plain}) == 1
    off = sum(float((plain[0][1][name] - weights[name]).square().sum()) for name in weights) ** 0.5
    way = sum(float((start[name] - weights[name]).square().sum()) for name in weights) ** 0.5
    # Adam makes steps of equal size out of gradients of any size, and so of their noise.
    assert 1e-6 < off / way < 0.45
    assert eight[0]["overlapped"][0] == plain[0][0]


def by_hand(rank: int, world_size: int) -> dict[str, Any]:
    own, found = Rank(Frontier(2, 2, **EXACT), rank, world_size, local_size=2), dict[str, Any]()
    printed = io.StringIO()
    logging.getLogger("thinwire").addHandler(logging.StreamHandler(printed))
    own.step(0, 1)
    found["silent"] = not printed.getvalue()
    own.model.load_state_dict(Stack(5).state_dict())
    with torch.no_grad():
        found["loss"] = float(own.model(batch(0), False)), float(Stack(5)(batch(0), False))
    found["freed"] = sum(part.live.untyped_storage().nbytes() for part in own.optimizer.buckets)
    found["warned"] = "changed outside the optimizer" in printed.getvalue()
    own.step(1, 1)
    copied = copy.deepcopy(own.model)
    own.optimizer.synchronize()
    found["copied"] = all(torch.equal(p, q) for p, q in zip(copied.parameters(), own.model.parameters(), strict=True))
    copied(batch(0), True).backward()
    found["near"] = max(
        float((p - q).abs().max()) for p, q in zip(own.model.parameters(), Stack(5).parameters(), strict=True)
    )
    before = own.optimizer.meter.snapshot().sent_bytes
    own.model(batch(0), False)
    found["kept"] = own.optimizer.meter.snapshot().sent_bytes == before
    with pytest.raises(RuntimeError) as second:
        for _ in range(2):
            own.model(batch(0).chunk(world_size)[rank], True).backward()
    found["second"] = str(second.value)
    if rank == 3:
        own.optimizer.buckets[0].shard[0] += 1
    with pytest.raises(ReplicaError) as odd:
        own.optimizer.check_replicas()
    found["odd"] = str(odd.value)
    return found


def test_edits_are_kept_and_forks_are_seen() -> None:
    for found in run_workers(by_hand, 4):
        assert found["silent"] and found["warned"] and found["freed"] == 0 and found["kept"]
        assert found["copied"]
        assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-5)
        assert found["near"] < 0.02
        assert "no_sync" in found["second"]
        assert "rank(s) [3] differ from rank 1's" in found["odd"]


@pytest.mark.parametrize(
    ("grid", "asked", "message"),
    [
        (
            Topology(2, 4),
            (3, None),
            r"weights_over 3 .* must divide its 8 ranks.* nearest that does: 2 \(all: 1, 2, 4, 8\)",
        ),
        (
            Topology(2, 4),
            (4, 2),
            r"gradients_over 2 .* multiple of weights_over 4.* nearest that does: 4 \(all: 4, 8\)",
        ),
        (Topology(2, 6), (4, None), r"weights_over 4 .* part of a node or whole nodes; nearest that does: 3"),
        (Topology(1, 1), (2, None), r"weights_over 2 .* nearest that does: 1"),
    ],
)
def test_levels_that_do_not_fit_are_refused(grid: Topology, asked: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        levels_on(grid, *asked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int4"}, "weights 'int4' of Frontier: .*same way each time.*nearest: 'int4/128:nearest'"),
        ({"refresh": "int4", "differences": False}, "would lose all small updates"),
        ({"weights_over": 0}, "must be at least 1"),
        ({"intra_gradients": "int8/96+hadamard48"}, "48 is not a power of two"),
    ],
)
def test_options_that_do_not_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Frontier(**options)


def test_levels_follow_from_the_grid() -> None:
    levels = levels_on(Topology(3, 8), None, None)
    assert (levels.weights_over, levels.gradients_over) == (2, 8)
    pieces = [levels.piece(rank) for rank in range(24)]
    assert sorted(pieces) == list(range(24))
    assert list(levels.column(9)) == [1, 9, 17] and list(levels.stack(9)) == [9, 11, 13, 15]
    assert levels_on(Topology(2, 3), None, None) == levels_on(Topology(2, 3), 1, 3)
