"""Latencies of this machine's caches, and rates of its matrix products by type, shape and content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numba import njit

from thinwire.calibration.work import seconds_of
from thinwire.cost.roofline import Roofline, Sample
from thinwire.device import Device

LINE_BYTES, STEPS = 64, 50_000
SIZES = tuple(1 << power for power in range(14, 27, 2))
# Products of [m, k] and [k, n]: square ones, a layer's, and those of one and of a few tokens, which memory bounds.
SHAPES = ((128, 128, 128), (512, 512, 512), (1024, 512, 512), (256, 2048, 512), (1, 2048, 2048), (8, 2048, 2048))
FILLS = RANDOM, ZEROS = "random", "zeros"
LONGEST_S = 0.3


@dataclass(frozen=True)
class Product:
    """A measured product of [m, k] and [k, n]. fill: what the factors hold. seconds: the median."""

    dtype: str
    shape: tuple[int, int, int]
    fill: str
    seconds: float

    @property
    def operations(self) -> float:
        """Floating-point operations."""
        m, n, k = self.shape
        return 2.0 * m * n * k

    @property
    def num_bytes(self) -> float:
        """Bytes of the factors and of the product, each moved once."""
        m, n, k = self.shape
        return float((m * k + k * n + m * n) * getattr(torch, self.dtype).itemsize)

    @property
    def sample(self) -> Sample:
        """For `Roofline.fitted`."""
        return self.operations, self.num_bytes, self.seconds


@njit(nogil=True)
def follow(following: np.ndarray, steps: int) -> int:
    """Where a walk of so many steps ends. Each step needs the one before."""
    at = 0
    for _ in range(steps):
        at = following[at]
    return at


def cycle(num_lines: int, seed: int = 0) -> np.ndarray:
    """The line after each line, int64 [num_lines * 8]: one random cycle, with one element in each cache line."""
    order = np.random.default_rng(seed).permutation(num_lines) * (LINE_BYTES // 8)
    following = np.zeros(num_lines * (LINE_BYTES // 8), dtype=np.int64)
    following[order] = np.roll(order, -1)
    return following


def latencies_ns(sizes: Iterable[int] = SIZES, steps: int = STEPS) -> list[tuple[int, float]]:
    """(bytes, nanoseconds of a load) of a pointer chase through so many bytes: the median of 20 repeats.

    The prefetcher can't guess the next line, and each load waits for the one before.
    """
    found = []
    for size in sizes:
        following = cycle(max(1, size // LINE_BYTES))
        found.append((size, 1e9 * seconds_of(partial(follow, following, steps), LONGEST_S) / steps))
    return found


def products(
    dtypes: Sequence[str], device: Device, shapes: Sequence[tuple[int, int, int]] = SHAPES
) -> Iterator[Product]:
    """Yield measured products: of each type and shape, with random values and with zeros.

    dtypes: names of torch, such as float32. With zeros, some devices draw less power and run at a higher clock.
    """
    for dtype in dtypes:
        for m, n, k in shapes:
            for fill in FILLS:
                make = torch.randn if fill == RANDOM else torch.zeros
                a, b = (
                    make(rows, columns).to(device.torch, getattr(torch, dtype)) for rows, columns in ((m, k), (k, n))
                )

                def multiply(a: torch.Tensor = a, b: torch.Tensor = b) -> None:
                    torch.mm(a, b)
                    device.synchronize()

                yield Product(dtype, (m, n, k), fill, seconds_of(multiply, LONGEST_S))


def rooflines(found: Sequence[Product]) -> dict[str, Roofline]:
    """A roofline for each type, fitted to the products of random values."""
    types = dict.fromkeys(each.dtype for each in found)
    return {
        name: Roofline.fitted([each.sample for each in found if each.dtype == name and each.fill == RANDOM])
        for name in types
    }
