"""Which sizes of a step can be planned for."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from thinwire.calibration.machine import COMPUTE_TYPES
from thinwire.cost import Machine
from thinwire.errors import ConfigError, nearest
from thinwire.methods.memory import Residency
from thinwire.methods.pipeline.options import Pipeline
from thinwire.models import Llama, MoELlama
from thinwire.options import EXPERTS, PIPELINE, SEQUENCE, Tables, option_tables
from thinwire.planner.options import AUTO

LOSSES = ("auto", "plain", "cut")
# Over which ranks may be divided. Stages are searched in any case, and experts of a mixture.
ALL_AXES = ("tensor", "sequence", "island")


def wrong_arguments(
    model: Any, machine: Any, counts: Mapping[str, Any], axes: Collection[str], tables: Tables,
    residency: Mapping[str, Any], reserved_bytes: float,
) -> Iterator[str]:  # fmt: skip
    """Yield what is wrong with the arguments of `plan` that flags do not check before, a message each.

    counts: whole numbers of at least 1, by the name of the argument; None: not stated.
    """
    if not isinstance(model, str | Llama):
        yield f"model {type(model).__name__}: must be the name of a preset, or a model of thinwire; nearest: 'demo'"
    if not isinstance(machine, Machine):
        yield f"machine {machine!r}: must be a Machine; nearest: thinwire.calibrate(comm), or Machine.read(path)"
    for name, value in counts.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        # What is too small of the others is told with what would fit.
        if value is not None and not (is_whole and (value >= 1 or name not in ("vocab_size", "tensor"))):
            yield f"{name} {value!r}: must be a whole number of at least 1; nearest: {nearest_whole(value)}"
    for axis in axes:
        if axis not in ALL_AXES:
            yield f"axes: {axis!r} is no axis of a plan{nearest(str(axis), ALL_AXES)}"
    for name in tables:
        if name not in option_tables():
            yield f"tables: no such table {name!r}{nearest(name, option_tables())}"
    known = [item.name for item in fields(Residency)]
    for name in residency:
        if name not in known or name == "memory":
            yield f"residency: no such option {name!r}{nearest(name, [each for each in known if each != 'memory'])}"
    # NaN is not at least 0.
    if not reserved_bytes >= 0:
        yield f"reserved_bytes {reserved_bytes:g}: must be at least 0; nearest: 0"


def wrong_choices(memory_bytes: float | None, dtype: str, loss: str) -> list[str]:
    """Messages about a memory, a dtype and a loss that can't be."""
    messages = []
    # NaN is above nothing.
    if memory_bytes is not None and not memory_bytes > 0:
        messages.append(f"memory_bytes {memory_bytes:g}: must be above 0; nearest: None, all of the machine's")
    for name, value, known in (("dtype", dtype, COMPUTE_TYPES), ("loss", loss, LOSSES)):
        if value not in known:
            messages.append(f"{name} {value!r}: no such choice{nearest(value, known)}")
    return messages


def nearest_whole(value: Any) -> int:
    """The whole number of at least 1 that is nearest to a value; 1 for what is no finite number."""
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return max(1, round(value)) if is_number else 1


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
