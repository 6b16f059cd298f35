"""The cores that the ranks of a machine share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Cores:
    """The cores on which ranks compute.

    Work of n threads on c cores takes max(1, n / c) (1 + contention (min(n, c) - 1) / (c - 1)) times as long as alone.

    Attributes:
        hosts: the machine of each rank; several nodes may be emulated on one.
        num: number of cores of each machine.
        contention: slowdown while all cores of the machine are busy, as a share of the time: memory and caches are
            shared.
        parts: of each machine, how many parts like this one compute at the same time, each on `num` cores; empty: the
            ranks are all that compute there.

    Raises ConfigError for a machine without cores, and for a negative contention.
    """

    hosts: tuple[int, ...]
    num: tuple[float, ...]
    contention: float = 0.0
    parts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if any(not num > 0 for num in self.num) or max(self.hosts, default=0) >= len(self.num):
            raise ConfigError(f"cores {self.num} of machines {sorted(set(self.hosts))}: each must have more than 0")
        if not self.contention >= 0:
            raise ConfigError(f"contention {self.contention:g}: at least 0")
        if self.parts and len(self.parts) != len(self.num):
            raise ConfigError(f"parts {self.parts} of {len(self.num)} machines: one number for each")

    def slowdown(self, host: int, threads: float) -> float:
        """The factor by which work takes longer than alone while `threads` threads compute on the machine."""
        parts = self.parts[host] if self.parts else 1.0
        num, threads = self.num[host] * parts, threads * parts
        if threads <= 1 or num == math.inf:
            return 1.0
        busy = (min(threads, num) - 1) / (num - 1) if num > 1 else 0.0
        return max(1.0, threads / num) * (1 + self.contention * max(0.0, busy))
