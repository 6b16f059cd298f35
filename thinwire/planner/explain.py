"""Memory and traffic of strategies on a cluster, by their own formulas, over a model without memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import nn

from thinwire.collectives import Topology
from thinwire.collectives.gather import gather_bytes
from thinwire.data import load_tokenizer
from thinwire.errors import ConfigError, Problems, nearest
from thinwire.flags import flag
from thinwire.lab.spec import read_rate
from thinwire.layout.mesh import MeshShape
from thinwire.methods.interface import Method, MethodPlan
from thinwire.methods.pipeline.balance import balanced
from thinwire.methods.pipeline.cut import stated_sizes
from thinwire.methods.pipeline.inside import check_inside, why_not_inside
from thinwire.methods.pipeline.options import Pipeline, check_stages
from thinwire.models import PRESETS, Llama, build_skeleton
from thinwire.models.llama import LlamaConfig, cut_skeleton
from thinwire.options import LLAMA, PIPELINE, build_strategy, strategy_table
from thinwire.planner.options import ExplainConfig, range_errors
from thinwire.registry import STRATEGIES, check_on_mesh
from thinwire.report.units import bytes_text, short

NUM_LAYERS, WIDTH = 32, 1024
# Steps and warm-up steps of the run that strategies are planned for.
NUM_STEPS, NUM_WARMUP_STEPS = 1000, 100


@dataclass(frozen=True)
class Explained:
    """The plan of each strategy; bit/s of the links, None if not stated.

    Args:
        notes: rows of (asked for, in effect, why) for options in which the two differ.
        vocabulary: why a preset has fewer or more parameters than its name says; empty if it has not.
        mean_over: for strategies that do not exchange in every step, number of steps over which the bytes are a mean.
        whole: strategies that hold whole weights beside their shard.
    """

    num_parameters: int
    topology: Topology
    micro_batches: int
    plans: dict[str, MethodPlan]
    rate: float | None
    local_rate: float | None
    notes: list[tuple[str, str, str]]
    vocabulary: str = ""
    mean_over: Mapping[str, int] = field(default_factory=dict)
    whole: Sequence[str] = ()

    def link_s(self, found: MethodPlan) -> float | None:
        """Seconds of a step's messages between nodes on one node's link, all ranks of the node together."""
        sent = self.topology.local_size * found.sent_on("inter") if found.crossing is None else found.crossing
        return None if self.rate is None else 8 * sent / self.rate

    def local_s(self, found: MethodPlan) -> float | None:
        """Seconds of a step's messages inside a node on one rank's link."""
        sent = found.sent_on("intra") + found.sent_on("pair")
        return None if self.local_rate is None else 8 * sent / self.local_rate


def explain(config: ExplainConfig, problems: Problems) -> Explained:
    """Plans of all strategies. Raises ConfigError with all problems at once."""
    problems.messages += range_errors(config)
    names = chosen(config.strategy, problems)
    rate = read(config.rate, problems)
    local_rate = read(config.local_rate, problems)
    model = whole_model = shape = None
    stage_notes: list[tuple[str, str, str]] = []
    total = 0
    if not any(True for _ in range_errors(config)):
        with problems.collect():
            shape = mesh_of(config)
            model = model_of(config)
            total = sum(param.numel() for param in model.parameters() if param.requires_grad)
            if shape.tensor > 1:
                model = cut(model, shape.tensor)
            whole_model = model
            if shape.pipeline > 1:
                model, stage_notes = stage_of(model, config, shape)
    plans: dict[str, MethodPlan] = {}
    replicas = shape.sizes["data"] if shape is not None else 1
    mean_over, whole, left_out = {}, [], []
    for name in names:
        with problems.collect():
            strategy = build_strategy(name, config.tables, num_steps=NUM_STEPS, num_warmup_steps=NUM_WARMUP_STEPS)
            if strategy.exchanges_every > 1:
                mean_over[name] = strategy.exchanges_every
            if strategy.keeps_whole_weights:
                whole.append(name)
            if model is not None and whole_model is not None and shape is not None:
                if shape.tensor > 1 and strategy.not_on_mesh and config.strategy == "all":
                    left_out.append((f"strategy {name}", "left out", f"on a tensor axis it {strategy.not_on_mesh}"))
                    continue
                if shape.tensor > 1:
                    check_on_mesh(strategy)
                if shape.pipeline > 1 and (reason := why_not_inside(strategy, replicas)):
                    if config.strategy != "all":
                        check_inside(strategy, replicas)
                    left_out.append((f"strategy {name}", "left out", f"with --stages it {reason}"))
                    continue
                plans[name] = plan_on(strategy, model, whole_model, config, shape)
    problems.raise_any()
    assert model is not None
    topology = Topology(config.nodes, config.local_size)
    notes = [*notes_on(config, names), *stage_notes, *left_out]
    if shape is not None and isinstance(model, Llama) and shape.tensor > 1:
        notes.append(tensor_note(model.config, config.seq_len, shape))
    return Explained(
        total, topology, config.micro_batches, plans, rate, local_rate, notes, vocabulary_of(config, model),
        {name: steps for name, steps in mean_over.items() if name in plans}, [name for name in whole if name in plans],
    )  # fmt: skip


def vocabulary_of(config: ExplainConfig, model: nn.Module) -> str:
    """A note if a preset's vocabulary is not its usual one, with the usual number of parameters."""
    own = PRESETS.get(config.model)
    if own is None or not isinstance(model, Llama) or model.config.vocab_size == own.vocab_size:
        return ""
    overrides = {**(config.tables.get(LLAMA) or {}), "vocab_size": own.vocab_size}
    usual = build_skeleton(config.model, own.vocab_size, config.seq_len, overrides)
    return (
        f"the vocabulary is the {model.config.vocab_size:,} tokens of --tokenizer {config.tokenizer}; with the "
        f"{own.vocab_size:,} of {config.model}: {short(sum(param.numel() for param in usual.parameters()))}"
    )


def chosen(text: str, problems: Problems) -> list[str]:
    """The names in `a,b`, or all of them. Notes unknown ones."""
    names = list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    if not names:
        problems.messages.append("--strategy is empty: name at least one, or all")
    for name in names:
        if name not in STRATEGIES and name != "all":
            problems.messages.append(f"--strategy {name}: no such strategy{nearest(name, [*STRATEGIES, 'all'])}")
    return list(STRATEGIES) if "all" in names else [name for name in names if name in STRATEGIES]


def read(text: str | None, problems: Problems) -> float | None:
    """Bits per second; None if not stated. Notes a rate that can't be read."""
    if text is None:
        return None
    with problems.collect():
        rate = read_rate(text)
        if rate:
            return rate
        raise ConfigError(f"rate {text!r} must be above 0; nearest: '1mbit'")
    return None


def mesh_of(config: ExplainConfig) -> MeshShape:
    """The axes of the ranks. Raises ConfigError for a mesh that does not match the number of ranks."""
    num_ranks = config.nodes * config.local_size
    shape = MeshShape({"data": num_ranks}) if config.mesh is None else MeshShape.parse(config.mesh)
    if config.stages is not None and config.stages != shape.pipeline:
        if config.mesh is not None or num_ranks % config.stages:
            raise ConfigError(
                f"--stages {config.stages}: must divide the {num_ranks} ranks, and leave --mesh out; nearest: "
                f"--nodes {config.stages} --local-size 1"
            )
        shape = MeshShape({"pipeline": config.stages, "data": num_ranks // config.stages})
    if shape.island_size is not None:
        raise ConfigError(
            f"--mesh {config.mesh}: here every node is an island of strategies that have any; nearest: "
            f"--nodes {shape.sizes['island']} --local-size {shape.island_size}, without --mesh"
        )
    if shape.world_size != num_ranks:
        raise ConfigError(
            f"--mesh {config.mesh} has {shape.world_size} ranks, and {config.nodes} nodes of {config.local_size} have "
            f"{num_ranks}: the two must be equal"
        )
    return shape


def cut(model: nn.Module, size: int) -> nn.Module:
    """One rank's part of the model on a tensor axis. Raises ConfigError for a model that can't be cut here."""
    if not isinstance(model, Llama):
        raise ConfigError(f"a tensor axis of {size} ranks: only presets such as demo can be cut here; nearest: 1")
    cut_skeleton(model, size)
    return model


def stage_of(model: nn.Module, config: ExplainConfig, shape: MeshShape) -> tuple[nn.Module, list[tuple[str, str, str]]]:
    """The part of the model on its largest stage, and notes on the cut and on what crosses a border."""
    stages = shape.pipeline
    if not isinstance(model, Llama) or shape.tensor > 1:
        raise ConfigError(f"{stages} stages: only presets such as demo, without a tensor axis, can be cut here")
    options = Pipeline(**config.tables.get(PIPELINE, {}))
    check_stages(options, stages, len(model.model.layers), config.micro_batches)
    chunks, home, layers = options.num_chunks(stages), options.home(stages), list(model.model.layers)
    numels = [sum(param.numel() for param in layer.parameters()) for layer in layers]
    embedding, head = model.model.embed_tokens, model.lm_head
    operations = list(map(float, numels))
    operations[0 if options.head == "first" else -1] += head.weight.numel()
    sizes = (
        stated_sizes(options.layers, chunks, len(layers))
        if options.layers
        else balanced(operations, list(map(float, numels)), chunks)
    )
    parts = [nn.ModuleDict() for _ in range(stages)]
    ends = list(accumulate(sizes))
    for chunk, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        parts[home[chunk]][f"layers{chunk}"] = nn.ModuleList(layers[end - size : end])
    parts[home[0]]["embedding"] = embedding
    if home[-1] == home[0] or head.weight is not embedding.weight:
        parts[home[-1]]["head"] = head
    parts[home[-1]]["norm"] = model.model.norm
    largest = max(parts, key=lambda part: sum(param.numel() for param in part.parameters()))
    notes = options.describe(sizes, model.config.hidden_size, 4)
    crossing, num = options.crossing(0), config.seq_len * model.config.hidden_size
    sent = {way: crossing.packet_bytes(way, num, torch.float32) for way in ("forward", "backward")}
    per_step = config.micro_batches * sum(sent.values())
    each = ", ".join(f"{bytes_text(count)} {way}" for way, count in sent.items())
    effect = f"{bytes_text(per_step)} a step both ways, in {config.micro_batches} micro-batch(es) of one sequence"
    notes.append(
        ("each border between two stages", effect, f"{each}; not in the table, and as much for each sequence more")
    )
    if head.weight is embedding.weight and home[-1] != home[0]:
        tied = bytes_text(4 * head.weight.numel())
        notes.append(("tied embedding and head", f"{tied} a step each way", "between the first and the last stage"))
    return largest, notes


def plan_on(
    strategy: Method, model: nn.Module, whole: nn.Module, config: ExplainConfig, shape: MeshShape
) -> MethodPlan:
    """The plan of a strategy on the data axis of a mesh; the ranks' word on a step goes to all of the mesh.

    model: what a rank has of the `whole` one, in whose parameters the word has room.
    """
    # Ranks of a stage are neighbours, those of another axis are others.
    grid, inner = Topology(config.nodes, config.local_size), shape.tensor * shape.pipeline
    if inner == 1:
        return strategy.plan(model, grid, config.micro_batches)
    along = Topology(grid.num_nodes, grid.local_size // inner) if grid.local_size % inner == 0 else None
    if shape.pipeline > 1:
        size = min(grid.local_size, shape.sizes["data"])
        along = Topology(shape.sizes["data"] // size, size) if shape.sizes["data"] % size == 0 else None
    num_replicas = grid.world_size // inner
    plan = strategy.plan(model, along or Topology(num_replicas, 1), config.micro_batches)
    num_told = max(2, num_replicas) - 1
    word = strategy.plan(whole, Topology(num_told + 1, 1), 1).sent["all_gather_exact", "inter"] // num_told
    words = {("all_gather_exact", level): sent for level, sent in gather_bytes(grid, word).items()}
    return replace(plan, sent={**plan.sent, **words})


def tensor_note(config: LlamaConfig, seq_len: int, shape: MeshShape) -> tuple[str, str, str]:
    """Row about torch's own traffic on the tensor axis, which the plans do not count."""
    activations = 4 * seq_len * config.hidden_size
    sent = 4 * config.num_hidden_layers * 2 * (shape.tensor - 1) * activations // shape.tensor
    why = "four all_reduce of the activations in every layer, in fp32 by torch; not in the table"
    return f"tensor axis of {shape.tensor} ranks", f"{bytes_text(sent)} a rank for each sequence of a step", why


def model_of(config: ExplainConfig) -> nn.Module:
    """The model, or a stand-in with that many parameters, on the device "meta". Raises ConfigError."""
    if config.parameters is not None:
        return stand_in(int(config.parameters))
    tokenizer = load_tokenizer(config.tokenizer)
    overrides = None if config.model.startswith("hf:") else config.tables.get(LLAMA)
    return build_skeleton(config.model, tokenizer.vocab_size, config.seq_len, overrides)


def stand_in(num_parameters: int) -> nn.Module:
    """Layers of one matrix each, of nearly equal sizes, and one matrix of a single row for the remainder."""
    rows, rest = divmod(num_parameters, WIDTH)
    sizes = [(rows // NUM_LAYERS + (layer < rows % NUM_LAYERS), WIDTH) for layer in range(NUM_LAYERS)]
    shapes = [shape for shape in (*sizes, (1, rest)) if shape[0] * shape[1]]
    model = nn.Module()
    model.layers = nn.ModuleList(matrix(shape) for shape in shapes)
    return model


def matrix(shape: tuple[int, int]) -> nn.Module:
    """A module with one weight."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(shape, device="meta"))
    return module


def notes_on(config: ExplainConfig, names: list[str]) -> Iterator[tuple[str, str, str]]:
    """Rows about options without an effect."""
    used = {strategy_table(name) for name in names}
    used |= {LLAMA} if config.parameters is None and not config.model.startswith("hf:") else set()
    for table in sorted(config.tables.keys() - used):
        for option in config.tables[table]:
            yield flag(f"{table}.{option}"), "no effect", "nothing that is explained uses it"
    for name in ("model", "tokenizer", "seq_len") if config.parameters is not None else ():
        if getattr(config, name) != getattr(ExplainConfig(), name):
            yield f"{flag(name)} {getattr(config, name)}", "no effect", "--parameters stands for the model"
    if config.rate is not None and config.nodes == 1:
        yield f"--rate {config.rate}", "no effect", "there is one node"
    if config.local_rate is not None and config.local_size == 1:
        yield f"--local-rate {config.local_rate}", "no effect", "there is one rank on each node"
