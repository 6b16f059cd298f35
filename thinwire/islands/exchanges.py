"""The exchanges of an island with others: those under way, and the outer state that they update."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import derive_seed
from thinwire.collectives import Peers
from thinwire.errors import ConfigError, CorruptMessageError, PeerLostError
from thinwire.layout.layout import Layout
from thinwire.methods.outer.exchange import LAST, RENEW, STOP, Header, Sync
from thinwire.methods.outer.method import OuterMethod
from thinwire.methods.outer.parameters import OuterFragment

LOOK_EVERY_S = 0.1

log = logging.getLogger("thinwire")


@dataclass(eq=False)
class Flight:
    """An exchange under way. due: the step after which its result is used. sync: only on the island's first rank."""

    fragment: int
    due: int
    sync: Sync | None
    members: tuple[int, ...] = ()
    is_applied: bool = False

    def submit(self, peers: Peers) -> None:
        """Start the exchange with the islands that are present."""
        assert self.sync is not None
        self.members = peers.members
        self.sync.submit(peers)


class Exchanges:
    """The exchanges under way, and the outer state. All ranks of an island make the same calls.

    Args:
        connected: the other islands, on the island's first rank, which alone has the outer state; None on the others.
        options: a hash of the options that must be equal on all islands, besides model and method.
    """

    def __init__(
        self, method: OuterMethod, fragments: list[Layout], connected: Peers | None, *, options: str, seed: int
    ) -> None:
        self.method, self.fragments, self.connected, self.seed = method, fragments, connected, seed
        self.schedule = method.schedule(len(fragments))
        self.options = repr((shapes_of(fragments), method, options))
        self.flights: deque[Flight] = deque()
        self.state = method.state(fragments)
        # On the first rank, one for each fragment.
        self.outer: list[OuterFragment] = []
        # After which step the last exchanges were started.
        self.sent_through = 0
        self.weight = 1.0
        self.stop_agreed = False
        # Islands that have joined and listen until they have the whole state; the same on all members.
        self.catching_up: set[int] = set()
        # 0 while islands train; in `finish` 1 and how many fragments have had their last exchange.
        self.ending = 0

    @property
    def peers(self) -> Peers:
        """The other islands. Only on the first rank."""
        assert self.connected is not None
        return self.connected

    def begin(self, start: list[Tensor]) -> None:
        """Start with these weights, one flat tensor for each fragment. Only on the first rank."""
        self.state = self.method.state(self.fragments)
        self.outer = [OuterFragment(self.state, number) for number in range(len(self.fragments))]
        for outer, flat in zip(self.outer, start, strict=True):
            outer.set_parameters(flat)

    def send(
        self, number: int, step: int, weights: Mapping[str, Tensor], *, wishes_stop: bool = False, is_last: bool = False
    ) -> None:
        """Send the outer gradient x - w of a fragment.

        is_last: no exchange follows, so x becomes the mean of w.
        """
        flight = Flight(number, step + self.method.overlap_steps, None)
        if self.connected is not None:
            outer, weight = self.outer[number], self.weight
            count = outer.number + 1
            delta = outer.parameters - self.fragments[number].flat(weights)
            wishes = STOP * wishes_stop + RENEW * self.peers.changed() + LAST * is_last
            if not bool(torch.isfinite(delta.sum())):
                log.warning("thinwire: island %d is left out of an exchange: not finite", self.peers.island)
                weight = 0.0
            flight.sync = Sync(
                Header(outer.fingerprint, count, number, weight, wishes),
                self.method.codec, self.fragments[number].numel, step,
                derive_seed(self.seed, count, number, self.peers.island),
                delta=delta,
            )  # fmt: skip
            decay, lost = self.method.error_decay, self._feedback(flight.sync.header)
            flight.sync.lost = None if decay is None or lost is None else lost.mul_(decay)
            flight.submit(self.peers)
        self.flights.append(flight)

    def _feedback(self, header: Header) -> Tensor | None:
        """The error feedback that is added to what is sent; None without one, or for an island that is left out."""
        lost = self.state.lost
        return None if lost is None or not header.weight else lost[str(header.fragment)]

    def wait_for(self, sync: Sync) -> None:
        """Wait until all members have all messages.

        Raises PeerLostError, at once if a member is known to be lost; CorruptMessageError if it is not known whether
        all have them.
        """
        if sync.future is not None:
            with self.peers.awaiting(sync.due):
                self.result_of(sync.future)

    def result_of(self, future: Future) -> Any:
        """The result of a job of all islands. Raises PeerLostError at once if a member is known to be lost."""
        if not future.done():
            with self.peers.comm.meter.timed("exposed_s"):
                while wait([future], timeout=LOOK_EVERY_S).not_done:
                    if self.peers.lost():
                        raise PeerLostError("an island that takes part in the exchange under way is gone")
        return future.result()

    def apply(self, flight: Flight) -> None:
        """Take one outer step with the received messages; every island takes the same step, bit for bit."""
        assert flight.sync is not None
        self.apply_sync(flight.fragment, flight.sync, flight.members)
        flight.is_applied = True

    def apply_sync(self, number: int, sync: Sync, members: tuple[int, ...]) -> None:
        """See `apply`. members: the islands that took part in the exchange."""
        sync.check(members)
        total, weights = sync.total()
        self.catching_up -= {one for one, header in zip(members, sync.headers(), strict=True) if header.weight}
        if any(header.is_last for header in sync.headers()):
            self.outer[number].take_mean(total, weights)
        else:
            self.outer[number].apply(self.method.rule, total, weights, len(members))
        self.stop_agreed = self.stop_agreed or any(header.wishes_stop for header in sync.headers())

    def pending(self, number: int) -> Flight:
        """The exchange of a fragment that is under way and not applied yet."""
        return next(flight for flight in self.flights if flight.fragment == number and not flight.is_applied)

    def outer_state(self) -> Tensor:
        """The outer state as one flat fp32 tensor: what an island needs to take part, besides the counts."""
        return torch.cat([tensor for outer in self.outer for tensor in outer.tensors()])

    def take_over(self, state: Tensor, counts: list[int]) -> None:
        """Load another island's `outer_state`. counts: for each fragment, the exchanges applied to it."""
        rest = state
        for outer, count in zip(self.outer, counts, strict=True):
            for tensor in outer.tensors():
                tensor.copy_(rest[: tensor.numel()])
                rest = rest[tensor.numel() :]
            outer.set_parameters(outer.parameters.clone())
            outer.number = count
        # It counts from the outer parameters that this island had before.
        if self.state.lost is not None:
            self.state.lost.tensors.clear()

    def wait_for_all(self) -> None:
        """Wait for all exchanges under way.

        One that a loss has stopped is sent again when it is due or the state is loaded.
        """
        for flight in self.flights:
            if flight.sync is not None:
                with suppress(PeerLostError, CorruptMessageError):
                    self.wait_for(flight.sync)

    def drop_all(self) -> None:
        """Wait for all exchanges under way, and drop their results."""
        self.wait_for_all()
        self.flights.clear()

    def state_dict(self) -> dict[str, Any]:
        """The outer state, and the exchanges under way as messages, after waiting for them."""
        flights = []
        for flight in self.flights:
            sync = flight.sync
            told = None
            if sync is not None:
                # One that a loss stopped before it was packed has its outer gradient still.
                told = tuple(sync.header), sync.step, sync.seed, sync.received, sync.message, sync.delta
            flights.append((flight.fragment, flight.due, flight.members, told, flight.is_applied))
        return {
            "flights": flights,
            "outer": self.state.state_dict(),
            "names": [fragment.names for fragment in self.fragments],
            "block": self.method.codec.block,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state_dict. Messages that had not arrived are sent again."""
        self.drop_all()
        self.state.load_state_dict(state["outer"])
        self.outer = [OuterFragment(self.state, number) for number in range(len(self.outer))]
        for fragment, due, members, told, is_applied in state["flights"]:
            flight = Flight(fragment, due, None, tuple(members), is_applied)
            if told is not None:
                header, step, seed, received, message, *rest = told
                if message is None and (not rest or rest[0] is None):
                    raise ConfigError(
                        f"exchange {header[1]} of fragment {fragment} was saved without what it sends: go on from an "
                        "earlier checkpoint"
                    )
                flight.sync = Sync(Header(*header), self.method.codec, self.fragments[fragment].numel, step, seed)
                flight.sync.message, flight.sync.received = message, received
                if message is None:
                    flight.sync.delta, flight.sync.lost = rest[0], self._feedback(flight.sync.header)
                flight.sync.is_committed = received is not None
                if self.connected is not None and received is None:
                    flight.submit(self.connected)
            self.flights.append(flight)

    def close(self) -> None:
        """Wait for all exchanges under way, and leave the other islands."""
        self.drop_all()
        # An island that still listens would take a barrier for its next exchange.
        if self.connected is not None and not self.catching_up:
            # Whoever leaves breaks connections that a slower one may still wait on; if one is gone, that is over.
            with suppress(PeerLostError):
                self.connected.comm.barrier()
        if self.connected is not None:
            self.connected.close()

    def abandon(self) -> None:
        """Leave the other islands at once, after a failure."""
        if self.connected is not None:
            self.connected.abandon()


def shapes_of(fragments: list[Layout]) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Names and shapes of the exchanged parameters, by fragment."""
    return [[(name, tuple(shape)) for name, shape in fragment.shapes.items()] for fragment in fragments]
