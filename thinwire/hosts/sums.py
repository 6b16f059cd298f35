"""Sums over ranks for an optimizer that looks across the elements of a matrix but holds only pieces of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.codecs import derive_seed
from thinwire.collectives import Communicator
from thinwire.errors import ConfigError
from thinwire.methods.interface import Cuts
from thinwire.methods.memory import Across
from thinwire.methods.sums import ParamGroups, Round, parts_of, rounds_of, sent_by_rounds
from thinwire.optim import Shards, SummingOptimizer
from thinwire.optim.sums import Bring, PagedRecords, Values
from thinwire.state.portable import group_of
from thinwire.table import Row


def looking_across(inner: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Any]]:
    """The optimizer's group of each parameter whose update looks across its elements.

    Call it before pieces replace them.
    """
    if not isinstance(inner, SummingOptimizer):
        return {}
    found, groups = {id(param) for param in inner.matrices}, group_of(inner)
    return {name: groups[id(param)] for name, param in named.items() if id(param) in found}


def across_of(inner: torch.optim.Optimizer, model: nn.Module) -> Across | None:
    """The optimizer, with what it looks across in a model; None for one that looks across nothing."""
    if not isinstance(inner, SummingOptimizer):
        return None
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    return Across(inner, looking_across(inner, trained))


@dataclass(frozen=True)
class JoinedSums:
    """An optimizer's sums over ranks, for each group of ranks to which this rank belongs.

    groups: with the rounds of a step. seed: of the current step. device: of the pieces.
    """

    optimizer: SummingOptimizer
    groups: Sequence[tuple[Communicator, Sequence[Round]]]
    seed: Callable[[], int]
    device: torch.device

    @classmethod
    def of(
        cls,
        optimizer: SummingOptimizer,
        held: Mapping[str, Tensor],
        cuts: Sequence[tuple[Communicator, Cuts]],
        options: ParamGroups,
        seed: Callable[[], int],
        bring: Bring | None = None,
        paged: PagedRecords | None = None,
    ) -> JoinedSums:
        """Make the optimizer step pieces.

        held: this rank's, by parameter. cuts: how each group cuts its parameters. bring, paged: see Shards.

        Raises ConfigError for sums over the parameters of several groups.
        """
        if optimizer.is_joint and sum(bool(own) for _, own in cuts) > 1:
            name = type(optimizer).__name__
            raise ConfigError(f"{name} looks across all parameters, which lie on several groups; nearest: AdamW")
        parts = {name: part for comm, own in cuts for name, part in parts_of(own, comm.rank, options).items()}
        rounds = [(comm, rounds_of(optimizer, parts_of(own, comm.rank, options), comm.topology)) for comm, own in cuts]
        device = next((piece.device for piece in held.values()), torch.device("cpu"))
        joined = cls(optimizer, rounds, seed, device)
        shards = Shards({piece: parts[name] for name, piece in held.items()}, joined.total)
        optimizer.join(shards if bring is None else replace(shards, bring=bring, paged=paged))
        return joined

    def total(self, number: int, partials: Mapping[str, Values]) -> dict[str, Values]:
        """The totals of a round. Tensors without a gradient count as zeros. A collective."""
        totals: dict[str, Values] = {}
        seed = derive_seed(self.seed(), number)
        for comm, rounds in self.groups:
            own = {key: partials[key[0]][key[1]] for key in rounds[number].sums if key[1] in partials.get(key[0], {})}
            found = comm.wait(comm.submit(partial(rounds[number].take, partials=own, seed=seed, device=self.device)))
            for (name, key), values in found.items():
                totals.setdefault(name, {})[key] = values
        return totals

    @property
    def bytes_per_step(self) -> int:
        """Payload bytes that this rank sends in a step."""
        return sum(sent_by_rounds(rounds, comm.rank) for comm, rounds in self.groups)

    def rows(self) -> list[Row]:
        """Rows of (asked for, in effect, why)."""
        first = [rounds[0] for _, rounds in self.groups]
        total = sum(len({name for name, _ in each.sums}) for each in first)
        cut = sum(len(set[str]().union(*(each.travelling for each in rounds))) for _, rounds in self.groups)
        why = f"as {self.optimizer.codec}, {self.bytes_per_step / 1e6:.3f} MB from this rank in a step"
        what = f"{total} tensors, of {cut} of which ranks exchange parts"
        return [(self.optimizer.operation, "all parameters together" if self.optimizer.is_joint else what, why)]
