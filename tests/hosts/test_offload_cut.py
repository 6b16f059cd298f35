"""Weights that are cut over ranks lie on all disks, and are never whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import thinwire
from tests.checkpoint.replicas import Net, Replica
from tests.hosts.on_disk import STEPS, assert_same, cut_small, followed
from tests.workers import run_workers
from thinwire import Residency
from thinwire.compose import apply
from thinwire.models import FirstWeights
from thinwire.models.build import build_model, build_skeleton


def cut_from_nothing(rank: int, world_size: int) -> list[Any]:
    """Losses of weights that are cut over ranks, from a whole model and from none; the most that was whole then."""
    found, most, num_params = list[Any](), 0, 0
    for is_hollow in (False, True):
        model: Any = build_model("tiny", 300, 16)
        initial: Any = None
        if is_hollow:
            skeleton: Any = build_skeleton("tiny", 300, 16)
            model, first = thinwire.hollow(skeleton), FirstWeights(skeleton, 0)

            def initial(name: str, model: Any = model, first: Any = first) -> torch.Tensor:
                nonlocal most
                most = max(most, sum(param.untyped_storage().nbytes() > 0 for param in model.parameters()))
                return first(name)

        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        num_params = len(list(model.parameters()))
        method = thinwire.Frontier(weights_over=2, gradients_over=2)
        _, optimizer = thinwire.zero(model, adamw, method, local_size=2, initial=initial, announce=False)
        losses = []
        for step in range(3):
            tokens = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(step))
            losses.append(model(tokens, tokens))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([float(loss.detach()) for loss in losses])
        optimizer.close()
    return [*found, most, num_params]


def test_weights_that_are_cut_are_never_whole() -> None:
    for whole, cut, most, num_params in run_workers(cut_from_nothing, 2):
        assert cut == whole
        # Those of a layer, which is a bucket.
        assert most <= num_params / 2


def cut_ways(folder: Path) -> dict[str, Residency | None]:
    """Weights that are cut over ranks: in memory; on disks, with all else or alone, and layers computed again."""
    store = str(folder / "cut")
    return {
        "memory": None,
        "disk": Residency(store=store, weights="disk", gradients="disk", sub_group=1024),
        "again": Residency(store=store, weights="disk", optimizer="memory", activations="recompute"),
        "durable": Residency(store=str(folder / "kept"), weights="disk", durable=True, sub_group=1024),
    }


def edited_in_passing(replica: Replica) -> Any:
    """Bytes of whole weights before, in and behind a block in which a layer is edited; and a step after it."""

    def whole_bytes() -> int:
        return sum(bucket.live.untyped_storage().nbytes() for bucket in replica.optimizer.buckets)  # type: ignore[attr-defined]

    layer = replica.model.get_submodule("layers.0")
    replica.optimizer.synchronize()
    found = [whole_bytes()]
    with thinwire.whole(layer):
        found.append(whole_bytes())
        # No version is counted of what is written so.
        layer.get_parameter("weight").data.mul_(0.5)
    return [*found, whole_bytes()], followed(replica, STEPS + 2, 1)


def cut_over_disks(rank: int, world_size: int, folder: Path) -> dict[Any, Any]:
    """Each way: three steps, a checkpoint, two more; then two from what another way has saved, or has kept."""
    cut_small()
    told: dict[Any, Any] = {}

    def made(way: str, seed: int) -> Replica:
        model = Net(seed)
        adamw = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=3e-3)
        method = thinwire.Frontier(weights_over=2, gradients_over=2, weights="bf16")
        options: Any = {"seed": 3, "timeout_s": 300, "checked": False, "overlap": True}
        wrapped, parallel = apply(method, model, adamw, local_size=2, residency=cut_ways(folder)[way], **options)
        return Replica(model, wrapped, parallel, rank, world_size)

    for way in cut_ways(folder):
        replica = made(way, 0)
        before = followed(replica, 0, STEPS)
        replica.save(folder / way, STEPS)
        if way == "durable":
            replica.optimizer.commit({})
        else:
            told[way] = before, followed(replica, STEPS, 2)
            told[way, "edited"] = edited_in_passing(replica)
        if way == "disk":
            kept: Any = replica.optimizer._residence.replicas  # type: ignore[attr-defined]
            whole = sum(bucket.live.nbytes for bucket in kept.spots)
            told["held"] = kept.used_bytes, kept.capacity_bytes, kept.total_bytes, whole
        replica.optimizer.close()
    for way, origin in (("disk", "memory"), ("memory", "disk"), ("again", "disk")):
        replica = made(way, 9)
        source = replica.load(folder / origin / f"step-{STEPS:08d}")
        told[way, "again"] = source.is_same, followed(replica, STEPS, 2)
        replica.optimizer.close()
    replica = made("durable", 9)
    assert isinstance(replica.model, Net) and replica.optimizer.steps == STEPS
    replica.model.fixed.load_state_dict(Net(0).fixed.state_dict())
    told["durable"] = followed(replica, STEPS, 2)
    replica.optimizer.close()
    return told


def test_weights_that_are_cut_lie_on_all_disks_bit_for_bit(tmp_path: Path) -> None:
    for told in run_workers(cut_over_disks, 2, tmp_path):
        before, after = told["memory"]
        for way in ("disk", "again"):
            assert_same(told[way][0], before)
            assert_same(told[way][1], after)
        whole_bytes, edited = told["memory", "edited"]
        assert whole_bytes[0] == whole_bytes[1] == whole_bytes[2]
        # The edit has reached the masters, which a step moves little.
        assert torch.allclose(edited[1]["layers.0.weight"], 0.5 * after[1]["layers.0.weight"], atol=0.02)
        for way in ("disk", "again"):
            outside, inside, behind = told[way, "edited"][0]
            assert outside == behind == 0 < inside < whole_bytes[0]
            assert_same(told[way, "edited"][1], edited)
        for way in ("disk", "memory", "again"):
            assert told[way, "again"][0]
            assert_same(told[way, "again"][1], after)
        assert_same(told["durable"], after)
        used, capacity, total, whole = told["held"]
        # Each disk has a part, and so is read for a part.
        assert used <= capacity < total and 2 * total == whole
