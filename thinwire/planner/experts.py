"""Memory and traffic of a rank that holds a part of a mixture's experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thinwire.collectives import Topology
from thinwire.cost import Links
from thinwire.errors import ConfigError, counted, nearest_divisor
from thinwire.flags import flag
from thinwire.hosts.experts.checks import check_experts
from thinwire.hosts.ranks import along, neighbours
from thinwire.layout.mesh import MeshShape
from thinwire.methods.experts import (
    ExpertParallel,
    ExpertPlacement,
    Rows,
    check_data_method,
    choose_way,
    facts,
    idle_s,
    room_bytes,
    sent,
    way_text,
)
from thinwire.methods.experts.choice import moves_of
from thinwire.methods.interface import Method, MethodPlan
from thinwire.methods.options import EXACT
from thinwire.methods.outer.base import IslandsMethod
from thinwire.models.capacity import check_capacity
from thinwire.models.moe import MoELlama
from thinwire.models.seam import MixtureSizes, experts_of, mixture_of
from thinwire.options import EXPERTS, SEQUENCE, made
from thinwire.planner.options import AUTO, ExplainConfig
from thinwire.report.units import bytes_text, seconds_text
from thinwire.table import Row

# Options that may say auto, and ways that the start-up table shows.
CHOSEN, NUM_SHOWN = ("parallel", "move", "route", "chunks", "chunks_back", "once_a_step"), 4
# What the table calls the rows of a layer on their way.
OPERATION = "tokens to experts"
Key = TypeVar("Key")


def options_of(config: ExplainConfig, shape: MeshShape, width: int) -> ExpertParallel:
    """The options in effect on a mesh, for rows of `width` elements. Raises ConfigError."""
    return made(ExpertParallel, {**config.tables.get(EXPERTS, {}), "parallel": shape.expert}, EXPERTS).fitted(width)


def with_splits(config: ExplainConfig, shape: MeshShape) -> MeshShape:
    """The mesh, with the axes that --sequence.parallel and --experts.parallel state.

    Raises ConfigError for numbers of ranks that don't divide evenly.
    """
    for axis, table in (("sequence", SEQUENCE), ("expert", EXPERTS)):
        ranks, data = config.tables.get(table, {}).get("parallel", shape.sizes.get(axis, 1)), shape.sizes["data"]
        if ranks == shape.sizes.get(axis, 1):
            continue
        check_free(f"--{table}.parallel", ranks, data, config)
        shape = MeshShape({**shape.sizes, "data": data // ranks, axis: ranks}).in_order()
    return shape


def check_free(option: str, ranks: int, data: int, config: ExplainConfig) -> None:
    """Raise ConfigError for an option whose `ranks` do not divide the `data` axis, or that stands beside a mesh."""
    if config.mesh is not None:
        raise ConfigError(f"{option} {ranks} beside --mesh {config.mesh}: leave one of them out")
    if data % ranks:
        near = f"{option} {nearest_divisor(ranks, data)}"
        raise ConfigError(
            f"{option} {ranks}: must divide the {counted(data, 'rank')} of the data axis; nearest: {near}"
        )


def choose_experts(
    strategy: Method, whole: nn.Module, config: ExplainConfig, links: Links, shape: MeshShape | None = None
) -> tuple[dict[str, Any], list[Row]]:
    """Values for the options of experts that are auto, and rows that say why.

    Chooses the number of ranks that share the experts by the fewest seconds: of the links for the strategy's weights
    and gradients, and of each layer's simulated forward and backward in the best way for that number. Assumes that the
    router sends equally many rows to each expert. Who states how rows or weights travel wants shared experts: then 1
    rank is no choice, where more can train.

    Args:
        shape: a mesh that states this number; None: try all numbers.

    Raises ConfigError if no number of ranks can train, or no way uses all of the stated options.
    """
    world, stated = MeshShape({"data": config.nodes * config.local_size}), config.tables.get(EXPERTS, {})
    seconds: dict[int, float] = {}
    ways: dict[int, dict[ExpertParallel, float]] = {}
    refused = ""
    for ranks in range(1, world.world_size + 1) if shape is None else [shape.expert]:
        one = replace(config, tables={**config.tables, EXPERTS: {**stated, "parallel": ranks}})
        try:
            on = shape or with_splits(one, world)
            _, seconds[ranks], ways[ranks] = step_of(strategy, whole, one, on, links)
        except ConfigError as error:
            refused = refused or str(error)
    if not seconds:
        raise ConfigError(refused)
    wanted = travel_flags(stated) if shape is None else ""
    shared = [ranks for ranks in seconds if ranks > 1] if wanted else []
    best = min(shared or seconds, key=lambda ranks: (seconds[ranks], ranks))
    way = next(iter(ways[best]))
    found = {name: getattr(way, name) for name in CHOSEN if stated.get(name) == AUTO}
    rows: list[Row] = []
    if stated.get("release") == AUTO:
        on = shape or with_splits(
            replace(config, tables={**config.tables, EXPERTS: {**stated, "parallel": best}}), world
        )
        found["release"] = room = "now" if way.move == "experts" else room_of(whole, config, on, way, links)
        shown = room if isinstance(room, str) else f"{bytes_text(room)} in each layer"
        rows.append((f"--experts.release {AUTO}", shown, "what passes while a layer's backward leaves the link alone"))
    if shape is None:
        shown = ", ".join(f"{seconds_text(each)} with {ranks}" for ranks, each in seconds.items())
        why = f"seconds of a step's links and experts: {shown}"
        why += f"; above 1, as {wanted} asks for experts on several ranks" if shared else ""
        rows.append((f"--experts.parallel {AUTO}", str(best), why))
    others = [name for name in found if name not in ("parallel", "release")]
    if others and best > 1:
        asked = " ".join(f"{flag(f'{EXPERTS}.{name}')} {AUTO}" for name in others)
        shown = ", ".join(f"{seconds_text(each)} by {way_text(one)}" for one, each in [*ways[best].items()][:NUM_SHOWN])
        rows.append((asked, way_text(way), f"a simulated layer, forward and backward: {shown}"))
    return found, rows


def travel_flags(stated: Mapping[str, Any]) -> str:
    """The flags of what travels that are stated with values that only experts on several ranks use."""
    plain = ExpertParallel()
    used = {name: value for name, value in stated.items() if name != "parallel" and value not in (AUTO, EXACT)}
    return " ".join(f"{flag(f'{EXPERTS}.{name}')} {used[name]}" for name in used if used[name] != getattr(plain, name))


def room_of(whole: nn.Module, config: ExplainConfig, shape: MeshShape, way: ExpertParallel, links: Links) -> int:
    """Bytes of gradients that pass while the backward of a layer leaves the link alone."""
    config = replace(config, tables={**config.tables, EXPERTS: {**config.tables[EXPERTS], "parallel": shape.expert}})
    sizes, placement = placed(whole, config, shape)
    numel = sizes.expert_numel * placement.experts // placement.ranks
    rows = rows_of(sizes, placement, config, shape)
    return room_bytes(idle_s(way, placement, rows, numel, local_size(config, shape), links), links)


def step_of(
    strategy: Method, whole: nn.Module, config: ExplainConfig, shape: MeshShape, links: Links
) -> tuple[MethodPlan, float, dict[ExpertParallel, float]]:
    """The plan in the best way, the seconds of its messages and experts; and seconds of one layer in each way.

    Raises ConfigError for what can't work.
    """
    sizes, placement = placed(whole, config, shape)
    numel = sizes.expert_numel * placement.experts // placement.ranks
    rows, of_node = rows_of(sizes, placement, config, shape), local_size(config, shape)
    options = options_of(config, shape, sizes.width)
    ways = choose_way(options, placement, rows, numel, of_node, links)
    way = next(iter(ways))
    table = {**config.tables[EXPERTS], **{name: getattr(way, name) for name in CHOSEN}}
    plan = expert_plan(strategy, whole, replace(config, tables={**config.tables, EXPERTS: table}), shape)
    others = {key: num_bytes for key, num_bytes in plan.sent.items() if key[0] != OPERATION}
    return plan, links.seconds(others) + sizes.layers * config.passes * ways[way], ways


@dataclass(frozen=True)
class ExpertWay:
    """What a step takes if `ranks` ranks share the experts and `way` says what travels; 1 rank: all are replicas."""

    ranks: int
    way: str
    plan: MethodPlan
    seconds: float


def side_by_side(strategy: Method, whole: nn.Module, config: ExplainConfig, links: Links) -> list[ExpertWay]:
    """Replicas of all experts, tokens, slices and experts that move, for each number of ranks that can share experts.

    Each by its best route and number of chunks. Codecs and slices are those stated; those of what does not travel are
    left out.
    """
    world, stated, found = MeshShape({"data": config.nodes * config.local_size}), config.tables.get(EXPERTS, {}), []
    for ranks, move in product(range(1, world.world_size + 1), moves_of(stated.get("slices", 1))):
        if (ranks == 1 and move != "tokens") or (move == "slices" and stated.get("slices", 1) == 1):
            continue
        idle: tuple[str, ...] = ("dispatch", "combine", "release") if move == "experts" else ()
        idle = ("weights", "once_a_step") if move == "tokens" else idle
        table = {name: value for name, value in stated.items() if name not in (*idle, "slices" if ranks == 1 else "")}
        table |= {"parallel": ranks, "move": move, "route": AUTO, "chunks": AUTO}
        with suppress(ConfigError):
            one = replace(config, mesh=None, tables={**config.tables, EXPERTS: table})
            plan, seconds, ways = step_of(strategy, whole, one, with_splits(one, world), links)
            found.append(ExpertWay(ranks, "replicas" if ranks == 1 else way_text(next(iter(ways))), plan, seconds))
    return found


def placed(model: nn.Module, config: ExplainConfig, shape: MeshShape) -> tuple[MixtureSizes, ExpertPlacement]:
    """The sizes of the mixture, and where its experts lie.

    Raises ConfigError for another model, and for numbers that don't divide.
    """
    sizes = mixture_of(model)
    if sizes is None:
        raise ConfigError(f"experts over {shape.expert} ranks: the model has none; nearest: --model moe-demo")
    return sizes, check_experts(model, options_of(config, shape, sizes.width), shape.world_size)


def rows_of(sizes: MixtureSizes, placement: ExpertPlacement, config: ExplainConfig, shape: MeshShape) -> Rows:
    """The rows of a micro-batch, sent by an even router. Raises ConfigError for a capacity below one row."""
    num_tokens, dtype = tokens_of(config, shape), torch.bfloat16 if config.dtype == "bf16" else torch.float32
    limit = check_capacity(sizes.capacity_factor, num_tokens, sizes.experts, sizes.top_k)
    nodes = placement.ranks // local_size(config, shape)
    rows = Rows.even(placement, num_tokens, sizes.top_k, sizes.width, dtype, nodes, limit, config.passes)
    return replace(rows, moved_numel=sizes.kept_numel * placement.experts // placement.ranks)


def tokens_of(config: ExplainConfig, shape: MeshShape) -> int:
    """Number of tokens of a rank in a micro-batch."""
    return config.micro_batch * -(-config.seq_len // shape.sequence)


def capacity_notes(model: nn.Module, config: ExplainConfig, shape: MeshShape) -> list[Row]:
    """A row about a mixture's capacity, if it has one. Raises ConfigError for a capacity below one row."""
    return model.config.capacity_rows(tokens_of(config, shape)) if isinstance(model, MoELlama) else []


def split_off(model: nn.Module, placement: ExpertPlacement) -> tuple[nn.Module, nn.Module]:
    """What a rank has of a model besides experts, and of the experts. Raises ConfigError for a model without any."""
    paths, named = tuple(f"{name}." for name in experts_of(model)), dict(model.named_parameters())
    experts = {name: placement.part(param, 0) for name, param in named.items() if name.startswith(paths)}
    return holder({name: param for name, param in named.items() if name not in experts}), holder(experts)


def alike_on(config: ExplainConfig, shape: MeshShape) -> Topology:
    """The grid of the ranks that have the same experts."""
    same = [rank for rank in range(shape.world_size) if rank // shape.sequence % shape.expert == 0]
    return Topology.stated(len(same), along(Topology(config.nodes, config.local_size), same))


def expert_plan(strategy: Method, whole: nn.Module, config: ExplainConfig, shape: MeshShape) -> MethodPlan:
    """A rank's plan: experts among their replicas, all other weights among all ranks, and the rows.

    Raises ConfigError for a strategy, model or ranks that don't support it.
    """
    if isinstance(strategy, IslandsMethod):
        raise ConfigError(
            f"{strategy.name} of ranks that share experts has no plan; nearest: {strategy.inner.name}, without islands"
        )
    check_data_method(strategy)
    sizes, placement = placed(whole, config, shape)
    options = options_of(config, shape, sizes.width)
    grid = Topology(config.nodes, config.local_size)
    holders = neighbours(0, shape.expert, shape.sequence)
    (rest, experts), replicas = split_off(whole, placement), alike_on(config, shape)
    first, second = (strategy.plan(each, on, config.passes) for each, on in ((rest, grid), (experts, replicas)))
    of_layer = rows_sent(whole, config, shape, options)
    passes = sizes.layers * config.passes
    messages = {
        (OPERATION, level): num_bytes * passes for level, num_bytes in levels_of(of_layer, grid, holders).items()
    }
    # Whole weights, and the sums of their gradients.
    kept = 2 * 4 * sizes.layers * kept_numel(options, placement, sizes.expert_numel)
    return replace(
        first, weights=first.weights + second.weights + kept, gradients=first.gradients + second.gradients,
        optimizer=first.optimizer + second.optimizer, passing=first.passing + second.passing,
        sent=added(added(first.sent, second.sent), messages), other=added(first.other, second.other),
    )  # fmt: skip


def kept_numel(options: ExpertParallel, placement: ExpertPlacement, expert_numel: int) -> int:
    """Elements of one layer's weights that a rank has gathered from others, and keeps through a step."""
    if not options.once_a_step:
        return 0
    ranks = placement.ranks if options.move == "experts" else options.gathered
    return placement.experts * expert_numel // placement.ranks * ranks


def rows_sent(
    whole: nn.Module, config: ExplainConfig, shape: MeshShape, way: ExpertParallel
) -> dict[tuple[int, int], int]:
    """Bytes of one layer's rows in a micro-batch, forward and backward, by (holder, holder)."""
    sizes, placement = placed(whole, config, shape)
    part_numel = sizes.expert_numel * placement.experts // placement.ranks
    return sent(placement, rows_of(sizes, placement, config, shape), way, part_numel, local_size(config, shape))


def local_size(config: ExplainConfig, shape: MeshShape) -> int:
    """Ranks per node among those that share the experts."""
    return along(Topology(config.nodes, config.local_size), neighbours(0, shape.expert, shape.sequence))


def levels_of(sent_bytes: Mapping[tuple[int, int], int], grid: Topology, holders: Sequence[int]) -> dict[str, int]:
    """Bytes that the first holder sends inside its node, and to other nodes."""
    found = {"intra": 0, "inter": 0}
    for (source, home), num_bytes in sent_bytes.items():
        if source == 0:
            found["intra" if grid.node(holders[home]) == 0 else "inter"] += num_bytes
    return found


def added(one: Mapping[Key, int], other: Mapping[Key, int]) -> dict[Key, int]:
    """Sums of two mappings, by key."""
    return {key: one.get(key, 0) + other.get(key, 0) for key in (*one, *other)}


def holder(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A module with these parameters."""
    return nn.ParameterDict({name.replace(".", "_"): nn.Parameter(tensor) for name, tensor in tensors.items()})


def expert_notes(whole: nn.Module, config: ExplainConfig, shape: MeshShape) -> list[Row]:
    """Rows about the placement, and about what the rows of a step send. Raises ConfigError."""
    sizes, placement = placed(whole, config, shape)
    options, rows = options_of(config, shape, sizes.width), rows_of(sizes, placement, config, shape)
    return facts(options, placement, rows, sizes.layers, config.passes, sizes.expert_numel, local_size(config, shape))
