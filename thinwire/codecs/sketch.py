"""Base of linear sketches: y = R x for each group, with R drawn from a seed that both sides know.

Packets can be added.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import backends, checks, shared
from thinwire.codecs.base import Traits
from thinwire.codecs.fused import Fused
from thinwire.codecs.spelling import Word
from thinwire.errors import ConfigError, check_types

UNBIASED = Word("unbiased", {"unbiased": True, "biased": False})


@dataclass(frozen=True)
class SketchPart:
    """A group, or several of one size: its elements, its buckets and the factor of its estimate."""

    elements: slice
    buckets: slice
    size: int
    num_buckets: int
    shrink: float


@dataclass(frozen=True)
class LinearSketch(Fused):
    """Groups of n = `group` elements travel as b = n / ratio fp32 sums y = R x, E[R^T R] = I; decoded: gamma R^T y.

    ratio: elements to a sum. unbiased: gamma = 1, E[C(x)] = x with a variance of about ratio |x|^2; else gamma is the
    number that makes C the best contraction, 1 - delta about ratio/(ratio + 1). A tail of t elements has
    ceil(t / ratio) sums. Packets of one seed and counter add up to the packet of the sum. A NaN or inf reaches every
    element that shares a sum with it. Raises ConfigError for a ratio below 2 or a group that is no multiple of it.

    Packet: [seed, 8 bytes] [counter, 8 bytes] [sums of group 0, 1, ...].
    Source: Song, Wang, Yu and Zhang, "Sketching for first order method" (ICML 2023).
    """

    ratio: int = 8
    group: int = 4096
    unbiased: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        name = type(self).__name__.lower()
        checks.whole_number(f"{name} group", self.group, 2, 1 << 20)
        checks.whole_number(f"{name} ratio", self.ratio, 2, self.group)
        if self.group % self.ratio:
            close = max(1, round(self.group / self.ratio)) * self.ratio
            raise ConfigError(f"{name} group {self.group} is no multiple of the ratio {self.ratio}; nearest is {close}")

    @property
    def traits(self) -> Traits:
        return Traits(
            unbiased=self.unbiased, contraction=not self.unbiased, linear=True, draws=True, keeps_zeros=self.group
        )

    @property
    def block(self) -> int:
        return self.group

    @property
    def bits_per_element(self) -> float:
        return 32 / self.ratio

    def packet_bytes(self, num_elements: int) -> int:
        return shared.HEADER_BYTES + 4 * self._num_buckets(num_elements)

    def sums(self, packet: Tensor) -> Tensor:
        """The packet's sums y = R x, a view: fp32 [ceil(n / ratio)].

        Packets with equal headers are added by adding these.
        """
        return packet[shared.HEADER_BYTES :].view(torch.float32)

    def _num_buckets(self, num_elements: int) -> int:
        return -(-num_elements // self.ratio)  # the ratio divides the group

    @abstractmethod
    def _best_shrink(self, size: int, num_buckets: int) -> float:
        """gamma = 1 / E[|R^T R x|^2] for |x| = 1, which minimises E|gamma R^T R x - x|^2."""

    @abstractmethod
    def _project(self, x: Tensor, sums: Tensor, seed: int, counter: int) -> None:
        """sums = R x for every group of flat x."""

    @abstractmethod
    def _estimate(self, sums: Tensor, out: Tensor, seed: int, counter: int, *, add: bool) -> None:
        """out = gamma R^T sums for every group, or out += that."""

    def _shrink(self, size: int) -> float:
        return 1.0 if self.unbiased else self._best_shrink(size, self._num_buckets(size))

    def parts(self, num_elements: int) -> Iterator[SketchPart]:
        """The whole groups, then the tail, where there are any."""
        whole = num_elements - num_elements % self.group
        for start, stop, size in ((0, whole, self.group), (whole, num_elements, num_elements - whole)):
            if stop > start:
                buckets = slice(start // self.ratio, self._num_buckets(stop))
                yield SketchPart(slice(start, stop), buckets, size, self._num_buckets(size), self._shrink(size))

    def encode(self, x: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor | None = None) -> Tensor:
        flat = backends.flat_fp32(x)
        out = backends.packet_buffer(out, self.packet_bytes(flat.numel()), flat.device)
        shared.write_header(seed, counter, out)
        self._project(flat, self.sums(out), seed, counter)
        return out

    def _decode(self, packet: Tensor, out: Tensor, *, add: bool) -> Tensor:
        seed, counter = shared.read_header(packet)
        self._estimate(self.sums(packet), out, seed, counter, add=add)
        return out

    def packet_add(self, packet: Tensor, out: Tensor) -> Tensor:
        shared.check_headers(packet, out)
        self.sums(out).add_(self.sums(packet))
        return out

    def backend(self, device: torch.device) -> str:
        return backends.numba_or_torch(device)
