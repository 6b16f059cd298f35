"""Where a resumed run takes its state from, if the number of islands has changed since it was saved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from thinwire.checkpoint import WEIGHTS, CheckpointError, Piece, Source, latest, next_loss, verify
from thinwire.checkpoint.folder import Manifest, verified_at
from thinwire.collectives.store_gather import told_by_first
from thinwire.compose import Stage
from thinwire.run.place import IslandPlace
from thinwire.run.run_dir import RunDir
from thinwire.table import Row

# Of a checkpoint's manifest: how many islands trained together; 1 where none did.
ISLANDS = "islands"


def num_islands(checkpoint: Path) -> int:
    """Number of islands that saved a checkpoint."""
    return Manifest.read(checkpoint).about.get(ISLANDS, 1)


def folder_to_read(run_dir: RunDir, island: IslandPlace) -> Path:
    """The checkpoints that an island continues from: its own, or the run's if the last save was without this island."""
    if not island.number:
        return run_dir.checkpoints
    of_run = RunDir(run_dir.path.parent).checkpoints
    try:
        last = latest(of_run)
        is_part = last is None or island.number < num_islands(last)
    except CheckpointError:
        is_part = True
    return run_dir.checkpoints if is_part else of_run


def is_verified(checkpoints: Path) -> bool:
    """Whether all checksums of the last checkpoint have been compared; true if there is no checkpoint."""
    last = latest(checkpoints)
    return last is None or bool(verified_at(last))


@dataclass(frozen=True)
class Origin:
    """What is known about the state that a rank has restored, and about the other islands' states.

    Attributes:
        num_islands: number of islands that saved; 1 for a run without islands.
        has_own: whether this island is one of them.
        next_loss: what the loss of the next step must be; None: unknown, for the reason in `why_unknown`.
        rows: of the load report.
    """

    num_islands: int
    has_own: bool
    next_loss: float | None
    why_unknown: str = "the loss of the next step is not known"
    rows: tuple[Row, ...] = ()

    @classmethod
    def of(cls, source: Source, num_islands: int, *, has_own: bool) -> Origin:
        """The origin if no island has joined or left."""
        return cls(num_islands, has_own, next_loss(source.folder))

    def with_islands(self, number: int) -> Origin:
        """The origin if another number of islands continues."""
        before = self.num_islands
        row: Row = ("resume: islands", "left out", f"{before} have saved, and {number} go on")
        if number > before:
            new = f"islands {before} to {number - 1} start from" if before > 1 else f"all {number} start from"
            row = ("resume: islands", "begun", f"{new} the run's checkpoint")
        if before == 1:
            return replace(self, rows=(row,))
        # An island's loss is that of its part of the data.
        why = f"{number} island(s) share the data that {before} did"
        return replace(self, next_loss=None, why_unknown=why, rows=(row,))


def leave_islands(source: Source, num_islands: int, stage: Stage, rank: int) -> Origin:
    """Continue without islands, from the mean of their weights, on any mesh. A collective over all ranks.

    The first rank reads the other islands' checkpoints of the same step, beside `source`, the first island's.
    """
    means: dict[str, Tensor] = {}
    told: tuple[list[int], list[Row], float | None] = [], [], None
    if rank == 0:
        sources, missing = islands_beside(source.folder, num_islands)
        means = mean_weights(list(sources.values()))
        losses = [next_loss(one.folder) for one in sources.values()]
        known = [loss for loss in losses if loss is not None]
        mean_loss = sum(known) / len(known) if len(known) == num_islands else None
        told = list(sources), missing, mean_loss
    (there, missing, mean_loss), names = told_by_first((told, list(means)), "the mean of the islands' weights")
    shapes, comm = source.common["shapes"], stage.optimizer.everyone
    values = {name: means[name] if rank == 0 else torch.empty(shapes[name]) for name in names}
    for value in values.values():
        comm.wait(comm.broadcast_(value))
    rows: list[Row] = [("resume: weights of the islands", "carried", f"islands {there} have the same bits")]
    why = "the islands' losses of the next step are not all known"
    if values:
        stage.adopt_weights(values)
        rows = [("resume: weights of the islands", "transformed", f"the mean of those of islands {there}")]
        why = f"the weights are the mean of {len(there)} islands', with which no loss was taken"
    source.is_same = False
    rows += [*missing, ("resume: optimizer state", "carried", "island 0's; those of the others are dropped")]
    return Origin(num_islands, True, None if values else mean_loss, why, tuple(rows))


def islands_beside(first: Path, num_islands: int) -> tuple[dict[int, Source], list[Row]]:
    """The sound checkpoints of all islands at the first one's step, by number; a row for each island without one.

    They give whole tensors, whatever part of them this rank trains.
    """
    found, missing = {0: Source(first, 0)}, []
    for number in range(1, num_islands):
        path = RunDir(first.parent.parent).island(number).checkpoints / first.name
        try:
            verify(path)
            found[number] = Source(path, 0)
        except CheckpointError as error:
            missing.append((f"resume: weights of island {number}", "left out", str(error)))
    return found, missing


def mean_weights(sources: list[Source]) -> dict[str, Tensor]:
    """The mean of trained weights, by name, in fp32 and rounded once; empty if all have the same bits."""
    means: dict[str, Tensor] = {}
    differ = False
    for name, shape in sources[0].common["shapes"].items():
        if not sources[0].has(f"{WEIGHTS}/{name}"):
            continue
        total, first = torch.zeros(shape, dtype=torch.float64), None
        for source in sources:
            weights = torch.empty(shape)
            source.read({f"{WEIGHTS}/{name}": Piece.whole(weights)})
            first = weights if first is None else first
            differ = differ or not torch.equal(weights, first)
            total += weights
        means[name] = (total / len(sources)).float()
    return means if differ else {}
