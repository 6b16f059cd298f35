"""What a launcher asks of its machine: the interface towards another, ports, when it was started."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from pathlib import Path

SIOCGIFADDR = 0x8915


def interface_towards(host: str) -> tuple[str, str] | None:
    """Name and IPv4 address of the network interface from which `host` is reached; None where it can't be told.

    Left to itself gloo takes the address of this machine's name, which Debian and Ubuntu resolve to 127.0.1.1.
    """
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name, address
    return None


def process_age_s() -> float:
    """Seconds since this process was started; elsewhere than on Linux, those that it has computed."""
    status = Path("/proc/self/stat")
    if not status.exists():
        return time.process_time()
    # Of what follows the name, which may hold spaces, the 20th is the start, in ticks since boot.
    started = int(status.read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
