"""Seconds in which messages of one name are under way."""

from __future__ import annotations

import pytest

from thinwire.collectives import meter as module
from thinwire.collectives.meter import Meter, OpReading


def test_seconds_of_messages_under_way_at_once_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()
    for begun_s, now in ((1.0, 3.0), (2.0, 5.0), (7.0, 8.0)):
        monkeypatch.setattr(module.time, "perf_counter", lambda now=now: now)
        meter.count("dispatch", "inter", 10, 20, begun_s)
    # Another level is another message.
    meter.count("dispatch", "intra", 10, 20, 4.0)
    before = meter.snapshot()
    assert before.operations["dispatch", "inter"] == OpReading(3, 30, 60, 4.0 + 1.0)
    assert before.operations["dispatch", "intra"] == OpReading(1, 10, 20, 4.0)
    # Of a ring of gloo no seconds are known.
    meter.count("dispatch", "intra", 1, 2)
    assert (meter.snapshot() - before).operations["dispatch", "intra"] == OpReading(1, 1, 2, 0.0)
