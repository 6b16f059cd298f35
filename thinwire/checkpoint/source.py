"""A checkpoint for its readers, in any layout, and a report of what became of each part."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.checkpoint.folder import Manifest
from thinwire.checkpoint.parts import CheckpointError, parts_of, rank_of
from thinwire.checkpoint.state import Piece, Share, dtype_named, from_tree, own_name, tensors_of
from thinwire.table import Row

if TYPE_CHECKING:
    # It loads torch.distributed.checkpoint, which takes about as long as all of torch.
    from thinwire.checkpoint.dcp import Index, StoredBox

WEIGHTS, FROZEN, NORMS = "weights", "frozen", "norms"


class Source:
    """A checkpoint as one rank of a new world reads it, whatever world wrote it.

    Raises CheckpointError if a file is missing or can't be read.

    Args:
        rank: rank in the new world.

    Attributes:
        rows: the load report, one line each: found, carried, transformed or dropped.
        is_exact: whether the weights in use are bit for bit those in use when the checkpoint was saved.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self._begin(rank, self.manifest.world_size)
        for part in parts_of(folder):
            self._add(part)
        if not self._parts:
            raise CheckpointError(f"{folder} holds no rank's part")

    def _begin(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.rows: list[Row] = []
        self.is_exact = True
        self.is_same = False
        # Maps a host's piece to the checkpoint's tensors; the identity unless a mesh cuts the tensors.
        # The name in the checkpoint of a host's piece, and of what belongs to a parameter; the identity without tiles.
        self.name_of: Callable[[str], str] = lambda name: name
        self.place_piece: Callable[[str, Piece], Piece] = lambda name, piece: piece
        # Selects from a whole flat parameter the values that a rank of this mesh needs.
        self.part_of: Callable[[str, Tensor], Tensor] = lambda name, values: values
        self._index: Index = {}
        self._parts: dict[int, dict[str, Any]] = {}
        self._shares: dict[str, dict[str, list[tuple[int, Share]]]] = {}
        self._taken: set[str] = set()

    def _add(self, part: Path) -> None:
        from thinwire.checkpoint.dcp import read_part

        rank = rank_of(part)
        self._parts[rank], index = read_part(part)
        for name, chunks in index.items():
            self._index.setdefault(name, []).extend(chunks)
        for share in (Share(*fields) for fields in self._parts[rank]["shares"]):
            self._shares.setdefault(share.kind, {}).setdefault(share.name, []).append((rank, share))

    @property
    def common(self) -> dict[str, Any]:
        """Numbers that were the same on all ranks."""
        return self._text["common"]

    @property
    def layout(self) -> dict[str, Any]:
        """Layout of the old rank that this rank continues."""
        return self._text["layout"]

    @property
    def _text(self) -> dict[str, Any]:
        return self._parts.get(self.rank % self.world_size) or next(iter(self._parts.values()))

    def fits(self, layout: Mapping[str, Any]) -> bool:
        """Whether this rank may load its own state unchanged."""
        self.is_same = self.rank % self.world_size in self._parts and self.layout == json.loads(json.dumps(layout))
        return self.is_same

    def kinds(self, group: str) -> list[str]:
        """Kinds in a group, such as exp_avg in the optimizer's group."""
        return sorted({name.split("/")[1] for name in self._index if name.startswith(f"{group}/")})

    def has(self, name: str) -> bool:
        return name in self._index or self.name_of(name) in self._index

    def holds(self, name: str, numel: int) -> bool:
        """Whether there is a tensor of that name with `numel` elements."""
        return self.has(name) and self._chunks(name)[0].numel == numel

    def _chunks(self, name: str) -> list[StoredBox]:
        return self._index.get(self.name_of(name), [])

    @property
    def norms(self) -> dict[str, Any] | None:
        """What was told of the norms of seen sequences; None: there are none. Who asks uses them."""
        self._taken.add(NORMS)
        return self.common.get(NORMS)

    def numel_of(self, name: str) -> int:
        """Elements of the tensor of that name; 0 if there is none."""
        return self._index[name][0].numel if self.has(name) else 0

    def has_any(self, kind: str) -> bool:
        return any(name.startswith(f"{kind}/") for name in self._index)

    def scalar(self, kind: str, name: str) -> float | None:
        """A number that the optimizer held for a parameter, if any."""
        found = (part["scalars"].get(kind, {}).get(self.name_of(name)) for part in self._parts.values())
        return next((value for value in found if value is not None), None)

    @property
    def scalar_kinds(self) -> set[str]:
        return {kind for part in self._parts.values() for kind in part["scalars"]}

    def read(self, pieces: Mapping[str, Piece]) -> None:
        """Fill the values of these pieces. Raises CheckpointError for elements that are not there."""
        from thinwire.checkpoint.dcp import read_pieces

        index = {name: self._chunks(name) for name in pieces}
        read_pieces(self.folder, index, {name: self.place_piece(name, p) for name, p in pieces.items()})

    def own(self, key: str, rank: int | None = None) -> Any:
        """A part of a rank's own state; by default of the old rank that this rank continues."""
        rank = self.rank % self.world_size if rank is None else rank
        if rank not in self._parts:
            raise CheckpointError(f"{self.folder}: the part of rank {rank} is not here; copy it from its machine")
        tree = self._parts[rank]["own"].get(key)
        self._taken.add(key)
        tensors: dict[str, Tensor] = {}
        pieces: dict[str, Piece] = {}
        for path, shape, dtype in tensors_of(tree):
            tensors[path] = torch.empty(shape, dtype=dtype)
            if math.prod(shape):
                pieces[own_name(rank, path)] = Piece.whole(tensors[path])
        self.read(pieces)
        return from_tree(tree, tensors)

    def mean_of(self, kind: str, name: str) -> Tensor | None:
        """Mean over ranks of what they remembered of a parameter, fp32 [numel]; None if nothing was saved."""
        shares = self._shares.get(kind, {}).get(self.name_of(name))
        if not shares:
            return None
        self._taken.add(kind)
        if away := sorted({*range(self.world_size)} - self._parts.keys()):
            raise CheckpointError(f"{self.folder}: the parts of ranks {away} are not here; copy them")
        mean = torch.zeros(max(share.whole_numel for _, share in shares))
        for rank, share in shares:
            chunk = self._index[own_name(rank, share.path)][0]
            values = torch.empty(share.length, dtype=dtype_named(chunk.dtype))
            self.read({own_name(rank, share.path): Piece(chunk.numel, share.start, values)})
            for box in share.piece(values).boxes():
                box.of(mean).add_(box.values(values).float(), alpha=share.weight)
        return self.part_of(name, mean)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of all parameters, by name."""
        return {name: torch.Size(shape) for name, shape in self.common["shapes"].items()}

    def weight(self, name: str) -> Tensor:
        """A parameter's whole tensor, in fp32 if it was trained."""
        kind = WEIGHTS if self.has(f"{WEIGHTS}/{name}") else FROZEN
        chunks = self._index.get(f"{kind}/{name}")
        tensor = torch.empty(self.shapes[name], dtype=dtype_named(chunks[0].dtype) if chunks else torch.float32)
        self.read({f"{kind}/{name}": Piece.whole(tensor)})
        return tensor

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter's name and whole tensor, one at a time; see `weight`."""
        return ((name, self.weight(name)) for name in self.shapes)

    def note(self, what: str, became: str, why: str = "") -> None:
        """Add a line to the load report: its subject, and whether that was found, carried, transformed or dropped."""
        self.rows.append((f"resume: {what}", became, why))

    def drop_replica(self, why: str) -> None:
        """Report that the weights in use, if they differed from the masters, are dropped."""
        self.is_exact = False
        self.note("replicas that differ from the masters", "dropped", why)

    def report(self) -> list[Row]:
        """All lines of the load report, once everything has been loaded."""
        unused: list[Row] = []
        if NORMS in self.common and NORMS not in self._taken:
            unused.append(("resume: norms of seen sequences", "dropped", "this run keeps all activations"))
        if self.is_same:
            # An optimizer with other options may not have taken over all that it was given.
            changed = [row for row in self.rows if row[1] != "carried"] + unused
            return changed or [("resume", "found all of it", "the same layout: all as it was saved")]
        rows = [*self.rows, *unused]
        for kind, shares in self._shares.items():
            what = f"resume: {kind}, of {self.world_size} rank(s)"
            if kind in self._taken:
                rows.append((what, "transformed", "every rank gets the values that keep the mean the same"))
            elif shares:
                rows.append((what, "dropped", "nothing in this run uses it"))
        return [*rows, *self._left_behind()]

    def _left_behind(self) -> Iterator[Row]:
        """Lines on what ranks remembered and nothing has loaded."""
        shared = {
            share.path.split("/")[0] for kinds in self._shares.values() for held in kinds.values() for _, share in held
        }
        for key, tree in (self._text["own"] or {}).items():
            if key not in self._taken | shared and any(math.prod(shape) for _, shape, _ in tensors_of(tree)):
                yield (
                    f"resume: {key}, remembered by each of {self.world_size} rank(s)",
                    "dropped",
                    self._text.get("left", {}).get(key, "only the layout that saved it can load it"),
                )


def read_weights(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the whole tensor of every parameter, one at a time. Raises CheckpointError."""
    yield from Source(checkpoint, 0).weights()
