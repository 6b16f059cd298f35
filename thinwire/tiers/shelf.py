"""Long tensors in records on a disk. The next record is read while one is in use; some records stay in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.random import derive_seed, named_seed
from thinwire.errors import ThinwireError
from thinwire.tiers.checksum import crc32
from thinwire.tiers.coding import Coding
from thinwire.tiers.file import DiskFile, Pace, TierMeter
from thinwire.tiers.pool import BLOCK_BYTES, Pool, aligned, pages

# One is read, one is in use, one is written.
NUM_PASSING = 3
FP32_BYTES = 4
# A record begins with a block in every file.
UNIT = BLOCK_BYTES // FP32_BYTES


class Shelf:
    """Tensors of `numel` fp32 elements, one for each kind, in records of `record_numel` elements of all kinds.

    A record is zero until its first `put`. Checksums of the records stay in memory, so a record that the disk damages
    is noticed. Memory holds NUM_PASSING records, the records that `stay` admits, and one record of fp32
    numbers of each kind that is stored encoded. Encoded kinds have a second file, to which `write_out` writes the plain
    numbers. Rounding depends on an element's number and on how often its record was put, but not on the records' length
    or on which records stay.

    A durable shelf has files with names, and two slots for each record. A record is put into the slot that the last
    `keep` does not refer to, so what was kept can be read until the `keep` after the next begins. Records that stay in
    memory are written too.

    Attributes:
        before_put: called before each `put`.

    Raises ConfigError if the folder has not enough space.
    """

    def __init__(
        self, folder: Path, kinds: Mapping[str, Coding], numel: int, record_numel: int, meter: TierMeter, pace: Pace,
        *, is_durable: bool = False,
    ) -> None:  # fmt: skip
        self.kinds, self.numel, self.meter = dict(kinds), numel, meter
        self.record_numel = record_numel = min(_whole(record_numel), _whole(numel))
        self.num_records, self.num_staying = -(-numel // record_numel), 0
        self.part_bytes = {kind: aligned(coding.num_bytes(record_numel)) for kind, coding in self.kinds.items()}
        self._coded = [kind for kind, coding in self.kinds.items() if not coding.is_plain]
        # One at a time, so that each sees what the others have taken.
        self.is_durable, num_slots = is_durable, 2 if is_durable else 1
        self.files = {
            kind: DiskFile(
                folder, num_slots * self.num_records * self.part_bytes[kind], meter, pace, kind if is_durable else ""
            )
            for kind in kinds
        }
        self.before_put: Callable[[], None] = lambda: None
        whole = self.num_records * record_numel * FP32_BYTES
        self._plain = {kind: DiskFile(folder, whole, meter, pace) for kind in self._coded}
        self._work = {kind: pages(record_numel * FP32_BYTES).view(torch.float32) for kind in self._coded}
        self.pool = Pool(min(NUM_PASSING, self.num_records), sum(self.part_bytes.values()))
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="thinwire-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="thinwire-write")
        # The slot of what was last written of each record, and of what was last kept.
        self._slots: list[int]
        self._kept: list[int] | None
        self._sums: dict[int, list[int]]
        self._num_puts: dict[int, int]
        self.begin_anew()
        self._staying: dict[int, Tensor] = {}
        self._in_use: dict[int, Tensor] = {}
        self._reading: dict[int, Future[Tensor]] = {}
        self._writing: dict[int, Future[None]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all kinds, without the padding of the last record."""
        return sum(coding.num_bytes(self.numel) for coding in self.kinds.values())

    def span(self, number: int) -> tuple[int, int]:
        """The first element of a record, and the one after its last."""
        return number * self.record_numel, min((number + 1) * self.record_numel, self.numel)

    def records(self, start: int, end: int) -> range:
        """The numbers of the records that hold elements [start, end)."""
        return range(start // self.record_numel, -(-end // self.record_numel))

    def each(self) -> Iterator[int]:
        """Yield the number of every record, in order. Take each record, then put or leave it, before the next."""
        self.begin()
        yield from range(self.num_records)

    def begin(self) -> None:
        """Start to read the first record that is not in memory."""
        self.read_ahead(len(self._staying))

    def read_ahead(self, number: int) -> None:
        """Start to read a record, unless it is in memory."""
        known = number in self._staying or number in self._reading or number in self._in_use
        if not known and number < self.num_records:
            self._reading[number] = self._reader.submit(self._read, number, self._writing.get(number))

    def take(self, number: int, kinds: Collection[str] | None = None) -> dict[str, Tensor]:
        """The tensors of a record by kind, fp32. Take one record at a time.

        The tensors may be changed in place until `put` or `leave`. kinds: the kinds to read; None: all.
        """
        if number in self._staying:
            if writing := self._writing.get(number):
                with self.meter.waiting():
                    writing.result()
                del self._writing[number]
            return self._tensors(number, self._staying[number], kinds)
        for other in self._reading.keys() - {number}:
            self.pool.give_back(self._reading.pop(other).result())
        self.read_ahead(number)
        with self.meter.waiting():
            self._in_use[number] = self._reading.pop(number).result()
        # While this one is in use.
        self.read_ahead(number + 1)
        return self._tensors(number, self._in_use[number], kinds)

    def put(self, number: int, kinds: Collection[str] | None = None) -> None:
        """Store a record of which these kinds, or all, were changed: in memory if it stays, else on the disk.

        Writing to the disk goes on in the background.
        """
        self.before_put()
        slot = self._staying[number] if number in self._staying else self._in_use.pop(number)
        self._encode(number, slot, kinds)
        stays = number < self.num_staying
        if stays:
            self._staying[number] = slot
        if not stays or self.is_durable:
            self._check_written()
            before = self._writing.get(number)
            self._writing[number] = self._writer.submit(self._write, number, slot, before, stays=stays)

    def settle(self, number: int, kind: str) -> None:
        """Round a record that is in use to what is stored of it, so that one kind has the values that a `take` gives.

        Then `put` it without kinds.
        """
        slot = self._staying[number] if number in self._staying else self._in_use[number]
        self._encode(number, slot, None)
        if kind in self._work:
            self.kinds[kind].decode(self._packet(kind, self._parts(slot)[kind]), self._work[kind])

    def leave(self, number: int) -> None:
        """Release the record, which was not changed."""
        if number not in self._staying:
            self.pool.give_back(self._in_use.pop(number))

    def stay(self, num_records: int) -> None:
        """Let this many more records stay in memory, each from its next `put` on."""
        num_records = min(num_records, self.num_records - self.num_staying)
        if num_records > 0:
            self.pool.add(num_records)
            self.num_staying += num_records

    def flush(self) -> None:
        """Wait until all changed records are written."""
        with self.meter.waiting():
            for future in self._writing.values():
                future.result()
        self._writing.clear()

    def mapped(self, kind: str, start: int, end: int) -> Tensor:
        """Elements [start, end) as a view of the file, read when accessed. Call `write_out` first."""
        place, file = start * FP32_BYTES, self._plain.get(kind, self.files[kind])
        if kind not in self._plain:
            place += next(iter(self._slots), 0) * self.num_records * self.part_bytes[kind]
        return file.mapped(place, (end - start) * FP32_BYTES).view(torch.float32)

    def write_out(self) -> None:
        """Write the records that stay in memory to the disk too."""
        self.flush()
        for number, slot in self._staying.items() if not self.is_durable else ():
            self._put_down(number, slot)
        self._level()
        for number in self.each() if self._coded else ():
            self.take(number, self._coded)
            for kind in self._coded:
                self._plain[kind].write(number * self.record_numel * FP32_BYTES, self._work[kind].view(torch.uint8))
            self.leave(number)

    def _level(self) -> None:
        """Put records that were not put since the last `keep`, if others were, so that one slot holds all."""
        if len(set(self._slots)) > 1:
            for number in self.each():
                self.take(number)
                self.put(number, ())
            self.flush()

    @property
    def shape(self) -> dict[str, Any]:
        """What must be the same for files of an earlier process to be read."""
        return {"numel": self.numel, "record_numel": self.record_numel, "kinds": [*map(str, self.kinds.items())]}

    def keep(self) -> dict[str, Any]:
        """Wait until all records are on the disk. Return the numbers with which another process can `go_on`."""
        self.flush()
        self._level()
        for file in self.files.values():
            file.sync()
        self._kept = [*self._slots]
        puts = [self._num_puts[number] for number in range(self.num_records)]
        sums = [self._sums[number] for number in range(self.num_records)]
        return self.shape | {"slot": next(iter(self._slots), 0), "sums": sums, "puts": puts}

    def go_on(self, kept: Mapping[str, Any]) -> None:
        """Continue from what `keep` returned, perhaps in another process.

        Raises ThinwireError if it has another shape, or if the files no longer hold it.
        """
        if other := [key for key, value in self.shape.items() if kept[key] != value]:
            raise ThinwireError(f"it holds {other[0]} {kept[other[0]]}, and this run {self.shape[other[0]]}")
        self._slots = [kept["slot"]] * self.num_records
        self._kept = [*self._slots]
        self._sums, self._num_puts = dict(enumerate(kept["sums"])), defaultdict(int, enumerate(kept["puts"]))
        for number in self.each():
            self.take(number)
            self.leave(number)

    def begin_anew(self) -> None:
        """Make all records zero."""
        self._slots, self._kept = [0] * self.num_records, None
        self._sums, self._num_puts = {}, defaultdict(int)

    def close(self) -> None:
        """Free memory and disk space."""
        self._reader.shutdown()
        self._writer.shutdown()
        for file in (*self.files.values(), *self._plain.values()):
            file.close()

    def _tensors(self, number: int, slot: Tensor, kinds: Collection[str] | None) -> dict[str, Tensor]:
        (start, end), found = self.span(number), dict[str, Tensor]()
        for kind, part in self._parts(slot).items():
            if kinds is not None and kind not in kinds:
                continue
            if kind in self._work:
                self.kinds[kind].decode(self._packet(kind, part), self._work[kind])
            found[kind] = self._work.get(kind, part.view(torch.float32))[: end - start]
        return found

    def _encode(self, number: int, slot: Tensor, kinds: Collection[str] | None) -> None:
        self._num_puts[number] += kinds is None
        for kind, part in self._parts(slot).items():
            if kind in self._work and (kinds is None or kind in kinds):
                seed = derive_seed(named_seed(0, kind), self._num_puts[number])
                counter = number * self.record_numel
                self.kinds[kind].encode(self._work[kind], self._packet(kind, part), seed=seed, counter=counter)

    def _packet(self, kind: str, part: Tensor) -> Tensor:
        return part[: self.kinds[kind].num_bytes(self.record_numel)]

    def _parts(self, slot: Tensor) -> dict[str, Tensor]:
        parts = slot[: sum(self.part_bytes.values())].split(list(self.part_bytes.values()))
        return dict(zip(self.kinds, parts, strict=True))

    def _read(self, number: int, before: Future[None] | None) -> Tensor:
        if before is not None:
            before.result()
        slot = self.pool.take()
        try:
            if number not in self._sums:
                return slot.zero_()
            for (kind, part), expected in zip(self._parts(slot).items(), self._sums[number], strict=True):
                self.files[kind].read(self._place(number, kind, self._slots[number]), part)
                if crc32(part) != expected:
                    raise ThinwireError(
                        f"store {self.files[kind].folder}: record {number} of {kind} is not what was written: the disk "
                        "or its file system is damaged"
                    )
        except BaseException:
            self.pool.give_back(slot)
            raise
        return slot

    def _place(self, number: int, kind: str, slot: int) -> int:
        """Where a record of one kind begins in its file."""
        return (slot * self.num_records + number) * self.part_bytes[kind]

    def _write(self, number: int, slot: Tensor, before: Future[None] | None, *, stays: bool) -> None:
        try:
            if before is not None:
                before.result()
            self._put_down(number, slot)
        finally:
            if not stays:
                self.pool.give_back(slot)

    def _put_down(self, number: int, slot: Tensor) -> None:
        sums, at = [], 0 if self._kept is None else 1 - self._kept[number]
        for kind, part in self._parts(slot).items():
            sums.append(crc32(part))
            self.files[kind].write(self._place(number, kind, at), part)
        self._sums[number], self._slots[number] = sums, at

    def _check_written(self) -> None:
        """Raise the error of a write that failed in the background. It stays, since the record was lost."""
        for number in [number for number, future in self._writing.items() if future.done()]:
            self._writing[number].result()
            del self._writing[number]


def _whole(numel: int) -> int:
    return max(1, -(-numel // UNIT)) * UNIT
