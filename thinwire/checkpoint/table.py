"""Output of `thinwire checkpoints`: the checkpoints of a run, and whether they are intact."""

from __future__ import annotations

from pathlib import Path

from thinwire.checkpoint.folder import Manifest, all_of, checkpoints_of, latest, step_of, verified_at, verify
from thinwire.checkpoint.parts import CheckpointError


def print_checkpoints(run: Path, *, verifies: bool) -> int:
    """List the checkpoints of a run, or compare their checksums; returns the exit code."""
    folder, num_damaged = checkpoints_of(run), 0
    print(f"{'step':>9}  {'MB':>10}  {'loss':>9}  saved by")
    for each in [folder, *islands_beside(folder)]:
        if each != folder:
            print(f"{each.parent.name}:")
        for checkpoint in all_of(each):
            line, is_sound = describe(checkpoint, verifies=verifies)
            num_damaged += not is_sound
            print(line + ("  <- latest" if checkpoint == latest(each) else ""))
    return 1 if num_damaged else 0


def islands_beside(folder: Path) -> list[Path]:
    """The checkpoint folders of the other islands of a run on this machine, by island number."""
    found = [path for path in folder.parent.glob("island-*/checkpoints") if all_of(path)]
    return sorted(found, key=lambda path: (len(path.parent.name), path.parent.name))


def describe(checkpoint: Path, *, verifies: bool) -> tuple[str, bool]:
    """A line that describes a checkpoint, and whether no error in it is known."""
    try:
        manifest = verify(checkpoint) if verifies else Manifest.read(checkpoint)
    except CheckpointError as error:
        return f"{step_of(checkpoint):>9,}  DAMAGED: {error}", False
    loss = "" if manifest.loss is None else f"{manifest.loss:.4f}"
    when = verified_at(checkpoint)
    state = f"verified {when}" if when else "not verified"
    cut = f", {manifest.about['mesh']}" if "mesh" in manifest.about else ""
    by = f"{manifest.about.get('strategy', '?')} on {manifest.world_size} rank(s){cut}"
    return f"{manifest.step:>9,}  {manifest.num_bytes / 1e6:>10.2f}  {loss:>9}  {by}, {state}", True
