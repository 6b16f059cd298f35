"""Which sizes of a step can be planned for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thinwire.errors import ConfigError
from thinwire.methods.pipeline.options import Pipeline
from thinwire.models import Llama, MoELlama
from thinwire.options import EXPERTS, PIPELINE, SEQUENCE, Tables
from thinwire.planner.options import AUTO


def wrong_sizes(
    llama: Llama, num_ranks: int, *, tokens_per_step: int, seq_len: int, micro_batch: int, stages: int | None
) -> Iterator[str]:
    """Yield what is wrong with the sizes of a step, a message each."""
    for option, size in (("seq-len", seq_len), ("micro-batch", micro_batch)):
        if size < 1:
            yield f"--{option} {size}: must be at least 1; nearest: 1"
    if stages is not None:
        yield from wrong_stages(llama, num_ranks, stages)
    if seq_len >= 1 and (tokens_per_step < 1 or tokens_per_step % seq_len):
        yield (
            f"--tokens-per-step {tokens_per_step}: must be a multiple of --seq-len {seq_len}, and above 0; nearest: "
            f"{shared_evenly(tokens_per_step, seq_len, num_ranks)}, which all ranks share evenly"
        )


def wrong_stages(llama: Llama, num_ranks: int, stages: int) -> Iterator[str]:
    """Yield why a model can't be cut into this many stages on these ranks."""
    num_layers = len(llama.model.layers)
    most = 1 if isinstance(llama, MoELlama) else num_layers
    if stages < 1 or stages > most or num_ranks % stages:
        why = "a mixture has one stage" if most < num_layers else f"the model has {num_layers} layers"
        near = min((n for n in range(1, most + 1) if num_ranks % n == 0), key=lambda n: abs(n - stages))
        yield f"--stages {stages}: must divide the {num_ranks} ranks, and {why}; nearest: {near}"


def wrong_experts(llama: Llama, tables: Tables) -> Iterator[str]:
    """Yield why ranks can't share the experts of a model as is stated: it has none."""
    experts = tables.get(EXPERTS, {}).get("parallel", AUTO)
    if experts not in (AUTO, 1) and not isinstance(llama, MoELlama):
        near = "a mixture such as moe-tiny, or leave it out"
        yield f"--experts.parallel {experts}: the model has no experts; nearest: {near}"


def shared_evenly(tokens_per_step: int, seq_len: int, num_ranks: int) -> int:
    """The nearest number of tokens of which each rank has equally many sequences."""
    return max(1, round(tokens_per_step / seq_len / num_ranks)) * seq_len * num_ranks


def no_mesh(
    num_ranks: int, tokens_per_step: int, seq_len: int, tables: Tables, strategies: Sequence[str] | None,
    stages: int | None, tensor: int | None = None,
) -> ConfigError:  # fmt: skip
    """Why no way to train was found for valid sizes. Raises ConfigError for options of a pipeline that contradict."""
    near, num_sequences = shared_evenly(tokens_per_step, seq_len, num_ranks), tokens_per_step // seq_len
    if near != tokens_per_step:
        return ConfigError(
            f"--tokens-per-step {tokens_per_step}: no mesh of {num_ranks} ranks shares {num_sequences} sequences "
            f"evenly; nearest: {near}"
        )
    Pipeline(**tables.get(PIPELINE, {}))
    stated = {"--strategies": ",".join(strategies or ()), "--stages": stages or ""}
    stated |= {f"--pipeline.{name}": value for name, value in tables.get(PIPELINE, {}).items()}
    experts = tables.get(EXPERTS, {}).get("parallel", AUTO)
    sequence = tables.get(SEQUENCE, {}).get("parallel", "")
    stated |= {"--tensor": tensor or "", "--sequence.parallel": sequence}
    stated |= {"--experts.parallel": "" if experts == AUTO else experts}
    named = " ".join(f"{option} {value}" for option, value in stated.items() if value != "")
    return ConfigError(f"no mesh of {num_ranks} ranks has all of {named}; nearest: leave one of these out")
