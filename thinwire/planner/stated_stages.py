"""Stages of a pipeline on stated links: those that are asked for, or the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from thinwire.errors import ConfigError
from thinwire.layout.mesh import MeshShape
from thinwire.losses import loss_in_effect
from thinwire.methods.interface import Method, MethodPlan
from thinwire.methods.pipeline.cut import SPREAD
from thinwire.methods.pipeline.inside import check_inside, check_spread
from thinwire.methods.pipeline.options import Pipeline
from thinwire.models import Llama
from thinwire.models.tensor import cut_skeleton, tensor_sizes
from thinwire.options import PIPELINE
from thinwire.planner.asked import check_can_cut, mesh_of, model_of, strategy_of
from thinwire.planner.candidates import LARGEST_MICRO_BATCH, AxisSizes, Candidate, candidates
from thinwire.planner.mesh_plans import plan_on, replicas_on
from thinwire.planner.options import AUTO, ExplainConfig
from thinwire.planner.search import Search, search
from thinwire.planner.stages import Grid, Stages, held_bytes, stages_of
from thinwire.planner.twins import Twins
from thinwire.registry import check_on_mesh
from thinwire.report.units import bytes_text, enough_text, percent_text, seconds_text, short
from thinwire.table import Row


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
