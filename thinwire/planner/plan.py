"""Finds the fastest way to train a model on measured machines, and predicts its cost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from thinwire.cost import Machine
from thinwire.cost.trace import merged, trace_events
from thinwire.errors import ConfigError, Problems
from thinwire.models import Llama, build_skeleton
from thinwire.models.llama import LlamaConfig
from thinwire.models.tensor import tensor_sizes
from thinwire.options import CHOSEN_FROM, PIPELINE, SEQUENCE, Tables, build_strategy
from thinwire.planner.candidates import Candidate, candidates
from thinwire.planner.memory import Estimator, Offset
from thinwire.planner.pricing import Pricing
from thinwire.planner.search import Priced, Search, ranked
from thinwire.planner.traced import link_bytes, spans_of
from thinwire.report.units import bytes_text, seconds_text
from thinwire.table import Row

# Candidates that are simulated: those that closed forms say are the fastest.
NUM_SIMULATED = 24
# Steps and warm-up steps of the run that strategies are planned for.
NUM_STEPS, NUM_WARMUP_STEPS = 1000, 100


@dataclass(frozen=True)
class TrainingPlan:
    """The result of `plan`. search: all candidates that were simulated, fastest first."""

    machine: Machine
    search: Search
    tokens_per_step: int
    seq_len: int
    pricing: Pricing

    @property
    def best(self) -> Priced:
        """The fastest candidate that fits."""
        return self.search.fastest[0]

    @property
    def values(self) -> dict[str, Any]:
        """The settings for `thinwire train`, by the names of its configuration; tables of options by table name."""
        way = self.best.candidate
        found: dict[str, Any] = {
            "strategy": way.strategy, "micro_batch": way.micro_batch, "tokens_per_step": self.tokens_per_step,
            "seq_len": self.seq_len, "local_size": self.machine.local_size,
        }  # fmt: skip
        if self.best.order != tuple(range(self.machine.num_ranks)):
            found["order"] = self.best.order
        if way.tensor > 1:
            found["tensor"] = way.tensor
        if way.memory:
            found["memory"] = way.memory
        if way.sequence > 1:
            found[SEQUENCE] = {"parallel": way.sequence}
        if way.stages > 1:
            found |= {"stages": way.stages, PIPELINE: way.options}
        return found

    def to_json(self) -> str:
        """The content of plan.json: the prediction, other candidates, the links, the timeline of the simulated step."""
        shown = [
            {"flags": priced.candidate.flags, "step_s": priced.step_s, "order": priced.order}
            for priced in self.search.fastest
        ]
        network, best = self.machine.network, self.best
        carried = link_bytes(self.pricing, best)

        def rows(values: Callable[[int, int], float]) -> list[list[float | None]]:
            ranks = range(self.machine.num_ranks)
            return [[None if a == b else values(a, b) for b in ranks] for a in ranks]

        timeline = merged(spans_of(self.pricing, best))
        return json.dumps({
            "flags": best.candidate.flags, "order": best.order, "predicted": dict(best.terms),
            "memory": None if best.counted is None else asdict(best.counted),
            "measured_at": self.machine.measured_at, "nodes": network.nodes, "candidates": shown,
            "rates": rows(lambda a, b: network.rates[a][b]), "delays_s": rows(lambda a, b: network.delays_s[a][b]),
            "link_bytes": rows(lambda a, b: carried.get((a, b), 0.0)),
            "timeline": [[*names, round(begin, 6), round(end, 6)] for *names, begin, end in timeline],
        }) + "\n"  # fmt: skip

    def rows(self) -> list[Row]:
        """Rows about the choice and its reasons."""
        best, others = self.best, []
        for priced in fastest_of_kinds(self.search.fastest[1:], best):
            others.append(f"{seconds_text(priced.step_s)} with {kind_of(priced.candidate)}")
        why = "; ".join([f"simulated: {seconds_text(best.step_s)} a step", *others[:4]])
        return [("--strategy auto", best.candidate.flags, why), *self.order_rows()]

    def order_rows(self) -> list[Row]:
        """A row about the order of ranks, if it is not the usual one."""
        if self.best.order == tuple(range(self.machine.num_ranks)):
            return []
        way, network = self.best.candidate, self.machine.network
        a, b = min(network.pairs, key=lambda pair: network.rates[pair[0]][pair[1]])
        link = f"the slowest link, {a} to {b}, carries {8e-6 * network.rates[a][b]:.3g} Mbit/s"
        grid = self.pricing.placed(self.best.order)
        neighbours = {pair for ranks in grid.pipelines(way.stages) for pair in itertools.pairwise(ranks)}
        neighbours |= {pair for ranks in grid.groups(way.stages) for pair in itertools.pairwise(ranks)}
        used = "and is not avoided" if (a, b) in neighbours or (b, a) in neighbours else "and is kept out of use"
        return [("order of ranks", " ".join(map(str, self.best.order)), f"{link}, {used}")]

    def trace(self) -> list[dict[str, Any]]:
        """The timeline of the simulated step, for Perfetto."""
        return trace_events(spans_of(self.pricing, self.best))


def kind_of(way: Candidate) -> str:
    """The properties by which a reader tells candidates apart."""
    sizes = {"stages": way.stages, "tensor ranks": way.tensor, "ranks a sequence": way.sequence}
    axes = [f"{size} {name}" for name, size in sizes.items() if size > 1]
    return " and ".join([*axes, *([way.strategy] if way.sharing > 1 else [])])


def fastest_of_kinds(found: Iterable[Priced], but: Priced) -> Iterator[Priced]:
    """The first candidate of each kind other than that of `but`."""
    seen = {kind_of(but.candidate)}
    for priced in found:
        if (kind := kind_of(priced.candidate)) not in seen:
            seen.add(kind)
            yield priced


def plan(
    model: str | Llama,
    machine: Machine,
    *,
    tokens_per_step: int,
    seq_len: int = 256,
    micro_batch: int = 32,
    memory_bytes: float | None = None,
    strategies: Sequence[str] = CHOSEN_FROM,
    stages: int | None = None,
    dtype: str = "fp32",
    vocab_size: int = 257,
    tables: Tables | None = None,
    estimator: Estimator | None = None,
) -> TrainingPlan:
    """Find the fastest way to train on a machine: strategy, stages, micro-batch, borders, and the order of ranks.

    Closed forms rank all candidates; the best are simulated. The objective is seconds per step at equal tokens, so the
    strategies are those that learn as much from a token as exact training.

    Args:
        model: a preset, or a Llama, of which only the shapes are used.
        machine: see `thinwire.calibrate`.
        tokens_per_step: of all ranks together.
        seq_len: tokens of a sequence.
        micro_batch: largest number of sequences in one pass.
        memory_bytes: of one rank; None: what the machine has.
        strategies: those to choose from.
        stages: of a pipeline; None: free.
        dtype: compute type, "fp32" or "bf16".
        vocab_size: of a preset.
        tables: options of strategies, and those of the pipeline that are fixed.
        estimator: of the memory of a process; None: 1.5 times what is counted, and what it holds before.

    Raises ConfigError if nothing fits; it names the least memory that would do.
    """
    tables = tables or {}
    llama = build_skeleton(model, vocab_size, seq_len, tables.get("llama")) if isinstance(model, str) else model
    if type(llama) is not Llama:
        raise ConfigError(f"model {model}: only presets such as demo can be planned for; nearest: demo")
    problems = Problems()
    ranks = machine.num_ranks
    if tokens_per_step % seq_len:
        near = max(1, round(tokens_per_step / seq_len / ranks)) * seq_len * ranks
        problems.messages.append(
            f"--tokens-per-step {tokens_per_step}: must be a multiple of --seq-len {seq_len}; nearest: {near}, which "
            "all ranks share evenly"
        )
    methods = {name: problems.note(make, name, tables) for name in strategies}
    problems.raise_any()
    pricing = Pricing(
        llama, machine, {name: made for name, made in methods.items() if made}, seq_len, dtype,
        estimator or Offset(),
    )  # fmt: skip
    stated = tables.get(PIPELINE, {})
    listed = [
        way
        for way in candidates(
            ranks, len(llama.model.layers), tokens_per_step // seq_len, strategies, stated, micro_batch,
            tensor_sizes(llama.config, machine.local_size), sequence_sizes(llama.config, seq_len, ranks),
        )
        if stages in (None, way.stages)
    ]  # fmt: skip
    if not listed:
        raise ConfigError(
            f"--tokens-per-step {tokens_per_step}: no mesh of {ranks} ranks shares {tokens_per_step // seq_len} "
            f"sequences evenly; nearest: {max(1, round(tokens_per_step / seq_len / ranks)) * seq_len * ranks}"
        )
    memory = min(machine.memory_bytes, memory_bytes or machine.memory_bytes)
    ways = to_simulate(listed, pricing)
    if memory_bytes is not None:
        ways += with_disk(ways, memory_bytes)
    found = ranked(ways, pricing.price, memory)
    if not found.fastest:
        if not found.too_large:
            raise ConfigError(*found.refused)
        least = f"the least is {bytes_text(found.too_large[0].memory_bytes)}"
        raise ConfigError(f"memory of {bytes_text(memory)} a rank: no way to train fits; {least}", *found.refused)
    return TrainingPlan(machine, found, tokens_per_step, seq_len, pricing)


def with_disk(listed: Iterable[Candidate], memory_bytes: float) -> list[Candidate]:
    """The ways of which a part can lie on a disk, under this budget: those whose ranks are a data axis alone."""
    budget = f"{int(memory_bytes / 1e6)}mb"
    return [replace(way, memory=budget) for way in listed if way.stages * way.tensor * way.sequence == 1]


def sequence_sizes(config: LlamaConfig, seq_len: int, num_ranks: int) -> list[int]:
    """The numbers of ranks that may share a sequence: each has a head, and equally many tokens."""
    sizes = range(1, min(num_ranks, config.num_attention_heads) + 1)
    return [size for size in sizes if (num_ranks % size == 0 and seq_len % (2 * size) == 0) or size == 1]


def make(name: str, tables: Mapping[str, Mapping[str, Any]]) -> Any:
    """A strategy with its options. Raises ConfigError."""
    return build_strategy(name, tables, num_steps=NUM_STEPS, num_warmup_steps=NUM_WARMUP_STEPS)


def to_simulate(listed: Sequence[Candidate], pricing: Pricing) -> list[Candidate]:
    """The fastest candidates by closed forms, and the first of each kind, in the order of `candidates`."""
    rough: dict[Candidate, float] = {}
    for way in listed:
        try:
            rough[way] = pricing.roughly(way)
        except ConfigError:
            # It says why when it is priced.
            rough[way] = float("inf")
    by_speed = sorted(rough, key=rough.__getitem__)
    chosen = set(by_speed[:NUM_SIMULATED])
    first: dict[tuple[int | str, ...], Candidate] = {}
    for way in by_speed:
        # Of each mesh, and of each strategy on the data axis alone and beside stages.
        first.setdefault((way.stages, way.tensor, way.sequence), way)
        if way.tensor * way.sequence == 1:
            first.setdefault((way.stages, way.strategy), way)
    chosen |= set(first.values())
    return [way for way in listed if way in chosen]
