"""--compile: layers are compiled without their hooks, and every strategy takes the same steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.alone import small_config, trainer_of
from tests.workers import run_workers
from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.launch.check_parts import check_compiled
from thinwire.run.config import TrainConfig
from thinwire.run.run import Run
from thinwire.training import engine

FRONTIER = {"strategy": "frontier", "tables": {"frontier": {"weights_over": 2}}}


def train(rank: int, world_size: int, config: TrainConfig) -> tuple[list[float], int]:
    """The losses, and how often a graph was compiled for them."""
    # Traces as inductor does, and needs no C++ compiler.
    engine.COMPILER = "aot_eager"
    Path(config.run_dir).mkdir(parents=True, exist_ok=True)
    trainer = trainer_of(config, rank, world_size)
    trainer.run()
    losses = [] if trainer.reporter is None else [record.loss for record in trainer.reporter.metrics.records]
    if trainer.reporter is not None:
        trainer.reporter.close()
    return losses, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("strategy", ["sdp4bit", pytest.param("ddp", marks=pytest.mark.whole)])
def test_compiled_layers_train_the_same(strategy: str, tmp_path: Path) -> None:
    config = small_config(
        tmp_path, tokens_per_step=128, workers=2, local_size=1, steps=3, sample_tokens=3, checkpoint_every=0,
        strategy=strategy,
    )  # fmt: skip
    (losses, none), _ = run_workers(train, 2, config)
    (others, graphs), _ = run_workers(train, 2, replace(config, compile=True, run_dir=str(tmp_path / "compiled")))
    assert none == 0 and graphs > 0
    assert others == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("more", [{"strategy": "fsdp"}, {"strategy": "diloco", "inner": "zeropp"}, FRONTIER])
def test_weights_that_come_and_go_are_refused(more: dict[str, Any]) -> None:
    config = TrainConfig(workers=2, compile=True, **more)
    with pytest.raises(ConfigError, match="brings and drops weights around every layer"):
        check_compiled(config, Run.of(config).strategy, Topology(2, 1))


def test_cut_matrices_are_refused() -> None:
    config = TrainConfig(workers=2, compile=True, mesh="data=1,tensor=2")
    with pytest.raises(ConfigError, match="--mesh data=1,tensor=2 cuts matrices inside of a layer"):
        check_compiled(config, Run.of(config).strategy, Topology(2, 1))
