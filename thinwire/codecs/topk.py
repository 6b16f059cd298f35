"""The largest elements of each group, with their indices in about log2(1/density) + 2 bits."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import backends, checks, indices
from thinwire.codecs.base import Codec, Traits
from thinwire.codecs.cast import Cast
from thinwire.codecs.fused import Fused
from thinwire.codecs.spelling import Number, percent_of, share_of, spelled
from thinwire.errors import check_types

BF16 = Cast("bf16")
# Tensors have few lengths, and what follows from a length takes as long as the codec of a small tensor.
LENGTHS_KEPT = 1024


@spelled(Number("density", "topk", "%", share_of, percent_of, optional=True), group="group", values="values")
@dataclass(frozen=True)
class TopK(Fused):
    """The k = ceil(density * group) elements of every `group` with the largest |x|; the others decode to 0.

    density: 0 < density <= 1. group: elements that compete for k places; of equal ones the first win. values: the codec
    of the values that travel, in the order of their indices. A tail of n elements has ceil(density * n) places. NaN
    ranks above inf, and inf above all finite values, so damage always travels. Raises ConfigError for other values.

    Packet: [values' packet] [indices of group 0, 1, ...] [zeros up to a multiple of 4]; indices as `codecs.indices`.
    Source: Aji and Heafield, "Sparse communication for distributed gradient descent" (EMNLP 2017), by groups.
    """

    density: float = 0.01
    group: int = 4096
    values: Codec = BF16

    def __post_init__(self) -> None:
        check_types(self)
        checks.whole_number(f"{self._name} group", self.group, 1, 1 << 24)
        checks.fraction(f"{self._name} density", self.density, 1 / self.group)

    @property
    def _name(self) -> str:
        return type(self).__name__.lower()

    @property
    def traits(self) -> Traits:
        """What is dropped is lost.

        What is kept loses what the values' codec loses: delta = that codec's delta times k / group.

        Zeros travel where fewer than k elements are not zero; they stay zero if the values' codec keeps every zero.
        """
        inner = self.values.traits
        keeps_zeros = self.block if inner.keeps_zeros > 1 else inner.keeps_zeros
        return Traits(contraction=inner.contraction, draws=inner.draws, keeps_zeros=keeps_zeros)

    @property
    def count(self) -> int:
        """k: elements of a whole group that travel."""
        return indices.places(self.group, self.density)

    @property
    def block(self) -> int:
        """Elements of the fewest whole groups whose travelling values are whole blocks of the values' codec."""
        return self.group * math.lcm(self.count, self.values.block) // self.count

    @property
    def bits_per_element(self) -> float:
        return (self.values.bits_per_element * self.count + 8 * self._layouts(0)[0].num_bytes) / self.group

    def packet_bytes(self, num_elements: int) -> int:
        num_values, _, used = self._sections(num_elements)
        return self.values.packet_bytes(num_values) + -(-used // 4) * 4

    def _layouts(self, num_elements: int) -> tuple[indices.IndexLayout, indices.IndexLayout]:
        """The index layouts of whole groups and of the tail, which may be empty."""
        tail = num_elements % self.group
        return indices.layout(self.group, self.count), indices.layout(tail, indices.places(tail, self.density))

    @functools.lru_cache(maxsize=LENGTHS_KEPT)  # noqa: B019 - codecs are few, and equal ones share
    def _sections(self, num_elements: int) -> tuple[int, int, int]:
        """(values that travel, bytes of the whole groups' indices, bytes of all indices)."""
        whole, tail = self._layouts(num_elements)
        full = num_elements // self.group
        return full * whole.num + tail.num, full * whole.num_bytes, full * whole.num_bytes + tail.num_bytes

    def encode(self, x: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor | None = None) -> Tensor:
        flat = backends.flat_fp32(x)
        num_values, _, used = self._sections(flat.numel())
        out = backends.packet_buffer(out, self.packet_bytes(flat.numel()), flat.device)
        end_of_values = self.values.packet_bytes(num_values)
        stored = out[end_of_values : end_of_values + used]
        picked = torch.empty(num_values, dtype=torch.float32, device=flat.device)
        kernels = backends.numba_module("sparse", flat.device)
        if kernels is None:
            self._encode_plain(flat, picked, stored, seed, counter)
        else:
            kernels.encode_largest(
                flat.numpy(),
                picked.numpy(),
                stored.numpy(),
                self._layout_table(flat.numel()),
                *self._sampling(seed, counter),
                *np.empty((3, self.group), np.int32),
                np.empty(self.count + 1, np.int64),
                np.empty(1, np.int32),
            )
        inner_counter = counter // self.group * self.count
        self.values.encode(picked, seed=seed, counter=inner_counter, out=out[:end_of_values])
        out[end_of_values + used :] = 0
        return out

    def _sampling(self, seed: int, counter: int) -> tuple[int, float, np.uint64, np.uint64]:
        """(stride, density, seed, counter) of the threshold's sample; stride 0 for none."""
        return 0, self.density, np.uint64(0), np.uint64(0)

    @functools.lru_cache(maxsize=LENGTHS_KEPT)  # noqa: B019 - codecs are few, and equal ones share
    def _layout_table(self, num_elements: int) -> np.ndarray:
        """The two layouts as the kernels read them; last, how many elements a threshold must let through."""
        rows = [[*layout, self._least(layout.num)] for layout in self._layouts(num_elements)]
        return np.array(rows, np.uint64)

    def _least(self, count: int) -> int:
        """How many of `count` places a threshold must fill."""
        return count

    def _encode_plain(self, x: Tensor, picked: Tensor, stored: Tensor, seed: int, counter: int) -> None:
        """Fill `picked` with the values and `stored` with the indices."""
        whole, tail = self._layouts(x.numel())
        full = x.numel() // self.group
        cut = full * self.group, full * whole.num, full * whole.num_bytes
        for layout, rows, start in ((whole, full, (0, 0, 0)), (tail, 1, cut)):
            if rows and layout.size:
                part = x[start[0] : start[0] + rows * layout.size].view(rows, -1)
                chosen = self._choose(part, layout.num, seed, counter // self.group + start[0] // self.group)
                picked[start[1] : start[1] + rows * layout.num] = part.gather(1, chosen).flatten()
                stored[start[2] : start[2] + rows * layout.num_bytes] = indices.store(chosen, layout).flatten()

    def _choose(self, x: Tensor, count: int, seed: int, counter: int) -> Tensor:
        """Ascending indices of what travels, int64 [rows, count], for groups as the rows of x."""
        return indices.largest(x.view(torch.int32) & indices.ABS, count)

    def _decode(self, packet: Tensor, out: Tensor, *, add: bool) -> Tensor:
        num_values, _, used = self._sections(out.numel())
        end_of_values = self.values.packet_bytes(num_values)
        values = backends.one_nan_(self.values.decode(packet[:end_of_values], num_values))
        stored = packet[end_of_values : end_of_values + used]
        kernels = backends.numba_module("sparse", packet.device)
        if kernels is not None:
            table, chosen = self._layout_table(out.numel()), np.empty(self.count + 1, np.int64)
            kernels.decode_largest(stored.numpy(), values.numpy(), out.detach().numpy(), table, add, chosen)
            return out
        dense = self._decode_plain(stored, values, out.numel())
        return out.add_(dense) if add else out.copy_(dense)

    def _decode_plain(self, stored: Tensor, values: Tensor, num_elements: int) -> Tensor:
        whole, tail = self._layouts(num_elements)
        full, (_, middle, _) = num_elements // self.group, self._sections(num_elements)
        dense = torch.zeros(num_elements, dtype=torch.float32, device=stored.device)
        if full:
            chosen = indices.load(stored[:middle].view(full, -1), whole)
            dense[: full * self.group].view(full, -1).scatter_(1, chosen, values[: full * whole.num].view(full, -1))
        if tail.size:
            chosen = indices.load(stored[middle:].view(1, -1), tail)
            dense[full * self.group :].view(1, -1).scatter_(1, chosen, values[full * whole.num :].view(1, -1))
        return dense

    def backend(self, device: torch.device) -> str:
        return backends.numba_or_torch(device)
