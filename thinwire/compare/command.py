"""`thinwire compare` as a command."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence

from thinwire.compare.checks import read_race
from thinwire.errors import Problems, ThinwireError
from thinwire.run.signals import StoppedError


def run_compare(args: Sequence[str]) -> int:
    """Run a race. Return 0 if at least one contestant finished.

    Raises ConfigError before anything is started, StoppedError after a signal, ThinwireError if all contestants failed.
    """
    problems = Problems()
    config, train = read_race(args, problems)
    from thinwire.compare.run import race
    from thinwire.report.verdict import FINISHED

    result = race(config, train, command=shlex.join(["thinwire", "compare", *args]), problems=problems)
    if result.stopped:
        raise StoppedError(signal.Signals[result.stopped])
    if not any(row.status == FINISHED for row in result.contestants):
        raise ThinwireError(f"no contestant finished; their output is in {config.out}")
    return 0
