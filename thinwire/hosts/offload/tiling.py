"""Cuts the large matrices of a model into tiles, and says where each tile lies in its matrix."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.checkpoint import Piece, Share, Snapshot, Source
from thinwire.errors import ConfigError, first_few
from thinwire.hosts.offload.hollow import is_hollow
from thinwire.hosts.offload.tiled import Strip, Tile, TiledEmbedding, TiledLinear
from thinwire.methods.memory.tiling import TileGrid, cuts
from thinwire.state.elementwise import is_elementwise
from thinwire.table import Row


@dataclass(frozen=True)
class TilePlace:
    """Where a tile lies: rows and columns of the matrix `name` [height, width]; of a bias, a matrix of one column."""

    name: str
    height: int
    width: int
    rows: slice
    columns: slice

    def of(self, whole: Tensor) -> Tensor:
        """The tile's values in those of the whole, in the tile's shape."""
        return whole[self.rows, self.columns] if whole.dim() == 2 else whole[self.rows]

    def lies(self, offset: int) -> dict[str, Any]:
        """Where elements from `offset` of the flat tile on lie; see Piece."""
        run = self.columns.stop - self.columns.start
        is_cut = {"run": run, "row": self.width, "first": self.columns.start} if run < self.width else {}
        return {"numel": self.height * self.width, "offset": self.rows.start * run + offset, **is_cut}


# The tiles of each whole tensor that was cut, by its id, with the place of each.
CutInto = dict[int, list[tuple[nn.Parameter, TilePlace]]]


@dataclass
class TileMap:
    """The tiles of a model, by the names of their parameters, and how checkpoints call them.

    In a checkpoint a tile is a piece of its matrix, so that any layout can load it, tiled or whole.

    grids: of each module that was cut.
    """

    places: dict[str, TilePlace] = field(default_factory=dict)
    grids: dict[str, TileGrid] = field(default_factory=dict)

    def name_of(self, key: str) -> str:
        """The key of a tile, perhaps behind a kind and a slash, with the name of its matrix."""
        kind, slash, name = key.rpartition("/")
        place = self.places.get(name)
        return key if place is None or key.startswith("own/") else f"{kind}{slash}{place.name}"

    def piece_of_whole(self, key: str, piece: Piece) -> Piece:
        """A piece of a tile as one of its matrix."""
        place = self.places.get(key.rpartition("/")[2])
        if place is None or key.startswith("own/"):
            return piece
        return replace(piece, name=self.name_of(key), **place.lies(piece.offset))

    def as_whole(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with pieces, numbers and shares of whole matrices."""
        snapshot.pieces = {key: self.piece_of_whole(key, piece) for key, piece in snapshot.pieces.items()}
        snapshot.scalars = {
            kind: {self.name_of(name): number for name, number in held.items()}
            for kind, held in snapshot.scalars.items()
        }
        snapshot.shares = [self._share(share) for share in snapshot.shares]
        return snapshot

    def _share(self, share: Share) -> Share:
        place = self.places.get(share.name)
        return share if place is None else replace(share, name=place.name, **place.lies(share.offset))

    def read_from(self, source: Source) -> None:
        """Let a source of whole matrices give tiles."""
        source.name_of, source.place_piece, source.part_of = self.name_of, self.piece_of_whole, self._part_of

    def _part_of(self, name: str, values: Tensor) -> Tensor:
        place = self.places.get(name)
        return values if place is None else place.of(values.view(place.height, place.width)).flatten()

    def part(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole parameters by name, with tiles in place of those that are cut."""
        found = {name: place.of(values[place.name]) for name, place in self.places.items() if place.name in values}
        return {**{name: value for name, value in values.items() if name not in self._wholes}, **found}

    @property
    def _wholes(self) -> set[str]:
        return {place.name for place in self.places.values()}

    def first(self, initial: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
        """What gives the first values of tiles, from what gives those of whole parameters.

        initial: is asked for parts of a matrix if it has a method `part(name, rows, columns)`; else for the whole.
        """
        part, last = getattr(initial, "part", None), dict[str, Tensor]()

        def given(name: str) -> Tensor:
            place = self.places.get(name)
            if place is None:
                return initial(name)
            if part is not None:
                return part(place.name, place.rows, place.columns)
            if place.name not in last:
                last.clear()
                last[place.name] = initial(place.name)
            return place.of(last[place.name]).contiguous()

        return given

    @property
    def row(self) -> Row:
        """A row of (asked for, in effect, why)."""
        shown = first_few([f"{name} in {grid.inputs} x {grid.outputs}" for name, grid in self.grids.items()])
        return ("tiles", shown, "parts of inputs x of outputs; an embedding, and what is tied to it, by rows alone")


def tile(
    model: nn.Module,
    text: str,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    tables: bool = True,
    must: bool = True,
) -> TileMap:
    """Cut the weights of Linears and embeddings into tiles, which are parameters of their own.

    The modules stay the same objects, and their state dict has the same names. Of an embedding, and of a Linear that
    shares its weight with one, only rows are cut.

    Args:
        text: see `TileGrid.parse`.
        optimizer: gets the tiles in place of the whole parameters, of which it must not have taken a step.
        tables: cut embeddings, too.
        must: every grid must cut something.

    Raises ConfigError if it does not is cut, and for more parts than a matrix has rows or columns.
    """
    grids, made = TileGrid.parse(text), TileMap()
    users: dict[nn.Parameter, list[tuple[str, nn.Module]]] = defaultdict(list)
    for path, module in model.named_modules():
        for param in module._parameters.values():
            if param is not None:
                users[param].append((path, module))
    held = None if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
    largest, used = ("", 0), set[TileGrid]()
    parts: CutInto = {}
    for name, param in list(model.named_parameters()):
        own = users[param]
        is_cut = param.dim() == 2 and param.requires_grad and all(_is_plain(module, param) for _, module in own)
        has_table = any(isinstance(module, nn.Embedding) for _, module in own)
        if not is_cut or (held is not None and id(param) not in held) or (has_table and not tables):
            continue
        largest = max(largest, (own[0][0], param.numel()), key=lambda each: each[1])
        taking = [grid for grid in grids if any(grid.takes(path, param.numel()) for path, _ in own)]
        used.update(taking)
        for grid in taking[:1]:
            grid = replace(grid, inputs=1) if has_table else grid
            _cut(made, parts, name, param, own, grid)
    if unused := [grid for grid in grids if must and grid not in used]:
        what = (
            "is so large that it is cut unnamed" if not unused[0].pattern else "of a Linear or embedding has that name"
        )
        near = f"{largest[0]}={unused[0].inputs}x{unused[0].outputs}"
        raise ConfigError(f"tile {unused[0]}: no trained matrix {what}; nearest: {near}, of {largest[1]:,} elements")
    if optimizer is not None:
        _replace(optimizer, parts, made)
    return made


def tiled_shapes(shapes: nn.Module, text: str | None) -> nn.Module:
    """A model of which only shapes are used, cut into tiles if `text` is stated: a copy then. Raises ConfigError."""
    if text is None:
        return shapes
    shapes = copy.deepcopy(shapes)
    tile(shapes, text)
    return shapes


def _is_plain(module: nn.Module, param: nn.Parameter) -> bool:
    """Whether a module multiplies by the parameter, or takes its rows, and does nothing else."""
    if module._parameters.get("weight") is not param or "forward" in vars(module):
        return False
    if isinstance(module, nn.Embedding):
        return type(module).forward is nn.Embedding.forward and module.max_norm is None and not module.sparse
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _cut(
    made: TileMap, parts: CutInto, name: str, param: nn.Parameter,
    users: Sequence[tuple[str, nn.Module]], grid: TileGrid,
) -> None:  # fmt: skip
    """Cut a matrix in all modules that use it, and the bias of each."""
    (height, width), path = param.shape, users[0][0]
    for what, asked, most in (("outputs", grid.outputs, height), ("inputs", grid.inputs, width)):
        if asked > most:
            raise ConfigError(f"tile {grid}: {path} has {most} {what}, and can't be cut into {asked}; nearest: {most}")
    spots = [
        [TilePlace(name, height, width, rows, columns) for columns in cuts(width, grid.inputs)]
        for rows in cuts(height, grid.outputs)
    ]
    tiles = [[_part(param, place) for place in row] for row in spots]
    parts[id(param)] = [pair for row in zip(tiles, spots, strict=True) for pair in zip(*row, strict=True)]
    for at, (module_path, module) in enumerate(users):
        bias, prefix = module._parameters.get("bias"), f"{module_path}." if module_path else ""
        own: list[nn.Parameter | None] = [None] * grid.outputs
        if bias is not None:
            places = [TilePlace(f"{prefix}bias", height, 1, rows, slice(0, 1)) for rows in cuts(height, grid.outputs)]
            own = [_part(bias, place) for place in places]
            parts[id(bias)] = [(each, place) for each, place in zip(own, places, strict=True) if each is not None]
        made.grids[module_path] = grid
        _change(module, tiles, own)
        for number, row in enumerate(tiles):
            if bias is not None:
                made.places[f"{prefix}tile{number}_{grid.inputs - 1}.bias"] = places[number]
            for inside in range(len(row)) if at == 0 else ():
                made.places[f"{prefix}tile{number}_{inside}.weight"] = spots[number][inside]


def _part(param: nn.Parameter, place: TilePlace) -> nn.Parameter:
    """The parameter's values at a place as a parameter; without memory, where it has none."""
    if is_hollow(param):
        shape = [each.stop - each.start for each in (place.rows, place.columns)[: param.dim()]]
        values = torch.empty(shape, dtype=param.dtype, device=param.device)
        values.untyped_storage().resize_(0)
    else:
        values = place.of(param.data).contiguous()
    return nn.Parameter(values, param.requires_grad)


def _change(module: Any, tiles: list[list[nn.Parameter]], biases: list[nn.Parameter | None]) -> None:
    """Make a module use these tiles. It stays the same object: others may hold it."""
    grid: list[list[nn.Module]]
    if isinstance(module, nn.Embedding):
        padding, by_frequency, first = module.padding_idx, module.scale_grad_by_freq, 0
        grid = []
        for (weight,) in tiles:
            is_here = padding is not None and first <= padding < first + len(weight)
            grid.append([Strip(weight, padding - first if is_here and padding is not None else None, by_frequency)])
            first += len(weight)
        changed: type[nn.Module] = TiledEmbedding
    else:
        grid = [
            [Tile(weight, bias if weight is row[-1] else None) for weight in row]
            for row, bias in zip(tiles, biases, strict=True)
        ]
        changed = TiledLinear
    module.__class__ = changed
    module.take(grid)


def _replace(optimizer: torch.optim.Optimizer, parts: CutInto, made: TileMap) -> None:
    """Give an optimizer the tiles, each with its part of the state."""
    for param in [param for param in optimizer.state if id(param) in parts]:
        held = optimizer.state.pop(param)
        for tile, place in parts[id(param)]:
            optimizer.state[tile] = {
                kind: place.of(value).contiguous() if is_elementwise(value, param) else copy.deepcopy(value)
                for kind, value in held.items()
            }
    by_whole: dict[str, list[str]] = defaultdict(list)
    for tile_name, place in made.places.items():
        by_whole[place.name].append(tile_name)
    for group in optimizer.param_groups:
        names = group.get("param_names")
        if names is not None:
            group["param_names"] = [each for name in names for each in by_whole.get(name, [name])]
        group["params"] = list(_expanded(group["params"], parts))


def _expanded(params: Sequence[nn.Parameter], parts: CutInto) -> Iterator[nn.Parameter]:
    for param in params:
        yield from (tile for tile, _ in parts[id(param)]) if id(param) in parts else [param]
