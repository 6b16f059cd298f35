"""How long a step of a training under a budget computes, and how long it would wait for a disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from thinwire.calibration import step_flops
from thinwire.device import Device
from thinwire.lab.spec import read_rate
from thinwire.methods.memory import Residency, Setup, StepRates, efficiency, fitting, intensities, placed, seconds
from thinwire.methods.memory.residency import FP32_BYTES
from thinwire.planner.options import ExplainConfig
from thinwire.report.units import seconds_text
from thinwire.table import Row

BF16_BYTES = 2


def rates_of(config: ExplainConfig, residency: Residency) -> StepRates | None:
    """What a rank does in a second; None: the disk's rate is not stated. Computing is measured here, or stated."""
    if residency.rate is None:
        return None
    flops = step_flops(torch.float32, Device()) if config.gflops is None else config.gflops * 1e9
    found = StepRates(config.micro_batch * config.seq_len, flops, residency.rate, residency.rate)
    return found if config.rate is None else replace(found, sent=read_rate(config.rate) / 8 / config.local_size)


def rows_on_waiting(
    config: ExplainConfig, asked: Residency, settled: Residency, setup: Setup, rates: StepRates | None
) -> Iterator[Row]:
    """Rows of (asked for, in effect, why): the efficiency of a disk, and the seconds of what "auto" took.

    asked: with "auto". Without rates, a row that says so.
    """
    if rates is None:
        yield "efficiency", "not known", "the disk's rate is missing: name it, such as --disk-rate 500MB/s"
        return
    how = "half of a matrix product's here; --gflops states another" if config.gflops is None else "as --gflops says"
    ranks, (computed, moved, sent) = setup.topology.world_size, seconds(settled, setup, rates)
    yield "computing", f"{seconds_text(computed)} of a step", f"at {rates.flops / 1e9:.0f} GFLOP/s, {how}"
    # Each rank reads its part at its own disk's rate.
    disks = {"weights": setup.method.levels(setup.topology).weights_over, "masters and optimizer state": ranks}
    width = getattr(getattr(setup.model, "config", None), "hidden_size", None)
    shares = [
        f"{name} {efficiency(each, rates.read * disks.get(name, 1), rates.flops):.2f}"
        for name, each in intensities(rates.tokens, setup.micro_batches, width).items()
    ]
    yield "efficiency", ", ".join(shares), "the share of time that computes, if these lie on the disk and it waits"
    if asked != settled:
        num = len(fitting(asked, setup))
        why = f"of {num} ways that fit, none is clearly sooner, if reading ahead hides what it can"
        took = f"{told(settled)}: {seconds_text(max(computed, moved, sent))} of a step"
        yield "auto", took, why if num > 1 else "no other way fits"
    own = next(part for part in placed(settled, setup) if part.name == "weights")
    if config.rate is not None and ranks > 1 and own.read and not setup.is_cut:
        moved = own.read / rates.read + own.written / rates.written
        sent = 2 * setup.micro_batches * (ranks - 1) / ranks * setup.model_bytes * BF16_BYTES / FP32_BYTES
        wire = seconds_text(sent * config.local_size / (read_rate(config.rate) / 8))
        cut = f"cut over {ranks} ranks, as frontier can: {seconds_text(moved / ranks)}, and {wire} on the link in bf16"
        yield "weights on the disk", f"{seconds_text(moved)} of the disk for each rank's replica", cut


def told(way: Residency) -> str:
    """The flags that state a way."""
    return f"--residency.weights {way.weights} --residency.gradients {way.gradients} --activations {way.activations}"
