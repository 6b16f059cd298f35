"""Norms of gradients by token, as they were when a sequence was last seen. Each sequence has an owner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from thinwire.checkpoint import NORMS, Piece, Snapshot, Source
from thinwire.collectives import Communicator
from thinwire.hosts.offload.activations import part_of
from thinwire.tiers import GrowingRows, Pace, TierMeter

# Bytes of them that are read at a time.
PART_BYTES = 1 << 20
# Of the mean norm: what is added to every norm, so that no row that counts now has the weight zero.
FLOOR = 0.01


class SeenNorms:
    """What dZ was, for every token of a sequence and every group of layers that share an input, when it was last seen.

    Sequence i belongs to rank i mod P, which keeps its norms in bf16. Before a forward, every rank is sent those of its
    sequences; after the backward, the new ones go to their owners. A checkpoint has them, for any number of ranks.
    """

    def __init__(self, comm: Communicator, folder: Path | None, meter: TierMeter, pace: Pace | None = None) -> None:
        self.comm, self._folder, self._meter, self._pace = comm, folder, meter, pace
        # Row i is of sequence i P + rank; None: no row is there yet, on any rank.
        self._rows: GrowingRows | None = None
        self._groups: dict[str, int] = {}
        # [sequences, seq * groups] of the micro-batch under way, which are zero where they are not known.
        self._known: Tensor | None = None
        self._new: dict[int, Tensor] = {}
        # The numbers of the sequences of all ranks in the micro-batch under way.
        self._numbers: list[list[int]] = []

    def begin(self, numbers: Tensor) -> None:
        """Fetch what is known of the sequences of the next forward. A collective.

        numbers: int64 [batch], from 0 on; as many on every rank.
        """
        self.settle()
        self._numbers = self.comm.wait(self.comm.all_gather_exact(numbers)).tolist()
        self._known = None
        if self._rows is not None:
            rank = self.comm.rank
            asked = [[number for number in theirs if self._owner(number) == rank] for theirs in self._numbers]
            own = self._own(number for theirs in asked for number in theirs)
            self._rows.reach(max(own.tolist(), default=-1) + 1)
            mine = self._by_owner(self._numbers[rank])
            found = self._swap(self._rows.gather(own), list(map(len, asked)), [len(own) for own in mine])
            self._known = torch.empty_like(found)
            self._known[[place for own in mine for place in own]] = found

    def weights(self, name: str, num_rows: int) -> Tensor | None:
        """What the rows of a layer's input weigh besides their norms, fp32 [rows]; None: nothing is known.

        name: of the first of the layers that share the input. The rows of sequences that were not seen yet weigh what
        others do in the mean.
        """
        group = self._groups.setdefault(name, len(self._groups))
        own = part_of(self._num_own)
        num = own.stop - own.start
        if self._known is None or num == 0 or num_rows % num:
            return None
        seq = num_rows // num
        norms = self._known[own, group * seq : (group + 1) * seq].float()
        if norms.shape[1] != seq or self._known.shape[1] != seq * len(self._groups):
            return None
        is_seen = norms.gt(0).any(1, keepdim=True)
        if not is_seen.any():
            return None
        mean = norms[is_seen.squeeze(1)].mean()
        return torch.where(is_seen, norms + FLOOR * mean, mean).flatten()

    @property
    def _num_own(self) -> int:
        """How many sequences this rank has in the micro-batch under way."""
        return len(self._numbers[self.comm.rank]) if self._numbers else 0

    def noting(self, name: str) -> Callable[[Tensor], None]:
        """What takes the norms of the gradients of a layer's output, fp32 [rows], of the part that it computes now.

        Those of a group add up.
        """
        return partial(self._add, self._groups[name], part_of(self._num_own))

    def _add(self, group: int, own: slice, norms: Tensor) -> None:
        num = own.stop - own.start
        if num and len(norms) % num == 0:
            each = norms.view(num, -1)
            new = self._new.setdefault(group, each.new_zeros(self._num_own * each.shape[1]))
            new.view(self._num_own, -1)[own] += each

    def add_to(self, snapshot: Snapshot) -> None:
        """Add this rank's norms to a snapshot; those in a file are written from there.

        Those that are not yet with their owners are saved by the rank that has them, with the numbers of all ranks'
        sequences.
        """
        rank, rows, found = self.comm.rank, self._rows, dict[str, Tensor]()
        if rows is not None and rows.num_rows:
            found[str(rank)] = rows.values()
            snapshot.in_place = snapshot.in_place or self._folder is not None
        width = 0 if rows is None else rows.width
        if self._new and self._numbers:
            found |= {f"new {rank}": self._new_rows(), f"numbers {rank}": torch.tensor(self._numbers)}
            width = found[f"new {rank}"].shape[1]
        if width:
            told = {"groups": list(self._groups), "width": width, "ranks": self.comm.world_size}
            snapshot.common[NORMS] = told
        snapshot.pieces |= {f"{NORMS}/{name}": Piece.whole(each, is_copy=False) for name, each in found.items()}

    def restore(self, source: Source) -> None:
        """Take over the norms of this rank's sequences, whatever number of ranks has saved them."""
        told = source.norms
        assert told is not None
        self._groups = {name: group for group, name in enumerate(told["groups"])}
        self._rows = GrowingRows(self._folder, told["width"], torch.bfloat16, self._meter, self._pace)
        rank, ranks, others = self.comm.rank, self.comm.world_size, told["ranks"]
        for other in range(others):
            # Else no number is both theirs and this rank's.
            if (rank - other) % math.gcd(ranks, others) == 0:
                for numbers, part in self._saved_rows(source, other, others):
                    self._put_own(numbers, part)
        for other in range(others) if ranks != others else (rank,):
            all_numbers, part = self._saved_new(source, other, others)
            if ranks != others:
                self._put_own(all_numbers[other], part)
            elif part.numel():
                self._numbers = all_numbers.tolist()
                each = part.float().view(len(part), len(self._groups), -1)
                self._new = {group: each[:, group].flatten() for group in range(len(self._groups))}

    def _saved_rows(self, source: Source, other: int, others: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the numbers of sequences and their norms, as one of the ranks has saved them, part by part."""
        assert self._rows is not None
        name, width = f"{NORMS}/{other}", self._rows.width
        numel, at_once = source.numel_of(name), max(1, PART_BYTES // self._rows.row_bytes)
        for first in range(0, numel // width, at_once):
            part = torch.empty(min(at_once, numel // width - first), width, dtype=torch.bfloat16)
            source.read({name: Piece(numel, first * width, part.view(-1))})
            numbers, is_seen = (first + torch.arange(len(part))) * others + other, part.any(1)
            yield numbers[is_seen], part[is_seen]

    def _saved_new(self, source: Source, other: int, others: int) -> tuple[Tensor, Tensor]:
        """The numbers of all ranks' sequences, and norms of those of one rank that were not yet with their owners."""
        assert self._rows is not None
        numbers = torch.empty(source.numel_of(f"{NORMS}/numbers {other}"), dtype=torch.int64).view(others, -1)
        part = torch.empty(numbers.shape[1], self._rows.width, dtype=torch.bfloat16)
        named = {f"{NORMS}/numbers {other}": numbers, f"{NORMS}/new {other}": part}
        source.read({name: Piece.whole(each) for name, each in named.items() if each.numel()})
        return numbers, part

    def _put_own(self, numbers: Tensor, part: Tensor) -> None:
        """Keep those of these sequences' norms that belong to this rank."""
        assert self._rows is not None
        is_own = numbers % self.comm.world_size == self.comm.rank
        self._rows.put(numbers[is_own] // self.comm.world_size, part[is_own])

    def close(self) -> None:
        """Free the disk space."""
        if self._rows is not None:
            self._rows.close()

    def _new_rows(self) -> Tensor:
        """The norms of the last backward, bf16 [sequences, width]."""
        num = len(self._numbers[self.comm.rank])
        return torch.cat([self._new[group].view(num, -1) for group in sorted(self._new)], dim=1).bfloat16()

    def settle(self) -> None:
        """Send the norms of the last backward to the sequences' owners. A collective."""
        if not self._new or not self._numbers:
            return
        rank, rows = self.comm.rank, self._new_rows()
        self._new = {}
        if self._rows is None or self._rows.width != rows.shape[1]:
            # Sequences of another length begin anew.
            self.close()
            self._rows = GrowingRows(self._folder, rows.shape[1], torch.bfloat16, self._meter, self._pace)
        mine = self._by_owner(self._numbers[rank])
        coming = [[number for number in theirs if self._owner(number) == rank] for theirs in self._numbers]
        order = [place for own in mine for place in own]
        came = self._swap(rows[order].contiguous(), [len(own) for own in mine], list(map(len, coming)))
        self._rows.put(self._own(number for theirs in coming for number in theirs), came)

    def _own(self, numbers: Iterator[int]) -> Tensor:
        """The numbers of the rows of this rank's sequences, int64 [n]."""
        return torch.tensor([number // self.comm.world_size for number in numbers], dtype=torch.int64)

    def _owner(self, number: int) -> int:
        return number % self.comm.world_size

    def _by_owner(self, numbers: Sequence[int]) -> list[list[int]]:
        """The places of the sequences of each owner, in order of their places."""
        owners = range(self.comm.world_size)
        return [[place for place, number in enumerate(numbers) if self._owner(number) == owner] for owner in owners]

    def _swap(self, rows: Tensor, counts: Sequence[int], receives: Sequence[int]) -> Tensor:
        return self.comm.wait(self.comm.all_to_all_rows(rows, counts, receives, operation="norms"))
