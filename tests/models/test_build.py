from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.models import HFCausalLM, Llama, build_model, generate

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 300,
    "n_positions": 64,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    return tmp_path


def hf(folder: Path, seed: int = 0, overrides: dict[str, int] | None = None) -> HFCausalLM:
    model = build_model(f"hf:{folder}", 256, 64, seed, overrides)
    assert isinstance(model, HFCausalLM)
    return model


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_a_preset_takes_vocabulary_context_and_overrides() -> None:
    model = build_model("tiny", 300, 48, seed=1, overrides={"num_hidden_layers": 1, "rope_theta": 5000})
    assert isinstance(model, Llama)
    assert (model.config.vocab_size, model.max_seq_len, len(model.model.layers)) == (300, 48, 1)
    assert model.config.rope_theta == 5000
    assert same_weights(model, build_model("tiny", 300, 48, 1, {"num_hidden_layers": 1}))
    assert not same_weights(model, build_model("tiny", 300, 48, 2, {"num_hidden_layers": 1}))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("dmo", {}, "did you mean 'demo'"),
        ("tiny", {"hiden_size": 64}, "did you mean 'hidden_size'"),
        ("tiny", {"hidden_size": 64.5}, "must be int, not float"),
        ("tiny", {"tie_word_embeddings": 1}, "must be bool, not int"),
        ("tiny", {"vocab_size": 10}, "at least 256"),
        ("tiny", {"max_position_embeddings": 4}, "at least 32"),
        ("hf:/no/such/folder", {}, "no such folder"),
    ],
)
def test_bad_names_and_fields_are_refused(name: str, overrides: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(name, 256, 32, 0, overrides)


def test_a_folder_with_a_config_gives_seeded_weights_behind_the_same_contract(folder: Path) -> None:
    before = torch.get_rng_state()
    model = hf(folder, seed=5)
    assert torch.equal(before, torch.get_rng_state())
    tokens = torch.arange(20)[None]
    logits = model(tokens)
    assert logits.shape == (1, 20, 300)
    model.eval()  # without dropout
    expected = torch.nn.functional.cross_entropy(model(tokens)[0], tokens[0])
    torch.testing.assert_close(model(tokens, tokens), expected)
    assert generate(model, tokens, 60).shape == (1, 80)
    assert same_weights(model, hf(folder, seed=5))
    assert not same_weights(model, hf(folder, seed=6))


def test_weights_of_the_folder_are_loaded_in_fp32(folder: Path) -> None:
    model = hf(folder, seed=5)
    model.model.bfloat16().save_pretrained(folder)
    loaded = hf(folder, seed=6)
    assert loaded.model.training
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert same_weights(model.float(), loaded)


def test_weights_that_the_folder_lacks_are_announced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = hf(folder, seed=5)
    weights = {k: v.contiguous() for k, v in model.model.state_dict().items() if k != "lm_head.weight"}
    del weights["transformer.h.1.mlp.c_fc.weight"]
    safetensors.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    hf(folder, seed=6)
    assert "1 weights are not in the folder and start at random: transformer.h.1.mlp.c_fc.weight" in caplog.text


def test_a_pickle_is_never_opened(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model.bin is a pickle.* python -c .*save_pretrained"):
        hf(folder)


def test_a_missing_folder_suggests_model_folders_alone(folder: Path) -> None:
    (folder / "gpt2").mkdir()
    (folder / "gpt3").mkdir()
    (folder / "gpt2/config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"no such folder; did you mean 'hf:{folder}/gpt2'\?$"):
        hf(folder / "gpt4")
    with pytest.raises(
        ConfigError,
        match=r"hf:/nonexistent-qqq: no such folder; give a folder with config.json and its weights, or a preset$",
    ):
        hf(Path("/nonexistent-qqq"))


def test_code_in_the_folder_is_never_run(folder: Path) -> None:
    config = GPT2 | {"model_type": "mine", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with pytest.raises(ConfigError, match="transformers cannot build it"):
        hf(folder)
    assert not (folder / "ran").exists()


def test_overrides_reach_the_folder_config(folder: Path) -> None:
    assert len(hf(folder, overrides={"n_layer": 1}).model.transformer.h) == 1
    with pytest.raises(ConfigError, match="did you mean 'n_layer'"):
        hf(folder, overrides={"n_layr": 1})


@pytest.mark.parametrize(
    ("vocab_size", "seq_len", "message"),
    [
        (301, 64, "vocabulary of 300 is smaller than the tokenizer's 301"),
        (256, 65, "--seq-len 65: .* holds at most 64 tokens; nearest: --seq-len 64$"),
    ],
)
def test_a_model_too_small_for_the_data_is_refused(folder: Path, vocab_size: int, seq_len: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(f"hf:{folder}", vocab_size, seq_len)


def test_a_folder_that_is_no_model_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="transformers cannot build it"):
        hf(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config.json"):
        hf(folder)


def test_without_transformers_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[hf\]'"):
        hf(folder)
