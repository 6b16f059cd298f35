"""The fast CRC-32 is zlib's."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from thinwire.codecs.kernels import crc

SIZES = (0, 1, 63, 64, 255, 256, 319, 320, 321, 575, 576, 577, 1000, 70_001)


@pytest.mark.parametrize("can_fold", [True, False])
def test_it_is_zlibs(can_fold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crc, "CAN_FOLD", crc.CAN_FOLD and can_fold)
    data: Any = np.random.default_rng(0).integers(0, 256, 70_002, dtype=np.uint8)
    for size in SIZES:
        for begin in (0, 1):
            for value in (0, 1, 0xFFFFFFFF, 0x12345678):
                part = data[begin : begin + size]
                assert crc.crc32(part, value) == zlib.crc32(part, value), (size, begin, value)


def test_parts_chain_and_any_memory_will_do() -> None:
    data = bytes(range(256)) * 40
    assert crc.crc32(data[3000:], crc.crc32(memoryview(data)[:3000])) == zlib.crc32(data)
    assert crc.crc32(np.frombuffer(data, dtype=np.float32)) == zlib.crc32(data)
