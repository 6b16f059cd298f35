"""Rows of zeros do not travel, and what arrives has the bits of the codec inside."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.codec_suite import gaussian, same_bits
from thinwire.codecs import Cast, Codec, Hadamard, Identity, Integer, Natural, NonzeroRows, Sign
from thinwire.codecs.rows import HEADER_BYTES, around
from thinwire.errors import ConfigError

SMALL = Integer(4, 64, "stochastic", "bf16")
CODED: list[Codec] = [Identity(), Cast(), SMALL, Hadamard(SMALL), Natural(4, 128), Sign(64), Hadamard(Identity(), 64)]


@pytest.mark.parametrize("coded", CODED, ids=str)
@pytest.mark.parametrize("num_here", [0, 1, 11, 300])
def test_what_travels_is_what_is_there(coded: Codec, num_here: int) -> None:
    """Of 300 rows, and a part of one more; two elements of a row that is there, which keep zeros beside them."""
    width, num_rows = 128, 300
    codec, size = NonzeroRows(coded, width), num_rows * width + 40
    x = torch.zeros(size)
    places = torch.randperm(num_rows, generator=torch.Generator().manual_seed(num_here))[:num_here]
    x[: num_rows * width].view(num_rows, width)[places, 3:5] = gaussian(2 * num_here).view(-1, 2)
    x[-3:] = 1.0
    for seed in (1, 2):
        packet, plain = (each.encode(x, seed=seed, counter=640) for each in (codec, coded))
        assert same_bits(codec.decode(packet, size), coded.decode(plain, size))
        assert codec.length(packet) == codec.bytes_of(size, num_here) <= HEADER_BYTES + len(plain)
        # A row costs its own bytes and little more than a byte for its number.
        of_row = coded.packet_bytes(width * 100) / 100
        rest = coded.packet_bytes(size - num_rows * width)
        assert codec.length(packet) <= min(num_here * (of_row + 2) + rest + 64, HEADER_BYTES + len(plain))
        packet[codec.length(packet) :] = 255
        assert same_bits(codec.decode(packet, size), coded.decode(plain, size))


def test_rows_are_the_longest_that_a_cut_leaves_whole() -> None:
    assert around(SMALL, 384, 2048) == NonzeroRows(SMALL, 128)
    assert around(SMALL, 512, 2048) == NonzeroRows(SMALL, 512)
    assert around(SMALL, 100, 2048) == NonzeroRows(SMALL, 64), "no row is whole blocks"
    assert around(Identity(), 100, 4) == NonzeroRows(Identity(), 4)
    sparse = Codec.parse("topk1%")
    assert around(sparse, 512, 4096) is sparse
    assert str(NonzeroRows(SMALL, 512)) == "int4/64:bf16+rows512"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("int4/64+rows100", "rows of 100 elements: must be a multiple of 64; nearest is 128"),
        ("int4/64+rows0", "nearest is 64"),
        ("topk1%+rows4096", "rows around topk1%/4096, whose blocks share bytes"),
        ("int4+zstd+rows128", "whose blocks share bytes: take another codec, such as int4/128"),
    ],
)
def test_what_can_not_be_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Codec.parse(text)
