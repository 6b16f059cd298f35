"""Which strategies a plan may choose, which it only prices, and by what it chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.methods.interface import Method
from thinwire.options import CHOSEN_FROM, ISLANDS, Tables
from thinwire.planner.candidates import Candidate
from thinwire.planner.objective import Objective, methods_of, objective_of


@dataclass(frozen=True)
class StrategyChoice:
    """The strategies of a search.

    Attributes:
        inner: names of those that train ranks, or the ranks of an island.
        outer: names of methods of islands.
        methods: all of them, by name.
        has_plain: whether ways without islands are candidates.
    """

    inner: tuple[str, ...]
    outer: tuple[str, ...]
    methods: Mapping[str, Method]
    objective: Objective
    has_plain: bool = True
    left_out: frozenset[str] = frozenset()

    def why_not(self, way: Candidate) -> str:
        """Why a candidate is not to be chosen; empty: it may be."""
        if way.not_yet:
            return way.not_yet
        if way.outer in self.left_out:
            return "what islands learn from a token is not known here; name them in --strategies to choose by seconds"
        return ""


def choice_of(strategies: Sequence[str] | None, tables: Tables) -> StrategyChoice:
    """The choice among these strategies; None: those of CHOSEN_FROM, and islands of which it is known what they learn.

    Raises ConfigError with all errors at once.
    """
    names = (*CHOSEN_FROM, *ISLANDS) if strategies is None else tuple(strategies)
    outer = tuple(name for name in names if name in ISLANDS)
    plain = tuple(name for name in names if name not in ISLANDS)
    inner = plain or CHOSEN_FROM
    methods = methods_of((*inner, *outer), tables)
    objective, left_out = objective_of(methods), frozenset[str]()
    if strategies is None and objective.unknown:
        left_out = objective.unknown
        objective = objective_of({name: method for name, method in methods.items() if name not in left_out})
    return StrategyChoice(inner, outer, methods, objective, bool(plain), left_out)
