"""What a plan makes small: seconds to a target loss where it is known what each method learns from a token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from thinwire.methods.interface import Method
from thinwire.methods.outer.base import IslandsMethod
from thinwire.options import CHOSEN_FROM
from thinwire.planner.candidates import Candidate
from thinwire.planner.settings import make, name_of, table_of
from thinwire.report.frontier import LEAST_STEPS, RECORDED

EXACT = "zero"


@dataclass(frozen=True)
class Objective:
    """What counts of a step.

    Attributes:
        tokens: by name of the method, or by a setting of one, tokens until the target loss, divided by those of exact
            training; empty: seconds a token count.
        why: what counts, and from where it is known, in a sentence.
        unknown: methods of which it is not known what they learn from a token.
    """

    tokens: Mapping[str, float] = field(default_factory=dict)
    why: str = "seconds a token"
    unknown: frozenset[str] = frozenset()

    def of(self, way: Candidate) -> float:
        """Steps until the target loss, divided by those of exact training; 1 where seconds a token count."""
        return self.tokens.get(way.outer, 1.0) * self.tokens.get(way.strategy, 1.0)


def objective_of(
    methods: Mapping[str, Method], recorded: Path = RECORDED, settings: Mapping[str, Method] | None = None
) -> Objective:
    """The objective of a choice among these methods, from the runs that docs/methods.md shows.

    Seconds to a target loss: a step's seconds, times the steps until the training loss is within 1% of the exact run's
    last, if that is known of all. Only runs of at least LEAST_STEPS steps count, of the same options. The strategies of
    CHOSEN_FROM learn as much from a token as exact training does, within noise.

    settings: further ones of these methods, by their text. They decide nothing: what is not known of one leaves it out
    of `tokens`.
    """
    rows = json.loads(recorded.read_text()) if recorded.is_file() else []
    long = [row for row in rows if row["steps"] >= LEAST_STEPS]
    exact = next((row for row in long if row["method"] == EXACT and row["near"]), None)
    as_exact = {name: 1.0 for name in methods if name in CHOSEN_FROM}
    if exact is None:
        sizes = ", ".join(dict.fromkeys(f"{row['steps']:,} steps of {row['model']}" for row in rows)) or "no runs"
        why = f"seconds a token: docs/methods.md shows {sizes}, and what is learnt from a token takes {LEAST_STEPS:,}"
        if long:
            why = "seconds a token: the runs of docs/methods.md do not say in how many steps they came near the loss"
        return Objective({}, why, frozenset(methods.keys() - as_exact.keys()))
    own = [row for row in long if row["model"] == exact["model"] and row["steps"] == exact["steps"]]
    known = as_exact | dict(measured(methods, own, exact["near"]["steps"]))
    size = f"{exact['steps']:,} steps of {exact['model']}, docs/methods.md"
    if unknown := methods.keys() - known.keys():
        why = f"seconds a token: {', '.join(sorted(unknown))} never came within 1% of the exact loss, or had no run"
        return Objective({}, f"{why} ({size})", frozenset(unknown))
    told = ", ".join(f"{name} {ratio:.3g}" for name, ratio in known.items())
    why = f"seconds to a target loss, 1% above the exact one: a step's seconds times its tokens, {told} ({size})"
    return Objective(known | dict(measured(settings or {}, own, exact["near"]["steps"])), why)


def measured(
    methods: Mapping[str, Method], rows: list[Mapping[str, Any]], exact_steps: float
) -> Iterator[tuple[str, float]]:
    """Yield (name, tokens until the target loss over those of exact training) for the methods with a run."""
    for name, row in product(methods, rows):
        if name_of(row["text"]) == name_of(name) and row["near"]:
            stated = table_of(row["text"])
            if not any("optimizer" in options for options in stated.values()):
                own = make(name_of(name), stated)
                if own == without_inner(methods[name], own):
                    yield name, row["near"]["steps"] / exact_steps


def without_inner(method: Method, other: Method) -> Method:
    """The method with the other's strategy inside its islands, which is chosen by itself."""
    both = isinstance(method, IslandsMethod) and isinstance(other, IslandsMethod)
    return replace(method, inner=other.inner) if both else method  # type: ignore[type-var, attr-defined]
