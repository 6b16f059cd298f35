"""Matrices that are cut over ranks and become orthogonal whole: once a step, each on the rank that holds most of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.codecs import Codec, derive_seed
from thinwire.collectives import Topology
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.methods.packets import Section, message_bytes, sections_of

OPERATION = "orthogonal updates"


class Piece(NamedTuple):
    """Elements [first, last) of a parameter, which belong to a matrix of this number and lie on the rank `holder`."""

    matrix: int
    holder: int
    first: int
    last: int


@dataclass(frozen=True)
class Matrix:
    """A matrix whose first element is element `first` of the parameter `name`; `owner`: who makes it orthogonal."""

    name: str
    shape: torch.Size
    first: int
    owner: int


@dataclass(frozen=True)
class CutMatrices:
    """The matrices of some parameters, the pieces of them that ranks hold, and how the pieces meet.

    A matrix belongs to the rank that holds most of it; where several hold as much, to the one with the least work so
    far. The others send their pieces to it in `codec`, and get their pieces of the result back.
    """

    matrices: tuple[Matrix, ...]
    pieces: tuple[Piece, ...]
    grid: Topology
    codec: Codec

    @classmethod
    def of(
        cls, parts: Mapping[str, tuple[torch.Size, Sequence[tuple[int, int]]]], grid: Topology, codec: Codec
    ) -> CutMatrices:
        """parts: by parameter, its shape of two or three dimensions, and the elements [first, last) of each rank."""
        matrices: list[Matrix] = []
        pieces: list[Piece] = []
        work = [0] * grid.world_size
        for name, (shape, held) in parts.items():
            rows, columns = shape[-2:]
            for start in range(0, shape.numel(), rows * columns):
                spans = [(max(first, start), min(last, start + rows * columns)) for first, last in held]
                own = [Piece(len(matrices), rank, *span) for rank, span in enumerate(spans) if span[0] < span[1]]
                owner = max(own, key=lambda piece: (piece.last - piece.first, -work[piece.holder])).holder
                work[owner] += rows * columns * min(rows, columns)
                matrices.append(Matrix(name, shape[-2:], start, owner))
                pieces += own
        return cls(tuple(matrices), tuple(pieces), grid, codec)

    @cached_property
    def _messages(self) -> dict[tuple[int, int], dict[Piece, Section]]:
        """By (holder, owner): the pieces that travel between the two, and their places in the message."""
        found: dict[tuple[int, int], list[Piece]] = {}
        for piece in self.pieces:
            if piece.holder != (owner := self.matrices[piece.matrix].owner):
                found.setdefault((piece.holder, owner), []).append(piece)
        return {pair: self._sections(pieces) for pair, pieces in found.items()}

    def _sections(self, pieces: Iterable[Piece]) -> dict[Piece, Section]:
        lengths = {str(piece): torch.Size([piece.last - piece.first]) for piece in pieces}
        return dict(zip(pieces, sections_of(lengths, lambda *_: self.codec).values(), strict=True))

    @cached_property
    def names(self) -> set[str]:
        """The parameters that the matrices belong to."""
        return {matrix.name for matrix in self.matrices}

    @property
    def num_cut(self) -> int:
        """Matrices of which more than one rank holds a piece."""
        return len({piece.matrix for piece in self.pieces if piece.holder != self.matrices[piece.matrix].owner})

    def sent_bytes(self, rank: int) -> dict[str, int]:
        """Payload that a rank sends in a step, by level: its pieces, and the results of the matrices that it owns."""
        sent = {"intra": 0, "inter": 0}
        for pair, sections in self._messages.items():
            if rank in pair:
                is_near = self.grid.node(pair[0]) == self.grid.node(pair[1])
                sent["intra" if is_near else "inter"] += message_bytes({str(p): s for p, s in sections.items()})
        return sent

    def most_bytes(self) -> dict[str, int]:
        """The most that any rank sends in a step, by level."""
        sent = [self.sent_bytes(rank) for rank in range(self.grid.world_size)]
        return {level: max(one[level] for one in sent) for level in ("intra", "inter")}

    def collect(self, link: Link, held: Mapping[str, Tensor], seed: int) -> Rounds[dict[int, Tensor]]:
        """The whole matrices that this rank owns, by number, fp32; held: its flat piece of each parameter."""
        own = {piece: self._of(held, piece, link.rank) for piece in self.pieces if piece.holder == link.rank}
        arrived = yield from self._travel(link, own, seed, is_back=False)
        wholes: dict[int, Tensor] = {}
        for piece, values in [*own.items(), *arrived.items()]:
            matrix = self.matrices[piece.matrix]
            if matrix.owner == link.rank:
                flat = wholes.setdefault(piece.matrix, torch.empty(matrix.shape, device=values.device)).view(-1)
                flat[piece.first - matrix.first : piece.last - matrix.first] = values
        return wholes

    def spread(
        self, link: Link, wholes: Mapping[int, Tensor], held: Mapping[str, Tensor], seed: int
    ) -> Rounds[dict[str, Tensor]]:
        """This rank's pieces of the results, by parameter, fp32 like `held`."""
        own = {
            piece: wholes[piece.matrix].reshape(-1)[piece.first - matrix.first : piece.last - matrix.first].float()
            for piece in self.pieces
            if (matrix := self.matrices[piece.matrix]).owner == link.rank
        }
        arrived = yield from self._travel(link, own, seed, is_back=True)
        results = {name: torch.empty_like(values) for name, values in held.items()}
        for piece, values in [*own.items(), *arrived.items()]:
            if piece.holder == link.rank:
                self._of(results, piece, link.rank).copy_(values)
        return results

    def _of(self, held: Mapping[str, Tensor], piece: Piece, rank: int) -> Tensor:
        """A piece in this rank's part of its parameter, a view."""
        name = self.matrices[piece.matrix].name
        return held[name].view(-1)[piece.first - self._starts[name, rank] :][: piece.last - piece.first]

    @cached_property
    def _starts(self) -> dict[tuple[str, int], int]:
        """The first element of each parameter that each rank holds."""
        found: dict[tuple[str, int], int] = {}
        for piece in self.pieces:
            found.setdefault((self.matrices[piece.matrix].name, piece.holder), piece.first)
        return found

    def _travel(
        self, link: Link, values: Mapping[Piece, Tensor], seed: int, *, is_back: bool
    ) -> Rounds[dict[Piece, Tensor]]:
        """Send pieces from their holders to the owners of the matrices, or back; what has arrived here, fp32."""
        rank, grid = link.rank, self.grid
        arrived: dict[Piece, Tensor] = {}
        device = next((tensor.device for tensor in values.values()), torch.device("cpu"))
        for level, num_partners in (("intra", grid.local_size), ("inter", grid.num_nodes)):
            if num_partners == 1:
                continue
            peers = [
                p for p in range(grid.world_size) if p != rank and (grid.node(p) == link.node) == (level == "intra")
            ]
            outgoing = {peer: self._messages.get((peer, rank) if is_back else (rank, peer), {}) for peer in peers}
            incoming = {peer: self._messages.get((rank, peer) if is_back else (peer, rank), {}) for peer in peers}
            receives = {
                peer: link.scratch(f"pieces from {peer}", _bytes(sections), device=device)
                for peer, sections in incoming.items()
                if sections
            }
            round_ = link.exchange(OPERATION, level, receives)
            for peer, sections in outgoing.items():
                if sections:
                    message = link.scratch(f"pieces to {peer}", _bytes(sections), device=device)
                    with link.timed("encode_s", OPERATION):
                        for piece, section in sections.items():
                            own_seed = derive_seed(seed, piece.matrix, piece.holder, int(is_back))
                            section.codec.encode(values[piece], seed=own_seed, out=section.of(message))
                    round_.send(peer, message)
            yield from round_.finish()
            with link.timed("decode_s", OPERATION):
                for peer, message in receives.items():
                    for piece, section in incoming[peer].items():
                        arrived[piece] = section.codec.decode(section.of(message), section.num_elements)
        return arrived


def _bytes(sections: Mapping[Piece, Section]) -> int:
    return max(section.end for section in sections.values())
