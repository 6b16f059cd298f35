"""Files of other programs as parameters: their names, and each rank's shards. No code in a file is run."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from thinwire.checkpoint.foreign.pickles import load_metadata, load_pt
from thinwire.errors import ConfigError, ThinwireError


class ForeignSource(Protocol):
    """A checkpoint of another program."""

    def names(self) -> Iterable[str]:
        """Names of all entries, as the other program wrote them."""
        ...

    def shards(self, name: str) -> list[Tensor]:
        """Read the ranks' shards of one entry, in rank order."""
        ...


class SafetensorsSource:
    """A folder of .safetensors files. Each tensor is whole in one of them; those of masks.safetensors are no weights.

    Raises ConfigError for a folder without such files, for a missing file that the index names, and for a name that is
    in two files.
    """

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Path] = {}
        self._files: dict[Path, Any] = {}
        for path in sorted(set(folder.glob("*.safetensors")) - {folder / "masks.safetensors"}):
            self._files[path] = opened(path)
            for name in self._files[path].keys():  # noqa: SIM118 - it can't be iterated over
                if self._file_of.setdefault(name, path) != path:
                    raise ConfigError(f"{name} is in {self._file_of[name]} and in {path}: delete the older file")
        if not self._files:
            raise ConfigError(f"{folder} holds no .safetensors file")
        self._check_index(folder / "model.safetensors.index.json")

    def _check_index(self, index: Path) -> None:
        if not index.is_file():
            return
        try:
            stated: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{index} is damaged: {error}") from error
        missing = [name for name, file in stated.items() if self._file_of.get(name) != index.parent / file]
        if missing:
            raise ConfigError(f"{index} says that {stated[missing[0]]} holds {missing[0]}, which it does not")

    def names(self) -> Iterable[str]:
        """The names in all files."""
        return self._file_of

    def shards(self, name: str) -> list[Tensor]:
        """The tensor, whole."""
        return [self._files[self._file_of[name]].get_tensor(name)]


def opened(path: Path) -> Any:
    """Open a .safetensors file. Raises ThinwireError if it is damaged."""
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ThinwireError(f"{path} is damaged: {error}") from error


class SafeReader(dcp.FileSystemReader):
    """torch's reader of a checkpoint. Its metadata, a pickle, is read once by `load_metadata`.

    torch reads the tensors themselves safely.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.metadata = load_metadata(folder / ".metadata")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata."""
        return self.metadata


class DCPSource:
    """A folder of torch.distributed.checkpoint, in any layout: torch joins the ranks' shards."""

    def __init__(self, folder: Path) -> None:
        self._reader = SafeReader(folder)

    def names(self) -> Iterable[str]:
        """Names of all entries, tensors or not."""
        return self._reader.metadata.state_dict_metadata

    def shards(self, name: str) -> list[Tensor]:
        """The tensor, whole. Raises ConfigError for an entry that is not a tensor, ThinwireError for a damaged file."""
        entry = self._reader.metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            raise ConfigError("is an object, not a tensor, and would have to be unpickled: leave it out")
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is")
                dcp.load({name: tensor}, storage_reader=self._reader, no_dist=True)
        except dcp.CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise ThinwireError(f"{name} can't be read from {self._reader.path}: {cause}") from error
        return [tensor]


class MegatronSource:
    """The folders `mp_rank_TT` or `mp_rank_TT_PPP` of one iteration of Megatron core: tensor rank, pipeline stage.

    Every stage counts its layers from 0. Here the numbers go on from stage to stage. Raises ConfigError for a folder
    without such files, for a missing rank, and for ranks of one stage that hold different names.
    """

    def __init__(self, folder: Path) -> None:
        self._shards: dict[str, list[Any]] = {}
        num_layers = 0
        for stage in stages(newest_iteration(folder)):
            ranks: list[Any] = [load_pt(path).get("model") for path in stage]
            if not all(isinstance(rank, dict) and rank.keys() == ranks[0].keys() for rank in ranks):
                raise ConfigError(f"{stage[0].parent} and the folders beside it hold different names, or no weights")
            names = {name: moved(name, num_layers) for name in ranks[0]}
            self._shards |= {new: [rank[name] for rank in ranks] for name, new in names.items()}
            num_layers = max(
                [num_layers, *(1 + number for number in map(layer_of, self._shards) if number is not None)]
            )

    def names(self) -> Iterable[str]:
        """The names on all stages."""
        return self._shards

    def shards(self, name: str) -> list[Tensor]:
        """Each tensor-parallel rank's shard, memory-mapped from its file."""
        if not all(isinstance(shard, Tensor) for shard in self._shards[name]):
            raise ConfigError("is not a tensor: leave it out")
        return self._shards[name]


def newest_iteration(folder: Path) -> Path:
    """The folder of the iteration that Megatron's pointer file names, or the folder itself if there is no pointer."""
    pointer = folder / "latest_checkpointed_iteration.txt"
    if not pointer.is_file():
        return folder
    text = pointer.read_text().strip()
    return folder / (f"iter_{int(text):07d}" if text.isdigit() else "release")


def stages(folder: Path) -> list[list[Path]]:
    """The files of every pipeline stage, by tensor-parallel rank. Raises ConfigError where one is missing."""
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("mp_rank_*/model_optim_rng.pt")):
        if match := re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?", path.parent.name):
            found[int(match[2] or 0), int(match[1])] = path
    if not found:
        raise ConfigError(f"{folder} holds no mp_rank_*/model_optim_rng.pt")
    num_stages, num_ranks = (1 + max(key[axis] for key in found) for axis in (0, 1))
    missing = [(rank, stage) for stage in range(num_stages) for rank in range(num_ranks) if (stage, rank) not in found]
    if missing:
        raise ConfigError(f"{folder}: tensor-parallel rank {missing[0][0]} of stage {missing[0][1]} is missing")
    return [[found[stage, rank] for rank in range(num_ranks)] for stage in range(num_stages)]


def layer_of(name: str) -> int | None:
    """Number of the layer in a Megatron name; None for a name outside the layers."""
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    return int(match[1]) if match else None


def moved(name: str, num_layers: int) -> str:
    """The name with its layer number raised by `num_layers`, the number of layers in earlier stages."""
    return re.sub(r"(?<=^decoder\.layers\.)\d+", lambda match: str(int(match[0]) + num_layers), name)


class Zero3Source:
    """Shards of DeepSpeed's ZeRO-3: each parameter is flattened and cut into equal parts, one per rank, with padding.

    A rank's parts lie one after another in its flat fp32 groups in `..._optim_states.pt`. Their order is that of the
    parameters' shapes in `zero_pp_rank_R_mp_rank_00_model_states.pt`. Frozen parameters are cut the same way and have
    names. Raises ConfigError for missing files, for files of another stage, and for lengths that do not add up.
    """

    def __init__(self, folder: Path) -> None:
        folder = newest_tag(folder)
        models = [load_pt(path) for path in by_rank(folder, "model_states")]
        states = [load_pt(path)["optimizer_state_dict"] for path in by_rank(folder, "optim_states")]
        check_complete(folder, models, states)
        self._shapes: dict[str, torch.Size] = {}
        for group in models[0]["param_shapes"]:
            self._shapes |= group
        self._frozen: dict[str, torch.Size] = models[0].get("frozen_param_shapes") or {}
        self._fragments = [model.get("frozen_param_fragments") or {} for model in models]
        self._groups: list[list[Tensor]] = [state["fp32_flat_groups"] for state in states]
        self.world_size = len(states)
        self._starts: dict[str, int] = {}
        end = 0
        for name, shape in self._shapes.items():
            self._starts[name], end = end, end + part_numel(shape.numel(), self.world_size)
        held = {sum(group.numel() for group in groups) for groups in self._groups}
        if held != {end}:
            raise ConfigError(
                f"{folder}: the ranks hold {sorted(held)} elements, and the shapes of the weights ask for {end}"
            )

    def names(self) -> Iterable[str]:
        """The trained parameters, then the frozen ones."""
        return [*self._shapes, *self._frozen]

    def shards(self, name: str) -> list[Tensor]:
        """The parameter, whole: its pieces in rank order without the padding."""
        if name in self._frozen:
            return [join_flat([fragments[name] for fragments in self._fragments], self._frozen[name])]
        start, length = self._starts[name], part_numel(self._shapes[name].numel(), self.world_size)
        pieces = [torch.cat(list(between(groups, start, start + length))) for groups in self._groups]
        return [join_flat(pieces, self._shapes[name])]


def part_numel(numel: int, world_size: int) -> int:
    """Elements, padding included, of each rank's part of a parameter of `numel` elements."""
    return -(-numel // world_size)


def piece_numel(numel: int, rank: int, world_size: int) -> int:
    """Elements, padding excluded, of a rank's part of a parameter; 0 for a part that is all padding."""
    part = part_numel(numel, world_size)
    return max(0, min(part, numel - rank * part))


def join_flat(pieces: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Join flat pieces, in rank order and padded at the end, into a parameter of this shape."""
    sizes = [piece_numel(shape.numel(), rank, len(pieces)) for rank in range(len(pieces))]
    return torch.cat([piece.flatten()[:size] for piece, size in zip(pieces, sizes, strict=True)]).view(shape)


def between(groups: Sequence[Tensor], start: int, end: int) -> Iterator[Tensor]:
    """Elements [start, end) of flat tensors laid one after another."""
    for group in groups:
        if start < group.numel() and end > 0:
            yield group[max(start, 0) : end]
        start, end = start - group.numel(), end - group.numel()


def newest_tag(folder: Path) -> Path:
    """The folder that DeepSpeed's pointer file names, or the folder itself if there is no pointer."""
    pointer = folder / "latest"
    return folder / pointer.read_text().strip() if pointer.is_file() else folder


def by_rank(folder: Path, kind: str) -> list[Path]:
    """Files of one kind in rank order. Raises ConfigError if there are none, and for tensor-parallel files."""
    found: dict[int, Path] = {}
    for path in folder.glob(f"*zero_pp_rank_*_{kind}.pt"):
        match = re.fullmatch(rf"(?:\w+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_{kind}\.pt", path.name)
        if match is None or int(match[2]):
            raise ConfigError(
                f"{path} belongs to a model that is also cut over tensor-parallel ranks, which is not supported"
            )
        found[int(match[1])] = path
    if sorted(found) != list(range(len(found))) or not found:
        raise ConfigError(f"{folder}: {kind} of ranks {sorted(found) or 'none'} are there; all from 0 are needed")
    return [found[rank] for rank in sorted(found)]


def check_complete(folder: Path, models: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError unless the files are those of all ranks of a ZeRO-3 run."""
    if not all("fp32_flat_groups" in state for state in states):
        raise ConfigError(f"{folder} is no checkpoint of ZeRO stage 3: there are no fp32_flat_groups in it")
    count = states[0].get("partition_count", len(states))
    world_size = max(count) if isinstance(count, list) else count
    if not len(models) == len(states) == world_size:
        raise ConfigError(
            f"{folder}: {len(models)} and {len(states)} files of model and optimizer states are there, of "
            f"{world_size} ranks"
        )
