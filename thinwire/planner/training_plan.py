"""A plan: what was chosen, its prediction, and what else was priced."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from thinwire.cost import Machine
from thinwire.cost.trace import merged, trace_events
from thinwire.methods.memory import read_bytes
from thinwire.options import EXPERTS, PIPELINE, RESIDENCY, SEQUENCE, Tables
from thinwire.planner.candidates import Candidate, residency_flags
from thinwire.planner.memory import figure_of
from thinwire.planner.objective import Objective
from thinwire.planner.pricing import Pricing
from thinwire.planner.search import Priced, Search
from thinwire.planner.settings import name_of
from thinwire.planner.traced import link_bytes, link_messages, spans_of
from thinwire.report.units import bytes_text, enough_text, seconds_text
from thinwire.run.places import FLAT, NO_STORE
from thinwire.table import Row


@dataclass(frozen=True)
class TrainingPlan:
    """The result of `plan`.

    Attributes:
        search: all candidates that were simulated, fastest first.
        left_out: rows on what was left out for what is stated.
        budget: to which each process is held, such as 8gb; empty: to none.
    """

    machine: Machine
    search: Search
    tokens_per_step: int
    seq_len: int
    pricing: Pricing
    objective: Objective = field(default_factory=Objective)
    left_out: tuple[Row, ...] = ()
    budget: str = ""

    @property
    def best(self) -> Priced:
        """The fastest candidate that fits."""
        return self.search.fastest[0]

    @property
    def predicted(self) -> dict[str, float]:
        """The parts of the best candidate's step, by the names of a run's figures."""
        memory = {figure_of(False): figure_of(self.machine.on_gpu)}
        return {memory.get(name, name): value for name, value in self.best.terms.items()}

    @property
    def values(self) -> dict[str, Any]:
        """The settings for `thinwire train`, by the names of its configuration; tables of options by table name."""
        way = self.best.candidate
        found: dict[str, Any] = {
            "strategy": name_of(way.strategy), "micro_batch": way.micro_batch, "tokens_per_step": self.tokens_per_step,
            "seq_len": self.seq_len, "local_size": way.group or self.machine.local_size,
        }  # fmt: skip
        if way.outer:
            size = way.num_ranks // way.islands
            found |= {"strategy": name_of(way.outer), "inner": way.strategy, "local_size": size}
        if self.best.order != tuple(range(self.machine.num_ranks)):
            found["order"] = self.best.order
        if way.tensor > 1:
            found["tensor"] = way.tensor
        if way.sequence > 1:
            found[SEQUENCE] = {"parallel": way.sequence}
        if way.experts > 1:
            found[EXPERTS] = {"parallel": way.experts, **dict(way.travel)}
        if way.stages > 1:
            found |= {"stages": way.stages, PIPELINE: way.options}
        flat, table = dict[str, Any](), dict[str, Any]()
        for name, value in self.held(way).items():
            (flat if name in FLAT else table)[name] = value
        return found | flat | ({RESIDENCY: table} if table else {}) | way.settings

    def held(self, way: Candidate) -> dict[str, Any]:
        """The options of where a way's training lies. Under a budget nothing else holds it to that."""
        if not self.budget:
            return way.residency
        return {"memory": self.budget, **dict(way.held if way.is_resident else {"store": NO_STORE})}

    def held_to(self, typed: str | None, most: float) -> TrainingPlan:
        """The plan with its budget as it was typed, if that is not above `most` bytes."""
        if typed is None or not self.budget or read_bytes(typed) > most:
            return self
        return replace(self, budget=typed)

    @property
    def why_elsewhere(self) -> str:
        """Why a part of the best candidate does not lie in memory."""
        inside, large = (
            [priced for priced in ways if not priced.candidate.is_resident]
            for ways in (self.search.fastest, self.search.too_large)
        )
        if inside:
            return f"the fastest that fits into memory takes {seconds_text(inside[0].step_s)} a step"
        return f"in memory alone the least is {enough_text(large[0].memory_bytes)}" if large else "as is stated"

    def flags_of(self, way: Candidate) -> str:
        """The flags of a way for `thinwire train`, with the budget to which it is held."""
        held = self.held(way)
        return replace(way, memory=held.pop("memory", ""), held=tuple(held.items())).flags

    def to_json(self) -> str:
        """The content of plan.json: the prediction, other candidates, the links, the timeline of the simulated step."""
        shown = [
            {"flags": self.flags_of(priced.candidate), "step_s": priced.step_s, "order": priced.order}
            for priced in self.search.fastest
        ]
        aside = [
            {"mesh": priced.candidate.mesh, "flags": priced.candidate.flags, "step_s": priced.step_s, "why": why}
            for why, ways in self.search.aside.items() for priced in ways
        ]  # fmt: skip
        network, best = self.machine.network, self.best
        carried = link_bytes(self.pricing, best)

        def rows(values: Callable[[int, int], float]) -> list[list[float | None]]:
            ranks = range(self.machine.num_ranks)
            return [[None if a == b else values(a, b) for b in ranks] for a in ranks]

        spans = list(spans_of(self.pricing, best))
        timeline, numbers = merged(spans), link_messages(self.pricing, best, spans)
        return json.dumps({
            "flags": self.flags_of(best.candidate), "order": best.order, "predicted": self.predicted,
            "memory": None if best.counted is None else asdict(best.counted),
            "measured_at": self.machine.measured_at, "core_share": self.machine.core_share,
            "nodes": network.nodes, "names": self.machine.names,
            "candidates": shown,
            "not_chosen": aside, "objective": self.objective.why,
            "rates": rows(lambda a, b: network.rates[a][b]), "delays_s": rows(lambda a, b: network.delays_s[a][b]),
            "link_bytes": rows(lambda a, b: carried.get((a, b), 0.0)),
            "link_messages": rows(lambda a, b: numbers.get((a, b), 0)),
            "timeline": [[*names, round(begin, 6), round(end, 6)] for *names, begin, end in timeline],
        }) + "\n"  # fmt: skip

    def rows(self, asked: str) -> list[Row]:
        """Rows about the choice and its reasons. asked: the option that asks for it."""
        best, others = self.best, []
        for priced in fastest_of_kinds(self.search.fastest[1:], best):
            others.append(f"{seconds_text(priced.step_s)} with {kind_of(priced.candidate)}")
        why = "; ".join([f"simulated: {seconds_text(best.step_s)} a step", *others[:4]])
        # Why the objective stands there may be all of it.
        counts, _, because = self.objective.why.partition(": ")
        rows: list[Row] = [(asked, self.flags_of(best.candidate), why), ("objective", counts, because)]
        for reason, ways in self.search.aside.items():
            way = ways[0].candidate
            what = " ".join([way.layout, *way.setting_flags])
            rows.append(("priced, not chosen", f"{seconds_text(ways[0].step_s)} a step with {what}", reason))
        return [*rows, *self.left_out, *self.order_rows()]

    def memory_rows(self, options: Mapping[str, Any]) -> Iterator[Row]:
        """Rows about where the best candidate lies. options: of that, as stated; see `residency_options`."""
        way, typed = self.best.candidate, options.get("memory")
        if typed is not None and read_bytes(typed) > self.machine.memory_bytes:
            yield f"--memory {typed}", bytes_text(self.machine.memory_bytes), "a rank of the machine has no more"
        if self.budget and not way.is_resident:
            why = f"{bytes_text(self.best.memory_bytes)} predicted, as a budget counts"
            yield f"--memory {self.budget}", "all lies in memory", why
        elif self.budget:
            what = "what does not fit lies on a disk, or is computed again"
            yield f"--memory {self.budget}", what, self.why_elsewhere
        unused = {name: options.get(name) for name in ("store", "disk_rate")} if not way.is_resident else {}
        for name, value in unused.items():
            if value not in (None, NO_STORE):
                yield residency_flags({name: value})[0], "no effect", "all lies in memory"

    def order_rows(self) -> list[Row]:
        """A row about the order of ranks, if it is not the usual one."""
        if self.best.order == tuple(range(self.machine.num_ranks)):
            return []
        network, carried = self.machine.network, link_bytes(self.pricing, self.best)
        a, b = min(network.pairs, key=lambda pair: network.rates[pair[0]][pair[1]])
        link = f"the slowest link, {a} to {b}, carries {8e-6 * network.rates[a][b]:.3g} Mbit/s"
        is_used = carried.get((a, b)) or carried.get((b, a))
        used = "and is not avoided" if is_used else "and is kept out of use"
        return [("order of ranks", " ".join(map(str, self.best.order)), f"{link}, {used}")]

    def trace(self) -> list[dict[str, Any]]:
        """The timeline of the simulated step, for Perfetto."""
        return trace_events(spans_of(self.pricing, self.best))


def kind_of(way: Candidate) -> str:
    """The properties by which a reader tells candidates apart."""
    sizes = {"stages": way.stages, "tensor ranks": way.tensor, "ranks a sequence": way.sequence}
    sizes |= {"ranks with other experts": way.experts, f"islands by {way.outer}": way.islands}
    axes = [f"{size} {name}" for name, size in sizes.items() if size > 1]
    axes += [f"groups of {way.group} rank(s)"] if way.group else []
    return " and ".join([*axes, *([way.strategy] if way.sharing > 1 else [])])


def fastest_of_kinds(found: Iterable[Priced], but: Priced) -> Iterator[Priced]:
    """The first candidate of each kind other than that of `but`."""
    seen = {kind_of(but.candidate)}
    for priced in found:
        if (kind := kind_of(priced.candidate)) not in seen:
            seen.add(kind)
            yield priced


def with_tables(values: Mapping[str, Any], tables: Tables) -> dict[str, Any]:
    """The settings of a plan, with their tables of options put over those that are stated, as "tables"."""
    # What has a flag of its own stands there alone.
    free = {name: value for name, value in tables.get(RESIDENCY, {}).items() if name not in values}
    tables = {**tables, RESIDENCY: free} if RESIDENCY in tables else tables
    own = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    both = {name: {**tables.get(name, {}), **value} for name, value in own.items()}
    return {name: value for name, value in values.items() if name not in own} | {"tables": {**tables, **both}}
