"""Jobs that compute on other threads: the communication thread serves others meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from tests.workers import HANG_S
from thinwire.collectives import Communicator
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.collectives.together import together


def test_a_job_that_computes_gives_way_to_the_next() -> None:
    comm, opened = Communicator(), threading.Event()

    def computes(link: Link) -> Rounds[bool]:
        with ThreadPoolExecutor(1) as pool:
            return (yield from replace(link, pool=pool).work("encode_s", "test", partial(opened.wait, HANG_S)))

    def opens(link: Link) -> Rounds[None]:
        yield from link.work("encode_s", "test", opened.set)

    first, second = comm.submit(computes), comm.submit(opens)
    assert comm.wait(first) is True
    comm.wait(second)
    assert comm.meter.snapshot().encode_s > 0
    comm.close()


def test_parts_compute_at_once_and_go_on_in_their_order() -> None:
    comm, met = Communicator(), threading.Barrier(3, timeout=HANG_S)
    order: list[str] = []

    def part(link: Link, name: str) -> Rounds[str]:
        for stage in "12":
            yield from link.work("encode_s", "test", met.wait)
            order.append(name + stage)
        return name

    def job(link: Link) -> Rounds[list[str]]:
        with ThreadPoolExecutor(3) as pool:
            helped = replace(link, pool=pool)
            return (yield from together(*(part(helped.part(n), name) for n, name in enumerate("abc"))))

    assert comm.wait(comm.submit(job)) == ["a", "b", "c"]
    assert order == ["a1", "b1", "c1", "a2", "b2", "c2"]
    comm.close()


def test_what_goes_wrong_on_the_pool_ends_the_job() -> None:
    comm = Communicator()

    def job(link: Link) -> Rounds[float]:
        with ThreadPoolExecutor(1) as pool:
            return (yield from replace(link, pool=pool).work("encode_s", "test", lambda: 1 / 0))

    with pytest.raises(ZeroDivisionError):
        comm.wait(comm.submit(job))
