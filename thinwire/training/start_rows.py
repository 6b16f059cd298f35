"""Rows of the start-up table that only a built engine knows: what travels beside a strategy's bytes, and on options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from thinwire.hosts.experts.parallel import ExpertRanks
from thinwire.hosts.offload.sampling import norms_bytes
from thinwire.hosts.pipeline.stage import PipelineStage
from thinwire.hosts.sequence import SequenceRanks
from thinwire.hosts.sequence.seams import attention_of
from thinwire.methods.experts.traffic import sent
from thinwire.methods.sequence.traffic import most_sent
from thinwire.models.hf import HFCausalLM
from thinwire.models.seam import mixture_of
from thinwire.models.tensor import activation_bytes
from thinwire.report.units import bytes_text
from thinwire.table import Row
from thinwire.training.advice import advise
from thinwire.training.engine import Engine
from thinwire.training.ways import even_rows

# Why the meter lacks what a tensor axis sends.
NOT_COUNTED = "sums in every layer, by torch itself: not counted in the bytes of a step"


def rows_on_links(engine: Engine) -> list[Row]:
    """Rows on what would suit the links better; a collective, since ranks measure together."""
    if engine.stage.pipeline is not None:
        return []
    tokens_per_rank = engine.batch.tokens_per_step // engine.num_shares
    dtype = torch.bfloat16 if engine.dtype == "bf16" else torch.float32
    choice, strategy = engine.choice, engine.config.strategy
    measured = (None, None) if choice is None else (choice.link_rate, choice.flops)
    given = engine.optimizer, strategy, engine.num_parameters, tokens_per_rank, dtype, engine.device
    return list(advise(*given, *measured))


def rows_on_options(engine: Engine) -> Iterator[Row]:
    """Rows on what ranks send each other beside a strategy's bytes, and on a sample and a teacher."""
    config, lessons, stage = engine.config, engine.distillation, engine.stage
    if stage.pipeline is not None:
        yield border_row(engine, stage.pipeline)
    if engine.choice is not None:
        yield from engine.choice.rows
    if (norms := norms_row(engine)) is not None:
        yield norms
    if engine.why_whole:
        what = "the disk" if stage.pipeline is None else "the own stage"
        yield f"weights of {what} alone", "the whole model on every rank, at first", engine.why_whole
    if engine.is_uncounted:
        why = "of such a model nobody knows them without a step of it: leave room for them"
        yield "activations", "not counted in the budget", why
    optimizer = engine.optimizer
    if config.sample_tokens and (optimizer.weights_pass or optimizer.weights_stay_cut):
        where = "read all weights from the disk" if optimizer.weights_pass else "gather all weights"
        why = f"every token would {where}; `thinwire generate` needs them in memory"
        yield f"--sample-tokens {config.sample_tokens}", "none", why
    if lessons is not None:
        why = "stated" if config.teacher_weight is not None else "with which both losses are equal before this step"
        yield f"--teacher {config.teacher}", f"its experts teach, weight {lessons.weight:.4g}", why
    if engine.end is not None:
        why = f"token {engine.end} ends a document, and is not asked what follows it"
        yield "--documents", "a token attends to its own document alone", why
    if config.mesh_shape.tensor > 1:
        yield tensor_row(engine)
    if stage.sequence is not None:
        yield sequence_row(engine, stage.sequence)
    if stage.experts is not None and stage.experts.placement.ranks > 1:
        yield expert_row(engine, stage.experts)


def norms_row(engine: Engine) -> Row | None:
    """A row about the norms of seen sequences, which grow until all sequences were seen; None: there are none."""
    residency = None if engine.choice is None else engine.choice.residency
    if residency is None or residency.sampled is None or not engine.come_again:
        return None
    num_ranks = engine.optimizer.comm.world_size
    most = norms_bytes(engine.model, engine.config.seq_len, engine.loader.num_sequences, num_ranks)
    where = "on this rank's disk" if residency.store is not None else "of this rank's memory, besides a budget"
    why = f"{engine.loader.num_sequences:,} sequences come again; they grow as these are seen for the first time"
    return "norms of seen sequences", f"at most {bytes_text(most)} {where}", why


def border_row(engine: Engine, pipeline: PipelineStage) -> Row:
    """A row about what stages send each other in a step."""
    shown = ", ".join(f"{num / 1e6:.3f}" for num in pipeline.sent_bytes(engine.batches_on_meta))
    whole = engine.stage.uncompressed_bytes_per_step / 1e6
    why = f"whole models on all ranks that average gradients in fp32 would send {whole:.3f} MB each"
    return "stages send each other, a step", f"{shown} MB, by rank of a pipeline", why


def tensor_row(engine: Engine) -> Row:
    """A row about what torch sends on the tensor axis in a step, which no meter counts."""
    model, shape, batch = engine.model, engine.config.mesh_shape, engine.batch
    of_model: Any = model.model.config if isinstance(model, HFCausalLM) else model.config
    tokens = batch.micro_batch * batch.accumulation * engine.config.seq_len
    layers, itemsize = -(-of_model.num_hidden_layers // shape.pipeline), 2 if engine.dtype == "bf16" else 4
    num_bytes = activation_bytes(of_model, tokens, shape.tensor, layers, itemsize)
    return "ranks of a tensor axis send each other, a step", f"about {num_bytes / 1e6:.3f} MB a rank", NOT_COUNTED


def expert_row(engine: Engine, experts: ExpertRanks) -> Row:
    """A row about the rows that travel to experts and back in a step, beside gradients and weights."""
    sizes, placement, local = mixture_of(engine.model), experts.placement, experts.comm.topology.local_size
    assert sizes is not None
    part_numel = placement.experts * sizes.expert_numel // placement.ranks
    of_layer = sent(placement, even_rows(engine), experts.options, part_numel, local)
    own = sum(num_bytes for (rank, _), num_bytes in of_layer.items() if rank == experts.comm.rank)
    of_step = own * sizes.layers * engine.batch.accumulation
    why = f"in {sizes.layers} layers, with an even router; each step counts what it was"
    return "rows to experts and back, a step, besides", f"about {of_step / 1e6:.3f} MB a rank", why


def sequence_row(engine: Engine, sequence: SequenceRanks) -> Row:
    """A row about what the ranks of a sequence send each other in a step."""
    config, batch = engine.config, engine.batch
    tokens, itemsize = batch.micro_batch * config.seq_len, 2 if engine.dtype == "bf16" else 4
    shape = replace(attention_of(engine.model, tokens, itemsize), forwards=engine.forwards)
    most = batch.accumulation * most_sent(sequence.layout, shape, sequence.options, config.seq_len)
    effect, why = f"{most / 1e6:.3f} MB a rank", f"in {shape.layers} layers"
    if config.documents and sequence.layout.ring > 1:
        effect, why = f"at most {effect}", f"{why}; blocks without a document in common do not travel"
    return "ranks of a sequence send each other, a step", effect, why
