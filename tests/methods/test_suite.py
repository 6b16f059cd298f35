from __future__ import annotations

from tests.conformance.strategy_suite import StrategySuite


class TestStrategies(StrategySuite):
    pass
