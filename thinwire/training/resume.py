"""What a run goes on with: the state of a checkpoint, random states included, and what its next loss must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from thinwire.checkpoint import FROZEN, Piece, Source
from thinwire.checkpoint.folder import step_of
from thinwire.errors import ConfigError
from thinwire.run.place import ProcessPlace
from thinwire.run.run_dir import RunDir
from thinwire.table import Row
from thinwire.training.agreement import agree_on_start
from thinwire.training.checkpoints import Checkpoints
from thinwire.training.engine import Engine
from thinwire.training.origin import Origin, folder_to_read, is_verified, leave_islands, num_islands
from thinwire.training.proof import Proof
from thinwire.training.recovery import Reunion, Survivor, fallback


def find_start(run_dir: RunDir, place: ProcessPlace) -> tuple[Path | None, list[Row]]:
    """The checkpoint from which all ranks go on, None for the beginning, and rows on it; a collective."""
    folder = folder_to_read(run_dir, place.island)
    # The launcher has verified the first island's checkpoints on the first machine, unless none was sound.
    verifies = place.local_rank == 0 and (place.number > 0 or not is_verified(folder))
    return agree_on_start(folder, verifies=verifies, island=place.island)


def fall_back(
    run_dir: RunDir, place: ProcessPlace, reunion: Reunion, survivor: Survivor | None
) -> tuple[Path | None, list[Row]]:
    """The same for a run in which what is left of a step can't be gone on from."""
    saved, rows = find_start(run_dir, place)
    rows = [*rows, ("recover", fallback(reunion, step_of(saved)), "")]
    if survivor is not None and survivor.reporter is not None:
        survivor.reporter.close()
    return saved, rows


def begin(
    checkpoints: Checkpoints, saved: Path | None, reunion: Reunion | None, survivor: Survivor | None
) -> tuple[int, list[Row]]:
    """Take the state of others, of a checkpoint or of a log."""
    engine = checkpoints.engine
    step = engine.follow(0)
    # An island that has joined others has their state; its own older checkpoint is of no use.
    if reunion is not None:
        return reunion.restore(survivor, engine, engine.seed_after), []
    if step:
        return step, []
    if (kept := kept_after(checkpoints, step_of(saved))) is not None:
        return take_over(checkpoints, kept)
    if saved:
        return take_over(checkpoints, Source(saved, engine.place.rank))
    # The beginning, or the last step that a strategy replays from its log.
    step = engine.optimizer.catch_up()
    engine.loader.skip_steps(step)
    return step, []


def kept_after(checkpoints: Checkpoints, step: int) -> Source | None:
    """A step that is later than this one, and on the disks of all ranks."""
    journal = checkpoints.engine.optimizer.journal
    found = None if journal is None else journal.found
    return None if found is None or found.manifest.step <= step else found


def take_over(checkpoints: Checkpoints, source: Source) -> tuple[int, list[Row]]:
    """Continue from a checkpoint of any layout, or from the step that the optimizer has found on this rank's disk.

    Sets the checkpoints' `proof`.
    """
    engine, saved = checkpoints.engine, source.folder
    island, optimizer, position = engine.place.island, engine.optimizer, source.common["trainer"]
    if position["tokens"] != engine.corpus.digest:
        raise ConfigError(f"data {engine.config.data} is not the data that {saved} was trained on: bring it back")
    if source.common["shapes"] != engine.shapes:
        raise ConfigError(f"{saved} holds another model: names and shapes of parameters must be the same")
    is_kept = optimizer.journal is not None and source is optimizer.journal.found
    if not is_kept:
        engine.stage.restore(source)
        source.read({f"{FROZEN}/{name}": Piece.whole(tensor) for name, tensor in engine.frozen.items()})
        checkpoints.saver.last_step = position["step"]
    engine.loader.load_state_dict(position["loader"])
    if checkpoints.ways is not None:
        checkpoints.ways.go_on(position.get("way", ""))
        checkpoints.note_way()
    before = num_islands(saved)
    has_own = is_kept or (island.number < before and saved.parent == checkpoints.folder)
    random_rows = restore_random_state(checkpoints, source, position["step"], before, has_own=has_own)
    origin = Origin.of(source, before, has_own=has_own)
    if before > island.num_islands == 1 and not optimizer.has_islands:
        origin = leave_islands(source, before, engine.stage, engine.place.rank)
    elif before != island.num_islands:
        origin = origin.with_islands(island.num_islands)
    if origin.next_loss is not None or not source.is_same:
        checkpoints.known_after = position["step"]
    proof_row = prepare_proof(checkpoints, source, origin, position["step"])
    return position["step"], [*source.report(), *random_rows, *origin.rows, proof_row]


def prepare_proof(checkpoints: Checkpoints, source: Source, origin: Origin, step: int) -> Row:
    """Decide what the first loss must be. Islands that must still be made equal are compared before that."""
    engine, optimizer = checkpoints.engine, checkpoints.engine.optimizer
    row: Row = ("resume proof", "none", origin.why_unknown)
    if origin.next_loss is not None:
        checkpoints.proof = Proof.of(source, origin.next_loss, checkpoints.about["circumstances"])
        row = checkpoints.proof.row
    if not optimizer.has_islands or source.is_same:
        return row
    if checkpoints.proof is not None:
        loss = engine.next_loss()
        # A run without islands has saved the loss over the data of all of them.
        loss = optimizer.mean_over_islands(loss) if origin.num_islands == 1 else loss
        line = checkpoints.proof.check(step + 1, loss, allow_drift=engine.config.allow_resume_drift)
        checkpoints.proof, row = None, ("resume proof", "made before islands are levelled", line)
    source.note(*optimizer.level(has_own=origin.has_own))
    return row


def restore_random_state(
    checkpoints: Checkpoints, source: Source, step: int, before: int, *, has_own: bool
) -> list[Row]:
    """Restore this rank's random state and the buffers; with another number of ranks, or another mesh, seed anew.

    before: number of islands that saved. has_own: whether this island was one of them. Returns rows about a GPU's
    state.
    """
    engine, place = checkpoints.engine, checkpoints.engine.place
    count = place.island.num_islands
    is_same_world = has_own and (source.world_size, before) == (place.world_size, count)
    own = source.own("trainer", rank=None if is_same_world else 0)
    for name, tensor in engine.buffers.items():
        tensor.copy_(own["buffers"][name])
    # Ranks of a tensor axis must draw alike, and other axes have other neighbours.
    meshes = [about.get("mesh", "data alone") for about in (source.manifest.about, checkpoints.about)]
    if is_same_world and meshes[0] == meshes[1]:
        torch.set_rng_state(own["rng"])
        return restore_device_random_state(engine, own, step)
    torch.manual_seed(engine.seed_after(step))
    ranks = f"{source.world_size} ranks had them and there are {place.world_size}"
    if is_same_world:
        ranks = f"a mesh of {meshes[0]} had them and this is {meshes[1]}"
    elif max(before, count) > 1:
        ranks = f"{before} x {source.world_size} ranks had them and there are {count} x {place.world_size}"
    source.note("random states", "dropped", f"{ranks}: seeded anew from --seed, rank and step")
    source.note("data position", "carried", "counted in sequences over all ranks")
    return []


def restore_device_random_state(engine: Engine, own: dict[str, Any], step: int) -> list[Row]:
    """Restore a GPU's random state. A checkpoint from a CPU has none."""
    if engine.device.random_state() is None:
        return []
    if "device_rng" in own:
        engine.device.set_random_state(own["device_rng"])
        return []
    engine.device.seed(engine.seed_after(step))
    return [("random state of the GPU", "new", "the CPU had none: seeded from --seed, rank and step")]
