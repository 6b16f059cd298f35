"""Makes islands equal that start or continue together: compares them, and sends or averages only what differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.islands.exchanges import Exchanges
from thinwire.state.replicas import digest, odd_ranks


def same_start(exchanges: Exchanges, fixed: Iterable[Tensor]) -> bool:
    """Give all islands the first one's outer parameters. Return whether they differed. On all first ranks.

    fixed: frozen weights and buffers. Raises ConfigError if these, the model or the options differ.
    """
    comm = exchanges.peers.comm
    if odd := odd_ranks(comm, digest([exchanges.options.encode(), *fixed])):
        raise ConfigError(
            f"island {odd[0]} trains another model, on other data or by other options than island "
            f"{exchanges.peers.members[0]}, or its frozen weights and buffers differ: start all with the same"
        )
    if not odd_ranks(comm, digest(outer.parameters for outer in exchanges.outer)):
        return False
    for outer in exchanges.outer:
        flat = outer.parameters.clone()
        comm.wait(comm.broadcast_(flat))
        outer.set_parameters(flat)
    return True


def take_mean(exchanges: Exchanges, *, has_own: bool) -> int:
    """If outer parameters differ, replace them by the mean over islands that have their own.

    Return the number of those.

    0: nothing differs. On all first ranks.
    """
    comm = exchanges.peers.comm
    if not odd_ranks(comm, digest(outer.parameters for outer in exchanges.outer)):
        return 0
    owners = exchanges.result_of(comm.all_gather_exact(torch.tensor([float(has_own)])))
    for outer in exchanges.outer:
        outer.set_parameters(_mean_of(exchanges, outer.parameters, owners))
    return int(owners.sum())


def share_residuals(exchanges: Exchanges, *, has_own: bool) -> None:
    """Give all islands the mean error feedback of those that have their own: it owes what theirs did.

    Nothing is sent if none has any. On all first ranks.
    """
    if (lost := exchanges.state.lost) is None:
        return
    word = torch.tensor([float(has_own), float(has_own and bool(lost.tensors))])
    owners, owing = exchanges.result_of(exchanges.peers.comm.all_gather_exact(word)).T
    if not owing.any():
        lost.tensors.clear()
        return
    for number in range(len(exchanges.fragments)):
        lost[str(number)] = _mean_of(exchanges, lost[str(number)], owners)


def _mean_of(exchanges: Exchanges, own: Tensor, owners: Tensor) -> Tensor:
    """The mean over the islands that are owners, taken in fp64."""
    held = exchanges.result_of(exchanges.peers.comm.all_gather_exact(own))
    total = torch.zeros(len(own), dtype=torch.float64)
    for is_owner, tensor in zip(owners, held, strict=True):
        total += tensor * is_owner
    return (total / owners.sum()).float()


def sum_of(exchanges: Exchanges, numbers: Sequence[float]) -> Tensor:
    """Sum over islands of their first ranks' numbers, fp64. On all first ranks."""
    given = torch.tensor(numbers, dtype=torch.float64)
    total: Tensor = exchanges.result_of(exchanges.peers.comm.all_gather_exact(given)).sum(0)
    return total
