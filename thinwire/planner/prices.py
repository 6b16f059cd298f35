"""The costs of a candidate on measured machines: memory, and the parts of its simulated step."""

from __future__ import annotations

import math
from dataclasses import replace

from thinwire.calibration.process import USUAL
from thinwire.cost.graph import ROUND
from thinwire.cost.simulator import COMMUNICATION, TRAINING
from thinwire.errors import ConfigError
from thinwire.methods.memory import Floor, Residency, Setup, placed as parts_of, resident_method, settled
from thinwire.planner.candidates import Candidate
from thinwire.planner.mixture import price_experts
from thinwire.planner.pricing import Pricing
from thinwire.planner.rough import best_order
from thinwire.planner.search import Priced


def price_one(pricing: Pricing, way: Candidate) -> Priced:
    """Simulate a candidate without islands. Raises ConfigError for one that can't run."""
    pricing.check(way)
    if way.experts > 1:
        return price_experts(pricing, way, best_order(pricing, way))
    if way.memory:
        return resident(pricing, way)
    return alone(pricing, way) if way.stages == 1 else in_stages(pricing, way)


def in_stages(pricing: Pricing, way: Candidate) -> Priced:
    """The costs of a candidate with stages."""
    order = best_order(pricing, way)
    staged = pricing.staged(way, order)
    stages = staged.stages
    plans = [pricing.plan_of(way, stages.parts[stage]) for stage in range(way.stages)]
    counted = pricing.counted(way, max(stages.memory_bytes(stage, plan) for stage, plan in enumerate(plans)))
    memory = pricing.estimator.peak_bytes(counted)
    step_s, exposed_s, sent = stages.step_s, stages.idle_s(0), staged.link_bytes()
    terms = {
        "step_s": step_s, "compute_s": step_s - exposed_s, "exposed_comm_s": exposed_s, "pipeline_s": stages.first_s,
        "sent_bytes": sum(num for (source, _), num in sent.items() if source == 0), "peak_rss_bytes": memory,
    }  # fmt: skip
    on_link_s = staged.grid.machine_of(way.stages, way.pipeline.across, way.tensor).fabric.busiest_s(sent)
    return Priced(way, step_s, stages.bubble, memory, min(on_link_s, step_s), order, terms, counted)


def alone(pricing: Pricing, way: Candidate) -> Priced:
    """The costs of a candidate without stages."""
    order = best_order(pricing, way)
    timeline = pricing.simulated(way, order)
    plan = pricing.plan_of(way, pricing.cut(way.tensor))
    passes, attention = way.num_micro_batches * len(pricing.model.model.layers), pricing.attention(way, order)
    counted = pricing.counted(way, sum(plan.memory.values()) + pricing.kept_bytes(way))
    memory = pricing.estimator.peak_bytes(counted)
    step_s, compute_s, kinds = timeline.makespan_s, timeline.busy_s(0, TRAINING), timeline.kinds_s(0)
    terms = {
        "step_s": step_s, "compute_s": compute_s, "exposed_comm_s": step_s - compute_s,
        "codec_s": timeline.busy_s(0, COMMUNICATION) - kinds.get(ROUND, 0.0),
        "sent_bytes": sum(timeline.graph.sent(0).values()) + passes * attention.sent_by(order[0]),
        "peak_rss_bytes": memory,
    }  # fmt: skip
    grid = pricing.placed(order, way.tensor)
    link_s = grid.part(grid.groups(1)[0]).fabric.busiest_s(timeline.graph.link_bytes())
    on_link_s = min(link_s + passes * attention.seconds, step_s)
    return Priced(way, step_s, 1 - compute_s / step_s, memory, on_link_s, order, terms, counted)


def resident(pricing: Pricing, way: Candidate) -> Priced:
    """The costs of a candidate of which a part lies on a disk: what a step moves is not hidden by computing."""
    written, read = pricing.machine.disk
    if math.inf in (written, read):
        raise ConfigError("the disk was not measured; nearest: thinwire calibrate --disk FOLDER")
    whole = alone(pricing, replace(way, memory=""))
    residency, setup = on_disk(pricing, way)
    budget = residency.memory_bytes or 0
    Floor.of(residency, setup).check(budget)
    parts = list(parts_of(residency, setup))
    hosts = pricing.machine.cores.hosts
    # All ranks of a machine use its disk at once.
    moved_s = sum(part.read / read + part.written / written for part in parts) * max(map(hosts.count, hosts))
    # A layer is computed again before its backward, with a third of the operations of a whole pass.
    again_s = whole.terms["compute_s"] / 3 if residency.recomputes else 0.0
    step_s = whole.step_s + again_s + moved_s
    memory = min(whole.memory_bytes, sum(part.memory for part in parts) + unusual_bytes(pricing))
    terms = {**whole.terms, "step_s": step_s, "compute_s": whole.terms["compute_s"] + again_s, "peak_rss_bytes": memory}
    return replace(whole, candidate=way, step_s=step_s, memory_bytes=memory, terms=terms)


def disk_floor(pricing: Pricing, way: Candidate) -> float:
    """The smallest budget under which a part of a candidate can lie on a disk, in bytes. Raises ConfigError."""
    floor, more = 0.0, unusual_bytes(pricing)
    # A larger budget may place the parts in another way, which needs more.
    while (least := Floor.of(*on_disk(pricing, way)).least_bytes(more)) > floor:
        floor = 1e6 * math.ceil(least / 1e6)
        way = replace(way, memory=f"{math.ceil(least / 1e6)}mb")
    return floor


def unusual_bytes(pricing: Pricing) -> float:
    """What a process of this machine holds before it has a model, beyond the usual one of which floors are made."""
    return max(0.0, pricing.machine.base_bytes - USUAL.data)


def on_disk(pricing: Pricing, way: Candidate) -> tuple[Residency, Setup]:
    """Where the parts of a candidate under a budget lie, and what they are. Raises ConfigError."""
    layer, ends = pricing.layer_and_ends(way)
    num_layers = len(pricing.model.model.layers)
    borders = 4 * num_layers * pricing.seq_len * pricing.model.config.hidden_size
    kept = {
        "keep": int(pricing.kept_bytes(way)),
        "recompute": int(layer.kept(way.micro_batch) + ends.kept(way.micro_batch) + way.micro_batch * borders),
    }
    method = resident_method(pricing.methods[way.strategy])
    setup = Setup(method, pricing.model, pricing.replicas(way), way.num_micro_batches, kept)
    return settled(Residency(memory=way.memory), setup), setup
