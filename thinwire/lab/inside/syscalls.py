"""Linux system calls that Python 3.11's `os` lacks, for scripts that import neither thinwire nor torch."""

from __future__ import annotations

import ctypes
import os
import signal

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_REC_PRIVATE = 0x4000 | 1 << 18
MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
MS_BIND = 0x1000
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int, what: str) -> None:
    """Move this process into new namespaces. Raises OSError with `what` in its message."""
    _checked(_libc.unshare(flags), f"unshare({what})")


def setns(fd: int, kind: int) -> None:
    """Move this process (for CLONE_NEWPID: its children) into the namespace behind `fd`; raises OSError."""
    _checked(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str, flags: int) -> None:
    """mount(2); raises OSError."""
    _checked(_libc.mount(source.encode(), target.encode(), kind.encode(), flags, None), f"mount {target}")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent's thread ends."""
    _checked(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
