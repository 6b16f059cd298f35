"""`thinwire.place`: decides which rank computes which part of a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.cost import Machine, Timeline, simulate
from thinwire.errors import ConfigError
from thinwire.placement.board import DeviceSchedule, NoRoomError, replay
from thinwire.placement.checks import check_placed, check_trains, check_whole
from thinwire.placement.etf import m_etf
from thinwire.placement.graph import Devices, Op, OpGraph, Value
from thinwire.placement.plan import DevicePlan, DeviceRoutes, rates
from thinwire.placement.prepare import FusedGraph, Scheduler, Sets, fused, least_memory, scheduled
from thinwire.placement.profile import Profile, Seconds, Size, mapped, profile as profiled
from thinwire.placement.runner import Placed
from thinwire.placement.sct import m_sct
from thinwire.placement.topo import m_topo
from thinwire.placement.trace import Leaf, Traced, are_alike, stated_groups, trace
from thinwire.planner.order import annealed
from thinwire.report.units import bytes_text, seconds_text
from thinwire.table import Row

METHODS: dict[str, Scheduler] = {"m-topo": m_topo, "m-etf": m_etf, "m-sct": m_sct}
# Of a rank's memory, for what the allocator can't use and for messages under way.
RESERVE = 0.13
# What AdamW keeps of each weight.
STATES = 2


@dataclass(frozen=True)
class Placement:
    """Which rank computes which part of a model, and in which order.

    schedule: of the units in `graph`; a unit's backward counts with its forward. method: the name of the scheduler.
    is_one_group: all nodes share a rank, by the weights that they read or by stated groups.
    """

    traced: Traced
    profile: Profile
    machine: Machine
    method: str
    graph: FusedGraph
    schedule: DeviceSchedule
    names: tuple[str, ...]
    training: bool
    is_one_group: bool = False

    @cached_property
    def plan(self) -> DevicePlan:
        """Units of nodes, in the order of their start."""
        order = self.schedule.order
        units = (tuple(self.names[op] for op in self.graph.units[unit]) for unit in order)
        return DevicePlan(tuple(units), tuple(self.schedule.homes[unit] for unit in order))

    @cached_property
    def routes(self) -> DeviceRoutes:
        """The tensors that travel between ranks."""
        return DeviceRoutes(self.traced, self.profile, self.plan, self.machine.num_ranks, self.training)

    @property
    def homes(self) -> dict[str, int]:
        """The rank of each node of the traced model."""
        homes = zip(self.plan.units, self.plan.homes, strict=True)
        return {name: home for unit, home in homes for name in unit}

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step, in which ranks share cores and messages share ports."""
        machine = replace(self.machine, rates=rates())
        return simulate(self.routes.graph(machine.network), machine)

    @property
    def step_s(self) -> float:
        """Simulated seconds of a step."""
        return self.timeline.makespan_s

    @property
    def alone_s(self) -> float:
        """Seconds of a step on one rank of speed 1 that holds the whole model."""
        return sum(map(sum, self.profile.seconds.values()))

    def apply(
        self, optimizer: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | DeviceMesh | Sequence[int] | None = None,
        *, timeout_s: float = DEFAULT_TIMEOUT_S, checked: bool = False, announce: bool = True,
    ) -> Placed:  # fmt: skip
        """Leave each rank its part of the model, and of the optimizer. A collective over the ranks of one copy.

        The model object stays the same. Call it as before, on all ranks of the group at once, with the same inputs; all
        of them get its output. If ranks measured different plans, the first rank's is used.

        Args:
            optimizer: over the model's parameters; None: for a placement without training.
            group: as many ranks as the machine has; None: all. Ranks of other copies have groups of their own.
            timeout_s: how long one message may take, in seconds.
            checked: put a header and a checksum in front of every message.
            announce: the first rank prints to stderr what was asked for and what is in effect.

        Raises ConfigError for a group of another size, for ranks with different models, for an optimizer without
        parameters of the model, and for a model that has been placed already.
        """
        if (optimizer is None) == self.training:
            given = "no optimizer" if optimizer is None else "an optimizer"
            raise ConfigError(f"apply was given {given}, and the placement was made with training={self.training}")
        check_whole(self.traced.model)
        if optimizer is not None:
            check_trains(self.traced.model, optimizer)
        return Placed(
            self.routes, self.describe, optimizer, group, timeout_s=timeout_s, checked=checked, announce=announce
        )

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        num = self.machine.num_ranks
        used = sorted(set(self.plan.homes))
        shown = [one for one in self.routes.crossings if one.is_output]
        copies = (sum(one.num_bytes for one in shown if one.home != rank) for rank in range(num))
        peaks = [peak + more for peak, more in zip(self.schedule.peak_bytes(), copies, strict=True)]
        sent = sum(map(self.routes.sent_bytes, range(num)))
        counts = [self.plan.homes.count(rank) for rank in range(num)]
        rows = [
            (f"place by {self.method}", f"{len(self.plan.units)} units on {len(used)} of {num} ranks",
             f"units by rank: {', '.join(map(str, counts))}"),
            ("a step, simulated", seconds_text(self.step_s), f"{seconds_text(self.alone_s)} on one rank alone"),
            ("memory of a rank", f"at most {bytes_text(max(peaks))}", "what weights need, activations, outputs"),
            ("activations and gradients sent", bytes_text(sent), "by all ranks in a step"),
        ]  # fmt: skip
        if len(used) == 1 < num:
            rows.append(("spread over ranks", "no", self._why_one_rank()))
        if self.traced.changed:
            rows.append(("write in place", "out of place", ", ".join(self.traced.changed)))
        return rows

    def _why_one_rank(self) -> str:
        if self.is_one_group:
            return "all nodes share a rank"
        if self.method == "m-topo":
            return "m-topo ignores seconds, and fills a rank with an equal share and the largest group first"
        return "messages would take longer than they save"


def place(
    model: nn.Module,
    inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    machine: Machine,
    method: str = "m-sct",
    *,
    leaves: Collection[Leaf] = (),
    groups: Collection[Collection[str]] = (),
    seconds: Seconds | None = None,
    states: int = STATES,
    training: bool = True,
) -> Placement:
    """Decide which rank computes which part of a model, by list scheduling with limited memory.

    The forward is traced by torch.fx and placed. The backward of a node runs on the same rank, in the opposite order. A
    node's time is that of forward and backward; a message's time is that of the activation and its gradient. Nodes that
    use the same weight, or are in one of `groups`, share a rank. 13% of each rank's memory stays free.

    If one rank has room for the whole model and is faster alone, m-etf and m-sct place the model there.

    Args:
        model: any model whose forward torch.fx can trace; whole, on this process's device.
        inputs: of one call, by position or by name. The plan is for these shapes.
        machine: its ranks hold one copy of the model; see `thinwire.calibrate`.
        method: "m-sct" (needs scipy), "m-etf" or "m-topo".
        leaves: modules to be placed whole, by name or class, besides those of torch.nn.
        groups: names of modules, or of nodes, that share a rank.
        seconds: (forward, backward) of each node on a rank of speed 1; None: measured here, in 20 rounds.
        states: tensors that the optimizer keeps for each weight, in the weight's dtype; AdamW has two.
        training: whether a backward follows; if not, activations are freed after use.

    Raises ConfigError for arguments of a wrong type or out of their range, a name in `groups` that no node has, a model
    that can't be traced, inputs that a node can't take, and memory that is too small.
    Source: "Baechi: Fast Device Placement of Machine Learning Graphs" (SoCC 2020).
    """
    check_placed(model, inputs, machine, method, METHODS, leaves=leaves, groups=groups, seconds=seconds, states=states)
    given = (inputs,) if isinstance(inputs, Tensor) else inputs
    traced = trace(model, given, leaves)
    args, kwargs = ((), given) if isinstance(given, Mapping) else (given, {})
    found = profiled(traced, args, kwargs, seconds=seconds, training=training)
    if traced.other is not None and not are_alike(traced, traced.other, found.constants):
        traced = replace(traced, other=None)
    if seconds is None and machine.speeds:
        # Those of a rank of speed 1; the first rank's plan counts.
        timed = {name: (a * machine.speeds[0], b * machine.speeds[0]) for name, (a, b) in found.seconds.items()}
        found = replace(found, seconds=timed)
    whole, names = graph_of(traced, found, stated_groups(traced, groups), states=states, training=training)
    devices = devices_of(machine, training=training)
    base = _with_several(whole, traced, found, names)
    try:
        way, schedule = scheduled(base.graph, devices, METHODS[method])
    except NoRoomError as error:
        raise ConfigError(_nothing_fits(error, base.graph, devices, machine, method)) from None
    schedule = on_ranks(schedule)
    if method != "m-topo":
        schedule = min([schedule, *_on_one(schedule)], key=lambda each: each.makespan_s)
    # Units of units are units of nodes.
    units = tuple(tuple(op for one in unit for op in base.units[one]) for unit in way.units)
    together = len(set(whole.group_of)) == 1
    return Placement(
        traced, found, machine, method, replace(way, units=units), schedule, names, training, is_one_group=together
    )


def devices_of(machine: Machine, *, training: bool) -> Devices:
    """The ranks of a machine as devices. In training, a message also takes the time of its gradient's way back."""
    times, net = 2 if training else 1, machine.network
    network = replace(
        net, rates=tuple(tuple(rate / times for rate in row) for row in net.rates),
        delays_s=tuple(tuple(delay * times for delay in row) for row in net.delays_s),
    )  # fmt: skip
    return Devices(network, machine.memory_bytes * (1 - RESERVE) - machine.base_bytes, machine.speeds)


def graph_of(
    traced: Traced, found: Profile, groups: Iterable[Collection[str]] = (), *, states: int, training: bool
) -> tuple[OpGraph, tuple[str, ...]]:
    """The nodes that compute, as operations, and their names.

    A weight counts, with its gradient and the optimizer's states, at the first node that reads it. Nodes that read the
    same weight form a group, and so do those that `groups` names. Tensors saved for the backward count as permanent. A
    running backward holds the gradients of its node's output and inputs, a running forward its temporary tensors: the
    larger of the two counts.
    """
    nodes = [node for node in traced.nodes if node.name not in found.constants]
    number = {node.name: each for each, node in enumerate(nodes)}
    readers: dict[int, list[int]] = defaultdict(list)
    ops, values = [], []
    for node in nodes:
        size, own = found.sizes[node.name], 0
        for weight in {id(each): each for each in traced.weights(node)}.values():
            if not readers[id(weight)]:
                own += weight.nbytes * (2 + states if weight.requires_grad and training else 1)
            readers[id(weight)].append(number[node.name])
        sources = [found.sizes[source.name] for source in node.all_input_nodes if source.name in number]
        passed = sum(map(_num_bytes, [size, *sources])) if size.needs_grad and training else 0
        forward_s, backward_s = found.seconds[node.name]
        permanent = own + (size.saved_bytes if training else 0)
        temporary = max(passed, size.temporary_bytes + (0 if training else size.saved_bytes))
        ops.append(Op(node.name, forward_s + backward_s * training, permanent, temporary))
        targets = sorted(number[user.name] for user in node.users if user.name in number)
        values.append(Value(number[node.name], tuple(targets), _num_bytes(size), size.new_bytes))
    stated = ([number[name] for name in group if name in number] for group in groups)
    joined = _joined_groups([*readers.values(), *stated], len(nodes))
    return OpGraph(tuple(ops), tuple(values), joined, training), tuple(node.name for node in nodes)


def _num_bytes(size: Size) -> int:
    return 0 if size.shape is None or size.dtype is None else size.shape.numel() * size.dtype.itemsize


def _joined_groups(readers: Iterable[Sequence[int]], num: int) -> tuple[frozenset[int], ...]:
    """Groups of nodes that read the same weight or are stated together, directly or through other nodes."""
    sets = Sets(num)
    for own in readers:
        for each in own:
            sets.join(own[0], each)
    return tuple(frozenset(members) for members in sets.members().values() if len(members) > 1)


def _with_several(graph: OpGraph, traced: Traced, found: Profile, names: Sequence[str]) -> FusedGraph:
    """Units in which a node with several output tensors runs with the nodes that take them: only tensors travel."""
    several = [number for number, name in enumerate(names) if found.sizes[name].shape is None]
    pairs = [(i, j) for i, j in graph.edges if i in set(several)]
    base = fused(graph, pairs)
    unit_of = {op: unit for unit, ops in enumerate(base.units) for op in ops}
    shown: list[str] = []
    mapped(traced.output, lambda node: shown.append(node.name), fx.Node)
    for name in (name for name in shown if name in found.sizes and found.sizes[name].shape is None):
        raise ConfigError(f"the model returns all that {name!r} gives, several tensors: return them by their names")
    for i, j in pairs:
        if unit_of[i] != unit_of[j]:
            raise ConfigError(
                f"{names[j]!r} takes all tensors of {names[i]!r}, and other nodes stand between the two: give it the "
                "tensors that it needs one by one"
            )
    return base


def on_ranks(schedule: DeviceSchedule) -> DeviceSchedule:
    """The same schedule with its devices assigned to other ranks, if links or speeds differ and it gets shorter."""
    graph, devices = schedule.graph, schedule.devices
    links = {(devices.network.rates[a][b], devices.network.delays_s[a][b]) for a, b in devices.network.pairs}
    if len(links) <= 1 and len(set(devices.speeds)) <= 1:
        return schedule
    traffic: dict[tuple[int, int], list[float]] = defaultdict(list)
    for transfer in schedule.transfers:
        traffic[transfer.source, transfer.target].append(graph.values[transfer.value].num_bytes)
    work = [0.0] * devices.num
    for op, home in enumerate(schedule.homes):
        work[home] += graph.ops[op].seconds

    def cost(ranks: Sequence[int]) -> float:
        sent = (
            sum(devices.link_s(size, ranks[a], ranks[b]) + devices.delay_s(ranks[a], ranks[b]) for size in sizes)
            for (a, b), sizes in traffic.items()
        )
        return sum(sent) + max(seconds / devices.speed(ranks[each]) for each, seconds in enumerate(work))

    ranks, _ = annealed(cost, range(devices.num), fixed=0)
    other = replay(graph, devices, [ranks[home] for home in schedule.homes], schedule.order)
    is_better = other.makespan_s < schedule.makespan_s and max(other.peak_bytes()) <= devices.memory_bytes
    return other if is_better else schedule


def _on_one(schedule: DeviceSchedule) -> Iterator[DeviceSchedule]:
    """The schedule with everything on the fastest rank, if its memory is large enough.

    Earliest-first schedulers spread operations that need no message yet, which costs time later on slow links.
    """
    devices = schedule.devices
    home = max(range(devices.num), key=devices.speed)
    alone = replay(schedule.graph, devices, [home] * len(schedule.homes))
    if max(alone.peak_bytes()) <= devices.memory_bytes:
        yield alone


def _nothing_fits(error: NoRoomError, graph: OpGraph, devices: Devices, machine: Machine, method: str) -> str:
    def of_rank(num_bytes: float) -> str:
        return bytes_text((num_bytes + machine.base_bytes) / (1 - RESERVE))

    least = least_memory(graph, devices, METHODS[method])
    bound = max(graph.total_bytes / devices.num, *graph.reserved.values())
    base = f" and {bytes_text(machine.base_bytes)} of the process" if machine.base_bytes else ""
    return (
        f"{method} finds no place for the model in {bytes_text(machine.memory_bytes)} on each of {devices.num} ranks, "
        f"less {RESERVE:.0%}{base}: {error}; nearest: {of_rank(least)} each, with which it does; no method can with "
        f"less than {of_rank(bound)}"
    )
