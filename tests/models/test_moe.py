"""A mixture of experts: its routing, its kernels, its losses, and transformers' Mixtral with the same weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.workers import run_workers
from thinwire import Zero, compose
from thinwire.errors import ConfigError
from thinwire.models import HFCausalLM, MoELlama, build_model
from thinwire.models.balance import (
    gshard_loss,
    importance_load_loss,
    joined_loss,
    joined_sums,
    joins_layers,
    summed_over_ranks,
)
from thinwire.models.capacity import RowCounts, capacity, check_capacity, needed_factor
from thinwire.models.experts import grouped_product, loop_product
from thinwire.models.moe import MIXTURES, Experts, MoE, Order, Router, check_axes, mixtral_config, mixtral_weights
from thinwire.models.noise import TokenNoise
from thinwire.models.order import drop
from thinwire.models.row_hooks import EVENTS
from thinwire.run.config import AXIS_FLAGS

SMALL = replace(MIXTURES["moe-tiny"], hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_local_experts=4)


def small(**changes: Any) -> MoELlama:
    return MoELlama(replace(SMALL, **changes))


def text(rows: int = 4) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (rows, 17), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def sums_of(first: list[int], scores: Tensor) -> Tensor:
    counts = torch.bincount(torch.tensor(first), minlength=scores.shape[1])
    return torch.stack([scores.sum(0), counts.float(), torch.zeros(scores.shape[1]), counts.float()])


def test_capacities_are_those_of_tutel() -> None:
    assert capacity(1, 64, 8, 2, most=30) == 16
    assert capacity(1.25, 64, 8, 2, most=30) == 20
    assert capacity(0, 64, 8, 1, most=64) == 64
    assert capacity(-1, 64, 8, 2, most=64) == 16
    assert capacity(-1, 64, 8, 2, most=9) == 9


def test_rows_above_the_capacity_are_dropped_in_order_or_by_priority() -> None:
    index, limit = torch.zeros(64, 1, dtype=torch.int64), capacity(1, 64, 8, 1, most=64)
    kept = drop(index, 8, limit)[:, 0] == 0
    assert kept.nonzero().flatten().tolist() == list(range(8))
    priority = torch.rand(64, generator=torch.Generator().manual_seed(0))
    kept = drop(index, 8, limit, priority)[:, 0] == 0
    assert set(kept.nonzero().flatten().tolist()) == set(priority.topk(8).indices.tolist())
    order = Order.of(drop(index, 8, limit), 8)
    out = order.decode(order.encode(torch.ones(64, 3)), 64)
    assert int(out.any(1).sum()) == 8


def test_rows_are_counted_over_all_ranks_as_they_are_dropped() -> None:
    draws, counts = torch.Generator().manual_seed(3), RowCounts(2)
    expected = [0, 0]
    # Two micro-batches of three ranks with unequal tokens, two layers.
    for _ in range(2):
        chosen = [[torch.rand(n, 4, generator=draws).topk(2, -1).indices for _ in range(2)] for n in (11, 5, 0)]
        for of_rank in chosen:
            for index in of_rank:
                kept = drop(index, 4, capacity(0.5, len(index), 4, 2, len(index)))
                expected = [expected[0] + index.numel(), expected[1] + int((kept == 4).sum())]
        asked = torch.stack([torch.stack([torch.bincount(i.flatten(), minlength=4) for i in each]) for each in chosen])
        counts.note(torch.tensor([11, 5, 0]), asked, 0.5)
    found = counts.take()
    assert [found.asked, found.dropped] == expected and found.dropped > 0
    assert found.dropped_share == found.dropped / found.asked
    assert counts.take().asked == 0


def test_the_factor_that_is_needed_drops_nothing_and_a_smaller_one_something() -> None:
    draws = torch.Generator().manual_seed(0)
    for num_tokens, num_experts in ((7, 4), (64, 8), (392, 8)):
        index = torch.rand(num_tokens, num_experts, generator=draws).pow(3).topk(2, -1).indices
        most = int(torch.bincount(index.flatten()).max())
        near = needed_factor(most, num_tokens, num_experts, 2)
        assert capacity(near, num_tokens, num_experts, 2, 0) >= most
        assert capacity(near - 1 / num_tokens, num_tokens, num_experts, 2, 0) < most
        counts = RowCounts(2)
        counts.note(torch.tensor([num_tokens]), torch.bincount(index.flatten())[None, None], near)
        assert counts.take() == type(counts.take())(2 * num_tokens, 0, near)


def test_a_capacity_without_room_names_the_nearest_that_has_some() -> None:
    with pytest.raises(ConfigError, match=r"an expert of 8 would take no row; nearest: 0.125"):
        check_capacity(0.1, 64, 8, 2)
    with pytest.raises(ConfigError, match=r"nearest: -0.125"):
        check_capacity(-0.1, 64, 8, 2)
    assert (check_capacity(0.125, 64, 8, 2), check_capacity(0, 64, 8, 2)) == (2, 0)


def test_the_capacity_may_change_from_step_to_step() -> None:
    tokens, targets = text()
    model, plain = small(router_aux_loss_coef=0.0), small()
    losses = []
    for factor in (0.0, 0.5, -0.5, 0.0):
        model.capacity_factor = factor
        losses.append(model(tokens, targets).item())
        found = model.row_counts.take()
        # Nothing is counted, and with several ranks nothing is sent, where nobody asks.
        assert (found.dropped > 0) == (found.asked > 0) == bool(factor)
    assert losses[0] == losses[3] == plain(tokens, targets).item() and losses[1] == losses[2] != losses[0]
    assert plain.row_counts.take().asked == 2 * 2 * tokens.numel()
    with pytest.raises(ConfigError, match="finite"):
        model.capacity_factor = math.nan


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_limit_keeps_the_tokens_of_the_highest_scores(top_k: int) -> None:
    """Weights that sum to 1 say nothing about scores."""
    model, draws = small(num_experts_per_tok=top_k, batch_priority=True, capacity_factor=0.5), torch.Generator()
    layer: Any = model.model.layers[0].mlp
    nn.init.normal_(layer.gate.weight, std=0.3, generator=draws.manual_seed(1))
    x, seen = torch.randn(1, 64, 16, generator=draws), list[Tensor]()
    layer.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    layer(x)
    weights, index = nn.functional.linear(x[0], layer.gate.weight).softmax(-1).topk(top_k, -1)
    limit = capacity(0.5, 64, 4, top_k, 64)
    expected = drop(index, 4, limit, weights[:, 0])
    assert torch.equal(seen[0], expected)
    normalized = weights / weights.sum(-1, keepdim=True)
    assert not torch.equal(expected, drop(index, 4, limit, normalized.amax(-1)))


def test_an_only_expert_has_its_score_so_that_the_text_trains_the_router() -> None:
    model = small(num_experts_per_tok=1, router_aux_loss_coef=0.0)
    assert float(trained(model, text())["model.layers.0.mlp.gate.weight"].abs().max()) > 0
    (row,) = model.config.capacity_rows(8)
    assert row[:2] == ("norm_topk_prob True", "no effect")
    idle = replace(SMALL, slots=2, router_rank=8).capacity_rows(8)
    assert [row[0] for row in idle] == ["router_rank 8", "slots 2"] and not replace(
        SMALL, router="cosine"
    ).capacity_rows(8)
    with pytest.raises(ConfigError, match="num_experts_per_tok=1: transformers' Mixtral"):
        mixtral_config(model.config)


def test_noise_follows_a_token_to_any_rank() -> None:
    sequences, positions = torch.tensor([7, 3, 900]), torch.arange(40)
    whole = TokenNoise(5, sequences, positions).normals(1, 8)
    for rows, places in ((slice(1, 3), slice(None)), (slice(None), slice(10, 33, 2))):
        part = TokenNoise(5, sequences[rows], positions[places]).normals(1, 8)
        assert torch.equal(part, whole.view(3, 40, 8)[rows, places].flatten(0, 1))
    many = TokenNoise(5, torch.arange(64), torch.arange(64)).normals(0, 8)
    assert abs(float(many.mean())) < 0.03 and abs(float(many.var()) - 1) < 0.05 and bool(many.isfinite().all())
    assert not torch.equal(whole, TokenNoise(5, sequences, positions).normals(2, 8))
    # A layer is given what the forward's tokens draw: anew in each forward, alike where numbers are stated.
    model, (tokens, targets) = small(router="noisy", router_noise=4.0), text()
    assert model(tokens, targets) != model(tokens, targets)
    model.draws = 3, torch.arange(4)
    loss = model(tokens, targets)
    model.draws = 3, torch.arange(4).flip(0)
    torch.testing.assert_close(model(tokens.flip(0), targets.flip(0)), loss)
    with pytest.raises(ConfigError, match="numbers of 4 sequences, for a batch of 2"):
        model(tokens[:2])


def test_first_choices_come_before_second_ones() -> None:
    index = torch.tensor([[1, 0], [0, 1]])
    assert drop(index, 2, 1).tolist() == [[1, 2], [0, 2]]


def test_encode_and_decode_have_the_gradients_of_finite_differences() -> None:
    index = drop(torch.tensor([[0, 2], [0, 1], [2, 0], [1, 0]]), 3, 2)
    order = Order.of(index, 3)
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, generator=draws, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(4, 2, generator=draws, dtype=torch.float64, requires_grad=True)

    def there_and_back(x: Tensor, gates: Tensor) -> Tensor:
        rows = order.encode(x).square() * gates.flatten()[order.choices, None]
        return order.decode(rows, 4)

    assert torch.autograd.gradcheck(there_and_back, (x, gates))


def per_token(experts: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    rows = []
    for token, chosen, own in zip(x, index, weights, strict=True):
        total = torch.zeros_like(token)
        for expert, weight in zip(chosen.tolist(), own, strict=True):
            if expert < experts.num_experts:
                gate, up = experts.gate_proj[expert] @ token, experts.up_proj[expert] @ token
                total = total + weight * ((nn.functional.silu(gate) * up) @ experts.down_proj[expert])
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("router", ["linear", "noisy", "cosine", "sigmoid"])
def test_a_layer_equals_a_loop_over_tokens(router: str) -> None:
    model = small(router=router).double()
    layer: Any = model.model.layers[0].mlp
    x = torch.randn(10, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layer.eval()
    choice = layer.gate(x)
    index = drop(choice.index, 4, 3)
    found = layer.experts(x, index, choice.weights)
    expected = per_token(layer.experts, x, index, choice.weights)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for a, b in zip(
        *(torch.autograd.grad(y.square().sum(), layer.experts.parameters()) for y in (found, expected)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_rows_may_be_watched_and_changed_on_their_way() -> None:
    layer: Any = small().model.layers[0].mlp
    x, hooks, seen = torch.randn(1, 10, 16, generator=torch.Generator().manual_seed(0)), layer.experts.row_hooks, []
    plain = layer(x)
    handles = [hooks.add(event, lambda rows, event=event: seen.append((event, *rows.shape))) for event in EVENTS]
    handles.append(hooks.add("before_combine", lambda rows: 2 * rows))
    torch.testing.assert_close(layer(x), 2 * plain)
    assert seen == [(event, 20, 16) for event in EVENTS]
    for handle in handles:
        handle.remove()
    assert torch.equal(layer(x), plain) and len(seen) == 4
    with pytest.raises(ConfigError, match="no event 'before_dispach'; did you mean 'before_dispatch'"):
        hooks.add("before_dispach", print)


def test_the_grouped_kernel_equals_the_loop() -> None:
    draws = torch.Generator().manual_seed(0)
    counts = torch.tensor([3, 0, 9, 4])
    rows, weights = torch.randn(16, 8, generator=draws), torch.randn(4, 12, 8, generator=draws).transpose(1, 2)
    out: list[list[Tensor]] = []
    for product in (grouped_product, loop_product):
        leaves = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        y = product(*leaves, counts)
        out.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for a, b in zip(*out, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_an_even_router_has_balance_loss_one_and_a_router_of_one_expert_the_number_of_experts() -> None:
    even = sums_of([0, 1, 2, 3], torch.full((4, 4), 0.25))
    alone = sums_of([0, 0, 0, 0], torch.tensor([[1.0, 0, 0, 0]]).repeat(4, 1))
    assert gshard_loss(even).item() == 1
    assert gshard_loss(alone).item() == 4


def test_the_load_is_the_chance_to_be_chosen_and_the_full_expert_gets_less() -> None:
    router = Router(replace(SMALL, router="noisy", router_noise=4.0, balance="importance-load")).eval()
    nn.init.zeros_(router.weight)
    # Scores 2, 1, 0 and -1 for every token; noise has a deviation of 1, and the second score is the least one chosen.
    router.weight.data[:, 0] = torch.tensor([2.0, 1, 0, -1])
    sums = router(torch.eye(16)[:1].expand(3, 16)).sums
    normal = torch.distributions.Normal(0.0, 1.0)
    torch.testing.assert_close(sums[2], 3 * normal.cdf(torch.tensor([1.0, 0, -1, -2])))
    # Squared coefficients of variation 1/2 and 3/2.
    by_hand = sums_of([0], torch.zeros(1, 4))
    by_hand[0], by_hand[2] = torch.tensor([4.0, 2, 2, 0]), torch.tensor([3.0, 1, 0, 0])
    assert importance_load_loss(by_hand).item() == 1
    importance_load_loss(sums).backward()
    assert router.weight.grad is not None
    up = router.weight.grad[:, 0]
    assert up[0] > 0 > up[3] and up[0] == up.max() and not router.weight.grad[:, 1:].any()


def test_a_router_is_fp32_under_autocast() -> None:
    router = Router(SMALL)
    nn.init.normal_(router.weight)
    x = torch.randn(6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router(x).weights, router(x.clone()).weights)
        assert router(x).weights.dtype == torch.float32


def trained(model: MoELlama, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    model(*batch).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("loss", [gshard_loss, importance_load_loss])
def test_the_mean_gradient_of_ranks_is_that_of_the_global_loss(loss: Callable[[Tensor], Tensor]) -> None:
    draws = torch.Generator().manual_seed(0)
    parts = [torch.rand(3, 4, generator=draws, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    expected = torch.autograd.grad(loss(parts[0] + parts[1]), parts)
    for part, gradient in zip(parts, expected, strict=True):
        every = torch.stack([each.detach() for each in parts])
        (found,) = torch.autograd.grad(loss(summed_over_ranks(part, partial(told_all, every))), part)
        torch.testing.assert_close(found / 2, gradient, rtol=0, atol=1e-12)


def told_all(every: Tensor, sums: Tensor) -> Tensor:
    return every


def test_ranks_with_halves_of_a_batch_have_the_gradients_of_the_whole() -> None:
    tokens, targets = text()
    whole = trained(small(router_aux_loss_coef=1.0).double(), (tokens, targets))
    halves, told = [small(router_aux_loss_coef=1.0).double() for _ in range(2)], list[Tensor]()

    def tell(sums: Tensor) -> Tensor:
        told.append(sums)
        return sums[None]

    for part, half in enumerate(halves):
        half.gather = tell
        half(tokens[part::2], targets[part::2])
    every, found = torch.stack(told), []
    for part, half in enumerate(halves):
        half.gather = partial(told_all, every)
        found.append(trained(half, (tokens[part::2], targets[part::2])))
    for name, gradient in whole.items():
        torch.testing.assert_close((found[0][name] + found[1][name]) / 2, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 5}, "nearest is 4"),
        ({"router": "cosin"}, "did you mean 'cosine'"),
        ({"balance": "importance-load"}, "nearest: gshard"),
        ({"router_aux_loss_coef": -1.0}, "nearest is 0"),
        ({"num_local_experts": 0}, "above zero"),
        ({"capacity_factor": math.inf}, "nearest is 0.0"),
        ({"router": "softmoe", "capacity_factor": 1.5}, "its experts take their slots and drop nothing; nearest: 0.0"),
        ({"router": "expert-choice", "batch_priority": True}, "no token's row is dropped; nearest: False"),
    ],
)
def test_wrong_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **changes)


def layer_of(**changes: Any) -> MoE:
    layer = MoE(replace(SMALL, **changes)).double()
    layer.init_weights(torch.Generator().manual_seed(0))
    for param in layer.parameters():
        param.data.mul_(20)
    return layer


def test_experts_choose_equally_many_tokens_each() -> None:
    layer, x = layer_of(router="expert-choice"), torch.randn(2, 10, 16, dtype=torch.float64)
    scores = nn.functional.linear(x.flatten(0, 1), layer.gate.weight).softmax(-1)
    expected = torch.zeros(20, 16, dtype=torch.float64)
    for expert in range(4):
        # Of 20 tokens with 2 experts each, an even share.
        for token in scores[:, expert].topk(10).indices.tolist():
            row, chosen = x.flatten(0, 1)[token, None], torch.tensor([[expert]])
            expected[token] += layer.experts(row, chosen, scores[token, expert].view(1, 1))[0]
    found = layer(x)
    torch.testing.assert_close(found.flatten(0, 1), expected, rtol=0, atol=1e-12)
    assert layer.sums is not None and layer.sums[3].tolist() == [10] * 4
    found.square().sum().backward()
    assert all(param.grad is not None and bool(param.grad.any()) for param in layer.parameters())


def test_slots_are_mixtures_of_one_sequence() -> None:
    layer, x = layer_of(router="softmoe", slots=3), torch.randn(2, 5, 16, dtype=torch.float64)
    for sequence, found in zip(x, layer(x), strict=True):
        logits = sequence @ layer.gate.weight.t()
        slots = torch.einsum("ts,th->sh", logits.softmax(0), sequence)
        made = layer.experts(slots, torch.arange(12)[:, None] // 3, torch.ones(12, 1, dtype=torch.float64))
        torch.testing.assert_close(found, logits.softmax(1) @ made, rtol=0, atol=1e-12)
    layer(x).square().sum().backward()
    assert all(param.grad is not None and bool(param.grad.any()) for param in layer.parameters())


@pytest.mark.parametrize("router", ["expert-choice", "softmoe"])
def test_a_causal_model_refuses_routers_that_look_ahead(router: str) -> None:
    with pytest.raises(
        ConfigError, match=r"tokens that come later, .* nearest: linear, or a layer thinwire.models.moe"
    ):
        small(router=router)


def test_axes_that_would_lose_the_balance_loss_are_refused() -> None:
    sequence = {"data": 2, "sequence": 2}
    for model, sizes, flags, message in (
        (
            small(),
            {"data": 2, "pipeline": 2},
            None,
            "^a mixture of experts on a pipeline axis: .* whole models; nearest: no pipeline axis$",
        ),
        (small(), {"pipeline": 2}, AXIS_FLAGS, "^--stages 2: .* nearest: --stages 1$"),
        (
            theirs_alike(),
            sequence,
            AXIS_FLAGS,
            r"^--sequence\.parallel 2: a mixture of transformers with a balance loss .* "
            r"nearest: --sequence\.parallel 1, or a preset such as moe-demo$",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            check_axes(model, sizes, flags)
    check_axes(small(), {"data": 4})
    check_axes(small(), sequence, AXIS_FLAGS)


def test_transformers_mixtral_has_equal_logits_and_its_balance_loss_here(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    ours = small().eval()
    tokens, targets = text()
    settings = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "bos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(mixtral_config(ours.config) | settings))
    weights = mixtral_weights(ours.state_dict())
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = build_model(f"hf:{tmp_path}", 256, 16)
    assert isinstance(theirs, HFCausalLM) and isinstance(theirs.model, transformers.MixtralForCausalLM)
    torch.testing.assert_close(theirs.eval()(tokens), ours(tokens), rtol=0, atol=1e-5)
    # The loss is the text's; the gradient is that of the balance loss too.
    plain = theirs(tokens, targets)
    (router,) = [param for name, param in theirs.named_parameters() if name.endswith("layers.0.mlp.gate.weight")]
    (of_text,) = torch.autograd.grad(plain, router)
    theirs.train()
    loss = theirs(tokens, targets)
    (of_both,) = torch.autograd.grad(loss, router, retain_graph=True)
    found = theirs.model(input_ids=tokens, output_router_logits=True, use_cache=False)
    (of_balance,) = torch.autograd.grad(ours.config.router_aux_loss_coef * found.aux_loss, router)
    assert torch.equal(loss, plain)
    torch.testing.assert_close(of_both, of_text + of_balance)
    assert float(of_balance.norm()) > 0
    torch.testing.assert_close(joined_loss(joined_sums(theirs.model, found.router_logits), 2), found.aux_loss)


@pytest.mark.parametrize(
    ("kind", "sizes", "weight", "joins"),
    [
        (
            "jetmoe",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8, "aux_loss_coef": 0.03},
            0.03,
            True,
        ),
        (
            "dbrx",
            {
                "d_model": 32,
                "n_heads": 4,
                "n_layers": 1,
                "ffn_config": {"moe_loss_weight": 0.07},
                "attn_config": {"rope_theta": 1e4},
            },
            0.07,
            True,
        ),
        (
            "doge",
            {"num_experts": 16, "num_experts_per_tok": 2, "is_moe": True, "router_aux_loss_coef": 0.05},
            0.05,
            False,
        ),
        ("llama", {}, 0.0, False),
    ],
)
def test_the_balance_loss_of_transformers_has_several_names(
    kind: str, sizes: dict[str, Any], weight: float, joins: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.AutoConfig.for_model(kind, **(sizes if kind == "dbrx" else common | sizes))
    with torch.device("meta"):
        model = HFCausalLM(transformers.AutoModelForCausalLM.from_config(config), 16)
    assert model.balance_weight == weight and joins_layers(model.model) == joins
    assert bool(model.balance_rows()) == (weight > 0 and not joins)


@pytest.mark.parametrize(
    ("kind", "sizes", "told"),
    [
        ("llama4_text", {"num_local_experts": 2, "intermediate_size_mlp": 16, "moe_layers": [0]}, "none"),
        ("qwen3_moe", {"num_experts": 4, "mlp_only_layers": [0]}, ""),
    ],
)
def test_a_model_of_transformers_without_a_balance_loss_trains_without_it(
    kind: str, sizes: dict[str, Any], told: str
) -> None:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = transformers.AutoConfig.for_model(kind, router_aux_loss_coef=0.5, **common, **heads, **sizes)
    model = HFCausalLM(transformers.AutoModelForCausalLM.from_config(config).float(), 16).train()
    tokens = torch.arange(16).view(2, 8)
    model(tokens, tokens).backward()
    assert "".join(row[1] for row in model.balance_rows()) == told


def theirs_alike() -> HFCausalLM:
    """A mixture of transformers."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**mixtral_config(small(router_aux_loss_coef=1.0).config))
    torch.manual_seed(0)
    return HFCausalLM(MixtralForCausalLM(config), 16).train()


def noisy() -> MoELlama:
    """A mixture whose load is balanced too; the noise of a token is the same on any rank."""
    return small(router="noisy", router_noise=4.0, balance="importance-load", router_aux_loss_coef=1.0)


def step(rank: int, world_size: int) -> list[Tensor]:
    """The weights after two SGD steps of a rank's part of the text: of mixtures here, and of transformers' one."""
    models = small(router_aux_loss_coef=1.0), noisy(), theirs_alike()
    return [weight for model in models for weight in steps_of(model, rank, world_size)]


def steps_of(model: nn.Module, rank: int, world_size: int) -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("data",))
    stage = compose.parallelize(model, optimizer, mesh, [Zero()], announce=False)
    tokens, targets = text()
    for number in range(2):
        vars(model)["draws"] = number, torch.arange(len(tokens))[rank::world_size]
        stage.forward_backward([(tokens[rank::world_size], targets[rank::world_size])])
        stage.step()
    found = [param.detach().clone() for param in model.parameters()]
    stage.close()
    return found


def test_each_layer_is_balanced_by_itself() -> None:
    """The mean over layers of each one's loss, and not the loss of the sums over layers."""
    for model, loss in ((small(router_aux_loss_coef=1.0), gshard_loss), (noisy(), importance_load_loss)):
        gates, found = [module for module in model.modules() if isinstance(module, Router)], list[Tensor]()
        for scale, gate in enumerate(gates):
            gate.weight.data.mul_(1 + 20 * scale)
            gate.register_forward_hook(lambda _, args, choice, to=found: to.append(choice.sums.detach()))
        model.draws = 0, torch.arange(4)
        model(*text()).backward()
        expected = torch.stack([loss(each) for each in found]).mean()
        assert float(model.balance_loss().detach()) == pytest.approx(float(expected), rel=1e-6)
        assert float(loss(torch.stack(found).sum(0))) != pytest.approx(float(expected), rel=1e-3)


def test_two_ranks_train_as_one() -> None:
    pytest.importorskip("transformers")
    expected = list[Tensor]()
    for model in (small(router_aux_loss_coef=1.0), noisy(), theirs_alike()):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            vars(model)["draws"] = number, torch.arange(4)
            model(*text()).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected += [param.detach() for param in model.parameters()]
    for found in run_workers(step, 2):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
