"""Seconds of a kernel from its operations and its bytes, with rates that were measured or published."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from thinwire.errors import ConfigError

# A launch of less than this share of the fastest kernel's seconds is none that the samples show.
LEAST_SEEN = 0.01
# (floating-point operations, bytes, seconds)
Sample = tuple[float, float, float]


@dataclass(frozen=True)
class Roofline:
    """max(operations / flops, bytes / rate) + launch_s.

    Attributes:
        flops: operations per second that are reached.
        rate: bytes per second that are reached.
        launch_s: of a kernel without work; 0: none was seen.

    Source: Williams et al., "Roofline" (2009).
    """

    flops: float
    rate: float
    launch_s: float = 0.0

    def seconds(self, operations: float, num_bytes: float) -> float:
        """Seconds of one kernel."""
        return max(operations / self.flops, num_bytes / self.rate) + self.launch_s

    @classmethod
    def fitted(cls, samples: Sequence[Sample]) -> Roofline:
        """The one with the least squares of log(predicted / measured); see `rooflines_of`."""
        return rooflines_of({"": samples})[""]

    def error(self, samples: Sequence[Sample]) -> float:
        """Sum of the squares of log(predicted / measured)."""
        return sum(math.log(self.seconds(*given) / seconds) ** 2 for *given, seconds in samples)


def rooflines_of(classes: Mapping[str, Sequence[Sample]]) -> dict[str, Roofline]:
    """One for each class of kernels, all with the same launch.

    They have the least squares of log(predicted / measured), by a search along each axis. It begins at the operations
    that a class has reached, and at the bytes that any has, since those of one class may never bound it. Raises
    ConfigError without samples, and for one that takes no time.
    """
    samples = [sample for own in classes.values() for sample in own]
    if not samples or min(seconds for _, _, seconds in samples) <= 0:
        raise ConfigError(f"a roofline of {len(samples)} samples: give one or more, each with seconds above 0")
    rate, launch_s = max(1.0, *(num / seconds for _, num, seconds in samples)), 0.5 * min(each[2] for each in samples)
    best = {
        name: Roofline(max([1.0, *(operations / seconds for operations, _, seconds in own)]), rate, launch_s)
        for name, own in classes.items()
    }  # fmt: skip

    def error(found: Mapping[str, Roofline]) -> float:
        return sum(found[name].error(own) for name, own in classes.items())

    least, step = error(best), 1.0
    while step > 1e-4:
        factors = (math.exp(-step), math.exp(step))
        around = [
            {**best, name: replace(own, **{what: getattr(own, what) * factor})}
            for name, own in best.items() for what in ("flops", "rate") for factor in factors
        ]  # fmt: skip
        around += [
            {name: replace(own, launch_s=own.launch_s * factor) for name, own in best.items()} for factor in factors
        ]
        nearer = min(around, key=error)
        if error(nearer) < least:
            best, least = nearer, error(nearer)
        else:
            step /= 2
    if next(iter(best.values())).launch_s < LEAST_SEEN * min(seconds for _, _, seconds in samples):
        return {name: replace(own, launch_s=0.0) for name, own in best.items()}
    return best


@dataclass(frozen=True)
class CastLinear:
    """A linear layer in 16 bits, or cast to 8 bits and multiplied at another rate.

    Attributes:
        half, byte: of products of 2-byte and of 1-byte elements.
        cast_rate: bytes per second at which a cast reads and writes.
    """

    half: Roofline
    byte: Roofline
    cast_rate: float

    def seconds(self, size: int) -> tuple[float, float]:
        """Seconds of a product of square matrices in 16 bits, and in 8 bits with the casts of both factors."""
        operations, elements = 2.0 * size**3, float(size**2)
        # A cast reads 2 bytes and writes 1, of each factor, in kernels of their own.
        cast_s = 2 * (3 * elements / self.cast_rate + self.byte.launch_s)
        plain_s = self.half.seconds(operations, 6 * elements)
        return plain_s, self.byte.seconds(operations, 4 * elements) + cast_s

    def crossover(self, sizes: Sequence[int]) -> int | None:
        """The first of these rising sizes from which on 8 bits are faster; None if they never are."""
        faster = [eight < sixteen for sixteen, eight in map(self.seconds, sizes)]
        first = len(sizes) - next((at for at, is_so in enumerate(reversed(faster)) if not is_so), len(sizes))
        return sizes[first] if first < len(sizes) else None
