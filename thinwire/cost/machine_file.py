"""What a machine.json may hold: a rule for each of its keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from thinwire.errors import counted, nearest

# (key, value) -> what is wrong with the value, a message for each fault.
Check = Callable[[str, Any], Iterator[str]]
NEEDED = {"": ("names", "network", "cores", "rates"), "network.": ("nodes", "rates", "delays_s")}
NEEDED["cores."] = ("hosts", "num")
# Kinds of work whose second word is a width and whose third is a type.
OF_A_WIDTH = ("layer", "mixture-layer", "launch", "mixture-launch")
# More than this is no measurement, and would overflow.
FINITE = 1e100


def faults_in(values: Any) -> Iterator[str]:
    """Yield what is wrong with the content of a machine.json, one message for each key.

    values: with tuples in place of lists, and infinity in place of null.
    """
    if not isinstance(values, dict):
        yield f"{shown(values)}: must be an object with the keys {', '.join(NEEDED[''])}"
        return
    names = values.get("names")
    if "names" in values and not (isinstance(names, tuple) and names and all(isinstance(each, str) for each in names)):
        yield f"names {shown(names)}: must be a list of text, one for each rank"
        return
    yield from of_keys("", values, rules_for(len(names or ())))


def rules_for(num_ranks: int) -> dict[str, Check]:
    """The rules of a machine of this many ranks, by key; "network." and "cores." stand for keys inside."""
    network = {
        "nodes": listed(whole(0), num_ranks, side_by_side), "rates": table(number(above=True, endless=True), num_ranks),
        "delays_s": table(number(), num_ranks), "burst_s": number(),
    }  # fmt: skip
    cores = {
        "hosts": listed(whole(0), num_ranks), "num": listed(number(above=True, endless=True)), "contention": number(),
        "parts": optional(listed(number(above=True))),
    }  # fmt: skip

    def of_cores(key: str, value: Any) -> Iterator[str]:
        found = list(of_keys("cores.", value, cores))
        yield from found or known_hosts(value)

    return {
        "names": listed(text, num_ranks),
        "network": lambda key, value: of_keys("network.", value, network),
        "cores": of_cores,
        "rates": named(rate),
        "threads": whole(1),
        "share": number(above=True),
        "speeds": optional(listed(number(above=True), num_ranks)),
        "memory_bytes": number(above=True, endless=True),
        "base_bytes": number(),
        "disk": listed(number(above=True, endless=True), 2),
        "measured_at": text,
        "device": text,
        "kernels": named(listed(number(endless=True), 3)),
        "products": named(listed(number(above=True), 2)),
        "latencies_ns": listed(listed(number(), 2)),
        "scatter": optional(table(number(), num_ranks)),
        "repeats": named(whole(1)),
        "core_share": number(above=True),
    }


def of_keys(prefix: str, value: Any, rules: Mapping[str, Check]) -> Iterator[str]:
    """Yield the first fault of each key of an object. prefix: of its keys."""
    if not isinstance(value, dict):
        yield f"{prefix.rstrip('.')} {shown(value)}: must be an object with the keys {', '.join(rules)}"
        return
    for key in NEEDED[prefix]:
        if key not in value:
            yield f"{prefix}{key}: is not there, and must be"
    for key, each in value.items():
        if key not in rules:
            yield f"{prefix}{key}: no such key{nearest(key, rules)}"
        elif prefix or key not in ("network", "cores"):
            yield from list(rules[key](f"{prefix}{key}", each))[:1]
        else:
            yield from rules[key](key, each)


def number(*, above: bool = False, endless: bool = False) -> Check:
    """A number of at least 0, or above it. endless: null, which stands for infinity, is valid too."""
    rule = f"must be a number {'above' if above else 'of at least'} 0{', or null' if endless else ''}"

    def check(key: str, value: Any) -> Iterator[str]:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_valid = is_number and (value > 0 if above else value >= 0)
        if not is_valid or not (value < FINITE or (endless and value == math.inf)):
            yield f"{key} {shown(value)}: {rule}"

    return check


def whole(least: int) -> Check:
    """A whole number of at least this."""

    def check(key: str, value: Any) -> Iterator[str]:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < FINITE:
            yield f"{key} {shown(value)}: must be a whole number of at least {least}"

    return check


def text(key: str, value: Any) -> Iterator[str]:
    """Any text."""
    if not isinstance(value, str):
        yield f"{key} {shown(value)}: must be text"


def rate(key: str, value: Any) -> Iterator[str]:
    """The rate of a kind of work, whose key ends with the kind; that of a layer names a width and a type."""
    kind = key.removeprefix("rates.").split()
    if not kind or (kind[0] in OF_A_WIDTH and not (len(kind) == 3 and kind[1].isdecimal() and int(kind[1]))):
        yield f"{key}: must be a kind of work with its width and type; nearest: {' '.join([*kind[:1], '512', 'fp32'])}"
    yield from number(above=True)(key, value)


def listed(check: Check, num: int | None = None, more: Check | None = None) -> Check:
    """A list, of `num` entries if that is known. more: a rule for the list as a whole."""

    def check_all(key: str, value: Any) -> Iterator[str]:
        if not isinstance(value, tuple):
            yield f"{key} {shown(value)}: must be a list"
        elif num is not None and len(value) != num:
            yield f"{key}: has {counted(len(value), 'entry').replace('entrys', 'entries')}, must have {num}"
        else:
            found = [fault for at, each in enumerate(value) for fault in check(f"{key}[{at}]", each)]
            yield from found or (more(key, value) if more else ())

    return check_all


def optional(check: Check) -> Check:
    """An empty list, or what passes the check."""
    return lambda key, value: iter(()) if value == () else check(key, value)


def table(check: Check, num: int) -> Check:
    """A row for each rank with an entry for each rank. An entry of a rank with itself is not read."""

    def check_all(key: str, value: Any) -> Iterator[str]:
        anything: Check = lambda key, value: iter(())  # noqa: E731
        faults = list(listed(listed(anything, num), num)(key, value))
        yield from faults
        if not faults:
            for a in range(num):
                for b in range(num):
                    yield from check(f"{key}[{a}][{b}]", value[a][b]) if a != b else ()

    return check_all


def named(check: Check) -> Check:
    """An object with any keys."""

    def check_all(key: str, value: Any) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{key} {shown(value)}: must be an object"
            return
        for name, each in value.items():
            yield from check(f"{key}.{name}", each)

    return check_all


def side_by_side(key: str, nodes: Any) -> Iterator[str]:
    """Equally many ranks on each node, side by side: 0, 0, 1, 1."""
    num = min((n for n in range(1, len(nodes) + 1) if len(nodes) % n == 0), key=lambda n: abs(n - len(set(nodes))))
    near = [rank * num // len(nodes) for rank in range(len(nodes))]
    if list(nodes) != near:
        yield f"{key} {shown(nodes)}: ranks of a node must be side by side, as many on each; nearest: {near}"


def known_hosts(cores: Mapping[str, Any]) -> Iterator[str]:
    """Each rank's machine has a number of cores."""
    hosts, num = sorted(set(cores["hosts"])), len(cores["num"])
    if hosts[-1] >= num:
        yield f"cores.hosts {shown(cores['hosts'])}: must be below {num}, as many as cores.num has"


def shown(value: Any) -> str:
    """A value of the file as its message names it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(shown, value[:8]))}{', ...' if len(value) > 8 else ''}]"
    if isinstance(value, dict):
        return "{...}"
    words = "null" if value == math.inf else repr(value)
    return words if len(words) <= 40 else f"{words[:40]}..."
