"""Fixtures of the planner's tests."""

from __future__ import annotations

import pytest

from thinwire.planner import selection


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer candidates are simulated than for a user."""
    monkeypatch.setattr(selection, "NUM_SIMULATED", 6)
    monkeypatch.setattr(selection, "NUM_SMALLEST", 6)
