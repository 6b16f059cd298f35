"""ZeRO-1/2 in fp32 and in bf16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.codecs import Cast, Identity
from thinwire.layout.formats import WireFormat
from thinwire.methods.tables import RowsMethod


@dataclass(frozen=True)
class Zero(RowsMethod):
    """Sharded optimizer with fp32 both ways: the exact reference; 8 (P-1)/P bytes per parameter and step."""

    name: ClassVar[str] = "zero"

    def matrix(self) -> WireFormat:
        return WireFormat(Identity(), differences=False, intra=Identity(), inter=Identity())

    vector = matrix


@dataclass(frozen=True)
class ZeroBF16(RowsMethod):
    """Weights and gradients travel as bf16, masters and sums stay fp32; 4 (P-1)/P bytes per parameter and step."""

    name: ClassVar[str] = "zero-bf16"

    def matrix(self) -> WireFormat:
        return WireFormat(Cast("bf16"), differences=False, intra=Cast("bf16"), inter=Cast("bf16"))

    vector = matrix
