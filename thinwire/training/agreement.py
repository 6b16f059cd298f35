"""Ranks compare what they are about to do before they do it together."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from thinwire.errors import ConfigError
from thinwire.training.config import PER_MACHINE, TrainConfig

HINTS = {
    "tokens": "the machines hold different data; copy the same files to all of them",
    "step": "the machines hold different checkpoints; start all of them with the same --run-dir and --resume",
}


def agree(config: TrainConfig, *, tokens: str, step: int, dtype: str | None) -> str:
    """The compute dtype of all ranks; a collective on the default group.

    Every rank states its configuration, the digest of its tokens, the step to continue from, and the dtype that is
    fast there (None: no opinion). bf16 needs that no rank is faster in fp32. Raises ConfigError where they differ.
    """
    mine = {name: value for name, value in asdict(config).items() if name not in PER_MACHINE}
    mine |= {"tokens": tokens, "step": step, "fast dtype": dtype}
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    dtypes = {stated.pop("fast dtype") for stated in everyone}
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                hint = HINTS.get(name, "give all machines the same configuration")
                raise ConfigError(f"rank 0 has {name} {everyone[0][name]!r}, rank {rank} has {value!r}: {hint}")
    return "fp32" if "fp32" in dtypes else "bf16"
