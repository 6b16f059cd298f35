"""State that a method keeps between steps: tensors by kind and parameter, with rules for moving to other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.checkpoint import Share
from thinwire.collectives import Topology
from thinwire.state.clipping import Clip

FP32_BYTES = 4
# What checkpoints call the error feedback of gradients, whichever method keeps it.
GRADIENTS = "error feedback of gradients"
# (kind, parameter) -> the mean over the ranks that saved it, flat; None where nothing was kept.
Saved = Callable[[str, str], Tensor | None]


@dataclass(frozen=True)
class Place:
    """Where a method runs. shapes: of the trained parameters, by name. rank: this rank's position on the grid."""

    shapes: Mapping[str, torch.Size]
    grid: Topology
    rank: int = 0


class KeptSpan(NamedTuple):
    """Elements [start, start + length) of a kept tensor belong to [offset, offset + length) of its parameter.

    Attributes:
        divisor: mean over ranks = sum over ranks of what they keep / divisor.
        holders: number of ranks that keep each of these elements.
        name: of the parameter, if the tensor is kept under another name.
    """

    start: int
    offset: int
    length: int
    divisor: int
    holders: int
    name: str = ""


class Merge(Enum):
    """How other ranks load a tensor. SAME: all ranks load the first rank's. OWN: it is dropped."""

    SAME = "same"
    OWN = "own"


@dataclass(frozen=True)
class MeanMerge:
    """A tensor in spans whose mean over ranks is saved as `kind`. Any method that keeps this kind can load it.

    If a method keeps several tensors of one kind for a parameter, the one that was added first gets the whole mean.
    """

    kind: str


@dataclass(frozen=True)
class Residual(MeanMerge):
    """Error feedback: what was not sent yet. after_clip: the field of Clip that scales it after clipping.

    None: not scaled.
    """

    kind: str = GRADIENTS
    after_clip: Literal["share", "factor"] | None = "share"


ShapeOf = Callable[[str, torch.Size], torch.Size | None]
SpansOf = Callable[[str, torch.Size], Iterable[KeptSpan]]


class Kept:
    """The tensors of one kind, by parameter; made by `State.add`."""

    def __init__(
        self,
        place: Place,
        merge: Merge | MeanMerge,
        shape_of: ShapeOf,
        spans_of: SpansOf | None,
        row: str | None,
        tensors: dict[Any, Tensor] | None,
        shapes: Mapping[str, torch.Size] | None,
        device: torch.device | None,
    ) -> None:
        self.merge, self.row, self.device = merge, row, device
        self.tensors: dict[Any, Tensor] = {} if tensors is None else tensors
        self._place, self._shape_of, self._spans_of, self._is_foreign = place, shape_of, spans_of, tensors is not None
        self._shapes = shapes

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of this name; on first use, zeros in fp32."""
        if name not in self.tensors:
            self.tensors[name] = torch.zeros(self.shapes()[name], device=self.device)
        return self.tensors[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor

    def get(self, name: str) -> Tensor | None:
        """The tensor of a parameter, if there is one yet."""
        return self.tensors.get(name)

    def shapes(self) -> dict[Any, torch.Size]:
        """The shape of each tensor that is kept now or will be."""
        if self._is_foreign:
            return {name: tensor.shape for name, tensor in self.tensors.items()}
        return self._planned_shapes()

    @property
    def planned_bytes(self) -> int:
        """Bytes of all tensors that will be kept."""
        return FP32_BYTES * sum(shape.numel() for shape in self._planned_shapes().values())

    def _planned_shapes(self) -> dict[Any, torch.Size]:
        if self._shapes is not None:
            return dict(self._shapes)
        found = {name: self._shape_of(name, shape) for name, shape in self._place.shapes.items()}
        return {name: shape for name, shape in found.items() if shape is not None}

    def spans(self, name: Any, shape: torch.Size) -> list[KeptSpan]:
        """Which elements of the parameter the elements of a tensor of this shape belong to.

        By default, the same elements.
        """
        if self._spans_of is None:
            ranks = self._place.grid.world_size
            return [KeptSpan(0, 0, shape.numel(), ranks, ranks)]
        found = self._spans_of(name, self._place.shapes.get(name, shape))
        return [span for span in found if span.length > 0]

    def owners(self, name: Any, shape: torch.Size) -> list[str]:
        """The parameters to which a tensor of this shape belongs."""
        return [*dict.fromkeys(span.name or str(name) for span in self.spans(name, shape))]

    def spread(self, shapes: Mapping[Any, torch.Size], mean_of: Callable[[str], Tensor | None]) -> set[str]:
        """Create tensors of these shapes, filled with this rank's part of the means over ranks.

        mean_of: parameter -> its mean, flat; None if there is none. Returns the parameters that had a mean.
        """
        taken: set[str] = set()
        for name, shape in shapes.items():
            means = {owner: mean_of(owner) for owner in self.owners(name, shape)}
            found = {owner: mean for owner, mean in means.items() if mean is not None}
            if not found:
                continue
            taken |= found.keys()
            flat = torch.zeros(shape.numel(), device=self.device)
            self.tensors[name] = flat.view(shape)
            for start, offset, length, divisor, holders, owner in self.spans(name, shape):
                if (mean := found.get(owner or str(name))) is not None:
                    flat[start : start + length].copy_(mean[offset : offset + length] * (divisor / holders))
        return taken

    def forget(self, name: Any) -> None:
        """Drop a tensor that is not finite.

        If it belongs to several parameters, drop only the values that are not finite.
        """
        if self._shapes is not None:
            self.tensors[name].nan_to_num_(0.0, 0.0, 0.0)
        else:
            del self.tensors[name]

    def replace(self, tensors: Mapping[Any, Tensor]) -> None:
        """Keep copies of these tensors and drop all others."""
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        self.tensors.clear()
        self.tensors.update(copies)


class State:
    """All state that a method keeps between steps.

    Saving, moving to other ranks, scaling and dropping happen only here.

    together: one value that is not finite drops the whole state.
    """

    def __init__(self, place: Place, *, together: bool = False) -> None:
        self.place = place
        self._together = together
        self._kinds: dict[str, Kept] = {}
        self._parts: dict[str, State] = {}
        self._attributes: dict[str, Any] = {}

    def add(
        self,
        kind: str,
        merge: Merge | MeanMerge,
        shape_of: ShapeOf = lambda name, shape: shape,
        spans_of: SpansOf | None = None,
        *,
        row: str | None = None,
        tensors: dict[Any, Tensor] | None = None,
        shapes: Mapping[str, torch.Size] | None = None,
        device: torch.device | None = None,
    ) -> Kept:
        """Add a kind of tensor to the state.

        Args:
            kind: name in saved states.
            merge: how other ranks load it.
            shape_of: (parameter, its shape) -> shape of the tensor kept for it; None: no tensor.
            spans_of: (parameter, its shape) -> the spans of the parameter that the elements belong to; by default
                tensors are kept whole.
            row: row of the memory plan in which the tensors count.
            tensors: a dictionary that its owner fills, under any keys.
            shapes: shapes by any name, for tensors that belong to several parameters; `spans_of` then names these.
            device: of the tensors; None: the CPU.
        """
        self._kinds[kind] = Kept(self.place, merge, shape_of, spans_of, row, tensors, shapes, device)
        return self._kinds[kind]

    def add_attributes(self, owner: object, *names: str) -> None:
        """Save these attributes of `owner`, numbers or containers of numbers, and set them when the state is loaded."""
        self._attributes |= dict.fromkeys(names, owner)

    def add_part(self, name: str, part: State) -> None:
        """Include the state of another method, under `name`."""
        self._parts[name] = part

    def _all(self) -> Iterator[tuple[str, Kept]]:
        """Yield (path in saved states, kind), parts first."""
        for name, part in self._parts.items():
            yield from ((f"{name}/{path}", kept) for path, kept in part._all())
        yield from self._kinds.items()

    def kept_bytes(self) -> dict[str, int]:
        """Bytes that this rank keeps, by row of the memory plan; rows without bytes are left out."""
        rows: dict[str, int] = {}
        for _, kept in self._all():
            if kept.row is not None and kept.planned_bytes:
                rows[kept.row] = rows.get(kept.row, 0) + kept.planned_bytes
        return rows

    def residuals(self) -> dict[str, Tensor]:
        """For each parameter, in its shape, what this rank has not sent yet, in units of a rank's gradient.

        sum over steps of the outputs + mean over ranks of these residuals = sum over steps of the mean inputs
        """
        shapes, ranks = self.place.shapes, self.place.grid.world_size
        found: dict[str, Tensor] = {}
        for kept in (kept for _, kept in self._all() if isinstance(kept.merge, Residual)):
            for name, tensor in kept.tensors.items():
                for start, offset, length, divisor, _, owner in kept.spans(name, tensor.shape):
                    whole = found.setdefault(owner or name, torch.zeros(shapes[owner or name].numel()))
                    values = tensor.reshape(-1)[start : start + length].to(whole.device)
                    whole[offset : offset + length].add_(values, alpha=ranks / divisor)
        return {name: flat.view(shapes[name]) for name, flat in found.items()}

    def scale_residuals(self, clip: Clip) -> None:
        """Scale error feedback after a step that was clipped; see Clipping."""
        for _, kept in self._all():
            if isinstance(kept.merge, Residual) and kept.merge.after_clip:
                by = getattr(clip, kept.merge.after_clip)
                for tensor in kept.tensors.values() if by != 1.0 else ():
                    tensor.mul_(by)

    def forget(self) -> list[str]:
        """After a skipped step, drop each tensor with a value that is not finite.

        Return the names of their parameters.
        """
        dropped = {name: None for part in self._parts.values() for name in part.forget()}
        odd = [
            (kept, name)
            for kept in self._kinds.values()
            for name, tensor in kept.tensors.items()
            if not torch.isfinite(tensor).all()
        ]
        if odd and self._together:
            odd = [(kept, name) for kept in self._kinds.values() for name in kept.tensors]
        for kept, name in odd:
            dropped |= dict.fromkeys(kept.owners(name, kept.tensors[name].shape))
            kept.forget(name)
        return [*dropped]

    def shares(self) -> list[Share]:
        """The parts of `state_dict` that another number of ranks can load."""
        return [
            Share(kept.merge.kind, span.name or str(name), f"{path}/{name}", *span[:3], 1 / span.divisor)
            for path, kept in self._all()
            if isinstance(kept.merge, MeanMerge)
            for name, tensor in kept.tensors.items()
            for span in kept.spans(name, tensor.shape)
        ]

    def take_over(self, saved: Saved) -> None:
        """Load what other ranks, or another method, saved.

        If the method is the same, call load_state_dict with the first rank's state before.
        """
        taken: set[tuple[str, str]] = set()
        for _, kept in self._all():
            shapes = kept.shapes()
            # What was the same on all ranks is of another shape where a mesh cuts the parameter otherwise.
            stays = kept.merge is Merge.SAME
            kept.replace({name: t for name, t in kept.tensors.items() if stays and t.shape == shapes.get(name)})
            if isinstance(kept.merge, MeanMerge):
                kind = kept.merge.kind
                own = kept.spread(shapes, partial(_untaken, saved, taken, kind))
                taken |= {(kind, name) for name in own}

    def state_dict(self) -> dict[str, Any]:
        """Copies of all state."""
        return {
            **{name: part.state_dict() for name, part in self._parts.items()},
            **{kind: {name: t.clone() for name, t in kept.tensors.items()} for kind, kept in self._kinds.items()},
            **{name: getattr(owner, name) for name, owner in self._attributes.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all state by copies of what `state_dict` returned."""
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        for kind, kept in self._kinds.items():
            kept.replace(state[kind])
        for name, owner in self._attributes.items():
            setattr(owner, name, state[name])


def _untaken(saved: Saved, taken: set[tuple[str, str]], kind: str, name: str) -> Tensor | None:
    """The saved mean of a parameter, unless another tensor has loaded it already."""
    return None if (kind, name) in taken else saved(kind, name)
