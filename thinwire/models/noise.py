"""Normal noise of tokens. What a token draws depends on its own number alone, not on the ranks that share its text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.random import MASK32, derive_seed, hash32
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class TokenNoise:
    """The draws of one forward.

    Attributes:
        seed: of the step.
        sequences: numbers of the sequences, int64 [batch], on the CPU.
        positions: of the tokens in each of them, int64 [tokens].
    """

    seed: int
    sequences: Tensor
    positions: Tensor

    @classmethod
    def of(cls, tokens: Tensor, positions: Tensor, given: tuple[int, Tensor] | None) -> TokenNoise:
        """The noise of tokens [batch, n] at these positions, int64 [n].

        given: the seed, and the numbers of the sequences. None: torch's generator draws a seed, and the numbers begin
        at 0. Raises ConfigError for numbers of another batch.
        """
        seed, sequences = given or (int(torch.randint(1 << 62, ())), torch.arange(len(tokens)))
        if len(sequences) != len(tokens):
            raise ConfigError(
                f"draws have numbers of {len(sequences)} sequences, for a batch of {len(tokens)}: each needs its own"
            )
        return cls(seed, sequences, positions)

    def normals(self, layer: int, width: int) -> Tensor:
        """Standard normal numbers, fp32 [batch * tokens, width].

        Number i of a token at position p of sequence s is a hash of (seed, layer, s, p * width + i), as
        sqrt(2) erfinv(2 u - 1).
        """
        device = self.positions.device
        seeds = [derive_seed(self.seed, layer, number) for number in self.sequences.tolist()]
        keys = torch.tensor([[seed & MASK32, seed >> 32] for seed in seeds], dtype=torch.int64, device=device)
        row = torch.arange(len(seeds), device=device)[:, None, None]
        place = self.positions[:, None] * width + torch.arange(width, device=device)
        # Odd multiples of 2^-23 in (-1, 1): no infinity.
        upper = hash32(keys.view(-1, 2), row, place[None] & MASK32) >> 9
        even = (2 * upper + 1 - (1 << 23)).to(torch.float32) * 2.0**-23
        return math.sqrt(2) * torch.erfinv(even).flatten(0, 1)
