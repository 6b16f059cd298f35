"""What a run states of where its training lies: a budget of memory, a folder on a disk, activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from thinwire.errors import ConfigError
from thinwire.methods.memory import Residency
from thinwire.options import RESIDENCY, Tables, made
from thinwire.run.config import TrainConfig
from thinwire.run.run_dir import RunDir

# Options of a residency that have flags of their own, and those for which nothing need lie on a disk.
FLAT = ("memory", "store", "activations", "slices")
IN_MEMORY = {"activations", "slices"}
# In place of a folder: nothing lies on a disk. What may lie there otherwise.
NO_STORE, PLACES = "none", ("weights", "gradients", "optimizer")
KEEP = "keep"


def residency_options(config: TrainConfig) -> dict[str, Any]:
    """The options of a residency that are stated, with those that have flags of their own.

    Raises ConfigError for an option that is stated twice.
    """
    options = dict(config.tables.get(RESIDENCY, {}))
    for name in FLAT:
        stated, other = getattr(config, name), options.get(name)
        if stated is not None and other not in (None, stated):
            raise ConfigError(f"--{name} {stated} and --residency.{name} {other}: give one of them")
        options[name] = other if stated is None else stated
    return {name: value for name, value in options.items() if value is not None}


def without_stated(config: TrainConfig, flags: Mapping[str, Any], tables: Tables) -> TrainConfig:
    """The same without what flags, and the tables of flags, state under either of its two names."""
    own, below, cleared = tables.get(RESIDENCY, {}), dict(config.tables.get(RESIDENCY, {})), dict[str, Any]()
    for name in FLAT:
        if name in flags:
            below.pop(name, None)
        elif name in own:
            cleared[name] = None
    return replace(config, **cleared, tables={**config.tables, RESIDENCY: below})


def completed(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a residency, with all in memory where no disk is asked for, or none is to be used."""
    found = dict(options)
    if found.get("store") == NO_STORE:
        del found["store"]
    elif not found.keys() <= IN_MEMORY:
        return found
    return {**dict.fromkeys(PLACES, "memory"), **found}


def is_bare(options: Mapping[str, Any]) -> bool:
    """Whether completed options change nothing of a training: all is kept in memory, under a budget or without one."""
    own = {name: value for name, value in options.items() if name not in ("memory", "disk_rate")}
    return own in (everything := dict.fromkeys(PLACES, "memory"), everything | {"activations": KEEP})


def made_residency(options: Mapping[str, Any], tables: Tables) -> Residency:
    """The residency of these options. Raises ConfigError, whose flags have a prefix only where `tables` state them."""
    try:
        return made(Residency, options, RESIDENCY)
    except ConfigError as error:
        problems = list(error.problems)
        for name in set(FLAT) - tables.get(RESIDENCY, {}).keys():
            problems = [told.replace(f"--{RESIDENCY}.{name} ", f"--{name} ") for told in problems]
        raise ConfigError(*problems) from None


def residency_of(config: TrainConfig) -> Residency | None:
    """What lies on a disk, or is computed again; None: nothing. Raises ConfigError for values that can't work."""
    stated = residency_options(config)
    options = completed(stated)
    if options.get("durable") and "store" in options:
        options["store"] = str(RunDir(config.run_dir).own_store(options["store"]))
    has_none = stated.get("store") == NO_STORE
    default = {} if has_none else {"store": str(RunDir(config.run_dir).store)}
    # Without a disk it asks for what no option of the run has refused.
    keeps = has_none and options.get("durable") is True
    found = made_residency(default | options | ({"durable": False} if keeps else {}), config.tables)
    if has_none:
        check_no_store(found, options, keeps=keeps)
    return None if is_bare(options) else found


def check_slices(residency: Residency, micro_batch: int) -> None:
    """Raise ConfigError for more slices than a micro-batch has sequences."""
    if residency.slices is not None and residency.slices > micro_batch:
        raise ConfigError(
            f"--slices {residency.slices}: a micro-batch has {micro_batch} sequences; nearest: --slices {micro_batch}"
        )


def check_no_store(found: Residency, options: Mapping[str, Any], *, keeps: bool = False) -> None:
    """Raise ConfigError for a residency of these options that needs a disk. keeps: they ask for durable steps."""
    if found.needs_store or keeps:
        asking = {name: getattr(found, name) == "disk" for name in PLACES} | {
            "optimizer": found.optimizer != "memory", "activations": found.spills, "durable": keeps,
        }  # fmt: skip
        flags = {name: f"--{name}" if name in FLAT else f"--{RESIDENCY}.{name}" for name in asking}
        named = " and ".join(f"{flags[name]} {str(options[name]).lower()}" for name, asks in asking.items() if asks)
        raise ConfigError(
            f"--store {NO_STORE}: nothing lies on a disk, and that needs one: {named}; nearest: a folder, or leave "
            "--store out"
        )
