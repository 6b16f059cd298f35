"""The whole weights in a run's last checkpoint."""

from __future__ import annotations

import sys

from torch import Tensor

from thinwire.checkpoint import Source, choose, step_of
from thinwire.errors import ConfigError
from thinwire.hosts.islands.optimizer import OUTER
from thinwire.methods.islands.outer import parameters_in
from thinwire.training.run_dir import RunDir


def full_weights(run_dir: RunDir) -> tuple[int, dict[str, Tensor]]:
    """The step of a run's last sound checkpoint and its whole fp32 weights by name, with buffers and frozen parameters.

    With a sharded optimizer these are its fp32 masters, as they were before rounding for the wire; with islands, the
    outer parameters, which all islands share. Raises ConfigError where there is no checkpoint, or one of islands of an
    older version; CheckpointError where none is sound.
    """
    # The run may still be training and saving.
    folder, wrong = choose(run_dir.checkpoints, moves_pointer=False)
    for why in wrong:
        print(f"thinwire: a checkpoint is passed over: {why}", file=sys.stderr)
    if folder is None:
        raise ConfigError(f"{run_dir.path} holds no checkpoint yet")
    source = Source(folder, 0)
    weights = source.own("trainer", rank=0)["buffers"] | dict(source.weights())
    if outer := source.own(OUTER, rank=0):
        try:
            weights |= parameters_in(outer, source.common["shapes"])
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from None
    return step_of(folder), weights
