"""Where a resumed run goes on, and whether it may."""

from __future__ import annotations

from pathlib import Path

from thinwire.checkpoint import CheckpointError, choose, passed_over, step_of
from thinwire.checkpoint.folder import Manifest
from thinwire.errors import Problems
from thinwire.options import LAYOUT_TABLES, RESIDENCY
from thinwire.report.metrics import read_metrics
from thinwire.run.config import FIXED_ON_RESUME, TrainConfig
from thinwire.run.effects import resume_rows, stretched_rows
from thinwire.run.run import tables_in_effect
from thinwire.run.run_dir import RunDir
from thinwire.run.settings import parse_toml, read_toml
from thinwire.table import Row


def saved_config(checkpoint: Path) -> TrainConfig | None:
    """The configuration of the run that saved a checkpoint; config.toml is that of the last start and may differ.

    None if the checkpoint does not state it, or if another version wrote it.
    """
    text, problems = Manifest.read(checkpoint).about.get("config"), Problems()
    config = parse_toml(text, str(checkpoint), problems) if text else None
    return None if problems.messages else config


def check_resume(config: TrainConfig, run_dir: RunDir) -> list[Row]:
    """Rows about what a resumed run changes. Raises ConfigError for a change that needs a new run."""
    if not config.resume:
        return []
    later = passed_over(run_dir.checkpoints)
    try:
        chosen, wrong = choose(run_dir.checkpoints)
    except CheckpointError as error:
        if config.nodes == 1:
            raise
        # The other machines wait for this one, whose workers tell them.
        return [("--resume", "no checkpoint is sound on this machine", str(error))]
    step = step_of(chosen)
    rows: list[Row] = [("a later checkpoint", "passed over", why) for why in later]
    rows += [("a later checkpoint", "passed over: it is damaged", problem) for problem in wrong]
    is_durable = bool(config.tables.get(RESIDENCY, {}).get("durable"))
    if is_durable:
        why = "the last step that all ranks have on their disks, if it is later than the checkpoint"
        rows.append(("--residency.durable", "goes on after the last step", why))
    if chosen is None:
        rows.append(("--resume", "starts at step 0", f"{run_dir.path} holds no checkpoint yet"))
        return rows[:-1] if is_durable else rows
    why = "all of its files have the right checksums"
    records = read_metrics(run_dir.metrics)
    if records and records[-1].step > step and not is_durable:
        why += f"; steps {step + 1} to {records[-1].step} are in no sound checkpoint, and are taken again"
    problems = Problems()
    if step > config.steps:
        problems.messages.append(f"--resume: step {step} is past --steps {config.steps}; nearest: --steps {step + 1}")
    if step == config.steps:
        why += f"; no step of --steps {step} is left: it measures and reports again, and trains nothing"
    rows.append(("--resume", f"goes on after step {step}", why))
    if config.stop_at is not None and config.stop_at < step:
        problems.messages.append(
            f"--stop-at {config.stop_at}: the checkpoint was taken after step {step}; nearest: {step}"
        )
    if not run_dir.config(config.node).is_file():
        problems.raise_any()
        return rows
    old = read_toml(run_dir.config(config.node), problems)
    for name in FIXED_ON_RESUME:
        before, after = getattr(old, name), getattr(config, name)
        if before != after:
            problems.messages.append(f"--resume: {name} was {before} and can't become {after}; start a new run for it")
    saved = saved_config(chosen) or old
    # A checkpoint knows nothing of how the model was cut, and where it lay.
    for table in (tables_in_effect(config) & tables_in_effect(saved)) - LAYOUT_TABLES.keys():
        if saved.tables.get(table, {}) != config.tables.get(table, {}):
            problems.messages.append(f"--resume: the options [{table}] can't change; start a new run for that")
    problems.raise_any()
    return [*rows, *resume_rows(old, config), *stretched_rows(saved, config, step)]
