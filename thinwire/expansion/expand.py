"""Writes the folder of a larger model, some rows at a time, and compares what it computes with the small one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint.weights_folder import TensorParts, new_folder, write_weights
from thinwire.convert.origin import ModelOrigin, load_folder, open_origin
from thinwire.convert.verify import KeptLogits, UnfaithfulError
from thinwire.errors import ConfigError
from thinwire.expansion.families import Growth
from thinwire.expansion.roles import ALL_ZERO, CANCELLING, KEPT, Draw, GrownTensor
from thinwire.models.llama import next_token_loss

INSERTED = {"cancelling": CANCELLING, "zero": ALL_ZERO}
# What config.json of old and new versions of transformers calls it.
IN_FP32 = {"torch_dtype": "float32", "dtype": "float32"}
# Of logits in fp32, relative to the largest: rounding of the larger model's longer sums.
MOST_ERROR = 1e-3
# Of a folder in bf16 or fp16, whose larger model was right before its weights were rounded: what is still of use.
MOST_ROUNDED = 0.1
# Of a tensor that are in memory at a time.
PART_BYTES = 64 << 20


@dataclass(frozen=True)
class Expanded:
    """Result of an expansion.

    error: largest difference of logits on held-out text, relative to the largest logit. loss: both models' mean
    next-token loss there, in nats; None of a classifier. unrounded: the error before weights were rounded to the dtype
    of the source; None where it rounds nothing.
    """

    num_parameters: int
    num_small: int
    num_tokens: int
    error: float
    loss: tuple[float, float] | None
    unrounded: float | None = None


def expand(
    source: str,
    to: str | Path,
    *,
    hidden_size: int | None = None,
    layers: int | None = None,
    intermediate_size: int | None = None,
    inserted: str = "cancelling",
    seed: int = 0,
    data: str | None = None,
    sequences: int = 16,
) -> Expanded:
    """Write a wider and deeper model with the same outputs as a folder of transformers, and prove it on held-out text.

    New weights are drawn by (seed, name, element): a tensor, or some of its rows, can be expanded alone.

    Args:
        source: a run directory, or `hf:DIR`; a Llama, Mistral, Qwen2, Qwen3, GPT-2 or BERT.
        to: the folder to write.
        hidden_size, layers, intermediate_size: of the larger model; by default those of the small one, the last in
            proportion to the width.
        inserted: last matrices of inserted layers: "cancelling" (type 2) or "zero" (type 1).
        seed: of the new weights.
        data: text to compare both models on; by default the run's own, or stdlib.
        sequences: largest number of held-out sequences to compare on.

    Raises ConfigError for sizes that no lossless model has, UnfaithfulError if the outputs differ.
    Source: Wang et al., "LEMON: lossless model expansion" (ICLR 2024).
    """
    if inserted not in INSERTED:
        raise ConfigError(f"inserted={inserted!r}: must be one of {', '.join(INSERTED)}")
    origin = open_origin(source)
    growth = Growth.of(origin.settings, hidden_size, layers, intermediate_size)
    with new_folder(Path(to)) as folder:
        tensors, rounds = partial(expanded, origin, growth, seed, INSERTED[inserted]), list[bool]()

        def written() -> Iterator[tuple[str, GrownTensor]]:
            for name, tensor in tensors():
                rounds.append(tensor.dtype != tensor.small.dtype)
                yield name, tensor

        shapes = write_model(folder, growth.large, written())
        is_rounded = any(rounds)
        origin.write_tokenizer(folder)
        small = origin.model()
        num_parameters = sum(shape.numel() for shape in shapes.values())
        num_small = sum(parameter.numel() for parameter in small.parameters())
        texts, has_loss = list(origin.tokens(data, sequences)), not growth.is_classifier
        # One model is in memory at a time.
        with TemporaryDirectory(dir=folder) as kept, TemporaryDirectory(dir=folder) as exact:
            ours = KeptLogits(small, (tokens for tokens, _ in texts), Path(kept), times=1 + is_rounded)
            if not is_rounded:
                return Expanded(num_parameters, num_small, *proof(ours, load_folder(folder), texts, has_loss=has_loss))
            # Rounding would hide a wrong expansion, so the proof is of the weights before it.
            write_model(Path(exact), {**growth.large, **IN_FP32}, ((name, each.unrounded) for name, each in tensors()))
            _, unrounded, _ = proof(ours, load_folder(Path(exact)), texts, has_loss=has_loss)
            told = proof(ours, load_folder(folder), texts, has_loss=has_loss, is_rounded=True)
            return Expanded(num_parameters, num_small, *told, unrounded)


def write_model(
    folder: Path, settings: Mapping[str, Any], tensors: Iterable[tuple[str, GrownTensor]]
) -> dict[str, torch.Size]:
    """Write config.json and weights, a part of a tensor at a time. Return the weights' shapes."""
    (folder / "config.json").write_text(json.dumps(dict(settings), indent=2) + "\n")
    return write_weights(
        folder, ((name, TensorParts(each.shape, each.dtype, each.parts(PART_BYTES))) for name, each in tensors)
    )


def expanded(origin: ModelOrigin, growth: Growth, seed: int, inserted: int) -> Iterator[tuple[str, GrownTensor]]:
    """The tensors of the larger model, made when their rows are asked for.

    An output layer that is shared in the small one is there too.

    inserted: ALL_ZERO or CANCELLING. Raises ConfigError for a tensor without a role.
    """
    givers = {name: name for name in origin.names()}
    shared = growth.family.untied if growth.has_head else {}
    givers |= {name: giver for name, giver in shared.items() if name not in givers}
    for name, giver in givers.items():
        small = origin.tensor(giver)
        exact = small.to(torch.promote_types(small.dtype, torch.float32))
        for target, role, is_inserted in growth.targets(name):
            draw = Draw(seed, target, inserted if is_inserted else KEPT)
            yield target, GrownTensor(exact, role, draw, small.dtype)


@torch.no_grad()
def proof(
    small: Callable[[Tensor], Tensor], large: Callable[[Tensor], Tensor], texts: Sequence[tuple[Tensor, Tensor]], *,
    has_loss: bool = True, is_rounded: bool = False,
) -> tuple[int, float, tuple[float, float] | None]:  # fmt: skip
    """Compare the logits of tokens and targets: number of tokens, error and losses of `Expanded`.

    has_loss: logits are those of words. is_rounded: the large model's weights have been rounded to bf16 or fp16.

    Raises UnfaithfulError if the error is above MOST_ERROR, of a rounded one MOST_ROUNDED, or no number.
    """
    furthest = largest = num_tokens = 0.0
    losses = [0.0, 0.0]
    for tokens, targets in texts:
        ours, theirs = small(tokens), large(tokens)
        furthest = max(furthest, float((ours - theirs).abs().max()), key=lambda x: math.inf if math.isnan(x) else x)
        largest = max(largest, float(ours.abs().max()))
        num_tokens += tokens.numel()
        for place, logits in enumerate((ours, theirs) if has_loss else ()):
            losses[place] += float(next_token_loss(logits, targets)) * tokens.numel()
    error = furthest / largest
    if not error <= (MOST_ROUNDED if is_rounded else MOST_ERROR):
        limit = f"the limit is {MOST_ERROR:g}"
        if is_rounded:
            limit = f"rounded to the source's dtype; the limit is {MOST_ROUNDED:g}; nearest: a source saved in fp32"
        raise UnfaithfulError(
            f"the larger model's logits differ by {error:.3g} of the largest one; {limit}; the folder was deleted"
        )
    return int(num_tokens), error, (losses[0] / num_tokens, losses[1] / num_tokens) if has_loss else None
