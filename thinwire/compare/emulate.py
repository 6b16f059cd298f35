"""The lab network that is nearest to the links of measured machines, and what of these it does not have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from thinwire.cost import Machine
from thinwire.errors import ConfigError
from thinwire.lab import LabNetwork, LabSpec
from thinwire.lab.spec import FASTEST, MOST_DELAY_S, SLOWEST, read_rate

# A rate of two nodes that is lower than the others' by more than this is one of its own.
SLOWER = 0.9
# Bytes per second to which a lab can limit a link.
LEAST_RATE, MOST_RATE = (read_rate(limit) / 8 for limit in (SLOWEST, FASTEST))
# What a message of one byte takes in a lab without delay, which a measured delay holds too; the least that is added.
OWN_S, LEAST_S = 0.5e-3, 1e-3
# Delays that differ by more than this, as a share of their median, are not all the same.
UNLIKE = 0.25


def emulated(machine: Machine) -> tuple[LabSpec, list[str]]:
    """A lab network with the links of a machine, and sentences about what it does not have of them.

    Delays are left out where this system can't emulate them.
    """
    lab = lab_of(machine)
    told = list(not_emulated(machine, lab))
    if lab.delay:
        try:
            LabNetwork(LabSpec(nodes=1, rate=None, delay=lab.delay)).close()
        except ConfigError as error:
            told = [f"links have no delay there, and {lab.delay} were measured: {error}"]
            lab = replace(lab, delay=None)
    return lab, told


def lab_of(machine: Machine) -> LabSpec:
    """A lab network with the links of a machine.

    The fastest rate is that of all nodes, but of those and of the pairs that are slower, and the median delay is that
    of all, unless pairs have rates of their own: the lab has no delays beside these. A rate that is not known, or above
    what a lab can limit, leaves a link without a limit.
    """
    network, size = machine.network, machine.local_size
    rates: dict[tuple[int, int], float] = {}
    for a, b in network.pairs:
        pair = min(a // size, b // size), max(a // size, b // size)
        if pair[0] != pair[1]:
            rates[pair] = min(rates.get(pair, math.inf), _possible(network.rates[a][b]))
    nodes = machine.num_ranks // size
    if not rates:
        return LabSpec(nodes=nodes, rate=None, local_size=size)
    # A node reaches nobody faster than its own link lets it.
    own = [max(rate for pair, rate in rates.items() if node in pair) for node in range(nodes)]
    slow = {node: _text(rate) for node, rate in enumerate(own) if rate < SLOWER * max(own)}
    link = {(a, b): _text(rate) for (a, b), rate in rates.items() if rate < SLOWER * min(own[a], own[b])}
    delay_s = min(MOST_DELAY_S, typical_s(machine))
    delay = f"{1e3 * delay_s:.1f}ms" if delay_s and not link else None
    rate = _text(max(own)) if max(own) < math.inf else None
    return LabSpec(nodes=nodes, rate=rate, local_size=size, slow=slow, link=link, delay=delay)


def typical_s(machine: Machine) -> float:
    """The median delay between nodes, in seconds, without what a lab's own messages take; 0 for less than LEAST_S."""
    network = machine.network
    found = [network.delays_s[a][b] for a, b in network.pairs if network.ports((a, b))]
    more_s = median(found) - OWN_S if found else 0.0
    return more_s if more_s >= LEAST_S else 0.0


def not_emulated(machine: Machine, lab: LabSpec) -> Iterator[str]:
    """Yield sentences about what a lab of `lab_of` does not have of a machine's links."""
    network = machine.network
    pairs = [(a, b) for a, b in network.pairs if network.ports((a, b)) and network.rates[b][a] < math.inf]
    delays = [network.delays_s[a][b] for a, b in pairs]
    if (delay_s := typical_s(machine)) and lab.link:
        told = f"{1e3 * delay_s:.3g} ms were measured"
        yield f"links have no delay there, and {told}: the lab has none beside rates of pairs"
    elif delays and max(delays) - min(delays) > max(LEAST_S, UNLIKE * median(delays)):
        shown = f"{1e3 * min(delays):.3g} to {1e3 * max(delays):.3g} ms"
        yield f"delays of {shown} were measured: all links have {lab.delay or 'none'} there"
    yield from _beyond_limits(machine)
    if not pairs:
        return
    a, b = min(pairs, key=lambda pair: network.rates[pair[0]][pair[1]] / network.rates[pair[1]][pair[0]])
    slower, faster = network.rates[a][b], network.rates[b][a]
    if slower < SLOWER * faster:
        yield (
            f"{8e-6 * slower:.3g} Mbit/s from {a} to {b} and {8e-6 * faster:.3g} back were measured: links have the "
            "lower rate both ways there"
        )


def _beyond_limits(machine: Machine) -> Iterator[str]:
    """Yield sentences about rates between nodes that no lab can have."""
    network = machine.network
    rates = [network.rates[a][b] for a, b in network.pairs if network.ports((a, b))]
    if math.inf in rates:
        yield "of some links no rate is known: they have no limit there"
    if fast := [rate for rate in rates if MOST_RATE < rate < math.inf]:
        told = f"{8e-9 * max(fast):.3g} Gbit/s were measured"
        yield f"{told}: above {FASTEST} links have no limit there, and are as fast as this machine makes them"
    if min(rates, default=math.inf) < LEAST_RATE:
        yield f"{8e-3 * min(rates):.3g} kbit/s were measured: the slowest links have {SLOWEST} there"


def _possible(rate: float) -> float:
    """The rate that a lab's link has for a measured one, in bytes per second; infinite: no limit."""
    return math.inf if rate > MOST_RATE else max(rate, LEAST_RATE)


def _text(rate: float) -> str:
    """As text, the rate of a link that carries this many bytes of messages per second."""
    return f"{8e-3 * rate:.0f}kbit"
