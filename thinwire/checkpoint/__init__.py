"""Checkpoints: written in the running layout, complete or absent; loaded in any other layout.

`foreign` reads the checkpoints of other programs.
"""

from typing import TYPE_CHECKING

from thinwire.checkpoint.folder import (
    Keep,
    all_of,
    checkpoints_of,
    choose,
    latest,
    nearest_run,
    next_loss,
    passed_over,
    step_of,
    verify,
)
from thinwire.checkpoint.parts import CheckpointError
from thinwire.lazy import lazily

if TYPE_CHECKING:
    from thinwire.checkpoint.saver import Disk, Saver, store_of_ranks
    from thinwire.checkpoint.source import FROZEN, NORMS, WEIGHTS, Source, read_weights
    from thinwire.checkpoint.state import Piece, Share, Snapshot

__all__ = [
    "FROZEN", "NORMS", "WEIGHTS", "CheckpointError", "Disk", "Keep", "Piece", "Saver", "Share", "Snapshot", "Source",
    "all_of", "checkpoints_of", "choose", "latest", "nearest_run", "next_loss", "passed_over", "read_weights",
    "step_of", "store_of_ranks", "verify",
]  # fmt: skip
__getattr__ = lazily(
    __name__,
    {
        "saver": ("Disk", "Saver", "store_of_ranks"),
        "source": ("FROZEN", "NORMS", "WEIGHTS", "Source", "read_weights"),
        "state": ("Piece", "Share", "Snapshot"),
    },
)
