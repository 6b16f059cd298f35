"""A rank of a pipeline holds no more than its own stage's weights, and one seed gives the same for every cut."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire
from tests.workers import run_workers
from thinwire.errors import ConfigError
from thinwire.models import FirstWeights, build_model, build_skeleton
from thinwire.models.hf import build_hf, hollow_hf
from thinwire.models.llama import Llama

OVERRIDES: dict[str, Any] = {"num_hidden_layers": 8, "tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("tiny", OVERRIDES),
    "untied": ("tiny", {"num_hidden_layers": 8}),
}
# name: model, stages, options.
CUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "4 stages": ("llama", 4, {}),
    "2 stages": ("untied", 2, {"layers": "3,5"}),
    "head first": ("llama", 4, {"head": "first"}),
    "head spread": ("untied", 4, {"head": "spread"}),
    "recover": ("untied", 4, {"recover": "average"}),
    "two chunks": ("llama", 2, {"plan": "v-half"}),
}


class LiveBytes(TorchDispatchMode):
    """The most bytes that the results of torch's operations took at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._live = 0, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        self.most = max(self.most, sum(num for _, num in self._live.values()))
        return found


def hollow_and_first(name: str) -> tuple[nn.Module, Callable[[str], Tensor]]:
    preset, overrides = MODELS[name]
    shapes = build_skeleton(preset, 64, 16, overrides)
    assert isinstance(shapes, Llama)
    return thinwire.hollow(shapes), FirstWeights(shapes, seed=7)


def held(rank: int, world_size: int) -> dict[str, Any]:
    """Of each cut: this rank's weights, the most bytes that were alive, and the loss of a micro-batch."""
    found = {}
    for name, (of_model, stages, options) in CUTS.items():
        model, first = hollow_and_first(of_model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with LiveBytes() as alive:
            stage = thinwire.pipeline(
                model, optimizer, thinwire.DDP(), stages=stages, options=thinwire.Pipeline(**options), local_size=1,
                initial=first, announce=False,
            )  # fmt: skip
        tokens = torch.arange(16).view(2, 8)
        loss = float(model(tokens, tokens))
        weights = {key: value.detach().clone().numpy() for key, value in stage.pipeline.weights.items()}
        found[name] = weights, alive.most, loss
        stage.close()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_workers(held, 4)


@pytest.mark.parametrize("name", CUTS)
def test_every_cut_has_the_bits_of_the_whole_model(name: str, ranks: list[dict[str, Any]]) -> None:
    preset, overrides = MODELS[CUTS[name][0]]
    whole = build_model(preset, 64, 16, seed=7, overrides=overrides).eval()
    expected = {key: param.detach().numpy() for key, param in whole.named_parameters()}
    for number, rank in enumerate(ranks):
        for key, values in rank[name][0].items():
            own = expected[key]
            # Of a spread head a rank has some rows.
            own = own if values.shape == own.shape else own[number * len(values) :][: len(values)]
            assert (values == own).all(), key
    assert {key for rank in ranks for key in rank[name][0]} == expected.keys()
    tokens = torch.arange(16).view(2, 8)
    with torch.no_grad():
        loss = float(whole(tokens, tokens))
    # Borders round.
    assert all(rank[name][2] == pytest.approx(loss, abs=0.01) for rank in ranks)


@pytest.mark.parametrize("name", CUTS)
def test_no_rank_ever_holds_the_whole(name: str, ranks: list[dict[str, Any]]) -> None:
    preset, overrides = MODELS[CUTS[name][0]]
    sizes = [param.nbytes for param in build_model(preset, 64, 16, overrides=overrides).parameters()]
    for rank in ranks:
        own, most, _ = rank[name]
        kept = sum(values.nbytes for values in own.values())
        # Twice: replicas are sent the first one's weights, and compare them. One more matrix is passed over.
        assert most < 2.1 * kept + max(sizes)
        assert len(ranks) > CUTS[name][1] or most < 0.6 * sum(sizes)


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [("tiny", {"tie_word_embeddings": True}), ("moe-tiny", {"router": "cosine"}), ("tiny", {})],
)
def test_first_weights_are_those_of_the_model_in_any_order(preset: str, overrides: dict[str, Any]) -> None:
    whole, shapes = (build(preset, 64, 16, overrides=overrides) for build in (build_model, build_skeleton))
    assert isinstance(shapes, Llama)
    names = [name for name, _ in whole.named_parameters()]
    for asked in (names, names[::-1], names[5:6] + names[:5] + names[6:]):
        first = FirstWeights(shapes, seed=0)
        for name in asked:
            assert torch.equal(first(name), whole.get_parameter(name)), name


def folder_of(path: Path, dtype: torch.dtype, family: str = "Qwen2", **more: Any) -> Path:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=32, dtype=dtype, **more,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(path)
    return path


@pytest.mark.parametrize(("dtype", "is_tied"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_folder_gives_its_weights_one_by_one(dtype: torch.dtype, is_tied: bool, tmp_path: Path) -> None:
    path = str(folder_of(tmp_path / "model", dtype, num_key_value_heads=1, tie_word_embeddings=is_tied))
    whole = build_hf(path, 64, 16, 0, {})
    made, stored, why = hollow_hf(path, 64, 16, {})
    assert made is not None and stored is not None and not why
    assert all(param.is_meta for param in made.parameters())
    assert made.state_dict().keys() == whole.state_dict().keys()
    for name, param in whole.named_parameters():
        assert torch.equal(stored(name), param), name
    for name, buffer in whole.named_buffers():
        assert torch.equal(made.get_buffer(name), buffer), name


def test_a_folder_without_a_weight_under_its_name_says_so(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "model", torch.float32, "GPTNeoX")
    assert hollow_hf(str(path), 64, 16, {})[2] == "1 weights have another name in its files: lm_head.weight"
    for file in path.glob("*.safetensors"):
        file.unlink()
    assert hollow_hf(str(path), 64, 16, {})[2] == "transformers draws the first weights of a model all at once"


def unfilled(rank: int, world_size: int) -> str:
    model, _ = hollow_and_first("llama")
    with pytest.raises(ConfigError) as raised:
        thinwire.pipeline(model, torch.optim.AdamW(model.parameters()), thinwire.Zero(), stages=1)
    return str(raised.value)


def test_a_model_without_memory_or_first_weights_is_refused() -> None:
    (told,) = run_workers(unfilled, 1)
    assert "'model.embed_tokens.weight' has no memory: give `initial`" in told


def faults_of_steps(rank: int, world_size: int) -> int:
    """Pages that the system gives this process while it takes and frees the same memory again and again."""
    hollow_and_first("llama")
    for number in range(13):
        if number == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(1 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_model_without_memory_leaves_freed_pages_to_the_next_micro_batch() -> None:
    # Else each tensor has new ones, 1,024 of 4 KiB.
    assert run_workers(faults_of_steps, 1)[0] < 1024
