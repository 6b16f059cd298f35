"""Measures every link of an emulated network with plain sockets: the rate asked for, and the rate achieved."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.lab.network import FRAME_BYTES, LabNetwork
from thinwire.lab.spec import parse_rate

TOLERANCE = 0.05
WARM_UP_S = 0.5
# The window holds so many frames that one frame more or less is well within the tolerance.
WINDOW_S, WINDOW_BITS = 1.5, 8 * 64 * FRAME_BYTES
CHUNK_BYTES = 1 << 20
READINGS = 5
CONNECT_S = 10.0


@dataclass(frozen=True)
class Reading:
    """One direction of one node's link, in bits per second.

    link: frames with their headers, as the kernel's queue counted them. goodput: data that the receivers got.
    """

    node: int
    direction: str
    asked: float | None
    link: float
    goodput: float

    @property
    def ratio(self) -> float | None:
        """Achieved rate divided by the rate asked for; None for a link that is not shaped."""
        return self.link / self.asked if self.asked else None

    @property
    def is_right(self) -> bool:
        return self.ratio is None or abs(self.ratio - 1) <= TOLERANCE


class Flow:
    """A TCP connection between two nodes that sends as fast as it can until it is closed."""

    def __init__(self, network: LabNetwork, sender: int, receiver: int) -> None:
        self.received_bytes = 0
        with network.socket(receiver) as server:
            server.settimeout(CONNECT_S)
            server.bind((network.addresses[receiver], 0))
            server.listen()
            self._out = network.socket(sender)
            self._out.settimeout(CONNECT_S)
            self._out.connect(server.getsockname())
            self._in, _ = server.accept()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        chunk = bytes(CHUNK_BYTES)
        with contextlib.suppress(OSError):
            while True:
                self._out.sendall(chunk)

    def _receive(self) -> None:
        buffer = bytearray(CHUNK_BYTES)
        with contextlib.suppress(OSError):
            while count := self._in.recv_into(buffer):
                self.received_bytes += count

    def close(self) -> None:
        for end in (self._out, self._in):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._out.close()
        self._in.close()


def measure(
    network: LabNetwork, senders: Sequence[int], receiver: int, asked: float | None, *, sends: bool
) -> tuple[float, float]:
    """Bits per second on the link of the only sender (`sends`) or of the receiver, and the rate of arrived data.

    asked: the rate that it should have.
    """
    node = senders[0] if sends else receiver
    window_s = max(WINDOW_S, WINDOW_BITS / (asked or math.inf))
    with contextlib.ExitStack() as stack:
        flows = [Flow(network, sender, receiver) for sender in senders]
        for flow in flows:
            stack.callback(flow.close)
        time.sleep(WARM_UP_S)
        start, link, arrived = _counted(network, node, flows, sends)
        time.sleep(window_s)
        end, link_now, arrived_now = _counted(network, node, flows, sends)
    return 8 * (link_now - link) / (end - start), 8 * (arrived_now - arrived) / (end - start)


def _counted(network: LabNetwork, node: int, flows: Sequence[Flow], sends: bool) -> tuple[float, int, int]:
    """The time in seconds, the bytes on the node's link so far, and the bytes that arrived.

    A busy machine may stop this process between clock and counter, so the shortest of several readings counts.
    """
    found = []
    for _ in range(READINGS):
        start = time.monotonic()
        counter, arrived = network.counters()[node], sum(flow.received_bytes for flow in flows)
        end = time.monotonic()
        link = counter.sent_bytes if sends else counter.received_bytes
        found.append((end - start, (start + end) / 2, link, arrived))
    return min(found)[1:]


def readings(network: LabNetwork) -> Iterator[Reading]:
    """Measure each node's link while the other links are lifted: sending, receiving, and receiving from all at once.

    Then the rate of each pair that has one of its own.

    The rates are restored afterwards. Raises ConfigError for a network of one node.
    """
    num_nodes = network.spec.nodes
    if num_nodes < 2:
        raise ConfigError("a network of 1 node has no link to measure; nearest: 2 nodes")
    try:
        for node in range(num_nodes):
            asked = network.spec.bits_per_second(node)
            network.shape_only([node])
            others = [other for other in range(num_nodes) if other != node]
            yield Reading(node, "sends", asked, *measure(network, [node], others[0], asked, sends=True))
            yield Reading(node, "receives", asked, *measure(network, others[:1], node, asked, sends=False))
            if len(others) > 1:
                fan_in = f"receives from {len(others)}"
                yield Reading(node, fan_in, asked, *measure(network, others, node, asked, sends=False))
        for pair, text in network.spec.link.items():
            network.shape_only([], [pair])
            asked = parse_rate(text)
            for node, other in (pair, pair[::-1]):
                found = measure(network, [node], other, asked, sends=True)
                yield Reading(node, f"sends to {other}", asked, *found)
    finally:
        network.shape(True)


def check(network: LabNetwork, show: Callable[[Reading], None]) -> bool:
    """Measure every link and show each reading. Return whether all are within the tolerance."""
    results = []
    for reading in readings(network):
        show(reading)
        results.append(reading.is_right)
    return all(results)
