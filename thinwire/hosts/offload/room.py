"""How much memory of a budget is left, by what the process has held at most."""

from __future__ import annotations

import ctypes
import resource
from contextlib import suppress
from pathlib import Path

STATM = Path("/proc/self/statm")
# glibc's mallopt: blocks of so many bytes get pages of their own, which go back when they are freed.
M_MMAP_THRESHOLD, OWN_PAGES_BYTES = -3, 1 << 20
# At least the size of glibc's pthread_attr_t, and of a thread's stack under a budget: by default it has 8 MB.
ATTRIBUTES_BYTES, STACK_BYTES = 128, 2 << 20


def data_bytes() -> int:
    """What counts against the limit of this process's data, RLIMIT_DATA: private memory, touched or not."""
    return int(STATM.read_text().split()[5]) * resource.getpagesize()


def give_pages_back() -> None:
    """Let freed memory go back to the system at once, where it would stay in this process's heap otherwise.

    By default glibc keeps freed blocks of up to 32 MB, in pieces that the next layer's may not fit into.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, OWN_PAGES_BYTES)


def small_stacks() -> None:
    """Give threads that start from now on small stacks, those of libraries too: a whole stack counts as data."""
    with suppress(OSError, AttributeError):
        libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(ATTRIBUTES_BYTES)
        if libc.pthread_attr_init(attributes) == 0:
            libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(STACK_BYTES))
            libc.pthread_setattr_default_np(attributes)


class MemoryRoom:
    """The room in a budget; `look` is called where a step holds most."""

    def __init__(self, memory_bytes: int | None) -> None:
        self.memory_bytes, self.peak_bytes = memory_bytes, 0

    def look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, data_bytes())

    @property
    def left_bytes(self) -> int:
        """Bytes of the budget that are left; 0 where there is no budget."""
        return max(0, self.memory_bytes - self.peak_bytes) if self.memory_bytes is not None else 0
