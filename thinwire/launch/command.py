"""`thinwire train` as a command."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.errors import Problems
from thinwire.launch.line import command_line


def run_train(args: Sequence[str]) -> int:
    """Train as the command line says. Return the exit code."""
    problems = Problems()
    stated = command_line().read(args, problems)
    # Nobody who asks for --help, or misspells a name, waits for torch.
    from thinwire.launch.early import refuse_early

    refuse_early(stated, problems)
    from thinwire.launch.train import train

    return train(stated, problems)
