"""A model whose head gives the loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.hosts.offload.counted import CountedBatch
from thinwire.losses import cut_loss, head_of, loss_in_effect
from thinwire.models import Llama, build_model, build_skeleton


def grads(model: nn.Module, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(tokens, targets)
    (loss / 2).backward()
    return {"": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def equal_to_plain(name: str, overrides: dict[str, int | bool], vocab_size: int = 300) -> None:
    model = build_model(name, vocab_size, 16, overrides=overrides).double()
    draw = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(0, vocab_size, (3, 16), generator=draw) for _ in range(2))
    targets[0, :5] = -100
    plain, logits = grads(model, tokens, targets), model(tokens)
    cut_loss(model)
    found = grads(model, tokens, targets)
    assert found.keys() == plain.keys()
    for key, value in found.items():
        # Plain logits are rounded to fp32.
        torch.testing.assert_close(value, plain[key].to(value.dtype), rtol=1e-4, atol=1e-7)
    assert torch.equal(model(tokens), logits)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens, targets), found[""])


def test_llama_with_tied_weights() -> None:
    equal_to_plain("tiny", {"tie_word_embeddings": True})


def test_mixture_keeps_its_balance_loss() -> None:
    equal_to_plain("moe-tiny", {})


def test_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32,
    }  # fmt: skip
    transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "llama")
    equal_to_plain(f"hf:{tmp_path / 'llama'}", {})
    # The launcher looks for the head of a model without weights, whose forward may ask for values.
    transformers.GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, architectures=["GPT2LMHeadModel"]
                            ).save_pretrained(tmp_path / "gpt2")  # fmt: skip
    for name in ("llama", "gpt2"):
        head = head_of(build_skeleton(f"hf:{tmp_path / name}", 300, 16))
        assert isinstance(head, torch.nn.Linear) and head.weight.is_meta and head.weight.shape == (300, 16)
    transformers.Gemma2Config(**sizes, architectures=["Gemma2ForCausalLM"]).save_pretrained(tmp_path / "gemma2")
    with pytest.raises(ConfigError, match="does not return the output of a Linear"):
        head_of(build_model(f"hf:{tmp_path / 'gemma2'}", 300, 16))


def test_autocast_computes_in_its_dtype() -> None:
    model = build_model("tiny", 300, 16)
    tokens = torch.arange(32).view(2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        plain = grads(model, tokens, tokens)
        cut_loss(model)
        found = grads(model, tokens, tokens)
    assert found[""].dtype == torch.float32
    for key, value in found.items():
        assert value.dtype == torch.float32
        assert float((value - plain[key]).norm()) <= 2e-2 * float(plain[key].norm())


def test_auto_takes_cut_where_logits_are_large() -> None:
    assert loss_in_effect("auto", 2048, 300)[0] == "plain"
    effect, why = loss_in_effect("auto", 2048, 50_304)
    assert effect == "cut" and "412.1 MB" in why
    assert loss_in_effect("plain", 2048, 50_304)[0] == "plain"


def test_a_cut_loss_keeps_no_logits() -> None:
    skeleton = build_skeleton("tiny", 4096, 64)
    assert isinstance(skeleton, Llama)
    plain, cut = (CountedBatch(skeleton.config, loss, 2, 64, "fp32").step_bytes().kept for loss in ("plain", "cut"))
    # The head's gradient is there from the forward on.
    assert plain - cut > 4 * 2 * 64 * 4096 - skeleton.lm_head.weight.nbytes
