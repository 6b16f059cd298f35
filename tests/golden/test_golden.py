"""The code computes the bits and sends the bytes that golden.json records."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.golden import found
from tests.golden.record import read

pytestmark = pytest.mark.golden
RECORD = read()
GROUPS = found.groups()
# What the entries told that shared a start of the processes, by the first name of their group.
_told: dict[str, Callable[[str], found.Found]] = {}


@functools.cache
def machine() -> str:
    return found.machine()


def tell(request: pytest.FixtureRequest, name: str) -> found.Found:
    """This entry; with it is computed what else of its group was selected."""
    group = next(group for group in GROUPS if name in group.names)
    if group.names[0] not in _told:
        items: list[Any] = [item for item in request.session.items if item.parent is request.node.parent]
        selected = {item.callspec.params["name"] for item in items if hasattr(item, "callspec")}
        _told[group.names[0]] = group.compute([name for name in group.names if name in selected])
    return _told[group.names[0]](name)


def row_of(name: str) -> str:
    """What the entry is about: `strategy/zero` of `strategy/zero/4x2`."""
    return "/".join(name.split("/")[:2])


@pytest.mark.parametrize("name", list(found.everything()))
def test_golden(request: pytest.FixtureRequest, name: str) -> None:
    again = f"python -m tests.golden.record {name}"
    if name not in RECORD["entries"] and row_of(name) not in map(row_of, RECORD["entries"]):
        pytest.skip(f"{row_of(name)} is newer than the record: python -m tests.golden.record {row_of(name)}/")
    assert name in RECORD["entries"], f"not recorded: {again}"
    recorded, now = RECORD["entries"][name], tell(request, name)
    assert now.sends_as(recorded["bytes"]), f"sends {now.bytes}, recorded {recorded['bytes']}"
    if machine() not in recorded["bits"]:
        pytest.skip(
            f"only bytes were compared: this machine's arithmetic, {machine()}, is not recorded; on a commit that is "
            f"known to be right: {again}"
        )
    assert now.bits == recorded["bits"][machine()], f"other bits than recorded; if it is meant to be: {again}"


def test_nothing_recorded_is_gone() -> None:
    assert set(RECORD["entries"]) <= set(found.everything())
