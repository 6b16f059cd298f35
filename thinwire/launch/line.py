"""The command line of `thinwire train`: defaults, then a TOML file, then flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from thinwire.errors import ConfigError, Problems
from thinwire.flags import CommandLine, Stated
from thinwire.run.config import AXIS_TABLES, TrainConfig
from thinwire.run.run_dir import RunDir

# The flags under their titles in --help; the first are those that most runs need.
GROUPS = {
    "common": (
        "model", "data", "strategy", "workers", "device", "steps", "minutes", "tokens_per_step", "seq_len",
        "micro_batch", "lr", "seed", "run_dir", "resume", "overwrite", "dry_run",
    ),
    "machines": ("local_size", "mesh", "stages", "tensor", "order", "plan", "join", "nodes", "node", "timeout"),
    "memory": ("memory", "store", "activations", "slices"),
    "data": ("text_field", "documents", "tokenizer", "cache_dir"),
    "training": (
        "inner", "optimizer", "weight_decay", "warmup_steps", "grad_clip", "dead_steps", "dtype", "compile", "loss",
        "teacher", "teacher_weight", "stop_at",
    ),
    "checkpoints": ("checkpoint_every", "keep_last", "keep_every", "keep_best", "allow_resume_drift"),
    "results": ("eval_sequences", "prompt", "sample_tokens", "track"),
    "faults": ("checked", "restarts", "inject"),
}  # fmt: skip


@dataclass(frozen=True)
class TrainLine(TrainConfig):
    __doc__ = TrainConfig.__doc__

    config_file: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CONFIG.toml]")] = None


def command_line() -> CommandLine:
    """The flags of `thinwire train`: those of TrainConfig, and a prefix such as --sdp4bit. for each table."""
    return CommandLine(
        "thinwire train",
        TrainLine,
        tables=option_tables,
        presets=dict.fromkeys(("llama", "moe"), "the preset's"),
        groups=GROUPS,
    )


def option_tables() -> Mapping[str, type]:
    """See `thinwire.options`, which loads the strategies and with them torch."""
    from thinwire import options

    return options.option_tables()


def read_config(args: Sequence[str], problems: Problems) -> TrainConfig:
    """The configuration that the command line states. Notes wrong keys, flags and types as problems.

    With --resume and no CONFIG.toml, the run directory's own config.toml is read. Raises ConfigError for a file that
    can't be read; SystemExit after --help.
    """
    return configured(command_line().read(args, problems), problems)


def configured(stated: Stated, problems: Problems) -> TrainConfig:
    """The configuration from the values that the command line states."""
    # It knows the strategies, and with them torch, for which --help does not wait.
    from thinwire.options import RESIDENCY, with_capacity
    from thinwire.run.places import without_stated
    from thinwire.run.settings import check_length, own_limit, read_toml

    tables = dict(stated)
    flags = tables.pop("")
    check_length(flags, "", problems)
    path = flags.pop("config_file", None)
    asked = replace(TrainConfig(), **flags)
    if path is not None and asked.resume and Path(path).is_dir():
        raise ConfigError(
            *problems.messages,
            f"--resume {path}: takes no folder, which is that of --run-dir; nearest: --resume --run-dir {path}",
        )
    if path is None and asked.resume:
        own = RunDir(asked.run_dir).config(asked.node)
        path = str(own) if own.is_file() else None
    try:
        below = read_toml(Path(path), problems) if path is not None else TrainConfig()
    except ConfigError as error:
        raise ConfigError(*problems.messages, *error.problems) from None
    # The flag decides over the file, in which the other of the two may stand.
    if "steps" in flags:
        below = replace(below, minutes=None)
    elif "minutes" in flags:
        below = replace(below, steps=TrainConfig().steps)
    if "mesh" in flags:
        below = below.without_axes()
    elif below.mesh is not None and (
        {"stages", "tensor"} & flags.keys() or any("parallel" in tables.get(name, {}) for name in AXIS_TABLES.values())
    ):
        below = below.by_flags()
    below = without_stated(below, flags, tables)
    if asked.resume and "local_size" not in flags and (below.local_size or 1) > replace(below, **flags).world_size:
        below = replace(below, local_size=None)
    tables = {name: {**below.tables.get(name, {}), **tables.get(name, {})} for name in {**below.tables, **tables}}
    budgets = flags.get("memory"), below.memory, tables.get(RESIDENCY, {}).get("memory")
    if (limit := own_limit()) is not None and not any(value is not None for value in budgets):
        flags["memory"] = limit
    config = replace(below, **flags, tables={name: values for name, values in tables.items() if values})
    return replace(config, tables=with_capacity(config.model, config.tables, problems))
