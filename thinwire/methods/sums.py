"""Sums over ranks that have pieces of matrices, for an optimizer: which rows travel where, and the bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import derive_seed
from thinwire.collectives import Topology
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.methods.interface import Cuts, MethodPlan
from thinwire.methods.packets import PacketSection, message_bytes, sections_of
from thinwire.optim import Part, Sum, SummingOptimizer

# The optimizer's group of each parameter, by name.
ParamGroups = Mapping[str, Mapping[str, Any]]


class SumLeg(NamedTuple):
    """Rows [first, last) of a sum, numbered within its round, and the rank that they are sent to."""

    number: int
    sender: int
    receiver: int
    first: int
    last: int


@dataclass(frozen=True)
class Round:
    """Sums that are taken together, by (parameter, sum), over the ranks of `grid`.

    One message for each pair of ranks.
    """

    sums: Mapping[tuple[str, str], Sum]
    grid: Topology
    operation: str

    @cached_property
    def _keys(self) -> list[tuple[str, str]]:
        return list(self.sums)

    @cached_property
    def _messages(self) -> dict[tuple[int, int], dict[SumLeg, PacketSection]]:
        """For each (sender, receiver): the rows that one adds to and the other wants, and their place in the packet."""
        found: dict[tuple[int, int], list[SumLeg]] = {}
        for number, summed in enumerate(self.sums.values()):
            wanted = [(rank, *span) for rank, span in enumerate(summed.wants) if span[0] < span[1]]
            for sender, (adds, ends) in enumerate(summed.adds):
                for receiver, wants, until in wanted if adds < ends else []:
                    first, last = max(adds, wants), min(ends, until)
                    if first < last and sender != receiver:
                        found.setdefault((sender, receiver), []).append(SumLeg(number, sender, receiver, first, last))
        return {pair: self._sections(legs) for pair, legs in found.items()}

    def _sections(self, legs: Sequence[SumLeg]) -> dict[SumLeg, PacketSection]:
        sums = [self.sums[self._keys[leg.number]] for leg in legs]
        shapes = {
            str(at): torch.Size([leg.last - leg.first, each.width])
            for at, (leg, each) in enumerate(zip(legs, sums, strict=True))
        }
        sections = sections_of(shapes, lambda at, _: sums[int(at)].codec)
        return dict(zip(legs, sections.values(), strict=True))

    @property
    def travelling(self) -> set[str]:
        """The parameters whose sums need messages."""
        return {self._keys[leg.number][0] for legs in self._messages.values() for leg in legs}

    def sent_bytes(self, rank: int) -> dict[str, int]:
        """Payload bytes that a rank sends, by level."""
        return {level: int(sent[rank]) if rank < len(sent) else 0 for level, sent in self._sent.items()}

    @cached_property
    def _sent(self) -> dict[str, np.ndarray]:
        """Payload bytes by level and rank, without the messages: packets are aligned, so theirs are a message's."""
        world_size = max((len(summed.adds) for summed in self.sums.values()), default=0)
        nodes = np.array([self.grid.node(rank) for rank in range(world_size)])
        sent = np.zeros((world_size, world_size), np.int64)
        for summed in self.sums.values():
            (first, last), (start, stop) = np.array(summed.adds).T[:, :, None], np.array(summed.wants).T[:, None]
            rows = np.maximum(np.minimum(last, stop) - np.maximum(first, start), 0)
            np.fill_diagonal(rows, 0)
            counts, at = np.unique(rows, return_inverse=True)
            sizes = [PacketSection(summed.codec, int(num) * summed.width, 0).end if num else 0 for num in counts]
            sent[: len(rows), : len(rows)] += np.array(sizes)[at].reshape(rows.shape)
        is_near = nodes[:, None] == nodes
        return {"intra": (sent * is_near).sum(1), "inter": (sent * ~is_near).sum(1)}

    def take(
        self, link: Link, partials: Mapping[tuple[str, str], Tensor], seed: int, device: torch.device
    ) -> Rounds[dict[tuple[str, str], Tensor]]:
        """The totals that this rank wants, fp32 [rows, width]: its own terms first, then those of others in rank order.

        partials: this rank's terms, fp32 [rows, width]; a sum without an entry gets zeros.
        """
        rank = link.rank
        totals = {
            key: torch.zeros(summed.wants[rank][1] - summed.wants[rank][0], summed.width, device=device)
            for key, summed in self.sums.items()
        }
        for key, values in partials.items():
            (adds, ends), (wants, until) = self.sums[key].adds[rank], self.sums[key].wants[rank]
            first, last = max(adds, wants), min(ends, until)
            if first < last:
                own = values[first - adds : last - adds]
                totals[key][first - wants : last - wants] = self._as_sent(key, own, rank, seed)
        arrived = yield from self._travel(link, partials, seed, device)
        for leg in sorted(arrived, key=lambda leg: leg.sender):
            key = self._keys[leg.number]
            wants = self.sums[key].wants[rank][0]
            into = totals[key][leg.first - wants : leg.last - wants]
            into += arrived[leg].view_as(into)
        return totals

    def _travel(
        self, link: Link, partials: Mapping[tuple[str, str], Tensor], seed: int, device: torch.device
    ) -> Rounds[dict[SumLeg, Tensor]]:
        """Send rows to the ranks that want them. Return the received rows, flat, fp32."""
        rank, grid = link.rank, self.grid
        arrived: dict[SumLeg, Tensor] = {}
        for level, num_partners in (("intra", grid.local_size), ("inter", grid.num_nodes)):
            if num_partners == 1:
                continue
            peers = [
                p for p in range(grid.world_size) if p != rank and (grid.node(p) == link.node) == (level == "intra")
            ]
            incoming = {peer: found for peer in peers if (found := self._messages.get((peer, rank)))}
            receives = {
                peer: link.scratch(f"rows from {peer}", _bytes(sections), device=device)
                for peer, sections in incoming.items()
            }
            round_ = link.exchange(self.operation, level, receives)
            for peer in peers:
                if sections := self._messages.get((rank, peer)):
                    message = link.scratch(f"rows to {peer}", _bytes(sections), device=device)
                    with link.timed("encode_s", self.operation):
                        for leg, section in sections.items():
                            own_seed = self._seed(seed, leg.number, leg.sender, leg.receiver)
                            rows = self._rows(partials, leg, device)
                            section.codec.encode(rows, seed=own_seed, out=section.of(message))
                    round_.send(peer, message)
            yield from round_.finish()
            with link.timed("decode_s", self.operation):
                for peer, message in receives.items():
                    for leg, section in incoming[peer].items():
                        arrived[leg] = section.codec.decode(section.of(message), section.num_elements)
        return arrived

    def _seed(self, seed: int, number: int, sender: int, receiver: int) -> int:
        is_alike = self.sums[self._keys[number]].alike
        return derive_seed(seed, number, sender, sender if is_alike else receiver)

    def _as_sent(self, key: tuple[str, str], values: Tensor, rank: int, seed: int) -> Tensor:
        """A rank's own rows: exact, or as the others decode them if all ranks must get the same."""
        summed = self.sums[key]
        if not summed.alike or summed.codec.traits.lossless or sum(last > first for first, last in summed.wants) < 2:
            return values
        own_seed = self._seed(seed, self._keys.index(key), rank, rank)
        packet = summed.codec.encode(values.reshape(-1).float(), seed=own_seed)
        return summed.codec.decode(packet, values.numel()).view(values.shape)

    def _rows(self, partials: Mapping[tuple[str, str], Tensor], leg: SumLeg, device: torch.device) -> Tensor:
        """The rows that this rank sends, flat and fp32."""
        key = self._keys[leg.number]
        if key not in partials:
            return torch.zeros((leg.last - leg.first) * self.sums[key].width, device=device)
        first = self.sums[key].adds[leg.sender][0]
        return partials[key][leg.first - first : leg.last - first].reshape(-1).float()


def rounds_of(optimizer: SummingOptimizer, parts: Mapping[str, Part], grid: Topology) -> list[Round]:
    """The rounds of a step, over the ranks that have the parts."""
    sums = optimizer.sums(parts)
    return [
        Round({(name, key): summed for name in sums for key, summed in sums[name][number].items()}, grid, operation)
        for number, operation in enumerate([optimizer.operation] * optimizer.num_rounds)
    ]


def parts_of(cuts: Cuts, rank: int, groups: ParamGroups) -> dict[str, Part]:
    """A rank's part of each parameter. groups: the optimizer's group of each parameter."""
    return {name: Part(name, shape, tuple(spans), rank, groups[name]) for name, (shape, spans) in cuts.items()}


def sent_by_rounds(rounds: Sequence[Round], rank: int) -> int:
    """Payload bytes that a rank sends in all of them."""
    return sum(sum(each.sent_bytes(rank).values()) for each in rounds)


def planned_with(
    plan: MethodPlan, optimizer: SummingOptimizer, cuts: Cuts, groups: ParamGroups, grid: Topology
) -> MethodPlan:
    """A plan made for AdamW, with this optimizer's state and sums instead: those of the rank with the most.

    cuts, groups: of the parameters whose updates look across their elements.
    """
    kept, sent = [], []
    rounds = rounds_of(optimizer, parts_of(cuts, 0, groups), grid)
    for rank in range(max((len(spans) for _, spans in cuts.values()), default=1)):
        parts = parts_of(cuts, rank, groups).values()
        # AdamW keeps two moments of each element.
        kept.append(sum(optimizer.num_kept(part) - 2 * (part.own[1] - part.own[0]) for part in parts))
        sent.append([each.sent_bytes(rank) for each in rounds])
    most = {level: max(sum(each[level] for each in one) for one in sent) for level in ("intra", "inter")}
    own = {(optimizer.operation, level): num_bytes for level, num_bytes in most.items()}
    return replace(plan, optimizer=plan.optimizer + 4 * max(kept), sent={**plan.sent, **own})


def _bytes(sections: Mapping[SumLeg, PacketSection]) -> int:
    return message_bytes({str(number): section for number, section in enumerate(sections.values())})
