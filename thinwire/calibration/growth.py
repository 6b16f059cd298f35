"""How long messages must be for their time to tell a link's rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

# Long enough that the buffers of a link, which swallow the first part at once, do not decide.
PROBE_S, SMALLEST_BYTES, LARGEST_BYTES = 0.1, 1 << 14, 1 << 24
# So long no byte is sent before a probe: the buckets that limit rates have filled again.
REST_S = 0.05
# Times that nothing measures, on one machine.
LEAST_S = 1e-6

K = TypeVar("K")


def grown(
    probe: Callable[[dict[K, int]], Mapping[K, float]], short_s: Mapping[K, float], largest: int | None = None
) -> tuple[dict[K, int], dict[K, float]]:
    """Bytes of a message on each link that take PROBE_S longer than a short one does, and the seconds that it takes.

    A short message takes a link's delay. It does not count, because a link over a long way would seem slow. A message
    is long enough if it was so twice: something else may hold one up, and a link's burst would then pass for its rate.
    The faster probe of that size counts.

    Args:
        probe: seconds of messages of so many bytes, by link. short_s: of 1 byte, by link.
        largest: bytes beyond which no message grows; None: LARGEST_BYTES.
    """
    most = largest or LARGEST_BYTES
    sizes, once, found = dict.fromkeys(short_s, SMALLEST_BYTES), dict[K, float](), dict[K, float]()
    while len(found) < len(sizes):
        took_s = probe(dict(sizes))
        for link, delay_s in short_s.items():
            beyond_s = took_s[link] - delay_s
            if link in found:
                found[link] = min(took_s[link], found[link])
            elif beyond_s <= PROBE_S and sizes[link] < most:
                once.pop(link, None)
                sizes[link] = min(most, sizes[link] * (4 if beyond_s < PROBE_S / 4 else 2))
            elif link in once:
                found[link] = min(took_s[link], once[link])
            else:
                once[link] = took_s[link]
    return sizes, found


def bucket_of(num_bytes: float, once_s: float, twice_s: float, delay_s: float) -> tuple[float, float]:
    """Rate and burst of a token bucket through which n bytes pass in once_s seconds and 2 n bytes in twice_s.

    rate = n / (t(2 n) - t(n)), in bytes per second; burst = n / rate - (t(n) - delay), in seconds at that rate. A burst
    only raises the mean rate, so a rate above 2 n / t(2 n) can only be noise of the clock and is cut to it.
    """
    rate = num_bytes / max(LEAST_S, twice_s - once_s, (twice_s - delay_s) / 2)
    return rate, max(0.0, num_bytes / rate - (once_s - delay_s))


def common_burst(bursts: Mapping[tuple[int, int], float], nodes: Sequence[int]) -> float:
    """The burst of a network, in seconds: the median over the links between nodes, or over all where there is one node.

    Links inside a node have no bucket.

    Args:
        bursts: seconds by (from, to), see `bucket_of`. nodes: the node of each rank.
    """
    crossing = [burst_s for (a, b), burst_s in bursts.items() if nodes[a] != nodes[b]]
    return median(crossing or bursts.values() or [0.0])
