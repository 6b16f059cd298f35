"""`thinwire plan` as a command."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.errors import Problems
from thinwire.planner.plan_options import read_plan_line


def run_plan(args: Sequence[str]) -> int:
    """Plan, print what was found, and write it. Raises ConfigError with all errors at once."""
    problems = Problems()
    config = read_plan_line(args, problems)
    # Nobody who asks for --help waits for torch.
    from thinwire.planner.written import write_plan

    write_plan(config, problems)
    return 0
