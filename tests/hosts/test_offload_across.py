"""Optimizers that look across matrices have the bits of memory on a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from tests.checkpoint.replicas import STRATEGIES, Net, Replica, batch
from tests.hosts.on_disk import STEPS, assert_same, cut_small, followed
from tests.workers import run_workers
from thinwire import Residency
from thinwire.compose import apply
from thinwire.errors import ConfigError
from thinwire.hosts.offload.pieces import PiecesOnDisk, PieceSpot
from thinwire.optim import mfac


def across(
    kind: str, rank: int, world_size: int, residency: Residency | None, seed: int = 0, name: str = "sdp4bit-loco"
) -> Replica:
    """A replica whose optimizer looks across matrices."""
    model = Net(seed)
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    params = [param for _, param in named]
    optimizer: torch.optim.Optimizer = {
        "apollo": lambda: thinwire.Apollo(named, 3e-3, matrices="layers", rank=4, weight_decay=0.1),
        "apollo-mini": lambda: thinwire.ApolloMini(named, 3e-3, matrices="layers|embed", period=2),
        "mfac": lambda: thinwire.MFAC(params, 1e-3, window=16, weight_decay=0.1),
    }[kind]()
    options: Any = {"seed": 3, "timeout_s": 300, "checked": False, "overlap": True}
    options |= {"residency": residency} if residency is not None else {}
    wrapped, parallel = apply(STRATEGIES[name][0], model, optimizer, local_size=1, **options)
    return Replica(model, wrapped, parallel, rank, world_size)


def across_ways(folder: Path) -> dict[str, Residency | None]:
    """Memory; everything on the disk; and what fits stays in memory after the first steps."""
    store = str(folder / "across")
    return {
        "memory": None,
        "disk": Residency(store=store, weights="disk"),
        "stays": Residency(store=store, memory="100gb"),
        "budget": Residency(store=store, memory="100gb", optimizer="disk"),
    }


def note_reads_ahead(told: dict[Any, Any], key: tuple[str, str], states: PiecesOnDisk) -> None:
    """Note how often a piece is read while another one is used, and the most bytes in memory over what may be."""
    found, begin = told.setdefault((*key, "ahead"), [0, 0.0]), states._read_ahead

    def noted(spot: PieceSpot) -> None:
        begin(spot)
        there = {spot, *states._leaving, *(states._coming or ())[:1]}
        held = sum(each.memory_bytes for each in there if not each.stays)
        found[0] += states._coming is not None
        found[1] = max(found[1], held / states._most_bytes)

    states._read_ahead = noted  # type: ignore[method-assign]


def at_once_ways(folder: Path) -> dict[str, Residency | None]:
    """Gradients wait, and nothing is clipped; buckets are stepped as gradients arrive, in memory and on the disk."""
    store: dict[str, Any] = {"store": str(folder / "at_once"), "gradients": "step"}
    return {
        "memory": None,
        "step": Residency(optimizer="memory", gradients="step"),
        "disk": Residency(**store, weights="disk"),
        "stays": Residency(**store, memory="100gb"),
    }


def stepped_at_once(rank: int, world_size: int, folder: Path) -> dict[Any, Any]:
    """Apollo and Mini: three steps, of which the second has a bucket without a finite gradient on one rank."""
    cut_small()
    told: dict[Any, Any] = {}
    for kind in ("apollo", "apollo-mini"):
        for way, residency in at_once_ways(folder).items():
            replica = across(kind, rank, world_size, residency)
            losses, most, before = [], 0, replica.optimizer.comm.meter.snapshot().sent_bytes
            for step in range(STEPS):
                loss = replica.wrapped(batch(step)[rank * 12 : (rank + 1) * 12])
                loss.backward()
                replica.optimizer.reduce()
                assert residency is None or all(param.grad is None for param in replica.model.parameters())
                held = [bucket.shard_grad.untyped_storage().nbytes() for bucket in replica.optimizer.buckets]  # type: ignore[attr-defined]
                most = max(most, *held)
                replica.optimizer.step()
                replica.optimizer.zero_grad()
                losses.append(float(loss.detach()))
            replica.optimizer.synchronize()
            sent = replica.optimizer.comm.meter.snapshot().sent_bytes - before
            told[kind, way, "sent"] = sent, STEPS * replica.optimizer.bytes_per_step
            with thinwire.whole(replica.model):
                told[kind, way] = losses, {name: p.detach().clone() for name, p in replica.model.named_parameters()}
            told[kind, way, "held"] = most
            if residency is not None:
                with pytest.raises(ConfigError, match="before the norm of all is known"):
                    replica.optimizer.clip_grad_norm_(1.0)
                told[kind, way, "nan"] = with_a_nan(replica, rank)
            replica.optimizer.close()
    return told


def with_a_nan(replica: Replica, rank: int) -> list[str]:
    """The parameters that a step moves in which one rank's gradient of one matrix is not a number."""
    with thinwire.whole(replica.model):
        before = {name: param.detach().clone() for name, param in replica.model.named_parameters()}
    poisoned = replica.model.get_parameter("layers.0.weight").register_hook(lambda g: g * float("nan") if rank else g)
    replica.wrapped(batch(9)[rank * 12 : (rank + 1) * 12]).backward()
    replica.optimizer.step()
    replica.optimizer.zero_grad()
    poisoned.remove()
    assert replica.optimizer.skipped_steps == 1
    replica.wrapped(batch(10)[rank * 12 : (rank + 1) * 12]).backward()
    replica.optimizer.step()
    replica.optimizer.synchronize()
    replica.optimizer.check_replicas()
    with thinwire.whole(replica.model):
        after = dict(replica.model.named_parameters())
        assert all(bool(torch.isfinite(param).all()) for param in after.values())
        return [name for name, param in after.items() if not torch.equal(param, before[name])]


def looking_across(rank: int, world_size: int, folder: Path) -> dict[Any, Any]:
    """Each optimizer and way: three steps, a checkpoint, two more steps; and two from what another way has saved."""
    cut_small()
    # A page of M-FAC's window has so few elements that a piece has several.
    mfac.PAGE_NUMEL, mfac.PAGE_UNIT = 1, 64
    told: dict[Any, Any] = {}
    origins = {"memory": "stays", "disk": "memory", "stays": "disk", "budget": "budget"}
    for kind in ("apollo", "apollo-mini", "mfac"):
        for way, residency in across_ways(folder).items():
            replica = across(kind, rank, world_size, residency)
            if residency is not None:
                note_reads_ahead(told, (kind, way), replica.optimizer.states)  # type: ignore[attr-defined]
            before = followed(replica, 0, STEPS)
            replica.save(folder / kind / way, STEPS)
            told[kind, way] = before, followed(replica, STEPS, 2)
            replica.optimizer.close()
        for way, residency in across_ways(folder).items():
            replica = across(kind, rank, world_size, residency, seed=9)
            source = replica.load(folder / kind / origins[way] / f"step-{STEPS:08d}")
            told[kind, way, "again"] = source.is_same, followed(replica, STEPS, 2)
            replica.optimizer.close()
    coded: dict[str, Any] = {"masters": "int8/64", "store": str(folder / "coded")}
    for way, residency in {
        "disk": Residency(**coded, weights="disk"), "stays": Residency(**coded, memory="100gb")
    }.items():  # fmt: skip
        replica = across("apollo", rank, world_size, residency)
        before = followed(replica, 0, STEPS)
        replica.save(folder / "coded" / way, STEPS)
        told["coded", way] = before, followed(replica, STEPS, 2)
        replica.optimizer.close()
        replica = across("apollo", rank, world_size, residency, seed=9)
        replica.load(folder / "coded" / way / f"step-{STEPS:08d}")
        told["coded", way, "again"] = followed(replica, STEPS, 2)
        replica.optimizer.close()
    return told


def test_what_looks_across_matrices_passes_through_memory_bit_for_bit(tmp_path: Path) -> None:
    for told in run_workers(looking_across, 2, tmp_path):
        for kind in ("apollo", "apollo-mini", "mfac"):
            for way in ("memory", "disk", "stays", "budget"):
                for part in (0, 1):
                    assert_same(told[kind, way][part], told[kind, "memory"][part])
                is_same, again = told[kind, way, "again"]
                assert is_same
                assert_same(again, told[kind, "memory"][1])
            for way in ("disk", "stays", "budget"):
                num_ahead, share = told[kind, way, "ahead"]
                assert (num_ahead > 0 or way != "disk") and share <= 1, (kind, way, num_ahead, share)
        for part in (0, 1):
            assert_same(told["coded", "disk"][part], told["coded", "stays"][part])
        rounded, plain = told["coded", "disk"], told["apollo", "memory"]
        assert rounded[1][0] != plain[1][0] and rounded[1][0] == pytest.approx(plain[1][0], rel=0.02)
        # Updates smaller than a level add up: the masters have moved as those of fp32 have.
        start = Net(0).get_parameter("layers.0.weight").detach()
        moved, off = (
            found[1][1]["layers.0.weight"] - of
            for found, of in ((plain, start), (rounded, plain[1][1]["layers.0.weight"]))
        )
        assert off.abs().mean() < 0.5 * moved.abs().mean()
        for way in ("disk", "stays"):
            assert told["coded", way, "again"][0] == pytest.approx(rounded[1][0], rel=1e-3)


def test_apollo_steps_buckets_as_gradients_arrive_and_keeps_none(tmp_path: Path) -> None:
    for told in run_workers(stepped_at_once, 2, tmp_path):
        for kind in ("apollo", "apollo-mini"):
            assert told[kind, "memory", "held"] > 0
            for way in ("step", "disk", "stays"):
                assert_same(told[kind, way], told[kind, "memory"])
                assert told[kind, way, "held"] == 0
                sent, promised = told[kind, way, "sent"]
                assert sent == promised
                assert "layers.1.weight" in told[kind, way, "nan"]
