"""One bit an element: its sign, times one scale for each group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import backends, checks, reference
from thinwire.codecs.base import Traits
from thinwire.codecs.grouped import SCALES, Grouped
from thinwire.codecs.spelling import Word, spelled
from thinwire.errors import check_types

NORMS: tuple[str, ...] = ("l1", "l2")


@spelled("sign", Word("norm", NORMS), Word("scale", SCALES), group="group")
@dataclass(frozen=True)
class Sign(Grouped):
    """C(x) = s sign(x), with s the mean of |x| over the group ("l1") or its root mean square ("l2").

    group: elements that share a scale. "l1" has the least squared error of all s: |x - C(x)|^2 = |x|^2 - n s^2, 0.603
    of |x| for Gaussian elements. "l2" keeps the norm, |C(x)| = |x|, with an error of 0.636 there, and no contraction
    where a few elements hold most of the norm. sign(0) = +1: an exact zero decodes to +s, unless all of its group is
    zero. Both sums are taken in fp64, in the order of `reference.fold`. scale: "fp32", or "bf16" to nearest. A group
    with a NaN or inf decodes to NaN. Raises ConfigError for other values.

    Source: "l1": Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent" (Interspeech 2014) and Karimireddy
    et al., "Error feedback fixes SignSGD" (ICML 2019); "l2": 1-bit Adam (ICML 2021).
    """

    group: int = 512
    norm: str = "l1"
    scale: str = "fp32"

    def __post_init__(self) -> None:
        check_types(self)
        checks.one_of("sign norm", self.norm, NORMS)
        self.check_groups("sign")

    @property
    def traits(self) -> Traits:
        """ "l1": |x|_1^2 >= |x|^2 gives delta = 1/group (a scale rounded to bf16 costs 2^-16 of what it saves).

        "l2": |x - C(x)|^2 = 2 |x|^2 (1 - |x|_1/(sqrt(n) |x|)) is below |x|^2 for every x exactly where n < 4.
        """
        return Traits(contraction=self.norm == "l1" or self.group < 4, keeps_zeros=self.group)

    @property
    def code_bits(self) -> int:
        return 1

    def encode(self, x: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor | None = None) -> Tensor:
        flat = backends.flat_fp32(x)
        num, groups, squared = flat.numel(), self.groups, self.norm == "l2"
        out = backends.packet_buffer(out, self.packet_bytes(num), flat.device)
        kernels = backends.numba_module("grouped", flat.device)
        if kernels is None:

            def quantise(rows: Tensor, _: int) -> tuple[Tensor, Tensor]:
                return reference.quantise_signs(rows, squared, groups.bf16)

            reference.encode_groups(quantise, flat, out, groups)
            return out
        scales, codes, rest = backends.sections(out.numpy(), num, groups)
        rest[:] = 0
        sums = np.empty(1 << min(self.group, max(num, 1)).bit_length(), np.float64)
        kernels.encode_signs(flat.numpy(), scales, codes, groups, squared, sums)
        return out

    def _decode(self, packet: Tensor, out: Tensor, *, add: bool) -> Tensor:
        groups = self.groups
        kernels = backends.numba_module("grouped", packet.device)
        if kernels is None:

            def dequantise(rows: Tensor, scales: Tensor, packed: Tensor) -> None:
                reference.store(rows, reference.dequantise_signs(scales, packed, rows.shape[1]), add)

            reference.decode_groups(dequantise, packet, out, groups)
            return out
        scales, codes, _ = backends.sections(packet.numpy(), out.numel(), groups)
        kernels.decode_signs(scales, codes, out.detach().numpy(), groups, add)
        return out

    def backend(self, device: torch.device) -> str:
        return backends.numba_or_torch(device)
