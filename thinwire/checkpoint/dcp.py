"""Reading and writing pieces of flat tensors with torch.distributed.checkpoint (DCP).

Each rank writes its own pieces, as DCP shards of one-dimensional tensors. A reader may ask for any other pieces of the
same tensors. The index is JSON, because DCP's own index is a pickle, which thinwire never loads.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from thinwire import _compat
from thinwire.checkpoint.boxes import Box, Copy
from thinwire.checkpoint.parts import DATA_FILE, METADATA, STATE_FILE, CheckpointError, parts_of, write_durably
from thinwire.checkpoint.state import Piece, dtype_named
from thinwire.codecs.kernels.crc import crc32

if TYPE_CHECKING:
    from typing_extensions import Buffer

# After this many bytes the disk is asked to begin writing, before the file is complete.
SYNC_BYTES = 32 << 20
# {file: (bytes, CRC-32)}
FileSums = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor of `numel` elements, stored in `num_bytes` bytes of a file from `place` on."""

    numel: int
    dtype: str
    box: Box
    file: str
    place: int
    num_bytes: int

    @property
    def shape(self) -> torch.Size:
        """Shape of the box in the file."""
        return shape_of(self.box, self.numel)

    @property
    def offsets(self) -> torch.Size:
        """Offsets of the box in the tensor, in DCP's form."""
        return offsets_of(self.box, self.numel)


Index = dict[str, list[StoredBox]]


def shape_of(box: Box, numel: int) -> torch.Size:
    """Shape of a tensor for DCP: flat, or a matrix of rows of `stride` elements where ranks have cut the rows."""
    return torch.Size([box.height, box.width] if box.stride < numel else [box.numel])


def offsets_of(box: Box, numel: int) -> torch.Size:
    """Offsets of a box in the shape that `shape_of` returns."""
    return torch.Size(divmod(box.place, box.stride) if box.stride < numel else [box.place])


class SummedFile(io.BufferedWriter):
    """A new file that computes the CRC-32 of its content and flushes to disk while more is written.

    All is on the disk once it is closed without an error.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.num_bytes = self.crc = 0
        self._syncs = ThreadPoolExecutor(1, "thinwire-checkpoint-sync")
        self._sync: Future[None] | None = None
        self._num_synced = 0

    def write(self, data: Buffer) -> int:
        """Write all of the data. Raises OSError, also for an earlier write that the disk refused."""
        written = super().write(data)
        self.crc = crc32(data, self.crc)
        self.num_bytes += written
        if self.num_bytes - self._num_synced >= SYNC_BYTES and (self._sync is None or self._sync.done()):
            self._wait_for_disk()
            self._num_synced = self.num_bytes
            self._sync = self._syncs.submit(os.fsync, self.fileno())
        return written

    def close(self) -> None:
        """Flush the file to the disk and close it. Raises OSError if the disk refused anything.

        The disk reports a refused write once, and a later fsync succeeds.
        """
        if self.closed:
            return
        try:
            with self._syncs:
                self.flush()
                self._wait_for_disk()
                os.fsync(self.fileno())
        finally:
            super().close()

    def _wait_for_disk(self) -> None:
        if self._sync is not None:
            self._sync.result()


def write_pieces(folder: Path, pieces: Mapping[str, Piece], more: Mapping[str, Any]) -> FileSums:
    """Write this rank's pieces and `more`, which is JSON, into an empty folder. All is on the disk on return.

    Returns {file: (bytes, CRC-32)} of the data that was passed to the disk. Raises OSError as files do, and
    RuntimeError as torch.save does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chunks: dict[str, list[Any]] = {}
    try:
        with SummedFile(folder / DATA_FILE) as file:
            for name, piece in pieces.items():
                if piece.values.numel():
                    chunks.setdefault(piece.name or name, []).extend(_write_boxes(file, piece))
    except RuntimeError as error:
        context: BaseException | None = error
        # torch.save fails a second time when it closes a file that the disk refused.
        while context is not None and not isinstance(context, OSError):
            context = context.__context__
        raise context or error from None
    content = json.dumps({**more, "chunks": chunks}).encode()
    write_durably(folder / STATE_FILE, content)
    return {DATA_FILE: (file.num_bytes, file.crc), STATE_FILE: (len(content), zlib.crc32(content))}


def _write_boxes(file: SummedFile, piece: Piece) -> list[list[Any]]:
    """Write the boxes of a piece as DCP does, each as torch.save writes a tensor. Returns their lines in the index."""
    lines: list[list[Any]] = []
    dtype = str(piece.values.dtype).removeprefix("torch.")
    for box in piece.boxes():
        values = piece.values[box.at : box.at + box.numel].detach().view(shape_of(box, piece.numel)).cpu()
        if values.untyped_storage().nbytes() != values.nbytes:
            # torch.save would write the whole storage.
            values = values.clone()
        begin = file.num_bytes
        # Our checksums cover every byte. torch's would cover the same bytes, and nothing reads them.
        with _compat.no_record_checksums():
            torch.save(values, file)
        lies = [box.place, box.height, box.width, box.stride, DATA_FILE, begin, file.num_bytes - begin]
        lines.append([piece.numel, dtype, *lies])
    return lines


def write_metadata(folder: Path) -> tuple[int, int]:
    """Write DCP's own index of all parts in a folder. torch's tools need it; thinwire does not read it.

    Returns its size in bytes and its CRC-32.
    """
    index: Index = {}
    for part in parts_of(folder):
        for name, chunks in read_part(part)[1].items():
            index.setdefault(name, []).extend(chunks)
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for name, chunks in index.items():
        first = chunks[0]
        whole = torch.Size([first.numel // first.box.stride, first.box.stride][-len(first.shape) :])
        found = [ChunkStorageMetadata(chunk.offsets, chunk.shape) for chunk in chunks]
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype_named(first.dtype)), whole, found)
        places |= {MetadataIndex(name, c.offsets): _compat.place_in_file(c.file, c.place, c.num_bytes) for c in chunks}
    content = pickle.dumps(Metadata(tensors, storage_data=places))
    write_durably(folder / METADATA, content)
    return len(content), zlib.crc32(content)


def read_part(part: Path) -> tuple[dict[str, Any], Index]:
    """Read a rank's values that are no tensors, and the index of its tensors. Raises CheckpointError."""
    path = part / STATE_FILE
    try:
        text = json.loads(path.read_bytes())
        index = {
            name: [
                StoredBox(numel, dtype, box_of(lies), f"{part.name}/{Path(file).name}", place, num_bytes)
                for numel, dtype, *lies, file, place, num_bytes in rows
            ]
            for name, rows in text.pop("chunks").items()
        }
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}") from None
    return text, index


def box_of(lies: list[int]) -> Box:
    """The box of a chunk, from its description in the index. In the file, its rows are contiguous."""
    place, height, width, stride = lies
    return Box(place, height, width, stride, at=0, pitch=width)


class PieceLoadPlanner(LoadPlanner):
    """DCP's load planner: fills pieces from the stored chunks. Raises CheckpointError for missing elements."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._copies: dict[tuple[str, MetadataIndex], list[Copy]] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._pieces: dict[str, Piece] = state_dict

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for name, piece in self._pieces.items() for item in self._items(name, piece)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.storage_index.fqn!r} is not a tensor")

    def _items(self, name: str, piece: Piece) -> Iterator[ReadItem]:
        """The parts of each chunk to read: one run of it, or the whole chunk, to be copied row by row."""
        for number, copies in needed(name, piece, self._index):
            chunk, (first, *others) = self._index[name][number], copies
            target, place = MetadataIndex(name, [piece.offset]), MetadataIndex(name, [number])
            if first.is_run and not others and len(chunk.shape) == 1:
                length = torch.Size([first.height * first.width])
                begins = torch.Size([first.at]), torch.Size([first.from_])
            else:
                self._copies[name, place] = copies
                length, begins = chunk.shape, (torch.Size([0]), torch.Size([0] * len(chunk.shape)))
            yield ReadItem(LoadItemType.TENSOR, target, begins[0], place, begins[1], length)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        values = self._pieces[read_item.dest_index.fqn].values
        if (read_item.dest_index.fqn, read_item.storage_index) in self._copies:
            return values.new_empty(read_item.lengths)
        (start,), (length,) = read_item.dest_offsets, read_item.lengths
        return values[start : start + length]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        name = read_item.dest_index.fqn
        for copy in self._copies.get((name, read_item.storage_index), ()):
            copy.target(self._pieces[name].values).copy_(copy.source(tensor.view(-1)))


def needed(name: str, piece: Piece, index: Index) -> Iterator[tuple[int, list[Copy]]]:
    """Yield (number of a chunk, copies to make from it) until all elements are found.

    Raises CheckpointError if an element is in no chunk.
    """
    chunks = index.get(name, [])
    if chunks and (chunks[0].numel, dtype_named(chunks[0].dtype)) != (piece.numel, piece.values.dtype):
        there, here = f"{chunks[0].numel} {chunks[0].dtype}", f"{piece.numel} {piece.values.dtype}"
        raise CheckpointError(f"{name!r} was saved with {there} elements, and there are {here} now")
    boxes, missing = list(piece.boxes()), torch.ones(piece.values.numel(), dtype=torch.bool)
    for number, chunk in enumerate(chunks):
        shared = [copy for box in boxes for copy in box.shared_with(chunk.box)]
        if wanted := [copy for copy in shared if copy.target(missing).any()]:
            for copy in wanted:
                copy.target(missing).fill_(False)
            yield number, wanted
    if missing.any():
        at, last = (int(place) for place in missing.nonzero()[[0, -1]])
        lost = f"elements {piece.place_of(at)} to {piece.place_of(last) + 1} of {name!r} are not there"
        raise CheckpointError(f"{lost}{_whose(name, index)}")


class IndexedReader(dcp.FileSystemReader):
    """DCP's file reader below a folder, with an index given by the caller. Tensors are loaded with weights_only."""

    def __init__(self, folder: Path, index: Index) -> None:
        super().__init__(str(folder))
        places = {
            MetadataIndex(name, [number]): _compat.place_in_file(chunk.file, chunk.place, chunk.num_bytes)
            for name, chunks in index.items()
            for number, chunk in enumerate(chunks)
        }
        self._metadata = Metadata({}, storage_data=places)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def read_pieces(folder: Path, index: Index, pieces: Mapping[str, Piece]) -> None:
    """Fill the values of the pieces. Raises CheckpointError for missing elements and for unreadable files."""
    held = {name: piece for name, piece in pieces.items() if piece.values.numel()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(
                held, storage_reader=IndexedReader(folder, index), planner=PieceLoadPlanner(index), no_dist=True
            )  # fmt: skip
    except dcp.api.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, CheckpointError):
            raise cause from None
        raise CheckpointError(f"{folder} can't be read: {type(cause).__name__}: {cause}") from cause


def _whose(name: str, index: Index) -> str:
    if not index.get(name):
        return ""
    folders = [folder for folder, _ in groupby(sorted(chunk.file.split("/")[0] for chunk in index[name]))]
    return f": only the parts of {', '.join(folders)} are; copy those of the other machines into the same folder"
