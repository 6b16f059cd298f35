"""`thinwire explain` as a command."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.errors import Problems
from thinwire.planner.options import read_explain


def run_explain(args: Sequence[str]) -> int:
    """Print the explanation. Raises ConfigError with all errors at once."""
    problems = Problems()
    config = read_explain(args, problems)
    # Nobody who asks for --help waits for torch.
    from thinwire.planner.table import print_explained

    print_explained(config, problems)
    return 0
