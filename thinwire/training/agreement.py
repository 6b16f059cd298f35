"""Ranks compare what they are about to do before they do it together."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.checkpoint import CheckpointError, all_of, choose, latest, step_of, verify
from thinwire.errors import ConfigError
from thinwire.training.config import PER_MACHINE, TrainConfig
from thinwire.training.effects import Row

HINTS = {
    "tokens": "the machines hold different data; copy the same files to all of them",
}


def agree(config: TrainConfig, *, tokens: str, dtype: str | None) -> str:
    """The compute dtype of all ranks; a collective on the default group.

    Every rank states its configuration, the digest of its tokens, and the dtype that is fast there (None: no opinion).
    bf16 needs that no rank is faster in fp32. Raises ConfigError where they differ.
    """
    mine = {name: value for name, value in asdict(config).items() if name not in PER_MACHINE}
    mine |= {"tokens": tokens, "fast dtype": dtype}
    everyone = _of_all_ranks(mine)
    dtypes = {stated.pop("fast dtype") for stated in everyone}
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                hint = HINTS.get(name, "give all machines the same configuration")
                raise ConfigError(f"rank 0 has {name} {everyone[0][name]!r}, rank {rank} has {value!r}: {hint}")
    return "fp32" if "fp32" in dtypes else "bf16"


def agree_on_checkpoint(checkpoints: Path, *, verifies: bool) -> tuple[Path | None, list[Row]]:
    """The checkpoint to go on from, None for none, and what is to be said of it; a collective on the default group.

    It is the last one, unless machines with disks of their own have different last ones: one was saving when it died,
    or lost a file. Then it is the newest that lies sound on every disk. Raises ConfigError where there is none,
    CheckpointError where a disk has some and none of them is sound.
    verifies: whether this rank compares checksums before it names its last one, since nobody has on its disk.
    """
    mine, wrong = choose(checkpoints, moves_pointer=False) if verifies else (latest(checkpoints), [])
    rows: list[Row] = [("a later checkpoint", "passed over: it is damaged", why) for why in wrong]
    if wrong and dist.get_rank():
        print("\n".join(f"thinwire: a checkpoint is passed over: {why}" for why in wrong), file=sys.stderr)
    lasts = _of_all_ranks(step_of(mine))
    if len(set(lasts)) == 1:
        return mine, rows
    held = _of_all_ranks([step_of(path) for path in _sound(checkpoints) if step_of(path) <= step_of(mine)])
    common = set(held[0]).intersection(*held[1:])
    if not common:
        shown = "; ".join(f"rank {rank}: {steps or 'none'}" for rank, steps in enumerate(held))
        raise ConfigError(
            f"no checkpoint lies on the disks of all ranks ({shown}): bring the missing folders back, or start anew "
            "with --overwrite on all machines"
        )
    step = max(common)
    why = f"the last on every disk; the disks' last ones are of steps {sorted(set(lasts))}"
    rows.append(("--resume", f"goes on after step {step}", why))
    return next(path for path in all_of(checkpoints) if step_of(path) == step), rows


def _sound(checkpoints: Path) -> Iterator[Path]:
    """Those whose checksums are right."""
    for path in all_of(checkpoints):
        with suppress(CheckpointError):
            verify(path)
            yield path


def _of_all_ranks(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
