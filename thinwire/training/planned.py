"""A run under a plan: its prediction beside the measurements, and the links on which it is based."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from thinwire.calibration import measured_rates
from thinwire.calibration.reach import all_on_this_machine
from thinwire.collectives import Communicator, Topology
from thinwire.collectives.store_gather import of_all_ranks, told_by_first
from thinwire.cost import Network
from thinwire.cost.drift import drifted_s, moved_s
from thinwire.cost.machine import starved
from thinwire.errors import ConfigError
from thinwire.run.config import TrainConfig
from thinwire.run.run_dir import RunDir


def read_plan(config: TrainConfig, num_islands: int = 1) -> dict[str, Any]:
    """The prediction in plan.json. Raises ConfigError for any other file, and for a plan of other ranks.

    num_islands: that have as many ranks as the configuration.
    """
    path = Path(config.plan or "")
    try:
        found = json.loads(path.read_text())
        num_ranks = len(found["rates"])
        step_s, carried = found["predicted"]["step_s"], found["link_bytes"]
        if not step_s > 0 or len(carried) != num_ranks:
            raise ValueError("its prediction is of no step of these ranks")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--plan {path}: no plan can be read there ({error}); thinwire plan writes one") from None
    # An island that its launcher has started knows its own ranks.
    if num_ranks not in (config.world_size, num_islands * config.world_size):
        raise ConfigError(
            f"--plan {path}: of {num_ranks} ranks, and the run has {config.world_size}; nearest: calibrate these and "
            "plan anew, or leave --plan out"
        )
    return found


def other_nodes(content: Mapping[str, Any], names: Sequence[str]) -> str:
    """What tells the nodes of a run from those of its plan, in words; empty: they are the same.

    Where several nodes have one name, they are emulated on one machine, and nothing is compared; nor is a plan that has
    no names.

    names: of the host of each of the plan's ranks.
    """
    firsts = {node: rank for rank, node in reversed(list(enumerate(content.get("nodes", ()))))}
    told = content.get("names") or ("",) * len(names)
    was, now = ([str(each[rank]) for rank in sorted(firsts.values())] for each in (told, names))
    is_emulated = any(len(set(each)) < len(each) for each in (was, now))
    if len(was) < 2 or is_emulated or was == now:
        return ""
    return f"made for the nodes {', '.join(was)}, in this order, and the run is on {', '.join(now)}"


def core_share_of(content: Mapping[str, Any]) -> float:
    """The share of the time in which a rank had a core while a plan's machine was measured; 1: the plan has none."""
    found = content.get("core_share")
    return found if isinstance(found, float) else 1.0


def rows_by_rank(table: Any) -> dict[tuple[int, int], float]:
    """The numbers of a table of ranks in plan.json, by (from, to); empty: the plan has none."""
    rows = table if isinstance(table, list) else []
    return {(a, b): float(value) for a, row in enumerate(rows) for b, value in enumerate(row) if value is not None}


class Planned:
    """The plan of a run, on every rank. is_fresh: it was made at this run's start, from links just measured.

    num_islands: of the run; the links between several are not measured again. Raises ConfigError on all ranks for an
    earlier plan of other nodes. A run that goes on elsewhere warns of its own.
    """

    def __init__(
        self, config: TrainConfig, comm: Communicator, warn: Callable[[str], None], num_islands: int = 1
    ) -> None:
        self.config, self.comm, self.warn, self.num_islands = config, comm, warn, num_islands
        self.file = RunDir(config.run_dir).plan
        self.is_fresh = Path(config.plan or "").absolute() == self.file.absolute()
        self.content: dict[str, Any] = read_plan(config, num_islands) if comm.rank == 0 else {}
        self._compare_nodes()
        if not self.is_fresh:
            if told := starved(core_share_of(self.content)):
                self.warn(f"the plan: {told}; thinwire calibrate measures anew")
            self.compare_links("since the plan was made")

    def _compare_nodes(self) -> None:
        """Refuse, or warn of, other nodes than those of the plan. A collective over the default group."""
        if self.num_islands > 1:
            return
        hosts = of_all_ranks(socket.gethostname(), "its host")
        of_rank = dict(zip(self._ranks, hosts, strict=True))
        other = other_nodes(self.content, [of_rank[rank] for rank in sorted(of_rank)]) if not self.comm.rank else ""
        other = told_by_first(other, "the nodes of its plan")
        if other and not self.is_fresh:
            raise ConfigError(
                f"--plan {self.config.plan}: {other}; nearest: start the nodes in that order, or measure these and "
                "plan anew, or --plan '' on all nodes, which trains by the same configuration without its prediction"
            )
        if other and not self.comm.rank:
            self.warn(f"the plan was {other}; thinwire calibrate measures anew")

    def compare_links(self, when: str) -> None:
        """Measure the links that the plan uses again, and warn of those that changed; see `drifted_s`. A collective.

        The result is written beside the plan. Between processes of one machine the link is loopback, which is slow if
        the machine is busy; then nothing is reported.
        """
        is_network = self.num_islands == 1 and not all_on_this_machine(self.comm.world_size)
        now = measured_rates(self.comm, self._used(), self._machines()) if is_network else None
        if self.comm.rank:
            return
        drifted = [] if now is None else list(self._drifted(now))
        for rank, other, before, after, before_s, after_s in drifted:
            told = f"{8e-6 * before:.3g} Mbit/s planned, {8e-6 * after:.3g} now"
            if moved_s(before_s, after_s):
                told += f", {1e3 * before_s:.3g} ms planned, {1e3 * after_s:.3g} now"
            self.warn(f"the link {rank} to {other} has drifted {when}: {told}; thinwire calibrate measures anew")
        self.content["drifted"] = drifted
        self.file.write_text(json.dumps(self.content, indent=1) + "\n")

    def _drifted(self, now: Network) -> Iterator[tuple[int, int, float, float, float, float]]:
        """Yield (from, to, rate before, rate now, delay before, delay now) of used links that have changed.

        By the plan's numbers of ranks, in bytes per second and in seconds. Bytes and delays are judged apart, since
        messages under way together wait for their delays at the same time.
        """
        delays, numbers = (rows_by_rank(self.content.get(name)) for name in ("delays_s", "link_messages"))
        for (place, other_place), num_bytes in self._carried().items():
            rank, other = self._ranks[place], self._ranks[other_place]
            before, after = self.content["rates"][rank][other], now.rates[place][other_place]
            step_s, after_s = self.content["predicted"]["step_s"], now.delays_s[place][other_place]
            # A plan of an earlier version may not know how many messages there are.
            before_s, number = delays.get((rank, other), after_s), numbers.get((rank, other), 0.0)
            late_s = before_s + moved_s(before_s, after_s)
            if before is not None and (
                drifted_s(num_bytes / before, num_bytes / after, step_s)
                or drifted_s(number * before_s, number * late_s, step_s)
            ):
                yield rank, other, before, after, before_s, after_s

    @property
    def _ranks(self) -> tuple[int, ...]:
        """The plan's number of each rank of the run."""
        return self.config.order or tuple(range(self.comm.world_size))

    def _carried(self) -> dict[tuple[int, int], float]:
        """Bytes of a step on each link that the plan uses, by ranks of the run; the first rank has read the plan.

        Not between ranks of one node, whose link is as fast as the machine is free.
        """
        carried, size = self.content["link_bytes"], self.comm.world_size
        nodes = self.content.get("nodes") or range(size)
        found = {}
        for a, b in itertools.permutations(range(size), 2):
            rank, other = self._ranks[a], self._ranks[b]
            if carried[rank][other] and nodes[rank] != nodes[other]:
                found[a, b] = carried[rank][other]
        return found

    def _machines(self) -> Topology:
        """The machines of the plan, told by the first rank: a run may take other ranks for one node. A collective."""
        size = self.comm.world_size
        num = len(set(self.content.get("nodes") or range(size)))
        num = told_by_first(num, "the machines of its plan")
        return Topology(num, size // num)

    def _used(self) -> set[tuple[int, int]]:
        """The pairs of ranks that send each other anything, told by the first rank. A collective."""
        size = self.comm.world_size
        table = torch.zeros(size, size, dtype=torch.uint8)
        for pair in self._carried() if self.comm.rank == 0 else ():
            table[pair] = 1
        self.comm.wait(self.comm.broadcast_(table))
        return {(a, b) for a, b in table.nonzero().tolist()}
