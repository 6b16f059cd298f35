"""State that is larger than the piece it belongs to, on a disk, and read in pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.errors import ThinwireError
from thinwire.hosts.offload.slots import SlottedFile, target_of
from thinwire.methods.memory.residency import FP32_BYTES
from thinwire.methods.memory.setup import NUM_PAGES
from thinwire.tiers import TierMeter
from thinwire.tiers.checksum import crc32
from thinwire.tiers.pool import Pool, aligned, pages


class Page(NamedTuple):
    """Bytes [start, start + num_bytes) of a slot."""

    start: int
    num_bytes: int


class PagesOnDisk:
    """Records [rows, width] of pieces, in fp32. See PagedRecords.

    While a page is used, the next one is read and the one before is written. Behind the last page of a record comes
    the first one of the record that followed the last time.

    Args:
        places: of each piece: where its record begins in a slot.
        page_bytes: the most of a page.
    """

    def __init__(self, slots: SlottedFile, meter: TierMeter, places: Mapping[Tensor, int], page_bytes: int) -> None:
        self.slots, self.meter, self._places, self._page_bytes = slots, meter, places, page_bytes
        self._pool: Pool | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="thinwire-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="thinwire-write")
        # Where each record begins, by the tensor that stands for it.
        self._starts: dict[Tensor, int] = {}
        self._sums: dict[Page, int] = {}
        # Where each page was last written, and where it was last kept.
        self._slot_of: dict[Page, int] = {}
        self._safe: dict[Page, int] = {}
        self._writing: dict[Page, Future[None]] = {}
        # Pages that stay in memory, and those of them that differ from the disk.
        self._kept: dict[Page, Tensor] = {}
        self._changed: set[Page] = set()
        self._left = 0
        # The record behind each, as of its last use; the last one used; and a page that is read ahead.
        self._after: dict[int, Page] = {}
        self._last: int | None = None
        self._ahead: tuple[Page, Future[Tensor]] | None = None

    def made(self, piece: Tensor, shape: torch.Size) -> Tensor:
        """See PagedRecords. The tensor is a view of the file."""
        start, num_bytes = self._places[piece], FP32_BYTES * shape.numel()
        self.flush()
        for page in [page for page in self._sums if start <= page.start < start + num_bytes]:
            del self._sums[page]
            if self._kept.pop(page, None) is not None:
                self._left += aligned(page.num_bytes)
        found = self.slots.file.mapped(start, num_bytes).view(torch.float32).view(shape)
        self._starts = {other: at for other, at in self._starts.items() if at != start} | {found: start}
        return found

    def holds(self, values: Tensor) -> bool:
        """See PagedRecords."""
        return values in self._starts

    def mapped(self, values: Tensor) -> Tensor:
        """A record as a view of what was last written, for checkpoints. Call `flush` first."""
        start = self._starts[values]
        slot = next((slot for page, slot in self._slot_of.items() if page.start == start), 0)
        return self.slots.mapped(values, start, slot)

    def pages(self, values: Tensor, num_rows: int, *, changes: bool) -> Iterator[tuple[slice, Tensor]]:
        """See PagedRecords."""
        start, width = self._starts[values], values.shape[1]
        spans = [slice(first, min(first + num_rows, len(values))) for first in range(0, len(values), num_rows)]
        each = [
            Page(start + FP32_BYTES * width * rows.start, FP32_BYTES * width * (rows.stop - rows.start))
            for rows in spans
        ]
        if not each:
            return
        if self._last is not None:
            self._after[self._last] = each[0]
        self._last, coming = start, self._first(each[0])
        for number, (rows, page) in enumerate(zip(spans, each, strict=True)):
            with self.meter.waiting():
                memory = coming.result()
            if number + 1 < len(each):
                coming = self._begin(each[number + 1])
            yield rows, memory[: page.num_bytes].view(torch.float32).view(-1, width)
            self._leave(page, memory, changes=changes)
        if (after := self._after.get(start)) is not None:
            self._ahead = after, self._begin(after)

    def stay(self, num_bytes: int) -> int:
        """Let pages stay in memory, each from its next use on. Returns how many of these bytes they take."""
        self._left = min(num_bytes, sum(aligned(page.num_bytes) for page in self._sums))
        return self._left

    def flush(self) -> None:
        """Wait until all of it is on the disk. Raises ThinwireError."""
        self._forget_ahead()
        self._write_changed()

    def _write_changed(self) -> None:
        for page in sorted(self._changed):
            self._write(page, self._kept[page])
        self._changed.clear()
        for future in self._writing.values():
            future.result()
        self._writing.clear()

    def keep(self) -> list[list[int]]:
        """Write what is not on the disk. Return the numbers with which another process can `go_on`."""
        self._write_changed()
        self._safe = {page: self._slot_of[page] for page in self._sums}
        return [[*page, self._slot_of[page], checksum] for page, checksum in self._sums.items()]

    def go_on(self, kept: Iterable[Sequence[int]]) -> None:
        """Continue from what `keep` returned, with records that were `made`. Raises ThinwireError for damaged pages."""
        for start, num_bytes, slot, checksum in kept:
            page = Page(start, num_bytes)
            self._sums[page], self._slot_of[page], self._safe[page] = checksum, slot, slot
        for page in self._sums:
            memory = self._begin(page).result()
            assert self._pool is not None
            self._pool.give_back(memory)

    def begin_anew(self) -> None:
        """Forget all records. Nothing is kept."""
        for held in (self._starts, self._sums, self._slot_of, self._safe):
            held.clear()

    def close(self) -> None:
        """Stop reading and writing."""
        self._reader.shutdown()
        self._writer.shutdown()

    def _first(self, page: Page) -> Future[Tensor]:
        """The first page of a record, which may have been read ahead."""
        if self._ahead is None or self._ahead[0] != page:
            self._forget_ahead()
            return self._begin(page)
        (_, coming), self._ahead = self._ahead, None
        return coming

    def _forget_ahead(self) -> None:
        if self._ahead is not None:
            page, coming = self._ahead
            self._ahead, memory = None, coming.result()
            if page not in self._kept:
                assert self._pool is not None
                self._pool.give_back(memory)

    def _begin(self, page: Page) -> Future[Tensor]:
        if self._pool is None:
            self._pool = Pool(NUM_PAGES, self._page_bytes)
        return self._reader.submit(self._read, page, self._writing.pop(page, None))

    def _leave(self, page: Page, memory: Tensor, *, changes: bool) -> None:
        assert self._pool is not None
        if page not in self._kept and aligned(page.num_bytes) <= self._left:
            self._left -= aligned(page.num_bytes)
            self._kept[page] = pages(aligned(page.num_bytes)).copy_(memory[: aligned(page.num_bytes)])
            self._pool.give_back(memory)
        elif page not in self._kept and changes:
            self._writing[page] = self._writer.submit(self._put_down, page, memory)
            return
        elif page not in self._kept:
            self._pool.give_back(memory)
        if changes:
            self._changed.add(page)

    def _read(self, page: Page, before: Future[None] | None) -> Tensor:
        if before is not None:
            before.result()
        if page in self._kept:
            return self._kept[page]
        assert self._pool is not None
        memory = self._pool.take()
        part = memory[: aligned(page.num_bytes)]
        if page not in self._sums:
            part.zero_()
            return memory
        try:
            self.slots.file.read(self.slots.at(page.start, self._slot_of[page]), part)
            if crc32(part) != self._sums[page]:
                raise ThinwireError(
                    f"store {self.slots.file.folder}: a window is not what was written: the disk is damaged"
                )
        except BaseException:
            self._pool.give_back(memory)
            raise
        return memory

    def _put_down(self, page: Page, memory: Tensor) -> None:
        assert self._pool is not None
        try:
            self._write(page, memory)
        finally:
            self._pool.give_back(memory)

    def _write(self, page: Page, memory: Tensor) -> None:
        part = memory[: aligned(page.num_bytes)]
        slot = target_of(self._safe.get(page))
        self._sums[page], self._slot_of[page] = crc32(part), slot
        self.slots.file.write(self.slots.at(page.start, slot), part)
