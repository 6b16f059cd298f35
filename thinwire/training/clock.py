"""Chooses the number of steps that fit into --minutes, by measuring some steps on a copy of the run.

The learning rate of every step depends on the number of steps. So the measured steps are taken by a separate engine
that is thrown away. The run begins after the number is known, and equals a run with that `--steps` bit for bit.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch

from thinwire.calibration.work import pass_seconds
from thinwire.collectives.store_gather import told_by_first
from thinwire.data.loader import count_sequences
from thinwire.device import Device
from thinwire.errors import ConfigError, counted
from thinwire.models import build_model, generate
from thinwire.report.machine import num_cores
from thinwire.run.config import TrainConfig, derive, with_derived
from thinwire.run.effects import Row
from thinwire.run.place import ProcessPlace
from thinwire.run.run import Run
from thinwire.training.agreement import agree
from thinwire.training.engine import Corpus, Engine

# What of the time left is planned for: a machine may slow down.
PLANNED = 0.9
# Share of the time left in which steps are measured, and the least and greatest number of such steps.
MEASURED = 0.05
LEAST, MOST = 2, 10
# Checkpoint, report and the end of the processes.
END_S = 3.0
# Start-up, measuring and the end, as a part of the time, before any of them is measured.
AROUND = 0.3
# Of the large model; with fewer the small one learns more in the same time.
ENOUGH_STEPS = 100
LARGE, SMALL = "demo", "tiny"


@dataclass(frozen=True)
class MeasuredSteps:
    """Seconds of a step, of the work after the last step, and of building the run; all measured on rank 0."""

    step_s: float
    end_s: float
    build_s: float
    num_steps: int

    def steps_in(self, left_s: float) -> int:
        """The most steps that end in time; at least 1."""
        return max(1, math.floor(PLANNED * (left_s - self.build_s - self.end_s) / self.step_s))

    def fits(self, left_s: float) -> bool:
        """Whether a single step ends in time."""
        return self.step_s <= PLANNED * (left_s - self.build_s - self.end_s)


def fix_steps(run: Run, place: ProcessPlace, device: Device, dtype: str | None, began: float) -> tuple[Run, list[Row]]:
    """The run with the number of steps that end `--minutes` after `began`, the same on all ranks; and rows about it.

    began: as time.time(), on rank 0, which decides. A collective over all ranks.
    """
    minutes = run.config.minutes
    assert minutes is not None
    if place.rank == 0:
        print(f"--minutes {minutes:g}: measuring the first steps ...", flush=True)
    due, started = began + 60 * minutes, time.time()
    measured = measure(run, place, device, dtype, due)
    left_s = due - time.time()
    num_steps = told_by_first(measured.steps_in(left_s), "the number of steps")
    config = with_derived(replace(run.config, steps=num_steps, minutes=None))
    chosen = f"a step took {measured.step_s:.3g} s in {measured.num_steps} measured"
    if not measured.fits(left_s):
        before = f"{started - began:.0f} s to start and {due - left_s - started:.0f} s to measure"
        chosen = f"the time is too short, by {before}: one step is trained all the same; {chosen}"
    after = f"{measured.end_s:.0f} s are kept for the end; --steps {num_steps} repeats this run bit for bit"
    # What the ranks have measured and chosen does not depend on the number of steps.
    fixed = replace(Run.of(config), experts=run.experts, links=run.links)
    return fixed, [(f"--minutes {minutes:g}", counted(num_steps, "step"), f"{chosen}, {after}")]


def measure(run: Run, place: ProcessPlace, device: Device, dtype: str | None, due: float) -> MeasuredSteps:
    """Take a few steps with an engine that is thrown away. due: when the run should end. A collective."""
    start = time.perf_counter()
    corpus = Corpus.of(run.config)
    engine = Engine(run, place, device, corpus, agree(run.config, tokens=corpus.digest, dtype=dtype))
    engine.set_lr(run.config.lr)
    build_s = time.perf_counter() - start
    budget_s = MEASURED * (due - time.time())
    seconds: list[float] = []
    forward_s, goes_on = 0.0, True
    while goes_on:
        start = time.perf_counter()
        forward_s = engine.forward_backward()
        engine.stage.reduce()
        engine.update()
        device.synchronize()
        seconds.append(time.perf_counter() - start)
        # The first one warms up.
        timed = seconds[1:]
        enough = len(timed) >= LEAST and (sum(timed) > budget_s or len(timed) >= MOST)
        goes_on = told_by_first(not (enough or time.time() > due), "whether another step is measured")
    engine.optimizer.synchronize()
    end_s = END_S + evaluation_s(engine, forward_s) + sample_s(engine)
    engine.close()
    timed = seconds[1:] or seconds
    return MeasuredSteps(sum(timed) / len(timed), end_s, build_s, len(timed))


def evaluation_s(engine: Engine, forward_s: float) -> float:
    """Seconds of the held-out loss, estimated from those of a step's forward passes."""
    available = count_sequences(engine.corpus.heldout, engine.config.seq_len)
    sequences = min(available, engine.config.eval_sequences) / engine.num_shares
    return forward_s * sequences / (engine.batch.micro_batch * engine.batch.accumulation)


def sample_s(engine: Engine) -> float:
    """Seconds of the text at the end, estimated from those of one token after half of the text."""
    num_tokens = engine.config.sample_tokens
    if not num_tokens or not engine.writes_sample:
        return 0.0
    context = torch.zeros(1, max(1, num_tokens // 2), dtype=torch.int64, device=engine.device.torch)
    start = time.perf_counter()
    with engine.device.autocast(engine.dtype):
        generate(engine.continuing, context, 1, 0.0)
    engine.device.synchronize()
    return (time.perf_counter() - start) * num_tokens


def choose_model(config: TrainConfig, threads: int, dtype: str, vocab_size: int) -> tuple[str, str]:
    """The model for `--model auto`, and why: the larger one if it gets enough steps in the time.

    Measured in this process, on the CPU, by one pass of one worker. dtype: the compute type. Raises ConfigError without
    --minutes, and on several machines, which might choose differently.
    """
    if config.minutes is None:
        raise ConfigError(f"--model auto: chooses by the time that --minutes states; nearest: --model {LARGE}")
    if config.nodes > 1:
        raise ConfigError(
            f"--model auto: each of {config.nodes} machines would choose for itself; nearest: --model {LARGE}"
        )
    batch = derive(config, config.num_shares)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = build_model(LARGE, vocab_size, config.seq_len)
        pass_s = pass_seconds(model, batch.micro_batch, config.seq_len, dtype, Device())
    finally:
        torch.set_num_threads(before)
    # Workers beyond the cores wait for each other.
    step_s = batch.accumulation * pass_s * max(1.0, config.workers * threads / num_cores())
    steps = math.floor((1 - AROUND) * 60 * config.minutes / step_s)
    why = f"{LARGE} would take about {step_s:.2g} s a step, {steps} steps in {config.minutes:g} min"
    if steps >= ENOUGH_STEPS:
        return LARGE, why
    return SMALL, f"{why}; with fewer than {ENOUGH_STEPS} the smaller model learns more"
