"""Which of all candidates are simulated: those that closed forms find fast and small, and the first of each kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Any

from thinwire.errors import ConfigError
from thinwire.methods.memory.residency import RECOMPUTE
from thinwire.planner.candidates import Candidate
from thinwire.planner.choice import StrategyChoice
from thinwire.planner.islands import islands_of, price, roughly_islands
from thinwire.planner.pricing import Pricing
from thinwire.planner.rough import rough_bytes, rough_s
from thinwire.planner.search import Priced, Search, as_kept, ranked
from thinwire.run.places import NO_STORE

# Candidates that are simulated: the fastest by closed forms that fit; and where none fits, as many more whose passes
# are the smallest.
NUM_SIMULATED, NUM_SMALLEST = 24, 96
# What closed forms say of memory may be too much by this factor.
SLACK = 1.25


def searcher(pricing: Pricing, choice: StrategyChoice) -> Callable[..., Search]:
    """A function that searches under any memory, see `searched`. What one search has priced costs the next nothing."""

    @cache
    def price_of(way: Candidate) -> Priced:
        found = price(pricing, way)
        more = 0.0 if way.is_resident else pricing.reserved_bytes
        return replace(found, memory_bytes=found.memory_bytes + more, steps=choice.objective.of(way))

    return partial(
        searched, choice=choice, price_of=price_of, rough_of=cache(partial(roughly, pricing)),
        size_of=cache(partial(roughly_bytes, pricing)),
    )  # fmt: skip


def searched(
    listed: Sequence[Candidate], memory: float, budget: str, held: Mapping[str, Any], *, choice: StrategyChoice,
    price_of: Callable[[Candidate], Priced], rough_of: Callable[[Candidate], float],
    size_of: Callable[[Candidate], float],
) -> Search:  # fmt: skip
    """Price the candidates that closed forms find fast; where none of these fits, those of the smallest passes too.

    memory: of a rank, in bytes. budget: what of it is stated, beyond which a disk is tried; empty: none. held: options
    of what lies there, see `Candidate`. rough_of, size_of: seconds and bytes by closed forms.
    """

    def rank(chosen: set[Candidate]) -> Search:
        """In the order of `candidates`, which decides between equally fast ones."""
        own = (way for way in may_run if way in chosen or way in large)
        on_disk = with_disk(own, budget, held) if budget else []
        return ranked([*(way for way in listed if way in chosen), *on_disk], price_of, memory, choice.why_not)

    # Closed forms know no disk.
    rough = {way: rough_of(replace(way, memory="", held=())) * choice.objective.of(way) for way in listed}
    by_speed = sorted(listed, key=rough.__getitem__)
    may_run = [way for way in by_speed if not choice.why_not(way)]
    large = {way for way in by_speed if rough[way] < math.inf and memory < math.inf and size_of(way) > SLACK * memory}
    chosen = set(fastest_fitting((way for way in may_run if way not in large), price_of, memory))
    # Of each kind one that fits, if there is one.
    chosen |= first_of_kinds(sorted(by_speed, key=large.__contains__), choice)
    found = rank(chosen)
    if found.fastest or not found.too_large:
        return found
    rest = (way for way in may_run if way not in chosen)
    smallest = sorted(rest, key=lambda way: (way.micro_batch / way.sequence / way.tensor, -way.stages))
    return rank(chosen | set(smallest[:NUM_SMALLEST]))


def fastest_fitting(
    by_speed: Iterable[Candidate], price_of: Callable[[Candidate], Priced], memory: float
) -> Iterator[Candidate]:
    """Yield candidates from the first on, until NUM_SIMULATED of them fit, or NUM_SMALLEST can't run.

    Of ways that differ in what they recompute alone, those after the first that fits are left out.
    """
    fitting: set[Candidate] = set()
    num_refused = 0
    for way in by_speed:
        if len(fitting) == NUM_SIMULATED or num_refused == NUM_SMALLEST:
            return
        if as_kept(way) not in fitting:
            yield way
            try:
                if price_of(way).memory_bytes <= memory:
                    fitting.add(as_kept(way))
            except ConfigError:
                # Why is told when it is ranked.
                num_refused += 1


def first_of_kinds(by_speed: Iterable[Candidate], choice: StrategyChoice) -> set[Candidate]:
    """The first candidate of each mesh, and of each strategy on the data axis alone and beside stages.

    Of settings that are not to be chosen, the first of each; of islands of several machines, that of each method; of
    groups that are no machines, that of each size.
    """
    first: dict[tuple[int | str, ...], Candidate] = {}
    for way in by_speed:
        if way.nodes > 1 or not choice.aside.isdisjoint((way.strategy, way.outer)):
            first.setdefault((way.strategy if way.nodes == 1 else "", way.outer), way)
            continue
        if way.group:
            first.setdefault((way.group,), way)
            continue
        first.setdefault((way.stages, way.tensor, way.sequence, way.experts, way.outer, way.islands), way)
        if way.tensor * way.sequence * way.experts == 1 and not way.outer:
            first.setdefault((way.stages, way.strategy), way)
    return set(first.values())


def roughly(pricing: Pricing, way: Candidate) -> float:
    """Seconds of a step by closed forms; infinite for what can't run."""
    try:
        return roughly_islands(pricing, way) if way.outer else rough_s(pricing, way)
    except ConfigError:
        # It says why when it is priced.
        return math.inf


def roughly_bytes(pricing: Pricing, way: Candidate) -> float:
    """Memory of a process by closed forms.

    0 for a mixture whose ranks share experts, and for a way of which a part lies on a disk: such may always fit.
    """
    if way.experts > 1 or way.is_resident:
        return 0.0
    own = pricing.on(islands_of(pricing, way)[0]) if way.outer else pricing
    return rough_bytes(own, way.inside)


def with_disk(ways: Iterable[Candidate], budget: str, held: Mapping[str, Any]) -> list[Candidate]:
    """The first ways of which a part can lie on a disk, under this budget: those whose ranks are a data axis alone.

    Without a disk layers are computed again, where nothing else is stated.
    """
    again = {"activations": RECOMPUTE} if held.get("store") == NO_STORE else {}
    options = tuple((again | dict(held)).items())
    return [replace(way, memory=budget, held=options) for way in islice(filter(is_alone, ways), NUM_SIMULATED)]


def is_alone(way: Candidate) -> bool:
    """Whether its ranks are a data axis alone, so that a part of it can lie on a disk."""
    return way.sharing == way.num_ranks and way.sequence * way.experts == 1
