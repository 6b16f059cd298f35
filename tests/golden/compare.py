"""Holds an entry to what is recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.golden import found
from tests.golden.record import read

RECORD = read()


@functools.cache
def machine() -> str:
    return found.machine()


def row_of(name: str) -> str:
    """What the entry is about: `strategy/zero` of `strategy/zero/4x2`."""
    return "/".join(name.split("/")[:2])


def compare(name: str, compute: Callable[[], found.Found]) -> None:
    """Fail where the entry has other bits or bytes; skip where it, or this machine's arithmetic, is not recorded."""
    again = f"python -m tests.golden.record {name}"
    if name not in RECORD["entries"] and row_of(name) not in map(row_of, RECORD["entries"]):
        pytest.skip(f"{row_of(name)} is newer than the record: python -m tests.golden.record {row_of(name)}/")
    assert name in RECORD["entries"], f"not recorded: {again}"
    recorded, now = RECORD["entries"][name], compute()
    assert now.sends_as(recorded["bytes"]), f"sends {now.bytes}, recorded {recorded['bytes']}"
    if machine() not in recorded["bits"]:
        pytest.skip(
            f"only bytes were compared: this machine's arithmetic, {machine()}, is not recorded; on a commit that is "
            f"known to be right: {again}"
        )
    assert now.bits == recorded["bits"][machine()], f"other bits than recorded; if it is meant to be: {again}"
