from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import ConfigError

# Target of a token without one.
IGNORED = -100
log = logging.getLogger(__name__)


class BatchLoader:
    """Endless micro-batches of sequences in a seeded order, with a position that can be saved.

    Sequence i is tokens[i * seq_len : (i + 1) * seq_len + 1]. Each epoch visits all sequences in an order drawn from
    (seed, epoch). Step t takes the next B = world_size * accumulation * micro_batch sequences of that order, and rank r
    takes the r-th B / world_size of them. So ranks are disjoint, and any split of B over ranks and micro-batches sees
    the same tokens in step t. A step that reaches the end of an epoch continues in the next one. numbers: of the
    sequences of the last micro-batch.
    Raises ConfigError if the tokens are shorter than one sequence, or if rank or sizes are out of range.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        seq_len: int,
        micro_batch: int,
        accumulation: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ) -> None:
        for name, size in (("seq_len", seq_len), ("micro_batch", micro_batch), ("accumulation", accumulation)):
            if size < 1:
                raise ConfigError(f"{name}={size}: must be at least 1")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank}: must lie in 0..{world_size - 1}")
        self.tokens = tokens
        self.seq_len = seq_len
        self.micro_batch = micro_batch
        self.accumulation = accumulation
        self.rank = rank
        self.seed = seed
        self.num_sequences = count_sequences(tokens, seq_len)
        self.sequences_per_step = micro_batch * accumulation * world_size
        self.numbers = np.zeros(0, np.int64)
        self._position = 0  # sequences that all ranks took in finished steps
        self._micro_step = 0  # micro-batches taken of the current step
        if self.num_sequences < self.sequences_per_step:
            log.warning(
                "data: one step takes %d sequences and there are only %d: a step sees some of them more than once",
                self.sequences_per_step,
                self.num_sequences,
            )

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """This rank's next micro-batch: (tokens, targets), int64 [micro_batch, seq_len]; targets are shifted by one."""
        first = self._position + (self.rank * self.accumulation + self._micro_step) * self.micro_batch
        epochs, indices = np.divmod(np.arange(first, first + self.micro_batch), np.int64(self.num_sequences))
        rows = self.numbers = shuffled(indices, self.num_sequences, self.seed, epochs)
        self._micro_step += 1
        if self._micro_step == self.accumulation:
            self._micro_step = 0
            self._position += self.sequences_per_step
        return gather(self.tokens, rows, self.seq_len)

    def count_followed(self, end: int) -> int:
        """Tokens in all ranks' sequences of the next step that are no document's last. Only between steps.

        end: the token after each document.
        """
        first = self._position
        epochs, indices = np.divmod(np.arange(first, first + self.sequences_per_step), np.int64(self.num_sequences))
        rows, length = shuffled(indices, self.num_sequences, self.seed, epochs), self.seq_len
        return sum(int(np.count_nonzero(self.tokens[row * length : (row + 1) * length] != end)) for row in rows)

    def skip_steps(self, num_steps: int) -> None:
        """Move forward by this number of steps, or back if it is negative. Only between steps."""
        self._position += num_steps * self.sequences_per_step

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain numbers, the same on every rank at the end of a step."""
        return {
            "position": self._position,
            "micro_step": self._micro_step,
            "sequences_per_step": self.sequences_per_step,
            "seq_len": self.seq_len,
            "num_sequences": self.num_sequences,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position. Between steps, batch and world may differ from those at the save.

        Raises ConfigError if data, seq_len or seed differ, or in the middle of a step if the batch differs.
        """
        own = self.state_dict()
        fixed = ["seq_len", "num_sequences", "seed"] + ["sequences_per_step"] * bool(state["micro_step"])
        for key in fixed:
            if state[key] != own[key]:
                raise ConfigError(f"data position: saved with {key}={state[key]}, this run has {own[key]}")
        self._position, self._micro_step = state["position"], state["micro_step"]


def heldout_batches(
    tokens: np.ndarray,
    *,
    seq_len: int,
    micro_batch: int,
    rank: int = 0,
    world_size: int = 1,
    max_sequences: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of the held-out sequences, in order, as (tokens, targets) int64 [<= micro_batch, seq_len].

    At most `max_sequences`, evenly spaced, go to all ranks together. Shares are disjoint and equally large, so the mean
    over ranks of the per-sequence mean is the mean of all. Up to world_size - 1 sequences are left over. If there are
    fewer sequences than ranks, every rank reads all of them. The last batch may be smaller.
    """
    available = count_sequences(tokens, seq_len)
    total = available if max_sequences is None else min(available, max_sequences)
    if total >= world_size:
        share = total // world_size
        picks = np.arange(rank * share, (rank + 1) * share)
        total = share * world_size
    else:
        picks = np.arange(total)
    rows = picks * available // max(total, 1)
    for start in range(0, len(rows), micro_batch):
        yield gather(tokens, rows[start : start + micro_batch], seq_len)


def documents_of(tokens: Tensor, targets: Tensor, end: int) -> tuple[Tensor, Tensor, Tensor]:
    """A batch with the number of each token's document; what follows a document is no target of its last token.

    end: the token after each document, which belongs to it.

    Shape:
        tokens, targets, results: int64 [batch, length].
    """
    is_end = (tokens == end).long()
    return tokens, targets.masked_fill(is_end.bool(), IGNORED), is_end.cumsum(1) - is_end


def count_sequences(tokens: np.ndarray, seq_len: int) -> int:
    """Number of non-overlapping sequences in the tokens. Raises ConfigError if there is none."""
    num_sequences = (len(tokens) - 1) // seq_len
    if num_sequences < 1:
        raise ConfigError(
            f"data: {len(tokens)} tokens are shorter than one sequence of seq_len + 1 = {seq_len + 1}; "
            f"the longest seq_len for them is {max(len(tokens) - 1, 0)}"
        )
    return num_sequences


def gather(tokens: np.ndarray, rows: np.ndarray, seq_len: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (one token ahead) of the sequences `rows`, int64 [len(rows), seq_len] each."""
    windows = np.stack([tokens[row * seq_len : (row + 1) * seq_len + 1] for row in rows]).astype(np.int64)
    batch = torch.from_numpy(windows)
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def shuffled(index: np.ndarray, size: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Apply a pseudo-random permutation of range(size), drawn from (seed, epoch), to each `index`; int64 [n].

    A four-round Feistel network over the smallest even number of bits, repeated until the result is below `size`. The
    permutation needs no memory, however long the data is, and is the same in every numpy release.
    Source: Black & Rogaway 2002 (cycle walking).
    """
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    result = index.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        left, right = result[outside] >> half_bits, result[outside] & mask
        for round_number in range(4):
            left, right = right, left ^ (mix(seed, epoch[outside], round_number, right) & mask)
        result[outside] = left << half_bits | right
        outside = result >= size
    return result.astype(np.int64)


def mix(*parts: int | np.ndarray) -> np.ndarray:
    """A 64-bit hash of integers, element by element, by the finaliser of SplitMix64 (Steele et al. 2014)."""
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        state = state + np.uint64(0x9E3779B97F4A7C15) + np.asarray(part).astype(np.uint64)
        state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        state = state ^ state >> np.uint64(31)
    return state
