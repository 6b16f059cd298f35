"""What the rows of a layer send on their way to experts and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from thinwire.codecs import Codec
from thinwire.collectives.all_to_all import NUMBER_BYTES, rows_bytes
from thinwire.methods.experts.layout import Placement
from thinwire.methods.experts.options import ExpertParallel
from thinwire.table import Row

Pair = tuple[int, int]


@dataclass(frozen=True)
class Rows:
    """The rows of one layer in one micro-batch. counts: [ranks][experts], those that a rank has for each expert."""

    counts: Sequence[Sequence[int]]
    width: int
    dtype: torch.dtype = torch.float32

    @classmethod
    def even(cls, placement: Placement, num_tokens: int, top_k: int, width: int, dtype: torch.dtype) -> Rows:
        """Of a router that sends equally many rows to each expert; num_tokens: of a rank."""
        each = -(-num_tokens * top_k // placement.experts)
        return cls([[each] * placement.experts] * placement.ranks, width, dtype)


def sent(
    placement: Placement, rows: Rows, options: ExpertParallel, part_numel: int, *, in_training: bool = True
) -> dict[Pair, int]:
    """Bytes from rank to rank: forward, and backward too in training.

    With n_pe rows of rank p for expert e, p sends sum_e n_pe rows to each of the s ranks that hold parts of e, but to
    itself, and as many come back. Backward is the same with gradients. In front of the rows are 2 + E / G numbers.
    Where weights move, a rank sends its part, of `part_numel` elements, to each rank that gathers it, and backward as
    many gradients; where slices do, a row goes to the one rank of a team at its source's place.
    """

    def num_bytes(num_rows: int, codec: Codec | None) -> int:
        return rows_bytes(num_rows, rows.width, rows.dtype, codec) if num_rows else 0

    found: dict[Pair, int] = defaultdict(int)
    slices, move = placement.slices, options.move
    for source, home in product(range(placement.ranks), repeat=2):
        first = placement.team(home) * placement.each
        num_rows = sum(rows.counts[source][first : first + placement.each])
        if source == home:
            continue
        gathers = move == "slices" and placement.team(source) == placement.team(home)
        if gathers or move == "experts":
            found[source, home] += part_numel * rows.dtype.itemsize * (2 if in_training else 1)
        if move == "tokens" or (move == "slices" and source % slices == home % slices):
            head = NUMBER_BYTES * (2 + placement.each)
            found[source, home] += head + num_bytes(num_rows, options.codec("dispatch"))
            found[home, source] += num_bytes(num_rows, options.codec("combine"))
            for pair in ((source, home), (home, source)) if in_training else ():
                found[pair] += num_bytes(num_rows, options.codec("gradients"))
    return dict(found)


def facts(
    options: ExpertParallel, placement: Placement, rows: Rows, layers: int, micro_batches: int, expert_numel: int
) -> list[Row]:
    """Rows of (asked for, in effect, why): what a rank holds, and what it sends in a step.

    rows: of a micro-batch. expert_numel: elements of one expert in one layer.
    """
    by_rank: dict[int, int] = defaultdict(int)
    part_numel = placement.experts * expert_numel // placement.ranks
    for (source, _), num_bytes in sent(placement, rows, options, part_numel).items():
        by_rank[source] += num_bytes * layers * micro_batches
    whole = 4 * placement.experts * expert_numel * layers
    return [
        (
            f"experts over {options.parallel} ranks", str(placement),
            f"{whole / placement.ranks / 1e6:.3f} MB of their weights a rank, of {whole / 1e6:.3f} MB",
        ),
        (
            f"experts move {options.move}", f"{max(by_rank.values(), default=0) / 1e6:.3f} MB sent a rank and step",
            f"by a router that is even; dispatch {options.dispatch}, combine {options.combine}, "
            f"gradients {options.gradients}",
        ),
    ]  # fmt: skip
