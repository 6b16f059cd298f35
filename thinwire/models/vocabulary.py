"""Cuts embedding and head by the rows of the vocabulary over a tensor axis.

The embedding looks up the tokens whose rows are here, and the ranks add up what they found. The head gives the logits
of its rows; the loss is that of all ranks' logits, in two sums of one or two numbers a token, and logits are gathered
only where a model is asked for them.
Source: Shoeybi et al., "Megatron-LM" (2019), section 3; Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM" (2021).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from thinwire.errors import ConfigError
from thinwire.losses import cut_loss, head_of
from thinwire.losses.ranks import ColumnsOfRanks, SameOnRanks, SumOfRanks
from thinwire.models.hf import HFCausalLM
from thinwire.models.llama import Llama


def own_rows(weight: Tensor) -> tuple[Tensor, dist.ProcessGroup]:
    """This rank's rows of a weight that is cut by rows, and the ranks of the others. Gradients flow back to them."""
    if not isinstance(weight, DTensor):
        raise RuntimeError("rows of a vocabulary are used outside of their module's forward")
    return weight.to_local(), weight.device_mesh.get_group()


class CutEmbedding(nn.Embedding):
    """An embedding of which each rank has some rows, the same number on all; its weight is a DTensor in forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        """[..., features] of tokens [...], the same on all ranks."""
        rows, group = own_rows(self.weight)
        first = dist.get_rank(group) * len(rows)
        here = (tokens >= first) & (tokens < first + len(rows))
        padding = None
        if self.padding_idx is not None and 0 <= self.padding_idx - first < len(rows):
            padding = self.padding_idx - first
        found = F.embedding(torch.where(here, tokens - first, 0), rows, padding)
        return SumOfRanks.apply(torch.where(here[..., None], found, 0), group)


class CutHead(nn.Linear):
    """A head of which each rank has the rows of some tokens, the same number on all; a DTensor in forward."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of hidden [..., features], gathered from all ranks."""
        rows, group = own_rows(self.weight)
        bias = None if self.bias is None else own_rows(self.bias)[0]
        return ColumnsOfRanks.apply(F.linear(SameOnRanks.apply(hidden, group), rows, bias), group)


def ends_of(model: nn.Module) -> tuple[Any, Any]:
    """Embedding and head of a language model; None if it has none."""
    if isinstance(model, HFCausalLM):
        return model.model.get_input_embeddings(), model.model.get_output_embeddings()
    return (model.model.embed_tokens, model.lm_head) if type(model) is Llama else (None, None)


def looks_up(module: object) -> bool:
    """Whether a module's forward is that of nn.Embedding."""
    return isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward


def multiplies(module: object) -> bool:
    """Whether a module's forward is that of nn.Linear."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def why_whole_vocabulary(model: nn.Module, size: int) -> str:
    """Why embedding and head of a model are not cut over `size` ranks; empty: they are."""
    embedding, head = ends_of(model)
    # A subclass may do more than to look up, or to multiply.
    if not (looks_up(embedding) and multiplies(head)):
        return "they are no plain nn.Embedding and nn.Linear"
    if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        return "the embedding has max_norm, scale_grad_by_freq or sparse"
    if embedding.num_embeddings != head.out_features or head.out_features % size:
        return f"a vocabulary of {head.out_features} tokens does not divide among {size} ranks"
    if isinstance(model, HFCausalLM):
        try:
            return "" if head.weight.is_meta or head_of(model) is head else "another module gives the logits"
        except ConfigError:
            return "the model does more to logits than its head"
    return ""


def cut_vocabulary(embedding: nn.Embedding, head: nn.Linear, mesh: DeviceMesh) -> None:
    """Leave on each rank its rows of embedding and head; a weight that is tied stays one."""
    are_tied = embedding.weight is head.weight
    for end in (embedding, head):
        for name, param in list(end.named_parameters(recurse=False)):
            own = distribute_tensor(param.detach(), mesh, [Shard(0)])
            end.register_parameter(name, nn.Parameter(own, param.requires_grad))
    if are_tied:
        head.weight = embedding.weight
    embedding.__class__, head.__class__ = CutEmbedding, CutHead


def lose_by_rows(model: nn.Module) -> None:
    """Have a model whose head is a CutHead compute its loss from each rank's logits, unless it gives its loss already.

    What its forward was before stays what logits are computed by.
    """
    head = next((module for module in model.modules() if isinstance(module, CutHead)), None)
    if head is not None and not vars(model).get("gives_loss"):
        cut_loss(model, head, "plain")
