"""Modules that every worker needs; the server that forks workers imports them once."""

from __future__ import annotations

import torch._dynamo  # noqa: F401  (torch loads it in the first step of an optimizer)

# A saver loads it when it writes.
import thinwire.checkpoint.dcp
import thinwire.launch.worker  # noqa: F401
from thinwire.codecs.backends import cpu_kernels

if cpu_kernels() is not None:
    from numba import njit

    # With its first function numba loads all that it knows of types, which takes longer than any kernel.
    njit(lambda: 0)()
