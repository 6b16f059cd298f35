"""Which dimension crosses nodes, on 2 nodes of 2 ranks: other places, the same losses, and the bytes of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import thinwire
from tests.workers import run_workers
from thinwire.errors import ConfigError
from thinwire.layout.mesh import MeshShape
from thinwire.methods.pipeline.across import ranks_across
from thinwire.models import Llama, build_model, build_skeleton
from thinwire.planner.mesh_plans import plan_on
from thinwire.planner.options import ExplainConfig
from thinwire.planner.stages import Grid, Stages, stages_of

STEPS, NUM, SIZE, LENGTH = 3, 3, 2, 8
ACROSS = ("stages", "replicas")
FIELDS = {"num_hidden_layers": 4}


def batches(step: int, replica: int) -> list[Any]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return [tuple(torch.randint(0, 64, (2, SIZE, LENGTH), generator=generator)) for _ in range(NUM)]


def trained(rank: int, across: Any) -> dict[str, Any]:
    model = build_model("tiny", 64, LENGTH, overrides=FIELDS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = thinwire.Pipeline(across=across, plan="1f1b")
    stage = thinwire.pipeline(
        model, optimizer, thinwire.Zero(), stages=2, options=options, local_size=2, announce=False
    )  # fmt: skip
    replica = stage.optimizer.comm.rank
    losses, before = [], stage.optimizer.meter.snapshot()
    for step in range(STEPS):
        given = batches(step, replica)
        stage.forward_backward(given)
        stage.step(1.0)
        losses.append(stage.optimizer.mean_loss)
        if not step:
            stage.optimizer.synchronize()
            before = stage.optimizer.meter.snapshot()
    stage.optimizer.synchronize()
    traffic = stage.optimizer.meter.snapshot() - before
    # Without what measures the links.
    steps = {key: reading for key, reading in traffic.operations.items() if key[0] != "probe_forward"}
    crossing = sum(reading.sent_bytes for (_, level), reading in steps.items() if level == "inter")
    found = {"place": (stage.pipeline.number, replica), "losses": losses, "crossing": crossing / (STEPS - 1)}
    stage.close()
    return found


def refused(rank: int) -> str:
    model = build_model("tiny", 64, LENGTH, overrides=FIELDS)
    mesh = DeviceMesh("cpu", ranks_across("replicas", 4, 2).view(2, 2), mesh_dim_names=("pipeline", "data"))
    methods: list[Any] = [thinwire.Pipeline(across="stages"), thinwire.Zero()]
    with pytest.raises(ConfigError) as raised:
        thinwire.parallelize(model, torch.optim.AdamW(model.parameters()), mesh, methods)
    return str(raised.value)


def everything(rank: int, world_size: int) -> dict[str, Any]:
    return {across: trained(rank, across) for across in ACROSS} | {"refused": refused(rank)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_workers(everything, 4, local_size=2)


def simulated(across: Any) -> tuple[Llama, Stages, Grid]:
    model, grid = build_skeleton("tiny", 64, LENGTH, FIELDS), Grid(2, 2, 1e9, rate=1e6)
    assert isinstance(model, Llama)
    return model, stages_of(model, thinwire.Pipeline(across=across, plan="1f1b"), 2, NUM, SIZE, LENGTH, grid), grid


def test_ranks_have_other_places_and_the_same_losses(ranks: list[dict[str, Any]]) -> None:
    assert [rank["stages"]["place"] for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [rank["replicas"]["place"] for rank in ranks] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert all(rank[across]["losses"] == ranks[0]["stages"]["losses"] for rank in ranks for across in ACROSS)
    assert (
        "'stages': the ranks of the mesh lie otherwise, [0, 2, 1, 3]; nearest: across 'replicas'" in ranks[0]["refused"]
    )


@pytest.mark.parametrize("across", ACROSS)
def test_bytes_between_nodes_are_those_of_the_formula(across: str, ranks: list[dict[str, Any]]) -> None:
    model, stages, grid = simulated(across)
    config = ExplainConfig(
        strategy="zero", nodes=2, local_size=2, micro_batches=NUM, micro_batch=SIZE, seq_len=LENGTH,
        mesh="pipeline=2,data=2", tables={"pipeline": {"across": across}},
    )  # fmt: skip
    shape = MeshShape.parse("pipeline=2,data=2")
    links = grid.links(2, across)
    for rank in ranks:
        stage, _ = rank[across]["place"]
        plan = plan_on(thinwire.Zero(), stages.parts[stage], model, config, shape)
        borders = stages.link_bytes[stage, 1 - stage] if links.nodes[0] != links.nodes[1] else 0
        assert rank[across]["crossing"] == plan.sent_on("inter") + borders
