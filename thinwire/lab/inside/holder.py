"""Makes the emulated network and keeps it: one process, which ends with its parent and removes the network.

    python holder.py PARENT_PID CONTROL_FD

The control socket carries one JSON message per request: first `make`, whose answer holds the namespaces' descriptors,
then any of `shape`, `counters` and `socket`. The bridge and each node have a network namespace each. None of the
namespaces has a name, so nothing is left when the last process in them ends.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from syscalls import CLONE_NEWNET, CLONE_NEWUSER, setns, unshare

LIFTED_BYTES_PER_S = 4_000_000_000
TBF_HANDLE, NETEM_HANDLE, HTB_HANDLE = 0x10000, 0x20000, 0x30000
# Of what no pair limits; the class to a node has its number on top.
OTHERS, FIRST_CLASS = 1, 0x10
IPV4, DESTINATION = 0x0800, 16
# The bucket holds the bytes of this time, so that a late timer costs no rate.
BURST_S, MIN_BURST_FRAMES = 0.02, 2
# The queue in front of a link, in time and in frames: senders that share a link must not starve each other.
QUEUE_S, MIN_QUEUE_FRAMES = 0.05, 32
ETHERNET_HEADER_BYTES = 14
# netem holds the frames on their way: enough for 20 gbit and 10 s of whole segments of 64 kB.
NETEM_FRAMES = 400_000
ROOT = 0xFFFFFFFF


class Refused(Exception):
    """The system forbids or lacks something that the network needs. The message is for the user."""


def own_namespaces() -> int:
    """Enter a new network namespace, and first a new user namespace if root's rights are missing.

    Returns the user namespace's descriptor, or -1. Raises Refused.
    """
    try:
        unshare(CLONE_NEWNET, "CLONE_NEWNET")
        return -1
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise Refused(f"no more network namespaces are permitted{namespace_settings()}") from None
        if error.errno != errno.EPERM:
            raise Refused(f"this system has no network namespaces ({error.strerror})") from None
    uid, gid = os.getuid(), os.getgid()
    try:
        unshare(CLONE_NEWUSER, "CLONE_NEWUSER")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        unshare(CLONE_NEWNET, "CLONE_NEWNET")
    except OSError as error:
        raise Refused(
            f"new namespaces are not permitted: {error.strerror}{namespace_settings()}; "
            "run as root, or on a system (or in a container) that lets users make namespaces"
        ) from None
    return os.open("/proc/self/ns/user", os.O_RDONLY)


def namespace_settings() -> str:
    """The readable system settings that forbid user namespaces to users."""
    forbidding = {
        "user/max_user_namespaces": "0",
        "user/max_net_namespaces": "0",
        "kernel/unprivileged_userns_clone": "0",
        "kernel/apparmor_restrict_unprivileged_userns": "1",
    }
    found = []
    for name, value in forbidding.items():
        path = Path("/proc/sys") / name
        if path.exists() and path.read_text().strip() == value:
            found.append(f"{name.replace('/', '.')} is {value}")
    return f" ({', '.join(found)})" if found else ""


class Namespace:
    """One node: its namespace, its netlink socket, and both ends of its link."""

    def __init__(self, namespace: int, netlink: Any) -> None:
        self.namespace = namespace
        self.netlink = netlink
        self.inner = self.outer = 0
        self.links: set[int] = set()


class Holder:
    """The network: a bridge and its nodes."""

    def __init__(
        self, num_nodes: int, network: str, interface: str, mtu: int, delay_s: float, loss_percent: float
    ) -> None:
        from pyroute2 import IPRoute
        from pyroute2.netlink.rtnl.tcmsg import plugins

        self._open = IPRoute
        # Its limit counts bytes, and is otherwise told to the kernel alike.
        plugins.setdefault("bfifo", plugins["pfifo"])
        self.interface, self.mtu = interface, mtu
        self.home = os.open("/proc/self/ns/net", os.O_RDONLY)
        quiet_ipv6()
        self.bridge = self._open()
        self.nodes: list[Namespace] = []
        self._netem = {"delay": round(delay_s * 1e6), "loss": loss_percent, "limit": NETEM_FRAMES}
        self._has_netem = bool(delay_s or loss_percent)
        self._check_kernel()
        self._asked("a bridge", lambda: self.bridge.link("add", ifname="bridge", kind="bridge", br_mcast_snooping=0))
        self.bridge_index = self.bridge.link_lookup(ifname="bridge")[0]
        self.bridge.link("set", index=self.bridge_index, state="up")
        for number in range(num_nodes):
            self.nodes.append(self._make_node(number, network.format(number + 1)))
        self.addresses = [socket.inet_aton(network.format(number + 1)).hex() for number in range(num_nodes)]

    def _asked(self, what: str, request: Callable[[], Any]) -> None:
        """Make the request. If the kernel does not know the kind of object, raise an error that names it."""
        from pyroute2.netlink.exceptions import NetlinkError

        try:
            request()
        except NetlinkError as error:
            if error.code in (errno.ENOENT, errno.EOPNOTSUPP):
                raise Refused(f"this kernel has no {what}") from None
            if error.code == errno.EPERM:
                raise Refused(f"making {what} is not permitted{namespace_settings()}") from None
            raise

    def _check_kernel(self) -> None:
        """Try the queues on this namespace's loopback device before anything is made. Raises Refused."""
        self._asked("tbf queue (sch_tbf)", lambda: self._queue(self.bridge, 1, None, "add"))
        if self._has_netem:
            netem = "netem queue (sch_netem), which --delay and --loss need"
            self._asked(netem, lambda: self._delay(self.bridge, 1))
        self.bridge.tc("del", index=1, parent=ROOT)

    @contextmanager
    def _inside(self, namespace: int) -> Any:
        setns(namespace, CLONE_NEWNET)
        try:
            yield
        finally:
            setns(self.home, CLONE_NEWNET)

    def _make_node(self, number: int, address: str) -> Namespace:
        unshare(CLONE_NEWNET, "CLONE_NEWNET")
        try:
            node = Namespace(os.open("/proc/self/ns/net", os.O_RDONLY), self._open())
            quiet_ipv6()
        finally:
            setns(self.home, CLONE_NEWNET)
        port, peer = f"port{number}", {"ifname": self.interface, "net_ns_fd": node.namespace, "mtu": self.mtu}
        self._asked("veth pair", lambda: self.bridge.link("add", ifname=port, kind="veth", mtu=self.mtu, peer=peer))
        node.outer = self.bridge.link_lookup(ifname=port)[0]
        node.inner = node.netlink.link_lookup(ifname=self.interface)[0]
        self.bridge.link("set", index=node.outer, master=self.bridge_index, state="up")
        node.netlink.link("set", index=1, state="up")
        node.netlink.addr("add", index=node.inner, address=address, prefixlen=24)
        node.netlink.link("set", index=node.inner, state="up")
        self._queue(node.netlink, node.inner, None, "add")
        self._queue(self.bridge, node.outer, None, "add")
        if self._has_netem:
            # Delay only outgoing frames: a frame crosses the sender's link and the receiver's, but must be late once.
            self._delay(node.netlink, node.inner)
        return node

    def _queue(self, netlink: Any, index: int, bytes_per_s: float | None, command: str) -> None:
        """Set the token bucket in front of one end of a link."""
        rate, burst, limit = self._bucket(bytes_per_s)
        netlink.tc(command, "tbf", index=index, handle=TBF_HANDLE, rate=rate, burst=burst, limit=limit)

    def _bucket(self, bytes_per_s: float | None) -> tuple[int, int, int]:
        """Rate, burst and limit of a token bucket."""
        rate = int(bytes_per_s or LIFTED_BYTES_PER_S)
        frame = self.mtu + ETHERNET_HEADER_BYTES
        burst = max(MIN_BURST_FRAMES * frame, int(rate * BURST_S))
        return rate, burst, burst + max(MIN_QUEUE_FRAMES * frame, int(rate * QUEUE_S))

    def _delay(self, netlink: Any, index: int) -> None:
        """Delay and lose frames, inside the token bucket of one end of a link."""
        netlink.tc("add", "netem", index=index, parent=TBF_HANDLE + 1, handle=NETEM_HANDLE, **self._netem)

    def shape(self, bytes_per_s: list[float | None], links: list[tuple[int, int, float | None]]) -> None:
        """Set the rate of each node's link in both directions, and of pairs; None: as fast as the machine."""
        for node, rate in zip(self.nodes, bytes_per_s, strict=True):
            self._queue(node.netlink, node.inner, rate, "change")
            self._queue(self.bridge, node.outer, rate, "change")
        for first, second, rate in links:
            self._limit(self.nodes[first], second, rate)
            self._limit(self.nodes[second], first, rate)

    def _limit(self, node: Namespace, target: int, bytes_per_s: float | None) -> None:
        """Set the rate of what one node sends to another: a class inside the node's token bucket."""
        if not node.links:
            htb = "htb queue (sch_htb), which --link needs"
            others = {"parent": TBF_HANDLE + 1, "handle": HTB_HANDLE, "default": OTHERS}
            self._asked(htb, lambda: node.netlink.tc("add", "htb", index=node.inner, **others))
            self._class(node, OTHERS, None, "add-class")
        number = FIRST_CLASS + target
        self._class(node, number, bytes_per_s, "change-class" if target in node.links else "add-class")
        if target not in node.links:
            node.links.add(target)
            key = f"0x{self.addresses[target]}/0xffffffff+{DESTINATION}"
            rule = {"parent": HTB_HANDLE, "protocol": IPV4, "target": HTB_HANDLE + number, "keys": [key]}
            filters = "u32 filter (cls_u32), which --link needs"
            self._asked(filters, lambda: node.netlink.tc("add-filter", "u32", index=node.inner, prio=1, **rule))

    def _class(self, node: Namespace, number: int, bytes_per_s: float | None, command: str) -> None:
        """Make or change a class of what a node sends, and the queue in front of it."""
        rate, burst, limit = self._bucket(bytes_per_s)
        handle = HTB_HANDLE + number
        bucket = {"rate": rate, "ceil": rate, "burst": burst, "cburst": burst}
        node.netlink.tc(command, "htb", index=node.inner, parent=HTB_HANDLE, handle=handle, **bucket)
        queue = {"parent": handle, "handle": HTB_HANDLE + (number << 16), "limit": limit}
        node.netlink.tc("replace", "bfifo", index=node.inner, **queue)

    def counters(self) -> list[list[int]]:
        """Bytes that each node has sent and received, headers included, counted by the token buckets."""
        received = passed_bytes(self.bridge)
        return [[passed_bytes(node.netlink)[node.inner], received[node.outer]] for node in self.nodes]

    def socket(self, node: int) -> int:
        """The descriptor of a TCP socket that lives on the node."""
        with self._inside(self.nodes[node].namespace):
            return socket.socket().detach()


def quiet_ipv6() -> None:
    """Switch IPv6 off in this network namespace: its own messages would be counted."""
    # If it can't be set, a few hundred more bytes are counted.
    with suppress(OSError):
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")


def passed_bytes(netlink: Any) -> dict[int, int]:
    """Bytes that left each interface's token bucket, by the interface's index."""
    return {
        queue["index"]: queue.get_nested("TCA_STATS2", "TCA_STATS_BASIC")["bytes"]
        for queue in netlink.get_qdiscs()
        if queue["handle"] == TBF_HANDLE
    }


class Server:
    """Answers the requests of the process that asked for the network."""

    def __init__(self) -> None:
        self.user_fd = -1
        self.holder: Holder

    def make(self, **values: Any) -> tuple[dict[str, Any], list[int]]:
        """Make the network. Returns the descriptors of the user namespace (else the bridge's) and of the nodes."""
        self.user_fd = own_namespaces()
        self.holder = Holder(**values)
        first = self.holder.home if self.user_fd < 0 else self.user_fd
        fds = [first, *(node.namespace for node in self.holder.nodes)]
        return {"in_user_namespace": self.user_fd >= 0}, [os.dup(fd) for fd in fds]

    def shape(
        self, bytes_per_s: list[float | None], links: list[tuple[int, int, float | None]]
    ) -> tuple[dict[str, Any], list[int]]:
        self.holder.shape(bytes_per_s, links)
        return {}, []

    def counters(self) -> tuple[dict[str, Any], list[int]]:
        return {"counters": self.holder.counters()}, []

    def socket(self, node: int) -> tuple[dict[str, Any], list[int]]:
        return {}, [self.holder.socket(node)]

    def answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """The reply to one request, and descriptors to send along."""
        try:
            return getattr(self, request.pop("ask"))(**request)
        except Refused as refusal:
            return {"refused": str(refusal)}, []
        except Exception:
            return {"failed": traceback.format_exc()}, []


def serve(control: socket.socket, parent: int) -> None:
    """Answer requests until the other end or the parent is gone."""
    server, poll = Server(), select.poll()
    poll.register(control, select.POLLIN)
    poll.register(parent, select.POLLIN)
    while all(fd != parent for fd, _ in poll.poll()):
        message = control.recv(1 << 20)
        if not message:
            return
        reply, fds = server.answer(json.loads(message))
        socket.send_fds(control, [json.dumps(reply).encode()], fds)
        for fd in fds:
            # The other end has its own copies.
            os.close(fd)


def main() -> None:
    parent_pid, control_fd = map(int, sys.argv[1:3])
    parent = os.pidfd_open(parent_pid)
    if os.getppid() == parent_pid:
        serve(socket.socket(fileno=control_fd), parent)


if __name__ == "__main__":
    main()
