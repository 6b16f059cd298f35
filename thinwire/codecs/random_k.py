"""One element of every few, chosen by a seed that both sides know: no index travels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import backends, checks, shared
from thinwire.codecs.base import Codec, Traits
from thinwire.codecs.fused import Fused
from thinwire.codecs.identity import Identity
from thinwire.codecs.random import MASK64, derive_seed, draws, noise_keys
from thinwire.codecs.sketch import UNBIASED
from thinwire.codecs.spelling import Number, spelled
from thinwire.errors import ConfigError, check_types

FP32 = Identity()
PICK = 2  # part of the picks' seed, so that they are independent of the rounding of values
MAX_EVERY = 1 << 14
CHUNK = 256


def every_of(percent: float) -> int:
    """The `every` of which one is this percentage. Raises ConfigError where it is no whole number, within 1%."""
    every = min(max(round(100 / percent), 2), MAX_EVERY) if percent > 0 else MAX_EVERY
    if not math.isclose(every * percent, 100, rel_tol=1e-2):
        raise ConfigError(
            f"randomk {percent:g}%: must be 1 of a whole number from 2 to {MAX_EVERY}; nearest is {100 / every:g}%"
        )
    return every


@spelled(
    Number("every", "randomk", "%", lambda percent: every_of(float(percent)), lambda every: f"{100 / every:g}", True),
    UNBIASED,
    values="values",
)
@dataclass(frozen=True)
class RandomK(Fused):
    """From each cell of `every` elements one is drawn uniformly; the others decode to 0.

    unbiased: the drawn element is multiplied by `every` (a tail cell by its size), so that E[C(x)] = x with
    E|C(x) - x|^2 = (every - 1) |x|^2; else it is kept as it is, E|C(x) - x|^2 = (1 - 1/every) |x|^2. values: the codec
    of the drawn elements. One from each cell is the same density and variance as k = n/every from all, and lets a
    tensor be cut anywhere between cells. A cell with a NaN or inf decodes to NaN as a whole, drawn or not. Raises
    ConfigError for an `every` outside 2 .. 2^14.

    Packet: [seed of the picks, 8 bytes] [number of the first cell, 8 bytes] [values' packet].
    Source: random-k of Stich, Cordonnier and Jaggi, "Sparsified SGD with memory" (NeurIPS 2018), stratified; a seed in
    place of indices: Konecny et al., "Federated learning: strategies for improving communication efficiency" (2016).
    """

    every: int = 32
    values: Codec = FP32
    unbiased: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        checks.whole_number("randomk every", self.every, 2, MAX_EVERY)

    @property
    def traits(self) -> Traits:
        inner = self.values.traits
        return Traits(
            unbiased=self.unbiased and inner.unbiased,
            contraction=not self.unbiased and inner.contraction,
            linear=inner.linear,
            draws=True,
            keeps_zeros=1 if inner.keeps_zeros == 1 else self.every * inner.keeps_zeros,
        )

    @property
    def block(self) -> int:
        return self.every * self.values.block

    @property
    def bits_per_element(self) -> float:
        return self.values.bits_per_element / self.every

    def packet_bytes(self, num_elements: int) -> int:
        return shared.HEADER_BYTES + self.values.packet_bytes(self._num_cells(num_elements))

    def _num_cells(self, num_elements: int) -> int:
        return -(-num_elements // self.every)

    def encode(self, x: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor | None = None) -> Tensor:
        flat = backends.flat_fp32(x)
        out = backends.packet_buffer(out, self.packet_bytes(flat.numel()), flat.device)
        pick_seed, first = derive_seed(seed, PICK), counter // self.every
        shared.write_header(pick_seed, first, out)
        picked = torch.empty(self._num_cells(flat.numel()), dtype=torch.float32, device=flat.device)
        kernels = backends.numba_module("sparse", flat.device)
        if kernels is None:
            picked.copy_(self._pick_plain(flat, pick_seed, first))
        else:
            random = np.uint64(pick_seed), np.uint64(first & MASK64), np.empty(CHUNK, np.int32)
            kernels.encode_picks(flat.numpy(), picked.numpy(), self.every, self.unbiased, *random)
        self.values.encode(picked, seed=seed, counter=first, out=out[shared.HEADER_BYTES :])
        return out

    def _places(self, num_elements: int, seed: int, first: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Index of each cell's drawn element, and the cells' sizes: int64 [cells] both."""
        cells = self._num_cells(num_elements)
        starts = torch.arange(cells, device=device) * self.every
        sizes = (num_elements - starts).clamp(max=self.every)
        return starts + (draws(*noise_keys(seed, first, cells, device), cells) * sizes >> 23), sizes

    def _pick_plain(self, x: Tensor, seed: int, first: int) -> Tensor:
        places, sizes = self._places(x.numel(), seed, first, x.device)
        picked = x[places] * sizes if self.unbiased else x[places]
        cells = torch.nn.functional.pad(x, (0, -x.numel() % self.every)).view(-1, self.every)
        return torch.where(cells.isfinite().all(1), picked, torch.nan)

    def _decode(self, packet: Tensor, out: Tensor, *, add: bool) -> Tensor:
        num = out.numel()
        seed, first = shared.read_header(packet)
        values = backends.one_nan_(self.values.decode(packet[shared.HEADER_BYTES :], self._num_cells(num)))
        kernels = backends.numba_module("sparse", packet.device)
        if kernels is not None:
            random = np.uint64(seed), np.uint64(first), np.empty(CHUNK, np.int32)
            kernels.decode_picks(values.numpy(), out.detach().numpy(), self.every, add, *random)
            return out
        places, _ = self._places(num, seed, first, packet.device)
        dense = torch.where(values.isnan(), torch.nan, 0.0).repeat_interleave(self.every)[:num]
        dense[places] = values
        return out.add_(dense) if add else out.copy_(dense)

    def packet_add(self, packet: Tensor, out: Tensor) -> Tensor:
        shared.check_headers(packet, out)
        self.values.packet_add(packet[shared.HEADER_BYTES :], out[shared.HEADER_BYTES :])
        return out

    def backend(self, device: torch.device) -> str:
        return backends.numba_or_torch(device)
