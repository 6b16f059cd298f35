"""Prints the output of `thinwire explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Column, Table

from thinwire.errors import Problems
from thinwire.methods.interface import MethodPlan
from thinwire.methods.memory import MemoryPart
from thinwire.planner.experts import ExpertWay
from thinwire.planner.explain import MOST_BY_STAGE, Explained, explain
from thinwire.planner.options import ExplainConfig
from thinwire.planner.recipes import print_recipe
from thinwire.planner.search import Search
from thinwire.planner.stages import Stages
from thinwire.report.units import bytes_text, enough_text, percent_text, seconds_text, short

# Width of the table where the output is not a terminal.
PLAIN_WIDTH = 220
LEVELS = {"pair": "inside a pair", "intra": "inside a node", "inter": "between nodes"}
MEANINGS = {
    "weights": "held through the step",
    "gradients": "at the end of backward",
    "optimizer": "what it remembers, and fp32 masters where they are not the weights",
    "weights before the ascent": "during the second forward and backward of a step",
    "passing": "weights and gradients gathered for the part of the model that computes; at most",
}
# Of what a method does not count.
BESIDE = {
    "activations": "of the micro-batches whose backwards are to come",
    "last messages": "of sequences, at each border, for delta; at most",
}
FOOT = "fp32, {}. {}Bytes are payload that one rank sends in a step."
# Candidates that are shown.
MOST_SHOWN = 8


def print_explained(config: ExplainConfig, problems: Problems) -> None:
    """Print what the configuration asks for. Raises ConfigError with everything that is wrong."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(PLAIN_WIDTH, console.width)
    if config.recipe is not None:
        problems.raise_any()
        print_recipe(config, console)
        return
    found = explain(config, problems)
    for table in tables(found):
        console.print(table)
    has_activations = found.stages is not None or found.activations is not None
    besides = "" if has_activations else "activations, and "
    left_out = f"Not counted: {besides}scratch memory for the packets of a few buckets. "
    console.print(FOOT.format(optimizers_text(found), "" if found.resident is not None else left_out))
    for line in reasons(found):
        console.print(line)
    for asked, effect, why in found.notes:
        console.print(f"{asked}: {effect}" + (f" ({why})" if why else ""))


def optimizers_text(found: Explained) -> str:
    """The optimizer of most strategies, and those of the others."""
    by_name: dict[str, list[str]] = {}
    for strategy, optimizer in found.optimizers.items():
        by_name.setdefault(optimizer, []).append(strategy)
    most, *others = sorted(by_name, key=lambda name: -len(by_name[name]))
    told = "; ".join(f"{', '.join(by_name[name])}: {name}" for name in others)
    return f"{most} ({told})" if told else most


def reasons(found: Explained) -> Iterator[str]:
    """Why figures of some strategies are not what a reader expects."""
    if found.search is not None:
        yield columns_told()
        yield from reasons_of(found.search)
    if found.stages is not None:
        at = " or ".join(map(str, sorted(set(found.heaviest.values()))))
        yield (
            f"Memory is that of the fullest stage, {at}. Bytes are those between a stage's replicas; "
            "seconds on the link are the busiest node's, borders between stages included."
        )
        if len(found.held) > MOST_BY_STAGE:
            yield f"For the memory of every stage name at most {MOST_BY_STAGE} strategies, such as --strategy zero."
    for every in sorted(set(found.mean_over.values())):
        names = [name for name, steps in found.mean_over.items() if steps == every]
        verb = "exchange" if len(names) > 1 else "exchanges"
        mean = f"the bytes of a step are the mean over {every} steps"
        yield f"* {', '.join(names)}: {verb} once in {every} steps, so {mean}."
    doubled = [name for name, plan in found.plans.items() if plan.gradients > plan.weights]
    if doubled and found.stages is not None:
        yield (
            f"Gradients of {', '.join(doubled)}: those of each parameter, and this rank's part of their mean; "
            "the part is all of it where a stage has one replica."
        )
    if found.whole:
        whole = ", ".join(found.whole)
        why = "on a slow link a second gather would cost more than the memory"
        yield f"{whole}: weights are the rank's shard and the whole model, kept from forward to backward; {why}."


def tables(found: Explained) -> list[Table]:
    """A table of all strategies; for a single strategy also tables of its parts."""
    made = [] if found.search is None else [ranking(found.search)]
    made += [side_by_side(found)]
    made += [] if found.stages is None else [stage_by_stage(found.stages, found.held)]
    made += [] if found.resident is None else [parts_of_residency(found.resident.parts)]
    if len(found.plans) == 1:
        (plan,) = found.plans.values()
        (steps,) = found.mean_over.values() or (1,)
        between = "" if found.stages is None else " between the replicas of a stage"
        (name,) = found.plans
        kept = {"activations": found.activations_of(name), "last messages": found.last_messages_of(name) or None}
        # Under a budget, the table of what lies where has the parts.
        made += [parts_of_memory(plan, kept)] if found.resident is None else []
        made += [parts_of_traffic(plan, steps, between)]
    made += [ways_of_experts(found.expert_ways)] if found.expert_ways else []
    return made


def side_by_side(found: Explained) -> Table:
    """A table with a row for each strategy."""
    title = (
        f"{short(found.num_parameters)} parameters on {found.topology}, {found.micro_batches} micro-batch(es) a step: "
        "memory of one rank, and what it sends in a step"
    )
    title += f"\n{found.vocabulary}" if found.vocabulary else ""
    has_pair = any(plan.sent_on("pair") for plan in found.plans.values())
    levels = [level for level in LEVELS if level != "pair" or has_pair]
    seconds = [("on the link", found.link_s, found.rate), ("inside", found.local_s, found.local_rate)]
    seconds = [entry for entry in seconds if entry[2] is not None]
    memory = {name: memory_of(found, name) for name in found.plans}
    heads = [*next(iter(memory.values())), *(LEVELS[level] for level in levels), *(head for head, _, _ in seconds)]
    table = Table(Column("strategy", overflow="fold"), title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right")
    for name, plan in found.plans.items():
        sent = [plan.sent_on(level) for level in levels]
        times = [seconds_text(value) for _, of, _ in seconds if (value := of(plan)) is not None]
        marked = f"{name} *" if name in found.mean_over else name
        table.add_row(marked, *map(bytes_text, [*memory[name].values(), *sent]), *times)
    return table


def memory_of(found: Explained, name: str) -> dict[str, float]:
    """What a rank has of a strategy, in bytes, by column; under a budget all of it, in memory and on the disk."""
    if found.resident is not None:
        parts = found.resident.parts
        return {"memory": sum(part.memory for part in parts), "disk": sum(part.disk for part in parts)}
    plan = found.plans[name]
    held: dict[str, float] = {part: getattr(plan, part) for part in ("weights", "gradients", "optimizer", "passing")}
    held["other"] = sum(plan.other.values())
    if (kept := found.activations_of(name)) is not None:
        held["activations"] = kept
    if any(map(found.last_messages_of, found.plans)):
        held["last messages"] = found.last_messages_of(name)
    return held | {"memory": sum(held.values())}


def stage_by_stage(stages: Stages, held: Mapping[str, Mapping[int, float]]) -> Table:
    """A table with a row for each stage of a pipeline. held: see Explained."""
    heads = ("layers", "parameters", "in flight", "activations", "sent to others", "idle")
    table = Table("stage", title="a step of the pipeline", title_justify="left")
    for head in heads:
        table.add_column(head, justify="right")
    known = held if len(held) <= MOST_BY_STAGE else {}
    for name in known:
        table.add_column(f"memory, {name}", justify="right")
    home = stages.options.home(len(stages.parts))
    for stage, part in enumerate(stages.parts):
        layers = "+".join(str(size) for size, at in zip(stages.sizes, home, strict=True) if at == stage and size)
        idle = stages.idle_s(stage) / stages.timeline.makespan_s
        table.add_row(
            str(stage), layers, short(sum(param.numel() for param in part.parameters())), str(stages.held[stage]),
            bytes_text(stages.peak_bytes[stage]), bytes_text(stages.sent_bytes(stage)), percent_text(idle),
            *(bytes_text(sizes[stage]) for sizes in known.values()),
        )  # fmt: skip
    return table


def ranking(found: Search) -> Table:
    """A table of the fastest ways to train, best first."""
    title = f"ways to train, fastest first: {len(found.fastest)} fit"
    table = Table("a step", title=title, title_justify="left")
    for head in ("memory", "idle", "on the link", "mesh", "micro-batches x sequences", "strategy"):
        table.add_column(head, justify="right")
    for head in ("plan", "borders", "recompute"):
        table.add_column(head)
    for priced in found.fastest[:MOST_SHOWN]:
        way = priced.candidate
        table.add_row(
            seconds_text(priced.step_s), bytes_text(priced.memory_bytes), percent_text(priced.bubble),
            seconds_text(priced.link_s), way.layout,
            f"{way.num_micro_batches} x {way.micro_batch}", way.method,
            *((way.pipeline.plan, way.borders, way.pipeline.recompute) if way.stages > 1 else ("", "", "")),
        )  # fmt: skip
    return table


def columns_told() -> str:
    """What the columns of `ranking` mean."""
    return (
        "micro-batches x sequences: the passes of one rank in a step, or the micro-batches of one pipeline, and the "
        "sequences in each. idle: the share of a step without computing. on the link: of the busiest node's link alone."
    )


def reasons_of(found: Search) -> Iterator[str]:
    """Why the first candidate was chosen, and what is not in the table."""
    best = found.fastest[0]
    yield f"Fastest, by the simulation: {best.candidate.flags}"
    for cut, other in found.fastest_of_cuts[1:]:
        what, more = "a step takes", ""
        if other.steps != best.steps:
            what, instead = "the way to the loss takes", f"{seconds_text(best.step_s)} and {best.steps:.3g}"
            more = f" a step and {other.steps:.3g} times the tokens of exact training, in place of {instead}"
        yield (
            f"With {cut} {what} {other.score / best.score:.2f} times as long, {seconds_text(other.step_s)}{more}: "
            f"messages need {seconds_text(other.link_s)} of the busiest link, in place of {seconds_text(best.link_s)}."
        )
    if found.too_large:
        least = found.too_large[0]
        yield (
            f"{len(found.too_large)} more do not fit into a rank's memory; the smallest needs "
            f"{enough_text(least.memory_bytes)}: {least.candidate.flags}"
        )
    for reason, priced in found.aside.items():
        first = priced[0]
        yield (
            f"Priced, not chosen: {seconds_text(first.step_s)} a step with {first.candidate.layout}, "
            f"{first.candidate.flags}, the fastest of {len(priced)}: {reason}."
        )
    for reason, ways in found.refused.items():
        yield f"{len(ways)} can't run, such as {ways[0].flags}: {reason}"


def parts_of_residency(parts: Sequence[MemoryPart]) -> Table:
    """A table with a row for each part of what a rank holds, and their sums."""
    table = Table("under --memory", title="where all lies, and what a step moves", title_justify="left")
    for head in ("memory", "disk", "read", "written"):
        table.add_column(head, justify="right")
    sums = MemoryPart("together", *(sum(column) for column in list(zip(*parts, strict=True))[1:]))
    for part in (*parts, sums):
        table.add_row(part.name, *map(bytes_text, part[1:]))
    return table


def parts_of_memory(plan: MethodPlan, beside: Mapping[str, float | None]) -> Table:
    """A table with a row for each part of one rank's memory. beside: the method's, in bytes, if they are known."""
    table = Table("memory", "bytes", "", title="what one rank holds", title_justify="left")
    for name, num_bytes in plan.memory.items():
        table.add_row(name, bytes_text(num_bytes), MEANINGS.get(name, "kept between steps"))
    for name, kept in beside.items():
        if kept is not None:
            table.add_row(name, bytes_text(kept), BESIDE[name])
    return table


def ways_of_experts(ways: Sequence[ExpertWay]) -> Table:
    """A table with a row for each number of ranks that share the experts, and for each way of what travels."""
    title = "what travels in a mixture: seconds of links and experts, for an even router; * the fewest"
    table = Table("ranks that share experts", "what travels, its best route", title=title, title_justify="left")
    for head in ("memory", LEVELS["intra"], LEVELS["inter"], "seconds"):
        table.add_column(head, justify="right")
    best = min(ways, key=lambda each: (each.seconds, each.ranks))
    for each in ways:
        sent = (bytes_text(each.plan.sent_on(level)) for level in ("intra", "inter"))
        star = " *" if each is best else ""
        table.add_row(
            f"{each.ranks}", f"{each.way}{star}", bytes_text(sum(each.plan.memory.values())), *sent,
            seconds_text(each.seconds),
        )  # fmt: skip
    return table


def parts_of_traffic(plan: MethodPlan, mean_over: int, between: str) -> Table:
    """A table with a row for each operation and level. between: whom it sends to, if not to all."""
    title = f"what one rank sends in a step{between}" + (f", mean over {mean_over} steps" if mean_over > 1 else "")
    table = Table("operation", "level", "bytes", title=title, title_justify="left")
    for (operation, level), num_bytes in plan.sent.items():
        if num_bytes:
            table.add_row(operation, LEVELS[level], bytes_text(num_bytes))
    return table
