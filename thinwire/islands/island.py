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
from thinwire.hosts.ranks import Parts, communicator_along
from thinwire.hosts.stages import StageAxis
from thinwire.hosts.tensor import TensorAxis

# What an island's first rank tells the others.
DONE, FAILED = "done", "failed"

T = TypeVar("T")
# How often the ranks of an island have waited for their first one, in this process: the store keeps every answer.
_num_waits: Counter[tuple[int, ...]] = Counter()


class Host(Protocol):
    """An optimizer whose weights islands exchange; see ParallelOptimizer. comm: the island's ranks.

    None: a single rank.
    """

    @property
    def comm(self) -> Communicator | None: ...

    def masters(self, names: Collection[str]) -> dict[str, Tensor]: ...

    def adopt_weights(self, values: Mapping[str, Tensor]) -> None: ...

    def handover_bytes(self, names: Collection[str]) -> tuple[int, int]: ...


@runtime_checkable
class ShardedHost(Host, Protocol):
    """An optimizer, in the user's own loop, that returns and takes whole weights itself.

    An example is that of `thinwire.zero`. inner: the torch optimizer that steps its shards.
    """

    inner: torch.optim.Optimizer


class CutHost:
    """A Host whose model is cut: converts between whole parameters and a rank's parts of matrices, experts and layers.

    comm: all ranks of the island. The bytes that torch sends to gather matrices are counted by formula.
    """

    def __init__(
        self, inner: ParallelOptimizer, tensor: TensorAxis | None, stages: StageAxis | None, parts: Parts | None = None
    ) -> None:
        self.comm: Communicator | None = inner.everyone
        self._inner, self._tensor, self._stages, self._parts = inner, tensor, stages, parts
        self._along: Communicator | None = None
        if stages is not None:
            self._along = communicator_along(stages.mesh, inner.everyone, meter=inner.meter)

    def masters(self, names: Collection[str]) -> dict[str, Tensor]:
        """Copies of the whole parameters. A collective over the island."""
        own = self._own(names)
        found = self._inner.masters(own)
        if self._tensor is not None:
            if sent := self._gather_bytes(self._tensor, own):
                self._inner.meter.count("masters", "intra", sent, sent)
            found = self._tensor.gather(found)
        if self._parts is not None:
            found = self._parts.gather(found)
        if self._stages is not None and self._along is not None:
            found = self._stages.gather(found, names, self._along)
        return found

    def adopt_weights(self, values: Mapping[str, Tensor]) -> None:
        """Take this rank's part of whole parameters. A collective over the island."""
        own = {name: values[name] for name in self._own(values)}
        own = own if self._parts is None else self._parts.part(own)
        self._inner.adopt_weights(own if self._tensor is None else self._tensor.part(own))
        if self._stages is not None:
            self._stages.after_write()

    def handover_bytes(self, names: Collection[str]) -> tuple[int, int]:
        """A rank sends its part to the others of each axis for `masters`; `adopt_weights` sends nothing there."""
        own = self._own(names)
        reads, writes = self._inner.handover_bytes(own)
        reads += 0 if self._tensor is None else self._gather_bytes(self._tensor, own)
        reads += 0 if self._parts is None else self._parts.gather_bytes(own)
        if self._stages is not None and self._along is not None:
            reads += self._stages.gather_bytes(names, self._along)
        return reads, writes

    def close(self) -> None:
        """Give the process group of the stages back."""
        if self._along is not None:
            self._along.close()

    def _own(self, names: Collection[str]) -> list[str]:
        return list(names) if self._stages is None else [name for name in names if name in self._stages.own]

    def _gather_bytes(self, axis: TensorAxis, names: Collection[str]) -> int:
        size, cuts = axis.mesh.size(), axis.cuts
        parts = [cuts[name].shape.numel() // size for name in set(axis.local_names()).intersection(names)]
        return 4 * (size - 1) * sum(parts)


class Decision(NamedTuple):
    """Numbers that the first rank sends to the others with every tensor.

    stop: islands have agreed to stop. jump: the step at which this island continues after it has caught up; 0: no jump.
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
        """Send the first rank's values and decision to all ranks. A collective."""
        if self.is_single:
            return flat, decision
        assert self.comm is not None
        message = torch.cat([flat, torch.tensor([float(decision.stop), float(decision.jump)])])
        self.comm.wait(self.comm.broadcast_(message))
        return message[:-2], Decision(bool(message[-2]), int(message[-1]))

    def share_number(self, number: float) -> float:
        """Send the first rank's number to all ranks. A collective."""
        return float(self.share(torch.tensor([number]))[0][0])

    def first_does(self, work: Callable[[], T]) -> T | None:
        """Run work on the first rank that may take longer than a message. The other ranks wait, and fail if it fails.

        Returns the result of `work` on the first rank, None on others. Raises PeerLostError if the first rank failed.
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
