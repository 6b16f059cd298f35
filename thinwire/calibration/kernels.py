"""Latencies of this machine's caches, and rates of its matrix products by type, shape and content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numba import njit

from thinwire.calibration.work import seconds_of
from thinwire.cost.roofline import Roofline, Sample, rooflines_of
from thinwire.device import Device

LINE_BYTES, STEPS = 64, 50_000
SIZES = tuple(1 << power for power in range(14, 27, 2))
# Products of [m, k] and [k, n]: square ones, a layer's, and those of one and of a few tokens, which memory bounds.
SHAPES = (
    (128, 128, 128), (512, 512, 512), (1024, 512, 512), (256, 2048, 512), (1, 512, 512), (1, 2048, 2048),
    (8, 512, 2048), (8, 2048, 2048),
)  # fmt: skip
# Classes of products, each with a roofline of its own: few rows at most read a matrix once, from caches or from memory.
FEW_ROWS, CACHE_BYTES = 8, 1 << 25
MANY, FEW, FEW_FAR = "many rows", "few rows", "few rows beyond caches"
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
    def name(self) -> str:
        """Type and shape, as text."""
        return f"{self.dtype} {' x '.join(map(str, self.shape))}"

    def kind(self, cache_bytes: float = CACHE_BYTES) -> str:
        """The class of kernels that computes it. cache_bytes: what fits into caches."""
        if self.shape[0] > FEW_ROWS:
            return MANY
        return FEW if self.num_bytes <= cache_bytes else FEW_FAR

    @property
    def sample(self) -> Sample:
        """For `Roofline.fitted`."""
        return self.operations, self.num_bytes, self.seconds


@njit(nogil=True)
def follow(following: np.ndarray, at: int, steps: int) -> int:
    """Where a walk of so many steps ends that begins at a place. Each step needs the one before."""
    for _ in range(steps):
        at = following[at]
    return at


def cycle(num_lines: int, seed: int = 0) -> np.ndarray:
    """The line after each line, int64 [num_lines * 8]: one random cycle, with one element in each cache line."""
    order = np.random.default_rng(seed).permutation(num_lines) * (LINE_BYTES // 8)
    following = np.zeros(num_lines * (LINE_BYTES // 8), dtype=np.int64)
    following[order] = np.roll(order, -1)
    return following


class Walk:
    """A walk through a cycle of cache lines. It goes on where it ended, so that it comes to all of them."""

    def __init__(self, num_bytes: int, steps: int) -> None:
        self.following, self.at, self.steps = cycle(max(1, num_bytes // LINE_BYTES)), 0, steps

    def __call__(self) -> None:
        self.at = follow(self.following, self.at, self.steps)


def latencies_ns(sizes: Iterable[int] = SIZES, steps: int = STEPS) -> list[tuple[int, float]]:
    """(bytes, nanoseconds of a load) of a pointer chase through so many bytes: the median of 20 repeats.

    The prefetcher can't guess the next line, and each load waits for the one before.
    """
    return [(size, 1e9 * seconds_of(Walk(size, steps), LONGEST_S) / steps) for size in sizes]


def cached_bytes(latencies: Sequence[tuple[int, float]]) -> int:
    """The most bytes through which a load takes less than half as long as through the most of all.

    The least of all where there are none.
    """
    far_ns = latencies[-1][1]
    return max((size for size, ns in latencies if 2 * ns < far_ns), default=latencies[0][0])


def fall_of(latencies: Sequence[tuple[int, float]]) -> float:
    """By how much a load through more bytes is faster than through fewer, at most, as a share of its time; 0: never."""
    return max([0.0, *(1 - b / a for (_, a), (_, b) in pairwise(latencies))])


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


def rooflines(found: Sequence[Product], cache_bytes: float = CACHE_BYTES) -> dict[str, Roofline]:
    """A roofline for each type and class, such as "float32 few rows", fitted to the products of random values.

    Those of a type have the same launch. cache_bytes: what fits into caches.
    """
    types: dict[str, dict[str, list[Sample]]] = {}
    for each in found:
        if each.fill == RANDOM:
            classes = types.setdefault(each.dtype, {})
            classes.setdefault(f"{each.dtype} {each.kind(cache_bytes)}", []).append(each.sample)
    return {name: fit for classes in types.values() for name, fit in rooflines_of(classes).items()}
