"""Mixtures of transformers whose experts lie on several ranks: as one process, whatever travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.workers import run_workers
from thinwire import ConfigError, ExpertParallel
from thinwire.hosts.experts.checks import check_experts
from thinwire.hosts.experts.parallel import ExpertRanks
from thinwire.methods.experts import Rows, facts, sent
from thinwire.models.hf import HFCausalLM
from thinwire.models.seam import mixture_of
from thinwire.pruning.masks import mask_of

transformers = pytest.importorskip("transformers")
LENGTH = 12
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": LENGTH, "router_aux_loss_coef": 0.02,
}  # fmt: skip
KINDS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 48, "head_dim": 8, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 4},
}
WAYS = {
    "Mixtral": ExpertParallel(4, route="once"),
    "Qwen3Moe": ExpertParallel(2, chunks=3),
    "Olmoe": ExpertParallel(4, move="experts"),
}


def model_of(kind: str, is_pruned: bool = False) -> HFCausalLM:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS[kind]})
    # The default one knows no fp64.
    config._experts_implementation = "eager"
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    if is_pruned:
        packed = {name: param for name, param in made.named_parameters() if ".experts." in name}
        thinwire.keep(made, {name: mask_of(param.detach().abs(), "rows", 0.5) for name, param in packed.items()})
    return HFCausalLM(made, LENGTH).train()


def text(rank: int) -> Any:
    return torch.randint(64, (2, 4 + 2 * rank), generator=torch.Generator().manual_seed(rank)).split(1)


def errors(rank: int, kind: str, is_pruned: bool = False) -> float:
    """How far losses and all gradients are from one process."""
    truth, model = model_of(kind, is_pruned), model_of(kind, is_pruned)
    losses = [truth(*text(each)) for each in range(4)]
    torch.stack(losses).mean().backward()
    ep = thinwire.expert_parallel(model, WAYS[kind], local_size=2, timeout_s=60)
    loss = model(*text(rank))
    loss.backward()
    pairs = [(loss.detach(), losses[rank].detach())]
    own: dict[str, Any] = {}
    for name, param in model.named_parameters():
        assert param.grad is not None
        every = ep.everyone.wait(ep.everyone.all_gather_exact(param.grad))
        same = [rank % 4 for rank in ep.replicas] if name in ep.shapes else range(4)
        own[name] = every[list(same)].sum(0) / 4
    pairs += [(grad, truth.get_parameter(name).grad) for name, grad in ep.gather(own).items()]
    num_tensors = len(ep.shapes)
    if ep.options.move == "experts":
        check_moved(rank, ep, truth, is_pruned)
    ep.close()
    assert num_tensors == (8 if is_pruned else 4)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def check_moved(rank: int, ep: ExpertRanks, whole: HFCausalLM, is_pruned: bool) -> None:
    """Experts that move have travelled once each way: all of their weights, or those that pruning has kept, half."""
    sizes = mixture_of(whole)
    assert sizes is not None and 2 * sizes.kept_numel == is_pruned * sizes.expert_numel
    rows = Rows([[0] * 4] * 4, sizes.width, of_experts=torch.float64, moved_numel=sizes.kept_numel)
    row = facts(ep.options, ep.placement, rows, 2, 1, sizes.expert_numel, 2)[0]
    assert row[2].startswith("0.018 MB" if is_pruned else "0.037 MB")
    pairs = sent(ep.placement, rows, ep.options, sizes.expert_numel, 2)
    planned = sum(num_bytes for (source, _), num_bytes in pairs.items() if source == rank)
    assert planned == 2 * 3 * 8 * sizes.expert_numel // (1 + is_pruned)
    counted = ep.comm.meter.snapshot()
    moved = counted.sent_by("expert_weights") + counted.sent_by("expert_weight_gradients")
    assert moved == sizes.layers * planned


def all_kinds(rank: int, world_size: int) -> list[float]:
    return [*(errors(rank, kind) for kind in KINDS), *(errors(rank, kind, is_pruned=True) for kind in KINDS)]


def test_losses_and_gradients_are_those_of_one_process() -> None:
    for found in run_workers(all_kinds, 4, local_size=2):
        assert max(found) < 1e-12


def test_sizes_are_told_and_slices_refused() -> None:
    model = model_of("Qwen3Moe")
    sizes = mixture_of(model)
    assert sizes is not None and (sizes.layers, sizes.experts, sizes.inner, sizes.width, sizes.top_k) == (
        2,
        8,
        48,
        32,
        2,
    )
    for options, message in (
        (ExpertParallel(2, slices=2), "its experts lie whole on a rank; nearest: --experts.slices 1"),
        (ExpertParallel(3), "must divide the 4 ranks"),
        (ExpertParallel(4, dispatch="int8/128"), "its groups of 128 must end where the rows of 32 end"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_experts(model, options, 4)
    # A number of slices would not help.
    with pytest.raises(
        ConfigError, match=r"each rank needs as many of the 4 experts; nearest: --experts.parallel 4 or 2$"
    ):
        check_experts(model_of("Mixtral"), ExpertParallel(8), 8)


def test_experts_of_another_form_are_refused() -> None:
    model: Any = nn.Module()
    model.experts = nn.Module()
    for name in ("gate_up_proj", "down_proj"):
        setattr(model.experts, name, nn.Parameter(torch.zeros(4, 8, 8)))
    model.experts.has_bias = True
    with pytest.raises(ConfigError, match=r"experts: experts of this form \(has_bias True\) can't lie"):
        check_experts(model, ExpertParallel(2), 2)
