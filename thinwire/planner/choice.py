"""Which strategies a plan may choose, which it only prices, and by what it chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError, nearest
from thinwire.methods.interface import Method
from thinwire.methods.own_pace.base import OwnPaceMethod
from thinwire.options import CHOSEN_FROM, ISLANDS, Tables, has_islands
from thinwire.planner.candidates import Candidate
from thinwire.planner.objective import Objective, methods_of, objective_of
from thinwire.planner.optimizers import ADAMW
from thinwire.registry import STRATEGIES, class_of
from thinwire.run.optimizer import name_of


@dataclass(frozen=True)
class StrategyChoice:
    """The strategies of a search.

    Attributes:
        inner: names of those that train ranks, or the ranks of an island.
        outer: names of methods of islands.
        methods: all of them, by name.
        has_plain: whether ways without islands are candidates.
        is_mixture: whether the model is a mixture of experts.
    """

    inner: tuple[str, ...]
    outer: tuple[str, ...]
    methods: Mapping[str, Method]
    objective: Objective
    has_plain: bool = True
    left_out: frozenset[str] = frozenset()
    is_mixture: bool = False

    def why_not(self, way: Candidate) -> str:
        """Why a candidate is not to be chosen; empty: it may be."""
        if way.not_yet:
            return way.not_yet
        if self.is_mixture and way.stages > 1:
            return "stages of a mixture are not supported yet: each would lose part of its balance loss"
        if way.outer in self.left_out:
            return "what islands learn from a token is not known here; name them in --strategies to choose by seconds"
        return ""


def priced() -> list[str]:
    """Names of the strategies that have a price: all of whose step it is known when ranks wait for each other."""
    return [name for name in STRATEGIES if not issubclass(class_of(name), OwnPaceMethod)]


def unpriced(names: Sequence[str]) -> list[str]:
    """What is wrong with the names of strategies, a message each."""
    known, found = priced(), []
    for name in names:
        if name in STRATEGIES and name not in known:
            why = "its ranks step at their own pace, so that a step has no price"
            found.append(f"--strategies {name}: {why}{nearest(name, known)}")
        elif name not in known:
            found.append(f"--strategies {name}: no such strategy{nearest(name, known)}")
    return found if names else ["--strategies is empty: name at least one, or all"]


def choice_of(strategies: Sequence[str] | None, tables: Tables, optimizer: str = ADAMW) -> StrategyChoice:
    """The choice among these strategies; None: those of CHOSEN_FROM, and islands of which it is known what they learn.

    Of them those that take the optimizer. Raises ConfigError with all errors at once.
    """
    names = (*CHOSEN_FROM, *ISLANDS) if strategies is None else tuple(strategies)
    if problems := unpriced(names):
        raise ConfigError(*problems)
    outer = tuple(name for name in names if has_islands(name))
    plain = tuple(name for name in names if not has_islands(name))
    inner = plain or CHOSEN_FROM
    methods = methods_of((*inner, *outer), tables)
    if (name := name_of(optimizer)) != ADAMW:
        taking = tuple(each for each in inner if name in methods[each].optimizers)
        if not taking:
            raise ConfigError(f"--optimizer {optimizer}: none of {', '.join(inner)} takes it; nearest: {ADAMW}")
        inner = taking
    objective, left_out = objective_of(methods), frozenset[str]()
    if strategies is None and objective.unknown:
        left_out = objective.unknown
        objective = objective_of({name: method for name, method in methods.items() if name not in left_out})
    return StrategyChoice(inner, outer, methods, objective, bool(plain), left_out)
