"""Operations of a forward, and the activations it keeps for its backward, without running it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from thinwire._compat import flop_counter
from thinwire.losses import cut_loss
from thinwire.models import Llama
from thinwire.models.llama import LlamaConfig
from thinwire.models.moe_config import MoEConfig
from thinwire.models.tensor import cut_skeleton


@dataclass(frozen=True)
class Forward:
    """operations: floating-point operations of a forward. kept_bytes: bytes of activations that its backward needs."""

    operations: float
    kept_bytes: float


def forward_of(config: LlamaConfig, batch: int, seq_len: int, *, is_cut: bool = False, tensor: int = 1) -> Forward:
    """The forward of the loss of `batch` sequences, counted by torch on tensors without memory, with a CPU's kernels.

    is_cut: with `--loss cut`, whose forward also computes the head's gradient; that counts as backward, not here.
    tensor: number of ranks over which matrices are cut; the result is one rank's forward. The forward of a mixture is
    that of a dense model of the same work.
    """
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with FakeTensorMode():
        model = Llama(dense_of(config))
        cut_skeleton(model, tensor)
        tokens = torch.zeros(batch, seq_len, dtype=torch.int64)
        given = {each.untyped_storage()._cdata for each in (*model.parameters(), tokens)}
        with flop_counter() as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model(tokens, tokens)
        if is_cut:
            kept.clear()
            cut_loss(model, model.lm_head)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                model(tokens, tokens)
        num_bytes = sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in given)
        num_bytes -= model.lm_head.weight.nbytes if is_cut else 0
    return Forward(counter.get_total_flops(), num_bytes)


def dense_of(config: LlamaConfig) -> LlamaConfig:
    """Sizes of a dense model with as many operations, if the router sends equally many rows to each expert."""
    if not isinstance(config, MoEConfig):
        return config
    own = {item.name: getattr(config, item.name) for item in fields(LlamaConfig)}
    return LlamaConfig(**{**own, "intermediate_size": config.num_experts_per_tok * config.intermediate_size})


@cache
def layer_and_ends(
    config: LlamaConfig, seq_len: int, *, is_cut: bool = False, tensor: int = 1, batch: int = 1
) -> tuple[Forward, Forward]:
    """The forward of one sequence or of `batch`: of one layer (all are alike), and of all the rest together."""
    one, two = (
        forward_of(replace(config, num_hidden_layers=num), batch, seq_len, is_cut=is_cut, tensor=tensor)
        for num in (1, 2)
    )
    layer = Forward(two.operations - one.operations, two.kept_bytes - one.kept_bytes)
    return layer, Forward(one.operations - layer.operations, one.kept_bytes - layer.kept_bytes)


def kept_of(config: LlamaConfig, batch: int, seq_len: int, *, is_cut: bool = False, tensor: int = 1) -> float:
    """Bytes of the activations that a forward of the whole model keeps; see `forward_of`. As exact, in less time."""
    layer, ends = layer_and_ends(config, seq_len, is_cut=is_cut, tensor=tensor, batch=batch)
    return config.num_hidden_layers * layer.kept_bytes + ends.kept_bytes
