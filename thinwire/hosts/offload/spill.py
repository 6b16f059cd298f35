"""Activations on a disk, from the forward that makes them to the backward that needs them."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.hosts.sharded.guard import Hook
from thinwire.tiers import ChunkedFile, DiskFile, Pace, TierMeter
from thinwire.tiers.pool import aligned

# Smaller storages stay in memory. The space on the disk grows by so much at least.
SMALL_BYTES, GROWTH_BYTES = 1 << 18, 64 << 20
# Storages that wait to be written, and that are read ahead of a backward.
MOST_WRITTEN, NUM_AHEAD = 2, 2


class Stored:
    """A storage on the disk.

    Attributes:
        owner: the storage, as long as it is in use elsewhere.
        version: of the tensor when it was saved.
        num_left: tensors that were saved of it and have not been used.
        memory: its content while it is read or used, uint8.
    """

    def __init__(self, storage: torch.UntypedStorage, version: int, place: int) -> None:
        self.owner, self.version, self.num_bytes = weakref.ref(storage), version, storage.nbytes()
        self.place, self.num_left = place, 0
        self.sums: list[int] = []
        self.writing: Future[None] | None = None
        self.reading: Future[None] | None = None
        self.memory: Tensor | None = None
        self.before: weakref.ref[Stored] | None = None


@dataclass(frozen=True)
class SpilledTensor:
    """A tensor that autograd saved: a part of a storage."""

    stored: Stored
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class ActivationsOnDisk:
    """Writes what autograd saves in a forward of the model to a file, each storage once, and reads it for the backward.

    Parameters, and storages of less than SMALL_BYTES, stay. The storages before the one in use are read ahead. A place
    is free again as soon as no graph needs it.

    Args:
        pack, unpack: what else becomes of a saved tensor. What `pack` returns in place of a tensor is left to `unpack`.
    """

    def __init__(
        self, model: nn.Module, folder: Path, meter: TierMeter, pace: Pace,
        pack: Callable[[Tensor], Any] | None = None, unpack: Callable[[Any], Tensor] | None = None,
    ) -> None:  # fmt: skip
        # Later the model would wait for the weights that it is asked for.
        self._params, self.meter = list(model.parameters()), meter
        self.file, self._end = DiskFile(folder, GROWTH_BYTES, meter, pace), 0
        self._pack_first, self._unpack_first = pack or (lambda tensor: tensor), unpack or (lambda kept: kept)
        self._inwards, self._outwards = ChunkedFile(self.file), ChunkedFile(self.file)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="thinwire-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="thinwire-write")
        self._written: deque[Future[None]] = deque()
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._stored: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()
        self._last: weakref.ref[Stored] | None = None
        self._weights: set[int] = set()
        self._contexts: list[torch.autograd.graph.saved_tensors_hooks] = []
        model.register_forward_pre_hook(Hook(lambda *_: self._enter()))
        model.register_forward_hook(Hook(lambda *_: self._exit()), always_call=True)

    def _enter(self) -> None:
        self._weights = {param.untyped_storage()._cdata for param in self._params}
        context = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        context.__enter__()
        self._contexts.append(context)

    def _exit(self) -> None:
        self._contexts.pop().__exit__(None, None, None)

    def _pack(self, tensor: Tensor) -> Any:
        kept = self._pack_first(tensor)
        if kept is not tensor or type(tensor) is not Tensor or tensor.device.type != "cpu":
            return kept
        storage = tensor.untyped_storage()
        if storage.nbytes() < max(SMALL_BYTES, 1) or storage._cdata in self._weights:
            return tensor
        stored = self._stored.get(storage._cdata)
        if stored is None or stored.owner() is not storage or stored.version != tensor._version:
            stored = self._store(storage, tensor._version)
        stored.num_left += 1
        return SpilledTensor(stored, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def _store(self, storage: torch.UntypedStorage, version: int) -> Stored:
        size = aligned(storage.nbytes())
        places = self._free[size]
        stored = Stored(storage, version, places.pop() if places else self._grow(size))
        weakref.finalize(stored, places.append, stored.place)
        stored.before, self._last = self._last, weakref.ref(stored)
        self._stored[storage._cdata] = stored
        # It holds the storage until it is written.
        whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
        stored.writing = self._writer.submit(self._write, stored, whole)
        self._written.append(stored.writing)
        del whole
        with self.meter.waiting():
            while len(self._written) > MOST_WRITTEN:
                self._written.popleft().result()
        return stored

    def _grow(self, size: int) -> int:
        place, self._end = self._end, self._end + size
        if self._end > self.file.num_bytes:
            self.file.grow(max(self._end, self.file.num_bytes + GROWTH_BYTES))
        return place

    def _write(self, stored: Stored, whole: Tensor) -> None:
        stored.sums = self._outwards.write(stored.place, whole)

    def _unpack(self, kept: Any) -> Tensor:
        if not isinstance(kept, SpilledTensor):
            return self._unpack_first(kept)
        stored = kept.stored
        self._begin(stored)
        assert stored.reading is not None and stored.memory is not None
        with self.meter.waiting():
            stored.reading.result()
        whole = stored.memory
        stored.num_left -= 1
        if stored.num_left <= 0:
            # Whoever uses the graph once more reads it once more.
            stored.reading = stored.memory = None
        self._read_ahead(stored)
        found = torch.empty(0, dtype=kept.dtype)
        return found.set_(whole.untyped_storage(), kept.offset, kept.size, kept.stride)

    def _read_ahead(self, stored: Stored) -> None:
        for _ in range(NUM_AHEAD):
            before = None if stored.before is None else stored.before()
            if before is None or before.num_left <= 0:
                return
            self._begin(before)
            stored = before

    def _begin(self, stored: Stored) -> None:
        if stored.reading is None:
            stored.memory = torch.empty(stored.num_bytes, dtype=torch.uint8)
            stored.reading = self._reader.submit(self._read, stored, stored.memory)

    def _read(self, stored: Stored, memory: Tensor) -> None:
        if stored.writing is not None:
            stored.writing.result()
        self._inwards.read(stored.place, memory, stored.sums, "activations are")

    def close(self) -> None:
        """Free the disk space."""
        self._reader.shutdown()
        self._writer.shutdown()
        self.file.close()
