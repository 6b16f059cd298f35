"""Base of codecs with one scale for each group of elements: the packet of `layout` and its size."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

from thinwire.codecs import checks
from thinwire.codecs.fused import Fused
from thinwire.codecs.layout import Groups, group_bytes

SCALES: tuple[str, ...] = ("bf16", "fp32")


class Grouped(Fused):
    """Groups of `group` elements, each with a scale (fp32, or 2 bytes of bf16) and codes of `code_bits` bits."""

    group: int
    scale: str

    @property
    @abstractmethod
    def code_bits(self) -> int:
        """Bits of one element's code."""

    def check_groups(self, name: str) -> None:
        """Raises ConfigError for a group or a scale that no packet can have."""
        checks.whole_number(f"{name} group", self.group, 1, 1 << 30)
        checks.one_of(f"{name} scale", self.scale, SCALES)

    @property
    def block(self) -> int:
        return self.group

    @cached_property
    def groups(self) -> Groups:
        """The packet's layout."""
        return Groups(self.code_bits, self.group, 16 if self.scale == "bf16" else 0)

    @property
    def bits_per_element(self) -> float:
        return (32 - self.groups.shift + 8 * group_bytes(self.group, self.code_bits)) / self.group

    def places(self, num_elements: int) -> Sequence[tuple[int, int]]:
        scales, _, _ = self.groups.sections(num_elements)
        return [(0, (32 - self.groups.shift) // 8), (scales, group_bytes(self.group, self.code_bits))]

    def packet_bytes(self, num_elements: int) -> int:
        return self.groups.sections(num_elements)[2]
