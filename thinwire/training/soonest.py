"""Takes the place of weights, gradients and activations with which a step is soonest, from rates measured at the start.

A budget may leave several ways to train: each moves other bytes to and from the disk, and some compute layers again.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from thinwire.calibration import step_flops
from thinwire.calibration.reach import all_on_this_machine
from thinwire.collectives import Communicator
from thinwire.collectives.store_gather import of_all_ranks, told_by_first
from thinwire.cost import Machine
from thinwire.device import Device
from thinwire.errors import ConfigError
from thinwire.methods.memory import (
    LENT_RATE,
    Floor,
    Residency,
    Setup,
    StepRates,
    fitting,
    moves_nothing,
    read_byte_rate,
    seconds,
    soonest,
)
from thinwire.report.units import bytes_text, seconds_text
from thinwire.run.config import derive
from thinwire.run.run import Run
from thinwire.run.run_dir import RunDir
from thinwire.table import Row
from thinwire.tiers import check_folder
from thinwire.tiers.probe import disk_rates
from thinwire.training.advice import link_rate


class ChosenResidency(NamedTuple):
    """A residency without "auto", and what was measured to choose it; None: it was not.

    link_rate: of the link between nodes, bits per second. flops: operations per second of this rank.
    """

    residency: Residency
    link_rate: float | None = None
    flops: float | None = None
    rows: tuple[Row, ...] = ()


def chosen(run: Run, device: Device, dtype: str, first: Residency, setup: Setup) -> ChosenResidency:
    """The soonest of the ways that fit the budget on all ranks, the same on all. A collective over the default group.

    first: the way that is taken where no other one is sooner. Nothing is measured where it moves and repeats nothing,
    or where no other way fits.
    """
    assert run.residency is not None
    if run.residency.memory_bytes is None:
        return ChosenResidency(first)
    # A GPU's weights stay in memory; compiled layers do not wait for theirs.
    is_free = device.torch.type == "cpu" and not run.config.compile
    ways = [way for way in fitting(run.residency, setup) if is_free and has_room(way, first, setup)]
    waits = is_free and not moves_nothing(first, setup)
    told = of_all_ranks(([key_of(way) for way in ways], waits, known_disk(run)), "what fits its budget")
    ways = [way for way in ways if all(key_of(way) in keys for keys, _, _ in told)]
    if len(ways) < 2 or not any(waits for _, waits, _ in told):
        return ChosenResidency(first)
    (_, _, known), config = told[0], run.config
    disk = disk_rates(run.residency.folder) if known is None else known[:2]
    own = step_flops(torch.bfloat16 if dtype == "bf16" else torch.float32, device)
    flops, read, written = map(min, zip(*of_all_ranks((own, *disk), "its rates"), strict=True))
    rates, link = StepRates(derive(config, config.num_shares).micro_batch * config.seq_len, flops, read, written), None
    if setup.topology.num_nodes > 1 and not all(of_all_ranks(all_on_this_machine(dist.get_world_size()), "its place")):
        comm = Communicator(local_size=config.local_size, timeout_s=config.timeout)
        link = link_rate(comm)
        comm.close()
        rates = replace(rates, sent=link / 8)
    found = ways[told_by_first(ways.index(soonest(ways, first, setup, rates)), "where its weights lie")]
    return ChosenResidency(
        found, link, own, (row_on(found, ways, setup, rates, "measured now" if known is None else known[2]),)
    )


def row_on(found: Residency, ways: list[Residency], setup: Setup, rates: StepRates, how: str) -> Row:
    """A row on what was chosen, by which rates. how: the disk's are known."""
    asked = "where weights, gradients and activations lie: auto"
    others = [max(seconds(way, setup, rates)) for way in ways if way != found]
    told = [f"the disk reads {bytes_text(rates.read)}/s and writes {bytes_text(rates.written)}/s, {how}"]
    told += [f"a rank computes {rates.flops / 1e9:.3g} GFLOP/s"]
    told += [f"its link carries {8 * rates.sent / 1e6:.3g} Mbit/s"] if rates.sent < float("inf") else []
    own, low, high = map(seconds_text, (max(seconds(found, setup, rates)), min(others), max(others)))
    span = low if low == high else f"{low} to {high}"
    took = f"the longest of computing, disk and link takes about {own} a step"
    took += ", and as long with every other choice" if own == span else f", and {span} with other choices"
    return asked, ", ".join(key_of(found)), f"{took}: {'; '.join(told)}"


def key_of(way: Residency) -> tuple[str, str, str]:
    """What tells one way from another."""
    return way.weights, way.gradients, way.activations


def has_room(way: Residency, first: Residency, setup: Setup) -> bool:
    """Whether the disk holds a way, if it holds the first one."""
    needed = Floor.of(way, setup).disk
    if needed <= Floor.of(first, setup).disk:
        return True
    try:
        check_folder(way.folder, needed * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ConfigError:
        return False
    return True


def known_disk(run: Run) -> tuple[float, float, str] | None:
    """A rank's rates of reading and writing that need not be measured, and how they are known."""
    lent = os.environ.get(LENT_RATE)
    assert run.residency is not None
    if (rate := run.residency.rate or (None if lent is None else read_byte_rate(lent))) is not None:
        return rate, rate, "as stated"
    path = RunDir(run.config.run_dir).machine
    if run.config.plan is None or not path.exists():
        return None
    machine = Machine.read(path)
    # All ranks of a machine use its disk at once.
    written, read = (rate / max(map(machine.cores.hosts.count, machine.cores.hosts)) for rate in machine.disk)
    return None if float("inf") in (written, read) else (read, written, f"by {path.name}")
