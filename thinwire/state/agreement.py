"""What the ranks agree on in every step: gradient norm, loss, stop requests, and which parameters had a gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NUMBERS = 2
NUMBER_BYTES = 8 * NUMBERS
# The byte of the stop request has room for a number up to this.
MOST_TOLD = 127


def word_bytes(num_parameters: int = 0) -> int:
    """Bytes of one rank's status: two fp64 numbers, a byte for the stop request and the number told, a bit for each
    parameter."""
    return NUMBER_BYTES + 1 + -(-num_parameters // 8)


@dataclass(frozen=True)
class StepStatus:
    """What one rank reports about a step.

    Attributes:
        squares: sum of squares over the elements of the mean gradient that this rank counts. Each element of the model
            is counted by one rank of the mesh.
        loss: this rank's.
        stop: whether this rank asks to stop.
        used: for each parameter, whether it had a gradient on this rank; empty if that is not needed.
        told: a number, 0 to MOST_TOLD, for all ranks; that of the first rank counts.
        edited: whether other code than the optimizer has changed this rank's weights. It takes no byte: it is the sign
            of `squares`.
    """

    squares: float
    loss: float = math.nan
    stop: bool = False
    used: Sequence[bool] = ()
    told: int = 0
    edited: bool = False

    def pack(self, num_parameters: int = 0) -> Tensor:
        """The status as uint8 [word_bytes], with room for `num_parameters` parameters if other ranks report more."""
        squares = math.copysign(self.squares, -1.0 if self.edited else 1.0)
        numbers = np.array([squares, self.loss], dtype=np.float64).view(np.uint8)
        used = np.zeros(max(num_parameters, len(self.used)), dtype=np.uint8)
        used[: len(self.used)] = self.used
        bits = np.packbits(used)
        return torch.from_numpy(np.concatenate([numbers, np.array([self.stop + 2 * self.told], dtype=np.uint8), bits]))


class Agreed(NamedTuple):
    """What all ranks know after they have exchanged their statuses.

    Attributes:
        norm: 2-norm of the whole mean gradient.
        loss: mean over ranks.
        stop: whether any rank asks to stop.
        used: for each parameter, whether it had a gradient on any rank that holds it.
        told: the first rank's number.
        edited: whether other code than the optimizer has changed the weights of any rank.
    """

    norm: float
    loss: float
    stop: bool
    used: list[bool]
    told: int
    edited: bool

    @classmethod
    def of(cls, words: Tensor, num_parameters: int = 0, holders: Sequence[int] | None = None) -> Agreed:
        """Combine the statuses of all ranks, uint8 [world_size, word_bytes]. All ranks get the same result.

        holders: the ranks that hold the parameters of `used`; None: all.
        """
        rows = words.numpy()
        numbers = np.frombuffer(rows[:, :NUMBER_BYTES].tobytes(), dtype=np.float64).reshape(-1, NUMBERS)
        told = rows if holders is None else rows[list(holders)]
        bits = np.bitwise_or.reduce(told[:, NUMBER_BYTES + 1 :], axis=0)
        total = float(np.abs(numbers[:, 0]).sum())
        return cls(
            math.sqrt(total),
            float(numbers[:, 1].mean()),
            bool((rows[:, NUMBER_BYTES] & 1).any()),
            [bool(bit) for bit in np.unpackbits(bits)[:num_parameters]],
            int(rows[0, NUMBER_BYTES]) >> 1,
            bool(np.signbit(numbers[:, 0]).any()),
        )
