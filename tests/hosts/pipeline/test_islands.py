"""Islands of pipelines: the outer steps of whole models, whose layers lie on several ranks of each island."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from tests.hosts.pipeline.test_stage import EXACT, batches, model
from tests.hosts.pipeline.test_tensor import adamw_with_eps, whole_of
from tests.hosts.test_mesh_islands import saved_and_resumed
from tests.workers import run_workers
from thinwire.methods.pipeline.inside import check_inside, check_recovers
from thinwire.models.tensor import cut_over

EVERY, STEPS = 2, 4
MEAN: dict[str, Any] = {"sync_every": EVERY, "outer_lr": 1.0, "outer_momentum": 0.0}
STREAM: dict[str, Any] = {"sync_every": EVERY, "num_fragments": 2, "overlap_steps": 1, "mix": 0.25, "codec": "int8"}
# name: the method of islands, the inner one, tensor ranks.
ROWS: dict[str, tuple[Any, Any, int]] = {
    "mean": (thinwire.DiLoCo(**MEAN), thinwire.DDP(), 1),
    "stream": (thinwire.StreamingDiLoCo(**STREAM), thinwire.SDP4Bit(), 1),
    "tensor": (thinwire.DiLoCo(**MEAN), thinwire.Zero(), 2),
}


def make(name: str) -> tuple[Any, nn.Module, thinwire.PipelinedModel]:
    outer, inner, tensor = ROWS[name]
    sizes = {"island": 2, "pipeline": 2, "data": 1} | ({"tensor": 2} if tensor > 1 else {})
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    whole = model()
    if tensor > 1:
        cut_over(whole, mesh["tensor"])
    stage = thinwire.parallelize(
        whole, adamw_with_eps(whole), mesh, [outer, inner, thinwire.Pipeline(**EXACT)], local_size=2 * tensor,
        checked=True, announce=False,
    )  # fmt: skip
    assert isinstance(stage, thinwire.PipelinedModel)
    return mesh, whole, stage


def take(mesh: Any, stage: thinwire.PipelinedModel, step: int) -> float:
    stage.forward_backward(batches(step, 2, mesh["island"].get_local_rank(), 2))
    return float(stage.step(0.5))


def trained(name: str) -> dict[str, Any]:
    mesh, whole, stage = make(name)
    place = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
    optimizer: Any = stage.optimizer
    norms, sent, formula = [], 0, 0
    for step in range(STEPS):
        before = optimizer.meter.snapshot().sent_bytes
        norms.append(take(mesh, stage, step))
        # Links are measured in the second, and a tensor axis gathers what each of its ranks has carried.
        if step > 1:
            sent += optimizer.meter.snapshot().sent_bytes - before
            formula += optimizer.inner.bytes_per_step
            formula += stage.pipeline.sent_bytes(batches(0, 2, 0, 2))[stage.pipeline.number]
    formula += (STEPS // EVERY - 1) * optimizer.traffic.bytes_per_round
    tokens, targets = batches(99, 1)[0]
    # A forward brings the copy of a tied weight; what comes after it is another weight.
    whole(tokens, targets)
    stage.finish()
    found = {
        "place": place, "norms": norms, "sent": sent, "formula": formula, "loss": float(whole(tokens, targets)),
        "weights": {key: param.detach().clone() for key, param in whole.named_parameters()},
        "uncompressed": stage.uncompressed_bytes_per_step,
    }  # fmt: skip
    stage.close()
    return found


def of_four(rank: int, world_size: int) -> dict[str, Any]:
    return {name: trained(name) for name in ("mean", "stream")}


def of_eight(rank: int, world_size: int) -> dict[str, Any]:
    return {"tensor": trained("tensor")}


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[dict[str, Any]]]:
    four, eight = run_workers(of_four, 4), run_workers(of_eight, 8)
    return {name: [rank[name] for rank in (eight if name == "tensor" else four)] for name in ROWS}


def alone() -> tuple[dict[str, Tensor], list[list[float]]]:
    """Both islands in one process; every second step they take the mean of their weights."""
    islands = [model(), model()]
    optimizers = [adamw_with_eps(island) for island in islands]
    norms: list[list[float]] = [[], []]
    for step in range(STEPS):
        for number, (island, optimizer) in enumerate(zip(islands, optimizers, strict=True)):
            for batch in batches(step, 2, number, 2):
                (island(*batch) / 2).backward()
            norms[number].append(float(nn.utils.clip_grad_norm_(island.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                for one, other in zip(islands[0].parameters(), islands[1].parameters(), strict=True):
                    mean = (one + other) / 2
                    one.copy_(mean)
                    other.copy_(mean)
    return {key: param.detach() for key, param in islands[0].named_parameters()}, norms


@pytest.mark.parametrize("name", ["mean", "tensor"])
def test_islands_of_stages_are_islands_of_whole_models(name: str, ranks: dict[str, list[dict[str, Any]]]) -> None:
    expected, norms = alone()
    for found in ranks[name]:
        assert found["norms"] == pytest.approx(norms[found["place"]["island"]], rel=1e-4)
    for island in range(2):
        for number in range(2):
            at = {"island": island, "pipeline": number}
            parts = [found["weights"] for found in ranks[name] if at.items() <= found["place"].items()]
            for key in parts[0]:
                value = whole_of(key, [part[key] for part in parts]) if len(parts) > 1 else parts[0][key]
                torch.testing.assert_close(value, expected[key], rtol=0, atol=4e-6, msg=key)


@pytest.mark.parametrize("name", ROWS)
def test_all_islands_end_with_one_model(name: str, ranks: dict[str, list[dict[str, Any]]]) -> None:
    told = ranks[name]
    # Called, it is the pipeline's forward: the copy of a tied weight is the result's, too.
    assert {found["loss"] for found in told} == {told[0]["loss"]}
    half = len(told) // 2
    for one, other in zip(told[:half], told[half:], strict=True):
        assert all(torch.equal(one["weights"][key], other["weights"][key]) for key in one["weights"])


def test_bytes_are_those_of_the_formula(ranks: dict[str, list[dict[str, Any]]]) -> None:
    assert all(found["sent"] == found["formula"] for found in ranks["mean"])


def goes_on(rank: int, world_size: int, folder: Path) -> tuple[list[Any], list[Any]]:
    return saved_and_resumed(lambda: make("stream"), take, folder)


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for one, other in run_workers(goes_on, 4, tmp_path):
        assert one == other


def test_what_islands_of_stages_can_not_do_is_refused() -> None:
    def refusals(**options: Any) -> str:
        outer = thinwire.DiLoCo(**options)
        with pytest.raises(thinwire.ConfigError) as caught:
            check_inside(outer, 2)
            check_recovers(thinwire.Pipeline(recover="average"), outer, {"data": 1})
        return str(caught.value)

    assert "leave ascent out" in refusals(ascent=0.1)
    assert "would gather a stage's weights anew" in refusals(inner=thinwire.FSDP())
    assert "recover 'average' inside of islands" in refusals()
