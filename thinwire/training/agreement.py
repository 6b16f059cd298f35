"""Before they start, the ranks compare their configurations and agree on the checkpoint to continue from."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.checkpoint import CheckpointError, all_of, choose, latest, step_of, verify
from thinwire.collectives.elastic import BEGUN, PATIENCE_S
from thinwire.collectives.store_gather import of_all_ranks, told_by_first
from thinwire.errors import ConfigError, ThinwireError
from thinwire.run.config import PER_MACHINE, TrainConfig
from thinwire.run.place import IslandPlace
from thinwire.run.run import tables_in_effect
from thinwire.table import Row

GatherObjects = Callable[[Any], list[Any]]

POLL_S = 0.05
HINTS = {"tokens": "the machines hold different data; copy the same files to all of them"}


def agree(config: TrainConfig, *, tokens: str, dtype: str | None) -> str:
    """The compute dtype of all ranks. A collective on the default group.

    Every rank sends its configuration, the digest of its tokens, and the dtype that is fast on its machine (None: not
    measured). bf16 is chosen if no rank is faster in fp32. Raises ConfigError if configurations or tokens differ.
    """
    mine = {name: value for name, value in asdict(config).items() if name not in PER_MACHINE}
    # Options without an effect are not written to config.toml, which some ranks may read and others write.
    used = tables_in_effect(config)
    mine |= {"tables": {name: values for name, values in config.tables.items() if name in used}}
    mine |= {"tokens": tokens, "fast dtype": dtype}
    everyone = of_all_ranks(mine, "its configuration")
    dtypes = {stated.pop("fast dtype") for stated in everyone}
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                hint = HINTS.get(name, "give all machines the same configuration")
                raise ConfigError(f"rank 0 has {name} {everyone[0][name]!r}, rank {rank} has {value!r}: {hint}")
    return "fp32" if "fp32" in dtypes else "bf16"


def agree_on_checkpoint(checkpoints: Path, *, verifies: bool) -> tuple[Path | None, list[Row]]:
    """The checkpoint to continue from, if any, and rows that explain the choice. A collective on the default group.

    It is the last checkpoint. Machines with disks of their own may have different last checkpoints, if one died while
    saving or lost a file; then it is the newest checkpoint that is sound on every disk. Raises ConfigError if there is
    no such checkpoint, CheckpointError on all ranks if a disk holds checkpoints and none is sound. verifies: whether
    this rank compares checksums first, because no other process has done so on its disk.
    """
    mine: Path | None = None
    wrong: list[str] = []
    problem = ""
    try:
        mine, wrong = choose(checkpoints, moves_pointer=False) if verifies else (latest(checkpoints), [])
    except CheckpointError as error:
        problem = str(error)
    raise_first(of_all_ranks(problem, "its checkpoints"), "rank")
    rows: list[Row] = [("a later checkpoint", "passed over: it is damaged", why) for why in wrong]
    if wrong and dist.get_rank():
        print("\n".join(f"thinwire: a checkpoint is passed over: {why}" for why in wrong), file=sys.stderr)
    agreed, more = _newest_of_all(checkpoints, mine, "rank", partial(of_all_ranks, what="its checkpoints"))
    return agreed, [*rows, *more]


def raise_first(problems: list[str], who: str) -> None:
    """Raise CheckpointError with the first problem. problems: one for each rank or island; empty if there is none."""
    for number, problem in enumerate(problems):
        if problem:
            raise CheckpointError(f"{who} {number}: {problem}")


def agree_on_start(checkpoints: Path, *, verifies: bool, island: IslandPlace) -> tuple[Path | None, list[Row]]:
    """The same for a run that may have islands: all islands agree, and all raise any island's problem."""
    if island.num_islands == 1:
        return agree_on_checkpoint(checkpoints, verifies=verifies)
    mine: Path | None = None
    rows: list[Row] = []
    problem = ""
    try:
        mine, rows = agree_on_checkpoint(checkpoints, verifies=verifies)
    except ThinwireError as error:
        problem = str(error)
    if dist.get_rank() == 0:
        mine, rows = agree_among_islands(checkpoints, mine, island, problem, rows)
    return told_by_first(mine, "the checkpoint to go on from"), rows


def agree_among_islands(
    checkpoints: Path, mine: Path | None, island: IslandPlace, problem: str = "", rows: Sequence[Row] = ()
) -> tuple[Path | None, list[Row]]:
    """The same between islands, each of which proposes `mine`. Call it on the first rank of every island.

    Islands start together from the same step. An island that comes later takes the state of the others and needs no
    checkpoint. problem: why this island can't use any of its checkpoints. rows: this island's report, which all islands
    show. Raises CheckpointError if an island has a problem, ThinwireError if the meeting can't be reached, or if an
    island does not come within PATIENCE_S.
    """
    host, port = island.meet.rsplit(":", 1)
    rounds = count()

    def of_all_islands(word: Any) -> list[Any]:
        key, due = f"checkpoint/{next(rounds)}", time.monotonic() + PATIENCE_S
        store.set(f"{key}/{island.number}", json.dumps(word))
        keys = [f"{key}/{number}" for number in range(island.num_islands)]
        while not store.check(keys):
            if time.monotonic() > due:
                raise ThinwireError(f"island {island.number}: another one has not come in {PATIENCE_S:g} s")
            time.sleep(POLL_S)
        return [json.loads(store.get(key)) for key in keys]

    try:
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        if store.check([BEGUN]):
            late: list[Row] = [("--resume", "takes the other islands' state", problem)] if problem else []
            return mine, [*rows, *late]
        raise_first(of_all_islands(problem), "island")
        of_others = [
            (f"{what} of island {number}", effect, why)
            for number, told in enumerate(of_all_islands(list(rows)))
            for what, effect, why in told
            if number != island.number
        ]
        agreed, more = _newest_of_all(checkpoints, mine, "island", of_all_islands)
        return agreed, [*rows, *of_others, *more]
    except dist.DistError as error:
        raise ThinwireError(f"island {island.number} can't reach the meeting of the islands: {error}") from error


def _newest_of_all(
    checkpoints: Path, mine: Path | None, who: str, gather: GatherObjects
) -> tuple[Path | None, list[Row]]:
    """The last checkpoint if all have the same one, else the newest that is sound on every rank's or island's disk."""
    lasts = gather(step_of(mine))
    if len(set(lasts)) == 1:
        return mine, []
    held = gather([step_of(path) for path in _sound(checkpoints) if step_of(path) <= step_of(mine)])
    common = set(held[0]).intersection(*held[1:])
    if not common:
        shown = "; ".join(f"{who} {number}: {steps or 'none'}" for number, steps in enumerate(held))
        raise ConfigError(
            f"no checkpoint lies on the disks of all {who}s ({shown}): bring the missing folders back, or "
            "copies of others, or start anew with --overwrite on all machines"
        )
    step = max(common)
    why = f"the last that every {who} has; their last ones are of steps {sorted(set(lasts))}"
    row = ("--resume", f"goes on after step {step}", why)
    return next(path for path in all_of(checkpoints) if step_of(path) == step), [row]


def _sound(checkpoints: Path) -> Iterator[Path]:
    """The checkpoints whose checksums are right."""
    for path in all_of(checkpoints):
        with suppress(CheckpointError):
            verify(path)
            yield path


def max_over_ranks(value: int) -> int:
    """The largest of the ranks' numbers. A collective on the default group."""
    largest = torch.tensor(value)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)
