"""`thinwire train` as a command."""

from __future__ import annotations

import os
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
    if problems.messages and "RANK" not in os.environ:
        # No worker will start, so nothing that starts them is loaded.
        from thinwire.launch.line import configured
        from thinwire.launch.prepare import plan

        plan(configured(stated, problems), problems)
    from thinwire.launch.train import train

    return train(stated, problems)
