"""Larger models compute what small ones do, in every pattern and family; new weights differ and learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from tests.workers import run_workers
from thinwire import cli
from thinwire.convert.verify import UnfaithfulError
from thinwire.errors import ConfigError
from thinwire.expansion import axes, expand as expand_module
from thinwire.expansion.axes import GrownAxis, expand_gain, expand_matrix, layer_plan
from thinwire.expansion.expand import expanded
from thinwire.expansion.families import Growth
from thinwire.expansion.roles import GrownTensor
from thinwire.models import build_model

transformers = pytest.importorskip("transformers")
VOCAB, LENGTH = 50, 12
LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 0.1,
}  # fmt: skip


def small_model(kind: str, **more: Any) -> Any:
    """A model of transformers with loud weights, so that no part hides in the others."""
    classes: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, LLAMA),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, LLAMA | {"tie_word_embeddings": True}),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, LLAMA | {"head_dim": 8}),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel, {
            "vocab_size": VOCAB, "n_positions": 32, "n_embd": 12, "n_layer": 4, "n_head": 2, "n_inner": 8,
            "layer_norm_epsilon": 0.1, "bos_token_id": None, "eos_token_id": None,
        }),
        "bert": (transformers.BertConfig, transformers.BertForMaskedLM, {
            "vocab_size": VOCAB, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 10, "max_position_embeddings": 32, "layer_norm_eps": 0.1,
        }),
    }  # fmt: skip
    config, model, sizes = classes[kind]
    torch.manual_seed(0)
    built = model(config(**sizes | more))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return built.eval()


@pytest.fixture
def in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' RMS norm computes in fp32 whatever it is given."""

    def exact(self: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    for family in ("llama.modeling_llama.Llama", "qwen2.modeling_qwen2.Qwen2", "qwen3.modeling_qwen3.Qwen3"):
        module, _, prefix = family.rpartition(".")
        monkeypatch.setattr(f"transformers.models.{module}.{prefix}RMSNorm.forward", exact)


def grown(kind: str, inserted: int = 2, seed: int = 0, eps: float | None = None, **sizes: Any) -> Any:
    """A small model and the larger one, both in fp64. eps: of the larger one, where it is not what it must be."""
    small = small_model(kind).double()
    origin: Any = Tensors(small)
    growth = Growth.of(origin.settings, **{"hidden_size": None, "layers": None} | sizes)
    settings = dict(growth.large) | ({growth.family.sizes[5]: eps} if eps else {})
    large = type(small)(type(small.config)(**settings)).double().eval()
    weights = {name: tensor.rows() for name, tensor in expanded(origin, growth, seed, inserted)}
    missing, unexpected = large.load_state_dict(weights, strict=False)
    assert not unexpected and not missing
    return small, large


class Tensors:
    """A model in memory as an origin."""

    def __init__(self, model: Any) -> None:
        self.settings = model.config.to_dict() | {"architectures": [type(model).__name__]}
        tied = {} if not model.config.tie_word_embeddings else model._tied_weights_keys
        self.weights = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}

    def names(self) -> Any:
        return self.weights

    def tensor(self, name: str) -> Tensor:
        return self.weights[name]


def logits(model: Any) -> Tensor:
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % VOCAB
    return model(input_ids=tokens).logits


def error(small: Any, large: Any) -> float:
    """The largest difference of logits over the largest logit."""
    with torch.no_grad():
        ours = logits(small)
        return float((ours - logits(large)).abs().max() / ours.abs().max())


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", {"hidden_size": 40}),
        ("llama", {"hidden_size": 24, "layers": 7, "intermediate_size": 33}),
        ("llama", {"layers": 8}),
        ("qwen2", {"hidden_size": 56, "layers": 5}),
        ("qwen3", {"hidden_size": 32, "layers": 7}),
        ("gpt2", {"hidden_size": 18, "layers": 7}),
        ("gpt2", {"hidden_size": 30, "intermediate_size": 9}),
        ("gpt2", {"hidden_size": 24}),
        ("bert", {"hidden_size": 24}),
        ("bert", {"hidden_size": 36, "intermediate_size": 17}),
    ],
)
def test_a_larger_model_computes_the_same(kind: str, sizes: dict[str, int], in_fp64: None) -> None:
    small, large = grown(kind, **sizes)
    assert error(small, large) < 1e-12
    width = "n_embd" if kind == "gpt2" else "hidden_size"
    assert getattr(large.config, width) == sizes.get("hidden_size", getattr(small.config, width))


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ({"hidden_size": 24}, 5e-6), ({"layers": 7}, 5e-6), ({"hidden_size": 40}, 5e-5),
        ({"hidden_size": 40, "layers": 7}, 6e-4),
    ],
)  # fmt: skip
def test_in_fp32_logits_agree_to_rounding(sizes: dict[str, int], most: float) -> None:
    """Columns of copies cancel, and with them all but the rounding of their sums: the more copies, the more is left."""
    small, large = grown("llama", **sizes)
    assert error(small.float(), large.float()) < most


def test_a_norm_with_another_eps_would_differ(in_fp64: None) -> None:
    small, large = grown("llama", hidden_size=40, eps=0.1)
    assert error(small, large) > 1e-3


@pytest.mark.parametrize("inserted", [1, 2])
def test_inserted_layers_add_nothing_and_learn(inserted: int, in_fp64: None) -> None:
    """Depth alone: of type 2, all matrices of an inserted layer learn at once; of type 1, the last ones alone."""
    small, large = grown("llama", inserted, layers=7)
    assert list(layer_plan(4, 7)) == [(0, False), *((n, new) for n in (1, 2, 3) for new in (False, True))]
    assert error(small, large) < 1e-12
    F.cross_entropy(logits(large).flatten(0, 1), torch.arange(2 * LENGTH)).backward()
    layer = large.model.layers[2]
    for name, parameter in layer.named_parameters():
        is_last = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert bool((parameter == 0).all()) == (is_last and inserted == 1)
        if parameter.ndim == 2:
            assert (float(parameter.grad.abs().max()) > 1e-9) == (is_last or inserted == 2), name


def test_copies_part_and_the_residue_learns(in_fp64: None) -> None:
    _, large = grown("llama", hidden_size=24)
    optimizer = torch.optim.SGD(large.parameters(), lr=0.1)
    layer = large.model.layers[0]
    # Rows 8 to 11 of the keys are a copy of rows 0 to 3: their head.
    keys = layer.self_attn.k_proj
    x = torch.randn(5, 16).double()
    widened = torch.cat([x, torch.zeros(5, 8)], 1)
    torch.testing.assert_close(keys(widened)[:, :4], keys(widened)[:, 8:12])
    assert float((keys.weight[:4] - keys.weight[8:12]).detach().abs().max()) > 1e-3
    for step in range(2):
        optimizer.zero_grad()
        F.cross_entropy(logits(large).flatten(0, 1), torch.arange(2 * LENGTH)).backward()
        # Columns of the residue see zeros until what writes to it has moved.
        assert (float(keys.weight.grad[:, 16:].abs().max()) > 1e-9) == (step == 1)
        optimizer.step()
    assert float((keys(widened)[:, :4] - keys(widened)[:, 8:12]).detach().abs().max()) > 1e-4
    again = grown("llama", hidden_size=24)[1]
    other = grown("llama", hidden_size=24, seed=1)[1]
    names = "model.layers.0.self_attn.k_proj.weight"
    first = grown("llama", hidden_size=24)[1]
    assert torch.equal(again.state_dict()[names], first.state_dict()[names])
    assert not torch.equal(other.state_dict()[names], first.state_dict()[names])


@pytest.mark.parametrize("residue", ["circular", "average", "zero"])
@pytest.mark.parametrize(("small", "large"), [(6, 16), (6, 13), (6, 12), (6, 7), (6, 6)])
def test_every_pattern_keeps_the_product(residue: Any, small: int, large: int) -> None:
    """Vector and matrix widen by themselves; and a part of the rows is the same as in the whole."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, small, generator=generator, dtype=torch.float64)
    x = torch.randn(3, small, generator=generator, dtype=torch.float64)
    into, out = GrownAxis(small, large, residue), GrownAxis(5, 12, residue)
    wide = into.write(x.t()).t()
    found = expand_matrix(weight, out, into, seed=7)
    torch.testing.assert_close(wide @ found.t(), out.write((x @ weight.t()).t()).t(), atol=1e-13, rtol=0)
    assert float((wide @ expand_matrix(weight, out, into, 7, adds_zero=True).t()).abs().max()) < 1e-13
    assert torch.equal(expand_matrix(weight, out, into, 7, start=3, stop=9), found[3:9])
    if residue == "zero" and large > small:
        gain = torch.rand(small, generator=generator, dtype=torch.float64) + 1
        kappa = into.kappa
        narrow = F.rms_norm(x, (small,), gain, 0.1)
        broad = F.rms_norm(wide, (large,), expand_gain(gain, into, 3), 0.1 * kappa)
        torch.testing.assert_close(broad, into.write(narrow.t()).t(), atol=1e-13, rtol=0)


def on_ranks(rank: int, world_size: int) -> None:
    """Each rank makes its rows of every tensor; joined, they are what one process makes, to the bit."""
    for kind, width in (("llama", 24), ("gpt2", 18), ("bert", 24)):
        origin: Any = Tensors(small_model(kind))
        growth = Growth.of(origin.settings, width, None if kind == "bert" else 6)
        # Each rank expands alone, in an order of its own.
        for inserted in (1, 2):
            tensors = dict(expanded(origin, growth, 3, inserted))
            owned = {}
            for name in list(tensors)[:: 1 if rank else -1]:
                bounds = [tensors[name].shape[0] * r // world_size for r in range(world_size + 1)]
                owned[name] = tensors[name].rows(bounds[rank], bounds[rank + 1])
            for name, grown in tensors.items():
                shards: list[Any] = [None] * world_size
                dist.all_gather_object(shards, owned[name])
                whole = grown.rows()
                assert whole.shape == grown.shape and torch.equal(torch.cat(shards), whole), name


def test_ranks_expand_their_shards_alone() -> None:
    run_workers(on_ranks, 3)


@pytest.mark.parametrize("draws", [True, False])
def test_plain_copies_stay_equal_for_ever(draws: bool, in_fp64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that read an input's copies, W / s each, have equal gradients; drawn ones part with the first step."""
    if not draws:
        monkeypatch.setattr(axes, "uniform", lambda seed, first, num: torch.full((num,), 0.5))
    # Four copies of each neuron, and no residue.
    _, large = grown("llama", intermediate_size=80)
    optimizer = torch.optim.SGD(large.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(logits(large).flatten(0, 1), torch.arange(2 * LENGTH)).backward()
        optimizer.step()
    copies = large.model.layers[0].mlp.down_proj.weight.detach().unflatten(1, (4, 20))
    neurons = large.model.layers[0].mlp.up_proj.weight.detach().unflatten(0, (4, 20))
    apart = max(float((copies - copies[:, :1]).abs().max()), float((neurons - neurons[:1]).abs().max()))
    assert apart > 1e-3 if draws else apart < 1e-12


def test_a_folder_is_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than a part of a tensor is made at a time, and the file is the same."""
    small_model("gpt2", vocab_size=256, n_embd=16).save_pretrained(tmp_path / "small")
    (tmp_path / "text.txt").write_text("".join(f"line {n} of {n * n} lines\n" for n in range(600)))
    monkeypatch.setenv("HOME", str(tmp_path))
    made, rows = list[Tensor](), GrownTensor.rows

    def noted(*given: Any) -> Tensor:
        made.append(rows(*given))
        return made[-1]

    monkeypatch.setattr(GrownTensor, "rows", noted)
    told: dict[str, Any] = {"hidden_size": 24, "data": str(tmp_path / "text.txt"), "sequences": 1}
    for name, most in (("whole", 1 << 26), ("parts", 500)):
        monkeypatch.setattr(expand_module, "PART_BYTES", most)
        made.clear()
        expand_module.expand(f"hf:{tmp_path / 'small'}", tmp_path / name, **told)
        assert max(part.nbytes for part in made) <= most
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "parts/model.safetensors").read_bytes()


def test_a_folder_is_expanded_and_proved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tied head becomes a tensor of its own; what differs is refused, and leaves no folder."""
    small_model("gpt2", vocab_size=256, n_embd=16).save_pretrained(tmp_path / "small")
    (tmp_path / "text.txt").write_text("".join(f"line {n} of {n * n} lines\n" for n in range(600)))
    monkeypatch.setenv("HOME", str(tmp_path))
    command = ["expand", f"hf:{tmp_path / 'small'}", "--hidden-size", "24", "--layers", "6", "--data"]
    command += [str(tmp_path / "text.txt"), "--sequences", "8", "--to"]
    assert cli.run([*command, str(tmp_path / "large")]) == 0
    said = capsys.readouterr().out
    assert "held-out tokens: logits differ" in said and "about 0.6 of its steps" in said
    large: Any = build_model(f"hf:{tmp_path / 'large'}", 256, 32)
    config = large.model.config
    assert (config.n_embd, config.n_layer, config.n_head, config.n_inner, config.tie_word_embeddings) == (
        24, 6, 3, 12, False,
    )  # fmt: skip
    monkeypatch.setattr(GrownAxis, "kappa", 1.0)
    with pytest.raises(UnfaithfulError, match=r"differ by .* the folder was deleted"):
        cli.run([*command, str(tmp_path / "wrong")])
    assert not (tmp_path / "wrong").exists()


def test_a_folder_in_bf16_is_proved_before_it_is_rounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rounding explains is taken and told; a weight that is wrong by less than rounding hides is refused."""
    small_model("gpt2", vocab_size=256, n_embd=16).to(torch.bfloat16).save_pretrained(tmp_path / "small")
    (tmp_path / "text.txt").write_text("".join(f"line {n} of {n * n} lines\n" for n in range(600)))
    monkeypatch.setenv("HOME", str(tmp_path))
    told: dict[str, Any] = {"hidden_size": 24, "data": str(tmp_path / "text.txt"), "sequences": 1}
    done = expand_module.expand(f"hf:{tmp_path / 'small'}", tmp_path / "large", **told)
    assert done.unrounded is not None and done.unrounded < 1e-5 and expand_module.MOST_ERROR < done.error < 0.02
    assert done.loss is not None and done.loss[0] == pytest.approx(done.loss[1], abs=1e-2)
    weights = load_file(tmp_path / "large/model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    left = {path.name for path in (tmp_path / "large").iterdir()}
    assert left == {"config.json", "model.safetensors"}
    command = ["expand", f"hf:{tmp_path / 'small'}", "--hidden-size", "24", "--data", told["data"], "--to"]
    assert cli.run([*command, str(tmp_path / "again"), "--sequences", "1"]) == 0
    assert "rounded to the source's narrow dtype; before that, logits differed by" in capsys.readouterr().out
    rows = GrownTensor.rows

    def broken(self: GrownTensor, *given: Any) -> Tensor:
        found = rows(self, *given)
        return found * 1.002 if self.draw.name == "transformer.h.1.attn.c_proj.weight" else found

    with monkeypatch.context() as patch:
        patch.setattr(GrownTensor, "rows", broken)
        with pytest.raises(
            UnfaithfulError, match=r"differ by .*; the limit is 0.001; the folder was deleted"
        ) as caught:
            expand_module.expand(f"hf:{tmp_path / 'small'}", tmp_path / "wrong", **told)
    assert float(str(caught.value).split(" differ by ")[1].split()[0]) < done.error
    monkeypatch.setattr(expand_module, "MOST_ROUNDED", 2e-3)
    with pytest.raises(UnfaithfulError, match=r"the limit is 0.002; nearest: a source saved in fp32; the folder was"):
        expand_module.expand(f"hf:{tmp_path / 'small'}", tmp_path / "wrong", **told)
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("PreTraining", "; loss "), ("SequenceClassification", "; a classifier has no loss on text"),
        ("TokenClassification", "; a classifier has no loss on text"),
    ],
)  # fmt: skip
def test_other_heads_of_bert_are_proved(
    head: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = small_model("bert", vocab_size=256).config
    getattr(transformers, f"BertFor{head}")(config).save_pretrained(tmp_path / "small")
    (tmp_path / "text.txt").write_text("".join(f"line {n} of {n * n} lines\n" for n in range(600)))
    monkeypatch.setenv("HOME", str(tmp_path))
    command = ["expand", f"hf:{tmp_path / 'small'}", "--hidden-size", "24", "--data", str(tmp_path / "text.txt")]
    assert cli.run([*command, "--sequences", "2", "--to", str(tmp_path / "large")]) == 0
    assert words in capsys.readouterr().out


def test_a_head_that_reads_no_text_is_refused() -> None:
    settings = small_model("bert").config.to_dict() | {"architectures": ["BertForMultipleChoice"]}
    with pytest.raises(ConfigError, match=r"BertForMultipleChoice can't be compared .*; nearest: BertForMaskedLM"):
        Growth.of(settings, None, None)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("llama", {"hidden_size": 8}, "--hidden-size 8: a model grows, so at least 16"),
        ("llama", {"hidden_size": 21}, r"must be a multiple of 8, since 2 groups of heads .* nearest: 24"),
        ("llama", {"layers": 9}, r"--layers 9: must be from 4 to 8; nearest: 8"),
        ("llama", {"layers": 3}, r"--layers 3: must be from 4 to 8; nearest: 4"),
        ("llama", {"intermediate_size": 19}, r"--intermediate-size 19: must be at least 20"),
        ("qwen3", {"hidden_size": 24}, r"multiple of 16, since norms of heads share its eps; nearest: 32"),
        ("bert", {"hidden_size": 18}, r"multiple of 12, since its norms come after the sum; nearest: 24"),
        ("bert", {"layers": 3}, r"--layers 3: must stay 2, since its norms come after the sum"),
        ("opt", {}, "a model of the family opt can't be expanded; choose one of llama"),
    ],
)
def test_what_has_no_lossless_model_is_refused(kind: str, sizes: dict[str, int], message: str) -> None:
    settings = {"model_type": "opt"} if kind == "opt" else small_model(kind).config.to_dict()
    with pytest.raises(ConfigError, match=message):
        Growth.of(settings, **{"hidden_size": None, "layers": None} | sizes)


def test_wrong_flags_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)2 problems.*--to DIR is missing.*--layers 0: must be at least 1"
    ) as caught:
        cli.run(["expand", "runs/small", "--layers", "0"])
    assert caught.value.exit_code == 2
    with pytest.raises(ConfigError, match="nothing would grow: no size is stated; nearest: --hidden-size N or"):
        cli.run(["expand", "runs/small", "--to", str(tmp_path / "large")])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"holds no run; nearest: hf:{tmp_path}$"):
        cli.run(["expand", str(tmp_path), "--to", str(tmp_path / "large"), "--layers", "3"])
