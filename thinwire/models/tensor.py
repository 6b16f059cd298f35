"""Cuts the matrices of a model over a tensor axis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from thinwire.errors import ConfigError, Problems
from thinwire.models.hf import HFCausalLM
from thinwire.models.llama import Llama
from thinwire.models.modes import evaluating
from thinwire.models.vocabulary import cut_vocabulary, ends_of, why_whole_vocabulary

# How transformers calls a matrix of x W^T that is cut by columns of the result, and the next one, cut by rows.
COLUMNS, ROWS = "colwise", "rowwise"
# And how an embedding that is cut by rows of the vocabulary.
EMBEDDING = "embedding_rowwise"
# Of the modules of a layer.
LLAMA = dict.fromkeys(
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"), COLUMNS
) | dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), ROWS)
STYLES = {COLUMNS: ColwiseParallel, ROWS: RowwiseParallel}
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
PROBE = (3, 1, 4, 1, 5, 2, 6, 0)


def check_cut(config: Any, size: int) -> None:
    """Raise ConfigError if `size`, the ranks of a tensor axis, does not divide heads and inner width.

    config: a LlamaConfig, or that of a model of transformers, which must say how its matrices are cut.
    """
    problems = Problems()
    for what in DIVIDED:
        value = getattr(config, what, None) or size
        if value % size:
            fits = max(n for n in range(1, size + 1) if value % n == 0)
            problems.messages.append(
                f"a tensor axis of {size} ranks can't cut {what} {value}: must divide it; nearest: {fits}"
            )
    problems.raise_any()
    if hasattr(config, "model_type"):
        plan_of(config)


def tensor_sizes(config: Any, local_size: int) -> list[int]:
    """The numbers of ranks over which a model's matrices can be cut inside of a machine."""
    found = []
    for size in (size for size in range(1, local_size + 1) if local_size % size == 0):
        with suppress(ConfigError):
            check_cut(config, size)
            found.append(size)
    return found


def plan_of(config: Any) -> dict[str, str]:
    """{pattern of module names: COLUMNS or ROWS} of matrices, as transformers states it. Raises ConfigError.

    What it states of the embedding is left out: `why_whole_vocabulary` decides about it.
    """
    stated = getattr(config, "base_model_tp_plan", None)
    if not stated:
        raise ConfigError(
            f"{config.model_type}: transformers states no tensor parallelism for it; nearest: parallelize_module with "
            "a plan of your own, and thinwire.parallelize, or a family such as llama, mistral or qwen2"
        )
    stated = {pattern: style for pattern, style in stated.items() if style != EMBEDDING}
    for pattern, style in stated.items():
        if style not in STYLES:
            raise ConfigError(
                f"{config.model_type}: {pattern} would be {style}, which is not supported on a tensor axis; nearest: a "
                "family that is cut by columns and rows alone, such as llama, mistral or qwen2"
            )
    return stated


def cuts_of(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(module, COLUMNS or ROWS) of every matrix that a tensor axis cuts. Raises ConfigError for an unknown model."""
    if isinstance(model, HFCausalLM):
        below = f"model.{model.model.base_model_prefix}."
        plan = {below + pattern: style for pattern, style in plan_of(model.model.config).items()}
    elif type(model) is Llama:
        plan = {f"model.layers.*.{name}": style for name, style in LLAMA.items()}
    else:
        raise ConfigError(
            f"{type(model).__name__}: which of its matrices to cut is not known; call parallelize_module with a plan "
            "of your own before"
        )
    for name, module in model.named_modules():
        style = next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)
        if style is not None and isinstance(module, nn.Linear):
            yield name, style


def activation_bytes(config: Any, tokens: int, ranks: int, layers: int, itemsize: int = 4) -> int:
    """Payload bytes that a rank of a tensor axis sends for `tokens`: four all_reduce of the activations in a layer.

    Another one behind the embedding, and one of the gradient behind the head, if their rows are cut; the few numbers
    of a token that make up its loss are not counted.

    config: states hidden_size and vocab_size. layers: those that the rank holds.
    """
    sums = 4 * layers + 2 * (config.vocab_size % ranks == 0)
    return sums * 2 * (ranks - 1) * itemsize * tokens * config.hidden_size // ranks


def cut_over(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the matrices of every layer over a tensor axis: heads and inner width by columns, the next matrices by rows.

    A layer then has two all_reduce of the activations in its forward and two in its backward. Embedding and head are
    cut by the rows of the vocabulary, if `why_whole_vocabulary` knows nothing against it. model: a preset, or a
    model of transformers whose config says how it is cut; a few tokens prove that its logits stay the same. Raises
    ConfigError as check_cut does, and for a model that can't be cut this way. A collective over the axis.
    Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
    """
    config = model.model.config if isinstance(model, HFCausalLM) else getattr(model, "config", None)
    check_cut(config, mesh.size())
    cuts = list(cuts_of(model))
    before = probed(model) if isinstance(model, HFCausalLM) else None
    for name, style in cuts:
        parallelize_module(model.get_submodule(name), mesh, STYLES[style]())
    vars(model)["whole_vocabulary"] = why_whole_vocabulary(model, mesh.size())
    if not vars(model)["whole_vocabulary"]:
        cut_vocabulary(*ends_of(model), mesh)
    columns = [name.rpartition(".")[0] for name, style in cuts if style == COLUMNS]
    for name in {name for name in columns if columns.count(name) > 1}:
        model.get_submodule(name).register_forward_pre_hook(SharedInput(mesh), with_kwargs=True)
    if before is None:
        return
    try:
        far = (probed(model) - before).abs().max() / before.abs().max()
    except (RuntimeError, ValueError, TypeError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{type(model.model).__name__} can't be cut over a tensor axis: {why}") from error
    if not far <= 1e-4:
        raise ConfigError(f"{type(model.model).__name__}, cut over a tensor axis, gives other logits, by {far:.1e}")


class SharedInput:
    """Makes the column-cut matrices of a module share one input tensor on the tensor axis.

    Their gradients for it are then added on each rank, and summed over ranks once instead of once per matrix. A forward
    pre-hook; the hidden state is the first tensor with three dimensions.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for place, value in enumerate(args):
            if is_hidden(value):
                return (*args[:place], self._shared(value), *args[place + 1 :]), kwargs
        for name, value in kwargs.items():
            if is_hidden(value):
                return args, {**kwargs, name: self._shared(value)}
        return args, kwargs

    def _shared(self, hidden: Tensor) -> Tensor:
        return DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)

    def __deepcopy__(self, memo: object) -> SharedInput:
        # A mesh is not copied with a model.
        return self


def is_hidden(value: object) -> bool:
    """Whether it is a plain tensor [batch, seq, features]."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim == 3


@torch.no_grad()
def probed(model: nn.Module) -> Tensor:
    """The logits of a few tokens."""
    tokens = torch.tensor([PROBE], device=next(model.parameters()).device)
    with evaluating(model):
        logits: Tensor = model(tokens)
    return logits


def cut_skeleton(model: nn.Module, size: int) -> None:
    """Give a model without memory the shapes of one rank of a tensor axis. Raises as check_cut and cuts_of do."""
    check_cut(model.model.config if isinstance(model, HFCausalLM) else getattr(model, "config", None), size)
    for name, style in list(cuts_of(model)):
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        shape = list(linear.weight.shape)
        shape[0 if style == COLUMNS else 1] //= size
        linear.weight = nn.Parameter(torch.empty(shape, device=linear.weight.device))
        if linear.bias is not None and style == COLUMNS:
            linear.bias = nn.Parameter(torch.empty(shape[0], device=linear.weight.device))
    if not why_whole_vocabulary(model, size):
        embedding, head = ends_of(model)
        are_tied = embedding.weight is head.weight
        for end in (embedding, head):
            end.weight = nn.Parameter(end.weight.new_empty(len(end.weight) // size, end.weight.shape[1]))
            if isinstance(end, nn.Linear) and end.bias is not None:
                end.bias = nn.Parameter(end.bias.new_empty(len(end.weight)))
        if are_tied:
            head.weight = embedding.weight
