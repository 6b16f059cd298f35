"""The emulated network, for programs that run something on it."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from thinwire.errors import ConfigError, ThinwireError
from thinwire.lab.spec import LabSpec, check_link, parse_rate

INSIDE = Path(__file__).parent / "inside"
NETWORK = "10.77.0.{}"
INTERFACE = "eth0"
# With jumbo frames, headers are under 1 % of the bytes, and one core can drive a 10 gbit link.
MTU = 9000
FRAME_BYTES = MTU + 14
CLOSE_S = 5.0
MAX_FDS = 253  # The kernel's limit on descriptors in one message.


class LabError(ThinwireError):
    """The emulated network, or a command on it, failed while it ran."""


@dataclass(frozen=True)
class Counters:
    """Bytes on a node's link since the network was made, counted by the kernel: whole frames, headers included."""

    sent_bytes: int
    received_bytes: int

    def __sub__(self, other: Counters) -> Counters:
        return Counters(self.sent_bytes - other.sent_bytes, self.received_bytes - other.received_bytes)


class LabNetwork:
    """An emulated network, made at construction and removed by `close` or at the end of a `with` block.

    If this process ends in any way, the kernel removes the network and everything that runs on it. The methods may be
    called from any thread. Raises ConfigError if the system forbids or lacks something that the network needs, LabError
    if the network fails.

    Attributes:
        addresses: the nodes' IPv4 addresses.
        interface: the name of the link on every node.
    """

    def __init__(self, spec: LabSpec) -> None:
        check_requirements()
        self.spec = spec
        self._links = {pair: parse_rate(rate) for pair, rate in spec.link.items()}
        self.addresses = [NETWORK.format(node + 1) for node in range(spec.nodes)]
        self.interface = INTERFACE
        self._processes: list[subprocess.Popen] = []
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._holder = start_helper(theirs)
        self._fds: list[int] = []
        try:
            reply, fds = self._ask(
                "make", num_nodes=spec.nodes, network=NETWORK, interface=INTERFACE, mtu=MTU,
                delay_s=spec.delay_s, loss_percent=spec.loss_percent,
            )  # fmt: skip
            self._fds = fds
            self.in_user_namespace: bool = reply["in_user_namespace"]
            self.shape(True)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LabNetwork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes on the network, and remove it."""
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            process.kill()
        for process in running:
            process.wait()
        self._control.close()
        try:
            self._holder.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def shape(self, shaped: bool) -> None:
        """Set the links' rates (True) or lift them (False), while processes run."""
        self.shape_only(range(self.spec.nodes) if shaped else [])

    def shape_only(self, nodes: Sequence[int], pairs: Collection[tuple[int, int]] | None = None) -> None:
        """Set the rates of the links of `nodes` and `pairs`, and lift those of the others.

        pairs: by default all between two of the nodes.
        """
        rates = [self.spec.bits_per_second(node) if node in nodes else None for node in range(self.spec.nodes)]
        shaped = [pair for pair in self._links if set(pair) <= set(nodes)] if pairs is None else pairs
        links = [(*pair, rate / 8 if pair in shaped else None) for pair, rate in self._links.items()]
        self._ask("shape", bytes_per_s=[rate / 8 if rate else None for rate in rates], links=links)

    def set_link(self, first: int, second: int, rate: str | None) -> None:
        """Change the rate between two nodes, both ways, while processes run; None: as fast as both nodes' links.

        Raises ConfigError for nodes that don't exist, and for a rate that can't be read.
        """
        pair = (min(first, second), max(first, second))
        check_link(pair, self.spec)
        bits = None if rate is None else parse_rate(rate)
        self._links.pop(pair, None)
        if bits is not None:
            self._links[pair] = bits
        rates = [self.spec.bits_per_second(node) for node in range(self.spec.nodes)]
        links = [(*pair, bits and bits / 8)]
        self._ask("shape", bytes_per_s=[each / 8 if each else None for each in rates], links=links)

    def counters(self) -> list[Counters]:
        """Bytes that each node has sent and received since the network was made."""
        reply, _ = self._ask("counters")
        return [Counters(*pair) for pair in reply["counters"]]

    def socket(self, node: int) -> socket.socket:
        """A new TCP socket that lives on `node`, for use in this process."""
        _, (fd,) = self._ask("socket", node=node)
        return socket.socket(fileno=fd)

    def popen(
        self, node: int, args: Sequence[str], env: Mapping[str, str] | None = None, **popen_kwargs: Any
    ) -> subprocess.Popen:
        """Start a program on `node`, with the working directory, files and user of this process.

        Signals reach the program, and its exit status is returned. When it ends or is killed, none of its processes is
        left. It gets a session of its own, so a terminal's Ctrl-C reaches only this process. `pid` is the PID that the
        program itself sees. popen_kwargs: as for subprocess.Popen.
        """
        user_fd, net_fd = self._fds[0] if self.in_user_namespace else -1, self._fds[1 + node]
        given = [fd for fd in (user_fd, net_fd) if fd >= 0]
        # -E -s -S: load only the standard library, so that it starts in milliseconds.
        place = (os.getpid(), user_fd, net_fd, ",".join(self.addresses))
        enter = [sys.executable, "-E", "-s", "-S", str(INSIDE / "enter.py"), *map(str, place)]
        pass_fds = (*popen_kwargs.pop("pass_fds", ()), *given)
        process = subprocess.Popen(
            [*enter, *args], env=env, pass_fds=pass_fds, **{"start_new_session": True} | popen_kwargs
        )
        self._processes = [*(other for other in self._processes if other.returncode is None), process]
        return process

    def _ask(self, asked: str, **values: Any) -> tuple[dict[str, Any], list[int]]:
        """Send a request to the process that holds the network. Return its reply and descriptors."""
        with self._lock:
            try:
                self._control.send(json.dumps({"ask": asked} | values).encode())
                message, fds, _, _ = socket.recv_fds(self._control, 1 << 20, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            except OSError as error:
                raise LabError(f"the emulated network is gone: {error}") from None
        if not message:
            raise LabError(f"the process that holds the emulated network ended with {self._holder.wait(CLOSE_S)}")
        reply = json.loads(message)
        if "refused" in reply:
            raise ConfigError(f"the lab can't make its network: {reply['refused']}")
        if "failed" in reply:
            raise LabError(f"the emulated network failed at {asked!r}:\n{reply['failed']}")
        return reply, fds


def start_helper(control: socket.socket) -> subprocess.Popen:
    """Start the process that holds the network; `control` is its end of the control socket."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    with control:
        return subprocess.Popen(
            [sys.executable, str(INSIDE / "holder.py"), str(os.getpid()), str(control.fileno())],
            env=environment, pass_fds=(control.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip


def check_requirements() -> None:
    """Raise ConfigError if this is not Linux, or if pyroute2 is not installed."""
    if sys.platform != "linux":
        raise ConfigError(f"the lab needs Linux with network namespaces; this is {sys.platform}")
    if importlib.util.find_spec("pyroute2") is None:
        raise ConfigError("the lab needs pyroute2: pip install -e '.[lab]' in thinwire's folder")


def why_unavailable() -> str | None:
    """Why no network can be emulated here; None if one can."""
    try:
        LabNetwork(LabSpec(nodes=1, rate=None)).close()
    except ThinwireError as error:
        return str(error)
    return None
