"""Everything that can go wrong before a process starts, and everything worth doing only once."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from thinwire.checkpoint import CheckpointError, choose, passed_over, step_of
from thinwire.checkpoint.folder import Manifest
from thinwire.codecs import warm
from thinwire.collectives import faults
from thinwire.collectives.topology import Topology
from thinwire.data import documents, load_tokenizer
from thinwire.data import prepare as prepare_tokens
from thinwire.errors import ConfigError
from thinwire.methods.interface import Method
from thinwire.methods.islands.base import IslandsMethod
from thinwire.models import build_model
from thinwire.models.hf import check_hf, look_into
from thinwire.training.config import (
    FIXED_ON_RESUME,
    TrainConfig,
    derive,
    range_errors,
    with_derived,
)
from thinwire.training.effects import (
    Row,
    batch_row,
    late_rows,
    resume_rows,
    unused_rows,
)
from thinwire.training.hardware import choose_dtype, free_port, port_is_free, threads_per_worker
from thinwire.training.metrics import read_metrics
from thinwire.training.problems import Problems
from thinwire.training.run_dir import RunDir
from thinwire.training.settings import (
    DEFAULT_INNER,
    build_strategy,
    has_islands,
    island_size,
    parse_toml,
    read_toml,
    to_toml,
    used_tables,
    with_optimizer,
)
from thinwire.training.trackers import check_trackers


class Island(NamedTuple):
    """One of the worlds that train together. meet: HOST:PORT where their first ranks meet; empty for the only one."""

    number: int = 0
    num_islands: int = 1
    meet: str = ""


@dataclass(frozen=True)
class Start:
    """What the launcher found out for its workers."""

    dtype: str | None = None
    threads: int = 1
    effects: list[Row] = field(default_factory=list)
    stop_at: int | None = None
    inject: tuple[str, ...] = ()
    allow_resume_drift: bool = False
    island: Island | None = None

    def to_json(self) -> str:
        return json.dumps([
            self.dtype, self.threads, self.effects, self.stop_at, self.inject, self.allow_resume_drift, self.island,
        ])  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> Start:
        dtype, threads, effects, stop_at, inject, allow_resume_drift, island = json.loads(text)
        rows = [(asked, effect, reason) for asked, effect, reason in effects]
        place = Island(*island) if island else None
        return cls(dtype, threads, rows, stop_at, tuple(inject), allow_resume_drift, place)


def check(config: TrainConfig, problems: Problems) -> None:
    """Note every reason why this run can't start, without writing anything."""
    wrong_numbers = list(range_errors(config))
    problems.messages += wrong_numbers
    strategy = topology = None
    with problems.collect():
        strategy = build_strategy(config)
        with_optimizer(config)
    if not wrong_numbers:
        with problems.collect():
            derive(config, config.world_size)
        with problems.collect():
            if strategy is not None and has_islands(config.strategy):
                topology = Topology.stated(config.world_size, island_size(config))
            else:
                topology = Topology.stated(config.world_size, config.local_size or config.workers)
    if strategy is not None and topology is not None:
        with problems.collect():
            check_grid(strategy, topology)
    with problems.collect():
        check_trackers(config.track)
    with problems.collect():
        RunDir(config.run_dir).check(config.node, resume=config.resume, overwrite=config.overwrite)
    for text in config.inject:
        with problems.collect():
            check_fault(text, config)
    with problems.collect():
        check_join(config)
    with problems.collect():
        check_data(config)
    with problems.collect():
        model = check_model(config)
        if isinstance(strategy, IslandsMethod) and model is not None:
            strategy.fragments(model)


def check_grid(strategy: Method, topology: Topology) -> None:
    """Raise ConfigError where the strategy can't run on such a grid, whatever the model."""
    strategy.plan(nn.Module(), topology, 1)


def check_fault(text: str, config: TrainConfig) -> None:
    """Raise ConfigError for a fault that can't be read, or can't fire in this run."""
    fault, num_ranks = faults.parse(text), config.world_size
    if not has_islands(config.strategy):
        if fault.island is not None:
            raise ConfigError(f"--inject {text!r}: strategy {config.strategy} has no islands; name a rank")
    else:
        num_ranks = island_size(config)
        num_islands = config.world_size // num_ranks
        if fault.island is None:
            raise ConfigError(f"--inject {text!r}: name the island too, such as island=0; ranks count inside of it")
        if fault.island >= num_islands:
            raise ConfigError(f"--inject {text!r}: islands are numbered from 0 to {num_islands - 1}")
    if fault.rank is not None and fault.rank >= num_ranks:
        raise ConfigError(f"--inject {text!r}: ranks are numbered from 0 to {num_ranks - 1}")
    if fault.step is not None and fault.step > config.steps:
        raise ConfigError(f"--inject {text!r}: the run ends after step {config.steps}")


def check_data(config: TrainConfig) -> None:
    """Read the first document; a dataset of the network is left to the tokenising that follows."""
    if not config.data.startswith("hf:"):
        next(documents(config.data, config.text_field), None)


def check_model(config: TrainConfig) -> nn.Module | None:
    """The model without memory; of one of transformers, whose weights may be large, the config alone is checked."""
    tokenizer = load_tokenizer(config.tokenizer)
    if config.seq_len <= 0:
        return None
    if config.model.startswith("hf:"):
        check_hf(config.model.removeprefix("hf:"), tokenizer.vocab_size, config.seq_len, {})
        return None
    with torch.device("meta"):
        return build_model(config.model, tokenizer.vocab_size, config.seq_len, config.seed, config.tables.get("llama"))


def check_join(config: TrainConfig) -> None:
    """Raise ConfigError for an address that is none, or node 0's port in use."""
    if config.join is None:
        return
    host, _, port = config.join.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--join {config.join}: must be HOST:PORT, such as 192.168.1.10:29500")
    if config.node == 0 and not port_is_free(int(port)):
        raise ConfigError(
            f"--join {config.join}: port {port} is in use on this machine; take another, the same on all machines, "
            f"such as {free_port()}"
        )


def model_rows(config: TrainConfig) -> list[Row]:
    """Where the weights of a model of transformers come from."""
    if not config.model.startswith("hf:"):
        return []
    if look_into(Path(config.model.removeprefix("hf:")).expanduser()):
        return [(f"--model {config.model}", "starts from the folder's weights", "")]
    return [(f"--model {config.model}", "starts at random", "the folder holds no .safetensors file")]


def resolve(config: TrainConfig, threads: int) -> tuple[TrainConfig, list[Row]]:
    """The configuration with everything derived filled in, and the rows that say so."""
    batch = derive(config, config.world_size)
    dtype: Any
    dtype, reason = choose_dtype(config.dtype, threads)
    rows: list[Row] = [(f"dtype {config.dtype}", dtype, reason), batch_row(config, batch, config.world_size)]
    rows += [*model_rows(config), *unused_rows(config), *late_rows(config)]
    chosen = with_optimizer(config)
    if has_islands(config.strategy):
        size = island_size(config)
        chosen = replace(chosen, local_size=size, inner=config.inner or DEFAULT_INNER)
        asked = f"--local-size {config.local_size or 'any'}"
        why = "" if config.local_size else "every worker of a single machine, else every machine, is an island"
        rows.append((asked, f"{config.world_size // size} island(s) of {size} rank(s)", why))
    if config.optimizer is None:
        rows.append(("--optimizer", f"{chosen.optimizer}", f"the choice of strategy {config.strategy}"))
    if torch.cuda.is_available():
        rows.append(("device any", "cpu", "this version trains on the CPU; the GPU it sees is left alone"))
    return replace(with_derived(chosen), dtype=dtype), rows


def prepare(config: TrainConfig, problems: Problems) -> tuple[TrainConfig, Start]:
    """Check, then claim the run directory, and warm what workers would otherwise all do: tokens, kernels, dtype.

    Raises ConfigError with all problems at once.
    """
    check(config, problems)
    problems.raise_any()
    threads, why = threads_per_worker(config.workers)
    resolved, rows = resolve(config, threads)
    rows.insert(0, ("threads per worker", str(threads), why))
    run_dir = RunDir(config.run_dir)
    rows += check_resume(resolved, run_dir)
    cache_dir = Path(config.cache_dir) if config.cache_dir else None
    tokens = prepare_tokens(
        config.data, load_tokenizer(config.tokenizer), text_field=config.text_field, cache_dir=cache_dir
    )
    tokens.split(config.seq_len)
    warm_kernels(resolved)
    run_dir.claim(config.node, to_toml(resolved), overwrite=config.overwrite)
    rows += [(f"--inject {text!r}", "armed", faults.KINDS[faults.parse(text).kind]) for text in config.inject]
    start = Start(resolved.dtype, threads, rows, config.stop_at, config.inject, config.allow_resume_drift)
    return resolved, start


def warm_kernels(config: TrainConfig) -> None:
    """Compile the kernels of the strategy's codecs once, into the cache on disk."""
    strategy = build_strategy(config)
    logging.getLogger("numba").setLevel(logging.WARNING)
    warm(strategy.codecs)


def saved_config(checkpoint: Path) -> TrainConfig | None:
    """The configuration that has saved a checkpoint, which config.toml need not be: it is of the last start.

    None where it does not say, or is of another version.
    """
    text, problems = Manifest.read(checkpoint).about.get("config"), Problems()
    config = parse_toml(text, str(checkpoint), problems) if text else None
    return None if problems.messages else config


def check_resume(config: TrainConfig, run_dir: RunDir) -> list[Row]:
    """Rows on what a resumed run changes; raises ConfigError for a change that would make it another run."""
    if not config.resume:
        return []
    later = passed_over(run_dir.checkpoints)
    try:
        chosen, wrong = choose(run_dir.checkpoints)
    except CheckpointError as error:
        if config.nodes == 1:
            raise
        # The other machines wait, and hear it from this one's workers.
        return [("--resume", "no checkpoint is sound on this machine", str(error))]
    step = step_of(chosen)
    rows: list[Row] = [("a later checkpoint", "passed over", why) for why in later]
    rows += [("a later checkpoint", "passed over: it is damaged", problem) for problem in wrong]
    if chosen is None:
        return [*rows, ("--resume", "starts at step 0", f"{run_dir.path} holds no checkpoint yet")]
    why = "all of its files have the right checksums"
    records = read_metrics(run_dir.metrics)
    if records and records[-1].step > step:
        why += f"; steps {step + 1} to {records[-1].step} are in no sound checkpoint, and are taken again"
    rows.append(("--resume", f"goes on after step {step}", why))
    if config.stop_at is not None and config.stop_at < step:
        raise ConfigError(f"--stop-at {config.stop_at}: the checkpoint was taken after step {step}; nearest: {step}")
    if not run_dir.config(config.node).is_file():
        return rows
    problems = Problems()
    old = read_toml(run_dir.config(config.node), problems)
    for name in FIXED_ON_RESUME:
        before, after = getattr(old, name), getattr(config, name)
        if before != after:
            problems.messages.append(f"--resume: {name} was {before} and can't become {after}; start a new run for it")
    saved = saved_config(chosen) or old
    for table in used_tables(config) & used_tables(saved):
        if saved.tables.get(table, {}) != config.tables.get(table, {}):
            problems.messages.append(f"--resume: the options [{table}] can't change; start a new run for that")
    problems.raise_any()
    return [*rows, *resume_rows(old, config)]
