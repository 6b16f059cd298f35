"""The command line of `thinwire compare`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from thinwire.flags import CommandLine
from thinwire.launch.line import command_line as of_training


@dataclass(frozen=True)
class RaceConfig:
    """Race strategies in the same emulated slow network: same seeds, same tokens, in turns.

    CONFIG.toml is that of `thinwire train`, whose flags may follow after `--`. Without CONFIG.toml, each contestant
    takes 200 steps; `-- --steps N` states another number.
    """

    strategies: str = "ddp,ddp-bf16,fsdp-bf16,powersgd-torch,powersgd,zero,sdp4bit"
    """Contestants, separated by commas: STRATEGY, NAME=STRATEGY[option=value,...] or cmd:NAME=COMMAND."""
    lab: str = "nodes=2,rate=100mbit"
    """The network: nodes=N,rate=R and, if you like, local_size=L,slow=NODE:R,delay=T,loss=P."""
    target_loss: str | None = None
    """Training loss to reach: a number, or auto for the loss with which zero ends (else ddp, else the first to
    finish)."""
    rounds: int | None = None
    """Rounds into which the steps are divided; in each, every contestant runs once, in another order. By default 3, or
    as many as the steps allow."""
    timed_steps: int | None = None
    """Steps of each round that run in the slow network, after the warm-up; by default 10, or two exchanges of islands
    if these take more. The others train at full speed. A round's length or more: all of them."""
    smooth: int | None = None
    """Steps over which the training loss is averaged; by default 20, or all steps of a shorter run."""
    seeds: str | None = None
    """Seeds, separated by commas, of each contestant's runs; by default the configuration's."""
    bound: bool = True
    """Measure computation alone too, for the least time that a step could take."""
    timeout: float = 600.0
    """Seconds without a new step after which a contestant is given up."""
    out: str = "runs/compare"
    """Folder for compare.json, compare.html and a run directory for each contestant and seed."""
    resume: bool = False
    """Continue the interrupted race in the folder."""
    overwrite: bool = False
    """Delete the race that the folder holds."""


@dataclass(frozen=True)
class RaceLine(RaceConfig):
    __doc__ = RaceConfig.__doc__

    config_file: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CONFIG.toml]")] = None


def command_line() -> CommandLine:
    """The flags of `thinwire compare`."""
    return CommandLine("thinwire compare", RaceLine)


def of_other_place(name: str) -> str:
    """Tail of an error message about a flag of the training."""
    is_of_training = of_training().knows(name)
    return ": it is one of `thinwire train`, whose flags follow after --" if is_of_training else ""
