"""SIGINT and SIGTERM: requests to stop after the current step."""

from __future__ import annotations

import os
import signal
from types import FrameType

from thinwire.errors import ThinwireError

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StoppedError(ThinwireError):
    """A signal stopped the run; the exit code is the shell's 128 + signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


class StopFlag:
    """Records that this process was asked to stop, by a signal or by the death of the launcher.

    is_replaced: if its launcher is gone, the others continue without this process, and another takes its place.
    """

    def __init__(self, is_replaced: bool = False) -> None:
        self._is_replaced = is_replaced
        self._parent = os.getppid()
        self._reason = ""
        self.signum = 0
        for signum in STOPPING:
            signal.signal(signum, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._reason, self.signum = signal.Signals(signum).name, signum

    @property
    def reason(self) -> str:
        """Why to stop; empty if there is no reason. Raises ThinwireError if the process is replaced instead."""
        if not self._reason and os.getppid() != self._parent:
            if self._is_replaced:
                raise ThinwireError("the launcher of this island is gone: it leaves the others")
            self._reason = "the end of its launcher"
        return self._reason
