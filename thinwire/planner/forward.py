"""Operations of a forward, and the activations it keeps for its backward, without running it."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from thinwire._compat import flop_counter
from thinwire.losses import cut_loss
from thinwire.models import Llama
from thinwire.models.llama import LlamaConfig
from thinwire.models.moe_config import MoEConfig
from thinwire.models.tensor import cut_skeleton


@dataclass(frozen=True)
class Forward:
    """A forward.

    Attributes:
        operations: floating-point operations.
        kept_bytes: of activations that its backward needs.
        copied_bytes: of the copies of weights in bf16 that its backward needs, for any number of sequences.
    """

    operations: float
    kept_bytes: float
    copied_bytes: float = 0.0

    def kept(self, times: float) -> float:
        """Bytes that the backward of so many times these sequences needs."""
        return times * self.kept_bytes + self.copied_bytes


def forward_of(
    config: LlamaConfig, batch: int, seq_len: int, *, is_cut: bool = False, tensor: int = 1, dtype: str = "fp32"
) -> Forward:
    """The forward of the loss of `batch` sequences, counted by torch on tensors without memory, with a CPU's kernels.

    is_cut: with `--loss cut`, whose forward also computes the head's gradient; that counts as backward, not here.
    tensor: number of ranks over which matrices are cut; the result is one rank's forward. dtype: the compute type,
    "fp32" or "bf16"; with that, matrices are copied, and their products are kept, in 2 bytes an element. The forward of
    a mixture is that of a dense model of the same work.
    """
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with FakeTensorMode():
        model = Llama(dense_of(config))
        cut_skeleton(model, tensor)
        copied = narrow(model) if dtype == "bf16" else 0
        tokens = torch.zeros(batch, seq_len, dtype=torch.int64)
        given = {each.untyped_storage()._cdata for each in (*model.parameters(), tokens)}
        casts = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16")
        with flop_counter() as counter, casts, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model(tokens, tokens)
        if is_cut:
            kept.clear()
            cut_loss(model, model.lm_head)
            with casts, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                model(tokens, tokens)
        num_bytes = sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in given)
        num_bytes -= model.lm_head.weight.nbytes if is_cut else 0
    return Forward(counter.get_total_flops(), num_bytes, copied)


def narrow(model: Llama) -> int:
    """Put the weights of all products into bf16, and return their bytes: a run has these copies beside the weights."""
    products = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for module in products:
        module.weight = nn.Parameter(module.weight.detach().bfloat16())
    return sum(module.weight.nbytes for module in products)


def dense_of(config: LlamaConfig) -> LlamaConfig:
    """Sizes of a dense model with as many operations, if the router sends equally many rows to each expert."""
    if not isinstance(config, MoEConfig):
        return config
    own = {item.name: getattr(config, item.name) for item in fields(LlamaConfig)}
    return LlamaConfig(**{**own, "intermediate_size": config.num_experts_per_tok * config.intermediate_size})


@cache
def layer_and_ends(
    config: LlamaConfig, seq_len: int, *, is_cut: bool = False, tensor: int = 1, batch: int = 1, dtype: str = "fp32"
) -> tuple[Forward, Forward]:
    """The forward of one sequence or of `batch`: of one layer (all are alike), and of all the rest together."""
    one, two = (
        forward_of(replace(config, num_hidden_layers=num), batch, seq_len, is_cut=is_cut, tensor=tensor, dtype=dtype)
        for num in (1, 2)
    )
    pairs = list(zip(astuple(one), astuple(two), strict=True))
    return Forward(*(b - a for a, b in pairs)), Forward(*(2 * a - b for a, b in pairs))


def kept_of(config: LlamaConfig, batch: int, seq_len: int, *, is_cut: bool = False, tensor: int = 1) -> float:
    """Bytes of the activations that a forward of the whole model keeps; see `forward_of`. As exact, in less time."""
    layer, ends = layer_and_ends(config, seq_len, is_cut=is_cut, tensor=tensor, batch=batch)
    return config.num_hidden_layers * layer.kept_bytes + ends.kept_bytes
