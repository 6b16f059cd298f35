"""A trainer in a rank of a test, without a launcher."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from thinwire.device import Device
from thinwire.run.config import TrainConfig, with_derived
from thinwire.run.place import ProcessPlace
from thinwire.run.run import Run
from thinwire.run.signals import StopFlag
from thinwire.training.trainer import Trainer


def small_config(folder: Path, **more: Any) -> TrainConfig:
    """A run of the smallest model, whose text lies in the folder too."""
    if not (folder / "data.txt").exists():
        # Ranks may come here at the same time: none may read half of what another one writes.
        part = folder / f"data-{os.getpid()}"
        part.write_text("some words to learn\n" * 200)
        part.replace(folder / "data.txt")
    return TrainConfig(
        model="tiny", data=str(folder / "data.txt"), cache_dir=str(folder / "cache"), run_dir=str(folder / "run"),
        seq_len=16, micro_batch=2, eval_sequences=2, dtype="fp32", **more,
    )  # fmt: skip


def trainer_of(config: TrainConfig, rank: int, world_size: int, device: Device | None = None) -> Trainer:
    """The trainer of one rank; the default process group has all of them."""
    place = ProcessPlace(rank, rank, world_size)
    return Trainer(Run.of(with_derived(config)), place, StopFlag(), "fp32", [], device or Device())
