"""What a user states beside a search: which ways to train have it, and what is left out for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from thinwire.errors import ConfigError
from thinwire.methods.interface import Method
from thinwire.methods.memory import resident_method
from thinwire.planner.candidates import Candidate, residency_flags
from thinwire.planner.optimizers import ADAMW, why_not_stepped
from thinwire.planner.selection import is_alone
from thinwire.planner.settings import name_of
from thinwire.run.places import KEEP, NO_STORE
from thinwire.table import Row

# Of what several ranks have in turn, by axis.
RANKS = {
    "island": "islands", "pipeline": "stages", "expert": "ranks that share experts",
    "sequence": "ranks that share sequences", "tensor": "tensor ranks",
}  # fmt: skip


@dataclass(frozen=True)
class KeptOptions:
    """What every way to train of a search has.

    Attributes:
        optimizer: with its options.
        residency: options of what lies where, by the names of Residency, without the budget.
        budget: most memory of a rank; empty: none is stated.
    """

    optimizer: str = ADAMW
    residency: Mapping[str, Any] = field(default_factory=dict)
    budget: str = ""

    @property
    def keeps(self) -> bool:
        """Whether all activations are to be kept."""
        return self.residency.get("activations") == KEEP

    @property
    def is_resident(self) -> bool:
        """Whether only ways are left that say where all lies: more is stated than a budget and a disk for the rest."""
        more = self.residency.keys() - {"store", "disk_rate"} - ({"activations"} if self.keeps else set())
        has_disk = self.residency.get("store", NO_STORE) != NO_STORE or "disk_rate" in self.residency
        return bool(more) or (has_disk and not self.budget)

    @property
    def has_rest(self) -> bool:
        """Whether a way that does not fit into the budget may have a part on a disk, or compute it again."""
        is_kept = self.keeps and self.residency.get("store") == NO_STORE
        return bool(self.budget) and not self.is_resident and not is_kept

    def split(self, listed: Iterable[Candidate], methods: Mapping[str, Method]) -> tuple[list[Candidate], list[Row]]:
        """The ways that have all of it, and rows on what is left out of the others. methods: of all ways, by name."""
        found, left = list[Candidate](), dict[tuple[str, str], dict[str, None]]()
        for way in listed:
            if why := self.why_not(way, methods):
                asked, what, reason = why
                left.setdefault((asked, reason), {})[what] = None
            elif self.is_resident:
                found.append(replace(way, memory=self.budget, held=tuple(self.residency.items())))
            else:
                found.append(way)
        return found, [(asked, f"without {', '.join(what)}", reason) for (asked, reason), what in left.items()]

    def why_not(self, way: Candidate, methods: Mapping[str, Method]) -> Row | None:
        """What is stated that a way can't have, what to call such ways, and why; None: it has all."""
        if reason := why_not_stepped(self.optimizer, way):
            return f"--optimizer {self.optimizer}", axes_of(way), reason
        asked = " ".join(residency_flags(self.residency))
        if self.keeps and way.pipeline.recompute != "never":
            return f"--activations {KEEP}", "layers that are computed again", "it keeps what they would compute"
        if not self.is_resident:
            return None
        if not is_alone(way):
            return asked, axes_of(way), "beside an axis other than data nothing lies on a disk or is computed again so"
        slices = self.residency.get("slices", 1)
        if slices > way.micro_batch:
            return (
                f"--slices {slices}",
                f"micro-batches of fewer than {slices} sequences",
                "a slice has one at least",
            )
        try:
            resident_method(methods[way.strategy])
        except ConfigError:
            return asked, name_of(way.strategy), "such a strategy keeps all it has in memory"
        return None


def axes_of(way: Candidate) -> str:
    """What the ranks of a way have in turn, in words."""
    return " beside ".join(words for axis, words in RANKS.items() if way.sizes[axis] > 1)


def no_way_left(left: Sequence[Row]) -> ConfigError:
    """The error of a search that has no way to train with all that is stated."""
    told = "; ".join(f"{asked} is {effect}: {reason}" for asked, effect, reason in left)
    return ConfigError(f"no way to train has all that is stated; {told}; nearest: leave one of these out")
