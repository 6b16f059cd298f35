"""Runs that leave for transformers: weights of every host, the folder, the comparison, and a quick look."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.workers import run_workers
from thinwire import cli
from thinwire.checkpoint.folder import Manifest, point_to
from thinwire.convert import ExportConfig
from thinwire.convert.export import export, reload
from thinwire.convert.generate import decoded
from thinwire.convert.saved import SavedRun, WhenAsked, load_run, open_run
from thinwire.convert.streamed import StreamedModel
from thinwire.convert.verify import Fidelity, UnfaithfulError, compare
from thinwire.data import ByteTokenizer
from thinwire.errors import ConfigError, Problems
from thinwire.hosts.offload.hollow import hollow, is_hollow
from thinwire.launch.prepare import model_rows, prepare
from thinwire.launch.start import Start
from thinwire.limits import data_bytes
from thinwire.models import HFCausalLM, build_model
from thinwire.models.kept import MASKS
from thinwire.run.config import TrainConfig
from thinwire.run.place import ProcessPlace
from thinwire.run.run import Run
from thinwire.run.signals import StopFlag
from thinwire.training.trainer import Trainer

transformers = pytest.importorskip("transformers")
# A base of the rotary table and an epsilon that are nobody's default.
LLAMA = {"rope_theta": 700.0, "rms_norm_eps": 1e-3}
QWEN = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 256, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 255,
}  # fmt: skip
# A tokenizer.json of one word.
ONE_WORD = json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}})
# Of 15 million weights.
LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 4}
LARGE_BYTES = 60_000_000
LR = 1e-3
STEPS = 2


@dataclass(frozen=True)
class Runs:
    """Run directories by name, and the weights that the trainer of each run ended with."""

    folder: Path
    weights: dict[str, dict[str, Tensor]]

    def path(self, name: str) -> str:
        return str(self.folder / name)


def train_all(rank: int, world_size: int, starts: list[tuple[str, Run, Start]]) -> dict[str, dict[str, Tensor]]:
    """One run after another; what the model of each ends with, as rank 0 sees it."""
    ended = {}
    for name, run, start in starts:
        trainer = Trainer(run, ProcessPlace(rank, rank, world_size), StopFlag(), start.dtype, start.effects)
        trainer.run()
        if trainer.reporter is not None:
            trainer.reporter.close()
        is_whole = not run.config.strategy.startswith(("fsdp", "frontier"))
        ended[name] = {n: p.detach().clone() for n, p in trainer.model.named_parameters()} if is_whole else {}
    return ended


def prune_half(folder: Path) -> None:
    """A folder of transformers with random weights, of which every matrix of an MLP keeps every other column."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**QWEN))
    matrices = {name: param for name, param in model.named_parameters() if ".mlp." in name}
    masks = {name: (torch.arange(param.shape[1]) % 2 == 0).expand(param.shape) for name, param in matrices.items()}
    for name, param in matrices.items():
        param.data *= masks[name]
    model.save_pretrained(folder)
    save_file({name: mask.contiguous() for name, mask in masks.items()}, folder / MASKS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "data.txt").write_text("".join(f"line {n} of {n * n} lines, très long\n" for n in range(2000)))
    (folder / "qwen").mkdir()
    (folder / "qwen/config.json").write_text(json.dumps(QWEN))
    prune_half(folder / "sparse")
    starts = []
    for name, strategy, model, options in (
        ("ddp", "ddp", "tiny", LLAMA | {"tie_word_embeddings": True}),
        ("zero", "zero", "tiny", LLAMA | {"tie_word_embeddings": True}),
        ("sdp4bit", "sdp4bit", "tiny", LLAMA),
        ("fsdp", "fsdp", "tiny", LLAMA | {"tie_word_embeddings": True}),
        ("frontier", "frontier", "tiny", LLAMA | {"tie_word_embeddings": True}),
        ("qwen", "zero", f"hf:{folder / 'qwen'}", None),
        ("pruned", "zero", f"hf:{folder / 'sparse'}", None),
        ("mixture", "zero", "moe-tiny", None),
        ("large", "zero", "tiny", LARGE | {"num_key_value_heads": 4}),
    ):
        config = TrainConfig(
            model=model, data=str(folder / "data.txt"), cache_dir=str(folder / "cache"), strategy=strategy, workers=2,
            steps=STEPS, warmup_steps=0, seq_len=32, micro_batch=2, lr=LR, dtype="fp32", eval_sequences=0,
            sample_tokens=0, run_dir=str(folder / name), timeout=60, tables={"llama": options} if options else {},
        )  # fmt: skip
        starts.append((name, *prepare(config, Problems())))
    weights = run_workers(train_all, 2, starts)[0]
    return Runs(folder, weights)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in model.named_parameters()}


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_weights_of_every_host_are_put_together(runs: Runs) -> None:
    loaded = {name: load_run(runs.path(name)) for name in ("ddp", "zero", "sdp4bit", "fsdp", "frontier", "qwen")}
    found = {name: weights_of(run.model) for name, run in loaded.items()}
    assert {run.step for run in loaded.values()} == {STEPS}
    for name in ("ddp", "zero", "qwen"):
        assert furthest(found[name], runs.weights[name]) == 0
    # Masters: what the replicas were before they were rounded for the wire.
    assert 0 < furthest(found["sdp4bit"], runs.weights["sdp4bit"]) < LR
    assert furthest(found["fsdp"], found["ddp"]) < 1e-5
    # Adam moves a weight by at most about the learning rate a step; weights in a wrong place would differ by tenths.
    assert furthest(found["frontier"], found["ddp"]) < 3 * STEPS * LR


@pytest.fixture
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger matrices: after two steps attention is almost even, and hides a wrong table of positions."""

    def open_loud(path: str) -> SavedRun:
        run = open_run(path)
        found = {name: run.weights[name] for name in run.weights}
        found = {name: 8 * tensor if tensor.ndim > 1 else tensor for name, tensor in found.items()}
        makers = {name: partial(found.__getitem__, name) for name in found}
        return replace(run, weights=WhenAsked(makers, run.weights.shapes))

    monkeypatch.setattr("thinwire.convert.export.open_run", open_loud)


def exported(runs: Runs, name: str, tmp_path: Path, **options: Any) -> tuple[Path, Fidelity]:
    done = export(ExportConfig(runs.path(name), str(tmp_path / "out"), **options))
    return tmp_path / "out", done.fidelity


@pytest.mark.parametrize("name", ["sdp4bit", "zero", "qwen"])
def test_transformers_computes_what_was_trained(runs: Runs, name: str, tmp_path: Path, loud: None) -> None:
    _, fidelity = exported(runs, name, tmp_path)
    assert fidelity.kl < 1e-8 and fidelity.agreement > 0.998 and fidelity.num_tokens == 16 * 32


@pytest.mark.parametrize("name", ["sdp4bit", "zero", "qwen"])
def test_transformers_loads_what_was_trained(runs: Runs, name: str, tmp_path: Path) -> None:
    folder, _ = exported(runs, name, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs).__name__ == ("Qwen2ForCausalLM" if name == "qwen" else "LlamaForCausalLM")
    assert {param.dtype for param in theirs.parameters()} == {torch.float32}
    assert theirs.config.eos_token_id == 255
    files = {path.name for path in folder.iterdir()}
    assert files == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    # And back: --model hf:DIR starts from these weights, bit for bit, and says so.
    again = build_model(f"hf:{folder}", 256, 32)
    assert isinstance(again, HFCausalLM)
    run = load_run(runs.path(name)).model
    original = run.model if isinstance(run, HFCausalLM) else run
    assert isinstance(original, nn.Module)
    assert furthest(weights_of(again.model), weights_of(original)) == 0
    assert model_rows(TrainConfig(model=f"hf:{folder}"))[0][1] == "starts from the folder's weights"


def exported_within(rank: int, world_size: int, run: str, folder: str, limits: list[int]) -> list[str]:
    """What becomes of an export that may take so many bytes beyond those that the process has."""
    import transformers  # noqa: F401

    warm, told = ExportConfig(run, f"{folder}/warm", sequences=1), list[str]()
    export(warm)
    for number, limit in enumerate(limits):
        before, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + limit, most))
        try:
            told.append(str(export(replace(warm, folder=f"{folder}/{number}", sequences=2)).fidelity))
        except (RuntimeError, MemoryError, OSError) as error:
            told.append(type(error).__name__)
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))
    return told


def test_a_run_is_exported_in_less_memory_than_its_weights(runs: Runs, tmp_path: Path) -> None:
    """Of more than 60 MB of weights the largest has 4 MB."""
    ((done, failed),) = run_workers(exported_within, 1, runs.path("large"), str(tmp_path), [LARGE_BYTES // 2, 2 << 20])
    assert done.startswith("KL ") and failed in ("RuntimeError", "MemoryError", "OSError")
    run = open_run(runs.path("large"))
    assert sum(shape.numel() for shape in run.weights.shapes.values()) * 4 > LARGE_BYTES
    assert all(map(is_hollow, run.model.parameters()))
    assert furthest(dict(run.weights), weights_of(load_run(runs.path("large")).model)) == 0


@pytest.mark.parametrize("name", ["pruned", "mixture"])
def test_pruned_matrices_and_experts_are_exported_one_by_one(runs: Runs, tmp_path: Path, name: str, loud: None) -> None:
    run, whole = open_run(runs.path(name)), weights_of(load_run(runs.path(name)).model)
    assert all(map(is_hollow, run.model.parameters()))
    assert furthest(dict(run.weights), whole) == 0
    folder, fidelity = exported(runs, name, tmp_path)
    assert fidelity.kl < 1e-8
    theirs = weights_of(transformers.AutoModelForCausalLM.from_pretrained(folder))
    if name == "pruned":
        zeros = [float((param == 0).double().mean()) for key, param in theirs.items() if ".mlp." in key]
        assert zeros == [0.5] * 6
    # Of a mixture these are put together from the matrices of single experts.
    made, read = reload(folder, keeps=False)
    assert all(map(is_hollow, made.parameters()))
    assert furthest({key: read(f"model.{key}") for key in theirs}, theirs) == 0


@pytest.mark.parametrize("keeps", [False, True])
def test_weights_come_when_they_are_used(keeps: bool) -> None:
    plain, read = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), list[str]()
    values = {name: param.detach().clone() for name, param in plain.named_parameters()}
    x = torch.randn(3, 4)
    expected = plain(x)

    def given(name: str) -> Tensor:
        read.append(name)
        return values[name].clone()

    streamed = StreamedModel(hollow(plain.to("meta")), given, keeps=keeps)
    assert plain[0].weight.shape == (6, 4) and not read
    for number in (1, 2):
        assert torch.equal(streamed(x), expected)
        assert len(read) == (4 if keeps else 4 * number)
    assert sum(not is_hollow(param) for param in plain.parameters()) == (4 if keeps else 2)


def test_a_folder_without_weights_is_announced(runs: Runs) -> None:
    rows = model_rows(TrainConfig(model=f"hf:{runs.path('qwen')}/../qwen"))
    assert rows[0][1:] == ("starts at random", "the folder holds no .safetensors file")
    assert model_rows(TrainConfig()) == []


def test_bytes_are_the_same_tokens_for_transformers(runs: Runs, tmp_path: Path) -> None:
    folder, _ = exported(runs, "ddp", tmp_path, sequences=1)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("def f(x):\n\treturn x", "ÿ þ <|endoftext|> é 漢字 \x00\x7f  \r\n", "", "\ufffd"):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ByteTokenizer().encode(text).tolist()
        assert theirs.decode(ids) == text
    assert (theirs.eos_token, theirs.eos_token_id) == ("<|endoftext|>", ByteTokenizer.end_of_document)


def test_a_rounded_model_is_measured_and_refused_above_the_limit(runs: Runs, tmp_path: Path) -> None:
    folder, fidelity = exported(runs, "ddp", tmp_path, dtype="bf16", min_agreement=0.9)
    assert 1e-9 < fidelity.kl < 1e-3
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16
    strict = [str(tmp_path / "strict"), "--dtype", "bf16", "--max-kl", "1e-12"]
    with pytest.raises(UnfaithfulError, match=r"KL .* the limits are --max-kl 1e-12") as caught:
        cli.run(["export", runs.path("ddp"), "--to", "hf", *strict])
    assert caught.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("change", [{"rope_theta": 70000.0}, {"rms_norm_eps": 0.5}, {"tie_word_embeddings": False}])
def test_a_wrong_config_is_noticed(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loud: None, change: dict[str, Any]
) -> None:
    from thinwire.convert import export as module

    right = module.llama_config
    monkeypatch.setattr(module, "llama_config", lambda *args: right(*args) | change)
    with pytest.raises(UnfaithfulError, match="the folder was deleted"):
        exported(runs, "ddp", tmp_path, max_kl=1e-6)
    assert not any(tmp_path.iterdir())


def test_another_tokenizer_is_noticed(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.convert.tokenizer.byte_symbol", lambda byte: chr(0x100 + byte))
    with pytest.raises(UnfaithfulError, match="tokenizer differs from the run's at token"):
        exported(runs, "ddp", tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_tokenizer_file_is_taken_along(tmp_path: Path) -> None:
    from thinwire.convert.tokenizer import write_tokenizer

    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    words.add_special_tokens(["</s>"])
    (tmp_path / "own").mkdir()
    (tmp_path / "out").mkdir()
    words.save(str(tmp_path / "own/tokenizer.json"))
    write_tokenizer(str(tmp_path / "own"), 32, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.eos_token, theirs.model_max_length) == ("</s>", 32)
    (tmp_path / "own/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "out/tokenizer_config.json").unlink()
    write_tokenizer(str(tmp_path / "own/tokenizer.json"), 32, tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token is None


@pytest.mark.parametrize("name", ["zero", "qwen"])
def test_a_run_is_expanded(runs: Runs, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It computes the same on the run's own text, and its tokenizer goes along."""
    hidden = {"zero": 96, "qwen": 48}[name]
    sizes = ["--hidden-size", str(hidden), "--layers", "4", "--sequences", "4"]
    assert cli.run(["expand", runs.path(name), "--to", str(tmp_path / "large"), *sizes]) == 0
    said = capsys.readouterr().out
    limit = {"zero": 32, "qwen": 64}[name]
    assert f"train it: thinwire train --model hf:{tmp_path / 'large'} --seq-len {limit}, with" in said
    before, after = said.partition("; loss ")[2].split("\n")[0].split(" before, ")
    assert before == after.removesuffix(" after")
    large: Any = build_model(f"hf:{tmp_path / 'large'}", 256, 32).model
    assert large.config.hidden_size == hidden and large.config.num_hidden_layers == 4
    assert (tmp_path / "large/tokenizer.json").is_file()


def test_a_run_is_pruned(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "half"
    assert cli.run(["prune", runs.path("zero"), "--out", str(folder), "--samples", "8", "--sequences", "2"]) == 0
    assert "50.0 % of the weights in 21 matrices" in capsys.readouterr().out
    rows = model_rows(TrainConfig(model=f"hf:{folder}"))
    assert [row[1] for row in rows] == ["starts from the folder's weights", "trains the kept values alone"]
    assert (folder / "tokenizer.json").is_file() and (folder / "masks.safetensors").is_file()


def test_generate_takes_a_run_or_a_folder(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = exported(runs, "zero", tmp_path, sequences=1)
    flags = ["--prompt", "line 7", "--tokens", "20", "--temperature", "0"]
    texts = []
    for source in (runs.path("zero"), str(folder), f"hf:{folder}"):
        assert cli.run(["generate", source, *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2] and texts[0].startswith("line 7") and len(texts[0]) > 10
    # A later checkpoint that is damaged is passed over aloud, and left to the run, which may be going on.
    run = shutil.copytree(runs.path("zero"), tmp_path / "run")
    saved = run / f"checkpoints/step-{STEPS:08d}"
    (run / "checkpoints/step-00000009").mkdir()
    point_to(run / "checkpoints/step-00000009")
    assert cli.run(["generate", str(run), *flags]) == 0
    said = capsys.readouterr()
    assert (
        said.out == texts[0] and "passed over" in said.err and "step-00000009/manifest.json can't be read" in said.err
    )
    assert (run / "checkpoints/latest").read_text() == "step-00000009"
    assert f"{run} is hardly trained: its loss was " in said.err and "among 256 tokens has 5.55" in said.err
    replace(Manifest.read(saved), loss=1.5).write(saved)
    assert cli.run(["generate", str(run), *flags]) == 0 and "hardly" not in capsys.readouterr().err
    warm = ["--temperature", "2", "--tokens", "40"]
    draws = [
        (cli.run(["generate", runs.path("zero"), *warm, "--seed", seed]), capsys.readouterr().out) for seed in "112"
    ]
    assert draws[0] == draws[1] != draws[2]
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"its weights can't be loaded: .*header"):
        cli.run(["generate", str(folder), *flags])


def test_generate_shows_text_as_it_is_drawn(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece is written before the next token is drawn, and a character of several bytes in one piece."""
    wanted = "3 über ½"
    written: list[str] = []

    def draw(*args: object) -> Iterator[Tensor]:
        for number, byte in enumerate(wanted.encode()):
            complete = wanted.encode()[:number].decode(errors="ignore")
            assert "".join(written) == f"line {complete}"
            yield torch.tensor([[byte]])

    monkeypatch.setattr("thinwire.convert.generate.generate_tokens", draw)

    def show(text: str = "", file: object = None, **rest: object) -> None:
        if file is None:
            written.append(text)

    monkeypatch.setattr("thinwire.convert.command.print", show, raising=False)
    assert cli.run(["generate", runs.path("zero"), "--prompt", "line "]) == 0
    assert "".join(written) == f"line {wanted}"


def test_a_text_that_ends_inside_a_character_is_shown() -> None:
    pieces = decoded(ByteTokenizer(), list(b"a"), [0xC3, 0x28, 0xE2, 0x82])
    assert list(pieces) == ["a", "", "\ufffd(", "", "", "\ufffd"]


def test_divergence_and_agreement_are_what_they_say() -> None:
    class Fixed(nn.Module):
        def __init__(self, probabilities: list[list[float]]) -> None:
            super().__init__()
            self.logits = torch.tensor([probabilities]).log()

        def forward(self, tokens: Tensor | None = None, **rest: Any) -> Any:
            return self.logits

    ours, theirs = Fixed([[0.5, 0.5 - 1e-6, 1e-6], [0.7, 0.2, 0.1]]), Fixed([[0.2, 0.7, 0.1], [0.7, 0.2, 0.1]])
    found = compare(ours, theirs, [torch.zeros(1, 2, dtype=torch.int64)])
    p, q = np.array([0.5, 0.5 - 1e-6, 1e-6]), np.array([0.2, 0.7, 0.1])
    assert found.kl == pytest.approx((p * np.log(p / q)).sum() / 2, rel=1e-5)
    assert (found.agreement, found.num_tokens) == (0.5, 2)
    with pytest.raises(UnfaithfulError):
        Fidelity(float("nan"), 1.0, 1).check(1.0, 0.0)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["export", "RUN", "--too", "hf", "out"], "unknown flag --too; did you mean '--to'"),
        (["export", "RUN", "out", "--max-kl", "-1"], "--max-kl -1: must be from 0 to"),
        (["export", "RUN", "RUN"], "ddp is there already"),
        (["export", "RUN2", "out"], "holds no run"),
        (["export", "EMPTY", "out"], "holds no checkpoint yet"),
        (
            ["export", "QWEN", "out"],
            "plain is a model of transformers already: export takes a run; did you mean .*runs[0-9]+/",
        ),
        (
            ["export", "DEMO", "out"],
            r"does not fit the model demo that .*config\.toml names: model.embed_tokens.weight differs",
        ),
        (["generate", "CHECKPOINTS"], "is neither a run directory nor a folder with a config.json"),
        (["generate", "QWEN"], "holds no tokenizer.json"),
    ],
)
def test_what_can_not_be_done_is_said(runs: Runs, tmp_path: Path, command: list[str], message: str) -> None:
    (runs.folder / "empty/checkpoints").mkdir(parents=True, exist_ok=True)
    (runs.folder / "empty/config.toml").write_text('model = "tiny"\n')
    demo = (runs.folder / "ddp/config.toml").read_text().replace('model = "tiny"', 'model = "demo"')
    shutil.copytree(runs.folder / "ddp", runs.folder / "demo", dirs_exist_ok=True)
    (runs.folder / "demo/config.toml").write_text(demo)
    names = {
        "DEMO": "demo",
        "RUN2": "ddp-2",
        "RUN": "ddp",
        "EMPTY": "empty",
        "CHECKPOINTS": "empty/checkpoints",
        "QWEN": "plain",
        "out": str(tmp_path / "out"),
    }
    (runs.folder / "plain").mkdir(exist_ok=True)
    (runs.folder / "plain/config.json").write_text(json.dumps(QWEN))
    args = [str(runs.folder / names[word]) if word in names else word for word in command]
    with pytest.raises(ConfigError, match=message):
        cli.run(args)
    assert not any(tmp_path.iterdir())


def test_a_family_that_import_does_not_know_is_named(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=300, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(
        ConfigError, match="import reads models of the families llama, mistral, mixtral, qwen2, qwen3"
    ) as caught:
        cli.run(["import", str(tmp_path / "gpt2"), str(tmp_path / "out")])
    source = tmp_path / "gpt2"
    assert f"{source} is of gpt2; it needs no import: thinwire train --model hf:{source} (" in str(caught.value)
    assert not (tmp_path / "out").exists() and isinstance(build_model(f"hf:{source}", 256, 32), HFCausalLM)


@pytest.mark.parametrize("command", ["import", "import --format hf", "generate"])
def test_a_folder_of_pickles_is_refused_with_a_way_to_convert_it(command: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/config.json").write_text(json.dumps(QWEN))
    (tmp_path / "in/tokenizer.json").write_text(ONE_WORD)
    torch.save({}, tmp_path / "in/pytorch_model.bin")
    name, *flags = command.split()
    args = [name, str(tmp_path / "in"), *([str(tmp_path / "out")] if name == "import" else []), *flags]
    with pytest.raises(ConfigError, match=r"pytorch_model.bin is a pickle.*python -c .*save_pretrained\('NEW'\)"):
        cli.run(args)


def test_weights_that_know_another_tokenizer_are_told(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=600, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    asked, effect, _ = model_rows(TrainConfig(model=f"hf:{tmp_path}"))[-1]
    assert (asked, effect) == ("--tokenizer bytes", "uses 256 of the model's 600 words")
