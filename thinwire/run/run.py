"""A run before it starts: its configuration, and the strategy built from it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path

from thinwire.codecs import Codec
from thinwire.cost import Links
from thinwire.data import TokenFile, Tokenizer, prepare
from thinwire.errors import ConfigError, Problems, nearest_divisor
from thinwire.layout.mesh import axes_of
from thinwire.methods.experts import ExpertParallel
from thinwire.methods.interface import Method
from thinwire.methods.memory import Residency, read_bytes
from thinwire.methods.pipeline.options import Pipeline
from thinwire.methods.pipeline.recover import NONE
from thinwire.methods.sequence import SequenceParallel
from thinwire.methods.sequence.layout import AUTO
from thinwire.models.moe import MIXTURES
from thinwire.optim import OPTIMIZERS
from thinwire.options import (
    CHOSEN_FROM,
    DEFAULT_INNER,
    EXPERTS,
    PIPELINE,
    RESIDENCY,
    SEQUENCE,
    build_strategy,
    has_islands,
    made,
    model_table,
    used_tables,
)
from thinwire.registry import STRATEGIES, class_of
from thinwire.run.config import DEFAULTS, TrainConfig
from thinwire.run.optimizer import check_fits, check_mesh, read_optimizer
from thinwire.run.places import FLAT, residency_of


@dataclass(frozen=True)
class Run:
    """A configuration and its strategy, which is built once in every process.

    Attributes:
        config: with the optimizer that is in effect.
        strategy: with its options, for a run of this length.
        pipeline: options of the model's stages; None: a single stage.
        sequence, experts: options of sequences and of experts that lie on several ranks, if any.
        residency: what lies on a disk, if anything.
        links: as the ranks have measured them to choose how rows travel; None: all is stated.
        attention_links: likewise, to choose what ranks of a sequence exchange.
        choices: the strategies from which the ranks choose later; `strategy` stands for them. Empty: it is stated.
    """

    config: TrainConfig
    strategy: Method
    pipeline: Pipeline | None = None
    sequence: SequenceParallel | None = None
    experts: ExpertParallel | None = None
    residency: Residency | None = None
    links: Links | None = None
    attention_links: Links | None = None
    choices: tuple[Method, ...] = ()

    @classmethod
    def of(cls, config: TrainConfig) -> Run:
        """Build the strategy, and use the optimizer of its choice if none is stated.

        Raises ConfigError, with all reasons, for an unknown name, refused options, or an optimizer that the strategy
        does not support.
        """
        problems, tables = Problems(), tables_in_effect(config)
        # What the ranks choose later is built then; all that is checked before holds for any.
        names = dict.fromkeys((DEFAULTS.strategy, *CHOSEN_FROM)) if config.is_planned_late else (config.strategy,)
        build = partial(
            build_strategy, tables=config.tables, inner=config.inner, num_steps=config.steps,
            num_warmup_steps=config.num_warmup_steps,
        )  # fmt: skip
        built = tuple(each for name in names if (each := problems.note(build, name)) is not None)
        strategy = problems.note(standing_for, config, built)
        pipeline = sequence = experts = residency = None
        if PIPELINE in tables and not config.is_planned_late:
            pipeline = problems.note(made, Pipeline, config.tables.get(PIPELINE, {}), PIPELINE)
        if SEQUENCE in tables:
            ranks = config.mesh_shape.sequence
            options = {**config.tables.get(SEQUENCE, {}), "parallel": ranks}
            sequence = problems.note(made, SequenceParallel, options, SEQUENCE)
        if EXPERTS in tables:
            stated = config.tables.get(EXPERTS, {})
            # Until the ranks choose how many of them hold the experts, the fewest that can.
            is_open = config.finds_expert_ranks or (config.is_planned_late and config.experts is None)
            ranks = stated.get("slices", 1) if is_open else config.mesh_shape.expert
            experts = problems.note(made, ExpertParallel, {**stated, "parallel": ranks}, EXPERTS)
        if RESIDENCY in tables:
            residency = problems.note(residency_of, config)
        name = problems.note(optimizer_of, config, strategy, experts)
        problems.raise_any()
        assert strategy is not None
        choices = built if config.is_planned_late else ()
        return cls(replace(config, optimizer=name), strategy, pipeline, sequence, experts, residency, choices=choices)

    def but(self, **changes: object) -> Run:
        """The same run with other values for fields that no strategy depends on."""
        return replace(self, config=replace(self.config, **changes))  # type: ignore[arg-type]

    @property
    def has_islands(self) -> bool:
        """Whether it trains islands, each with an inner strategy."""
        return has_islands(self.config.strategy)

    @property
    def chooses_attention(self) -> bool:
        """Whether the ranks choose, after they have met, what the ranks of a sequence send each other."""
        return self.sequence is not None and self.sequence.parallel > 1 and self.sequence.method == AUTO

    @property
    def memory_bytes(self) -> int | None:
        """The budget to which each worker is held; None: there is none. Also where nothing lies on a disk."""
        stated = self.config.memory or self.config.tables.get(RESIDENCY, {}).get("memory")
        return None if stated is None else read_bytes(stated)

    @property
    def recovers(self) -> bool:
        """Whether it continues after the loss of a stage."""
        return recovers(self.config)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs whose kernels are compiled before the workers start."""
        others = (each for each in (self.pipeline, self.sequence, self.experts, self.residency) if each)
        methods = self.choices or (self.strategy,)
        return tuple(chain.from_iterable(each.codecs for each in (*methods, *others)))

    @cached_property
    def used_tables(self) -> set[str]:
        """The tables of options that have an effect."""
        return tables_in_effect(self.config)

    def with_island_size(self) -> Run:
        """The run with the size of an island and the inner strategy filled in, if there are islands."""
        if not self.has_islands:
            return self
        return self.but(local_size=island_size(self.config), inner=self.config.inner or DEFAULT_INNER)


def tokens_of(config: TrainConfig, tokenizer: Tokenizer, data: str | None = None) -> TokenFile:
    """The tokens of a run's data, or of other `data`; made once. Raises ConfigError for a source that can't be read."""
    cache_dir = Path(config.cache_dir) if config.cache_dir else None
    return prepare(data or config.data, tokenizer, text_field=config.text_field, cache_dir=cache_dir)


def standing_for(config: TrainConfig, built: tuple[Method, ...]) -> Method | None:
    """The strategy of a run; where the ranks choose it later, the first of theirs that takes the optimizer.

    built: the stated one, or theirs, as far as they can be built. Raises ConfigError if none takes the optimizer.
    """
    if not config.is_planned_late or config.optimizer is None or not built:
        return next(iter(built), None)
    name, _ = read_optimizer(config.optimizer)
    taking = next((method for method in built if name in method.optimizers), None)
    if taking is None:
        own = {each: getattr(class_of(each), "optimizers", None) for each in STRATEGIES}
        theirs = (each for each, taken in own.items() if isinstance(taken, tuple) and name in taken)
        near = "".join(f", or --strategy {each}" for each in islice(theirs, 1))
        raise ConfigError(
            f"--optimizer {name}: none of {', '.join(CHOSEN_FROM)} takes it, from which --strategy "
            f"{config.strategy} chooses; nearest: --optimizer {next(iter(built[0].optimizers))}{near}"
        )
    return taking


def optimizer_of(config: TrainConfig, strategy: Method | None, experts: ExpertParallel | None) -> str:
    """The optimizer in effect, with its options: the stated one, or the strategy's choice.

    strategy: None if it can't be built. Raises ConfigError for an optimizer that strategy, mesh or experts refuse.
    """
    fitting = OPTIMIZERS if strategy is None else strategy.optimizers
    asked = config.optimizer or next(iter(fitting))
    name, _ = read_optimizer(asked, fitting)
    if strategy is not None:
        check_fits(name, strategy)
    check_mesh(name, config.mesh_shape, 1 if experts is None else experts.slices)
    return asked


def recovers(config: TrainConfig) -> bool:
    """Whether a run continues after the loss of a stage."""
    return PIPELINE in tables_in_effect(config) and config.tables.get(PIPELINE, {}).get("recover", NONE) != NONE


def tables_in_effect(config: TrainConfig) -> set[str]:
    """The tables of options that have an effect in this run."""
    table = model_table(config.model)
    model = {table} if table else set()
    has_stages = config.stages not in (None, 1) or "pipeline" in axes_of(config.mesh)
    stages = {PIPELINE} if has_stages else set()
    sequences = {SEQUENCE} if (config.sequence or 1) > 1 or "sequence" in axes_of(config.mesh) else set()
    has_experts = (config.experts or 1) > 1 or config.finds_expert_ranks or "expert" in axes_of(config.mesh)
    experts = {EXPERTS} if has_experts else set()
    asked = config.tables.get(RESIDENCY) or any(getattr(config, name) is not None for name in FLAT)
    resident = {RESIDENCY} if asked else set()
    if config.is_planned_late:
        experts |= {EXPERTS} if config.model in MIXTURES else set()
        return model | sequences | experts | resident | {PIPELINE}.union(*map(used_tables, CHOSEN_FROM))
    return model | stages | sequences | experts | resident | used_tables(config.strategy, config.inner)


def island_size(config: TrainConfig) -> int:
    """Ranks of one island: as --mesh or --local-size state; by default a machine's, or 1 on a single machine.

    Raises ConfigError if islands would not fit on a machine.
    """
    machine = int(os.environ.get("LOCAL_WORLD_SIZE", config.workers))
    size = config.mesh_shape.island_size or config.local_size or (machine if machine < config.world_size else 1)
    if machine % size:
        raise ConfigError(
            f"islands of {size} ranks: an island lies on one machine, which has {machine} workers; nearest: "
            f"{nearest_divisor(size, machine)}"
        )
    return size
