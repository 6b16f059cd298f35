"""What a launcher needs to know about its machine: network interface, free ports, threads, fastest compute type."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from pathlib import Path

import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.report.machine import num_cores

SIOCGIFADDR = 0x8915
# Below this gain the measurement's noise decides, and fp32 is the safer choice.
WORTHWHILE = 1.1


def interface_towards(host: str) -> tuple[str, str] | None:
    """Name and IPv4 address of the network interface that reaches `host`; None if unknown.

    By default gloo uses the address of this machine's name, which Debian and Ubuntu resolve to 127.0.1.1.
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
    """Seconds since this process was started; on systems other than Linux, seconds of CPU time it used."""
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
    """A free TCP port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def check_join(join: str | None, node: int) -> None:
    """Raise ConfigError for a malformed address, or if node 0's port is in use. node: the number of this machine."""
    if join is None:
        return
    host, _, port = join.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--join {join}: must be HOST:PORT, such as 192.168.1.10:29500")
    if node == 0 and not port_is_free(int(port)):
        raise ConfigError(
            f"--join {join}: port {port} is in use on this machine; take another, the same on all machines, such as "
            f"{free_port()}"
        )


def threads_per_worker(num_workers: int) -> tuple[int, str]:
    """Compute threads of one worker, and the reason: OMP_NUM_THREADS if it is set, else an equal share of the cores."""
    stated = os.environ.get("OMP_NUM_THREADS", "")
    if stated.isdigit() and int(stated) > 0:
        return int(stated), "OMP_NUM_THREADS is set"
    return max(1, num_cores() // num_workers), f"{num_cores()} cores shared by {num_workers} worker(s)"


def bf16_speedup(threads: int, repeats: int = 5) -> float:
    """How many times faster a small feed-forward block, forward and backward, is under bf16 autocast than in fp32."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        block = nn.Sequential(nn.Linear(512, 1536), nn.SiLU(), nn.Linear(1536, 512))
        x = torch.randn(512, 512)
        seconds: dict[bool, float] = {}
        for _ in range(repeats):
            for bf16 in (False, True):
                start = time.perf_counter()
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = block(x).float().square().mean()
                loss.backward()
                seconds[bf16] = min(seconds.get(bf16, float("inf")), time.perf_counter() - start)
        return seconds[False] / seconds[True]
    finally:
        torch.set_num_threads(before)


def choose_dtype(asked: str, threads: int) -> tuple[str, str]:
    """The compute type, "bf16" or "fp32", and the reason."""
    if asked != "auto":
        return asked, ""
    speedup = bf16_speedup(threads)
    chosen = "bf16" if speedup >= WORTHWHILE else "fp32"
    return chosen, f"bf16 autocast measured {speedup:.2f} times as fast as fp32 here"
