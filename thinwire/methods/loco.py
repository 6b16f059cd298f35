"""LoCo: the gradient codecs' error of one step is added to the next gradient, averaged over time and kept in 8 bits.

ZeRO++ and SDP4Bit have it as an option.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import Codec, Integer
from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.layout.formats import WireFormat
from thinwire.state.memory import Merge, Place, State

STORED = Integer(8, 256, "nearest")


@dataclass(frozen=True, kw_only=True)
class LoCoOptions:
    """The options of a method that can use LoCo."""

    loco: bool = False
    """Error feedback of the gradients (LoCo)."""
    loco_beta: float = 0.8
    """Weight of the old error in the feedback; from 0 to below 1. Only with loco."""
    loco_reset: int = 1024
    """Steps after which the feedback starts afresh; at least 1. Only with loco."""

    def check_loco(self, *wires: WireFormat) -> None:
        """Raise ConfigError for values that can't work, and for values that have no effect with these formats."""
        name = type(self).__name__
        if not 0.0 <= self.loco_beta < 1.0:
            close = 0.0 if self.loco_beta < 0 else 0.99
            rule = f"must be at least 0 and below 1; nearest: {close}, the paper's is 0.8"
            raise ConfigError(f"loco_beta {self.loco_beta} of {name}: {rule}")
        if self.loco_reset < 1:
            raise ConfigError(f"loco_reset {self.loco_reset} of {name}: must be at least 1; the paper's is 1024")
        for option in ("loco_beta", "loco_reset"):
            value, usual = getattr(self, option), getattr(LoCoOptions, option)
            if not self.loco and value != usual:
                raise ConfigError(
                    f"{option} {value} of {name}: changes nothing without loco; nearest: {usual}, or loco as true"
                )

        if self.loco and all(wire.intra.traits.lossless and wire.inter.traits.lossless for wire in wires):
            raise ConfigError(f"loco of {name} feeds nothing back: its gradients travel in fp32, which loses nothing")

    def gradient_memory(self, numels: Sequence[int]) -> LoCo | None:
        """LoCo's errors if `loco` is set, else None. numels: elements of a piece of each parameter."""
        return LoCo(numels, self.loco_beta, self.loco_reset) if self.loco else None


class LoCo:
    """Error feedback on both hops of one module's reduction.

    For every piece x that travels with a lossy codec Q, and its error e, zero at first:
        x' = x + e;    Q(x') is sent;    e <- beta e + (1 - beta) (x' - Q(x'))
    Between steps e is kept as 8-bit integers in groups of 256; it is dropped after every `reset_steps` reductions.
    Where e isn't finite, it becomes zero. Errors are kept by parameter, so a step without a parameter leaves its errors
    alone. Another layout drops all errors: they are moving averages over few steps, of these pieces only, and no sums.

    numels: elements of a rank's part of each parameter of the module.
    Memory per rank, for N parameters on nodes of L ranks: N (1 + 1/L) bytes and a little more.
    Source: LoCo: Low-Bit Communication Adaptor for Large-scale Model Training (2024).
    """

    def __init__(self, numels: Sequence[int], beta: float, reset_steps: int) -> None:
        self.numels, self.beta, self.reset_steps = list(numels), beta, reset_steps
        self.count = 0
        # By hop, rank or node that the piece is for, and number of the parameter.
        self.errors: dict[str, Tensor] = {}
        self.state = State(Place({}, Topology(1, 1)))
        self.state.add("errors", Merge.OWN, tensors=self.errors)
        self.state.add_attributes(self, "count")

    def of(self, present: Sequence[int]) -> Pieces:
        """The errors for the next reduction, which covers the parameters `present`."""
        if self.count and self.count % self.reset_steps == 0:
            self.errors.clear()
        self.count += 1
        return Pieces(self, present)

    @property
    def piece_bytes(self) -> int:
        """Bytes that are kept for one piece."""
        return sum(map(STORED.packet_bytes, self.numels))

    def __str__(self) -> str:
        return f"LoCo, beta {self.beta}"


@dataclass(frozen=True)
class Pieces:
    """LoCo's errors in one reduction; a Feedback, see thinwire.collectives.feedback."""

    loco: LoCo
    present: Sequence[int]

    def encode(
        self, codec: Codec, x: Tensor, piece: tuple[int, int], *, seed: int, counter: int, out: Tensor
    ) -> Tensor:
        """Encode x + e, and keep the error."""
        if codec.traits.lossless:
            return codec.encode(x, seed=seed, counter=counter, out=out)
        error = self._error(piece, x.device)
        wanted = error + x
        codec.encode(wanted, seed=seed, counter=counter, out=out)
        lost = wanted.sub_(codec.decode(out, wanted.numel()))
        self._keep(piece, error.mul_(self.loco.beta).add_(lost, alpha=1.0 - self.loco.beta))
        return out

    def _error(self, piece: tuple[int, int], device: torch.device) -> Tensor:
        parts = []
        for number in self.present:
            packet, length = self.loco.errors.get(_key(piece, number)), self.loco.numels[number]
            fresh = torch.zeros(length, device=device)
            parts.append(fresh if packet is None else STORED.decode(packet.to(device), length))
        return torch.cat(parts)

    def _keep(self, piece: tuple[int, int], error: Tensor) -> None:
        error.nan_to_num_(0.0, 0.0, 0.0)
        for number, part in zip(self.present, error.split([self.loco.numels[i] for i in self.present]), strict=True):
            self.loco.errors[_key(piece, number)] = STORED.encode(part)


def _key(piece: tuple[int, int], number: int) -> str:
    return f"{piece[0]} {piece[1]} {number}"
