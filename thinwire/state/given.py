"""What ranks are given at the start, compared before anything else is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire import _compat
from thinwire.collectives.groups import joined_ranks
from thinwire.collectives.store_gather import gather_among, tell
from thinwire.errors import ConfigError

Given = dict[str, object]
# What a rank tells in place of what it is given: why it refuses.
REFUSED = "refused"


@contextmanager
def same_on_all_ranks(
    group: dist.ProcessGroup | Sequence[int] | DeviceMesh | None, timeout_s: float
) -> Iterator[Given]:
    """Context in which a rank checks what it is given, and writes it into the dict; at its end the ranks compare.

    The words go through the ranks' store: with different local sizes, messages of a Communicator would not match. A
    rank that refuses what it is given says why to the others and does not wait for them. A collective.

    Raises ConfigError that names the first difference, or what another rank refuses, on all ranks; PeerLostError that
    names the ranks that do not come within `timeout_s`.
    """
    ranks, given = joined_ranks(group), Given()
    if len(ranks) == 1:
        yield given
        return
    rank = dist.get_rank()
    store = dist.PrefixStore(f"thinwire/given/{','.join(map(str, ranks))}", _compat.default_store())
    try:
        yield given
    except ConfigError as error:
        tell(store, rank, {REFUSED: str(error)})
        raise
    mine = {option: shown(value) for option, value in given.items()}
    _compare(ranks, gather_among(store, ranks, rank, mine, "what it was given", timeout_s))


def _compare(ranks: Sequence[int], told: Sequence[dict[str, str]]) -> None:
    """Raise ConfigError for what a rank refused, else for the first difference from the first rank."""
    for rank, theirs in zip(ranks, told, strict=True):
        if REFUSED in theirs:
            raise ConfigError(f"rank {rank} can't start: {theirs[REFUSED]}")
    first, *_ = told
    for rank, theirs in zip(ranks, told, strict=True):
        for option in first | theirs:
            there, here = first.get(option, "not given"), theirs.get(option, "not given")
            if here != there:
                raise ConfigError(
                    f"{option} of rank {rank} is {here}, and of rank {ranks[0]} {there}: must be the same on all ranks"
                )


def shown(value: object) -> str:
    """The value as text, the same in all processes: an object that would show its address is shown by its class."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else repr(value)


class Plain(str):
    """Text that is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def parameters_of(params: Mapping[str, nn.Parameter]) -> Given:
    """The dtype and the shape of each parameter, and whether it is frozen, by name."""
    return {
        f"parameter {name!r}": Plain(
            f"{str(param.dtype).removeprefix('torch.')} {list(param.shape)}{'' if param.requires_grad else ', frozen'}"
        )
        for name, param in params.items()
        if not isinstance(param, nn.parameter.UninitializedParameter)
    }


def optimizer_options(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> Given:
    """The class of an optimizer, the numbers of each of its groups, such as lr, and the group of each parameter."""
    if optimizer is None:
        return {"optimizer": None}
    names = {id(param): name for name, param in model.named_parameters()}
    options = {
        f"{option} of parameter group {number}": value
        for number, group in enumerate(optimizer.param_groups)
        for option, value in group.items()
        if option not in ("params", "param_names")
    }
    groups = {
        f"parameter group of {names[id(param)]!r}": number
        for number, group in enumerate(optimizer.param_groups)
        for param in group["params"]
        if id(param) in names
    }
    return {"optimizer": Plain(type(optimizer).__name__)} | options | groups
