"""Sends the tensors of an attention between the ranks of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.codecs import Codec, derive_seed
from thinwire.collectives import Communicator
from thinwire.collectives.all_to_all import all_to_all_rows
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.collectives.shift import shift

T = TypeVar("T")


@dataclass
class SequenceWire:
    """The ranks of a sequence, and the codecs of the attention's messages. Its jobs are urgent.

    Attributes:
        comm: over all ranks of the sequence.
        codec, gradients: codecs of the forward's and the backward's messages; None: as they are.
        seed: of the codecs. Every forward uses the same seed, so that a recomputed forward gives the same result. Each
            round of gradients uses another, counted in `num_drawn`.
    """

    comm: Communicator
    codec: Codec | None = None
    gradients: Codec | None = None
    seed: int = 0
    num_drawn: int = 0

    def draw(self) -> int:
        """Seed for the gradients of one round of messages, different on each rank."""
        self.num_drawn += 1
        return derive_seed(self.seed, self.comm.rank, self.num_drawn)

    def rows(
        self, members: Sequence[int], rows: Tensor, counts: Sequence[int], receives: Sequence[int],
        codec: Codec | None, seed: int, operation: str,
    ) -> Future[Tensor]:  # fmt: skip
        """Send rows to each of some ranks; see all_to_all_rows."""

        def job(link: Link) -> Rounds[Tensor]:
            inside = link.subgroup(members)
            found = yield from all_to_all_rows(inside, rows, counts, receives, codec, seed=seed, operation=operation)
            return found

        return self._submit(job)

    def shift(
        self, members: Sequence[int], packet: Tensor, by: int, operation: str, sends: bool = True, receives: bool = True
    ) -> Future[Tensor]:
        """Send a packet to the member `by` places further on; see `shift`."""

        def job(link: Link) -> Rounds[Tensor]:
            return shift(link.subgroup(members), packet, by, operation=operation, sends=sends, receives=receives)

        return self._submit(job)

    def _submit(self, job: Callable[[Link], Rounds[T]]) -> Future[T]:
        return self.comm.submit(job, urgent=True)


def pack(x: Tensor, codec: Codec | None, seed: int = 0) -> Tensor:
    """A tensor as a uint8 packet."""
    if codec is None:
        return x.contiguous().view(-1).view(torch.uint8)
    return codec.encode(x.contiguous().view(-1).float(), seed=seed)


def unpack(packet: Tensor, like: Tensor, codec: Codec | None) -> Tensor:
    """The tensor in a packet.

    Args:
        packet: uint8, from `pack` with the same codec.
        like: a tensor of the result's shape and dtype; its values are not read.
        codec: None: the packet holds the tensor's own bytes.
    """
    if codec is None:
        return packet.view(like.dtype).view(like.shape)
    return codec.decode(packet, like.numel()).view(like.shape).to(like.dtype)
