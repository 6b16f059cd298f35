"""Headers of checked messages: ranks that disagree stop, and the error states both sides' values."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import CorruptMessageError, MismatchError

# Number of the message, payload bytes, operation and level, CRC-32 of the payload.
HEADER = struct.Struct("<qq48s")
CHECKSUM = struct.Struct("<I")
NOTHING = torch.empty(0, dtype=torch.uint8)


def header(number: int, num_bytes: int, name: str, payload: Tensor) -> Tensor:
    """A header: the message's number, the length of its buffer, its operation/level, and the payload's checksum."""
    packed = HEADER.pack(number, num_bytes, name.encode()[:48]) + CHECKSUM.pack(checksum(payload))
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def room() -> Tensor:
    """An empty buffer for a header."""
    return torch.empty(HEADER.size + CHECKSUM.size, dtype=torch.uint8)


def check(mine: Tensor, theirs: Tensor, receiver: str, sender: str) -> None:
    """Raise MismatchError unless the header that a peer sent matches the one that this rank expects."""
    if not torch.equal(mine[: HEADER.size], theirs[: HEADER.size]):
        raise MismatchError(f"ranks disagree: {receiver} expects {_describe(mine)}, {sender} sends {_describe(theirs)}")


def check_payload(payload: Tensor, header: Tensor, sender: str, receiver: str, sender_number: int) -> None:
    """Raise CorruptMessageError if the payload does not match the checksum in its header."""
    (stated,) = CHECKSUM.unpack_from(bytes(header.numpy()), HEADER.size)
    if checksum(payload) != stated:
        number, _, name = HEADER.unpack_from(bytes(header.numpy()))
        raise CorruptMessageError(
            f"a message was damaged on its way: {name.rstrip(bytes(1)).decode()} (message {number}) from "
            f"{sender} to {receiver} has another checksum than it was sent with",
            sender_number,
        )


def checksum(payload: Tensor) -> int:
    """CRC-32 of a uint8 tensor on the CPU."""
    data: Any = payload.contiguous().numpy()
    return zlib.crc32(data)


def _describe(header: Tensor) -> str:
    number, num_bytes, name = HEADER.unpack_from(bytes(header.numpy()))
    return f"message {number} of {name.rstrip(bytes(1)).decode()} with {num_bytes} bytes"
