"""The rows of the start-up table: what was asked for, what is in effect, and why they differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from thinwire.codecs import TopK
from thinwire.errors import counted
from thinwire.flags import flag
from thinwire.methods.outer.base import IslandsMethod
from thinwire.methods.pipeline import Costs, simulate
from thinwire.optim.schedule import FINAL_SHARE, lr_at
from thinwire.options import EXPERTS, LAYOUT_TABLES, LLAMA, MOE, PIPELINE, SEQUENCE
from thinwire.run.config import DEFAULTS, FIXED_ON_RESUME, NOT_WRITTEN, Batch, TrainConfig
from thinwire.run.run import Run
from thinwire.table import Row

NONE = "no effect"
# Of a pipeline's step; beyond it the table gives advice.
MOST_IDLE = 0.25


def batch_row(config: TrainConfig, batch: Batch, world_size: int) -> Row:
    asked = f"--tokens-per-step {config.tokens_per_step or 'by default'}, --micro-batch {config.micro_batch}"
    shape = config.mesh_shape
    who, passes = f"{world_size} ranks", "passes"
    if shape.pipeline > 1:
        who, passes = f"{world_size} pipeline(s)", "micro-batches"
    elif shape.shared > 1:
        who = f"{world_size} group(s) of {shape.shared} ranks"
    effect = (
        f"{batch.tokens_per_step} tokens per optimizer step = {who} x {batch.accumulation} {passes} x "
        f"{batch.micro_batch} sequences x {config.seq_len} tokens"
    )
    return asked, effect, ""


def rate_row(config: TrainConfig) -> Row:
    """The row about the learning rate over the run."""
    num = config.num_warmup_steps
    end = "the end" if config.minutes else f"step {config.steps}"
    begins = f"rises to {config.lr:g}" + ("" if config.minutes else f" by step {num}")
    if not num and not config.minutes:
        begins = f"begins at {config.lr:g}"
    effect = f"the learning rate {begins}, then falls along a cosine to {config.lr * FINAL_SHARE:.3g} at {end}"
    return f"--lr {config.lr:g}, --weight-decay {config.weight_decay:g}", effect, ""


def pipeline_rows(run: Run, batch: Batch) -> Iterator[Row]:
    """A row about how well micro-batches fill a pipeline."""
    stages, num = run.config.mesh_shape.pipeline, batch.accumulation
    if run.pipeline is not None and stages > 1:
        plan = run.pipeline.plan_of(stages, num)
        found = simulate(plan, Costs.even(len(plan.home)))
        idle = sum(found.idle_s) / (stages * found.makespan_s)
        advice = "a smaller --micro-batch, or more --tokens-per-step, fills it better" if idle > MOST_IDLE else ""
        effect = f"{num} micro-batches a step: stages of equal speed are idle for {idle:.0%} of it with plan "
        yield f"--stages {stages}", f"{effect}{run.pipeline.plan}, without the time of links", advice


def unused_rows(run: Run) -> Iterator[Row]:
    """A row for every option that was stated and has no effect."""
    config = run.config
    splits = {SEQUENCE: config.sequence, EXPERTS: config.experts}
    for table in sorted(config.tables.keys() - run.used_tables):
        owner = f"model {config.model}" if table in (LLAMA, MOE) else f"strategy {config.strategy}"
        owner = "a model without --stages" if table == PIPELINE else owner
        owner = f"a run without --{table}.parallel" if table in splits else owner
        for option in config.tables[table]:
            if option == "parallel" and splits.get(table) == 1:
                continue
            yield flag(f"{table}.{option}"), NONE, f"{owner} does not use it"
    reads_fields = config.data.startswith("hf:") or config.data.endswith((".jsonl", ".parquet"))
    clips_nothing = not run.strategy.has_mean_gradient
    pointless = {
        "text_field": (not reads_fields and not folder_like(config.data), f"data {config.data} has no fields"),
        "join": (config.nodes == 1, "there is one machine"),
        "inner": (not run.has_islands, f"strategy {config.strategy} has no islands"),
        "restarts": (
            not run.has_islands and not run.recovers,
            f"{config.strategy} has no islands, and no stage recovers",
        ),
        "prompt": (config.sample_tokens == 0, "no tokens are generated"),
        "grad_clip": (
            clips_nothing,
            f"no rank of {config.strategy} has the mean gradient, so no norm to clip",
        ),
        "weight_decay": (config.lr == 0, "the learning rate is 0"),
    }
    for name, (is_pointless, reason) in pointless.items():
        if is_pointless and getattr(config, name) != getattr(DEFAULTS, name):
            yield flag(name), NONE, reason
    if config.minutes is not None:
        return
    if config.stop_at is not None and config.stop_at >= config.steps:
        yield f"{flag('stop_at')} {config.stop_at}", NONE, f"the run ends after {config.steps} steps anyway"
    if config.num_warmup_steps > config.steps:
        warning = f"the run ends after {config.steps}, before the learning rate reaches its peak"
        yield f"{flag('warmup_steps')} {config.num_warmup_steps}", "never finishes", warning


def late_rows(run: Run) -> Iterator[Row]:
    """A row if the run ends while the strategy still behaves differently, as in exact first steps or a warm-up."""
    settled, steps = 0 if run.has_islands else run.strategy.settled_after, run.config.steps
    if settled >= steps and run.config.minutes is None:
        yield (
            f"{flag('strategy')} {run.config.strategy}",
            "not in full",
            f"its first {settled} steps differ from the others, and the run ends after {steps}",
        )


def sparse_rows(run: Run) -> Iterator[Row]:
    """A row if islands exchange so few elements, so rarely, that most are not sent once in the run."""
    if not isinstance(run.strategy, IslandsMethod) or run.config.minutes is not None:
        return
    outer, steps = run.strategy.outer(), run.config.steps
    density = outer.codec.density if isinstance(outer.codec, TopK) else 1.0
    num = steps // outer.sync_every
    if num * density < 1 and density < 1:
        why = f"{counted(num, 'exchange')} in {steps} steps send at most {num * density:.0%} of the elements"
        ways = [f"topk{100 / num:.2g}%"] if num > 1 else []
        ways += [f"sync_every {every}"] if (every := int(steps * density)) else []
        way = f"take {' or '.join(ways)}" if ways else "train longer, or take a larger density"
        yield f"density {density:.4g} every {outer.sync_every} steps", "little is sent", f"{why}; {way}"


def folder_like(data: str) -> bool:
    """Whether the data may hold .jsonl or .parquet files among others."""
    return data != "stdlib" and "." not in data.rpartition("/")[2]


def stretched_rows(saved: TrainConfig, new: TrainConfig, step: int) -> Iterator[Row]:
    """A row about the learning rate of a run that goes on after a step, if it now has another number of steps.

    saved: the configuration of the run that took the step.
    """
    if saved.steps == new.steps or step >= new.steps:
        return
    (before, after), verb = (
        lr_at(at, peak=config.lr, num_warmup_steps=config.num_warmup_steps, num_steps=config.steps)
        for at, config in ((step, saved), (step + 1, new))
    ), "stretched" if new.steps > saved.steps else "shortened"  # fmt: skip
    why = f"the schedule is {verb}: step {step} was one of {saved.steps}, and is one of {new.steps}"
    yield "resume: the learning rate", f"{before:.3g} at step {step}, {after:.3g} at step {step + 1}", why


def resume_rows(old: TrainConfig, new: TrainConfig) -> Iterator[Row]:
    """A row for every value that a resumed run changes and may change."""
    for item in fields(TrainConfig):
        before, after = getattr(old, item.name), getattr(new, item.name)
        if before != after and item.name not in (*NOT_WRITTEN, *FIXED_ON_RESUME):
            # Such as a mesh: nothing was stated.
            now, then = ("none" if value is None else str(value) for value in (after, before))
            yield f"resume: {flag(item.name)} {now}", now, f"was {then} until the checkpoint"
    for table, kind in LAYOUT_TABLES.items():
        stated = old.tables.get(table, {}), new.tables.get(table, {})
        for name in sorted({*stated[0], *stated[1]}):
            before, after = (each.get(name, getattr(kind(), name)) for each in stated)
            if before != after:
                option = flag(f"{table}.{name}")
                yield f"resume: {option} {after}", f"{after}", f"was {before} until the checkpoint"
