"""Bytes of the rows of a layer on their way to experts and back."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

import torch

from thinwire.collectives.all_to_all import NUMBER_BYTES, rows_bytes
from thinwire.methods.experts.layout import ExpertPlacement, check_once
from thinwire.methods.experts.options import CODED, ExpertParallel
from thinwire.table import Row

Pair = tuple[int, int]
# Bytes from rank to rank that leave together; the hops of each of four ways.
HopBytes = dict[Pair, int]
ChunkWays = list[list[HopBytes]]


@dataclass(frozen=True)
class Rows:
    """The rows of one layer in one micro-batch.

    Attributes:
        counts: [ranks][experts], each rank's rows for each expert.
        entering: [ranks][nodes], tokens of a rank with any expert in a node; for rows that enter a node once.
        top_k: experts of a token; for rows that enter a node once.
        dtype: of the rows. of_weights: dtype of the weights of a token's experts. of_experts: of experts that move.
        passes: micro-batches of a step, over which what is gathered once a step is counted.
        moved_numel: elements of a rank's part that travel if experts do; 0: all of its weights.
        forwards: forwards of a micro-batch: 2 if layers are computed again.
        moves: whether weights that move do so now; they need not in all micro-batches of a step.
    """

    counts: Sequence[Sequence[int]]
    width: int
    dtype: torch.dtype = torch.float32
    entering: Sequence[Sequence[int]] = ()
    top_k: int = 1
    of_weights: torch.dtype = torch.float32
    of_experts: torch.dtype = torch.float32
    passes: int = 1
    moves: bool = True
    forwards: int = 1
    moved_numel: int = 0

    @classmethod
    def even(
        cls, placement: ExpertPlacement, num_tokens: int, top_k: int, width: int, dtype: torch.dtype,
        num_nodes: int = 1, limit: int = 0, passes: int = 1,
    ) -> Rows:  # fmt: skip
        """The rows of a router that sends equally many rows to each expert.

        num_tokens: of a rank. limit: most rows of a rank for an expert; 0: no limit.
        """
        num_experts = placement.experts
        each = -(-num_tokens * top_k // num_experts)
        each = min(each, limit or each)
        # All but the tokens whose experts all lie elsewhere.
        elsewhere = math.comb(num_experts - num_experts // num_nodes, top_k) / math.comb(num_experts, top_k)
        enter = math.ceil(num_tokens * (1 - elsewhere))
        ranks = placement.ranks
        return cls([[each] * num_experts] * ranks, width, dtype, [[enter] * num_nodes] * ranks, top_k, passes=passes)

    def uneven(self, counts: Sequence[Sequence[int]]) -> Rows:
        """The same with these rows. As many tokens enter a node as before, if that many can have them."""
        entering = []
        for own, enters in zip(counts, self.entering, strict=True):
            each = len(own) // len(enters)
            nums = [sum(own[node * each : (node + 1) * each]) for node in range(len(enters))]
            entering.append([min(max(was, -(-n // self.top_k)), n) for was, n in zip(enters, nums, strict=True)])
        return replace(self, counts=counts, entering=entering)


def sent(
    placement: ExpertPlacement, rows: Rows, options: ExpertParallel, part_numel: int, local_size: int = 1, *,
    in_training: bool = True,
) -> dict[Pair, int]:  # fmt: skip
    """Bytes from rank to rank, in forward and, in training, backward; see `legs`."""
    found: dict[Pair, int] = defaultdict(int)
    forward, backward = (legs(placement, rows, way, part_numel, local_size) for way in (options, options.in_backward))
    hops = rows.forwards * [hop for ways in forward for hop in chain.from_iterable(ways[:2])]
    hops += [hop for ways in backward for hop in chain.from_iterable(ways[2:])] if in_training else []
    for hop in hops:
        for pair, num_bytes in hop.items():
            found[pair] += num_bytes
    return {pair: num_bytes for pair, num_bytes in found.items() if pair[0] != pair[1]}


def legs(
    placement: ExpertPlacement, rows: Rows, options: ExpertParallel, part_numel: int, local_size: int = 1
) -> list[ChunkWays]:
    """Bytes from rank to rank, by chunk, way and hop. The ways: to the experts, home, and of the gradients of both.

    Each in `options.chunks` chunks. Rows travel to their experts with a number each where what comes back is rounded at
    random.

    With n_pe rows of rank p for expert e, p sends sum_e n_pe rows to each of the s ranks that hold parts of e, except
    to itself, and receives as many. Backward sends the same rows of gradients. Before the rows of the first chunk, 1 +
    E / G numbers are sent. If experts move, a rank sends its part, of `part_numel` elements, to each rank that gathers
    it, and backward as many gradients. If slices move, a row goes to the one rank of a team, or of each group that
    exchanges slices, at its source's place.

    local_size: ranks per node. With two hops, everything for rank m of any node goes to rank m of this node first; each
    packet has its number of rows, and each message the sizes of its packets. For rows that enter a node once, see
    legs_once.
    """
    moved: HopBytes = {}
    returned: HopBytes = {}
    for source, home in product(range(placement.ranks), repeat=2):
        gathers = source // options.gathered == home // options.gathered
        if source != home and rows.moves and (gathers or options.move == "experts"):
            size = -(-(rows.moved_numel or part_numel) // rows.width), rows.width, rows.of_experts
            moved[source, home], returned[source, home] = (
                rows_bytes(*size, options.codec(kind)) // (rows.passes if options.once_a_step else 1)
                for kind in ("weights", "gradients")
            )
    if options.move == "experts":
        return [[[moved], [], [], [returned]]]
    has_hops = 1 < local_size < placement.ranks
    if options.route == "once" and has_hops:
        return [legs_once(placement, rows, options, local_size)]
    by_hops = options.route == "2dh" and has_hops
    found: list[ChunkWays] = []
    for chunk in range(options.num_chunks):
        ways = packets(placement, rows, options, chunk, counted=by_hops)
        found.append([two_hops(placement, way, local_size) if by_hops else [way] for way in ways])
    if moved:
        # The backward goes through the first chunk last.
        found[0][0].insert(0, moved)
        found[0][3].append(returned)
    return found


def two_hops(placement: ExpertPlacement, way: HopBytes, local_size: int) -> list[HopBytes]:
    """The hops of one way through the rank at the receiver's place in the sender's node."""
    inside: HopBytes = defaultdict(int)
    between: HopBytes = defaultdict(int)
    for (source, home), num_bytes in way.items():
        passes_on = source - source % local_size + home % local_size
        inside[source, passes_on] += num_bytes
        between[passes_on, home] += num_bytes
    for source, place in product(range(placement.ranks), range(local_size)):
        inside[source, source - source % local_size + place] += NUMBER_BYTES * (1 + placement.ranks // local_size)
    for source in range(placement.ranks):
        for far in range(source % local_size, placement.ranks, local_size):
            between[source, far] += NUMBER_BYTES * (1 + local_size)
    return [inside, between]


def legs_once(placement: ExpertPlacement, rows: Rows, options: ExpertParallel, local_size: int) -> ChunkWays:
    """The same where a token enters a node once, by the rank at its source's place.

    Between nodes: its row, the weights and numbers of its experts, and one sum; back, the gradients of weights. Inside:
    exact rows of all that entered. Raises ConfigError as `check_once`.
    """
    check_once(options.route, placement.slices, placement.ranks, local_size)
    outer: list[HopBytes] = [{}, {}, {}, {}]
    num_nodes, per_node = placement.ranks // local_size, placement.experts * local_size // placement.ranks
    weights = rows.top_k * rows.of_weights.itemsize
    numbers = numbers_bytes(rows.top_k, per_node, rows.of_weights.itemsize)
    for source, node in product(range(placement.ranks), range(num_nodes)):
        home, num = node * local_size + source % local_size, rows.entering[source][node]
        extra = [2 * 2 * NUMBER_BYTES + num * (weights + numbers), 0, 0, num * weights]
        for way, kind, more in zip(range(4), ("dispatch", "combine", "gradients", "gradients"), extra, strict=True):
            tells = kind == "dispatch" and options.tells
            body = rows_bytes(num, rows.width, rows.dtype, options.codec(kind), tells=tells) if num else 0
            outer[way][(home, source) if way % 2 else (source, home)] = body + more
    place_inside = ExpertPlacement(per_node, local_size, placement.slices)
    plain = ExpertParallel(local_size, placement.slices)
    inner: list[HopBytes] = [{}, {}, {}, {}]
    for node in range(num_nodes):
        own = slice(node * per_node, (node + 1) * per_node)
        merged = [
            [sum(column) for column in zip(*(counts[own] for counts in rows.counts[place::local_size]), strict=True)]
            for place in range(local_size)
        ]
        (ways,) = legs(place_inside, Rows(merged, rows.width, rows.dtype), plain, 0)
        for hop, (of_node,) in zip(inner, ways, strict=True):
            hop |= {
                (node * local_size + source, node * local_size + home): num_bytes
                for (source, home), num_bytes in of_node.items()
            }
    both = zip(outer, inner, strict=True)
    return [[near, far] if way % 2 else [far, near] for way, (far, near) in enumerate(both)]


def number_size(most: int) -> int:
    """Bytes of a whole number of 0 to `most`."""
    return 1 if most < 1 << 8 else 2 if most < 1 << 15 else 4


def numbers_bytes(num: int, most: int, itemsize: int) -> int:
    """Bytes of so many numbers of 0 to `most` in whole elements of `itemsize` bytes."""
    return -(-num * number_size(most) // itemsize) * itemsize


def packets(
    placement: ExpertPlacement, rows: Rows, options: ExpertParallel, chunk: int, *, counted: bool
) -> list[HopBytes]:
    """Bytes of a chunk's rows from their source to their home, back, and of the gradients of both.

    counted: every chunk has its number of rows in front; otherwise only the first chunk's rows to their experts.
    """
    ways: list[HopBytes] = [{}, {}, {}, {}]
    for source, home in product(range(placement.ranks), repeat=2):
        if source % options.gathered != home % options.gathered:
            continue
        first = placement.team(home) * placement.each
        total, parts = sum(rows.counts[source][first : first + placement.each]), options.num_chunks
        num_rows = (chunk + 1) * total // parts - chunk * total // parts
        there, back = (source, home), (home, source)
        kinds = (("dispatch", there), ("combine", back), ("gradients", there), ("gradients", back))
        for way, (kind, pair) in zip(ways, kinds, strict=True):
            is_told = kind == "dispatch" and chunk == 0
            head = NUMBER_BYTES * (1 + placement.each if is_told else counted)
            tells = kind == "dispatch" and options.tells
            body = rows_bytes(num_rows, rows.width, rows.dtype, options.codec(kind), tells=tells) if num_rows else 0
            way[pair] = head + body
    return ways


def chunks_text(options: ExpertParallel, before: str = "") -> str:
    """The numbers of chunks behind a word; empty if there is one."""
    if max(options.num_chunks, options.num_back) == 1:
        return ""
    back = f", {options.num_back} in backward" if options.num_back != options.num_chunks else ""
    return f"{before}{options.num_chunks} chunks{back}"


def facts(
    options: ExpertParallel, placement: ExpertPlacement, rows: Rows, layers: int, micro_batches: int, expert_numel: int,
    local_size: int,
) -> list[Row]:  # fmt: skip
    """Rows of (asked for, in effect, why): what a rank holds, and what it sends in a step.

    rows: of a micro-batch. expert_numel: elements of one expert in one layer. local_size: ranks per node.
    """
    by_rank: dict[int, int] = defaultdict(int)
    part_numel = placement.experts * expert_numel // placement.ranks
    for (source, _), num_bytes in sent(placement, rows, options, part_numel, local_size).items():
        by_rank[source] += num_bytes * layers * micro_batches
    whole = 4 * placement.ranks * (rows.moved_numel or part_numel) * layers
    return [
        (
            f"experts over {options.parallel} ranks", str(placement),
            f"{whole / placement.ranks / 1e6:.3f} MB of their weights a rank, of {whole / 1e6:.3f} MB",
        ),
        (
            f"experts move {options.move}", f"{max(by_rank.values(), default=0) / 1e6:.3f} MB sent a rank and step",
            f"by a router that is even; {', '.join(f'{name} {getattr(options, name)}' for name in CODED)}"
            + chunks_text(options, "; in "),
        ),
    ]  # fmt: skip
