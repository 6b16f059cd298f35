"""All ranks let rows travel in the way that the first rank's word says, and train as with any other way."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.training.alone import small_config
from tests.workers import run_workers
from thinwire.device import Device
from thinwire.methods.experts import MEASURE, dictionary, way_text
from thinwire.models.capacity import RowLoad
from thinwire.planner.chosen import choose_experts
from thinwire.run.config import with_derived
from thinwire.run.place import ProcessPlace
from thinwire.run.run import Run
from thinwire.run.signals import StopFlag
from thinwire.training.trainer import Trainer

STEPS = 8


def train(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> tuple[list[str], list[float], list[int]]:
    """The ways and losses of some steps, and which of them measured the links. Every way is near the prediction."""
    dictionary.NEAR = 1e9
    config = small_config(
        Path(folder), workers=4, local_size=2, strategy="zero", steps=STEPS, sample_tokens=0,
        tables={"experts": {"parallel": 4} | options},
    )  # fmt: skip
    config = with_derived(config.__class__(**{**vars(config), "model": "moe-tiny"}))
    run = Run.of(config)
    run, _ = choose_experts(run, Device(), "fp32") if options else (run, [])
    trainer = Trainer(run, ProcessPlace(rank, rank, world_size), StopFlag(), "fp32", [], Device())
    ways, losses, measured = [], [], list[int]()
    for _ in range(STEPS):
        if trainer.step == 5 and trainer.ways is not None:
            # As if steps had drifted; ranks other than the first one have no say.
            trainer.ways.dictionary.note = lambda *_: MEASURE if rank == 0 else 0  # type: ignore[method-assign]
        experts = trainer.engine.stage.experts
        assert experts is not None
        if trainer.ways is not None and not trainer.step:
            counts = torch.tensor([2.0, 7, 5])[None, :, None].expand(4, 3, 8) * trainer.engine.batch.accumulation
            # Each layer's own, from the least to the most uneven one.
            assert [each.counts for each in trainer.ways._rows(RowLoad(counts=counts))] == [
                [[num] * 8] * 4 for num in (2, 5, 7)
            ]
        ways.append(way_text(experts.options))
        trainer._take_step()
        losses.append(trainer.optimizer.mean_loss)
        if trainer.optimizer.told == MEASURE:
            measured.append(trainer.step)
            break
    trainer.engine.close()
    dist.barrier()
    return ways, losses, measured


def test_ranks_agree_on_the_way_of_each_step_and_losses_are_those_of_one_way() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tried = run_workers(train, 4, folder, {"move": "auto", "route": "auto"}, local_size=2)
        fixed = run_workers(train, 4, folder, {}, local_size=2)
    assert all(each == tried[0] for each in tried)
    ways, losses, measured = tried[0]
    assert len(set(ways)) == 3 and measured == [6]
    assert set(fixed[0][0]) == {"tokens, linear, 1 chunk"}
    assert losses == pytest.approx(fixed[0][1][:6], rel=1e-6)
