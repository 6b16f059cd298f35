"""Checkpoints of other programs, imported: the model that transformers loads then computes what the original did."""

from __future__ import annotations

import io
import json
import os
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint import makers
from tests.workers import run_workers
from thinwire import cli
from thinwire.checkpoint.foreign import (
    DCPSource,
    MegatronSource,
    SafetensorsSource,
    Sizes,
    Zero3Source,
    consolidate as consolidated,
    huggingface,
)
from thinwire.checkpoint.foreign.pickles import load_metadata, load_pt
from thinwire.checkpoint.foreign.tables import rotary_halves
from thinwire.errors import ConfigError, ThinwireError
from thinwire.models import Llama, LlamaConfig

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
KINDS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, rope_theta=5000.0),
    "mistral": lambda: transformers.MistralConfig(**SIZES, head_dim=8, sliding_window=None),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, head_dim=8, num_local_experts=3),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
}
TOKENS = torch.arange(40).remainder(17)[None]


def original(kind: str) -> Any:
    """A model with norms and biases that are not all one or zero."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(KINDS[kind]()).float().eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return model


def weights(model: Any) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in model.named_parameters()}


def imported(source: Path, *flags: str) -> Any:
    """The model of the folder that `thinwire import` makes."""
    assert cli.run(["import", str(source), str(source / "out"), *flags]) == 0
    return transformers.AutoModelForCausalLM.from_pretrained(source / "out", dtype=torch.float32).eval()


@torch.no_grad()
def assert_same(ours: Any, theirs: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(weights(ours).values(), weights(theirs).values(), strict=True))
    assert torch.equal(ours(TOKENS).logits, theirs(TOKENS).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_hugging_face_shards(kind: str, tmp_path: Path) -> None:
    model = original(kind)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(imported(tmp_path), model)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_llama_shape_is_our_own_model(kind: str, tmp_path: Path) -> None:
    model = original(kind)
    model.save_pretrained(tmp_path)
    sizes = Sizes.from_config(json.loads((tmp_path / "config.json").read_text()))
    theta = model.config.rope_parameters["rope_theta"]
    own = {name: SIZES[name] for name in LlamaConfig.__dataclass_fields__ if name in SIZES}
    ours = Llama(LlamaConfig(**own, rope_theta=theta, rms_norm_eps=model.config.rms_norm_eps))
    ours.load_state_dict(dict(consolidated(SafetensorsSource(tmp_path), huggingface(sizes))), strict=True)
    torch.testing.assert_close(ours(TOKENS), model(TOKENS).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kind", "tp", "pp"), [("llama", 2, 2), ("qwen2", 2, 1)])
def test_megatron_shards(kind: str, tp: int, pp: int, tmp_path: Path) -> None:
    model = original(kind)
    makers.save_megatron(tmp_path, weights(model), 4, 2, tp, pp)
    model.config.save_pretrained(tmp_path)
    assert_same(imported(tmp_path), model)


def test_zero3_shards(tmp_path: Path) -> None:
    model = original("llama")
    frozen = {"model.norm.weight", "model.layers.1.mlp.up_proj.weight"}
    # 32 elements of a norm on 12 ranks, 3 each: the last rank has none. Matrices end in padding too.
    makers.save_zero3(tmp_path / "run", weights(model), 12, frozen)
    model.config.save_pretrained(tmp_path / "config")
    assert_same(imported(tmp_path / "run", "--config", str(tmp_path / "config")), model)


def test_torchtitan_shards(tmp_path: Path) -> None:
    model = original("llama")
    folder = tmp_path / "step-3"
    run_workers(makers.save_titan, 2, str(folder), weights(model), 4, 2)
    model.config.save_pretrained(folder)
    assert_same(imported(folder), model)


def test_neighbouring_pairs_attend_as_halves_do() -> None:
    heads, width, length = 2, 8, 5
    weight, x = torch.randn(heads * width, 16), torch.randn(length, 16)
    angles = torch.arange(length)[:, None] * 100.0 ** -(torch.arange(0, width, 2) / width)
    half = (x @ weight.T).view(length, heads, 2, width // 2)
    turned = (
        torch.view_as_complex(torch.stack([half[:, :, 0], half[:, :, 1]], -1))
        * torch.polar(torch.ones(1), angles)[:, None]
    )
    pairs = (x @ makers.interleaved(weight, heads).T).view(length, heads, width // 2, 2)
    theirs = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(1), angles)[:, None]
    torch.testing.assert_close(turned, theirs)
    assert torch.equal(rotary_halves(heads)(makers.interleaved(weight, heads))[0], weight)


class Attack:
    """A pickle that would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_a_malicious_pickle_is_refused(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch.save({"model": {"w": torch.ones(1)}, "args": Attack(mark)}, tmp_path / "model_optim_rng.pt")
    with pytest.raises(ConfigError, match=r"(posix|os)\.system, which could run code: it is not opened"):
        load_pt(tmp_path / "model_optim_rng.pt")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attack(mark)))
    with pytest.raises(ConfigError, match=r"(posix|os)\.system, which could run code: it is not opened"):
        DCPSource(tmp_path)
    assert not mark.exists()


def test_a_name_pushed_while_it_is_read_is_refused_too(tmp_path: Path) -> None:
    # Built-ins and names with dots that would lead from a harmless class to another one.
    for text in (b"cbuiltins\neval\n.", b"cargparse\n_sys.exit\n.", b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93."):
        with pytest.raises((ConfigError, ThinwireError)):
            (tmp_path / ".metadata").write_bytes(text)
            load_metadata(tmp_path / ".metadata")


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps([1, 2]), pickle.dumps({"a": 1})[:-3]])
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    for name, load in (("x.pt", load_pt), (".metadata", load_metadata)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ThinwireError, match=name):
            load(tmp_path / name)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.arange(5000.0)}, checkpoint_id=tmp_path, no_dist=True)
    (shard,) = tmp_path.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:3000])
    with pytest.raises(ThinwireError, match="a can't be read"):
        DCPSource(tmp_path).shards("a")
    buffer = io.BytesIO()
    torch.save({"model": {}}, buffer)
    (tmp_path / "x.pt").write_bytes(buffer.getvalue()[:-200])
    with pytest.raises(ThinwireError, match=r"x.pt is damaged"):
        load_pt(tmp_path / "x.pt")


class EarlierPickler(pickle.Pickler):
    """Writes members of enums as Python before 3.11.4 does."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_metadata_that_an_earlier_python_wrote_is_read(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.arange(5.0)}, checkpoint_id=tmp_path, no_dist=True)
    written = load_metadata(tmp_path / ".metadata")
    with (tmp_path / ".metadata").open("wb") as file:
        EarlierPickler(file).dump(written)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert load_metadata(tmp_path / ".metadata") == written
    with (tmp_path / ".metadata").open("wb") as file:
        pickle.dump((written, os.path.join), file)
    with pytest.raises(ConfigError, match=r"asks for posixpath.join, which could run code"):
        load_metadata(tmp_path / ".metadata")
    (tmp_path / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(cbuiltins\nstr\nS'mro'\ntR.")
    with pytest.raises(ConfigError, match="which could run code"):
        load_metadata(tmp_path / ".metadata")


def test_incomplete_checkpoints_are_refused(tmp_path: Path) -> None:
    state = weights(original("llama"))
    makers.save_megatron(tmp_path / "m", state, 4, 2, 2, 2)
    (tmp_path / "m/iter_0000007/mp_rank_01_001/model_optim_rng.pt").unlink()
    with pytest.raises(ConfigError, match="tensor-parallel rank 1 of stage 1 is missing"):
        MegatronSource(tmp_path / "m")
    makers.save_zero3(tmp_path / "z", state, 3, set())
    tag = tmp_path / "z/global_step12"
    (tag / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ConfigError, match="3 and 2 files of model and optimizer states are there, of 3 ranks"):
        Zero3Source(tmp_path / "z")
    (tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    (tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").rename(tag / "zero_pp_rank_3_mp_rank_00_optim_states.pt")
    with pytest.raises(ConfigError, match=r"optim_states of ranks \[3\] are there"):
        Zero3Source(tmp_path / "z")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    model = original("llama")
    model.save_pretrained(tmp_path / "run")
    config = json.loads((tmp_path / "run/config.json").read_text())
    for change, message in (
        ({"vocab_size": 101}, r"weight: 100 rows, and the config asks for 101"),
        ({"num_hidden_layers": 5}, "lacks model.layers.4.input_layernorm.weight"),
        (
            {"num_hidden_layers": 3},
            "has model.layers.3.input_layernorm.weight.* which the model of config.json does not have",
        ),
        ({"intermediate_size": 64}, r"mlp.*_proj.weight is .*48"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=message):
            cli.run(["import", str(tmp_path / "run"), str(tmp_path / "out"), "--config", str(tmp_path / "config.json")])
        assert not any(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--format", "megatorn"], "no such format; did you mean 'megatron'"),
        (["--formt", "hf"], "unknown flag --formt; did you mean '--format'"),
        ([], "looks like none of them: say --format"),
        (["--format", "hf"], r"config.json is missing: .*--config FILE"),
    ],
)
def test_import_says_what_is_wrong(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        cli.run(["import", str(tmp_path), str(tmp_path / "out"), *flags])


def test_a_broken_config_is_named_beside_an_unknown_format(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*looks like none of them.*config.json is not JSON"):
        cli.run(["import", str(tmp_path), str(tmp_path / "out")])
