"""The checkpoints of a run on one rank: what they hold, and the loss of the step after each of them."""

from __future__ import annotations

import math
from typing import Any

import torch

from thinwire.checkpoint import FROZEN, Disk, Keep, Piece, Saver, store_of_ranks
from thinwire.checkpoint.folder import latest, step_of
from thinwire.report.machine import versions
from thinwire.run.run_dir import RunDir
from thinwire.run.settings import to_toml
from thinwire.training.engine import Engine
from thinwire.training.origin import ISLANDS
from thinwire.training.proof import Proof, circumstances_of
from thinwire.training.ways import WaysInUse


class Checkpoints:
    """Saves the run, and remembers what a loss must be. Making it, on every rank, is a collective.

    Attributes:
        saver: what writes them.
        about: what every checkpoint says of the run.
        known_after: a step after which the next loss is known: its checkpoint has it, or has that of another layout.
        proof: what the next loss must be, after a resume.
    """

    def __init__(self, engine: Engine, ways: WaysInUse | None) -> None:
        config, place = engine.config, engine.place
        self.engine, self.ways, self.folder = engine, ways, RunDir(config.run_dir).checkpoints
        disk = Disk.find(self.folder, place.rank, self._numbers_of_ranks)
        store = store_of_ranks(place.rank, place.world_size, self._numbers_of_ranks)
        keep = Keep(config.keep_last, config.keep_every, config.keep_best)
        self.saver = Saver(self.folder, disk, store, keep, config.timeout)
        # Training would stand still while it is put together.
        self.about: dict[str, Any] = {
            "strategy": config.strategy,
            "versions": versions(),
            "circumstances": circumstances_of(engine),
            ISLANDS: place.island.num_islands,
            "config": to_toml(config),
        }
        if config.mesh_shape.pipeline * config.mesh_shape.tensor > 1:
            self.about["mesh"] = str(config.mesh_shape)
        self.known_after = -1
        self.proof: Proof | None = None

    def note_way(self) -> None:
        """Say in further checkpoints how rows of experts travel now."""
        self.about = {**self.about, "circumstances": circumstances_of(self.engine)}

    def save(self, step: int) -> None:
        """Start to write a checkpoint, if replicas still have the same bits on all ranks."""
        engine = self.engine
        engine.optimizer.check_replicas()
        snapshot = engine.stage.snapshot()
        snapshot.pieces |= {f"{FROZEN}/{name}": Piece.whole(tensor) for name, tensor in engine.frozen.items()}
        own, common = self.own_state(step)
        snapshot.own |= own
        snapshot.common |= common
        loss = engine.optimizer.mean_loss
        self.saver.save(step, snapshot, loss=loss if math.isfinite(loss) else None, about=self.about)

    def own_state(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the trainer saves: of this rank, and the same on all ranks."""
        engine = self.engine
        own = {"rng": torch.get_rng_state(), "buffers": engine.buffers}
        if (device_rng := engine.device.random_state()) is not None:
            own["device_rng"] = device_rng
        position = {"step": step, "tokens": engine.corpus.digest, "loader": engine.loader.state_dict()}
        position |= {} if self.ways is None else {"way": self.ways.name}
        return {"trainer": own}, {"trainer": position, "shapes": engine.shapes}

    def compare_losses(self, step: int, loss: float) -> str:
        """Record the first loss after a save, for a later resume. Compare the first loss after a resume.

        Return what is to be said about it; empty: nothing.
        """
        if step == self.saver.last_step + 1:
            self.note_next_loss(loss)
        if self.proof is None:
            return ""
        line = self.proof.check(step, loss, allow_drift=self.engine.config.allow_resume_drift)
        self.proof = None
        return line

    def note_next_loss(self, loss: float) -> None:
        """Record the loss of the step after the last checkpoint, unless known.

        A checkpoint of another layout has none.
        """
        if self.saver.last_step != self.known_after and math.isfinite(loss):
            self.saver.note_next_loss(loss)

    def unsaved(self, problem: str) -> str:
        """The message at the end of a run whose last checkpoint could not be written."""
        newest = step_of(latest(self.folder))
        left = f"the newest checkpoint is of step {newest}" if newest else "there is no checkpoint"
        return f"the end of this run is not saved: {problem}; {left}"

    def _numbers_of_ranks(self, number: int) -> list[int]:
        comm = self.engine.optimizer.everyone
        return [int(n) for n in comm.wait(comm.all_gather_exact(torch.tensor([number])))]
