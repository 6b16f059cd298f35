"""Memory and traffic of strategies on a cluster, by their own formulas, over a model without memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from thinwire.collectives import Topology
from thinwire.errors import ConfigError, Problems
from thinwire.layout.mesh import axes_of
from thinwire.methods.experts import averages_apart
from thinwire.methods.interface import Method, MethodPlan
from thinwire.methods.outer.base import IslandsMethod
from thinwire.methods.pipeline.inside import check_inside, why_not_inside
from thinwire.models.seam import mixture_of
from thinwire.models.tensor import cut_skeleton
from thinwire.options import EXPERTS
from thinwire.planner.asked import check_can_cut, grid_of, links_of, mesh_of, model_of, strategy_of, vocabulary_of
from thinwire.planner.experts import ExpertWay, choose_experts, side_by_side
from thinwire.planner.explained_notes import (
    LaidOut,
    activations_on,
    notes_on,
    notes_on_methods,
    notes_on_ranks,
    notes_on_tables,
)
from thinwire.planner.mesh_plans import plan_on
from thinwire.planner.optimizers import ADAMW, COUNTED, counted_by, why_not_by
from thinwire.planner.options import AUTO, ExplainConfig, chosen, range_errors, read
from thinwire.planner.residency import PLACED, Resident, stated_options, where_all_lies
from thinwire.planner.search import Search
from thinwire.planner.stages import Grid, Stages
from thinwire.planner.stated_stages import cut_into_stages, found_stages
from thinwire.registry import check_on_mesh
from thinwire.run.optimizer import check_fits, check_mesh, name_of, read_optimizer
from thinwire.table import Row

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
        optimizers: whose state and messages are counted, by strategy.
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
    optimizers: Mapping[str, str] = field(default_factory=dict)
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


def explain(config: ExplainConfig, problems: Problems) -> Explained:
    """Plans of all strategies. Raises ConfigError with all problems at once."""
    out_of_range = list(range_errors(config))
    problems.messages += out_of_range
    rates = read(config.rate, problems), read(config.local_rate, problems)
    options = problems.note(stated_options, config)
    if options is not None:
        config = replace(config, memory=options.get("memory"))
    searched_all = config.stages == AUTO and config.strategy == "all"
    if searched_all:
        config = replace(config, strategy=",".join(SEARCHED))
    places_default = config.memory is not None and config.strategy == "all"
    if places_default:
        config = replace(config, strategy=PLACED)
    names = chosen(config.strategy, problems)
    made = {name: found for name in names if (found := problems.note(strategy_of, name, config)) is not None}
    config = replace(config, optimizer=problems.note(asked_optimizer, config, list(made.values())))
    laid, asked = None, config
    if not out_of_range:
        with problems.collect():
            laid = laid_out(config, names, *rates)
            config, names = laid.config, laid.names
    methods: dict[str, Method] = {}
    plans: dict[str, MethodPlan] = {}
    held: dict[str, dict[int, float]] = {}
    left_out: dict[str, list[str]] = {}
    for name in names:
        if laid is None or name not in made:
            continue
        with problems.collect():
            if why := why_left_out(made[name], laid):
                left_out.setdefault(why, []).append(name)
            else:
                methods[name], (plans[name], held[name]) = made[name], plan_of(made[name], laid)
    if laid is not None and not plans and not problems.messages:
        near = f"counted are {', '.join(COUNTED)}; nearest: {ADAMW}"
        problems.messages.append(f"--optimizer {config.optimizer}: no strategy's plan counts its state; {near}")
    resident: Resident | None = None
    if options is not None and config.memory is not None and laid is not None and len(plans) == len(names):
        with problems.collect():
            resident = where_all_lies(config, options, names, strategy_of, laid.model)
    problems.raise_any()
    assert laid is not None
    notes = [*laid.notes]
    notes += [(f"strategies: {', '.join(without)}", "left out", why) for why, without in left_out.items()]
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
        laid.stages, held, laid.grid, laid.search, resident,
        {name: optimizer_in(method, laid) for name, method in methods.items()}, kept,
        expert_ways(asked, laid, list(methods.values()), *rates),
    )  # fmt: skip


def asked_optimizer(config: ExplainConfig, methods: Sequence[Method]) -> str | None:
    """The stated optimizer. Raises ConfigError for what `thinwire train` refuses: for a strategy that was named."""
    if config.optimizer is None:
        return None
    named = methods if config.strategy != "all" else []
    fitting = dict.fromkeys(name for method in named for name in method.optimizers)
    optimizer, _ = read_optimizer(config.optimizer, fitting or COUNTED)
    problems = Problems()
    for method in named:
        problems.note(check_fits, optimizer, method)
    problems.raise_any()
    return config.optimizer


def optimizer_in(strategy: Method, laid: LaidOut) -> str:
    """The optimizer whose state a strategy's plan counts; of parts of a model AdamW's, but for islands' own."""
    optimizer = counted_by(strategy, laid.config.optimizer)
    cut = 1 if isinstance(strategy, IslandsMethod) else laid.shape.tensor * laid.shape.pipeline
    is_cut = cut * laid.shape.expert > 1
    return ADAMW if is_cut and name_of(optimizer) in COUNTED else optimizer


def expert_ways(
    asked: ExplainConfig, laid: LaidOut, methods: Sequence[Method], rate: float | None, local_rate: float | None
) -> list[ExpertWay]:
    """The ways of a mixture's rows beside each other, for one strategy, where options of experts are stated."""
    is_asked = EXPERTS in asked.tables or "expert" in axes_of(asked.mesh)
    if not is_asked or len(methods) != 1 or not averages_apart(methods[0]) or mixture_of(laid.whole) is None:
        return []
    has_other_axes = laid.shape.pipeline * laid.shape.tensor > 1 or asked.memory is not None
    return [] if has_other_axes else side_by_side(methods[0], laid.whole, asked, links_of(asked, rate, local_rate))


def laid_out(config: ExplainConfig, names: list[str], rate: float | None, local_rate: float | None) -> LaidOut:
    """The model on the ranks, with what "auto" finds. rate, local_rate: in bits per second. Raises ConfigError."""
    notes: list[Row] = []
    if AUTO in config.tables.get(EXPERTS, {}).values():
        config, notes = found_experts(config, names, rate, local_rate)
    shape = mesh_of(config)
    cut = config.stages or shape.tensor * shape.pipeline * shape.expert > 1
    if config.optimizer is not None:
        optimizer = name_of(config.optimizer)
        check_mesh(optimizer, shape)
        if cut and optimizer in COUNTED and optimizer != ADAMW:
            raise ConfigError(
                f"--optimizer {config.optimizer}: counted on the data axis alone: leave --mesh, --stages and --tensor "
                "out; nearest: leave --optimizer out"
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
            raise ConfigError(f"--optimizer {optimizer}: strategy {strategy.name} {reason}; nearest: leave it out")
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
