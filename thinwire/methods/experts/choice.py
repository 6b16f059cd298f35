"""Chooses what travels, by which route and in how many chunks: the way with the fastest simulated layer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from statistics import mean
from typing import Literal

from thinwire.cost.links import ALL_TO_ALL, INTER, INTRA, SCATTER, Line, Links
from thinwire.cost.mixture import Portion, passes_s, streams_s, timelines
from thinwire.errors import Problems
from thinwire.methods.experts.layout import ExpertPlacement
from thinwire.methods.experts.options import AUTO, MOST_CHUNKS, SAME, ExpertParallel
from thinwire.methods.experts.traffic import Rows, legs

# Where a link takes no time.
MOST_ROOM = 1 << 40
# The meter's names of weights that move, and of their gradients.
MOVED, MOVED_GRADIENTS = "expert_weights", "expert_weight_gradients"
ROUTES: tuple[Literal["linear", "2dh", "once"], ...] = ("linear", "2dh", "once")


def choose_way(
    options: ExpertParallel, placement: ExpertPlacement, rows: Rows | Sequence[Rows], part_numel: int, local_size: int,
    links: Links,
) -> dict[ExpertParallel, float]:  # fmt: skip
    """For each way that the options leave open: seconds of a layer, forward and backward; fastest first.

    The simulator decides, not FSMoE's closed form, whose number of chunks takes up to a quarter longer on links that
    all messages share. One chunk is always tried, then more as long as they help.

    Args: see `sent`. rows: of a layer; or of several, of whose seconds the mean counts: in each of them all ranks wait
    for its own busiest expert. links: of the ranks that hold the experts between them.
    """
    layers = [rows] if isinstance(rows, Rows) else rows
    seconds: dict[ExpertParallel, float] = {}
    for way in ways_of(options, placement, local_size):
        if way.once_a_step and options.once_a_step == AUTO and layers[0].passes == 1:
            continue

        @cache
        def one_s(num: int, is_backward: bool, way: ExpertParallel = way) -> float:
            one = replace(way, chunks=num, chunks_back=SAME)
            how = part_numel, local_size, links
            return mean(pass_s(one, placement, each, *how, is_backward=is_backward) for each in layers)

        def both_s(num: int, back: int, one_s: Callable[[int, bool], float] = one_s) -> float:
            return layers[0].forwards * one_s(num, False) + one_s(back, True)

        for num, back in pairs_of(options, way, both_s):
            seconds[replace(way, chunks=num, chunks_back=SAME if num == back else back)] = both_s(num, back)
    # Of ways that differ by less than a simulation knows, the one of the fewest chunks.
    fewest = {way: way.num_chunks + way.num_back for way in seconds}
    return dict(sorted(seconds.items(), key=lambda item: (float(f"{item[1]:.3g}"), fewest[item[0]])))


def pairs_of(
    options: ExpertParallel, way: ExpertParallel, both_s: Callable[[int, int], float]
) -> list[tuple[int, int]]:
    """Numbers of chunks in forward and backward that are open and worth to be tried. both_s: seconds of both passes."""
    nums = [way.num_chunks]
    if options.chunks == AUTO and has_parts(way):
        # Twice as many as long as that helps.
        while nums[-1] < MOST_CHUNKS and both_s(2 * nums[-1], 2 * nums[-1]) < both_s(nums[-1], nums[-1]):
            nums.append(2 * nums[-1])
        nums += [2 * nums[-1]] * (nums[-1] < MOST_CHUNKS)
    if options.chunks_back != AUTO or not has_parts(way):
        return [(num, num if back_of(options) == SAME else way.num_back) for num in nums]
    near = [(num, back) for num in nums for back in near_to(num)]
    fastest = min(near, key=lambda pair: (both_s(*pair), sum(pair)))
    return list(dict.fromkeys([*((num, num) for num in nums), fastest]))


def near_to(num: int) -> list[int]:
    """The numbers of chunks in backward that `auto` weighs beside one in forward."""
    return [each for each in (num, num // 2, 2 * num) if 1 <= each <= MOST_CHUNKS]


def has_parts(way: ExpertParallel) -> bool:
    """Whether rows travel in parts that may be more."""
    return way.move != "experts" and way.route != "once"


def moves_of(slices: int) -> list[str]:
    """What may travel where so many ranks share an expert: Tutel's r from all of them to 1, and 0."""
    some = [f"slices={each}" for each in range(slices - 1, 1, -1) if slices % each == 0]
    return ["tokens", *some, "slices", "experts"]


def ways_of(options: ExpertParallel, placement: ExpertPlacement, local_size: int) -> list[ExpertParallel]:
    """The ways in one chunk that the options leave open: what travels, by each route that differs.

    Raises ConfigError where no way has a use for all that is stated.
    """
    has_hops, found, problems = 1 < local_size < placement.ranks, [], Problems()
    for move, route, once in product(moves_of(placement.slices), ROUTES, (False, True)):
        is_same = (placement.ranks == 1 and move != "tokens") or (placement.slices == 1 and move == "slices")
        fits = route == "linear" or (has_hops and (route == "2dh" or local_size % placement.slices == 0))
        is_asked = (
            options.move == move or (options.move == AUTO and not is_same),
            options.route == route or (options.route == AUTO and fits),
            options.once_a_step in (once, AUTO),
        )
        if all(is_asked):
            with problems.collect():
                one = 1 if options.chunks == AUTO else options.chunks
                parts = {"chunks": one, "chunks_back": back_of(options)}
                found.append(replace(options, move=move, route=route, once_a_step=once, **parts))  # type: ignore[arg-type]
    if not found:
        problems.raise_any()
    return found


def back_of(options: ExpertParallel) -> int | Literal["same"]:
    """The stated number of chunks in backward, or as many as in forward."""
    return SAME if isinstance(options.chunks_back, str) else options.chunks_back


def pass_s(
    options: ExpertParallel, placement: ExpertPlacement, rows: Rows, part_numel: int, local_size: int, links: Links, *,
    is_backward: bool,
) -> float:  # fmt: skip
    """Seconds of one layer's forward or backward, simulated, on average over the micro-batches; see choose_way."""
    seconds = 0.0
    for share, one, moved in micro_batches(options, rows):
        chunks = passes(one, placement, moved, part_numel, local_size, links)[is_backward]
        # Two messages of each further chunk, and their hops, cost processors that have no time to spare.
        more_s = (len(chunks[0].there) + len(chunks[0].back)) * (len(chunks) - 1) * links.message_s
        both = ([], chunks) if is_backward else (chunks, [])
        seconds += share * (passes_s(nodes_of(placement, local_size), *both, links) + more_s)
    return seconds


def micro_batches(options: ExpertParallel, rows: Rows) -> list[tuple[float, ExpertParallel, Rows]]:
    """The kinds of a step's micro-batches: the share of each, and what travels in it."""
    if not options.once_a_step or rows.passes == 1:
        return [(1.0, options, rows)]
    # Weights, or the sums of their gradients, travel in one of them.
    each, share = replace(options, once_a_step=False), 1 / rows.passes
    return [(share, each, replace(rows, moves=True)), (1 - share, each, replace(rows, moves=False))]


def layer_streams_s(
    options: ExpertParallel, placement: ExpertPlacement, rows: Rows | Sequence[Rows], part_numel: int, local_size: int,
    links: Links,
) -> dict[tuple[str, str], float]:  # fmt: skip
    """Of the seconds of a layer, those in which each message is under way, by (name, level); see `streams_s`."""
    layers = [rows] if isinstance(rows, Rows) else rows
    found: dict[tuple[str, str], float] = defaultdict(float)
    nodes = nodes_of(placement, local_size)
    for layer in layers:
        for share, one, moved in micro_batches(options, layer):
            both = timelines(nodes, *passes(one, placement, moved, part_numel, local_size, links), links)
            for timeline, times in zip(both, (layer.forwards, 1), strict=True):
                for key, seconds in streams_s(timeline, nodes).items():
                    found[key] += share * times * seconds / len(layers)
    return dict(found)


def nodes_of(placement: ExpertPlacement, local_size: int) -> list[int]:
    """The node of each rank."""
    return [rank // max(local_size, 1) for rank in range(placement.ranks)]


def passes(
    options: ExpertParallel, placement: ExpertPlacement, rows: Rows, part_numel: int, local_size: int, links: Links
) -> tuple[list[Portion], list[Portion]]:
    """The chunks of one layer's forward, and of its backward, in their order."""
    # Two operations for each weight of a rank's part of an expert, or of whole ones where their weights come to it.
    each = 2 * part_numel // placement.each * (placement.slices if options.move == "experts" else options.gathered)
    forward, backward = [], []
    has_moved = rows.moves and (options.move == "experts" or options.gathered > 1)
    for number, ways in enumerate(legs(placement, rows, options, part_numel, local_size)):
        flops = [each * num for num in rows_there(placement, rows, options, number)]
        names = named(ways[0], "dispatch", MOVED * (has_moved and not number)), named(ways[1], "combine")
        forward.append(Portion(ways[0], [links.product.seconds(amount) for amount in flops], ways[1], names))
    back = options.in_backward
    for number, ways in enumerate(legs(placement, rows, back, part_numel, local_size)):
        flops = [each * num for num in rows_there(placement, rows, back, number)]
        # Gradients of inputs and of weights.
        # They return after all else.
        last = MOVED_GRADIENTS * (has_moved and not number)
        names = named(ways[2], "combine_gradients"), named(ways[3], "dispatch_gradients", last)[::-1]
        work_s = [2 * links.product.seconds(amount) for amount in flops]
        backward.append(Portion(ways[2], work_s, ways[3], names))
    return forward, backward[::-1]


def named(hops: Sequence[object], name: str, first: str = "") -> list[str]:
    """The name of each hop's messages. first: that of the first hop; empty: the same."""
    return [first or name, *[name] * len(hops)][: len(hops)]


def idle_s(
    options: ExpertParallel, placement: ExpertPlacement, rows: Rows, part_numel: int, local_size: int, links: Links
) -> float:
    """Seconds in which the backward of a layer leaves the busiest link alone: all of it but those of its messages.

    Source: Pan et al., "FSMoE" (ASPLOS 2025), cases 1 to 4: t - 2 r t_a2a.
    """
    backward, nodes = (
        passes(options, placement, rows, part_numel, local_size, links)[1],
        nodes_of(placement, local_size),
    )
    level, busy_s = level_of(links), 0.0
    line = links.lines.get((ALL_TO_ALL, level), Line())
    for hop in (hop for chunk in backward for hop in (*chunk.there, *chunk.back)):
        sent = Counter[int]()
        for (source, target), num_bytes in hop.items():
            if (nodes[source] != nodes[target]) == (level == INTER) and source != target:
                sent[source] += int(num_bytes)
        busy_s += line.seconds(max(sent.values(), default=0))
    return max(0.0, passes_s(nodes, [], backward, links) - busy_s)


def room_bytes(idle_s: float, links: Links) -> int:
    """Bytes of gradients that a rank can send in an idle time, on the level that gradients cross."""
    line = links.lines.get((SCATTER, level_of(links)), links.lines.get((ALL_TO_ALL, level_of(links)), Line()))
    return int(min(line.room(idle_s), MOST_ROOM))


def level_of(links: Links) -> str:
    """The slowest level: between nodes, if there are several."""
    return INTER if (ALL_TO_ALL, INTER) in links.lines else INTRA


def rows_there(placement: ExpertPlacement, rows: Rows, options: ExpertParallel, chunk: int) -> list[int]:
    """For each rank, the number of a chunk's rows that its experts work on."""
    found = []
    for home in range(placement.ranks):
        if options.move == "experts":
            found.append(sum(rows.counts[home]))
            continue
        first, total = placement.team(home) * placement.each, 0
        for source, counts in enumerate(rows.counts):
            if source % options.gathered == home % options.gathered:
                num = sum(counts[first : first + placement.each])
                total += (chunk + 1) * num // options.num_chunks - chunk * num // options.num_chunks
        found.append(total)
    return found
