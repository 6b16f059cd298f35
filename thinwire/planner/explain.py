"""Memory and traffic of strategies on a cluster, by their own formulas, over a model without memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from thinwire.calibration import matrix_flops
from thinwire.collectives import Topology
from thinwire.collectives.gather import gather_bytes
from thinwire.cost import Links, Network
from thinwire.data import load_tokenizer
from thinwire.device import Device
from thinwire.errors import ConfigError, Problems, nearest, nearest_divisor
from thinwire.flags import flag
from thinwire.hosts.ranks import along
from thinwire.lab.spec import read_rate
from thinwire.layout.mesh import MeshShape
from thinwire.losses import loss_in_effect
from thinwire.methods.experts import averages_apart
from thinwire.methods.interface import Method, MethodPlan
from thinwire.methods.outer.base import IslandsMethod
from thinwire.methods.pipeline.across import ranks_across
from thinwire.methods.pipeline.cut import SPREAD
from thinwire.methods.pipeline.inside import check_inside, check_spread, why_not_inside
from thinwire.methods.pipeline.options import Pipeline
from thinwire.methods.sequence import SequenceParallel, Shape, facts
from thinwire.methods.sequence.traffic import DELAY_S, LOCAL_RATE, RATE
from thinwire.methods.tables import by_tokens
from thinwire.models import PRESETS, Llama, build_skeleton
from thinwire.models.llama import LlamaConfig
from thinwire.models.seam import mixture_of
from thinwire.models.tensor import activation_bytes, cut_skeleton, tensor_sizes
from thinwire.options import EXPERTS, PIPELINE, RESIDENCY, SEQUENCE, build_strategy, model_table, strategy_table
from thinwire.planner.candidates import LARGEST_MICRO_BATCH, AxisSizes, Candidate, candidates
from thinwire.planner.experts import (
    ExpertWay,
    capacity_notes,
    choose_experts,
    expert_notes,
    expert_plan,
    side_by_side,
    with_splits,
)
from thinwire.planner.forward import kept_of
from thinwire.planner.optimizers import ADAMW, COUNTED, by_optimizer, why_not_by
from thinwire.planner.options import AUTO, ExplainConfig, range_errors
from thinwire.planner.residency import PLACED, Resident, where_all_lies
from thinwire.planner.search import Search, search
from thinwire.planner.stages import Grid, Stages, held_bytes, stages_of
from thinwire.planner.twins import Twins
from thinwire.registry import STRATEGIES, check_on_mesh
from thinwire.report.frontier import recommended
from thinwire.report.units import bytes_text, enough_text, percent_text, seconds_text, short
from thinwire.run.optimizer import name_of, read_optimizer
from thinwire.table import Row

NUM_LAYERS, WIDTH = 32, 1024
# Why a strategy computes more.
MORE_PASSES = "it takes so many forwards and backwards of each micro-batch"
# Steps and warm-up steps of the run that strategies are planned for.
NUM_STEPS, NUM_WARMUP_STEPS = 1000, 100
# Of so many strategies the memory of every stage is counted; of more that of the stages that may need the most.
MOST_BY_STAGE = 3
# Strategies among which --stages auto looks unless others are named.
SEARCHED = ("zero", "sdp4bit")


@dataclass(frozen=True)
class Explained:
    """The plan of each strategy; bit/s of the links, None if not stated.

    Args:
        notes: rows of (asked for, in effect, why) for options in which the two differ.
        vocabulary: why a preset has fewer or more parameters than its name says; empty if it has not.
        mean_over: for strategies that do not exchange in every step, number of steps over which the bytes are a mean.
        whole: strategies that hold whole weights beside their shard.
        stages: of a pipeline; the plan of a strategy is then that of the stage that needs the most memory with it.
        held: bytes that one rank of a stage holds, by strategy and stage.
        search: what was priced to find the stages.
        resident: where the parts of the one strategy lie under a budget.
        optimizer: whose state and messages are counted.
        activations: bytes that a micro-batch keeps on each rank without stages; None: they are not known.
        expert_ways: of the one strategy, what a step takes for each number of ranks that share the experts of a
            mixture, and for each way of what travels.
    """

    num_parameters: int
    topology: Topology
    micro_batches: int
    plans: dict[str, MethodPlan]
    rate: float | None
    local_rate: float | None
    notes: list[tuple[str, str, str]]
    vocabulary: str = ""
    mean_over: Mapping[str, int] = field(default_factory=dict)
    whole: Sequence[str] = ()
    stages: Stages | None = None
    held: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    grid: Grid | None = None
    search: Search | None = None
    resident: Resident | None = None
    optimizer: str = ADAMW
    activations: float | None = None
    expert_ways: Sequence[ExpertWay] = ()

    @property
    def heaviest(self) -> dict[str, int]:
        """The stage that needs the most memory, by strategy."""
        return {name: max(held, key=held.__getitem__) for name, held in self.held.items() if held}

    def activations_of(self, name: str) -> float | None:
        """Bytes of the activations of one rank with a strategy; None: they are not known."""
        return self.activations if self.stages is None else self.stages.peak_bytes[self.heaviest[name]]

    def last_messages_of(self, name: str) -> float:
        """The most bytes of last messages that a rank keeps for `delta` with a strategy."""
        return 0.0 if self.stages is None else self.stages.last_messages_bytes(self.heaviest[name])

    def link_s(self, found: MethodPlan) -> float | None:
        """Seconds of a step's messages between nodes on one node's link, all ranks of the node together."""
        sent = self.topology.local_size * found.sent_on("inter") if found.crossing is None else found.crossing
        borders = self.stages.crossing_bytes(self.grid) if self.stages and self.grid else 0
        return None if self.rate is None else 8 * (sent + borders) / self.rate

    def local_s(self, found: MethodPlan) -> float | None:
        """Seconds of a step's messages inside a node on one rank's link."""
        sent = found.sent_on("intra") + found.sent_on("pair")
        return None if self.local_rate is None else 8 * sent / self.local_rate


@dataclass(frozen=True)
class LaidOut:
    """The model that is priced, and how it lies on the ranks.

    Args:
        config: with what was found in the place of "auto". names: its strategies.
        total: trained parameters.
        whole: the model. model: what a rank of the tensor axis has of it.
        stages: of a pipeline. grid: its machines. search: what was priced to find the stages.
        notes: rows of (asked for, in effect, why).
    """

    config: ExplainConfig
    names: list[str]
    shape: MeshShape
    total: int
    whole: nn.Module
    model: nn.Module
    stages: Stages | None
    grid: Grid | None
    search: Search | None
    notes: list[Row]

    @property
    def replicas(self) -> int:
        """Ranks of the data axis."""
        return self.shape.sizes["data"]


def explain(config: ExplainConfig, problems: Problems) -> Explained:
    """Plans of all strategies. Raises ConfigError with all problems at once."""
    out_of_range = list(range_errors(config))
    problems.messages += out_of_range
    rates = read(config.rate, problems), read(config.local_rate, problems)
    searched_all = config.stages == AUTO and config.strategy == "all"
    if searched_all:
        config = replace(config, strategy=",".join(SEARCHED))
    places_default = config.memory is not None and config.strategy == "all"
    if places_default:
        config = replace(config, strategy=PLACED)
    names = chosen(config.strategy, problems)
    laid, asked = None, config
    if not out_of_range:
        with problems.collect():
            laid = laid_out(config, names, *rates)
            config, names = laid.config, laid.names
    methods: dict[str, Method] = {}
    plans: dict[str, MethodPlan] = {}
    held: dict[str, dict[int, float]] = {}
    notes: list[Row] = [] if laid is None else [*laid.notes]
    for name in names:
        with problems.collect():
            strategy = strategy_of(name, config)
            if laid is not None and (why := why_left_out(strategy, laid)):
                notes.append((f"strategy {name}", "left out", why))
            elif laid is not None:
                methods[name], (plans[name], held[name]) = strategy, plan_of(strategy, laid)
    resident: Resident | None = None
    if config.memory is not None and laid is not None and len(plans) == len(names):
        with problems.collect():
            resident = where_all_lies(config, names, strategy_of, laid.model)
    problems.raise_any()
    assert laid is not None
    if searched_all:
        why = "other methods change what a step learns; name those to be tried"
        notes.insert(0, ("--strategy all", f"{' and '.join(SEARCHED)} are tried", why))
    if places_default:
        why = "of one strategy it is said where all lies; --strategy names another"
        notes.insert(0, ("--strategy all", f"{PLACED} with --memory", why))
    kept, rows = activations_on(laid)
    notes = [
        *notes_on(config, names, kept is not None, laid.search is not None),
        *notes,
        *rows,
        *notes_on_methods(methods),
    ]
    notes += notes_on_tables(methods, plans, laid)
    notes += resident.rows if resident else ()
    return Explained(
        laid.total, Topology(config.nodes, config.local_size), config.passes, plans, *rates,
        [*notes, *notes_on_ranks(laid, *rates)], vocabulary_of(config, laid.model),
        {name: method.exchanges_every for name, method in methods.items() if method.exchanges_every > 1},
        [name for name, method in methods.items() if method.keeps_whole_weights],
        laid.stages, held, laid.grid, laid.search, resident, config.optimizer, kept,
        expert_ways(asked, laid, list(methods.values()), *rates),
    )  # fmt: skip


def expert_ways(
    asked: ExplainConfig, laid: LaidOut, methods: Sequence[Method], rate: float | None, local_rate: float | None
) -> list[ExpertWay]:
    """The ways of a mixture's rows beside each other, for one strategy, where options of experts are stated."""
    is_asked = EXPERTS in asked.tables or "expert" in (asked.mesh or "")
    if not is_asked or len(methods) != 1 or not averages_apart(methods[0]) or mixture_of(laid.whole) is None:
        return []
    has_other_axes = laid.shape.pipeline * laid.shape.tensor * laid.shape.sequence > 1 or asked.memory is not None
    return [] if has_other_axes else side_by_side(methods[0], laid.whole, asked, links_of(asked, rate, local_rate))


def links_of(config: ExplainConfig, rate: float | None, local_rate: float | None) -> Links:
    """Links of the stated bits per second, or of usual ones."""
    inter, intra = (usual if each is None else each / 8 for each, usual in ((rate, RATE), (local_rate, LOCAL_RATE)))
    return Links.stated(inter, intra, DELAY_S, config.local_size)


def laid_out(config: ExplainConfig, names: list[str], rate: float | None, local_rate: float | None) -> LaidOut:
    """The model on the ranks, with what "auto" finds. rate, local_rate: in bits per second. Raises ConfigError."""
    notes: list[Row] = []
    if AUTO in config.tables.get(EXPERTS, {}).values():
        config, notes = found_experts(config, names, rate, local_rate)
    shape = mesh_of(config)
    cut = config.stages or shape.tensor * shape.pipeline * shape.expert > 1
    optimizer, _ = read_optimizer(config.optimizer, COUNTED)
    if optimizer not in COUNTED:
        raise ConfigError(f"--optimizer {config.optimizer}: counted are {', '.join(COUNTED)}; nearest: adamw")
    if optimizer != ADAMW and cut:
        raise ConfigError(
            f"--optimizer {config.optimizer}: counted on the data axis alone: leave --mesh, --stages and --tensor out; "
            "nearest: --optimizer adamw"
        )
    model = model_of(config)
    total = sum(param.numel() for param in model.parameters() if param.requires_grad)
    grid = grid_of(config, rate, local_rate) if config.stages is not None or shape.pipeline > 1 else None
    result: Search | None = None
    if config.stages == AUTO and grid is not None:
        config, result = found_stages(check_can_cut(model), config, names, grid)
        names, shape = [config.strategy], mesh_of(config)
    whole = model
    if shape.tensor > 1:
        whole = copy.deepcopy(model)
        cut_skeleton(model, shape.tensor)
    stages: Stages | None = None
    if shape.pipeline > 1 and grid is not None:
        stages, rows = cut_into_stages(check_can_cut(model), config, shape, grid)
        notes += rows
    return LaidOut(config, names, shape, total, whole, model, stages, grid, result, notes)


def cut_into_stages(
    model: Llama, config: ExplainConfig, shape: MeshShape, grid: Grid, own: Twins | None = None
) -> tuple[Stages, list[Row]]:
    """The stages of a pipeline, and rows on them. own: whose messages are part of the step. Raises ConfigError."""
    options = Pipeline(**config.tables.get(PIPELINE, {}))
    check_spread(options, None, shape.sizes)
    stages = stages_of(
        model, options, shape.pipeline, config.passes, config.micro_batch, config.seq_len, grid, config.loss,
        shape.tensor, memory_bytes=None if config.memory_gb is None else config.memory_gb * 1e9,
        join=None if own is None else partial(own.join, grid),
    )  # fmt: skip
    rows = list(notes_on_stages(stages, model, config, grid))
    if options.recompute == AUTO:
        rows = [recompute_row(stages, config.memory_gb), *rows]
    loss, why = loss_in_effect(config.loss, config.micro_batch * config.seq_len, model.config.vocab_size)
    if options.head == SPREAD:
        loss, why = "plain", f"each stage has its part of the logits: head {SPREAD!r}"
    return stages, [*rows, (f"--loss {config.loss}", loss, why)]


def recompute_row(stages: Stages, memory_gb: float | None) -> Row:
    """A row on what recompute "auto" has chosen, and why."""
    how = "--memory-gb states a limit, and none is stated"
    if memory_gb is not None:
        last = map(stages.last_messages_bytes, range(len(stages.parts)))
        held = [sum(each) for each in zip(map(held_bytes, stages.parts), stages.peak_bytes, last, strict=True)]
        most = f"a rank holds at most {bytes_text(max(held))}"
        how = most + ("" if max(held) <= 1e9 * memory_gb else f": no choice fits into --memory-gb {memory_gb:g}")
    return f"recompute {AUTO}", stages.options.recompute, how


def activations_on(laid: LaidOut) -> tuple[float | None, list[Row]]:
    """Bytes that a micro-batch keeps on each rank without stages, and rows on them; None: they are not known."""
    config, shape, model = laid.config, laid.shape, laid.model
    # With stages they are in a table of their own; under a budget too.
    if laid.stages is not None or config.memory is not None:
        return None, []
    if type(model) is not Llama:
        return None, [("activations", "not counted", "they are known of presets such as demo alone, without experts")]
    if shape.sequence > 1:
        return None, [("activations", "not counted", "ranks that share a sequence keep others")]
    num, length = config.micro_batch, config.seq_len
    loss, why = loss_in_effect(config.loss, num * length, model.config.vocab_size)
    kept = kept_of(model.config, num, length, is_cut=loss == "cut", tensor=shape.tensor)
    tokens, why_kept = f"those of {num} sequence(s) of {length:,} tokens", "one micro-batch; nothing computed again"
    return kept, [("activations", tokens, why_kept), (f"--loss {config.loss}", loss, why)]


def why_left_out(strategy: Method, laid: LaidOut) -> str:
    """Why `--strategy all` leaves a strategy out; empty: it is planned. Of one that was named, raises ConfigError."""
    shape, optimizer, is_named = laid.shape, laid.config.optimizer, laid.config.strategy != "all"
    if shape.tensor > 1 and strategy.not_on_mesh:
        if is_named:
            check_on_mesh(strategy)
        return f"on a tensor axis it {strategy.not_on_mesh}"
    # Of one that was named, its plan raises the error.
    if shape.expert > 1 and not averages_apart(strategy) and not is_named:
        return "experts over several ranks have fewer replicas than other weights"
    if shape.pipeline > 1 and isinstance(strategy, IslandsMethod):
        reason = "trains islands, which are nodes here"
        if is_named:
            raise ConfigError(f"{strategy.name} {reason}: price its stages by --strategy {strategy.inner.name}")
        return f"with --stages it {reason}"
    if shape.pipeline > 1 and (reason := why_not_inside(strategy, laid.replicas)):
        if is_named:
            check_inside(strategy, laid.replicas)
        return f"with --stages it {reason}"
    if reason := why_not_by(strategy, optimizer):
        if is_named:
            raise ConfigError(f"--optimizer {optimizer}: strategy {strategy.name} {reason}")
        return f"it {reason}"
    return ""


def plan_of(strategy: Method, laid: LaidOut) -> tuple[MethodPlan, dict[int, float]]:
    """A strategy's plan; of a pipeline that of the stage that needs the most memory.

    Also bytes by stage: of one rank of each; with many strategies of those alone that may need the most.
    """
    config, shape, stages = laid.config, laid.shape, laid.stages
    if stages is None:
        return plan_on(strategy, laid.model, laid.whole, config, shape), {}
    looked_at = range(shape.pipeline) if len(laid.names) <= MOST_BY_STAGE else stages.heaviest
    of_stage = {stage: plan_on(strategy, stages.parts[stage], laid.model, config, shape) for stage in looked_at}
    held = {stage: stages.memory_bytes(stage, plan) for stage, plan in of_stage.items()}
    return of_stage[max(held, key=held.__getitem__)], held


def step_of_stages(config: ExplainConfig, strategy: Method, grid: Grid) -> float:
    """Seconds of a step of a pipeline, with what its replicas send. Raises ConfigError."""
    shape, model = mesh_of(config), check_can_cut(model_of(config))
    if shape.tensor > 1:
        cut_skeleton(model, shape.tensor)
    replicas = replicas_on(config, shape)
    stages, _ = cut_into_stages(
        model, config, shape, grid, None if replicas.world_size == 1 else Twins(strategy, replicas)
    )  # fmt: skip
    return stages.step_s


def found_experts(
    config: ExplainConfig, names: Sequence[str], rate: float | None, local_rate: float | None
) -> tuple[ExplainConfig, list[Row]]:
    """The configuration with what the options of experts that say auto take, and rows on it. Raises ConfigError.

    rate, local_rate: in bits per second. Products of experts take no time: nobody has measured them.
    """
    stated = config.tables[EXPERTS]
    finds_ranks = stated.get("parallel") == AUTO
    if finds_ranks and (config.mesh is not None or config.stages is not None):
        raise ConfigError("--experts.parallel auto finds the expert axis: leave --mesh and --stages out")
    strategies = [strategy_of(name, config) for name in names]
    strategy = next(filter(averages_apart, strategies), strategies[0])
    links = links_of(config, rate, local_rate)
    shape = None if finds_ranks else mesh_of(config)
    if shape is not None and shape.expert == 1:
        return config, []
    found, rows = choose_experts(strategy, model_of(config), config, links, shape)
    table = {**stated, **found}
    if table.get("parallel") == 1:
        del table["parallel"]
    of = "" if rate or local_rate else ", links of usual rates"
    rows = [(asked, effect, f"{why}; strategy {strategy.name}{of}") for asked, effect, why in rows]
    return replace(config, tables={**config.tables, EXPERTS: table}), rows


def strategy_of(name: str, config: ExplainConfig) -> Method:
    """A strategy with its options. Raises ConfigError."""
    return build_strategy(name, config.tables, num_steps=NUM_STEPS, num_warmup_steps=NUM_WARMUP_STEPS)


def vocabulary_of(config: ExplainConfig, model: nn.Module) -> str:
    """A note if a preset's vocabulary is not its usual one, with the usual number of parameters."""
    own = PRESETS.get(config.model)
    if own is None or not isinstance(model, Llama) or model.config.vocab_size == own.vocab_size:
        return ""
    overrides = {**(config.tables.get(model_table(config.model) or "") or {}), "vocab_size": own.vocab_size}
    usual = build_skeleton(config.model, own.vocab_size, config.seq_len, overrides)
    return (
        f"the vocabulary is the {model.config.vocab_size:,} tokens of --tokenizer {config.tokenizer}; with the "
        f"{own.vocab_size:,} of {config.model}: {short(sum(param.numel() for param in usual.parameters()))}"
    )


def chosen(text: str, problems: Problems) -> list[str]:
    """The names in `a,b`, or all of them. Notes unknown ones."""
    names = list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    if not names:
        problems.messages.append("--strategy is empty: name at least one, or all")
    for name in names:
        if name not in STRATEGIES and name != "all":
            problems.messages.append(f"--strategy {name}: no such strategy{nearest(name, [*STRATEGIES, 'all'])}")
    return list(STRATEGIES) if "all" in names else [name for name in names if name in STRATEGIES]


def read(text: str | None, problems: Problems) -> float | None:
    """Bits per second; None if not stated. Notes a rate that can't be read."""
    if text is None:
        return None
    with problems.collect():
        rate = read_rate(text)
        if rate:
            return rate
        raise ConfigError(f"rate {text!r} must be above 0; nearest: '1mbit'")
    return None


def mesh_of(config: ExplainConfig) -> MeshShape:
    """The axes of the ranks. Raises ConfigError for a mesh that does not match the number of ranks."""
    num_ranks = config.nodes * config.local_size
    shape = MeshShape({"data": num_ranks}) if config.mesh is None else MeshShape.parse(config.mesh)
    shape = with_splits(config, shape)
    stages = config.num_stages
    if config.stages == AUTO and (config.mesh is not None or config.tensor not in (None, 1, AUTO)):
        raise ConfigError(
            f"--stages {AUTO} finds the mesh: leave --mesh and --tensor out; or --tensor {AUTO}, which is found too"
        )
    if config.tensor == AUTO and config.stages != AUTO:
        raise ConfigError(f"--tensor {AUTO} is found beside the stages; nearest: --stages {AUTO} --tensor {AUTO}")
    if stages is not None and stages != shape.pipeline:
        if config.mesh is not None:
            raise ConfigError(f"--stages {stages} beside --mesh {config.mesh}: leave one of them out")
        if num_ranks % stages:
            near = f"--stages {nearest_divisor(stages, num_ranks)}, or --nodes {stages} --local-size 1"
            raise ConfigError(f"--stages {stages}: must divide the {num_ranks} ranks; nearest: {near}")
        shape = MeshShape({"pipeline": stages, "data": num_ranks // stages})
    tensor, left = config.tensor if isinstance(config.tensor, int) else 1, shape.sizes["data"]
    if tensor > 1 and tensor != shape.tensor:
        if config.mesh is not None or left % tensor:
            raise ConfigError(
                f"--tensor {tensor}: must divide the {left} ranks of the data axis, and leave --mesh out; nearest: "
                f"--tensor {nearest_divisor(tensor, left)}"
            )
        shape = MeshShape({**shape.sizes, "data": left // tensor, "tensor": tensor})
    if shape.sizes.get("island") == config.nodes:
        shape = shape.without_islands()
    if shape.island_size is not None:
        raise ConfigError(
            f"--mesh {config.mesh}: here every node is an island of strategies that have any; nearest: "
            f"--nodes {shape.sizes['island']} --local-size {shape.island_size}, without --mesh"
        )
    if shape.world_size != num_ranks:
        raise ConfigError(
            f"--mesh {config.mesh} has {shape.world_size} ranks, and {config.nodes} nodes of {config.local_size} have "
            f"{num_ranks}: the two must be equal"
        )
    return shape


def check_can_cut(model: nn.Module) -> Llama:
    """The model, if its layers are known here. Raises ConfigError."""
    if type(model) is not Llama:
        raise ConfigError("stages: only presets such as demo, without experts, can be priced here")
    return model


def grid_of(config: ExplainConfig, rate: float | None, local_rate: float | None) -> Grid:
    """The machines; their speed is that of this process unless it is stated."""
    flops = matrix_flops(torch.float32, Device()) if config.gflops is None else config.gflops * 1e9
    own, inside = (None if each is None else each / 8 for each in (rate, local_rate))
    return Grid(config.nodes, config.local_size, flops, own, inside)


def found_stages(
    model: Llama, config: ExplainConfig, names: Sequence[str], grid: Grid, largest: int = LARGEST_MICRO_BATCH
) -> tuple[ExplainConfig, Search]:
    """The configuration with the fastest candidate in place of "auto". Raises ConfigError if none fits.

    largest: micro-batch.
    """

    def stated_of(way: Candidate) -> ExplainConfig:
        return replace(config, stages=str(way.stages), tensor=way.tensor, micro_batches=way.num_micro_batches)

    def on(way: Candidate) -> Twins:
        method, own = made[way.strategy], stated_of(way)
        if way.tensor > 1:
            check_on_mesh(method)
        if way.stages > 1:
            check_inside(method, way.replicas)
        return Twins(method, replicas_on(own, mesh_of(own)))

    def planned(way: Candidate, part: nn.Module) -> MethodPlan:
        own = stated_of(way)
        return plan_on(made[way.strategy], part, model, own, mesh_of(own))

    made = {name: strategy_of(name, config) for name in names}
    num_sequences, stated = grid.num_ranks * config.passes * config.micro_batch, config.tables.get(PIPELINE, {})
    tensors = tensor_sizes(model.config, grid.local_size) if config.tensor == AUTO else [1]
    listed = candidates(
        grid.num_ranks, len(model.model.layers), num_sequences, names, stated, largest, AxisSizes(tensors)
    )
    memory = None if config.memory_gb is None else config.memory_gb * 1e9
    result = search(model, listed, on, planned, grid, config.seq_len, memory, config.loss)
    if not result.fastest:
        floor = f"the least is {enough_text(result.too_large[0].memory_bytes)}" if result.too_large else "none can run"
        raise ConfigError(f"--memory-gb {config.memory_gb}: no way to train fits; {floor}", *result.refused)
    best = result.fastest[0].candidate
    tensor = best.tensor if best.tensor > 1 else None
    tables = {**config.tables, PIPELINE: {**stated, **best.options}} if best.stages > 1 else config.tables
    chosen_one = replace(
        config, stages=str(best.stages), tensor=tensor, strategy=best.strategy, tables=tables,
        micro_batch=best.micro_batch, micro_batches=best.num_micro_batches,
    )  # fmt: skip
    return chosen_one, result


def notes_on_stages(found: Stages, model: Llama, config: ExplainConfig, grid: Grid) -> Iterator[Row]:
    """Rows about the cut, the borders and the step."""
    yield from found.options.describe(found.sizes, model.config.hidden_size, 4)
    num = config.passes
    sent = sorted(found.link_bytes.items())
    effect = ", ".join(f"{source} to {target} {bytes_text(num_bytes)}" for (source, target), num_bytes in sent)
    yield "stages send in a step", effect, f"{num} micro-batch(es) of {config.micro_batch} sequence(s)"
    effect = f"{seconds_text(found.step_s)}, of which {percent_text(found.bubble)} idle in the busiest stage"
    how = "measured here" if config.gflops is None else "stated"
    yield "forwards, backwards and borders", effect, f"simulated; a rank does {short(grid.flops)} FLOP/s, {how}"
    if found.tied_bytes:
        tied = bytes_text(found.tied_bytes)
        where = "between the first and the last stage, in these seconds"
        yield "tied embedding and head", f"{tied} a step each way", where


def plan_on(
    strategy: Method, model: nn.Module, whole: nn.Module, config: ExplainConfig, shape: MeshShape
) -> MethodPlan:
    """The plan of a strategy on the data axis of a mesh; the ranks' word on a step goes to all of the mesh.

    model: what a rank has of the `whole` one, in whose parameters the word has room.
    """
    if shape.expert > 1:
        return expert_plan(strategy, whole, config, shape)
    grid = Topology(config.nodes, config.local_size)
    if shape.tensor * shape.pipeline == 1:
        plan, _ = by_tokens(strategy.plan(model, grid, config.passes), strategy, model, grid, tokens_of(config))
        is_adamw = name_of(config.optimizer) == ADAMW
        return plan if is_adamw else by_optimizer(plan, strategy, model, config.optimizer, grid)
    if isinstance(strategy, IslandsMethod):
        return strategy.plan_around(model, whole, grid, config.passes, shape.tensor)
    plan = strategy.plan(model, replicas_on(config, shape), config.passes)
    num_told = max(2, shape.sizes["data"]) - 1
    word = strategy.plan(whole, Topology(num_told + 1, 1), 1).sent["all_gather_exact", "inter"] // num_told
    words = {("all_gather_exact", level): sent for level, sent in gather_bytes(grid, word).items()}
    return replace(plan, sent={**plan.sent, **words})


def replicas_on(config: ExplainConfig, shape: MeshShape) -> Topology:
    """The grid of the ranks of one stage that a strategy joins."""
    grid = Topology(config.nodes, config.local_size)
    if shape.tensor * shape.pipeline == 1:
        return grid
    across = config.tables.get(PIPELINE, {}).get("across", AUTO)
    first = ranks_across(across, grid.world_size, shape.pipeline, shape.tensor)[0, :, 0].tolist()
    on_node = along(grid, first)
    return Topology(len(first) // on_node, on_node)


def tokens_of(config: ExplainConfig) -> int:
    """Tokens of a rank's step."""
    return config.passes * config.micro_batch * config.seq_len


def sequence_notes(
    config: ExplainConfig, llama: LlamaConfig, shape: MeshShape, rate: float | None, local_rate: float | None
) -> list[Row]:
    """Rows about the ranks that share a sequence, whose messages the plans do not count. Raises ConfigError.

    rate, local_rate: in bits per second.
    """
    asked = config.tables.get(SEQUENCE, {})
    size = shape.sequence
    options = SequenceParallel(**{**asked, "parallel": size})
    if size == 1:
        return []
    heads, kv_heads = llama.num_attention_heads, llama.num_key_value_heads
    tokens, itemsize = config.micro_batch * config.seq_len, 2 if config.dtype == "bf16" else 4
    attention = Shape(heads, kv_heads, llama.hidden_size // heads, tokens, llama.num_hidden_layers, itemsize)
    local_size = math.gcd(config.local_size, size)
    inter, intra = (usual if each is None else each / 8 for each, usual in ((rate, RATE), (local_rate, LOCAL_RATE)))
    links = Network.even(size, inter, DELAY_S, local_size=local_size, local_rate=intra)
    return facts(options, attention, config.seq_len, config.passes, local_size, links)


def tensor_note(config: LlamaConfig, seq_len: int, shape: MeshShape) -> tuple[str, str, str]:
    """Row about torch's own traffic on the tensor axis, which the plans do not count."""
    layers = -(-config.num_hidden_layers // shape.pipeline)
    sent = activation_bytes(config, seq_len, shape.tensor, layers)
    why = "four all_reduce of the activations in every layer, in fp32 by torch; not in the table"
    return f"tensor axis of {shape.tensor} ranks", f"{bytes_text(sent)} a rank for each sequence of a step", why


def notes_on_methods(methods: Mapping[str, Method]) -> Iterator[Row]:
    """Rows about strategies that compute more than others."""
    for name, method in methods.items():
        if method.num_passes > 1:
            yield f"computing of {name}", f"{method.num_passes} times that of others", MORE_PASSES


def notes_on_tables(methods: Mapping[str, Method], plans: Mapping[str, MethodPlan], laid: LaidOut) -> Iterator[Row]:
    """Rows about embeddings whose gradients travel by rows, where the plans count them so."""
    if laid.shape.expert * laid.shape.tensor * laid.shape.pipeline > 1:
        return
    grid = Topology(laid.config.nodes, laid.config.local_size)
    for name, method in methods.items():
        for asked, effect, why in by_tokens(plans[name], method, laid.model, grid, tokens_of(laid.config))[1]:
            yield f"{name}: {asked}", effect, why


def notes_on_ranks(laid: LaidOut, rate: float | None, local_rate: float | None) -> Iterator[Row]:
    """Rows about what ranks share besides the plans. Raises ConfigError for what they can't."""
    config, shape, model = laid.config, laid.shape, laid.model
    if isinstance(model, Llama):
        yield from sequence_notes(config, model.config, shape, rate, local_rate)
        yield from capacity_notes(model, config, shape)
        if shape.expert > 1:
            yield from expert_notes(model, config, shape)
    if rate is not None and config.nodes > 1:
        name = config.model if config.parameters is None else f"a model of {short(config.parameters)} parameters"
        yield "method for this rate", *recommended(rate, name)
    if isinstance(model, Llama) and shape.tensor > 1:
        yield tensor_note(model.config, config.seq_len, shape)


def model_of(config: ExplainConfig) -> nn.Module:
    """The model, or a stand-in with that many parameters, on the device "meta". Raises ConfigError."""
    if config.parameters is not None:
        return stand_in(int(config.parameters))
    tokenizer = load_tokenizer(config.tokenizer)
    overrides = config.tables.get(model_table(config.model) or "")
    return build_skeleton(config.model, tokenizer.vocab_size, config.seq_len, overrides)


def stand_in(num_parameters: int) -> nn.Module:
    """Layers of one matrix each, of nearly equal sizes, and one matrix of a single row for the remainder."""
    rows, rest = divmod(num_parameters, WIDTH)
    sizes = [(rows // NUM_LAYERS + (layer < rows % NUM_LAYERS), WIDTH) for layer in range(NUM_LAYERS)]
    shapes = [shape for shape in (*sizes, (1, rest)) if shape[0] * shape[1]]
    model = nn.Module()
    model.layers = nn.ModuleList(matrix(shape) for shape in shapes)
    return model


def matrix(shape: tuple[int, int]) -> nn.Module:
    """A module with one weight."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(shape, device="meta"))
    return module


def notes_on(config: ExplainConfig, names: list[str], counts: bool, searched: bool) -> Iterator[Row]:
    """Rows about options without an effect.

    counts: activations without stages are counted. searched: the number of stages was found.
    """
    used = {strategy_table(name) for name in names}
    used |= {model_table(config.model)} if config.parameters is None else set()
    used |= {table for table in (SEQUENCE, EXPERTS) if config.tables.get(table, {}).get("parallel", 1) > 1}
    used |= {EXPERTS} if "expert" in (config.mesh or "") else set()
    used |= {PIPELINE} if config.stages is not None or "pipeline" in (config.mesh or "") else set()
    used |= {RESIDENCY} if config.memory is not None else set()
    for table in sorted(config.tables.keys() - used):
        for option in config.tables[table]:
            yield flag(f"{table}.{option}"), "no effect", "nothing that is explained uses it"
    if config.dtype != ExplainConfig().dtype and not used & {SEQUENCE, EXPERTS} and EXPERTS not in config.tables:
        yield f"--dtype {config.dtype}", "no effect", "it is of rows that travel, to experts or in a sequence"
    for name in ("model", "tokenizer", "seq_len") if config.parameters is not None else ():
        if getattr(config, name) != getattr(ExplainConfig(), name):
            yield f"{flag(name)} {getattr(config, name)}", "no effect", "--parameters stands for the model"
    for name in ("disk_rate", "activations", "slices") if config.memory is None else ():
        if (stated := getattr(config, name)) is not None:
            yield f"{flag(name)} {stated}", "no effect", "nothing is placed without --memory"
    if config.stages is None:
        of_pass = () if counts or used & {SEQUENCE, EXPERTS} or config.memory is not None else ("micro_batch",)
        of_step = () if config.memory is not None else ("gflops",) if counts else ("gflops", "loss")
        for name in (*of_pass, *of_step, "memory_gb"):
            if getattr(config, name) != getattr(ExplainConfig(), name):
                yield f"{flag(name)} {getattr(config, name)}", "no effect", "it is for --stages"
    elif config.memory_gb and not searched and config.tables.get(PIPELINE, {}).get("recompute") != AUTO:
        yield (
            f"--memory-gb {config.memory_gb:g}",
            "no effect",
            f"it is for --stages {AUTO} and --pipeline.recompute {AUTO}",
        )
    if config.rate is not None and config.nodes == 1:
        yield f"--rate {config.rate}", "no effect", "there is one node"
    if config.local_rate is not None and config.local_size == 1:
        yield f"--local-rate {config.local_rate}", "no effect", "there is one rank on each node"
