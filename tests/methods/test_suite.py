from __future__ import annotations

import pytest

from tests.conformance.strategy_suite import GRIDS, StrategySuite, together, train
from tests.golden.compare import compare
from tests.golden.found import strategy_entry, trained


class TestStrategies(StrategySuite):
    @pytest.mark.golden
    @pytest.mark.parametrize(("name", "grid"), GRIDS)
    def test_bits_and_bytes_are_those_recorded(
        self, request: pytest.FixtureRequest, name: str, grid: tuple[int, int]
    ) -> None:
        compare(strategy_entry(name, grid), lambda: trained(together(request, train, *grid)))
