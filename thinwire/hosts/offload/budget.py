"""What is in effect of a residency in a process that the user has started, and what of it was not stated."""

from __future__ import annotations

import os
from dataclasses import replace

from thinwire.calibration.process import process_memory
from thinwire.errors import ConfigError
from thinwire.limits import data_bytes, limit_bytes
from thinwire.methods.memory import LENT_RATE, Floor, Residency, Setup, settled
from thinwire.table import Row
from thinwire.tiers.mount import disk_folder


def fitted(residency: Residency, setup: Setup) -> tuple[Residency, list[Row]]:
    """The residency with every "auto" decided, under the process's own limit if it has one and none is stated.

    Returns rows of (asked for, in effect, why), too. Where no folder is stated, one for temporary files is taken, but
    not for a durable run, which must find it again.

    Raises ConfigError for a budget below the floor, or below what this process has already.
    """
    rows = list[Row]()
    if residency.memory is None and (limit := limit_bytes()) is not None:
        residency = replace(residency, memory=f"{limit}b")
        rows.append(("memory", f"{limit / 1e6:.0f} MB", "this process's own limit, of ulimit -d"))
    if residency.memory is not None:
        setup = replace(setup, process=process_memory())
    residency = settled(residency, setup)
    if (budget := residency.memory_bytes) is not None:
        Floor.of(residency, setup).check(budget, "memory='{}'")
        held = data_bytes() + setup.largest_bytes
        if held > budget:
            raise ConfigError(
                f"memory of {budget / 1e6:.0f} MB: this process has {data_bytes() / 1e6:.0f} MB of data already, and a "
                f"bucket of {setup.largest_bytes / 1e6:.0f} MB is filled beside them; nearest: a model made by "
                f"thinwire.hollow, which has none, or memory='{held // 10**6 + 1}mb'"
            )
    if residency.needs_store and residency.store is None and not residency.durable:
        residency = replace(residency, store=str(disk_folder()))
        rows.append(("store", str(residency.store), "none is stated, and this is a folder on a disk"))
    if residency.needs_store and residency.disk_rate is None and (rate := os.environ.get(LENT_RATE)) is not None:
        residency = replace(residency, disk_rate=rate)
        rows.append(("disk rate", rate, "the emulated network states it, see thinwire lab --disk-rate"))
    return residency, rows
