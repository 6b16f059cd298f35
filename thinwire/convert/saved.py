"""A run as its directory has it: the model with the weights of the last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from thinwire.collectives import Topology
from thinwire.data import Tokenizer, load_tokenizer
from thinwire.data_parallel.strategies import Frontier
from thinwire.data_parallel.wire import Strategy
from thinwire.data_parallel.zero.layout import Bucket, Seat, build_buckets
from thinwire.errors import ConfigError, nearest
from thinwire.models import build_model
from thinwire.training import checkpoint
from thinwire.training.config import TrainConfig
from thinwire.training.problems import Problems
from thinwire.training.run_dir import RunDir
from thinwire.training.settings import build_strategy, read_toml, used_tables


@dataclass(frozen=True)
class SavedRun:
    """A run's configuration and tokenizer, and its model in evaluation mode, as it was after `step`."""

    config: TrainConfig
    tokenizer: Tokenizer
    model: nn.Module
    step: int


def load_run(path: str) -> SavedRun:
    """The run in a directory. Raises ConfigError for one that holds none, or no checkpoint yet."""
    run_dir, problems = RunDir(path), Problems()
    if not run_dir.config().is_file():
        parent = Path(path).absolute().parent
        runs = [str(Path(path).parent / p.name) for p in parent.glob("*/") if RunDir(p).config().is_file()]
        raise ConfigError(f"{path} holds no run{nearest(path, runs) if runs else ''}")
    config = read_toml(run_dir.config(), problems)
    problems.raise_any()
    tokenizer = load_tokenizer(config.tokenizer)
    fields = config.tables.get("llama") if "llama" in used_tables(config) else None
    model = build_model(config.model, tokenizer.vocab_size, config.seq_len, config.seed, fields)
    step, weights = full_weights(run_dir, config, model)
    missing = {name for name, _ in model.named_parameters()} - weights.keys()
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    if missing or unknown:
        raise ConfigError(f"{run_dir.checkpoints} is not of model {config.model}: {sorted(missing | {*unknown})[0]}")
    return SavedRun(config, tokenizer, model.eval(), step)


def full_weights(run_dir: RunDir, config: TrainConfig, model: nn.Module) -> tuple[int, dict[str, Tensor]]:
    """The step of a run's last checkpoint and its whole fp32 weights by name, with buffers and frozen parameters.

    Of a sharded optimizer these are the masters, which are what was rounded for the wire. model: its names and shapes
    alone are used. Raises ConfigError where there is no checkpoint.
    """
    folder = checkpoint.latest(run_dir.checkpoints)
    if folder is None:
        raise ConfigError(f"{run_dir.path} holds no checkpoint yet")
    first = checkpoint.load(folder, 0)
    parts = [first, *(checkpoint.load(folder, rank) for rank in range(1, first["world_size"]))]
    states = [part["optimizer"] for part in parts]
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    layout = states[0]["layout"]
    topology = Topology.stated(len(states), layout.get("local_size", 1))
    if "masters" in states[0]:
        weights = of_zero(states, trained, build_strategy(config), topology)
    elif "levels" in layout:
        weights = of_frontier(states, model, trained, build_strategy(config), topology)
    elif "wires" in states[0]:
        chunks = zip(*(state["weights"] for state in states), strict=True)
        whole = {
            name: torch.cat([part.flatten() for part in parts]) for name, parts in zip(trained, chunks, strict=True)
        }
        weights = {name: whole[name].view(param.shape) for name, param in trained.items()}
    else:
        weights = dict(zip(trained, states[0]["weights"], strict=True))
    return first["step"], first["untrained"] | weights


def of_zero(
    states: Sequence[Mapping[str, Any]], trained: Mapping[str, nn.Parameter], strategy: object, topology: Topology
) -> dict[str, Tensor]:
    """From flat buckets, of which every rank has a slice."""
    seat: Any = Seat(topology)
    buckets = build_buckets(trained.items(), cast(Strategy, strategy), lambda *_: seat, None, Bucket)
    flats = [torch.cat([state["masters"][index] for state in states]) for index in range(len(buckets))]
    return {slot.name: slot.view(flat) for bucket, flat in zip(buckets, flats, strict=True) for slot in bucket.slots}


def of_frontier(
    states: Sequence[Mapping[str, Any]],
    model: nn.Module,
    trained: dict[str, nn.Parameter],
    strategy: object,
    topology: Topology,
) -> dict[str, Tensor]:
    """From flat tensors whose slices lie on the ranks in the order of the levels."""
    from thinwire.data_parallel.frontier.layout import lay_out

    assert isinstance(strategy, Frontier)
    levels, seat = strategy.levels(topology), cast(Any, Seat(topology))
    parts = [part for unit in lay_out(model, trained, strategy, seat, levels) for part in unit.parts]
    order = sorted(range(len(states)), key=levels.piece)
    flats = [torch.cat([states[rank]["shards"][index] for rank in order]) for index in range(len(parts))]
    return {slot.name: slot.view(flat) for part, flat in zip(parts, flats, strict=True) for slot in part.slots}
