"""Where the experts of a layer lie: whole, or cut along their hidden units, on the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.methods.experts.options import ExpertParallel


@dataclass(frozen=True)
class ExpertPlacement:
    """E experts on W ranks: G = W / s teams of s neighbours. A team has E / G experts, each of its ranks 1/s of each.

    A rank's part of a tensor [E, I, H] is [E / G, I / s, H]: one range of memory for each of its experts, whatever W
    and s are. Source: Hwang et al., "Tutel" (MLSys 2023), section 3.1.
    """

    experts: int
    ranks: int
    slices: int = 1

    @property
    def teams(self) -> int:
        """Number of teams, over which whole experts are divided."""
        return self.ranks // self.slices

    @property
    def each(self) -> int:
        """Number of experts of a rank."""
        return self.experts // self.teams

    def inside(self, gathered: int) -> ExpertPlacement:
        """The placement of a rank's experts on the `gathered` neighbours of its team that exchange their slices."""
        return ExpertPlacement(self.each, gathered, gathered)

    def over(self, gathered: int) -> ExpertPlacement:
        """The placement of all experts on one rank of each such group of neighbours, whose slices are joined there."""
        return ExpertPlacement(self.experts, self.ranks // gathered, self.slices // gathered)

    def team(self, rank: int) -> int:
        """The team of a rank. It has experts team * each to (team + 1) * each - 1."""
        return rank // self.slices

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """The rank's part of a tensor of all experts [E, I, ...]; a view."""
        width = whole.shape[1] // self.slices
        own = whole.narrow(0, self.team(rank) * self.each, self.each)
        return own.narrow(1, rank % self.slices * width, width)

    def joined(self, parts: Tensor) -> Tensor:
        """The whole tensor from the parts of all ranks, [W, E / G, I / s, ...]."""
        by_team = parts.unflatten(0, (self.teams, self.slices)).transpose(1, 2)
        return by_team.reshape(self.experts, parts.shape[2] * self.slices, *parts.shape[3:])

    def range(self, shape: torch.Size, rank: int) -> tuple[int, int, int, int]:
        """Where the rank's part lies in a tensor [E, I, ...] of all experts, in elements: (run, row, first, offset).

        Of each expert's `row` elements, the rank has `run` from `first` on. If the ranges of all experts are laid one
        after the other, the rank's begin at `offset`.
        """
        row = shape[1:].numel()
        run = row // self.slices
        return run, row, rank % self.slices * run, self.team(rank) * self.each * run

    def __str__(self) -> str:
        cut = f", in slices of 1/{self.slices}" if self.slices > 1 else ""
        return f"{self.each} of {self.experts} experts a rank{cut}"


def place_experts(
    options: ExpertParallel, experts: int, hidden_units: int, world_size: int | None = None
) -> ExpertPlacement:
    """The placement that the options state. Raises ConfigError if ranks would have unequal parts.

    hidden_units: of one expert. world_size: number of ranks, which a choice in the message divides; None: those that
    share the experts.
    """
    ranks, slices = options.parallel, options.slices
    if isinstance(ranks, str):
        raise ConfigError("parallel 'auto': thinwire train finds the ranks, a library states them; nearest: 1")
    if ranks % slices or hidden_units % slices:
        near = next(n for n in range(slices, 0, -1) if ranks % n == hidden_units % n == 0)
        raise ConfigError(
            f"--experts.slices {slices}: must divide the {hidden_units} hidden units of an expert and the {ranks} "
            f"ranks of --experts.parallel; nearest: {near}"
        )
    if experts % (ranks // slices):
        # Such a number divides what other axes leave of the world too.
        among = gcd(ranks, world_size or ranks)
        fits = [n for n in range(among, 1, -1) if among % n == n % slices == experts % max(n // slices, 1) == 0]
        fewer = " or ".join(map(str, fits[:2]))
        cuts = [n for n in range(1, ranks + 1) if ranks % n == hidden_units % n == experts % (ranks // n) == 0]
        works = [f"--experts.parallel {fewer}"] if fewer else []
        works += [f"--experts.slices {cuts[0]}"] if cuts else []
        works = works or ["--experts.parallel 1"]
        raise ConfigError(
            f"--experts.parallel {ranks} with --experts.slices {slices}: each rank needs as many of the {experts} "
            f"experts; nearest: {', or '.join(works)}"
        )
    return ExpertPlacement(experts, ranks, slices)


def check_once(route: str, slices: int, ranks: int, local_size: int) -> None:
    """Raise ConfigError for rows that enter a node once where an expert's slices lie on several nodes.

    ranks: that share the experts. local_size: of them in a node.
    """
    if route == "once" and 1 < local_size < ranks and local_size % slices:
        raise ConfigError(
            f"route 'once' with slices {slices} on nodes of {local_size} ranks: an expert must lie in one node; "
            "nearest: route 'linear'"
        )
