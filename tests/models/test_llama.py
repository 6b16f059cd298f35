from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from torch.nn import functional as F

from thinwire.errors import ConfigError
from thinwire.models import PRESETS, Llama, LlamaConfig, generate
from thinwire.models.llama import next_token_loss

TINY = replace(PRESETS["tiny"], max_position_embeddings=32)


def some_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, TINY.vocab_size, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_state_dict_and_logits_match_hugging_face(tied: bool, kv_heads: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = replace(TINY, tie_word_embeddings=tied, num_key_value_heads=kv_heads)
    model = Llama(config)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():  # norms that are not all one, or a misplaced one goes unseen
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**asdict(config)))
    theirs.load_state_dict(model.state_dict(), strict=True)
    tokens = some_tokens(2, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


def test_loss_is_the_mean_cross_entropy_in_fp32() -> None:
    model = Llama(TINY)
    tokens, targets = some_tokens(2, 16), some_tokens(2, 16)
    expected = F.cross_entropy(model(tokens).reshape(-1, TINY.vocab_size).double(), targets.reshape(-1))
    with torch.autocast("cpu", torch.bfloat16):
        autocast_loss = model(tokens, targets)
    assert autocast_loss.dtype == torch.float32
    assert Llama(TINY).bfloat16()(tokens, targets).dtype == torch.float32
    assert autocast_loss.item() == pytest.approx(expected.item(), abs=2e-2)
    wide = next_token_loss(model(tokens).double(), targets)
    assert wide.dtype == torch.float64 and wide.item() == pytest.approx(expected.item(), abs=1e-12)
    assert model(tokens, targets).item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("num_sequences", [0, 2])
def test_a_text_without_targets_has_loss_0_and_no_gradient(num_sequences: int) -> None:
    model, tokens = Llama(TINY), torch.zeros(num_sequences, 8, dtype=torch.int64)
    loss = model(tokens, torch.full_like(tokens, -100))
    loss.backward()
    assert loss == 0
    assert all(not param.grad.any() for param in model.parameters() if param.grad is not None)


def test_a_position_sees_only_the_past() -> None:
    model = Llama(TINY)
    tokens = some_tokens(1, 16)
    changed = tokens.clone()
    changed[0, 10] += 1 - 2 * (changed[0, 10] > 0).long()
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert torch.all(difference[:10] == 0)
    assert difference[10] > 0 and difference[15] > 0


def test_weights_depend_on_the_generator_alone() -> None:
    models = [Llama(TINY), Llama(TINY), Llama(TINY)]
    before = torch.get_rng_state()
    for model, seed in zip(models, (7, 7, 8), strict=True):
        model.init_weights(torch.Generator().manual_seed(seed))
    assert torch.equal(before, torch.get_rng_state())
    first, same, other = (torch.cat([p.flatten() for p in m.parameters()]) for m in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    weights = models[0].state_dict()
    assert weights["model.embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    expected_std = 0.02 / (2 * TINY.num_hidden_layers) ** 0.5
    assert weights["model.layers.0.mlp.down_proj.weight"].std().item() == pytest.approx(expected_std, rel=0.05)
    assert torch.all(weights["model.norm.weight"] == 1)


def test_construction_leaves_the_global_seed_alone() -> None:
    before = torch.get_rng_state()
    Llama(TINY)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("tiny", 0.15e6, 0.25e6),
        ("demo", 9e6, 11e6),
        ("125m", 115e6, 135e6),
        ("350m", 330e6, 370e6),
        ("1b", 0.95e9, 1.15e9),
    ],
)
def test_presets_have_the_size_they_are_named_after(name: str, low: float, high: float) -> None:
    with torch.device("meta"):
        model = Llama(PRESETS[name])
    assert low < model.num_parameters < high
    assert model.num_parameters == sum(p.numel() for p in model.parameters())
    if name in ("tiny", "demo"):
        assert all(p.numel() % 2048 == 0 for p in model.parameters() if p.ndim > 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 66}, "nearest is 64"),
        ({"num_key_value_heads": 3}, "must divide num_attention_heads=4"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LlamaConfig(**{**asdict(TINY), **change})


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="33 tokens: the model holds at most 32"):
        Llama(TINY)(some_tokens(1, 33))


def test_it_learns_a_repeating_sequence() -> None:
    model = Llama(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sequence = torch.arange(33).remainder(5)[None]
    for _ in range(40):
        optimizer.zero_grad()
        model(sequence[:, :-1], sequence[:, 1:]).backward()
        optimizer.step()
    assert model(sequence[:, :-1], sequence[:, 1:]).item() < 0.1
    grown = generate(model, sequence[:, :8], 40, temperature=0)  # runs past the context of 32
    assert torch.equal(grown[0, :8], sequence[0, :8])
    assert torch.equal(grown[0, 8:20], torch.arange(8, 20).remainder(5))
    assert grown.shape == (1, 48)
    # Lengths 8 to 31 become 16 and 32.
    assert torch.equal(generate(model, sequence[:, :8], 40, temperature=0, multiple=16), grown)


def test_generation_repeats_under_a_generator_and_restores_the_mode() -> None:
    model = Llama(TINY).train()
    draws = [generate(model, some_tokens(2, 4), 12, 1.0, torch.Generator().manual_seed(s)) for s in (3, 3, 4)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert model.training
    assert not draws[0].requires_grad
