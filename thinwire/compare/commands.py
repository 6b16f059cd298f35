"""The commands that run a contestant, and the files that these commands write."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.compare.checks import WARM_UP_STEPS
from thinwire.compare.contestants import COMPUTE, Contestant
from thinwire.compare.plan import RacePlan
from thinwire.run.run_dir import RunDir
from thinwire.run.settings import to_toml

# Enough for a median; more steps would only make the race longer.
MOST_ALONE_STEPS = 10
ALONE = Path(__file__).with_name("alone.py")
RANK_DIR = "rank{rank}"


@dataclass(frozen=True)
class Files:
    """Files of one contestant's run with one seed: its run directory, its configuration and its output."""

    run_dir: Path

    @classmethod
    def of(cls, out: Path, contestant: str, seed: int) -> Files:
        return cls(out.absolute() / contestant / f"seed{seed}")

    @property
    def config(self) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}.toml")

    @property
    def output(self) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}.log")

    @property
    def metrics(self) -> Path:
        return RunDir(self.run_dir).metrics


def environment(plan: RacePlan) -> Mapping[str, str]:
    """This process's environment, with an equal share of the cores for each rank."""
    return {**os.environ, "OMP_NUM_THREADS": str(plan.threads), "PYTHONUNBUFFERED": "1"}


def contestant_command(plan: RacePlan, contestant: Contestant, seed: int, stop: int) -> list[str]:
    """Train from the run's last step to the step `stop`; writes the configuration."""
    files = Files.of(plan.out, contestant.name, seed)
    files.run_dir.parent.mkdir(parents=True, exist_ok=True)
    config = replace(contestant.config(plan.train), seed=seed, run_dir=str(files.run_dir))
    files.config.write_text(to_toml(config))
    goes_on = RunDir(files.run_dir).holds_run() and not contestant.is_whole
    if contestant.command:
        if not goes_on:
            shutil.rmtree(files.run_dir, ignore_errors=True)
        values = {
            "run_dir": files.run_dir, "config": files.config, "steps": config.steps, "seed": seed, "stop_at": stop,
            "resume": "--resume" if goes_on else "",
        }  # fmt: skip
        return contestant.words({name: str(value) for name, value in values.items()})
    command = [sys.executable, "-m", "thinwire", "train", str(files.config)]
    command += ["--resume"] if goes_on else []
    # The last round ends as every run does: with the held-out loss.
    return command if stop == config.steps else [*command, "--stop-at", str(stop)]


def alone_command(plan: RacePlan, seed: int) -> list[str]:
    """Train each rank's share of the tokens on that rank alone, for a few steps."""
    files = Files.of(plan.out, COMPUTE, seed)
    files.run_dir.parent.mkdir(parents=True, exist_ok=True)
    config = replace(
        plan.train, strategy="zero", workers=1, local_size=1, seed=seed, steps=num_alone_steps(plan),
        tokens_per_step=plan.tokens_per_step // plan.lab.world_size, run_dir=str(files.run_dir), eval_sequences=0,
        checkpoint_every=0, track=(), tables={k: v for k, v in plan.train.tables.items() if k in ("llama", "moe")},
    )  # fmt: skip
    files.config.write_text(to_toml(config))
    train = [sys.executable, "-m", "thinwire", "train", str(files.config), "--overwrite"]
    return [sys.executable, str(ALONE), str(files.run_dir / RANK_DIR), *train]


def num_alone_steps(plan: RacePlan) -> int:
    return WARM_UP_STEPS + min(plan.race.timed_steps or MOST_ALONE_STEPS, MOST_ALONE_STEPS)


def alone_dirs(plan: RacePlan, seed: int) -> list[Path]:
    """Run directories of the ranks of `alone_command`."""
    run_dir = Files.of(plan.out, COMPUTE, seed).run_dir
    return [run_dir / RANK_DIR.replace("{rank}", str(rank)) for rank in range(plan.lab.world_size)]
