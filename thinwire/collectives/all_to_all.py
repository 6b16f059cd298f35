"""All-to-all: between nodes, one row of a tensor to every node; between ranks, any number of rows to each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.collectives.together import together
from thinwire.errors import ConfigError

# In front of the rows of a message whose receiver does not know how many they are.
COUNT_BYTES = 8


def all_to_all_nodes(link: Link, sends: Tensor, *, operation: str = "all_to_all") -> Rounds[Tensor]:
    """Send row y of `sends` to node y, between the ranks that have the same local rank.

    Shape:
        sends: uint8 [num_nodes, bytes].
        result: the same shape, scratch of the link; row y came from node y.
    """
    received = link.scratch("exchanged", *sends.shape)
    received[link.node].copy_(sends[link.node])
    if link.topology.num_nodes > 1 and sends.numel():
        receives = {peer: received[link.topology.node(peer)] for peer in link.node_peers()}
        round_ = link.exchange(operation, "inter", receives)
        for peer in receives:
            round_.send(peer, sends[link.topology.node(peer)])
        yield from round_.finish()
    return received


def rows_bytes(num_rows: int, width: int, dtype: torch.dtype, codec: Codec | None = None, *, known: bool = True) -> int:
    """Payload of one message of `all_to_all_rows`. known: whether its receiver knows the number of rows."""
    exact = num_rows * width * dtype.itemsize
    return (exact if codec is None else codec.packet_bytes(num_rows * width)) + (0 if known else COUNT_BYTES)


def all_to_all_rows(
    link: Link,
    rows: Tensor,
    counts: Sequence[int],
    receives: Sequence[int] | int,
    codec: Codec | None = None,
    *,
    seed: int = 0,
    first_rows: Sequence[int] | None = None,
    rounds_own: bool = False,
    operation: str = "all_to_all",
) -> Rounds[tuple[Tensor, list[int]]]:
    """Send any number of rows to every rank: one message to each, none where both sides know that it has no rows.

    A rank's rows travel as one packet of the codec. Where `width` is a multiple of `codec.block`, groups end at a row's
    end, and a row is rounded alike whichever rows it travels with. Element j of row i draws its randomness from
    (seed, first + i * width + j), where `first` counts from `first_rows`: rows that are numbered over all ranks are
    rounded alike on any number of ranks.

    Args:
        rows: to rank 0, then to rank 1, and so on; read until the job ends.
        counts: rows to each rank.
        receives: rows from each rank; or, where these are not known, the most rows that any rank sends to another. The
            number of rows then travels in front of them, in COUNT_BYTES.
        codec: None: the rows' own bytes, in their own dtype.
        seed: of the codec.
        first_rows: number of the first row to each rank; by default the rows of `rows` are counted from 0.
        rounds_own: send the rows that stay here through the codec, too.
        operation: name in the meter.

    Shape:
        rows: floating [n, width], n the sum of `counts`, contiguous.
        result: [m, width] in the dtype of `rows`, from rank 0, then from rank 1, and so on; and the number of rows from
            each rank.

    Raises ConfigError for counts that do not fit `rows`, the ranks, or `receives`.
    """
    num_ranks, width, own = link.topology.world_size, rows.shape[-1], link.rank
    if len(counts) != num_ranks or sum(counts) != len(rows) or not rows.is_contiguous():
        raise ConfigError(f"counts {list(counts)} must cut {len(rows)} contiguous rows for {num_ranks} ranks")
    is_known = not isinstance(receives, int)
    most = [receives] * num_ranks if isinstance(receives, int) else list(receives)
    if len(most) != num_ranks or (most[own] < counts[own] if not is_known else most[own] != counts[own]):
        raise ConfigError(f"receives {receives} does not fit counts {list(counts)} on rank {own} of {num_ranks}")
    if not is_known and max(counts) > most[own]:
        raise ConfigError(f"counts {list(counts)}: no rank may send more than {most[own]} rows to another")
    starts = [0, *accumulate(counts)]
    first_rows = starts[:-1] if first_rows is None else first_rows
    head = 0 if is_known else COUNT_BYTES
    num_bytes = partial(rows_bytes, width=width, dtype=rows.dtype, codec=codec)
    peers = [(own + step) % num_ranks for step in range(1, num_ranks)]
    near = set(link.local_peers())
    room = {
        peer: link.scratch(f"rows from {peer}", head + num_bytes(most[peer]), device=rows.device)
        for peer in [*peers, own]
        if most[peer] or not is_known
    }

    def length(message: Tensor) -> int:
        return message.numel() if is_known else head + num_bytes(int(message[:head].view(torch.int64)))

    def packed(peer: int) -> Tensor:
        block = rows[starts[peer] : starts[peer + 1]]
        if codec is None and is_known:
            return block.view(-1).view(torch.uint8)
        # Whoever does not know the number of rows expects a message of the largest size.
        size = num_bytes(counts[peer] if is_known else most[peer])
        packet = link.scratch(f"rows to {peer}", head + size, device=rows.device)
        if head:
            packet[:head].view(torch.int64).fill_(counts[peer])
        payload = packet[head : head + num_bytes(counts[peer])]
        if codec is None:
            payload.copy_(block.view(-1).view(torch.uint8))
        else:
            codec.encode(block.view(-1).float(), seed=seed, counter=first_rows[peer] * width, out=payload)
        return packet

    def unpacked(message: Tensor, out: Tensor) -> None:
        payload = message[head : head + num_bytes(len(out))]
        if codec is None:
            out.view(-1).view(torch.uint8).copy_(payload)
        else:
            out.view(-1).copy_(codec.decode(payload, out.numel()))

    levels = {"intra": [p for p in peers if p in near], "inter": [p for p in peers if p not in near]}
    exchanges = {
        level: link.exchange(operation, level, {peer: room[peer] for peer in members if peer in room}, length)
        for level, members in levels.items()
        if members
    }
    for level, members in levels.items():
        for peer in members:
            if counts[peer] or not is_known:
                packet = yield from link.work("encode_s", operation, partial(packed, peer))
                exchanges[level].send(peer, packet)
    yield from together(*(exchange.finish() for exchange in exchanges.values()))
    came = (
        list(most) if is_known else [int(room[p][:head].view(torch.int64)) if p != own else 0 for p in range(num_ranks)]
    )
    came[own] = counts[own]

    def unpack() -> Tensor:
        result = rows.new_empty(sum(came), width)
        for peer, out in enumerate(result.split(came)):
            if peer == own and (codec is None or not rounds_own):
                out.copy_(rows[starts[own] : starts[own + 1]])
            elif len(out):
                unpacked(packed(own) if peer == own else room[peer], out)
        return result

    return (yield from link.work("decode_s", operation, unpack)), came
