"""How long a step of a training under a budget computes, and how long it would wait for a disk."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from thinwire.calibration import matrix_flops
from thinwire.device import Device
from thinwire.lab.spec import read_rate
from thinwire.methods.memory import Residency, Setup, efficiency, fitting, intensities, placed
from thinwire.methods.memory.residency import FP32_BYTES
from thinwire.planner.options import ExplainConfig
from thinwire.report.units import seconds_text
from thinwire.table import Row

# Of a forward and its backward; of them with layers computed again.
OPERATIONS, WITH_AGAIN = 6, 8
BF16_BYTES = 2


def rows_on_waiting(config: ExplainConfig, asked: Residency, settled: Residency, setup: Setup) -> Iterator[Row]:
    """Rows of (asked for, in effect, why): the efficiency of a disk, and the seconds of what "auto" took.

    asked: with "auto". Without a rate of the disk, a row that says so.
    """
    if settled.rate is None:
        yield "efficiency", "not known", "the disk's rate is missing: name it, such as --disk-rate 500MB/s"
        return
    flops = matrix_flops(torch.float32, Device()) if config.gflops is None else config.gflops * 1e9
    how = "measured here; --gflops states another" if config.gflops is None else "as --gflops says"
    tokens, ranks = config.micro_batch * config.seq_len, setup.topology.world_size
    computed, moved = seconds(settled, setup, tokens, flops)
    yield "computing", f"{seconds_text(computed)} of a step", f"at {flops / 1e9:.0f} GFLOP/s, {how}"
    # Each rank reads its part at its own disk's rate.
    disks = {"weights": setup.method.levels(setup.topology).weights_over, "masters and optimizer state": ranks}
    width = getattr(getattr(setup.model, "config", None), "hidden_size", None)
    shares = [
        f"{name} {efficiency(each, settled.rate * disks.get(name, 1), flops):.2f}"
        for name, each in intensities(tokens, setup.micro_batches, width).items()
    ]
    yield "efficiency", ", ".join(shares), "the share of time that computes, if these lie on the disk and it waits"
    yield from _on_auto(asked, settled, setup, tokens, flops)
    own = next(part for part in placed(settled, setup) if part.name == "weights")
    if config.rate is not None and ranks > 1 and own.read and not setup.is_cut:
        moved = (own.read + own.written) / settled.rate
        sent = 2 * setup.micro_batches * (ranks - 1) / ranks * setup.model_bytes * BF16_BYTES / FP32_BYTES
        wire = seconds_text(sent * config.local_size / (read_rate(config.rate) / 8))
        cut = f"cut over {ranks} ranks, as frontier can: {seconds_text(moved / ranks)}, and {wire} on the link in bf16"
        yield "weights on the disk", f"{seconds_text(moved)} of the disk for each rank's replica", cut


def seconds(way: Residency, setup: Setup, tokens: int, flops: float) -> tuple[float, float]:
    """Seconds that a rank's step computes, and that its disk moves bytes. way: with a rate.

    tokens: of a micro-batch. flops: operations per second.
    """
    each = WITH_AGAIN if way.recomputes else OPERATIONS
    computed = each * setup.model_bytes / FP32_BYTES * tokens * setup.micro_batches / flops
    return computed, sum(part.read + part.written for part in placed(way, setup)) / (way.rate or 1)


def _on_auto(asked: Residency, settled: Residency, setup: Setup, tokens: int, flops: float) -> Iterator[Row]:
    """What "auto" took, and whether another way that fits would be sooner if reads ahead are hidden."""
    if asked == settled:
        return
    # Where none leaves enough room to what is not counted, the one that needs least is taken.
    ways = fitting(asked, setup) or [settled]
    times = [max(seconds(way, setup, tokens, flops)) for way in ways]
    own, least = max(seconds(settled, setup, tokens, flops)), min(times)
    why = f"the soonest of {len(ways)} ways that fit, if reading ahead hides what it can"
    if len(ways) == 1:
        why = "no other way fits"
    if least < own:
        why = f"at these rates sooner: {_told(ways[times.index(least)])}, {seconds_text(least)}"
    yield "auto", f"{_told(settled)}: {seconds_text(own)} of a step", why


def _told(way: Residency) -> str:
    """The flags that state a way."""
    return f"--residency.weights {way.weights} --residency.gradients {way.gradients} --activations {way.activations}"
