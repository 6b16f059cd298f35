"""Pruned models: which weights go, that the rest is one process's on any ranks, and that zeros stay in training."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import thinwire
from tests.workers import run_workers
from thinwire import cli
from thinwire.checkpoint.weights_folder import write_weights
from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.hosts.experts.checks import check_experts
from thinwire.models import MoELlama, build_model, build_skeleton
from thinwire.models.kept import whole
from thinwire.models.moe import MIXTURES, MoE, mixtral_config, mixtral_weights
from thinwire.pruning import curvature
from thinwire.pruning.curvature import gradients, surgery
from thinwire.pruning.masks import lowest, mask_of, scores
from thinwire.pruning.prune import prune

SMALL = replace(MIXTURES["moe-tiny"], hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_local_experts=4)


def small(**changes: Any) -> Any:
    """A mixture whose gates and inputs differ, as those of a trained one."""
    model = MoELlama(replace(SMALL, **changes))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def text(num_batches: int = 1, rows: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(256, (num_batches * rows, 16), generator=generator).chunk(num_batches))


def test_three_methods_have_three_masks() -> None:
    """The weights [1, -2, 3, 0.6] and two tokens with gates 0.5 and 1."""
    weight, inputs = torch.tensor([[1, -2, 3, 0.6]]), torch.tensor([[4.0, 1, 1, 8], [0, 1, 0, 0]])
    gated = (inputs * torch.tensor([[0.5], [1.0]])).norm(dim=0)
    found = {
        "moe-pruner": scores(weight, gated),
        "wanda": scores(weight, inputs.norm(dim=0)),
        "magnitude": weight.abs(),
    }
    torch.testing.assert_close(found["moe-pruner"], torch.tensor([[2, 5**0.5, 1.5, 2.4]]))
    dropped = {name: (~mask_of(score, "rows", 0.5)).nonzero()[:, 1].tolist() for name, score in found.items()}
    assert dropped == {"moe-pruner": [0, 2], "wanda": [1, 2], "magnitude": [0, 3]}


@pytest.mark.parametrize(("pattern", "sparsity"), [("rows", 0.5), ("rows", 0.3), ("2:4", 0.5)])
def test_every_row_has_its_zeros(pattern: str, sparsity: float) -> None:
    model = small()
    done = prune(model, text(), sparsity=sparsity, pattern=pattern)
    parameters = dict(model.named_parameters())
    assert {name.split(".")[-2 if name.endswith("weight") else -1] for name in done.masks} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    for name, mask in done.masks.items():
        weight = parameters[name].detach()
        assert torch.equal(weight == 0, ~mask)
        weight = weight.transpose(-1, -2) if name.endswith("experts.down_proj") else weight
        zeros = (weight == 0).unflatten(-1, (-1, 4)) if pattern == "2:4" else weight == 0
        wanted = 2 if pattern == "2:4" else int(sparsity * weight.shape[-1])
        assert bool((zeros.sum(-1) == wanted).all())
    assert all(name not in done.masks for name in ("lm_head.weight", "model.layers.0.mlp.gate.weight"))


def test_equal_gates_are_wandas_and_no_tokens_are_told() -> None:
    """With all experts for each token and equal weights; and without a token, an expert goes by magnitude."""
    models = [small(norm_topk_prob=True, num_experts_per_tok=4) for _ in range(2)]
    for model in models:
        for layer in model.model.layers:
            nn.init.zeros_(layer.mlp.gate.weight)
    masks = [
        prune(model, text(), method=method).masks for model, method in zip(models, ("moe-pruner", "wanda"), strict=True)
    ]
    assert all(torch.equal(masks[0][name], masks[1][name]) for name in masks[0])
    model = small()
    for layer in model.model.layers:
        # The first expert is never among the two best.
        layer.mlp.gate.register_forward_hook(
            lambda module, args, choice: replace(choice, index=choice.index.clamp_min(1))
        )
    magnitude = small()
    by_size = prune(magnitude, text(), method="magnitude").masks
    done = prune(model, text())
    name = "model.layers.0.mlp.experts.gate_proj"
    assert f"{name}[0]" in done.unused and not any(unused.endswith("[1]") for unused in done.unused)
    assert torch.equal(done.masks[name][0], by_size[name][0]) and not torch.equal(done.masks[name][1], by_size[name][1])


def test_gates_lower_the_error_of_what_is_routed() -> None:
    """Sum over tokens of g^2 |(W - W') x|^2, of the first layer's experts: what the score aims at."""
    errors = {}
    for method in ("moe-pruner", "wanda", "magnitude", "random"):
        dense, pruned = small(), small()
        seen: list[tuple[Tensor, ...]] = []
        dense.model.layers[0].mlp.experts.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args))
        with torch.no_grad():
            dense(text(1, 64)[0])
        prune(pruned, text(1, 64), method=method, sparsity=0.7)
        x, index, weights = seen[0]
        gap = (dense.model.layers[0].mlp.experts.gate_proj - pruned.model.layers[0].mlp.experts.gate_proj).detach()
        total = torch.einsum("th,tkih->tki", x, gap[index]).square().sum(-1) * weights.square()
        errors[method] = float(total.sum())
    # Attention before it is pruned in the same way by the first two methods.
    assert errors["moe-pruner"] < errors["wanda"] < errors["magnitude"] < errors["random"]


def highest(num: int, score: Tensor) -> Tensor:
    """All but the lowest of each row."""
    return ~lowest(score, score.shape[-1] - num)


def test_what_stays_makes_up_for_what_goes() -> None:
    """Rows of 24 and 30 gradients, against dense matrices in fp64; one weight alone costs its saliency."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(3, 24, generator=generator, dtype=torch.float64)
    rows = torch.randn(3, 30, 24, generator=generator, dtype=torch.float64)
    dense = 0.1 * torch.eye(24, dtype=torch.float64) + rows.mT @ rows / 30
    saliency = weight.square() / dense.inverse().diagonal(dim1=-2, dim2=-1)
    for num in (1, 12):
        stays, values = surgery(weight, rows, 0.1, partial(highest, len(weight[0]) - num))
        assert torch.equal(stays, ~lowest(saliency, num)) and torch.equal(values != 0, stays)
        for row in range(3):
            kept, lost = stays[row].nonzero().flatten(), (~stays[row]).nonzero().flatten()
            moved = torch.linalg.solve(dense[row][kept][:, kept], dense[row][kept][:, lost] @ weight[row, lost])
            torch.testing.assert_close(values[row, kept], weight[row, kept] + moved, rtol=1e-9, atol=1e-9)
        if num == 1:
            step = (values - weight).unsqueeze(-1)
            cost = (step.mT @ dense @ step).flatten()
            torch.testing.assert_close(cost, saliency.amin(-1), rtol=1e-9, atol=1e-9)


def test_curvature_prunes_a_mixture_as_other_methods_do() -> None:
    """The same shares go, other weights than by size, and what stays has moved; gradients are those of a backward."""
    model, plain = small(), small()
    wanted = "model.layers.0.self_attn.q_proj.weight"
    ((found, mean_square),) = gradients(plain, [plain.get_parameter(wanted)], text(2, 2))
    assert mean_square == pytest.approx(float(found.square().mean()))
    tokens = text(2, 2)[1][1:]
    nn.functional.cross_entropy(plain(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    torch.testing.assert_close(found[3], plain.get_parameter(wanted).grad)
    done, by_size = prune(model, text(2, 2), method="obs"), prune(small(), text(2, 2), method="magnitude")
    assert done.masks.keys() == by_size.masks.keys() and done.sparsity == by_size.sparsity
    for name, mask in done.masks.items():
        weight = model.get_parameter(name).detach()
        assert torch.equal(weight != 0, mask) and mask.shape == by_size.masks[name].shape
    weight, before = (each.get_parameter(wanted).detach() for each in (model, plain))
    assert not torch.equal(done.masks[wanted], by_size.masks[wanted])
    assert float((weight - before)[done.masks[wanted]].abs().max()) > 1e-3
    assert all(param.requires_grad for param in model.parameters())


def test_curvature_takes_as_little_memory_as_is_asked_and_may_be_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, in_parts, twice = small(), small(), small()
    masks = prune(at_once, text(2, 2), method="obs").masks
    monkeypatch.setattr(curvature, "MOST_BYTES", 10_000)
    most, plain = 0, curvature.gradients

    def measured(*given: Any) -> Any:
        nonlocal most
        found = plain(*given)
        most = max(most, sum(grads.nbytes for grads, _ in found))
        return found

    monkeypatch.setattr("thinwire.pruning.prune.gradients", measured)
    assert prune(in_parts, text(2, 2), method="obs").masks.keys() == masks.keys()
    assert 0 < most <= 10_000
    for name, mask in masks.items():
        weight = in_parts.get_parameter(name).detach()
        assert torch.equal(weight != 0, mask), name
        torch.testing.assert_close(weight, at_once.get_parameter(name).detach(), rtol=1e-3, atol=1e-4)
    monkeypatch.undo()
    anew = prune(twice, text(2, 2), method="obs", rounds=2)
    assert anew.sparsity == pytest.approx(0.5) and any(not torch.equal(anew.masks[name], masks[name]) for name in masks)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"method": "wanda"}, "wanda measures"),
        ({"pattern": "2:4"}, "one share"),
    ]
    for options, why in refused:
        with pytest.raises(ConfigError, match=why):
            prune(twice, text(), rounds=2, **{"method": "obs", **options})


class Even(nn.Module):
    """A layer whose inputs are all alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 8, bias=False))])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers[0](torch.full((*tokens.shape, 16), 0.7))


def test_inputs_that_are_all_alike_leave_the_choice_to_sizes() -> None:
    by_inputs, by_size = (prune(Even(), text(), method=method).masks for method in ("wanda", "magnitude"))
    assert torch.equal(by_inputs["layers.0.0.weight"], by_size["layers.0.0.weight"])


def beside_shared(kind: str) -> Any:
    """A model of transformers in which each token has experts of its own and one that all share."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2,
        "max_position_embeddings": 32,
    }  # fmt: skip
    own: dict[str, dict[str, Any]] = {
        "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 24},
        "deepseek_v3": {
            "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": None,
        },
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes | own[kind])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    draws = torch.Generator().manual_seed(5)
    for param in model.parameters():
        param.data.add_(0.3 * torch.randn(param.shape, generator=draws))
    return model


@pytest.mark.parametrize("kind", ["qwen2_moe", "deepseek_v3"])
def test_a_shared_expert_has_no_gates(kind: str) -> None:
    """Its masks are those of all tokens, each with gate 1; what a model multiplies it by afterwards stays."""
    dense, pruned = beside_shared(kind), beside_shared(kind)
    done = prune(pruned, text())
    shared = [name for name in done.masks if "shared_expert" in name and "layers.0." in name]
    assert sorted(name.split(".")[-2] for name in shared) == ["down_proj", "gate_proj", "up_proj"]
    assert not any("shared_expert_gate" in name or name.endswith("mlp.gate.weight") for name in done.masks)
    seen = dict[str, Tensor]()
    for name in shared:
        place = name.removesuffix(".weight")
        dense.get_submodule(place).register_forward_pre_hook(
            lambda _, args, name=name: seen.update({name: args[0].flatten(0, -2)})
        )
    with torch.no_grad():
        dense(text()[0], use_cache=False)
    for name in shared:
        weight = dense.get_parameter(name).detach()
        assert torch.equal(done.masks[name], mask_of(weight.abs() * seen[name].norm(dim=0), "rows", 0.5))
        assert torch.equal(pruned.get_parameter(name) == 0, ~done.masks[name])


def masks_of_rank(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    """The masks of ranks with parts of the text: replicas, and ranks that share the experts, whole and in slices."""
    found = [prune(small(), text(8)[rank::world_size]).masks]
    for options in (thinwire.ExpertParallel(2, dispatch="int8/16"), thinwire.ExpertParallel(2, slices=2)):
        model = small()
        ep = thinwire.expert_parallel(model, options, local_size=1)
        with pytest.raises(ConfigError, match=r"give 2, 1 batches to prune by: .*; nearest: 1 each"):
            prune(model, text(2)[rank:])
        done = prune(model, text(8)[rank::world_size])
        kept = {name: param for name, param in model.named_parameters() if name in done.masks}
        for name, mask in ep.part(done.masks).items():
            assert torch.equal(kept[name] != 0, mask)
        # They are spread again.
        before = ep.comm.meter.snapshot().sent_by("dispatch")
        model(text()[0])
        assert ep.comm.meter.snapshot().sent_by("dispatch") > before
        ep.close()
        found.append(done.masks)
    return [*found, prune(beside_shared("qwen2_moe"), text(8)[rank::world_size]).masks]


def test_ranks_and_batches_have_the_masks_of_one_process() -> None:
    one = prune(small(), text(8)).masks
    both, shared = run_workers(masks_of_rank, 2), prune(beside_shared("qwen2_moe"), text(8)).masks
    for found in (of_rank.pop() for of_rank in both):
        assert found.keys() == shared.keys() and all(torch.equal(found[name], shared[name]) for name in shared)
    every = [prune(small(), text(1, 128)).masks, *(found for of_rank in both for found in of_rank)]
    for found in every:
        assert found.keys() == one.keys()
        assert all(torch.equal(found[name], one[name]) for name in one)


def test_zeros_stay_and_are_not_sent() -> None:
    """Two matrices of 512: half the bytes of sdp4bit, and the same zeros after AdamW with decay."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    assert sum(thinwire.SDP4Bit().plan(model, Topology(2, 1), 1).sent.values()) == 270_866
    masks = {name: mask_of(parameter.detach().abs(), "rows", 0.5) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(masks[name])
    dense = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    thinwire.keep(model, masks)
    assert torch.equal(model[0].weight, dense["0.weight"])
    assert sum(thinwire.SDP4Bit().plan(model, Topology(2, 1), 1).sent.values()) == 135_442
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        model(torch.randn(4, 512)).square().mean().backward()
        optimizer.step()
    whole(model)
    after = dict(model.named_parameters())
    assert after.keys() == dense.keys()
    for name, mask in masks.items():
        assert torch.equal(after[name] == 0, ~mask) and not torch.equal(after[name], dense[name])


def mixtral_folder(folder: Path) -> MoELlama:
    """A mixture, as a folder `dense` of transformers below another, beside a text.txt."""
    ours = small()
    (folder / "dense").mkdir()
    settings: dict[str, Any] = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "bos_token_id": None}
    settings["max_position_embeddings"] = 32
    (folder / "dense/config.json").write_text(json.dumps(mixtral_config(ours.config) | settings))
    write_weights(folder / "dense", mixtral_weights(ours.state_dict()).items())
    (folder / "text.txt").write_text("".join(f"line {n} of {n * n} lines\n" for n in range(600)))
    return ours


def check_packed(command: list[str], folder: Path, model: nn.Module) -> None:
    """`--packed` keeps the same weights in bf16, in as many bytes as stated, and gives them back."""
    packed, whole_again = folder / "packed", folder / "again"
    assert cli.run([*command, "--out", str(packed), "--packed"]) == 0
    built, expected = build_model(f"hf:{packed}", 256, 32), dict(model.named_parameters())
    assert built.state_dict().keys() == model.state_dict().keys()
    for name, param in built.named_parameters():
        assert torch.equal(param, expected[name].bfloat16().float()), name
    skeleton = build_skeleton(f"hf:{packed}", 256, 32)
    assert {n: p.shape for n, p in skeleton.named_parameters()} == {n: p.shape for n, p in expected.items()}
    kept = sum(p.numel() for name, p in expected.items() if "parametrizations" in name)
    rest = sum(p.numel() for p in expected.values()) - kept
    size = (packed / "packed.safetensors").stat().st_size
    # Of 2 bytes a weight: half of the weights, and a bit for each; the file begins with names and shapes.
    assert 0 < size - (0.5625 * 2 * 2 * kept + 2 * rest) < 8000
    with pytest.raises(ConfigError, match=r"packed weights, which only train and generate read; nearest: thinwire.unp"):
        cli.run(["prune", f"hf:{packed}", "--out", str(folder / "none")])
    thinwire.unpack(packed, whole_again)
    again = build_model(f"hf:{whole_again}", 256, 32)
    assert all(map(torch.equal, again.parameters(), built.parameters()))
    # A file that misses a tensor, or has another model's.
    tensors = load_file(packed / "packed.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, packed / "packed.safetensors")
    with pytest.raises(ConfigError, match=r"is of another model: lm_head\.weight is in one of both alone"):
        build_model(f"hf:{packed}", 256, 32)


def test_a_mixtral_folder_is_pruned_loaded_and_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HOME", str(tmp_path))
    ours = mixtral_folder(tmp_path)
    command = ["prune", f"hf:{tmp_path / 'dense'}", "--data", str(tmp_path / "text.txt"), "--samples", "8"]
    assert cli.run([*command, "--out", str(tmp_path / "sparse")]) == 0
    said = capsys.readouterr().out
    assert "50.0 % of the weights in 12 matrices" in said and "held-out loss" in said
    assert f"thinwire train --model hf:{tmp_path / 'sparse'} --seq-len 32; zeros" in said
    model: Any = build_model(f"hf:{tmp_path / 'sparse'}", 256, 32)
    check_packed(command, tmp_path, model)
    sizes = [p.numel() for name, p in model.named_parameters() if "parametrizations" in name]
    assert len(sizes) == 12 and sum(sizes) * 2 == sum(
        p.numel() for name, p in ours.named_parameters() if "experts" in name or "self_attn" in name
    )
    skeleton: Any = build_skeleton(f"hf:{tmp_path / 'sparse'}", 256, 32)
    assert {n: p.shape for n, p in skeleton.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(text()[0], text()[0]).backward()
    optimizer.step()
    whole(model)
    weights = dict(model.model.named_parameters())
    found = weights["model.layers.1.mlp.experts.down_proj"].detach()
    assert bool(((found == 0).sum(-1) == found.shape[-1] // 2).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "wandda"}, "--method wandda: must be one of"),
        ({"sparsity": 1.0}, "must be above 0 and below 1; nearest: 0.99"),
        ({"sparsity": 50}, "--sparsity 50: must be above 0 and below 1; nearest: 0.5"),
        ({"pattern": "2:4", "sparsity": 0.7}, "the pattern 2:4 has 0.5, which is the nearest"),
        ({"sparsity": 0.01}, "--sparsity 0.01: removes no weight, since the longest rows have 24; nearest: 0.0416667"),
    ],
)
def test_what_can_not_be_pruned_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prune(small(), text(), **options)
    assert isinstance(small().model.layers[0].mlp, MoE)
    with pytest.raises(ConfigError, match="no list of layers"):
        prune(nn.Linear(2, 2), text())
    # Nothing has changed: not the layers before one that can't be pruned, nor the model's mode.
    model = small(intermediate_size=22).train()
    before = {name: param.clone() for name, param in model.named_parameters()}
    with pytest.raises(ConfigError, match="rows of 22: the pattern 2:4 needs"):
        prune(model, text(), pattern="2:4")
    with pytest.raises(ConfigError, match="no text to measure"):
        prune(model, [])
    assert model.training and all(torch.equal(before[name], param) for name, param in model.named_parameters())


def test_pruned_experts_lie_whole_on_a_rank() -> None:
    model = small()
    thinwire.keep(model, prune(model, text()).masks)
    with pytest.raises(ConfigError, match=r"is pruned already.*nearest: thinwire prune of its folder"):
        prune(model, text(), sparsity=0.75)
    with pytest.raises(ConfigError, match=r"pruning keeps other values .* nearest: --experts.slices 1"):
        check_experts(model, thinwire.ExpertParallel(2, slices=2), 2)
