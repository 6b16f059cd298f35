"""The axes of a mesh, and a mesh by its text, such as data=2,tensor=2."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from thinwire.errors import ConfigError

# From the outside in: ranks of an inner axis are neighbours.
AXES = ("island", "pipeline", "data", "expert", "sequence", "tensor")
# The axis that every mesh has.
NEEDED = "data"
# Axes that one mesh may have beside data.
TOGETHER = {"expert", "sequence"}, {"island", "pipeline", "tensor"}, {"island", "expert"}
# What other projects call them.
ALSO = {
    "dp": "data",
    "fsdp": "data",
    "replicate": "data",
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "sequence",
    "sp": "sequence",
    "ep": "expert",
}


def check_axis(name: str) -> None:
    """Raise ConfigError if `name` is not the name of an axis."""
    if name not in AXES:
        close = ALSO.get(name) or next(iter(difflib.get_close_matches(name, AXES, n=1)), NEEDED)
        raise ConfigError(f"the mesh has an axis {name!r}: must be of {', '.join(AXES)}; nearest: {close}")


def go_together(axes: Collection[str]) -> bool:
    """Whether one mesh may have all of these axes."""
    return any({*axes} - {NEEDED} <= together for together in TOGETHER)


def apart(axes: Collection[str]) -> list[str]:
    """The axes that one mesh can't have beside each other, from the outside in; empty: it can have all of them."""
    cut = [axis for axis in AXES if axis in axes and axis != NEEDED]
    return [] if go_together(cut) else [axis for axis in cut if any(not go_together({axis, one}) for one in cut)]


def check_beside(axis: str, others: Collection[str]) -> None:
    """Raise ConfigError if `axis` can't stand beside one of the other axes."""
    if wrong := [other for other in AXES if other in others and not go_together({axis, other})]:
        listed = " or ".join(wrong)
        raise ConfigError(f"a mesh with {axis} beside {listed}: not supported; nearest: {axis} and data alone")


def axes_of(text: str | None) -> Collection[str]:
    """The axes of a mesh by its text; none for text that can't be read, which is refused elsewhere."""
    try:
        return MeshShape.parse(text).sizes if text else ()
    except ConfigError:
        return ()


@dataclass(frozen=True)
class MeshShape:
    """The lengths of a mesh's axes, from the outside in."""

    sizes: Mapping[str, int]

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """Parse text such as "data=2,tensor=2", in any order; an axis of 1 rank is none, except that of islands.

        Raises ConfigError that names the part it can't read.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = (word.strip() for word in part.partition("="))
            if not (size.isascii() and size.isdecimal() and int(size)):
                raise ConfigError(
                    f"--mesh {text}: {part!r} must be AXIS=RANKS with at least 1 rank, such as data=2,tensor=2"
                )
            if name in sizes:
                raise ConfigError(f"--mesh {text}: the axis {name} is stated twice")
            check_axis(name)
            sizes[name] = int(size)
        kept = {name: size for name, size in sizes.items() if size > 1 or name == "island"}
        return cls({NEEDED: 1} | kept).in_order()

    def in_order(self) -> MeshShape:
        """The same axes from the outside in."""
        return MeshShape({name: self.sizes[name] for name in AXES if name in self.sizes})

    @property
    def cut(self) -> set[str]:
        """The axes besides data of more than one rank, and that of islands."""
        return {name for name, size in self.sizes.items() if name != NEEDED and (size > 1 or name == "island")}

    @property
    def shares_work(self) -> bool:
        """Whether ranks send each other more than gradients and weights: activations, parts of sequences, or rows."""
        return bool({"pipeline", "sequence", "expert"} & self.cut)

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def island_size(self) -> int | None:
        """Number of ranks of one island; None without an island axis."""
        return self.world_size // self.sizes["island"] if "island" in self.sizes else None

    def without_islands(self) -> MeshShape:
        """The same ranks with those of all islands on the data axis."""
        islands = self.sizes.get("island", 1)
        inside = {name: size for name, size in self.sizes.items() if name != "island"}
        return MeshShape({**inside, "data": islands * inside["data"]})

    @property
    def tensor(self) -> int:
        """Number of ranks over which matrices are cut."""
        return self.sizes.get("tensor", 1)

    @property
    def pipeline(self) -> int:
        """Number of ranks over which layers are cut."""
        return self.sizes.get("pipeline", 1)

    @property
    def sequence(self) -> int:
        """Number of ranks over which the tokens of a sequence are split."""
        return self.sizes.get("sequence", 1)

    @property
    def expert(self) -> int:
        """Number of ranks that share the experts of a mixture; each has data of its own."""
        return self.sizes.get("expert", 1)

    @property
    def shared(self) -> int:
        """Number of ranks that have the same data."""
        return self.tensor * self.pipeline * self.sequence

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.sizes.items())
