"""The model that `thinwire explain` prices, on its ranks, and rows about both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from thinwire.collectives import Topology
from thinwire.cost import Network
from thinwire.flags import flag
from thinwire.layout.mesh import MeshShape, axes_of
from thinwire.losses import loss_in_effect
from thinwire.methods.interface import Method, MethodPlan
from thinwire.methods.sequence import SequenceParallel, Shape, facts
from thinwire.methods.sequence.traffic import DELAY_S, LOCAL_RATE, RATE
from thinwire.methods.tables import by_tokens
from thinwire.models import Llama
from thinwire.models.llama import LlamaConfig
from thinwire.models.tensor import activation_bytes
from thinwire.options import EXPERTS, PIPELINE, RESIDENCY, SEQUENCE, made, model_table, strategy_table
from thinwire.planner.asked import tokens_of
from thinwire.planner.experts import capacity_notes, expert_notes
from thinwire.planner.forward import kept_of
from thinwire.planner.options import AUTO, ExplainConfig
from thinwire.planner.search import Search
from thinwire.planner.settings import name_of, train_flags
from thinwire.planner.stages import Grid, Stages
from thinwire.registry import STRATEGIES
from thinwire.report.frontier import recommended
from thinwire.report.units import bytes_text, short
from thinwire.run.places import NO_STORE
from thinwire.table import Row

# Why a strategy computes more.
MORE_PASSES = "it takes so many forwards and backwards of each micro-batch"


@dataclass(frozen=True)
class LaidOut:
    """The model that is priced, and how it lies on the ranks.

    Args:
        config: with what was found in the place of "auto". names: its strategies.
        total: trained parameters.
        whole: the model. model: what a rank of the tensor axis has of it.
        stages: of a pipeline. grid: its machines. search: what was priced to find the stages.
        notes: rows of (asked for, in effect, why).
    """

    config: ExplainConfig
    names: list[str]
    shape: MeshShape
    total: int
    whole: nn.Module
    model: nn.Module
    stages: Stages | None
    grid: Grid | None
    search: Search | None
    notes: list[Row]

    @property
    def replicas(self) -> int:
        """Ranks of the data axis."""
        return self.shape.sizes["data"]


def activations_on(laid: LaidOut) -> tuple[float | None, list[Row]]:
    """Bytes that a micro-batch keeps on each rank without stages, and rows on them; None: they are not known."""
    config, shape, model = laid.config, laid.shape, laid.model
    # With stages they are in a table of their own; under a budget too.
    if laid.stages is not None or config.memory is not None:
        return None, []
    if type(model) is not Llama:
        return None, [("activations", "not counted", "they are known of presets such as demo alone, without experts")]
    if shape.sequence > 1:
        return None, [("activations", "not counted", "ranks that share a sequence keep others")]
    num, length = config.micro_batch, config.seq_len
    loss, why = loss_in_effect(config.loss, num * length, model.config.vocab_size)
    kept = kept_of(model.config, num, length, is_cut=loss == "cut", tensor=shape.tensor)
    tokens, why_kept = f"those of {num} sequence(s) of {length:,} tokens", "one micro-batch; nothing computed again"
    return kept, [("activations", tokens, why_kept), (f"--loss {config.loss}", loss, why)]


def sequence_notes(
    config: ExplainConfig, llama: LlamaConfig, shape: MeshShape, rate: float | None, local_rate: float | None
) -> list[Row]:
    """Rows about the ranks that share a sequence, whose messages the plans do not count. Raises ConfigError.

    rate, local_rate: in bits per second.
    """
    asked = config.tables.get(SEQUENCE, {})
    size = shape.sequence
    options = made(SequenceParallel, {**asked, "parallel": size}, SEQUENCE)
    if size == 1:
        return []
    heads, kv_heads = llama.num_attention_heads, llama.num_key_value_heads
    tokens, itemsize = config.micro_batch * config.seq_len, 2 if config.dtype == "bf16" else 4
    attention = Shape(heads, kv_heads, llama.hidden_size // heads, tokens, llama.num_hidden_layers, itemsize)
    local_size = math.gcd(config.local_size, size)
    inter, intra = (usual if each is None else each / 8 for each, usual in ((rate, RATE), (local_rate, LOCAL_RATE)))
    links = Network.even(size, inter, DELAY_S, local_size=local_size, local_rate=intra)
    return facts(options, attention, config.seq_len, config.passes, local_size, links)


def tensor_note(config: LlamaConfig, seq_len: int, shape: MeshShape) -> tuple[str, str, str]:
    """Row about torch's own traffic on the tensor axis, which the plans do not count."""
    layers = -(-config.num_hidden_layers // shape.pipeline)
    sent = activation_bytes(config, seq_len, shape.tensor, layers)
    why = "four all_reduce of the activations in every layer, in fp32 by torch; not in the table"
    return f"tensor axis of {shape.tensor} ranks", f"{bytes_text(sent)} a rank for each sequence of a step", why


def notes_on_methods(methods: Mapping[str, Method]) -> Iterator[Row]:
    """Rows about strategies that compute more than others."""
    for name, method in methods.items():
        if method.num_passes > 1:
            yield f"computing of {name}", f"{method.num_passes} times that of others", MORE_PASSES


def notes_on_tables(methods: Mapping[str, Method], plans: Mapping[str, MethodPlan], laid: LaidOut) -> Iterator[Row]:
    """Rows about embeddings whose gradients travel by rows, where the plans count them so."""
    if laid.shape.expert * laid.shape.tensor * laid.shape.pipeline > 1:
        return
    grid = Topology(laid.config.nodes, laid.config.local_size)
    for name, method in methods.items():
        for asked, effect, why in by_tokens(plans[name], method, laid.model, grid, tokens_of(laid.config))[1]:
            yield f"{name}: {asked}", effect, why


def notes_on_ranks(laid: LaidOut, rate: float | None, local_rate: float | None) -> Iterator[Row]:
    """Rows about what ranks share besides the plans. Raises ConfigError for what they can't."""
    config, shape, model = laid.config, laid.shape, laid.model
    if isinstance(model, Llama):
        yield from sequence_notes(config, model.config, shape, rate, local_rate)
        yield from capacity_notes(model, config, shape)
        if shape.expert > 1:
            yield from expert_notes(model, config, shape)
    if rate is not None and config.nodes > 1:
        name = config.model if config.parameters is None else f"a model of {short(config.parameters)} parameters"
        method, why = recommended(rate, name)
        as_flags = f"; thinwire train {train_flags(method)}" if name_of(method) in STRATEGIES else ""
        yield "method for this rate", method, why + as_flags
    if isinstance(model, Llama) and shape.tensor > 1:
        yield tensor_note(model.config, config.seq_len, shape)


def notes_on(config: ExplainConfig, names: list[str], counts: bool, searched: bool) -> Iterator[Row]:
    """Rows about options without an effect.

    counts: activations without stages are counted. searched: the number of stages was found.
    """
    used = {strategy_table(name) for name in names}
    used |= {model_table(config.model)} if config.parameters is None else set()
    used |= {table for table in (SEQUENCE, EXPERTS) if config.tables.get(table, {}).get("parallel", 1) > 1}
    used |= {EXPERTS} if "expert" in axes_of(config.mesh) else set()
    used |= {PIPELINE} if config.stages is not None or "pipeline" in axes_of(config.mesh) else set()
    used |= {RESIDENCY} if config.memory is not None else set()
    for table in sorted(config.tables.keys() - used):
        for option in config.tables[table]:
            yield flag(f"{table}.{option}"), "no effect", "nothing that is explained uses it"
    if config.dtype != ExplainConfig().dtype and not used & {SEQUENCE, EXPERTS} and EXPERTS not in config.tables:
        yield f"--dtype {config.dtype}", "no effect", "it is of rows that travel, to experts or in a sequence"
    for name in ("model", "tokenizer", "seq_len") if config.parameters is not None else ():
        if getattr(config, name) != getattr(ExplainConfig(), name):
            yield f"{flag(name)} {getattr(config, name)}", "no effect", "--parameters stands for the model"
    for name in ("store", "disk_rate", "activations", "slices") if config.memory is None else ():
        if (stated := getattr(config, name)) is not None:
            yield f"{flag(name)} {stated}", "no effect", "nothing is placed without --memory"
    if config.memory is not None and config.store not in (None, NO_STORE):
        yield f"--store {config.store}", "no effect", "nothing is written, so any folder does"
    if config.stages is None:
        of_pass = () if counts or used & {SEQUENCE, EXPERTS} or config.memory is not None else ("micro_batch",)
        of_step = () if config.memory is not None else ("gflops",) if counts else ("gflops", "loss")
        for name in (*of_pass, *of_step, "memory_gb"):
            if getattr(config, name) != getattr(ExplainConfig(), name):
                yield f"{flag(name)} {getattr(config, name)}", "no effect", "it is for --stages"
    elif config.memory_gb and not searched and config.tables.get(PIPELINE, {}).get("recompute") != AUTO:
        yield (
            f"--memory-gb {config.memory_gb:g}",
            "no effect",
            f"it is for --stages {AUTO} and --pipeline.recompute {AUTO}",
        )
    if config.rate is not None and config.nodes == 1:
        yield f"--rate {config.rate}", "no effect", "there is one node"
    if config.local_rate is not None and config.local_size == 1:
        yield f"--local-rate {config.local_rate}", "no effect", "there is one rank on each node"
