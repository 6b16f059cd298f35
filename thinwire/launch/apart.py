"""Calls a function in a copy of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def apart(call: Callable[[], object]) -> bool:
    """Call a function in a copy of this process, for what it leaves on the disk. Return whether it succeeded.

    The memory that the function takes is the copy's alone. Call it while this process has no thread that holds a lock.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            call()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0
