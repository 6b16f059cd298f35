"""The costs of a candidate on measured machines: memory, and the parts of its simulated step."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from thinwire.calibration.process import USUAL, ProcessMemory
from thinwire.cost.graph import ROUND
from thinwire.cost.simulator import COMMUNICATION, TRAINING
from thinwire.errors import ConfigError
from thinwire.hosts.offload.counted import kept_ways
from thinwire.hosts.offload.tiling import tiled_shapes
from thinwire.methods.memory import Floor, Residency, Setup, StepRates, placed as parts_of, resident_method, settled
from thinwire.models import MoELlama
from thinwire.planner.candidates import Candidate
from thinwire.planner.mixture import price_experts
from thinwire.planner.pricing import Pricing
from thinwire.planner.rough import best_order
from thinwire.planner.search import Priced
from thinwire.run.places import completed
from thinwire.run.residency import check_optimizer, check_tiled

NO_DISK = "the disk was not measured; nearest: thinwire calibrate --disk FOLDER"


def price_one(pricing: Pricing, way: Candidate) -> Priced:
    """Simulate a candidate without islands. Raises ConfigError for one that can't run."""
    pricing.check(way)
    if way.experts > 1:
        return price_experts(pricing, way, best_order(pricing, way))
    if way.is_resident:
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
    """The costs of a candidate of which a part is computed again, or on a disk: computing does not hide its bytes."""
    asked, setup = on_disk(pricing, way)
    residency = settled(asked, setup, rates_of(pricing, way, asked))
    kept = replace(way, memory="", held=())
    # Of every budget alike.
    if kept not in pricing.wholes:
        pricing.wholes[kept] = alone(pricing, kept)
    whole = pricing.wholes[kept]
    Floor.of(residency, setup).check(residency.memory_bytes)
    parts = list(parts_of(residency, setup))
    written, read = pricing.machine.disk
    hosts = pricing.machine.cores.hosts
    # All ranks of a machine use its disk at once; a stated rate is each rank's own.
    moved_s = sum(part.read / read + part.written / written for part in parts) * max(map(hosts.count, hosts))
    if residency.rate is not None:
        moved_s = max(moved_s, sum(part.read + part.written for part in parts) / residency.rate)
    # A layer is computed again before its backward, with a third of the operations of a whole pass.
    again_s = whole.terms["compute_s"] / 3 if residency.recomputes else 0.0
    step_s = whole.step_s + again_s + moved_s
    held = float(sum(part.memory for part in parts))
    # Of a mixture they are not among the parts.
    held += pricing.kept_bytes(way) if setup.kept is None else 0.0
    memory = min(whole.memory_bytes + pricing.reserved_bytes, held)
    terms = {**whole.terms, "step_s": step_s, "compute_s": whole.terms["compute_s"] + again_s, "peak_rss_bytes": memory}
    return replace(whole, candidate=way, step_s=step_s, memory_bytes=memory, terms=terms)


def disk_floor(pricing: Pricing, way: Candidate) -> float:
    """The smallest budget under which a part of a candidate can lie on a disk, in bytes. Raises ConfigError."""
    floor = 0.0
    # A larger budget may place the parts in another way, which needs more.
    while (least := least_of(*on_disk(pricing, way))) > floor:
        floor = 1e6 * math.ceil(least / 1e6)
        way = replace(way, memory=f"{math.ceil(least / 1e6)}mb")
    return floor


def least_of(asked: Residency, setup: Setup) -> float:
    """The smallest budget with which the parts of a training can lie as they do without rates."""
    return Floor.of(settled(asked, setup), setup).least_bytes()


def rates_of(pricing: Pricing, way: Candidate, asked: Residency) -> StepRates | None:
    """What a rank does in a second, by which a run takes one of the ways that fit; None on GPUs, where it does not."""
    machine, layer = pricing.machine, pricing.layer
    if machine.on_gpu:
        return None
    num_here = max(map(machine.cores.hosts.count, machine.cores.hosts))
    written, read = (rate / num_here if asked.rate is None else asked.rate for rate in machine.disk)
    nodes, rates = machine.network.nodes, machine.network.rates
    links = [rates[a][b] for a, b in machine.network.pairs if nodes[a] != nodes[b]]
    flops = machine.rates[layer] * min(machine.speeds, default=1.0)
    sent = min(links, default=math.inf) / machine.local_size
    return StepRates(way.micro_batch * pricing.seq_len, flops, read, written, sent)


def process_of(pricing: Pricing) -> ProcessMemory:
    """A process of this machine before it has a model: the usual one, or one that holds more."""
    more = pricing.machine.base_bytes + pricing.reserved_bytes - USUAL.data
    return replace(USUAL, data=USUAL.data + max(0, math.ceil(more)))


def reserved_bytes(process: ProcessMemory) -> float:
    """What a budget counts of a process, and it does not use: stacks of threads, and what was never touched."""
    return max(0.0, process.data - process.resident)


def on_disk(pricing: Pricing, way: Candidate) -> tuple[Residency, Setup]:
    """What is asked of the parts' places, and what they are. Raises ConfigError for what can't lie so."""
    residency, method = Residency(**completed(way.residency)), resident_method(pricing.methods[way.strategy])
    check_optimizer(residency, pricing.optimizer)
    check_tiled(residency, pricing.optimizer, method, pricing.replicas(way))
    if residency.needs_store and math.inf in pricing.machine.disk:
        raise ConfigError(NO_DISK)
    setup = Setup(
        method, tiled_shapes(pricing.model, residency.tile), pricing.replicas(way), way.num_micro_batches,
        kept_of(pricing, way, residency), pricing.across,
        is_built_whole=isinstance(pricing.model, MoELlama), process=process_of(pricing),
    )  # fmt: skip
    return residency, setup


def kept_of(pricing: Pricing, way: Candidate, residency: Residency) -> dict[str, int] | None:
    """What a micro-batch takes by what becomes of activations; None of a mixture, as in a run."""
    if isinstance(pricing.model, MoELlama):
        return None
    given = pricing.loss, way.micro_batch, pricing.seq_len, pricing.dtype, min(residency.slices or 1, way.micro_batch)
    return counted_ways(pricing.model.config, *given, residency.tile, residency.sampled)


# A plan asks for few, and for each of them many times.
counted_ways = lru_cache(kept_ways)
