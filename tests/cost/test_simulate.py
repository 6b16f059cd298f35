"""Steps on machines with shared cores, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.cost import Clock, Cores, Drawing, Machine, Message, Network, StepGraph, Work, simulate
from thinwire.errors import ConfigError

RATES = {"layer 8 fp32": 1.0, "encode int4/64": 1.0, "carry": 1.0}


def machine(num_ranks: int, cores: float, *, contention: float = 0.0, rate: float = 1.0, **more: object) -> Machine:
    """Ranks of one machine, whose links carry `rate` bytes a second."""
    hosts = Cores((0,) * num_ranks, (cores,), contention)
    return Machine(("a",) * num_ranks, Network.even(num_ranks, rate), hosts, RATES, **more)  # type: ignore[arg-type]


def alone(num_ranks: int, amount: float) -> StepGraph:
    """Ranks that compute and send nothing."""
    drawing = Drawing(num_ranks)
    for rank in range(num_ranks):
        drawing.task(rank, Work("layer 8 fp32", amount))
    return drawing.done()


def test_ranks_share_cores_and_their_memory() -> None:
    assert simulate(alone(4, 1.0), machine(4, 2.0)).makespan_s == pytest.approx(2.0)
    assert simulate(alone(2, 1.0), machine(2, 2.0, contention=0.5)).makespan_s == pytest.approx(1.5)
    assert simulate(alone(4, 1.0), machine(4, 2.0, contention=0.5)).makespan_s == pytest.approx(3.0)
    # One on two threads takes both cores.
    assert simulate(alone(2, 1.0), machine(2, 2.0, threads=2)).makespan_s == pytest.approx(2.0)
    assert simulate(alone(2, 1.0), machine(2, 2.0, speeds=(1.0, 0.5))).makespan_s == pytest.approx(2.0)


def test_a_part_of_a_machine_computes_while_the_others_do() -> None:
    made = machine(4, 2.0, contention=0.5)
    for part, num in ((made.part([0]), 1), (made.part([2, 3]), 2), (made.part([0, 1]).part([1]), 1)):
        assert simulate(alone(num, 1.0), part).makespan_s == pytest.approx(3.0)
    # A core for each: their memory is shared all the same.
    assert simulate(alone(1, 1.0), machine(2, 2.0, contention=0.5).part([1])).makespan_s == pytest.approx(1.5)
    assert machine(2, 2.0, contention=0.5).cores.slowdown(0, 1) == 1.0
    with pytest.raises(ConfigError, match="one number for each"):
        Cores((0,), (2.0,), parts=(1.0, 1.0))


def test_gpus_compute_and_pack_beside_the_cores() -> None:
    """Cores that ranks share make messages longer, and nothing that a GPU does."""
    gpu: dict[str, Any] = {"device": "NVIDIA H100", "threads": 8}
    assert simulate(alone(8, 1.0), machine(8, 2.0, contention=0.5, **gpu)).makespan_s == pytest.approx(1.0)
    # Both pack at once, on one core or on GPUs; the bytes are carried on the core.
    assert simulate(collectives(1, slots=1), machine(2, 1.0)).makespan_s == pytest.approx(3.0)
    assert simulate(collectives(1, slots=1), machine(2, 1.0, **gpu)).makespan_s == pytest.approx(2.0)
    drawing = Drawing(2)
    for rank in range(2):
        drawing.task(rank, Work("carry", 1.0))
    assert simulate(drawing.done(), machine(2, 1.0, **gpu)).makespan_s == pytest.approx(2.0)


def test_work_speeds_up_when_other_work_has_ended() -> None:
    clock: Clock[str] = Clock(Network.even(2), Cores((0, 0), (1.0,)))
    clock.work(0, 1.0, "short")
    clock.work(1, 2.0, "long")
    assert (clock.advance(), clock.now_s) == (([], ["short"]), 2.0)
    assert (clock.advance(), clock.now_s) == (([], ["long"]), 3.0)


def collectives(num: int, slots: int) -> StepGraph:
    """Two ranks; in each collective both pack for 1 s, then send 1 byte."""
    drawing = Drawing(2, slots)
    for _ in range(num):
        jobs = [drawing.job(rank, ()) for rank in range(2)]
        for rank in range(2):
            packed = drawing.task(rank, Work("encode int4/64", 1.0), (), (jobs[rank],))
            drawing.task(rank, Message(1 - rank, 1.0, "gradients", "inter"), packed, tuple(jobs))
    return drawing.done()


def test_collectives_overlap_as_far_as_there_are_slots() -> None:
    # 1 s to pack and 1 s on the link: one after the other, or the next one packs meanwhile.
    assert simulate(collectives(3, slots=1), machine(2, 2.0)).makespan_s == pytest.approx(6.0)
    assert simulate(collectives(3, slots=2), machine(2, 2.0)).makespan_s == pytest.approx(4.0)
    assert collectives(3, slots=2).sent(0) == {("gradients", "inter"): 3.0}


def test_no_message_leaves_before_it_is_awaited() -> None:
    drawing = Drawing(2)
    late = drawing.task(1, Work("layer 8 fp32", 5.0))
    jobs = (drawing.job(0, ()), drawing.job(1, late))
    drawing.task(0, Message(1, 1.0, "gradients", "inter"), (), jobs)
    assert simulate(drawing.done(), machine(2, 2.0)).makespan_s == pytest.approx(6.0)


def test_tasks_that_wait_for_each_other_are_told() -> None:
    drawing = Drawing(1, slots=1)
    blocked = drawing.job(0, (1,))
    drawing.task(0, Work("encode int4/64", 1.0), (), (blocked,))
    drawing.task(0, Work("encode int4/64", 1.0), (0,), (drawing.job(0, ()),))
    with pytest.raises(ConfigError, match="2 tasks of the step wait for each other"):
        simulate(drawing.done(), machine(1, 1.0))


def test_a_machine_is_read_as_it_was_written() -> None:
    made = machine(4, 2.0, contention=0.1, speeds=(1.0, 1.0, 1.0, 2.0))
    assert Machine.from_json(made.to_json()) == made
    part = made.part([3, 1])
    assert part.speeds == (2.0, 1.0) and part.cores.num == (1.0,)
    with pytest.raises(ConfigError, match="must be an object"):
        Machine.from_json("[]")
    with pytest.raises(ConfigError, match="'decode sign' was not measured"):
        made.seconds(0, Work("decode sign", 1.0))
