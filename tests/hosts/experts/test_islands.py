"""Islands whose ranks share the experts train as islands whose ranks have all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from tests.hosts.test_tensor import save
from tests.workers import run_workers
from thinwire._compat import default_store
from thinwire.checkpoint import Source
from thinwire.models.moe import MoEConfig, MoELlama

CONFIG = MoEConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, num_local_experts=4, max_position_embeddings=16,
)  # fmt: skip
STEPS, SAVED = 4, 2
MESHES = {"replicas": {"island": 2, "data": 2}, "shared": {"island": 2, "data": 1, "expert": 2}}


def stage_of(kind: str) -> tuple[Any, MoELlama]:
    sizes, model = MESHES[kind], MoELlama(CONFIG)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    methods: list[Any] = [thinwire.DiLoCo(sync_every=2, outer_lr=0.7, outer_momentum=0.9), thinwire.Zero()]
    methods += [thinwire.ExpertParallel(slices=2)] if "expert" in sizes else []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return thinwire.parallelize(model, optimizer, mesh, methods, local_size=1, announce=False), model


def step(stage: Any, number: int) -> float:
    draws = torch.Generator().manual_seed(10 * number + dist.get_rank())
    tokens = torch.randint(0, 64, (2, 17), generator=draws)
    stage.forward_backward([(tokens[:, :-1], tokens[:, 1:])])
    return float(stage.step(1.0))


def train(rank: int, world_size: int, folder: Path) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Replicas, shared experts, and these resumed: a process opens all three sets of islands, one after the other."""
    return [trained(rank, kind, folder) for kind in ("replicas", "shared", "resumed")]


def trained(rank: int, kind: str, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """The norms of the steps, and the whole weights after the last exchange."""
    stage, model = stage_of("replicas" if kind == "replicas" else "shared")
    own, norms = folder / f"island-{rank // 2}", list[float]()
    if kind == "resumed":
        stage.restore(Source(own / f"step-{SAVED:08}", rank % 2))
    for number in range(SAVED if kind == "resumed" else 0, STEPS):
        if kind == "shared" and number == SAVED:
            save(stage, own, SAVED, dist.PrefixStore(own.name, default_store()))
        norms.append(step(stage, number))
    stage.finish()
    found = weights_of(stage, model)
    stage.close()
    return norms, found


def weights_of(stage: Any, model: MoELlama) -> dict[str, Tensor]:
    own = {name: param.detach().clone() for name, param in model.named_parameters()}
    return own if stage.experts is None else stage.experts.gather(own)


def test_islands_share_experts_and_resume(tmp_path: Path) -> None:
    every = run_workers(train, 4, tmp_path)
    for (plain_norms, plain), (norms, weights), (resumed_norms, resumed) in every:
        assert norms == pytest.approx(plain_norms, rel=1e-4)
        assert resumed_norms == norms[SAVED:]
        for name, value in plain.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-4, msg=name)
            assert torch.equal(resumed[name], weights[name]), name


def test_a_strategy_of_replicas_is_refused_inside_islands() -> None:
    with pytest.raises(thinwire.ConfigError, match="ddp in diloco can't train experts over several ranks"):
        thinwire.methods.experts.check_data_method(thinwire.DiLoCo(inner=thinwire.DDP()))
    with pytest.raises(thinwire.ConfigError, match=r"ascent 0.1 in diloco, and experts over several ranks"):
        thinwire.methods.experts.check_data_method(thinwire.DiLoCo(inner=thinwire.Zero(), ascent=0.1))
