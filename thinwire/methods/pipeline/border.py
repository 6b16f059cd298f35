"""What crosses a border between two stages: a hidden state forward, its gradient back, each through its codec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec
from thinwire.codecs.random import derive_seed
from thinwire.errors import ConfigError, Problems
from thinwire.methods.options import FP32, codec_or_none


@dataclass(frozen=True)
class Crossing:
    """The codecs of both directions.

    forward, backward: text for Codec.parse, or "fp32", which sends the tensor as it is, in its own dtype. seed: of the
    codecs' randomness. Raises ConfigError for text that is no codec.
    """

    forward: str = FP32
    backward: str = FP32
    seed: int = 0

    def __post_init__(self) -> None:
        for direction in ("forward", "backward"):
            self.codec(direction)

    def codec(self, direction: str) -> Codec | None:
        """The codec of a direction; None: tensors cross as they are."""
        return codec_or_none(self, direction)

    def check(self, features: int) -> None:
        """Raise ConfigError unless groups lie inside a token of `features` elements: tokens must not share errors."""
        problems = Problems()
        for direction in ("forward", "backward"):
            codec = self.codec(direction)
            if codec is not None and features % codec.block:
                problems.messages.append(
                    f"{direction} {getattr(self, direction)!r}: its groups of {codec.block} elements don't divide the "
                    f"{features} features of a token; nearest: {_nearest_group(codec, features)}"
                )
        problems.raise_any()

    def packet_bytes(self, direction: str, num_elements: int, dtype: torch.dtype) -> int:
        """Largest size in bytes of a message of `num_elements` elements."""
        codec = self.codec(direction)
        return num_elements * dtype.itemsize if codec is None else codec.packet_bytes(num_elements)

    def length(self, direction: str, packet: Tensor) -> int:
        """Number of a packet's bytes that travel."""
        codec = self.codec(direction)
        return packet.numel() if codec is None else codec.length(packet)

    def pack(self, direction: str, x: Tensor, chunk: int, number: int) -> Tensor:
        """x as a uint8 packet over the border after `chunk`. number: of the micro-batch, counted from the start."""
        codec = self.codec(direction)
        if codec is None:
            return x.detach().contiguous().reshape(-1).view(torch.uint8)
        return codec.encode(x.detach(), seed=derive_seed(self.seed, chunk, number, direction == "backward"))

    def unpack(self, direction: str, packet: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The tensor in a packet from `pack`."""
        codec = self.codec(direction)
        if codec is None:
            return packet.view(dtype).view(shape)
        return codec.decode(packet, shape.numel()).view(shape).to(dtype)

    def cross(self, direction: str, x: Tensor, chunk: int, number: int) -> Tensor:
        """x after it has crossed the border."""
        packet = self.pack(direction, x, chunk, number)
        return self.unpack(direction, packet, x.shape, x.dtype)


def sequence_keys(tokens: Tensor) -> list[bytes]:
    """The key of each sequence of tokens [batch, ...]: a digest of its tokens."""
    return [blake2b(row.contiguous().cpu().numpy().tobytes(), digest_size=16).digest() for row in tokens]


class LastMessages:
    """Each sequence's hidden state when it last crossed a border, known to both sides.

    The codec then rounds the difference from that state. The difference, and with it the error, shrinks as the model
    converges: m_s = m_s + C(x - m_s), with m_s = 0 for a new sequence. Source: Wang et al., "Fine-tuning Language
    Models over Slow Networks using Activation Compression with Guarantees" (NeurIPS 2022).

    A state that is not finite is not kept, or each later difference to it would be NaN.

    num_bytes: largest memory. The first sequences that fit are kept; for others the whole hidden state crosses.
    """

    def __init__(self, num_bytes: float) -> None:
        self._room = num_bytes
        self._held: dict[bytes, Tensor] = {}

    def pack(self, crossing: Crossing, x: Tensor, chunk: int, number: int, keys: Sequence[bytes]) -> Tensor:
        """See Crossing.pack, forward. keys: of the sequences in x [batch, ...]."""
        return crossing.pack("forward", x.detach() - self._before(keys, x.shape, x.dtype, x.device), chunk, number)

    def unpack(
        self, crossing: Crossing, packet: Tensor, shape: torch.Size, dtype: torch.dtype, keys: Sequence[bytes]
    ) -> Tensor:
        """See Crossing.unpack, forward. Both sides call it once for each packet."""
        before = self._before(keys, shape, dtype, packet.device)
        crossed = before + crossing.unpack("forward", packet, shape, dtype)
        sound = crossed.flatten(1).isfinite().all(1).tolist()
        for key, value, is_sound in zip(keys, crossed, sound, strict=True):
            if not is_sound:
                continue
            if key in self._held:
                self._held[key].copy_(value)
            elif value.nbytes <= self._room:
                self._room -= value.nbytes
                self._held[key] = value.detach().clone()
        return crossed

    def _before(self, keys: Sequence[bytes], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        found = torch.zeros(shape, dtype=dtype, device=device)
        for row, key in zip(found, keys, strict=True):
            if key in self._held:
                row.copy_(self._held[key])
        return found


def _nearest_group(codec: Codec, features: int) -> str:
    """The same codec with the largest group that divides a token; if there is none, advice instead."""
    text = str(codec)
    for group in sorted((n for n in range(1, codec.block) if features % n == 0), reverse=True):
        with suppress(ConfigError):
            candidate = Codec.parse(text.replace(f"/{codec.block}", f"/{group}"))
            if candidate.block == group:
                return repr(str(candidate))
    return f"a codec whose groups divide {features}, such as 'bf16'"


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, border: Border, number: int) -> Tensor:
        ctx.place = border, number
        crossing, last = border.crossing, border.last if border.training else None
        if last is not None:
            assert border.tokens is not None, "a Border with delta needs its tokens before each forward"
            keys = sequence_keys(border.tokens)
            packet = last.pack(crossing, x, border.chunk, number, keys)
            return last.unpack(crossing, packet, x.shape, x.dtype, keys)
        crossed = crossing.cross("forward", x, border.chunk, number)
        return crossed.clone() if crossed.data_ptr() == x.data_ptr() else crossed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        border, number = ctx.place
        return border.crossing.cross("backward", grads[0], border.chunk, number), None, None


class Border(nn.Module):
    """The effect of a pipeline's border on the hidden state, in one process, with the same bits.

    It uses the same codecs and random numbers. A model with Borders behind the same layers trains to the same weights
    as the pipeline, if both get the same micro-batches in the same order.

    Args:
        forward_codec, backward_codec, seed: as Crossing's forward, backward and seed.
        chunk: number of the pipeline's chunk before the border.
        delta_mb: megabytes of memory for differences to a sequence's last message; 0: no differences. If above 0, set
            `tokens` [batch, ...] before each forward in training.

    The n-th forward in training is micro-batch n, counted from the start; all forwards in evaluation count as the
    first. Raises ConfigError for codecs whose groups would reach into the next token.
    """

    def __init__(
        self, forward_codec: str = FP32, backward_codec: str = FP32, *, chunk: int = 0, seed: int = 0,
        delta_mb: float = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.crossing = Crossing(forward_codec, backward_codec, seed)
        self.chunk = chunk
        self.last = LastMessages(1e6 * delta_mb) if delta_mb else None
        self.tokens: Tensor | None = None
        self._numbers: Iterator[int] = iter(range(1 << 62))

    def forward(self, x: Tensor) -> Tensor:
        """The hidden state [..., features] after the border."""
        self.crossing.check(x.shape[-1])
        return _Cross.apply(x, self, next(self._numbers) if self.training else 0)
