"""Weights for a lost stage: from its neighbours' layers, and from copies of parameters outside of layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from thinwire.collectives import Expected, Label, Mailbox
from thinwire.errors import PeerLostError
from thinwire.methods.pipeline import Cut
from thinwire.methods.pipeline.recover import between, counterpart, neighbours, sources


@dataclass(frozen=True)
class Holdings:
    """The parameters that each rank of a pipeline trains, known to all of them.

    Attributes:
        layers: for each rank, the names of its layers in order.
        ends: for each rank, its parameters outside of layers, such as an embedding, without the tied ones.
        tied: parameters that the first and the last rank share.
        like: every trained parameter, without memory.
    """

    layers: tuple[tuple[str, ...], ...]
    ends: tuple[tuple[str, ...], ...]
    tied: tuple[str, ...]
    like: dict[str, Tensor]

    @classmethod
    def of(cls, made: Cut) -> Holdings:
        """The parameters of all stages, from a model that is still whole."""
        names = {id(param): name for name, param in made.model.named_parameters() if param.requires_grad}
        layers: list[tuple[str, ...]] = []
        others: list[list[str]] = []
        for rank in range(max(made.home) + 1):
            modules = [name for chunk, home in enumerate(made.home) if home == rank for name in made.names_of(chunk)]
            layers.append(tuple(name for name in modules if name.startswith(f"{made.layers}.")))
            outside = [made.model.get_submodule(name) for name in modules if name not in layers[-1]]
            params = [param for module in outside for param in module.parameters() if id(param) in names]
            others.append(list(dict.fromkeys(names[id(param)] for param in params)))
        tied = tuple(name for name in others[0] if name in others[-1]) if len(others) > 1 else ()
        ends = tuple(tuple(name for name in own if name not in tied) for own in others)
        trained = ((name, param) for name, param in made.model.named_parameters() if id(param) in names)
        like = {name: torch.empty(param.shape, dtype=param.dtype, device="meta") for name, param in trained}
        return cls(tuple(layers), ends, tied, like)

    def kept_by(self, rank: int) -> list[int]:
        """The ranks whose end parameters `rank` keeps copies of."""
        num_ranks = len(self.ends)
        return [other for other in range(num_ranks) if self.ends[other] and keeper_of(other, num_ranks) == rank]

    def trained_by(self, rank: int) -> tuple[str, ...]:
        """The parameters that a rank steps. The first rank steps the tied ones."""
        return *self.within(rank), *self.ends[rank], *(self.tied if rank == 0 else ())

    def within(self, rank: int) -> list[str]:
        """The parameters of a rank's layers."""
        return [name for layer in self.layers[rank] for name in self.of_layer(layer)]

    def of_layer(self, layer: str) -> list[str]:
        """The parameters of one layer."""
        return [name for name in self.like if name.startswith(f"{layer}.")]

    def num_bytes(self, names: Sequence[str]) -> int:
        """Bytes of these parameters."""
        return sum(self.like[name].nbytes for name in names)

    def split(self, packet: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """The parameters in a packet; the inverse of `packed`."""
        parts = packet.split([self.like[name].nbytes for name in names])
        return {
            name: part.clone().view(self.like[name].dtype).view(self.like[name].shape)
            for name, part in zip(names, parts, strict=True)
        }


def packed(weights: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """uint8: the bytes of these weights, in the order of `names`."""
    parts = [weights[name].detach().contiguous().view(-1).view(torch.uint8) for name in names]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def keeper_of(rank: int, num_ranks: int) -> int:
    """The rank that keeps a copy of `rank`'s parameters outside of layers."""
    return neighbours(rank, num_ranks)[0]


class EndCopies:
    """Copies, on neighbouring ranks, of each rank's parameters outside of layers.

    `send` after every update starts the messages, which travel during the next step. A copy is therefore that of the
    last update or of the one before it, never a mixture.

    mailbox: of the pipeline, used for nothing else. held: for each rank, this rank's copy of its parameters, uint8.
    """

    def __init__(self, mailbox: Mailbox, holdings: Holdings, held: Mapping[int, Tensor]) -> None:
        self.mailbox, self.holdings, self.held = mailbox, holdings, dict(held)
        self._own = holdings.ends[mailbox.rank]
        self._keeper = keeper_of(mailbox.rank, len(holdings.ends))
        # Of which ranks a copy is on its way.
        self._coming: list[int] = []

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that this rank sends after each update."""
        return self.holdings.num_bytes(self._own)

    def send(self, weights: Mapping[str, Tensor]) -> None:
        """Wait for the copies that are on their way, then start to send this rank's weights."""
        self.take()
        self._coming = list(self.held)
        self.mailbox.begin([Expected(_label(rank), rank, copy.numel()) for rank, copy in self.held.items()])
        if self._own:
            self.mailbox.send(self._keeper, _label(self.mailbox.rank), packed(weights, self._own))

    def take(self) -> None:
        """Wait for the copies that are on their way."""
        while self._coming:
            self._take_next()
        self.mailbox.finish()

    def rescue(self) -> dict[int, Tensor]:
        """The copies that had arrived when a rank was lost. Waits for nothing after `break_off` of the mailbox."""
        while self._coming:
            with suppress(PeerLostError):
                self._take_next()
        return self.held

    def _take_next(self) -> None:
        rank = self._coming.pop(0)
        self.held[rank] = self.mailbox.take(_label(rank))


def first_copies(holdings: Holdings, model: nn.Module, rank: int) -> dict[int, Tensor]:
    """A rank's copies of other ranks' parameters before the first update, from a model that is still whole."""
    weights = dict(model.named_parameters())
    return {other: packed(weights, holdings.ends[other]).cpu() for other in holdings.kept_by(rank)}


def _label(number: int) -> Label:
    return Label("forward", number, 0)


class Transfer(NamedTuple):
    """A message of a recovery. is_copy: the sender sends its copy of the receiver's parameters."""

    sender: int
    receiver: int
    names: list[str]
    is_copy: bool = False


def transfers(holdings: Holdings, how: str, lost: Collection[int]) -> list[Transfer]:
    """All messages of a recovery, in the same order on all ranks."""
    num_ranks, found = len(holdings.layers), []
    for stage in sorted(lost):
        found += [Transfer(source, stage, holdings.within(source)) for source in sources(how, stage, num_ranks)]
        if holdings.ends[stage]:
            found.append(Transfer(keeper_of(stage, num_ranks), stage, list(holdings.ends[stage]), True))
        if stage == 0 and holdings.tied:
            found.append(Transfer(num_ranks - 1, stage, list(holdings.tied)))
    return found


@torch.no_grad()
def recovered(
    mailbox: Mailbox, holdings: Holdings, how: str, lost: Collection[int], norms: Sequence[float],
    weights: Mapping[str, Tensor], copies: Mapping[int, Tensor],
) -> dict[str, Tensor]:  # fmt: skip
    """New weights for a lost rank, by parameter; empty on the others. A collective over the pipeline.

    A parameter is left out if the neighbours' parameters have other shapes.

    Args:
        how: one of RECOVERIES.
        norms: for each rank, the norm of the last gradients of its layers.
        weights: this rank's.
        copies: see EndCopies.
    """
    messages = list(enumerate(transfers(holdings, how, lost)))
    to_come = [(n, one) for n, one in messages if one.receiver == mailbox.rank]
    mailbox.begin([Expected(_label(n), one.sender, holdings.num_bytes(one.names)) for n, one in to_come])
    for number, one in messages:
        if one.sender == mailbox.rank:
            packet = copies[one.receiver].clone() if one.is_copy else packed(weights, one.names)
            mailbox.send(one.receiver, _label(number), packet)
    values: dict[str, Tensor] = {}
    beside: list[tuple[int, dict[str, Tensor]]] = []
    for number, one in to_come:
        came = holdings.split(mailbox.take(_label(number)), one.names)
        if one.is_copy or one.names == list(holdings.tied):
            values |= came
        else:
            beside.append((one.sender, came))
    mailbox.finish()
    own = holdings.layers[mailbox.rank]
    for number, layer in enumerate(own if beside else ()):
        found = [
            (came, holdings.layers[source][counterpart(number, len(own), len(holdings.layers[source]))], norms[source])
            for source, came in beside
        ]
        for name in holdings.of_layer(layer):
            like = [(came.get(theirs + name.removeprefix(layer)), norm) for came, theirs, norm in found]
            same = [(value, norm) for value, norm in like if value is not None and value.shape == weights[name].shape]
            if len(same) == 2:
                (before, norm_before), (after, norm_after) = same
                values[name] = between(before, after, *((0, 0) if how == "uniform" else (norm_before, norm_after)))
            elif same:
                values[name] = same[0][0]
    return {name: value.to(weights[name].device) for name, value in values.items()}
