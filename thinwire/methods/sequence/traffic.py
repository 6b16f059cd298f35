"""The bytes of each attention, and which attention takes the fewest seconds on given links."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

from thinwire.codecs import Codec
from thinwire.cost import Line, Links, Network
from thinwire.cost.links import ALL_TO_ALL, INTER, INTRA
from thinwire.errors import ConfigError
from thinwire.methods.sequence.layout import AUTO, SequenceLayout, head_shares, kv_share, layouts
from thinwire.methods.sequence.options import SequenceParallel
from thinwire.table import Row

# Of links that nobody has measured or stated: 1 Gbit/s and 0.1 ms between nodes, 10 Gbit/s inside one.
RATE, LOCAL_RATE, DELAY_S = 125e6, 1250e6, 1e-4
Pair = tuple[int, int]


@dataclass(frozen=True)
class Shape:
    """One layer's attention. tokens: length of the whole sequence times number of sequences.

    head_size: of queries and keys. itemsize: bytes of an exact element. value_size: of values and outputs; 0: the same.
    forwards: of a micro-batch: 2 if layers are computed again.
    """

    heads: int
    kv_heads: int
    head_size: int
    tokens: int
    layers: int = 1
    itemsize: int = 4
    value_size: int = 0
    forwards: int = 1

    @property
    def widths(self) -> tuple[int, int]:
        """The width of a head's queries and keys, and of its values and outputs."""
        return self.head_size, self.value_size or self.head_size

    def bytes_of(self, rows: int, width: int, codec: Codec | None) -> int:
        """Bytes of `rows` rows of this width in one message."""
        numel = rows * width
        return numel * self.itemsize if codec is None else codec.packet_bytes(numel)


def sent(
    layout: SequenceLayout, shape: Shape, wire: Codec | None = None, gradients: Codec | None = None
) -> dict[Pair, int]:
    """Bytes from rank to rank for one layer, forward and backward.

    If ranks exchange heads, a rank sends (P-1)/P (2 h + 2 h_kv) d N/P elements forward and as many backward, unless
    ranks share key heads. If keys and values are passed on, it sends (P-1) 2 h_kv d N/P forward, and twice that
    backward: they travel again, and their gradients return.
    Source: Jacobs et al., "DeepSpeed Ulysses" (2023), section 3; Liu et al., "Ring Attention" (2023).
    """
    found: dict[Pair, int] = defaultdict(int)
    queries = head_shares(shape.heads, layout.ulysses)
    keys = [kv_share(share, shape.heads, shape.kv_heads) for share in queries]
    tokens, (of_keys, of_values) = shape.tokens // layout.size, shape.widths
    widths = of_keys, of_keys, of_values, of_values
    for rank in range(layout.size):
        own = rank % layout.ulysses
        for peer in layout.heads_group(rank):
            if peer != rank:
                theirs = peer % layout.ulysses
                # Messages of q, of k and of v, and of the outputs; then of their gradients.
                there = [_len(queries[theirs]), _len(keys[theirs]), _len(keys[theirs]), _len(queries[own])]
                back = [_len(queries[own]), _len(keys[own]), _len(keys[own]), _len(queries[theirs])]
                for nums, codec, times in ((there, wire, shape.forwards), (back, gradients, 1)):
                    parts = zip(nums, widths, strict=True)
                    each = sum(shape.bytes_of(num * tokens, width, codec) for num, width in parts)
                    found[rank, peer] += times * each
        ring = layout.ring_group(rank)
        at, rows = ring.index(rank), 2 * _len(keys[own]) * tokens * layout.ulysses
        for step in range(1, layout.ring):
            found[rank, ring[(at + 1) % layout.ring]] += (1 + shape.forwards) * shape.bytes_of(rows, max(widths), wire)
            found[rank, ring[(at - step) % layout.ring]] += shape.bytes_of(rows, max(widths), gradients)
    return dict(found)


def busiest(sent_bytes: dict[Pair, int]) -> int:
    """Bytes that the busiest rank sends."""
    by_rank: dict[int, int] = defaultdict(int)
    for (rank, _), num_bytes in sent_bytes.items():
        by_rank[rank] += num_bytes
    return max(by_rank.values(), default=0)


def most_sent(layout: SequenceLayout, shape: Shape, options: SequenceParallel, length: int = 1) -> int:
    """Bytes that the busiest rank sends in all layers, forward and backward, for padded sequences of `length`."""
    padded = shape.tokens // length * (-(-length // layout.unit) * layout.unit)
    traffic = sent(layout, replace(shape, tokens=padded), options.codec("wire"), options.codec("gradients"))
    return shape.layers * busiest(traffic)


def link_seconds(layout: SequenceLayout, sent_bytes: dict[Pair, int], network: Network) -> float:
    """Seconds of one layer on the links: those of the busiest link, plus the delay of each round.

    Inside a node, a rank's messages follow each other.
    """
    ports: dict[object, float] = defaultdict(float)
    rates = network.port_rates()
    slowest = 0.0
    for pair, num_bytes in sent_bytes.items():
        alone_s = num_bytes / network.rates[pair[0]][pair[1]]
        slowest = max(slowest, alone_s)
        if not (shared := network.ports(pair)):
            ports[pair[0]] += alone_s
        for port in shared:
            ports[port] += num_bytes / rates[port]
    rounds = 4 * (layout.ulysses > 1) + 2 * (layout.ring - 1) + (layout.ring > 1)
    delay_s = max((network.delays_s[a][b] for a, b in sent_bytes), default=0.0)
    return max([slowest, *ports.values()]) + rounds * delay_s


def assumed(ranks: int, local_size: int) -> Network:
    """Links with assumed rates, see RATE. local_size: ranks per node, among those of a sequence."""
    return Network.even(ranks, RATE, DELAY_S, local_size=local_size, local_rate=LOCAL_RATE)


def network_of(links: Links, ranks: int, local_size: int) -> Network:
    """Links between the ranks of a sequence, from seconds measured while all ranks of all nodes send.

    local_size: ranks per node, among those of a sequence. Each adds its share to the node's port.
    """
    nodes = [rank // local_size for rank in range(ranks)]
    levels = [[INTRA if a == b else INTER for b in nodes] for a in nodes]
    lines = {level: links.lines.get((ALL_TO_ALL, level), Line()) for level in (INTRA, INTER)}
    shares = {INTRA: 1, INTER: local_size}
    rates = {level: shares[level] / line.beta_s if line.beta_s else math.inf for level, line in lines.items()}
    return Network(
        tuple(nodes), tuple(tuple(rates[each] for each in row) for row in levels),
        tuple(tuple(lines[each].alpha_s for each in row) for row in levels),
    )  # fmt: skip


def candidates(shape: Shape, ranks: int, local_size: int) -> list[SequenceLayout]:
    """Layouts in which each rank has a head, and whose groups fill nodes or lie inside one."""
    return [
        each
        for each in layouts(ranks)
        if each.ulysses <= shape.heads and (each.ulysses % local_size == 0 or local_size % each.ulysses == 0)
    ]


def choose_layout(
    options: SequenceParallel, shape: Shape, local_size: int, network: Network | None = None
) -> tuple[SequenceLayout, str]:
    """The layout in effect, and why. Raises ConfigError for a stated layout that can't work.

    shape.tokens: of a micro-batch, whose messages wait for each other. local_size: ranks per node, among those of a
    sequence. network: between the ranks of a sequence.
    """
    ranks, codecs = options.parallel, (options.codec("wire"), options.codec("gradients"))
    if options.method != AUTO:
        layout = SequenceLayout.parse(options.method, ranks)
        head_shares(shape.heads, layout.ulysses)
        if layout not in candidates(shape, ranks, local_size):
            raise ConfigError(
                f"method {options.method!r}: {layout.ulysses} ranks that exchange heads must fill nodes of "
                f"{local_size} ranks, or lie inside of one; nearest: method 'ring'"
            )
        # Who has stated it is not known here.
        return layout, ""
    network = network or assumed(ranks, local_size)
    traffic = {each: sent(each, shape, *codecs) for each in candidates(shape, ranks, local_size)[::-1]}
    seconds = {each: link_seconds(each, bytes_of_pairs, network) for each, bytes_of_pairs in traffic.items()}
    best = min(seconds, key=lambda each: seconds[each])
    spans = {each: f"{s:.3g} s" if s >= 1 else f"{1e3 * s:.3g} ms" for each, s in seconds.items()}
    shown = ", ".join(f"{each} {span}, {busiest(traffic[each]) / 1e6:.3g} MB" for each, span in spans.items())
    return best, f"of a layer and micro-batch, seconds on its links and what a rank sends: {shown}"


def facts(
    options: SequenceParallel, shape: Shape, length: int, micro_batches: int, local_size: int,
    network: Network | None = None,
) -> list[Row]:  # fmt: skip
    """Rows of (asked for, in effect, why): the attention, what a rank sends in a step.

    shape.tokens: of a micro-batch, of sequences of `length` of one sequence rank group. Raises ConfigError as
    `choose_layout`.
    """
    layout, why = choose_layout(options, shape, local_size, network)
    most = micro_batches * most_sent(layout, shape, options, length)
    return [
        (f"sequence method {options.method}", str(layout), why),
        (
            f"sequence of {options.parallel} ranks", f"{most / 1e6:.3f} MB sent a rank and step",
            f"not in the table; {shape.layers} layers, {options.wire} there, {options.gradients} back",
        ),
    ]  # fmt: skip


def _len(share: slice) -> int:
    return share.stop - share.start
