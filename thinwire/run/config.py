"""The configuration of a training run, one frozen dataclass, and the batch that follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

import tyro

from thinwire.errors import ConfigError, counted, nearest_divisor
from thinwire.flags import Also, flag
from thinwire.layout.mesh import MeshShape, go_together


@dataclass(frozen=True)
class TrainConfig:
    """Train a language model over slow links.

    Values come from the defaults, then CONFIG.toml (same names, `-` or `_`), then the flags. Where an option takes a
    codec, `thinwire codecs` lists how codecs are written.
    """

    model: str = "demo"
    """Preset (tiny, demo, 125m, 350m, 1b; with experts moe-tiny, moe-demo), hf:DIR for a causal LM that transformers
    builds from a folder, or auto: demo or tiny, by what --minutes leaves time for."""
    data: str = "stdlib"
    """Text to train on: a file or folder, .jsonl, .parquet, hf:NAME, or stdlib: the sources of this Python."""
    text_field: str = "text"
    """Field that holds the text, for .jsonl, .parquet and hf: data."""
    documents: bool = False
    """Tokens attend only to their own document, where several are packed into a sequence, and nothing is learnt from
    one document about the next."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json."""
    cache_dir: str | None = None
    """Where tokenised data is kept; by default thinwire's folder in the user's cache."""
    mesh: str | None = None
    """Axes of the ranks, such as data=2,tensor=2: matrices are cut over the tensor axis, and the strategy works on the
    data axis. By default all ranks are the data axis."""
    stages: int | Literal["auto"] | None = None
    """Cut the model's layers over this many ranks, through which micro-batches pass: short for --mesh pipeline=N. The
    other ranks are replicas of the stages, by --strategy. auto: the ranks measure themselves and their links, and take
    the number with the fastest simulated step."""
    tensor: int | Literal["auto"] | None = None
    """Cut the matrices of each layer over this many ranks of one machine: short for --mesh tensor=N. Beside --stages
    each stage is cut so. auto: found beside --stages auto."""
    strategy: str = "sdp4bit"
    """How ranks share the work, such as sdp4bit, zero, ddp or fsdp; `thinwire explain` lists them all. auto: the ranks
    measure themselves and their links, and take what has the fastest simulated step, pipelines included."""
    inner: str | None = None
    """Strategy inside each island, for diloco, streaming-diloco, local-sgd, sparseloco
    and muloco; by default ddp."""
    workers: int = 1
    """Worker processes to start on this machine."""
    local_size: int | None = None
    """Ranks that share a fast link: a node. By default the workers of one machine; 1 makes every rank a node. A
    strategy with islands makes each node an island; then the default on a single machine is 1."""
    order: tuple[int, ...] = ()
    """The rank in each place, such as 0 3 1 2, so that neighbours in a pipeline or ring have a fast link. Rank 0 stays
    first. By default rank i is in place i."""
    plan: str | None = None
    """plan.json of `thinwire plan`: the report holds its prediction against the run. '' over a file's: none."""
    join: str | None = None
    """HOST:PORT of node 0, for a run on several machines; give the same value on all of them."""
    nodes: int = 1
    """Number of machines, with --join."""
    node: int = 0
    """This machine's number, from 0, with --join."""
    steps: int = 1000
    """Optimizer steps of the whole run."""
    minutes: float | None = None
    """End about this many minutes after the command was started, in place of --steps: the first steps are measured, and
    the number of steps is chosen once and kept."""
    stop_at: int | None = None
    """Save a checkpoint after this step and end; --resume continues. The learning-rate schedule still spans --steps."""
    tokens_per_step: int | None = None
    """Tokens of one optimizer step on all ranks together; by default one micro-batch per rank."""
    seq_len: int = 256
    """Tokens of one sequence."""
    micro_batch: int = 8
    """Most sequences in one forward pass of one worker; the number of accumulation steps follows from it."""
    optimizer: str | None = None
    """adamw (betas 0.9 and 0.95), sgd (momentum 0.9), sgd-plain, lans, muon, dion, apollo or apollo-mini (for the
    matrices of layers; adamw for the rest), mfac, dgc-sgd or onebit-adam; by default the strategy's own choice. Options
    stand in brackets: dion[rank=32,codec=int8/64]."""
    lr: float = 3e-4
    """Peak learning rate. It rises linearly during the warm-up, then falls along a cosine to a tenth of the peak."""
    weight_decay: float = 0.1
    """Weight decay of parameters with two or more dimensions; the others have none."""
    warmup_steps: int | None = None
    """Steps until the learning rate reaches its peak; by default a tenth of the steps, at most 1000."""
    grad_clip: float = 1.0
    """Largest global norm of the gradient; 0 turns clipping off."""
    dead_steps: int = 20
    """End the run after this many steps in a row whose gradient is zero or not finite; 0 turns this off."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What workers train on: cuda, a GPU for each, or cpu; auto takes cuda where there is a GPU for every worker."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute type; auto measures whether bf16 autocast is faster on this machine, and on a GPU takes bf16 where it has
    bf16 units. Weights and sums stay fp32."""
    loss: Literal["auto", "plain", "cut"] = "auto"
    """plain: compute all logits of a micro-batch; cut: those of a few tokens at a time, in a small part of the memory.
    auto takes cut where the logits are large."""
    teacher: str | None = None
    """For a mixture of experts: hf:DIR of another, such as the one that it was pruned from. The model's experts learn
    from its experts, and from the text."""
    teacher_weight: float | None = None
    """Weight of the difference between the experts' outputs and their teacher's; by default the one at which both
    losses are equal before the first step. At least 0."""
    compile: bool = False
    """Compile the model's layers with torch.compile."""
    seed: int = 0
    """Seeds the weights, the order of the data and the rounding."""
    run_dir: str = "runs/run"
    """Folder for config.toml, metrics.jsonl, summary.json, checkpoints/, logs/ and report.html."""
    resume: Annotated[bool, Also("auto", "takes the newest sound checkpoint in --run-dir")] = False
    """Continue from the newest complete and sound checkpoint in the run directory, with the config.toml that lies
    there unless you name another. `--resume auto` means the same."""
    overwrite: bool = False
    """Delete the run that is in the run directory, and start anew."""
    dry_run: bool = False
    """Print the start-up table, as far as it is known without the ranks, and the resolved config.toml, then end.
    Nothing is started or written."""
    checkpoint_every: int = 500
    """Steps between checkpoints; 0: only at the end, or when the run is stopped."""
    keep_last: int = 2
    """Number of newest checkpoints to keep."""
    keep_every: int = 0
    """Also keep checkpoints whose step is a multiple of this number; 0: none."""
    keep_best: bool = False
    """Also keep the checkpoint whose step had the lowest training loss."""
    allow_resume_drift: bool = False
    """Continue even if the first loss after --resume differs from the loss that the saved run had at that step."""
    eval_sequences: int = 64
    """Most held-out sequences for the loss at the end, on all ranks together; 0: do not measure it."""
    prompt: str = "def "
    """Start of the text that the trained model continues."""
    sample_tokens: int = 200
    """Tokens to generate at the end; 0: generate no text."""
    track: tuple[str, ...] = ()
    """Also log to tensorboard, wandb or trackio."""
    memory: str | None = None
    """Most memory of each worker, such as 2gb, enforced by the kernel (RLIMIT_DATA); what does not fit lies in --store.
    By default the limit under which the command runs (ulimit -d), or none."""
    store: str | None = None
    """Folder on a disk for what does not fit in --memory, or, without --memory, for all that can lie there; by default
    RUN_DIR/store. none: nothing lies on a disk, and --memory is a limit alone, for any strategy and mesh."""
    activations: str | None = None
    """What a forward keeps for its backward: keep, recompute, offload (to the disk), or sample:0.3; see
    [residency]. By default everything, or under --memory what fits."""
    slices: int | None = None
    """Parts of a micro-batch that each layer computes one after another, in the memory of one; see [residency]."""
    timeout: float = 300.0
    """Seconds after which a silent rank counts as lost, also during start-up and shutdown."""
    checked: bool = False
    """Send operation, number, length and checksum in front of every message, and compare them on arrival."""
    restarts: int = 3
    """How often a failed island is started again, to join the others, or a killed stage of a pipeline with recover; 0:
    never."""
    inject: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A fault to inject, such as "kill rank=2 step=40"; may be repeated."""
    tables: Annotated[Mapping[str, Mapping[str, Any]], tyro.conf.Suppress] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Ranks of the whole run, as this configuration starts them."""
        return self.workers * self.nodes

    @property
    def mesh_shape(self) -> MeshShape:
        """The axes of the ranks. Raises ConfigError for text that can't be read, and for flags that contradict it."""
        if isinstance(self.stages, str):
            # Until the ranks have met, and choose.
            return replace(self, stages=None).mesh_shape
        if self.mesh is not None:
            shape = MeshShape.parse(self.mesh)
            if twice := [
                f"{option} {stated} and --mesh {self.mesh}: give one of them"
                for axis, (option, stated) in self._asked.items()
                if stated not in (None, shape.sizes.get(axis, 1))
            ]:
                raise ConfigError(*twice)
            return shape if self._has_islands or shape.sizes.get("island") != 1 else shape.without_islands()
        asked = {axis: (option, stated or 1) for axis, (option, stated) in self._asked.items()}
        several = {axis: pair for axis, pair in asked.items() if pair[1] > 1}
        if not go_together(several):
            shown = " ".join(f"{option} {ranks}" for option, ranks in several.values())
            without = ", or ".join(f"{option} 1" for option, _ in several.values())
            raise ConfigError(f"{shown}: one run can't have both; nearest: {without}")
        left, of, others = self.world_size, "", dict[str, int]()
        for option, ranks in asked.values():
            if left % max(1, ranks):
                most = most_stages(self.model, self.tables) if option == AXIS_FLAGS["pipeline"] else math.inf
                ways = [f"{option} {nearest_divisor(ranks, left, most)}"]
                ways += [f"{other} 1" for other, taken in others.items() if left * taken % ranks == 0]
                rest = "; a resume takes what no flag states from the run's configuration" if self.resume else ""
                near = f"{', or '.join(ways)}{rest}"
                raise ConfigError(f"{option} {ranks}: must divide the {counted(left, 'rank')}{of}; nearest: {near}")
            if ranks > 1:
                left, of, others = left // ranks, f" that {option} {ranks} leaves", {**others, option: ranks}
        cut = {axis: pair[1] for axis, pair in several.items()}
        size = math.prod(cut.values())
        if not cut or not self._has_islands:
            return MeshShape({"data": self.world_size // size, **cut}).in_order()
        island = self.local_size or (self.workers if self.nodes > 1 else size)
        if island % size or self.world_size % island:
            flags = " ".join(f"{option} {ranks}" for option, ranks in several.values())
            raise ConfigError(
                f"{flags}: islands of {island} ranks can't be cut so; nearest: --local-size {size}, which must divide "
                f"the {self.world_size} ranks"
            )
        return MeshShape({"island": self.world_size // island, "data": island // size, **cut}).in_order()

    @property
    def _has_islands(self) -> bool:
        # It loads methods, and with them torch, which no help needs.
        from thinwire.options import has_islands

        return has_islands(self.strategy)

    @property
    def chooses_stages(self) -> bool:
        """Whether the ranks choose the stages after they have met; until then all ranks are the data axis."""
        return isinstance(self.stages, str)

    @property
    def chooses_across(self) -> bool:
        """Whether the ranks choose, after they have met, which dimension crosses nodes."""
        stated = self.tables.get("pipeline", {})
        has_both = min(self.mesh_shape.pipeline, self.mesh_shape.sizes["data"]) > 1
        is_free = stated.get("across", AUTO) == AUTO and stated.get("recover", "none") == "none"
        return has_both and is_free and not (self.order or self.plan) and "island" not in self.mesh_shape.sizes

    @property
    def is_planned_late(self) -> bool:
        """Whether the ranks choose the strategy after they have met."""
        return self.strategy == AUTO

    @property
    def plans(self) -> bool:
        """Whether the ranks measure themselves after they have met, and plan: the strategy, or the stages alone."""
        return self.is_planned_late or self.chooses_stages

    @property
    def sequence(self) -> int | None:
        """Number of ranks that the options of sequences state; None: not stated."""
        return self.tables.get("sequence", {}).get("parallel")

    @property
    def experts(self) -> int | None:
        """Number of ranks that the options of experts state; None: not stated, or to be chosen."""
        stated = self.tables.get("experts", {}).get("parallel")
        return None if stated == AUTO else stated

    @property
    def finds_expert_ranks(self) -> bool:
        """Whether the ranks choose, after they have met, how many ranks share the experts."""
        return self.tables.get("experts", {}).get("parallel") == AUTO

    @property
    def chooses_experts(self) -> bool:
        """Whether they choose that, or what travels to or from experts, and how."""
        has_axis = not self.finds_expert_ranks and "expert" in self.mesh_shape.sizes
        return self.finds_expert_ranks or (has_axis and AUTO in self.tables.get("experts", {}).values())

    @property
    def _asked(self) -> dict[str, tuple[str, int | None]]:
        """Axes stated by options other than --mesh, each with the option, and the number of ranks if it is stated."""
        sizes = {
            "pipeline": None if isinstance(self.stages, str) else self.stages, "sequence": self.sequence,
            "expert": self.experts, "tensor": None if isinstance(self.tensor, str) else self.tensor,
        }  # fmt: skip
        return {axis: (AXIS_FLAGS[axis], size) for axis, size in sizes.items()}

    def without_axes(self) -> TrainConfig:
        """The same without the axes that flags other than --mesh state."""
        tables = {name: dict(values) for name, values in self.tables.items()}
        for name in AXIS_TABLES.values():
            tables.get(name, {}).pop("parallel", None)
        return replace(self, stages=None, tensor=None, tables={name: each for name, each in tables.items() if each})

    def by_flags(self) -> TrainConfig:
        """The same with the axes of --mesh as the flags of each. Raises ConfigError for text that can't be read."""
        sizes, bare = {} if self.mesh is None else MeshShape.parse(self.mesh).sizes, self.without_axes()
        tables = {name: dict(values) for name, values in bare.tables.items()}
        for axis, name in AXIS_TABLES.items():
            if sizes.get(axis, 1) > 1:
                tables.setdefault(name, {})["parallel"] = sizes[axis]
        return replace(bare, mesh=None, stages=sizes.get("pipeline"), tensor=sizes.get("tensor"), tables=tables)

    @property
    def num_shares(self) -> int:
        """Number of ranks that see different data."""
        # A mesh of more ranks than there are is refused, with all else that is wrong.
        return max(1, self.world_size // self.mesh_shape.shared)

    @property
    def num_warmup_steps(self) -> int:
        return min(1000, self.steps // 10) if self.warmup_steps is None else self.warmup_steps


DEFAULTS = TrainConfig()
AUTO = "auto"
# The flag that states the ranks of an axis, other than --mesh.
AXIS_FLAGS = {
    "pipeline": "--stages", "expert": "--experts.parallel", "sequence": "--sequence.parallel", "tensor": "--tensor",
}  # fmt: skip
# The table in which an axis has its ranks, if it is not a flag of its own.
AXIS_TABLES = {"expert": "experts", "sequence": "sequence"}
# Smallest value each number may have; None stands for "above zero".
LOWEST: dict[str, int | None] = {
    "workers": 1, "local_size": 1, "stages": 1, "tensor": 1, "nodes": 1, "node": 0, "steps": 1, "stop_at": 1,
    "tokens_per_step": 1, "seq_len": 1, "micro_batch": 1, "lr": None, "weight_decay": 0, "warmup_steps": 0,
    "grad_clip": 0, "seed": 0, "dead_steps": 0, "teacher_weight": 0, "checkpoint_every": 0, "keep_last": 1,
    "keep_every": 0, "restarts": 0, "eval_sequences": 0, "sample_tokens": 0, "slices": 1, "timeout": None,
    "minutes": None,
}  # fmt: skip
# A year: a few times as much, in nanoseconds, is no number of a clock.
HIGHEST = {"timeout": 365 * 24 * 3600}

# Machines may differ in these; the rest must be equal on all ranks.
PER_MACHINE = {
    "model", "teacher", "data", "tokenizer", "text_field", "cache_dir", "run_dir", "node", "join", "workers", "resume",
    "overwrite", "dry_run", "track", "prompt", "sample_tokens", "device", "dtype", "inject", "restarts", "memory",
    "store", "activations", "slices", "plan",
}  # fmt: skip
# Of one start only: a run repeated from its config.toml must not delete or move another.
NOT_WRITTEN = ("resume", "overwrite", "dry_run", "allow_resume_drift", "stop_at", "inject", "node", "tables")
# A resumed run must be the same in these; a change of any other is announced.
FIXED_ON_RESUME = (
    "model", "tokenizer", "weight_decay", "data", "documents", "seq_len", "seed", "tokens_per_step",
)  # fmt: skip


def most_stages(model: str, tables: Mapping[str, Mapping[str, Any]]) -> float:
    """The most stages for which a model has layers; infinite where that is not known here."""
    from thinwire.methods.pipeline.options import Pipeline
    from thinwire.models import PRESETS
    from thinwire.models.hf import check_hf
    from thinwire.options import model_table

    stated, num_layers = tables.get(model_table(model) or "", {}), None
    if model in PRESETS:
        num_layers = stated.get("num_hidden_layers", PRESETS[model].num_hidden_layers)
    elif model.startswith("hf:"):
        # What is wrong with a folder is told elsewhere.
        with suppress(ConfigError):
            num_layers = getattr(check_hf(model.removeprefix("hf:"), 1, 1, {}), "num_hidden_layers", None)
    if num_layers is None:
        return math.inf
    try:
        chunks = Pipeline(**tables.get("pipeline", {})).num_chunks
    except ConfigError:
        return float(num_layers)
    return max((n for n in range(1, num_layers + 1) if chunks(n) <= num_layers), default=1)


def number_errors(config: Any) -> Iterator[str]:
    """One message for each field of a dataclass that is out of its range. Fields count by their names."""
    for item in fields(config):
        value, lowest = getattr(config, item.name), LOWEST.get(item.name, -math.inf)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not math.isfinite(value):
            yield f"{flag(item.name)} {value}: must be finite"
        elif lowest is None and value <= 0:
            yield f"{flag(item.name)} {value}: must be above 0"
        elif value > (highest := HIGHEST.get(item.name, math.inf)):
            yield f"{flag(item.name)} {value}: must be at most {highest:,}; nearest: {highest}"
        elif lowest is not None and value < lowest:
            yield f"{flag(item.name)} {value}: must be at least {lowest}; nearest: {lowest}"


def node_errors(nodes: int, node: int, join: str | None) -> Iterator[str]:
    """One message for a machine's number that there is not, and one for several machines that can't meet."""
    if node >= nodes >= 1:
        yield f"--node {node}: nodes are numbered 0 to {nodes - 1}; nearest: {nodes - 1}"
    if nodes > 1 and not join:
        yield f"--nodes {nodes} needs --join HOST:PORT, where HOST is node 0"


def range_errors(config: TrainConfig) -> Iterator[str]:
    """One message for each number out of its range and each pair of fields that contradict each other."""
    yield from number_errors(config)
    for option, stated in (("--sequence.parallel", config.sequence), ("--experts.parallel", config.experts)):
        if stated is not None and stated < 1:
            yield f"{option} {stated}: must be at least 1; nearest: 1"
    if config.seed >= 1 << 63:
        yield f"--seed {config.seed}: must be below 2^63; nearest: {(1 << 63) - 1}"
    if not config.run_dir.strip():
        yield "--run-dir is empty: give a folder, such as runs/run"
    if config.resume and config.overwrite:
        yield "--resume and --overwrite contradict each other: give one of them"
    yield from node_errors(config.nodes, config.node, config.join)
    ranks = range(config.world_size)
    if config.order and (config.order[0] != 0 or sorted(config.order) != list(ranks)):
        rest = [rank for rank in dict.fromkeys(config.order) if rank in ranks[1:]]
        near = [0, *rest, *(rank for rank in ranks[1:] if rank not in rest)]
        yield (
            f"--order {' '.join(map(str, config.order))}: must name each of the ranks 0 to {config.world_size - 1} "
            f"once, and 0, which writes the results, first; nearest: --order {' '.join(map(str, near))}"
        )


def check_num_ranks(config: TrainConfig) -> None:
    """Raise ConfigError for a mesh of another number of ranks than the run has."""
    shape = config.mesh_shape
    if shape.world_size == config.world_size:
        return
    num_replicas, left = divmod(config.world_size, shape.world_size // shape.sizes["data"])
    nearest = f"--mesh {MeshShape({**shape.sizes, 'data': num_replicas})}"
    if left:
        workers, left = divmod(shape.world_size, config.nodes)
        nearest = f"--mesh data={config.world_size}" if left else f"--workers {workers}"
    raise ConfigError(
        f"--mesh {config.mesh} has {shape.world_size} ranks and the run has {config.world_size}: the two must be "
        f"equal; nearest: {nearest}"
    )


def with_derived(config: TrainConfig) -> TrainConfig:
    """The configuration, with the numbers filled in that follow from others."""
    batch = derive(config, config.num_shares)
    # How many steps there are is not known before some were measured.
    warmup_steps = config.warmup_steps if config.minutes else config.num_warmup_steps
    return replace(config, tokens_per_step=batch.tokens_per_step, warmup_steps=warmup_steps)


@dataclass(frozen=True)
class Batch:
    """One optimizer step: every rank runs `accumulation` forward passes of `micro_batch` sequences."""

    tokens_per_step: int
    micro_batch: int
    accumulation: int


def derive(config: TrainConfig, world_size: int) -> Batch:
    """The largest micro-batch that fits and divides, and the accumulation that makes up the step.

    tokens_per_step = micro_batch * accumulation * seq_len * world_size. By default every stage of a pipeline adds one
    micro-batch. world_size: number of ranks that see different data. Raises ConfigError if tokens_per_step is not a
    multiple of seq_len * world_size.
    """
    unit = config.seq_len * world_size
    tokens = config.tokens_per_step or config.micro_batch * unit * config.mesh_shape.pipeline
    if tokens % unit and config.resume:
        sequences = tokens // config.seq_len
        raise ConfigError(
            f"--resume: a step of the run has {sequences} sequences, which {world_size} ranks with data of their own "
            f"can't share evenly; nearest: {nearest_divisor(world_size, sequences)} of them"
        )
    if tokens % unit:
        valid = max(1, round(tokens / unit)) * unit
        raise ConfigError(
            f"--tokens-per-step {tokens}: must be a multiple of seq_len * ranks = {config.seq_len} * {world_size} "
            f"= {unit}; nearest: {valid}"
        )
    per_rank = tokens // unit
    micro_batch = max(n for n in range(1, min(config.micro_batch, per_rank) + 1) if per_rank % n == 0)
    return Batch(tokens, micro_batch, per_rank // micro_batch)
