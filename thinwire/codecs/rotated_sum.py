"""A sum of packets of a codec that rotates, which is rotated back once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import reference
from thinwire.codecs.base import Codec, Rotation


@dataclass(frozen=True)
class RotatedSum:
    """sum_i C(p_i) as values and the coordinates in which they are.

    values: flat fp32. rotation: H x is held in the place of x, but for the rows of `left_alone`, bool [rows]; None of
    it: for no row; None: values are x itself.

    Where a packet leaves a row alone because of its zeros, the row's sum is taken without a rotation, so that what is
    zero in all packets is zero in the sum. Where zeros are left among other values it stays in its own coordinates.
    """

    values: Tensor
    rotation: Rotation | None = None
    left_alone: Tensor | None = None

    @classmethod
    def of(cls, codec: Codec, packets: Sequence[Tensor], out: Tensor) -> RotatedSum:
        """The sum of what packets of `codec` decode to, taken in their order, in flat fp32 `out`."""
        rotation = codec.rotation
        inner = codec if rotation is None else rotation.inner
        inner.decode_sum(packets, out)
        if rotation is None:
            return cls(out)
        found = [rotation.left_alone(packet, out.numel()) for packet in packets]
        marked = [rows for rows in found if rows is not None]
        if not marked:
            return cls(out, rotation)
        chosen = torch.stack(marked).any(dim=0).nonzero().view(-1)
        total: Tensor | None = None
        for packet in packets:
            values = codec.decode(packet, out.numel()).view(-1, rotation.block_size)[chosen]
            total = values if total is None else total.add_(values)
        assert total is not None
        stays = reference.holds_zeros(total, rotation.block_size)
        total[~stays] = rotation.rotate_(total[~stays].view(-1)).view(-1, rotation.block_size)
        out.view(-1, rotation.block_size)[chosen] = total
        left_alone = torch.zeros(out.numel() // rotation.block_size, dtype=torch.bool, device=out.device)
        left_alone[chosen] = stays
        return cls(out, rotation, left_alone if bool(stays.any()) else None)

    def encode(self, codec: Codec, *, seed: int, counter: int, out: Tensor) -> Tensor:
        """Pack the sum with a codec that may rotate alike, or not; `values` are not to be used after."""
        rotation = codec.rotation
        if self.rotation and rotation and rotation.block_size == self.rotation.block_size:
            return rotation.encode_rotated(self.values, self.left_alone, seed=seed, counter=counter, out=out)
        return codec.encode(self.rotated_back(), seed=seed, counter=counter, out=out)

    def rotated_back(self) -> Tensor:
        """x itself, in the memory of `values`, which are not to be used after."""
        return self.values if self.rotation is None else self.rotation.rotate_back_(self.values, self.left_alone)
