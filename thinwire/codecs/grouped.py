"""What codecs with one scale for each group of elements share: the packet of `layout`, its size, its buffers."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from thinwire.codecs import backends, checks
from thinwire.codecs.base import Codec
from thinwire.codecs.layout import group_bytes, packet_sections

SCALES = ("bf16", "fp32")


class Grouped(Codec):
    """Groups of `group` elements, each with a scale (fp32, or 2 bytes of bf16) and codes of `code_bits` bits."""

    group: int
    scale: str

    @property
    @abstractmethod
    def code_bits(self) -> int:
        """Bits of one element's code."""

    @abstractmethod
    def _decode(self, packet: Tensor, out: Tensor, *, add: bool) -> Tensor:
        """out = values of the packet, or out += them; the sizes are known to fit."""

    def check_groups(self, name: str) -> None:
        """Raises ConfigError for a group or a scale that no packet can have."""
        checks.whole_number(f"{name} group", self.group, 1, 1 << 30)
        checks.one_of(f"{name} scale", self.scale, SCALES)

    @property
    def block(self) -> int:
        return self.group

    @property
    def scale_bytes(self) -> int:
        return 4 if self.scale == "fp32" else 2

    @property
    def bits_per_element(self) -> float:
        return 8 * (self.scale_bytes + group_bytes(self.group, self.code_bits)) / self.group

    def packet_bytes(self, num_elements: int) -> int:
        return packet_sections(num_elements, self.code_bits, self.group, self.scale_bytes)[2]

    def decode(self, packet: Tensor, num_elements: int, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(num_elements, dtype=torch.float32, device=packet.device)
        backends.check_buffers(packet, self.packet_bytes(num_elements), out, num_elements)
        return self._decode(packet, out, add=False)

    def decode_add(self, packet: Tensor, out: Tensor) -> Tensor:
        backends.check_buffers(packet, self.packet_bytes(out.numel()), out, out.numel())
        return self._decode(packet, out, add=True)
