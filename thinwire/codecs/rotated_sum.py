"""A sum of packets of a codec that rotates; the sum is rotated back once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import reference
from thinwire.codecs.base import Codec, Rotation


@dataclass(frozen=True)
class RotatedSum:
    """The sum of decoded packets, sum_i C(p_i), with the note of which rows are still rotated.

    values: flat fp32. rotation: `values` hold H x, except in the rows of `left_alone`, bool [rows]; left_alone None:
    all rows are rotated. rotation None: `values` are x itself.

    If a packet leaves a row unrotated because of its zeros, the row is summed unrotated, so that elements that are zero
    in all packets are zero in the sum. While zeros stand among other values in it, the row stays unrotated.
    """

    values: Tensor
    rotation: Rotation | None = None
    left_alone: Tensor | None = None

    @classmethod
    def of(cls, codec: Codec, packets: Sequence[Tensor], out: Tensor) -> RotatedSum:
        """The sum of the packets of `codec`, decoded and added in their order into `out`, flat fp32."""
        rotation = codec.rotation
        inner = codec if rotation is None else rotation.inner
        inner.decode_sum(packets, out)
        if rotation is None or not inner.has_marks(packets, out.numel()):
            return cls(out, rotation)
        found = [rotation.left_alone(packet, out.numel()) for packet in packets]
        marked = [rows for rows in found if rows is not None]
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
        """Pack the sum with a codec, which may use the same rotation or none; `values` must not be used afterwards."""
        rotation = codec.rotation
        if self.rotation and rotation and rotation.block_size == self.rotation.block_size:
            return rotation.encode_rotated(self.values, self.left_alone, seed=seed, counter=counter, out=out)
        return codec.encode(self.rotated_back(), seed=seed, counter=counter, out=out)

    @staticmethod
    def encode_all(
        sums: Sequence[RotatedSum], codec: Codec, *, seed: int, counters: Sequence[int], outs: Sequence[Tensor]
    ) -> None:
        """`encode` of sums of one length, in one call of a kernel where all are rotated alike."""
        values, rotation = [total.values for total in sums], codec.rotation
        if all(total.rotation is None for total in sums):
            codec.encode_all(values, outs, seed=seed, counters=counters)
        elif rotation and all(total.is_wholly(rotation) for total in sums):
            rotation.inner.encode_all(values, outs, seed=seed, counters=counters)
        else:
            for total, counter, out in zip(sums, counters, outs, strict=True):
                total.encode(codec, seed=seed, counter=counter, out=out)

    def is_wholly(self, rotation: Rotation) -> bool:
        """Whether all rows are rotated as by `rotation`."""
        return self.rotation is not None and self.rotation.block_size == rotation.block_size and self.left_alone is None

    def rotated_back(self) -> Tensor:
        """x itself, in the memory of `values`, which must not be used afterwards."""
        return self.values if self.rotation is None else self.rotation.rotate_back_(self.values, self.left_alone)
