"""How much of a memory budget is left, from the process's peak use."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable
from contextlib import suppress

from thinwire.limits import data_bytes

# glibc's mallopt: blocks of so many bytes get pages of their own, which go back when they are freed.
M_MMAP_THRESHOLD, OWN_PAGES_BYTES = -3, 1 << 20
# Of tensors of slices, which are small: with layers of 125m and parts of 256 tokens, the heap would keep 400 MB more.
SLICE_PAGES_BYTES = 1 << 18
# At least the size of glibc's pthread_attr_t, and of a thread's stack under a budget: by default it has 8 MB.
ATTRIBUTES_BYTES, STACK_BYTES = 128, 2 << 20
NUM_PRIMITIVES = "32"


def give_pages_back(num_bytes: int = OWN_PAGES_BYTES) -> None:
    """Make the allocator return freed blocks to the system at once instead of keeping them in this process's heap.

    By default glibc keeps freed blocks of up to 32 MB, in pieces into which the next layer's tensors may not fit. Every
    block then begins with new pages, which take processor time: less if they are huge, as torch asks for if it is told
    before its first tensor.

    num_bytes: of the smallest blocks that have pages of their own.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, num_bytes)


def small_stacks() -> None:
    """Give threads that start from now on small stacks, including those of libraries: a whole stack counts as data."""
    with suppress(OSError, AttributeError):
        libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(ATTRIBUTES_BYTES)
        if libc.pthread_attr_init(attributes) == 0:
            libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(STACK_BYTES))
            libc.pthread_setattr_default_np(attributes)


def few_primitives() -> None:
    """Let oneDNN keep few compiled kernels. It reads this once, when it compiles the first one.

    By default it keeps 1,024, of each shape of a product, with memory of their own. A text that grows by a token has a
    new shape for each token.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", NUM_PRIMITIVES)


def hold_to(memory_bytes: int, *, is_sliced: bool = False) -> Callable[[], None]:
    """Limit this process to a memory budget, enforced by the kernel. Return what gives the former limit back.

    is_sliced: layers compute a micro-batch in slices.
    """
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    small_stacks()
    give_pages_back(SLICE_PAGES_BYTES if is_sliced else OWN_PAGES_BYTES)
    few_primitives()
    resource.setrlimit(
        resource.RLIMIT_DATA, (memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most), most)
    )
    return lambda: resource.setrlimit(resource.RLIMIT_DATA, (before, most))


class MemoryRoom:
    """Memory left in a budget. Call `look` where a step uses most memory."""

    def __init__(self, memory_bytes: int | None) -> None:
        self.memory_bytes, self.peak_bytes = memory_bytes, 0

    def look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, data_bytes())

    @property
    def left_bytes(self) -> int:
        """Bytes of the budget that are left; 0 without a budget."""
        return max(0, self.memory_bytes - self.peak_bytes) if self.memory_bytes is not None else 0
