"""Which strategies a plan may choose, which it only prices, and by what it chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError, nearest
from thinwire.methods.interface import Method
from thinwire.methods.own_pace.base import OwnPaceMethod
from thinwire.options import CHOSEN_FROM, ISLANDS, Tables, has_islands
from thinwire.planner.candidates import Candidate
from thinwire.planner.objective import Objective, objective_of
from thinwire.planner.optimizers import ADAMW
from thinwire.planner.settings import methods_of, name_of, settings_of
from thinwire.registry import STRATEGIES, class_of
from thinwire.run.optimizer import name_of as optimizer_name
from thinwire.table import Row


@dataclass(frozen=True)
class StrategyChoice:
    """The strategies of a search.

    Attributes:
        inner: those that train ranks, or the ranks of an island: names, then settings; see `planner.settings`.
        outer: methods of islands, likewise.
        methods: all of them, by name or text.
        has_plain: whether ways without islands are candidates.
        is_mixture: whether the model is a mixture of experts.
        left_out: methods of islands that are priced, but not to be chosen.
        aside: settings that are priced, but not to be chosen.
        dropped: rows on strategies that the optimizer does not go with.
    """

    inner: tuple[str, ...]
    outer: tuple[str, ...]
    methods: Mapping[str, Method]
    objective: Objective
    has_plain: bool = True
    left_out: frozenset[str] = frozenset()
    is_mixture: bool = False
    aside: frozenset[str] = frozenset()
    dropped: tuple[Row, ...] = ()

    def why_not(self, way: Candidate) -> str:
        """Why a candidate is not to be chosen; empty: it may be."""
        if way.not_yet:
            return way.not_yet
        if self.is_mixture and max(way.stages, way.tensor) > 1:
            what = "stages" if way.stages > 1 else "tensor ranks"
            return f"{what} of a mixture are not supported yet: each would lose part of its balance loss"
        if way.outer in self.left_out:
            return "what islands learn from a token is not known here; name them in --strategies to choose by seconds"
        if way.strategy in self.aside or way.outer in self.aside:
            return "what this setting learns from a token is not known here; state it to plan with it"
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


def choice_of(
    strategies: Sequence[str] | None, tables: Tables, optimizer: str = ADAMW, *, has_settings: bool = True
) -> StrategyChoice:
    """The choice among these strategies; None: those of CHOSEN_FROM, and islands of which it is known what they learn.

    Of them those that take the optimizer. Settings that a strategy names as worth trying come with it. One is chosen if
    it is known what it learns from a token, or if that is not known of its strategy either, so that seconds a token
    count.

    has_settings: whether they are tried. Raises ConfigError with all errors at once.
    """
    names = (*CHOSEN_FROM, *ISLANDS) if strategies is None else tuple(strategies)
    if problems := unpriced(names):
        raise ConfigError(*problems)
    outer = tuple(name for name in names if has_islands(name))
    plain = tuple(name for name in names if not has_islands(name))
    inner = plain or CHOSEN_FROM
    methods, dropped = methods_of((*inner, *outer), tables), dict[str, list[str]]()
    if (name := optimizer_name(optimizer)) != ADAMW:
        taking = tuple(each for each in inner if name in methods[each].optimizers)
        if not taking:
            raise ConfigError(f"--optimizer {optimizer}: none of {', '.join(inner)} takes it; nearest: {ADAMW}")
        for each in inner:
            if each not in taking:
                dropped.setdefault(f"such a strategy {methods[each].optimizers_reason}", []).append(each)
        inner, plain = taking, tuple(each for each in plain if each in taking)
    own = (*inner, *outer)
    tried = settings_of({name: methods[name] for name in names if name in own}, tables) if has_settings else {}
    objective, left_out = objective_of(methods, settings=tried), frozenset[str]()
    if strategies is None and objective.unknown:
        left_out = objective.unknown
        tried = {text: method for text, method in tried.items() if name_of(text) not in left_out}
        known = {name: method for name, method in methods.items() if name not in left_out}
        objective = objective_of(known, settings=tried)
    aside = {text for text in tried if text not in objective.tokens and name_of(text) not in objective.unknown}
    inner += tuple(text for text in tried if name_of(text) in plain)
    outer += tuple(text for text in tried if name_of(text) in outer)
    return StrategyChoice(
        inner, outer, methods | tried, objective, bool(plain), left_out, aside=frozenset(aside),
        dropped=tuple((f"--optimizer {optimizer}", f"without {', '.join(each)}", why) for why, each in dropped.items()),
    )  # fmt: skip
