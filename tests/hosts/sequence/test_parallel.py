"""Training with sequences over several ranks equals training in one process."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import thinwire
from tests.workers import run_workers
from thinwire.errors import ConfigError
from thinwire.hosts.sequence.parallel import IGNORED
from thinwire.hosts.sequence.probe import check_sharing
from thinwire.models.hf import HFCausalLM
from thinwire.models.llama import Llama, LlamaConfig

STEPS, BATCH, LENGTH = 20, 2, 30
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=LENGTH,
)  # fmt: skip

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip
# Rotary frequencies that are others beyond 8 tokens.
HALVED = {"rope_theta": 10000.0, "original_max_position_embeddings": 8}
BY_LENGTH: list[dict[str, Any]] = [
    {"rope_parameters": HALVED | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}},
    {"max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
]
# Attention by latent vectors: keys are 12 wide, values 8.
LATENT: dict[str, Any] = {
    "kind": "deepseek_v3", "num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "kv_lora_rank": 16, "q_lora_rank": None, "first_k_dense_replace": 2,
}  # fmt: skip


def batch_of(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Tokens and what follows them; in odd steps, only a few early tokens of one sequence count."""
    draw = torch.Generator().manual_seed(100 * step + replica)
    tokens = torch.randint(CONFIG.vocab_size, (BATCH, LENGTH + 1), generator=draw)
    targets = tokens[:, 1:].clone()
    if step % 2:
        targets[:, 3 + replica :], targets[1:] = IGNORED, IGNORED
    return tokens[:, :-1], targets


def total_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=IGNORED)


def alone(num_replicas: int) -> tuple[list[float], dict[str, Tensor]]:
    """One process takes the tokens of all replicas: the mean is over all that count."""
    model = Llama(CONFIG)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(STEPS):
        tokens, targets = (torch.cat(x) for x in zip(*(batch_of(step, r) for r in range(num_replicas)), strict=True))
        loss = total_loss(model(tokens), targets) / (targets != IGNORED).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def train(rank: int, ranks: int, method: str, steps: int = STEPS, local_positions: bool = False) -> Any:
    """By hand: split, mean_loss, and a strategy over all ranks."""
    model = Llama(CONFIG)
    options = thinwire.SequenceParallel(ranks, method=method)
    seq = thinwire.sequence_parallel(model, options, local_size=2)
    if local_positions:
        model.model.positions = lambda tokens: torch.arange(tokens.shape[1])
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    module, optimizer = thinwire.zero(model, inner, thinwire.Zero(), local_size=2)
    losses = []
    for step in range(steps):
        tokens, targets = seq.split(*batch_of(step, rank // ranks))
        loss = seq.mean_loss(total_loss(module(tokens), targets), (targets != IGNORED).sum())
        loss.backward()
        optimizer.note_loss(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(optimizer.mean_loss)
    optimizer.check_replicas()
    weights = optimizer.masters([name for name, _ in model.named_parameters()])
    seq.close()
    optimizer.close()
    return losses, weights


def saved_bytes(model: Llama, tokens: Tensor) -> int:
    """Bytes that a forward keeps for the backward, weights aside."""
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, int] = {}
    held = []

    def keep(x: Tensor) -> Tensor:
        held.append(x)
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(tokens)
    return sum(size for at, size in kept.items() if at not in weights)


def memory(method: str) -> float:
    """What a rank keeps, as a part of what one process does."""
    tokens = batch_of(0, 0)[0][:, :24]
    config = replace(CONFIG, num_key_value_heads=4, hidden_size=64)
    whole = saved_bytes(Llama(config), tokens)
    model = Llama(config)
    options = thinwire.SequenceParallel(4, method=method)
    seq = thinwire.sequence_parallel(model, options, local_size=2)
    part = saved_bytes(model, seq.split(tokens)[0])
    seq.close()
    return part / whole


def late_waits() -> int:
    """Messages that were there before the work behind them began, in one layer, forward and backward."""
    model, found, sent = Llama(CONFIG), list[Tensor](), list[Any]()
    seq = thinwire.sequence_parallel(model, thinwire.SequenceParallel(4, "ulysses"), local_size=2, timeout_s=120)
    block: Any = model.model.layers[1].self_attn
    send = block.send

    def watched(x: Tensor) -> Any:
        sent.append(send(x))
        return sent[-1]

    def forward(*_: Any) -> None:
        # Queries and keys come while values are not projected yet.
        assert len(sent) == 2
        found.extend([each.under_way.result(timeout=60) for each in sent])

    block.send = watched
    block.v_proj.register_forward_pre_hook(forward)
    loss = model(seq.split(batch_of(0, 0)[0])[0]).square().mean()
    there = [each.under_way for each in sent]
    arrive = sent[2].exchange.tokens_here

    def backward(*given: Any) -> Tensor:
        # Gradients of queries and keys come while autograd has not gone on behind the values.
        assert not any(now.under_way is before for now, before in zip(sent, there, strict=True))
        found.extend([each.under_way.result(timeout=60) for each in sent[:2]])
        return arrive(*given)

    sent[2].exchange.tokens_here = backward
    loss.backward()
    seq.close()
    return len(found)


# Where documents end in the two sequences of a batch: across the borders of ranks, and inside of one.
ENDS = ([5, 6, 21, LENGTH], [17, LENGTH])


def packed(rank: int, method: str) -> tuple[Tensor, list[Tensor]]:
    """The logits of packed documents, and the mean gradients of all ranks."""
    model = Llama(CONFIG).double()
    seq = thinwire.sequence_parallel(model, thinwire.SequenceParallel(4, method), local_size=2, timeout_s=120)
    tokens, targets = batch_of(0, 0)
    documents = torch.stack([torch.bucketize(torch.arange(LENGTH), torch.tensor(ends), right=True) for ends in ENDS])
    part, aims = seq.split(tokens, targets, documents)
    logits = model(part)
    loss = F.cross_entropy(logits.flatten(0, 1), aims.flatten(), reduction="sum", ignore_index=IGNORED)
    seq.mean_loss(loss, (aims != IGNORED).sum()).backward()
    own = [param.grad for param in model.parameters() if param.grad is not None]
    grads = [seq.comm.wait(seq.comm.all_gather_exact(grad)).mean(0) for grad in own]
    whole = seq.whole(logits)
    with pytest.raises(ConfigError, match=r"documents \[2, 29\]: both"):
        seq.split(tokens, targets, documents[:, 1:])
    with pytest.raises(ConfigError, match=r"30 tokens over 4 ranks: 2 more are padding, .* nearest: 32 tokens"):
        seq.attention(*[torch.zeros(2, 4, 8, 8)] * 3, is_causal=False)
    seq.close()
    return whole, grads


def one_by_one() -> tuple[Tensor, list[Tensor]]:
    """One process takes each document by itself."""
    model = Llama(CONFIG).double()
    tokens, targets = batch_of(0, 0)
    rows = []
    for row, ends in zip(tokens, ENDS, strict=True):
        rows.append(torch.cat([model(row[None, a:b]) for a, b in pairwise([0, *ends])], 1))
    logits = torch.cat(rows)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return logits.detach(), [param.grad for param in model.parameters() if param.grad is not None]


def unequal(rank: int, *nums: int) -> tuple[Tensor, Tensor]:
    """The mean loss over ranks with so many tokens that count, and the mean of its gradients."""
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    grads = list[Tensor]()
    weight.register_hook(grads.append)
    seq = thinwire.sequence_parallel(Llama(CONFIG), thinwire.SequenceParallel(2, "ring"), local_size=2)
    rows = torch.arange(3.0 * sum(nums), dtype=torch.float64).view(-1, 3).split(nums)[rank]
    loss = seq.mean_loss((rows @ weight).sum(), len(rows))
    loss.backward()
    told = [seq.everyone.wait(seq.everyone.all_gather_exact(x)) for x in (loss.detach()[None], *grads)]
    seq.close()
    return told[0].mean(), told[1].mean(0)


def several(rank: int, world_size: int) -> list[Any]:
    assert late_waits() == 4
    # One of the ranks of a sequence, both of one, and all of them have no token that counts.
    for nums in ((5, 0, 3, 1), (2, 7, 0, 0), (0, 0, 0, 0)):
        rows = torch.arange(3.0 * sum(nums), dtype=torch.float64).view(-1, 3)
        expected = rows.sum(0) / max(sum(nums), 1)
        torch.testing.assert_close(unequal(rank, *nums), (expected.sum(), expected), rtol=1e-12, atol=0)
    alone_logits, alone_grads = one_by_one()
    for method in ("ulysses", "ring", "ulysses=2,ring=2"):
        logits, grads = packed(rank, method)
        torch.testing.assert_close(logits, alone_logits, rtol=0, atol=1e-12)
        torch.testing.assert_close(grads, alone_grads, rtol=0, atol=1e-12)
    return [
        memory("ulysses"), memory("ring"),
        train(rank, 4, "ulysses"), train(rank, 2, "ring"),
        train(rank, 4, "ulysses", steps=3, local_positions=True)[0],
    ]  # fmt: skip


def close_to(found: tuple[list[float], dict[str, Tensor]], truth: tuple[list[float], dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], truth[0], rtol=1e-5, atol=0)
    for name, value in truth[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=2e-4, msg=name)


def test_steps_are_those_of_one_process_with_very_unequal_tokens() -> None:
    four, pairs = alone(1), alone(2)
    for heads, ring, whole, two, misplaced in run_workers(several, 4, local_size=2):
        # The ring keeps no weights of the attention, which one process does for so few tokens.
        assert 0.9 / 4 < heads < 1.1 / 4 and ring < 1.1 / 4
        close_to(whole, four)
        close_to(two, pairs)
        # Positions that count from 0 on each rank train something else.
        with pytest.raises(AssertionError):
            torch.testing.assert_close(misplaced, four[0][:3], rtol=1e-5, atol=0)


def as_pairs(rank: int, world_size: int) -> list[Any]:
    refuse_dropout()
    on_a_mesh()
    refuse_what_is_of_a_part()
    ways = [hugging_face(way) for way in ("ulysses", "ring")]
    return [*ways, hugging_face("ring", **LATENT), *(hugging_face("ulysses", **rope) for rope in BY_LENGTH)]


def refuse_dropout() -> None:
    """Attention with dropout is refused, at the start where a configuration states it, else in the first forward."""
    transformers = pytest.importorskip("transformers")
    options = thinwire.SequenceParallel(2)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **SIZES))
    for name, kind, more in (
        ("attention_dropout", "llama", {"attention_dropout": 0.1}),
        ("attn_pdrop", "gpt2", {"attn_pdrop": 0.1}),
        ("attention_probs_dropout_prob", "biogpt", {}),
    ):
        config = transformers.AutoConfig.for_model(kind, **SIZES | more)
        with pytest.raises(ConfigError, match=f"{name} 0.1: parts of a sequence can't share a mask; nearest: 0.0"):
            thinwire.sequence_parallel(transformers.AutoModelForCausalLM.from_config(config), options)
    seq = thinwire.sequence_parallel(model, options)
    model.model.layers[1].self_attn.attention_dropout = 0.1
    part, _ = seq.split(batch_of(0, 0)[0])
    with pytest.raises(ConfigError, match="and no dropout"):
        model.train()(input_ids=part, use_cache=False)
    seq.close()


def refuse_what_is_of_a_part() -> None:
    """A call that would mean this rank's tokens alone, and layers whose tokens do not see all before them."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **SIZES))
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ConfigError, match=r"layer_types chunked_attention: .*nearest: full_attention"):
        thinwire.sequence_parallel(model, thinwire.SequenceParallel(2))
    model.config.layer_types = None
    seq = thinwire.sequence_parallel(model, thinwire.SequenceParallel(2))
    part, _ = seq.split(batch_of(0, 0)[0])
    own = seq.positions(part)
    truth = model(part).logits
    assert torch.equal(model(part, torch.ones_like(part), own[None]).logits, truth)
    for wrong in (
        {"labels": part}, {"attention_mask": part > 9}, {"position_ids": own[None] + 1},
        {"past_key_values": transformers.DynamicCache()}, {"input_ids": None, "inputs_embeds": torch.zeros(1, 8, 32)},
    ):  # fmt: skip
        (name,) = wrong.keys() - {"input_ids"}
        with pytest.raises(ConfigError, match=f"{name} of a model whose sequences lie on several ranks: .*nearest: "):
            model(**{"input_ids": part, **wrong})
    seq.close()


def on_a_mesh() -> None:
    """A model of transformers needs the calls of a preset, and in training needs targets."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **SIZES))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "sequence"))
    methods: list[Any] = [thinwire.Zero(), thinwire.SequenceParallel(2)]
    adamw = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM on a sequence axis: .*nearest: HFCausalLM"):
        thinwire.parallelize(model, adamw, mesh, methods, announce=False)
    stage = thinwire.parallelize(HFCausalLM(model, LENGTH), adamw, mesh, methods, announce=False)
    tokens, targets = batch_of(1, 0)
    with pytest.raises(ConfigError, match=r"nearest: model\(tokens, targets\)"):
        stage.module(tokens)
    assert stage.module(tokens, targets).requires_grad
    with torch.no_grad():
        assert stage.module(tokens).shape == (*tokens.shape, 64)
    stage.close()


def test_dropout_in_the_attention_of_a_preset_is_refused() -> None:
    model = Llama(CONFIG)
    vars(model.model)["config"] = SimpleNamespace(**asdict(CONFIG), attention_dropout=0.2)
    with pytest.raises(ConfigError, match=r"attention_dropout 0.2: .*nearest: 0.0"):
        thinwire.sequence_parallel(model, thinwire.SequenceParallel(1))


def hugging_face(method: str, kind: str = "llama", **more: Any) -> Any:
    """The gradients of a model of transformers: of one process, and of this one with another."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **SIZES | more)
    tokens, targets = batch_of(1, 0)
    results = []
    for ranks in (1, 2):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        seq = thinwire.sequence_parallel(model, thinwire.SequenceParallel(ranks, method=method))
        part, aims = seq.split(tokens, targets)
        logits = model(input_ids=part, use_cache=False).logits
        seq.mean_loss(total_loss(logits, aims), (aims != IGNORED).sum()).backward()
        grads = [param.grad for param in model.parameters()]
        if ranks == 2:
            # What a strategy does.
            grads = [seq.comm.wait(seq.comm.all_gather_exact(grad)).mean(0) for grad in grads]
        results.append([seq.whole(logits), *grads])
        seq.close()
    return results


def test_models_of_transformers_have_the_gradients_of_one_process() -> None:
    for whole, parts in (pair for of_rank in run_workers(as_pairs, 2) for pair in of_rank):
        for expected, found in zip(whole, parts, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        ("llama", {}, ""),
        ("gpt2", {}, ""),
        ("bloom", {}, "its attention is not one that transformers lets others replace"),
        ("mamba", {}, "its attention is not one that transformers lets others replace"),
        (
            "falcon_h1",
            {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
            "tokens meet outside of its attention",
        ),
    ],
)
def test_models_whose_tokens_meet_elsewhere_are_refused(kind: str, more: dict[str, Any], words: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0,
    }  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes | more))
    model.train()
    named, attention = model.state_dict(), model.config._attn_implementation
    if words:
        with pytest.raises(ConfigError, match=words):
            check_sharing(model)
    else:
        check_sharing(model)
    assert model.training and model.config._attn_implementation == attention and not model._forward_pre_hooks
    assert named.keys() == model.state_dict().keys()
