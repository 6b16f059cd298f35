"""Norms of gradients by token, as they were when a sequence was last seen. Each sequence has an owner."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from thinwire.collectives import Communicator
from thinwire.errors import ThinwireError
from thinwire.tiers import TierMeter, TierReading, check_folder

# Of the mean norm: what is added to every norm, so that no row that counts now has the weight zero.
FLOOR = 0.01


class OwnRows:
    """Rows of bytes by number, in a file of `folder` that has no name and grows; without a folder, in memory."""

    def __init__(self, folder: Path | None, meter: TierMeter) -> None:
        self._sums: dict[int, int] = {}
        self._rows: dict[int, Tensor] = {}
        self.meter, self._file = meter, None
        if folder is not None:
            check_folder(folder, 0)
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115

    def put(self, number: int, row: Tensor) -> None:
        """Keep a row, uint8 [n]; all rows have one length. Raises ThinwireError if the disk fails."""
        if self._file is None:
            self._rows[number] = row.clone()
            return
        content = row.numpy().tobytes()
        try:
            if os.pwrite(self._file.fileno(), content, number * len(content)) < len(content):
                raise OSError(28, "no space left")
        except OSError as error:
            raise ThinwireError(f"store: norms can't be written: {error.strerror}") from error
        self._sums[number] = zlib.crc32(content)
        self.meter.add(TierReading(0, len(content)))

    def take(self, number: int, out: Tensor) -> None:
        """Fill `out`, uint8 [n], with a row; with zeros, if it was never put."""
        if number in self._rows:
            out.copy_(self._rows[number])
        elif self._file is None or number not in self._sums:
            out.zero_()
        else:
            content = os.pread(self._file.fileno(), len(out), number * len(out))
            if zlib.crc32(content) != self._sums[number]:
                raise ThinwireError("store: norms are not what was written: the disk is damaged")
            out.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            self.meter.add(TierReading(len(content)))

    def close(self) -> None:
        """Free the disk space."""
        if self._file is not None:
            self._file.close()


class SeenNorms:
    """What dZ was, for every token of a sequence and every group of layers that share an input, when it was last seen.

    Sequence i belongs to rank i mod P, which keeps its norms in bf16. Before a forward, every rank is sent those of its
    sequences; after the backward, the new ones go to their owners. Norms are not saved: a run that goes on from a
    checkpoint begins without any.
    """

    def __init__(self, comm: Communicator, folder: Path | None, meter: TierMeter) -> None:
        self.comm, self._rows = comm, OwnRows(folder, meter)
        self._groups: dict[str, int] = {}
        # [sequences, seq * groups] of the micro-batch under way, which are zero where they are not known.
        self._known: Tensor | None = None
        self._new: dict[int, Tensor] = {}
        # Elements of a row; 0: no row is there yet, on any rank.
        self._width = 0
        # The numbers of the sequences of all ranks in the micro-batch under way.
        self._numbers: list[list[int]] = []

    def begin(self, numbers: Tensor) -> None:
        """Fetch what is known of the sequences of the next forward. A collective.

        numbers: int64 [batch], from 0 on; as many on every rank.
        """
        self._send_new()
        self._numbers = self.comm.wait(self.comm.all_gather_exact(numbers)).tolist()
        self._known = None
        if self._width:
            rank = self.comm.rank
            asked = [[number for number in theirs if self._owner(number) == rank] for theirs in self._numbers]
            rows = torch.zeros(sum(map(len, asked)), self._width, dtype=torch.bfloat16)
            for row, number in zip(rows, (number for theirs in asked for number in theirs), strict=True):
                self._rows.take(number // self.comm.world_size, row.view(torch.uint8))
            mine = self._by_owner(self._numbers[rank])
            found = self._swap(rows, list(map(len, asked)), [len(own) for own in mine])
            self._known = torch.empty_like(found)
            self._known[[place for own in mine for place in own]] = found

    def weights(self, name: str, num_rows: int) -> Tensor | None:
        """What the rows of a layer's input weigh besides their norms, fp32 [rows]; None: nothing is known.

        name: of the first of the layers that share the input. The rows of sequences that were not seen yet weigh what
        others do in the mean.
        """
        group = self._groups.setdefault(name, len(self._groups))
        num = len(self._numbers[self.comm.rank]) if self._numbers else 0
        if self._known is None or num == 0 or num_rows % num:
            return None
        seq = num_rows // num
        norms = self._known[:, group * seq : (group + 1) * seq].float()
        if norms.shape[1] != seq or self._width != seq * len(self._groups):
            return None
        is_seen = norms.gt(0).any(1, keepdim=True)
        if not is_seen.any():
            return None
        mean = norms[is_seen.squeeze(1)].mean()
        return torch.where(is_seen, norms + FLOOR * mean, mean).flatten()

    def add(self, name: str, norms: Tensor) -> None:
        """Note the norms of the gradients of a layer's output, fp32 [rows]; those of a group add up."""
        group = self._groups[name]
        self._new[group] = self._new[group] + norms if group in self._new else norms

    def close(self) -> None:
        """Free the disk space."""
        self._rows.close()

    def _send_new(self) -> None:
        """Send the norms of the last backward to the sequences' owners. A collective."""
        if not self._new or not self._numbers:
            return
        rank, num = self.comm.rank, len(self._numbers[self.comm.rank])
        found = [self._new[group].view(num, -1) for group in sorted(self._new)]
        self._new = {}
        rows = torch.cat(found, dim=1).bfloat16()
        self._width = rows.shape[1]
        mine = self._by_owner(self._numbers[rank])
        coming = [[number for number in theirs if self._owner(number) == rank] for theirs in self._numbers]
        order = [place for own in mine for place in own]
        came = self._swap(rows[order].contiguous(), [len(own) for own in mine], list(map(len, coming)))
        for row, number in zip(came, (number for theirs in coming for number in theirs), strict=True):
            self._rows.put(number // self.comm.world_size, row.view(torch.uint8))

    def _owner(self, number: int) -> int:
        return number % self.comm.world_size

    def _by_owner(self, numbers: Sequence[int]) -> list[list[int]]:
        """The places of the sequences of each owner, in order of their places."""
        owners = range(self.comm.world_size)
        return [[place for place, number in enumerate(numbers) if self._owner(number) == owner] for owner in owners]

    def _swap(self, rows: Tensor, counts: Sequence[int], receives: Sequence[int]) -> Tensor:
        return self.comm.wait(self.comm.all_to_all_rows(rows, counts, receives, operation="norms"))
