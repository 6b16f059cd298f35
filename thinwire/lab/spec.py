"""Description of the network to emulate: its size and the rate of each link."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from thinwire.errors import ConfigError, Problems, nearest

RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
# Below SLOWEST one frame takes longer than 0.1 s. Above FASTEST no machine can drive its emulated links.
SLOWEST, FASTEST = "1mbit", "20gbit"
MOST_NODES = 200
MOST_DELAY_S = 10.0


def parse_rate(text: str) -> float:
    """Bits per second of a rate that can be emulated, as `read_rate`. Raises ConfigError that names the nearest."""
    bits = read_rate(text)
    for limit, is_beyond in ((SLOWEST, lambda low: bits < low), (FASTEST, lambda high: bits > high)):
        if is_beyond(read_rate(limit)):
            raise ConfigError(f"rate {text!r} must be from {SLOWEST} to {FASTEST}; nearest: {limit!r}")
    return bits


def read_rate(text: str) -> float:
    """Bits per second of a text such as `100mbit` or `2.5gbit`. Raises ConfigError that names a valid spelling."""
    number, unit = _split(text)
    if number is None or unit not in RATE_UNITS:
        guess = "" if number is None else re.sub(r"bits?/?p?s?$|b/?p?s$|b$", "", unit)
        prefix = guess if f"{guess}bit" in RATE_UNITS and unit else "m"
        hint = "100mbit" if not number else f"{number:g}{prefix}bit"
        raise ConfigError(
            f"rate {text!r} is not a number and a unit of {', '.join(RATE_UNITS)}; did you mean {hint!r}?"
        )
    return number * RATE_UNITS[unit]


def parse_delay(text: str) -> float:
    """Seconds of a text such as `10ms`. Raises ConfigError that names a valid spelling."""
    number, unit = _split(text)
    if number is None or unit not in TIME_UNITS:
        hint = f"{number:g}ms" if number else "10ms"
        raise ConfigError(
            f"delay {text!r} is not a number and a unit of {', '.join(TIME_UNITS)}; did you mean {hint!r}?"
        )
    seconds = number * TIME_UNITS[unit]
    if seconds > MOST_DELAY_S:
        raise ConfigError(f"delay {text!r} must be at most {MOST_DELAY_S:g}s; nearest: '{MOST_DELAY_S:g}s'")
    return seconds


def parse_loss(text: str) -> float:
    """Percentage of a text such as `0.1%`. Raises ConfigError that names a valid spelling."""
    number, unit = _split(text)
    if number is None or unit != "%":
        hint = f"{number:g}%" if number and number < 100 else "0.1%"
        raise ConfigError(f"loss {text!r} is not a percentage; did you mean {hint!r}?")
    if number >= 100:
        raise ConfigError(f"loss {text!r} must be under 100%; nearest: '99%'")
    return number


def _split(text: str) -> tuple[float | None, str]:
    """The number at the start and the unit after it, in lower case; None if there is no number."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(\S*)", text.strip().lower())
    return (float(match[1]), match[2]) if match else (None, text.strip().lower())


@dataclass(frozen=True)
class LabSpec:
    """An emulated network of `nodes` machines with `local_size` ranks each.

    Args:
        rate: of every link, in both directions, such as `100mbit`; None: not shaped.
        slow: {node: rate} of links that differ.
        link: {(node, node): rate} of what two nodes can send each other, both ways, inside their links' rates.
        delay: one way from node to node, such as `10ms`.
        loss: share of the frames that never arrive, such as `0.1%`.

    Raises ConfigError with all errors at once.
    """

    nodes: int = 4
    rate: str | None = "100mbit"
    local_size: int = 1
    slow: Mapping[int, str] = field(default_factory=dict)
    delay: str | None = None
    loss: str | None = None
    link: Mapping[tuple[int, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = Problems(self._wrong_numbers())
        rates = [(parse_rate, rate) for rate in (self.rate, *self.slow.values(), *self.link.values())]
        for parse, text in (*rates, (parse_delay, self.delay), (parse_loss, self.loss)):
            if text is not None:
                with problems.collect():
                    parse(text)
        problems.raise_any()

    def _wrong_numbers(self) -> Iterator[str]:
        if not 1 <= self.nodes <= MOST_NODES:
            yield f"nodes {self.nodes} must be from 1 to {MOST_NODES}; nearest: {min(max(self.nodes, 1), MOST_NODES)}"
        if self.local_size < 1:
            yield f"local_size {self.local_size} must be at least 1; nearest: 1"
        for node in self.slow:
            if not 0 <= node < self.nodes:
                yield f"slow node {node} does not exist: nodes are 0 to {self.nodes - 1}"
        found = Problems()
        for pair in self.link:
            found.note(check_link, pair, self)
        yield from found.messages
        if self.link and (self.delay or self.loss):
            yield "a rate between two nodes beside delay or loss: not supported; nearest: leave delay and loss out"

    @property
    def world_size(self) -> int:
        return self.nodes * self.local_size

    def node(self, rank: int) -> int:
        """The node that `rank` runs on, as torchrun numbers them."""
        return rank // self.local_size

    def bits_per_second(self, node: int) -> float | None:
        """The rate of a node's link in each direction; None: not shaped."""
        text = self.slow.get(node, self.rate)
        return None if text is None else parse_rate(text)

    @property
    def delay_s(self) -> float:
        return 0.0 if self.delay is None else parse_delay(self.delay)

    @property
    def loss_percent(self) -> float:
        return 0.0 if self.loss is None else parse_loss(self.loss)

    @classmethod
    def from_text(cls, text: str) -> LabSpec:
        """The network that a text such as `nodes=4,rate=100mbit,local_size=1,slow=2:20mbit` describes.

        `slow` and `link=0-2:10mbit` may be repeated; `rate=none` leaves links unshaped. Raises
        ConfigError with all errors at once.
        """
        values: dict = {"slow": {}, "link": {}}
        problems = Problems()
        known = [item.name for item in fields(cls)]
        for part in filter(None, text.replace(" ", "").split(",")):
            key, _, value = part.partition("=")
            key = key.replace("-", "_")
            with problems.collect():
                if key not in known:
                    raise ConfigError(f"unknown key {key!r} in the lab's description{nearest(key, known)}")
                if not value:
                    raise ConfigError(f"{part!r} states no value: write {key}=VALUE")
                if key == "slow":
                    values["slow"] |= parse_slow(value, separator=":")
                elif key == "link":
                    values["link"] |= parse_link(value, separator=":")
                else:
                    values[key] = _whole(key, value) if key in ("nodes", "local_size") else optional(value)
        spec = cls()
        with problems.collect():
            spec = cls(**values)
        problems.raise_any()
        return spec

    def __str__(self) -> str:
        """The text form that `from_text` reads."""
        parts = [f"nodes={self.nodes}", f"rate={self.rate or 'none'}", f"local_size={self.local_size}"]
        parts += [f"slow={node}:{rate}" for node, rate in sorted(self.slow.items())]
        parts += [f"link={first}-{second}:{rate}" for (first, second), rate in sorted(self.link.items())]
        parts += [f"{name}={value}" for name, value in (("delay", self.delay), ("loss", self.loss)) if value]
        return ",".join(parts)


def parse_slow(text: str, separator: str = "=") -> dict[int, str]:
    """Read `2=20mbit` as {2: "20mbit"}. Raises ConfigError."""
    node, found, rate = text.partition(separator)
    if not found or not node.isdigit() or not rate:
        raise ConfigError(f"slow {text!r} is not a node and its rate; did you mean '2{separator}20mbit'?")
    return {int(node): rate}


def parse_link(text: str, separator: str = "=") -> dict[tuple[int, int], str]:
    """Read `0-2=10mbit` as {(0, 2): "10mbit"}, the lower node first. Raises ConfigError."""
    match = re.fullmatch(rf"(\d+)-(\d+){separator}(\S+)", text.strip())
    if match is None:
        raise ConfigError(f"link {text!r} is not two nodes and their rate; did you mean '0-2{separator}10mbit'?")
    first, second = sorted(map(int, match.groups()[:2]))
    return {(first, second): match[3]}


def check_link(pair: tuple[int, int], spec: LabSpec) -> None:
    """Raise ConfigError for two nodes between which no link can be."""
    first, second = pair
    if first == second:
        raise ConfigError(f"link {first}-{second}: a node has no link to itself")
    if not 0 <= min(pair) <= max(pair) < spec.nodes:
        raise ConfigError(f"link {first}-{second}: nodes are 0 to {spec.nodes - 1}")


def _whole(key: str, text: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"{key} {text!r} is not a whole number; did you mean {key}=4?")
    return int(text)


def optional(text: str) -> str | None:
    """None for `none`, any other text unchanged."""
    return None if text.lower() == "none" else text
