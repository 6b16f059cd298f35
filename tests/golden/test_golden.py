"""The code computes the bits and sends the bytes that golden.json records.

Those of the strategies' suite are compared in tests/methods/test_suite.py, which trains them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.golden import found
from tests.golden.compare import RECORD, compare

pytestmark = pytest.mark.golden
GROUPS = found.groups()
# What the entries told that shared a start of the processes, by the first name of their group.
_told: dict[str, Callable[[str], found.Found]] = {}


def tell(request: pytest.FixtureRequest, name: str) -> found.Found:
    """This entry; with it is computed what else of its group was selected."""
    group = next(group for group in GROUPS if name in group.names)
    if group.names[0] not in _told:
        items: list[Any] = [item for item in request.session.items if item.parent is request.node.parent]
        selected = {item.callspec.params["name"] for item in items if hasattr(item, "callspec")}
        _told[group.names[0]] = group.compute([name for name in group.names if name in selected])
    return _told[group.names[0]](name)


NAMES = [name for name in found.everything() if not name.startswith("strategy/")]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.whole if found.is_covered(name) else ()) for name in NAMES]
)
def test_golden(request: pytest.FixtureRequest, name: str) -> None:
    compare(name, lambda: tell(request, name))


def test_nothing_recorded_is_gone() -> None:
    assert set(RECORD["entries"]) <= set(found.everything())
