"""Ranks and the links between them, with their rates, measured or stated."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from thinwire.cost.cores import Cores
from thinwire.cost.graph import CARRY, ROUND, SECONDS, Work
from thinwire.cost.machine_file import faults_in
from thinwire.cost.network import Network
from thinwire.errors import ConfigError

# Kinds of work: a layer and one of a mixture, each followed by its width and type, and their fixed costs.
LAYER, MIXTURE = "layer", "mixture-layer"
ANEW = "thinwire calibrate writes it anew"
# The name of the device where no GPU computes.
CPU = "cpu"
# Work that waits for nothing but a core has one all the time.
LEAST_BUSY = 0.8
# Of a pass without operations: one that is measured as less was not seen.
LEAST_LAUNCH_S = 1e-6


def starved(core_share: float) -> str:
    """What to know of rates that were measured while a rank had a core for this share of the time; empty: nothing."""
    if core_share >= LEAST_BUSY:
        return ""
    return (
        f"other programs kept the cores busy while the machine was measured: a rank got a core for {core_share:.0%} of "
        "the time, and the rates are too low"
    )


def launch_of(layer: str) -> str:
    """The kind of a pass's fixed cost beside that of the work of layers."""
    return layer.replace("layer ", "launch ", 1)


@dataclass(frozen=True)
class Machine:
    """Ranks with their cores and links.

    Args:
        names: of each rank's node, to tell machines apart.
        network: between the ranks, in bytes per second, of one pair alone.
        share: rate that is left while all ranks send to all others at once, divided by the rate with fairly shared
            ports.
        cores: on which the ranks compute.
        threads: of each rank's training thread, on the cores; see `threads_of`.
        rates: amount per second of each kind of Work on one rank alone; layers, such as "layer 256 fp32", in
            floating-point operations.
        speeds: of each rank, as a multiple of that in `rates`, which is the median rank's.
        memory_bytes: of one rank.
        base_bytes: memory of a process before it has a model, where it computes.
        disk: bytes per second written and read.
        measured_at: date and time.
        device: the device that computes: a GPU's name, or cpu.
        kernels: of products of matrices on rank 0, by type and class: operations and bytes per second, and seconds of a
            launch; see `Roofline`.
        products: by type and shape: operations per second with random values, and with zeros.
        latencies_ns: of a load on rank 0, as (bytes that are walked through, nanoseconds).
        scatter: of each link, what the slower of its probes took beyond the faster one, as a share of it; empty: not
            known.
        repeats: of each kind of work in `rates`, the number of timed runs of which the median was taken.
        core_share: share of the time in which a rank that measured its work had a core, the smallest of any machine.
    """

    names: tuple[str, ...]
    network: Network
    cores: Cores
    rates: Mapping[str, float]
    threads: int = 1
    share: float = 1.0
    speeds: tuple[float, ...] = ()
    memory_bytes: float = math.inf
    base_bytes: float = 0.0
    disk: tuple[float, float] = (math.inf, math.inf)
    measured_at: str = ""
    device: str = ""
    kernels: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    products: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    latencies_ns: tuple[tuple[float, float], ...] = ()
    scatter: tuple[tuple[float, ...], ...] = ()
    repeats: Mapping[str, int] = field(default_factory=dict)
    core_share: float = 1.0

    @property
    def num_ranks(self) -> int:
        return len(self.names)

    @property
    def local_size(self) -> int:
        """Ranks per node. Raises ConfigError for nodes of unequal size."""
        sizes = {self.network.nodes.count(node) for node in set(self.network.nodes)}
        if len(sizes) > 1:
            raise ConfigError(f"nodes with {sorted(sizes)} ranks: all must have as many")
        return sizes.pop()

    @property
    def on_gpu(self) -> bool:
        """Whether GPUs compute."""
        return self.device not in ("", CPU)

    def threads_of(self, kind: str, *, trains: bool = False) -> int:
        """Threads by which a kind of work keeps its machine's cores busy.

        A GPU computes and packs by itself, so that nothing but messages takes cores there. trains: whether it is the
        training thread that works.
        """
        if self.on_gpu and kind not in (CARRY, ROUND):
            return 0
        return self.threads if trains else 1

    @property
    def fabric(self) -> Network:
        """The network while all ranks send."""
        rates = tuple(tuple(rate * self.share for rate in row) for row in self.network.rates)
        return replace(self.network, rates=rates)

    def seconds(self, rank: int, work: Work) -> float:
        """Seconds that one rank alone takes. Raises ConfigError for a kind of work that was not measured."""
        if not work.amount:
            return 0.0
        if work.kind != SECONDS and work.kind not in self.rates:
            way, _, what = work.kind.partition(" ")
            near = f"thinwire calibrate --codecs {what}" if way in ("encode", "decode") else "calibrate it anew"
            raise ConfigError(f"machine of {self.num_ranks} ranks: {work.kind!r} was not measured; nearest: {near}")
        rate = 1.0 if work.kind == SECONDS else self.rates[work.kind]
        return work.amount / (rate * (self.speeds[rank] if self.speeds else 1.0))

    def layer(self, width: int, dtype: str, kind: str = LAYER) -> str:
        """The kind of work of a transformer's layers, of the nearest measured width. Raises ConfigError.

        kind: LAYER, or MIXTURE of a mixture's.
        """
        # That of a codec may end with the same type.
        known = [each.split() for each in self.rates if each.startswith((LAYER, MIXTURE)) and each.endswith(dtype)]
        widths = [int(words[1]) for words in known if words[0] == kind]
        if not widths:
            near = [] if known else ["--dtypes fp32 bf16"]
            near += [] if kind == LAYER else ["its preset among --models"]
            wanted = f", with {' and '.join(near)}" if near else ""
            raise ConfigError(f"{kind}s in {dtype} were not measured on this machine; calibrate it anew{wanted}")
        nearest = min(widths, key=lambda each: abs(math.log(each / width)))
        return f"{kind} {nearest} {dtype}"

    def part(self, ranks: Sequence[int], *, alone: bool = False) -> Machine:
        """Some of the ranks, in this order, each with an even share of its machine's cores.

        The other ranks do the same as these at the same time. alone: they wait, and these have all of the cores.
        """
        hosts = [self.cores.hosts[rank] for rank in ranks]
        left = list(dict.fromkeys(hosts))
        shares = [1.0 if alone else hosts.count(host) / self.cores.hosts.count(host) for host in left]
        parts = [self.cores.parts[host] if self.cores.parts else 1.0 for host in left]
        cores = Cores(
            tuple(left.index(host) for host in hosts),
            tuple(self.cores.num[host] * share for host, share in zip(left, shares, strict=True)),
            self.cores.contention, tuple(part / share for part, share in zip(parts, shares, strict=True)),
        )  # fmt: skip
        net = self.network

        def rows(table: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(table[a][b] for b in ranks) for a in ranks)

        nodes = tuple(net.nodes[rank] for rank in ranks)
        return replace(
            self, names=tuple(self.names[rank] for rank in ranks),
            network=Network(nodes, rows(net.rates), rows(net.delays_s), net.burst_s),
            cores=cores,
            speeds=tuple(self.speeds[rank] for rank in ranks) if self.speeds else (),
            scatter=rows(self.scatter) if self.scatter else (),
        )  # fmt: skip

    def to_json(self) -> str:
        """The content of machine.json; links in bytes per second, [from][to]."""
        return json.dumps(_finite(asdict(self)), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str = "this machine.json") -> Machine:
        """The machine in a text. name: of the text in messages.

        Raises ConfigError, with all faults at once, for any other text.
        """
        try:
            values = _infinite(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}: is no JSON ({error}); {ANEW}") from None
        if faults := list(faults_in(values)):
            raise ConfigError(*(f"{name}: {fault}; {ANEW}" for fault in faults))
        return cls(**{**values, "network": Network(**values["network"]), "cores": Cores(**values["cores"])})

    @classmethod
    def read(cls, path: str | Path) -> Machine:
        """The machine in a file. Raises ConfigError."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except IsADirectoryError:
            near = Path(path) / "machine.json"
            raise ConfigError(
                f"{path}: is a folder; nearest: {near}; thinwire calibrate --out {near} writes it"
            ) from None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; thinwire calibrate --out {path} writes it") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: is no text in UTF-8; {ANEW}") from None
        return cls.from_json(text, str(path))


def _finite(value: Any) -> Any:
    """The value with lists and dictionaries, and null in place of infinity."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and value == math.inf else value


def _infinite(value: Any) -> Any:
    """The value with tuples and dictionaries, and infinity in place of null."""
    if isinstance(value, dict):
        return {key: _infinite(each) for key, each in value.items()}
    if isinstance(value, list):
        return tuple(_infinite(each) for each in value)
    return math.inf if value is None else value
