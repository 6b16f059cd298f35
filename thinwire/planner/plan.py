"""Finds the fastest way to train a model on measured machines, and predicts its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from thinwire.cost import Machine
from thinwire.errors import ConfigError, Problems
from thinwire.models import Llama, MoELlama, build_skeleton
from thinwire.models.llama import LlamaConfig
from thinwire.models.tensor import tensor_sizes
from thinwire.options import EXPERTS, PIPELINE, SEQUENCE, Tables, model_table
from thinwire.planner.candidates import AxisSizes, Candidate, candidates
from thinwire.planner.choice import choice_of
from thinwire.planner.grouping import with_groups
from thinwire.planner.islands import islands_of
from thinwire.planner.memory import Estimator, Offset
from thinwire.planner.optimizers import ADAMW
from thinwire.planner.options import AUTO
from thinwire.planner.prices import NO_DISK, disk_floor
from thinwire.planner.pricing import Pricing
from thinwire.planner.search import Search
from thinwire.planner.selection import searcher
from thinwire.planner.sizes import ALL_AXES, no_mesh, wrong_arguments, wrong_choices, wrong_experts, wrong_sizes
from thinwire.planner.stated import KeptOptions, no_way_left
from thinwire.planner.training_plan import TrainingPlan
from thinwire.report.units import bytes_text, enough_text
from thinwire.table import Row

# For the least memory, more than so many times a guess is not tried.
MOST_TIMES = 8


def plan(
    model: str | Llama,
    machine: Machine,
    *,
    tokens_per_step: int,
    seq_len: int = 256,
    micro_batch: int = 8,
    memory_bytes: float | None = None,
    strategies: Sequence[str] | None = None,
    stages: int | None = None,
    tensor: int | None = None,
    dtype: str = "fp32",
    loss: str = "auto",
    vocab_size: int = 257,
    tables: Tables | None = None,
    estimator: Estimator | None = None,
    axes: Collection[str] = ALL_AXES,
    optimizer: str = ADAMW,
    has_settings: bool = True,
    has_groups: bool = True,
    residency: Mapping[str, Any] | None = None,
    reserved_bytes: float = 0.0,
    names_least: bool = True,
) -> TrainingPlan:
    """Find the fastest way to train on a machine: strategy, mesh, groups, micro-batch, borders, and the order of ranks.

    Closed forms rank all candidates; the best are simulated. What the house can't train yet is priced and not chosen.
    The objective is seconds to a target loss where it is known of all strategies what they learn from a token, else
    seconds a token; see `objective_of`.

    Args:
        model: a preset, or a model of thinwire, of which only the shapes are used.
        machine: see `thinwire.calibrate`.
        tokens_per_step: of all ranks together.
        seq_len: tokens of a sequence.
        micro_batch: largest number of sequences in one pass.
        memory_bytes: of one rank, at most what the machine has, which is the default.
        strategies: those to choose from, methods of islands included; None: those that learn as much from a token as
            exact training. Methods of islands are then priced too, and chosen if it is known what they learn.
        stages: of a pipeline; None: free.
        tensor: ranks over which matrices are cut; None: free.
        dtype: compute type, "fp32" or "bf16".
        loss: "plain", "cut", or "auto", as for `thinwire train`.
        vocab_size: of a preset.
        tables: options of strategies, and those of the pipeline and of experts that are fixed.
        estimator: of the memory of a process; None: 1.5 times what is counted, and what it holds before.
        axes: those of ALL_AXES over which ranks may be divided, besides data.
        optimizer: with its options. Its state is counted, but AdamW's where ranks share experts; strategies and
            meshes that it can't train with are left out.
        has_settings: whether settings of strategies are tried that are not stated; see `Method.worth_trying`.
        has_groups: whether a strategy may take other ranks than those of a machine for one node.
        residency: options of what lies where that every way has, by the names of `thinwire.Residency`, but its memory;
            None: all is kept in memory, but for what `memory_bytes` leaves no room for. A store of "none" is no disk.
        reserved_bytes: of a process, what `memory_bytes` counts and it does not use.
        names_least: whether the error of a plan that nothing fits names the least memory that would do, which takes a
            search of its own.

    Raises ConfigError for arguments that can't be, and if nothing fits.
    """
    tables, residency = tables or {}, residency or {}
    sizes = {"tokens_per_step": tokens_per_step, "seq_len": seq_len, "micro_batch": micro_batch}
    counts = {**sizes, "vocab_size": vocab_size, "stages": stages, "tensor": tensor}
    problems = Problems(wrong_arguments(model, machine, counts, axes, tables, residency, reserved_bytes))
    problems.raise_any()
    llama, ranks = shapes_of(model, vocab_size, seq_len, tables), machine.num_ranks
    problems.messages += wrong_sizes(
        llama, ranks, tokens_per_step=tokens_per_step, seq_len=seq_len, micro_batch=micro_batch, stages=stages
    )
    problems.messages += wrong_experts(llama, tables)
    problems.messages += wrong_choices(memory_bytes, dtype, loss)
    choice = problems.note(partial(choice_of, has_settings=has_settings), strategies, tables, optimizer)
    problems.raise_any()
    assert choice is not None
    choice = replace(choice, is_mixture=isinstance(llama, MoELlama))
    memory = machine.memory_bytes if memory_bytes is None else min(machine.memory_bytes, memory_bytes)
    pricing = Pricing(
        llama, machine, choice.methods, seq_len, dtype, estimator or Offset(), tables, loss, optimizer=optimizer,
        reserved_bytes=reserved_bytes,
    )  # fmt: skip
    listed = [
        way
        for way in candidates(
            ranks, len(llama.model.layers), tokens_per_step // seq_len, choice.inner, tables.get(PIPELINE, {}),
            micro_batch, axes_of(llama, machine, seq_len, tables, axes, tensor), choice.outer,
        )
        if stages in (None, way.stages) and (way.outer or choice.has_plain)
    ]  # fmt: skip
    listed = [*with_groups(listed, pricing)] if has_groups else listed
    if not listed:
        raise no_mesh(ranks, tokens_per_step, seq_len, tables, strategies, stages, tensor)
    search = searcher(pricing, choice)

    def within(limit: float) -> tuple[Search, list[Row], str]:
        """What fits into so many bytes of a rank, rows on what is left out, and the budget that is stated."""
        budget = "" if memory_bytes is None else budget_text(limit)
        stated = KeptOptions(optimizer, residency, budget)
        ways, left = stated.split(listed, choice.methods)
        left = [*choice.dropped, *left]
        if not ways:
            raise no_way_left(left)
        return search(ways, limit, budget if stated.has_rest else "", stated.residency), left, budget

    found, left, budget = within(memory)
    if not found.fastest and not names_least:
        raise ConfigError(f"memory of {bytes_text(memory)} a rank: no way to train fits")
    if not found.fastest:
        raise nothing_fits(found, pricing, memory, lambda limit: bool(within(limit)[0].fastest))
    return TrainingPlan(
        machine, found, tokens_per_step, seq_len, pricing, choice.objective, tuple(left),
        budget="" if machine.on_gpu else budget,
    )  # fmt: skip


def shapes_of(model: str | Llama, vocab_size: int, seq_len: int, tables: Tables) -> Llama:
    """The model, of which only the shapes are used; raises ConfigError for one that can't be planned for."""
    own = tables.get(model_table(model) or "") if isinstance(model, str) else None
    llama = build_skeleton(model, vocab_size, seq_len, own) if isinstance(model, str) else model
    if not isinstance(llama, Llama):
        raise ConfigError(f"model {model}: only presets such as demo can be planned for; nearest: demo")
    return llama


def nothing_fits(found: Search, pricing: Pricing, memory: float, fits: Callable[[float], bool]) -> ConfigError:
    """The error of a search in which no way fits: the least memory that would do, and what would let less do.

    Where nothing was too large, why the ways that the model and the mesh allow have no price.

    memory: of a rank, in bytes. fits: whether the same search finds a way in so many bytes.
    """
    floors = floors_on_disk(found, pricing)
    needs = [*floors.values(), *(each.memory_bytes for each in found.too_large if not each.candidate.memory)]
    if not needs:
        # Nothing was too large, so a disk would not help: that it can't be used is told where it is asked for.
        inside = [why for why, ways in found.refused.items() if not all(way.is_resident for way in ways)]
        allowed = [why for why in inside if any(is_allowed(pricing, way) for way in found.refused[why])]
        return ConfigError(*(allowed or inside or found.refused))
    least = least_bytes(fits, min(needs), memory)
    near = f"the least is {enough_text(least)}; nearest: {budget_text(least)}"
    # The floors of single ways, and why one can't lie on a disk, are no answer beside the least of all.
    disk = f", or less with a part on a disk: {NO_DISK}" if NO_DISK in found.refused and not floors else ""
    return ConfigError(f"memory of {bytes_text(memory)} a rank: no way to train fits; {near}{disk}")


def is_allowed(pricing: Pricing, way: Candidate) -> bool:
    """Whether a strategy and a model can train so, whatever it costs."""
    with suppress(ConfigError):
        pricing.on(islands_of(pricing, way)[0]).check(way.inside)
        return True
    return False


def least_bytes(fits: Callable[[float], bool], guess: float, refused: float) -> float:
    """The least whole megabytes in which a way fits, in bytes, found to half a percent.

    A search under more memory prices other ways than one under less, so the ways of one search can't say it.

    guess: near the least. refused: too few bytes.
    """
    low, high = int(refused / 1e6), math.ceil(guess / 1e6)
    gap = max(1, high // 200)
    while not fits(1e6 * high):
        if 1e6 * high > MOST_TIMES * guess:
            # More memory does not help: the guess is what the ways of one search say.
            return guess
        low, high, gap = high, high + gap, 2 * gap
    gap = max(1, high // 200)
    while high - low > max(1, high // 200):
        middle = max(high - gap, (low + high + 1) // 2)
        if fits(1e6 * middle):
            high, gap = middle, 2 * gap
        else:
            low = middle
    return 1e6 * high


def budget_text(memory: float) -> str:
    """Bytes as an option takes them, such as 700mb, or 500kb below a megabyte; empty: without a limit."""
    if memory == math.inf:
        return ""
    return f"{int(memory / 1e6)}mb" if memory >= 1e6 else f"{max(1, int(memory)) / 1e3:g}kb"


def floors_on_disk(found: Search, pricing: Pricing) -> dict[Candidate, float]:
    """The smallest budget in bytes of each candidate of which a part can lie on a disk, but was too large."""
    refused = [way for ways in found.refused.values() for way in ways]
    floors: dict[Candidate, float] = {}
    for way in (*refused, *(priced.candidate for priced in found.too_large)):
        if way.memory:
            # What is not measured has no floor.
            with suppress(ConfigError):
                floors[way] = disk_floor(pricing, way)
    return floors


def axes_of(
    llama: Llama, machine: Machine, seq_len: int, tables: Tables, axes: Collection[str], tensor: int | None = None
) -> AxisSizes:
    """The numbers of ranks to try on each axis; those that are stated alone, if they can be."""
    ranks, local = machine.num_ranks, machine.local_size
    is_mixture, experts = isinstance(llama, MoELlama), tables.get(EXPERTS, {}).get("parallel", AUTO)
    tensors = tensor_sizes(llama.config, local) if "tensor" in axes or tensor is not None else [1]
    shared = sequence_sizes(llama.config, seq_len, ranks) if "sequence" in axes else [1]
    sequence = tables.get(SEQUENCE, {}).get("parallel")
    # Equal parts of a machine, or whole ones.
    parts = [size for size in range(1, ranks) if local % size == 0 or ranks % size == size % local == 0]
    return AxisSizes(
        tensors=[size for size in tensors if tensor in (None, size)],
        sequences=[size for size in shared if sequence in (None, size)],
        experts=expert_sizes(llama, ranks) if experts == AUTO else (experts,) if is_mixture else (1,),
        islands=[ranks // size for size in parts] if "island" in axes else (), local_size=local,
    )  # fmt: skip


def expert_sizes(llama: Llama, num_ranks: int) -> list[int]:
    """The numbers of ranks that may share the experts of a mixture, equally many on each; 1 for another model."""
    if not isinstance(llama, MoELlama):
        return [1]
    return [size for size in range(1, num_ranks + 1) if num_ranks % size == llama.config.num_local_experts % size == 0]


def sequence_sizes(config: LlamaConfig, seq_len: int, num_ranks: int) -> list[int]:
    """The numbers of ranks that may share a sequence: each has a head, and equally many tokens."""
    sizes = range(1, min(num_ranks, config.num_attention_heads) + 1)
    return [size for size in sizes if (num_ranks % size == 0 and seq_len % (2 * size) == 0) or size == 1]
