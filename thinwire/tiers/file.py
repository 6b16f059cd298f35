"""A file on a disk that extends this process's memory. Reads and writes bypass the page cache and are measured."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from thinwire.errors import ConfigError, ThinwireError
from thinwire.tiers.mount import check_folder, size_text
from thinwire.tiers.pool import aligned


@dataclass(frozen=True)
class TierReading:
    """Bytes read and written, seconds that the disk took, and seconds that the training thread waited for it."""

    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    wait_s: float = 0.0

    def __sub__(self, before: TierReading) -> TierReading:
        return TierReading(*(getattr(self, item.name) - getattr(before, item.name) for item in fields(self)))


class TierMeter:
    """Counts what all files of a process read and write. Any thread may use it."""

    def __init__(self) -> None:
        self._lock, self._total = threading.Lock(), TierReading()

    def add(self, moved: TierReading) -> None:
        with self._lock:
            both = ((getattr(self._total, item.name), getattr(moved, item.name)) for item in fields(moved))
            self._total = TierReading(*(a + b for a, b in both))

    def snapshot(self) -> TierReading:
        return self._total

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context whose duration counts as waiting."""
        start = time.perf_counter()
        yield
        self.add(TierReading(wait_s=time.perf_counter() - start))


class Pace:
    """Limits reads and writes together to `rate` bytes per second; None: no limit."""

    def __init__(self, rate: float | None = None) -> None:
        self.rate, self._lock, self._due_s = rate, threading.Lock(), 0.0

    def keep(self, num_bytes: int, since_s: float) -> None:
        """Sleep until these bytes fit the rate. since_s: when their transfer began, on time.monotonic's clock."""
        if self.rate is None:
            return
        with self._lock:
            self._due_s = due_s = max(self._due_s, since_s) + num_bytes / self.rate
        time.sleep(max(0.0, due_s - time.monotonic()))


class DiskFile:
    """A file whose space is reserved before it is used.

    Without a name, nothing of an earlier run can be read, and its space is freed when the process ends. With a name, it
    stays. Offsets, lengths and addresses are multiples of a block. is_direct: whether it bypasses the page cache, which
    not every file system allows.
    """

    def __init__(self, folder: Path, num_bytes: int, meter: TierMeter, pace: Pace, name: str = "") -> None:
        """Raises ConfigError if there is not enough space, or if the folder is not on a disk."""
        self.num_bytes, self.meter, self.pace, self.folder = aligned(num_bytes), meter, pace, folder
        self.path = folder / name if name else None
        there = self.path.stat().st_size if self.path is not None and self.path.exists() else 0
        check_folder(folder, max(0, self.num_bytes - there))
        folder.mkdir(parents=True, exist_ok=True)
        self.is_direct = True
        try:
            self._file = self._opened(os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.is_direct, self._file = False, self._opened(0)
        self._reserve()

    def grow(self, num_bytes: int) -> None:
        """Make the file larger. Raises ConfigError if there is not enough space."""
        self.num_bytes = aligned(num_bytes)
        self._reserve()

    def _reserve(self) -> None:
        try:
            os.ftruncate(self._file, self.num_bytes)
            os.posix_fallocate(self._file, 0, max(self.num_bytes, 1))
        except OSError as error:
            size = size_text(self.num_bytes)
            raise ConfigError(f"store {self.folder}: no space for {size}: {error.strerror}") from None

    def _opened(self, flags: int) -> int:
        if self.path is not None:
            return os.open(self.path, os.O_CREAT | os.O_RDWR | flags, 0o600)
        try:
            return os.open(self.folder, os.O_TMPFILE | os.O_RDWR | flags, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EPERM):
                raise
        # A file system that knows no files without a name.
        path = self.folder / f".thinwire-{os.getpid()}-{id(self)}"
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | flags, 0o600)
        path.unlink()
        return file

    def read(self, place: int, memory: Tensor) -> None:
        """Fill uint8 `memory` from byte `place` on. Raises ThinwireError if the disk fails."""
        self._move(os.preadv, place, memory)

    def write(self, place: int, memory: Tensor) -> None:
        """Write uint8 `memory` to byte `place`. Raises ThinwireError if the disk fails."""
        self._move(os.pwritev, place, memory)

    def _move(self, call: object, place: int, memory: Tensor) -> None:
        start, is_read = time.monotonic(), call is os.preadv
        view, done = memoryview(memory.numpy().data), 0
        try:
            while done < len(view):
                moved = call(self._file, [view[done:]], place + done)  # type: ignore[operator]
                if moved == 0:
                    raise OSError(errno.EIO, "the file ends here")
                done += moved
            if not self.is_direct and not is_read:
                os.fdatasync(self._file)
                os.posix_fadvise(self._file, place, done, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            what = "read from" if is_read else "written to"
            raise ThinwireError(
                f"store {self.folder}: {len(view)} bytes can't be {what} it: {error.strerror}"
            ) from error
        self.pace.keep(done, start)
        seconds = time.monotonic() - start
        reading = TierReading(done, 0, seconds) if is_read else TierReading(0, done, 0.0, seconds)
        self.meter.add(reading)

    def mapped(self, place: int, num_bytes: int) -> Tensor:
        """These bytes as a uint8 tensor that is only read; the kernel loads each page on first access."""
        start = place // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        memory = mmap.mmap(self._file, place - start + num_bytes, flags=mmap.MAP_SHARED, offset=start)
        return torch.frombuffer(memory, dtype=torch.uint8, offset=place - start, count=num_bytes)

    def sync(self) -> None:
        """Wait until all that was written outlives a loss of power."""
        start = time.monotonic()
        os.fdatasync(self._file)
        self.meter.add(TierReading(write_s=time.monotonic() - start))

    def close(self) -> None:
        """Close the file. Without a name, its space is freed."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
