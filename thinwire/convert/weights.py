"""The whole weights in a run's last checkpoint; all that is known here of how checkpoints are laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from thinwire.collectives import Topology
from thinwire.data_parallel.strategies import Frontier
from thinwire.data_parallel.wire import Strategy
from thinwire.data_parallel.zero.layout import Bucket, Seat, build_buckets
from thinwire.errors import ConfigError
from thinwire.training import checkpoint
from thinwire.training.config import TrainConfig
from thinwire.training.run_dir import RunDir
from thinwire.training.settings import build_strategy


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
