"""One exchange between islands: every packet to every island, then a byte that confirms that all have arrived."""

from __future__ import annotations

import struct
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives import Peers
from thinwire.collectives.faults import say
from thinwire.collectives.feedback import encode_with
from thinwire.collectives.gather import all_gather_packets
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.errors import CorruptMessageError, MismatchError, PeerLostError, ThinwireError
from thinwire.state.replicas import ReplicaError

OPERATION, COMMIT = "outer", "outer_commit"
HEADER = struct.Struct("<qqifi4x")
STOP, RENEW, LAST = 1, 2, 4
# A message that comes damaged is asked for once more.
NUM_ATTEMPTS = 2
# Packets start and end where all number formats may.
ALIGNMENT = 8


class Header(NamedTuple):
    """The numbers in front of a packet.

    Attributes:
        fingerprint: of the outer parameters to which the packet refers.
        number: of the fragment's exchange, from 1.
        weight: of this island in the mean; 0: it only listens.
        wishes: sum of STOP and RENEW, requests of this island for after the exchange, and LAST: no exchange follows.
    """

    fingerprint: int
    number: int
    fragment: int
    weight: float
    wishes: int = 0

    @property
    def wishes_stop(self) -> bool:
        return bool(self.wishes & STOP)

    @property
    def wishes_renewal(self) -> bool:
        return bool(self.wishes & RENEW)

    @property
    def is_last(self) -> bool:
        return bool(self.wishes & LAST)


def message_bytes(codec: Codec, numel: int) -> int:
    """Size of a header and a packet of `numel` elements."""
    return HEADER.size + -(-codec.packet_bytes(numel) // ALIGNMENT) * ALIGNMENT


def sent_bytes(codec: Codec, numel: int, num_members: int) -> int:
    """Bytes that one island sends in an exchange: its message and the confirmation, to every other island."""
    return (num_members - 1) * (message_bytes(codec, numel) + 1)


@dataclass(eq=False)
class Sync:
    """One exchange of one fragment, of outer gradients of `numel` elements.

    If a member is lost before `received` is complete, there is nothing to apply. If it is lost later, the question is
    whether any island has applied the sum. If so, all have the messages and apply them; if not, the messages are
    dropped and sent again. A member whose messages arrive damaged again and again stops, and counts as lost.

    Attributes:
        step: after which it was sent.
        delta: this island's outer gradient, until it is packed.
        lost: error feedback, added to delta; then the codec's error. None: no error feedback.
        message: header and packet.
        received: uint8 [members, bytes], all members' messages in their order; complete once it is set.
        is_committed: every member has confirmed that it has all messages, so any member may apply the sum.
    """

    header: Header
    codec: Codec
    numel: int
    step: int
    seed: int
    delta: Tensor | None = None
    lost: Tensor | None = field(default=None, repr=False)
    message: Tensor | None = None
    received: Tensor | None = None
    is_committed: bool = False
    future: Future | None = field(default=None, repr=False)

    @property
    def due(self) -> int:
        """The step that identifies it. The exchange that ends a run comes after that step's own exchanges."""
        return self.step + self.header.is_last

    def submit(self, peers: Peers) -> None:
        """Start, or start again with the islands that are present now."""
        if self.future is not None:
            # Whoever was wished for has been met.
            self.header = self.header._replace(wishes=self.header.wishes & ~RENEW)
            if self.message is not None:
                self._write_header(self.message)
        self.received, self.is_committed = None, False
        self.future = peers.comm.submit(self._job)
        peers.reached(self.due)

    def _write_header(self, message: Tensor) -> None:
        message[: HEADER.size] = torch.frombuffer(bytearray(HEADER.pack(*self.header)), dtype=torch.uint8)

    def _job(self, link: Link) -> Rounds[None]:
        grid = link.topology
        if self.message is None:
            self._pack(link)
        assert self.message is not None
        names = link.wire.global_ranks
        words: Tensor | None = None
        for attempt in range(1, NUM_ATTEMPTS + 1):
            # Whose message came damaged, by position and from 1.
            word = torch.zeros(1, dtype=torch.uint8)
            try:
                gathered = yield from all_gather_packets(link, self.message, OPERATION, self._length, in_turns=True)
                self.received = gathered.transpose(0, 1).reshape(grid.world_size, -1).clone()
            except CorruptMessageError as error:
                word[0] = 1 + names.index(error.sender)
                if attempt < NUM_ATTEMPTS:
                    what = f"{OPERATION} {self.header.number} is asked for once more"
                    say(f"thinwire: {link.wire.name(link.rank)}: {error}; {what}")
            words = yield from all_gather_packets(link, word, COMMIT)
            if not words.any():
                self.is_committed = True
                return
        assert words is not None
        sender = int(words.max()) - 1
        self.received = None
        told = f"{link.wire.name(sender)} is lost: {OPERATION} {self.header.number} came damaged from it, twice"
        if sender == link.rank:
            raise ThinwireError(told)
        raise PeerLostError(told)

    def _pack(self, link: Link) -> None:
        assert self.delta is not None
        message = torch.zeros(message_bytes(self.codec, self.numel), dtype=torch.uint8)
        self._write_header(message)
        with link.timed("encode_s", OPERATION):
            encode_with(self.codec, self.delta, self.lost, self.seed, 0, self._packet(message))
        self.message, self.delta = message, None

    def _packet(self, message: Tensor) -> Tensor:
        return message[HEADER.size : HEADER.size + self.codec.packet_bytes(self.numel)]

    def _length(self, message: Tensor) -> int:
        if not self.codec.has_variable_length:
            return message.numel()
        return HEADER.size + self.codec.length(self._packet(message))

    def headers(self) -> list[Header]:
        """The headers of all members' messages."""
        assert self.received is not None
        return [Header(*HEADER.unpack(bytes(message[: HEADER.size].numpy()))) for message in self.received]

    def check(self, members: tuple[int, ...]) -> None:
        """Raise unless all members have sent the same fragment, relative to the same outer parameters.

        MismatchError or ReplicaError. Members that only listen are not checked.
        """
        told = {island: header for island, header in zip(members, self.headers(), strict=True) if header.weight}
        first = next(iter(told.values()), self.header)
        for island, header in told.items():
            if (header.number, header.fragment) != (first.number, first.fragment):
                raise MismatchError(
                    f"island {members[0]} sends exchange {first.number} of fragment {first.fragment}, island {island} "
                    f"exchange {header.number} of fragment {header.fragment}"
                )
            if header.fingerprint != first.fingerprint:
                raise ReplicaError(
                    f"before exchange {first.number} of fragment {first.fragment} the outer parameters of island "
                    f"{island} differ from island {next(iter(told))}'s"
                )

    def total(self) -> tuple[Tensor, float]:
        """The weighted sum of the members' outer gradients, fp32 in the members' order; the sum of the weights."""
        assert self.received is not None
        total, weights = torch.zeros(self.numel), 0.0
        for message, header in zip(self.received, self.headers(), strict=True):
            if header.weight == 1.0:
                self.codec.decode_add(self._packet(message), total)
            elif header.weight:
                total.add_(self.codec.decode(self._packet(message), self.numel), alpha=header.weight)
            weights += header.weight
        return total, weights
