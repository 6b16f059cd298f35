"""Forwards without gradients read weights on a disk ahead, by an order of their own that no step takes for its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import thinwire
from tests.hosts.on_disk import cut_small
from tests.workers import run_workers
from thinwire import Residency
from thinwire.hosts.offload.replicas import Replicas

NUM_LAYERS = 8


class Chain(torch.nn.Module):
    """Layers in a row; the last is used first, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.layers[-1], *self.layers):
            x = layer(x).tanh()
        return x.square().mean()


def count_on_demand(replicas: Replicas) -> list[int]:
    """Two numbers that grow: uses of buckets, and those of them that find neither weights nor a read under way."""
    found, bring = [0, 0], replicas._bring

    def counted(bucket: Any, spot: Any) -> None:
        found[0] += 1
        found[1] += not spot.is_here
        bring(bucket, spot)

    replicas._bring = counted  # type: ignore[method-assign]
    return found


def evaluated(world_size: int, folder: Path, method: Any, evaluates: bool) -> dict[str, list[Any]]:
    """Uses on demand of each step and of each forward without gradients behind it, and the losses of the steps."""
    model = Chain()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    residency = Residency(store=str(folder), weights="disk", optimizer="memory")
    _, optimizer = thinwire.zero(model, adamw, method, residency=residency, local_size=world_size, announce=False)
    assert optimizer._residence is not None and optimizer._residence.replicas is not None
    replicas = optimizer._residence.replicas
    counted = count_on_demand(replicas)
    found: dict[str, list[Any]] = {"losses": [], "steps": [], "evaluations": []}
    for step in range(4):
        x, before = torch.linspace(-1, 1, 64).view(4, 16) + step, counted[1]
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        found["losses"].append(float(loss.detach()))
        found["steps"].append(counted[1] - before)
        for _ in range(2 if evaluates else 0):
            counts = list(counted)
            with torch.no_grad():
                model(x)
            found["evaluations"].append([now - then for now, then in zip(counted, counts, strict=True)])
            assert replicas.used_bytes <= replicas.capacity_bytes < replicas.total_bytes
    optimizer.close()
    return found


def runs(rank: int, world_size: int, folder: Path) -> list[tuple[dict[str, list[Any]], dict[str, list[Any]]]]:
    """Of weights on each disk, and of weights that are cut over disks: with evaluations, and without."""
    cut_small(num_held=3)
    methods = thinwire.Zero(), thinwire.Frontier(weights_over=2, gradients_over=2)
    return [
        (evaluated(world_size, folder, method, True), evaluated(world_size, folder, method, False))
        for method in methods
    ]


def test_an_evaluation_reads_ahead_and_leaves_the_steps_as_they_are(tmp_path: Path) -> None:
    for told in run_workers(runs, 2, tmp_path):
        for own, plain in told:
            assert own["losses"] == plain["losses"]
            for number, (uses, on_demand) in enumerate(own["evaluations"]):
                # What a step keeps for its backward, the first evaluation did not expect to use again: a layer's two.
                assert uses > NUM_LAYERS and on_demand <= (0 if number else 2), own["evaluations"]
            assert own["steps"][1:] == plain["steps"][1:] and max(own["steps"][1:]) < NUM_LAYERS


def cut_within_two(rank: int, world_size: int, folder: Path) -> dict[str, list[Any]]:
    """Of weights that are cut over disks, with as little memory as under a budget that leaves no room."""
    cut_small(num_held=2)
    return evaluated(world_size, folder, thinwire.Frontier(weights_over=2, gradients_over=2), False)


def test_parts_of_one_layer_are_read_while_those_before_travel(tmp_path: Path) -> None:
    """Two layers' parts fit. A layer that was gathered needs its own part no longer, so the next one is read ahead."""
    for told in run_workers(cut_within_two, 2, tmp_path):
        assert told["steps"][0] > NUM_LAYERS and told["steps"][1:] == [0, 0, 0]
