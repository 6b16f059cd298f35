"""The ranks of one island, which act as one: the first rank decides, the others follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from thinwire import _compat
from thinwire.collectives import Communicator
from thinwire.collectives.elastic import PATIENCE_S
from thinwire.errors import PeerLostError
from thinwire.hosts.interface import ParallelOptimizer
from thinwire.hosts.tensor import TensorAxis

# What an island's first rank tells the others.
DONE, FAILED = "done", "failed"

T = TypeVar("T")
# How often the ranks of an island have waited for their first one, in this process: the store keeps every answer.
_num_waits: Counter[tuple[int, ...]] = Counter()


class Host(Protocol):
    """An optimizer whose weights are exchanged; see ParallelOptimizer. comm: the island's ranks; None for one."""

    @property
    def comm(self) -> Communicator | None: ...

    def masters(self, names: Collection[str]) -> dict[str, Tensor]: ...

    def adopt_weights(self, values: Mapping[str, Tensor]) -> None: ...

    def handover_bytes(self, names: Collection[str]) -> tuple[int, int]: ...


@runtime_checkable
class ShardedHost(Host, Protocol):
    """An optimizer of a loop of one's own that hands whole weights over by itself, such as that of `thinwire.zero`.

    inner: the torch optimizer that steps its shards.
    """

    inner: torch.optim.Optimizer


class TensorHost:
    """A Host whose model a tensor axis cuts: whole parameters to and from the parts of its ranks.

    comm: all ranks of the island. What torch sends to gather them is counted by formula.
    """

    def __init__(self, inner: ParallelOptimizer, axis: TensorAxis) -> None:
        self.comm: Communicator | None = inner.everyone
        self._inner, self._axis = inner, axis

    def masters(self, names: Collection[str]) -> dict[str, Tensor]:
        """Copies of the whole parameters; a collective over the island."""
        if sent := self._gather_bytes(names):
            self._inner.meter.count("masters", "intra", sent, sent)
        return self._axis.gather(self._inner.masters(names))

    def adopt_weights(self, values: Mapping[str, Tensor]) -> None:
        """Take this rank's part of whole parameters; a collective over the island."""
        self._inner.adopt_weights(self._axis.part(values))

    def handover_bytes(self, names: Collection[str]) -> tuple[int, int]:
        """A rank sends its part to the others of the tensor axis for `masters`; `adopt_weights` sends nothing there."""
        reads, writes = self._inner.handover_bytes(names)
        return reads + self._gather_bytes(names), writes

    def _gather_bytes(self, names: Collection[str]) -> int:
        size, cuts = self._axis.mesh.size(), self._axis.cuts
        parts = [cuts[name].shape.numel() // size for name in set(self._axis.local_names()).intersection(names)]
        return 4 * (size - 1) * sum(parts)


class Decision(NamedTuple):
    """Numbers that the first rank sends to the others with every tensor.

    stop: islands have agreed to stop. jump: the step at which this island goes on, having caught up; 0: it needn't.
    """

    stop: bool = False
    jump: int = 0


NOTHING = Decision()


class Island:
    """The ranks of one island. comm: None for a single rank, which is then the first."""

    def __init__(self, comm: Communicator | None) -> None:
        self.comm = comm
        self.is_single = comm is None or comm.world_size == 1
        self.is_first = comm is None or comm.rank == 0

    def share(self, flat: Tensor, decision: Decision = NOTHING) -> tuple[Tensor, Decision]:
        """The first rank's values and decision, on all ranks; a collective."""
        if self.is_single:
            return flat, decision
        assert self.comm is not None
        message = torch.cat([flat, torch.tensor([float(decision.stop), float(decision.jump)])])
        self.comm.wait(self.comm.broadcast_(message))
        return message[:-2], Decision(bool(message[-2]), int(message[-1]))

    def share_number(self, number: float) -> float:
        """The first rank's number, on all ranks; a collective."""
        return float(self.share(torch.tensor([number]))[0][0])

    def first_does(self, work: Callable[[], T]) -> T | None:
        """Run what the first rank does alone and may take longer than a message: the others wait, and fail with it.

        Returns what `work` gave on the first rank, None on others. Raises PeerLostError where the first rank failed.
        """
        if self.is_single:
            return work()
        assert self.comm is not None
        members = tuple(self.comm.global_ranks)
        _num_waits[members] += 1
        store, key = _compat.default_store(), f"thinwire/island/{members}/{_num_waits[members]}"
        if not self.is_first:
            store.wait([key], timedelta(seconds=PATIENCE_S))
            if store.get(key) != DONE.encode():
                raise PeerLostError("the first rank of this island has failed")
            return None
        try:
            done = work()
        except BaseException:
            with suppress(RuntimeError):
                store.set(key, FAILED)
            raise
        store.set(key, DONE)
        return done
