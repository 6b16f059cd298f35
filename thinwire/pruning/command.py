"""`thinwire prune` as a command."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.errors import first_few
from thinwire.pruning.options import read


def run_prune(args: Sequence[str]) -> int:
    """Write the folder, and say what pruning cost."""
    config = read(args)
    from thinwire.convert.origin import training_command
    from thinwire.pruning.folder import write_pruned

    done = write_pruned(config)
    print(
        f"{config.out}: {100 * done.pruned.sparsity:.1f} % of the weights in {len(done.pruned.masks)} matrices of "
        f"{config.source} are zero ({config.method}, {config.pattern})"
    )
    if done.pruned.unused:
        print(f"no token reached these experts, pruned by magnitude: {first_few(done.pruned.unused)}")
    print(f"held-out loss {done.before:.4f} before, {done.after:.4f} after")
    print(f"train what is left: {training_command(config.out)}; zeros stay zero, and are not sent")
    return 0
