"""Base of codecs that write the values of a packet into a tensor, or add them to it, in one pass."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from thinwire.codecs import backends
from thinwire.codecs.base import Codec


class Fused(Codec):
    """Implements `decode` and `decode_add` by one `_decode`.

    Both raise ValueError for a packet or an `out` of another size.
    """

    @abstractmethod
    def _decode(self, packet: Tensor, out: Tensor, *, add: bool) -> Tensor:
        """out = values of the packet, or out += them; the sizes are known to fit."""

    def decode(self, packet: Tensor, num_elements: int, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(num_elements, dtype=torch.float32, device=packet.device)
        backends.check_buffers(packet, self.packet_bytes(num_elements), out, num_elements)
        return self._decode(packet, out, add=False)

    def decode_add(self, packet: Tensor, out: Tensor) -> Tensor:
        backends.check_buffers(packet, self.packet_bytes(out.numel()), out, out.numel())
        return self._decode(packet, out, add=True)
