"""A step with stages as one graph: the bytes of its plans, its length, and what is drawn of it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from tests.planner.machines import FAST, machine, near, small
from thinwire.cost import Machine, Message, simulate
from thinwire.methods.interface import Method
from thinwire.methods.pipeline import Pipeline
from thinwire.models import Llama, build_skeleton
from thinwire.options import build_strategy
from thinwire.planner.candidates import Candidate
from thinwire.planner.prices import price_one
from thinwire.planner.pricing import WORD, Pricing

EXACT = Pipeline(plan="1f1b", forward="fp32", backward="fp32")
WAY = Candidate("zero", 2, 2, 2, 4, EXACT)


@cache
def methods() -> dict[str, Method]:
    return {name: build_strategy(name, {}, num_steps=1000, num_warmup_steps=100) for name in ("zero", "sdp4bit", "ddp")}


def pricing(made: Machine) -> Pricing:
    model = build_skeleton("tiny", 257, 256)
    assert isinstance(model, Llama)
    return Pricing(model, made, methods(), 256, "fp32")


@pytest.mark.parametrize("strategy", ["zero", "sdp4bit", "ddp"])
@pytest.mark.parametrize("level", ["inter", "intra"])
def test_every_rank_sends_the_bytes_of_its_plans(strategy: str, level: str) -> None:
    found = pricing(machine(FAST) if level == "inter" else near(FAST))
    way = replace(WAY, strategy=strategy)
    stages, replicas = found.staged(way, (0, 1, 2, 3)).stages, found.replicas(way)
    border = 4.0 * way.micro_batch * 256 * found.model.config.hidden_size * way.num_micro_batches
    word = methods()[strategy].plan(found.model, replicas, 1).sent[WORD, level]
    for stage, part in enumerate(stages.parts):
        planned = {key: num for key, num in methods()[strategy].plan(part, replicas, 1).sent.items() if num}
        between = {("pipeline_backward" if stage else "pipeline_forward", "inter"): border}
        words = {(WORD, "inter"): 3.0 * word}
        if level == "intra":
            words = {(WORD, "intra"): 2.0 * word, (WORD, "inter"): word}
        for rank in (2 * stage, 2 * stage + 1):
            assert stages.timeline.graph.sent(rank) == pytest.approx(planned | between | words)


def test_the_price_of_a_step_is_its_simulated_graph() -> None:
    found = pricing(machine(FAST / 4, bad=(0, 2)))
    order = (0, 1, 2, 3)
    staged = found.staged(WAY, order)
    priced, timeline = price_one(found, WAY), staged.stages.timeline
    again = found.staged(WAY, priced.order)
    assert simulate(again.stages.timeline.graph, found.machine.part(priced.order)).makespan_s == priced.step_s
    assert priced.terms["pipeline_s"] < priced.step_s and priced.link_s <= priced.step_s
    sent = again.link_bytes()
    assert priced.terms["sent_bytes"] == sum(num for (source, _), num in sent.items() if source == 0)
    # Gradients of the last stage leave before the first one's last backward has ended.
    graph = timeline.graph
    leaves = {
        rank: min(
            span[0] for task, span in zip(graph.tasks, timeline.spans, strict=True)
            if task.rank == rank and isinstance(task.does, Message) and task.does.operation == "gradients"
        )
        for rank in (0, 2)
    }  # fmt: skip
    assert leaves[2] < staged.stages.first_s <= leaves[0]


def test_a_long_step_has_the_exchanges_of_a_short_one() -> None:
    found = pricing(machine(FAST))
    short, long = (found.staged(replace(WAY, num_micro_batches=num), (0, 1, 2, 3)) for num in (64, 256))
    assert not short.stages.more_s and long.stages.more_s
    borders = short.stages.link_bytes
    assert long.stages.link_bytes == pytest.approx({pair: 4 * num for pair, num in borders.items()})
    # Between the replicas of a stage.
    assert long.link_bytes()[0, 1] == short.link_bytes()[0, 1]
    each_s = long.stages.more_s / 192
    assert long.stages.step_s == pytest.approx(short.stages.step_s + 192 * each_s)
    assert long.stages.first_s - short.stages.first_s == pytest.approx(long.stages.more_s)


def test_the_timeline_of_a_plan_is_that_of_its_graph() -> None:
    found = small(machine(FAST), stages=2, axes=(), tables={"pipeline": {"plan": "1f1b"}})
    told = json.loads(found.to_json())
    lanes: dict[tuple[int, str], set[str]] = {}
    for rank, lane, name, *_ in told["timeline"]:
        lanes.setdefault((rank, lane), set()).add(name)
    assert {"forward", "backward", "copy"} <= lanes[0, "training"]
    assert all((rank, lane) in lanes for rank in range(4) for lane in ("training", "communication", "sending"))
    assert max(end for *_, end in told["timeline"]) == pytest.approx(told["predicted"]["step_s"], rel=1e-3)
    assert sum(each or 0 for each in told["link_bytes"][0]) == pytest.approx(told["predicted"]["sent_bytes"])
    names = {event["name"] for event in found.trace() if event["ph"] == "X"}
    assert {"forward 0F0", "forward of micro-batch 0", "backward of micro-batch 0"} <= names
