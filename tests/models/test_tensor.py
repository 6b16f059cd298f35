"""Models of transformers over a tensor axis, as their config says: the same loss and gradients, or a reason why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire
from tests.workers import run_workers
from thinwire.errors import ConfigError
from thinwire.models import build_model
from thinwire.models.hf import HFCausalLM
from thinwire.models.tensor import check_cut, cut_over
from thinwire.models.vocabulary import ends_of, why_whole_vocabulary

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
# Grouped heads, biases, fused projections, sandwiched norms, caps of logits, residuals of other size.
SERVED = ("Llama", "Gemma2", "GPTNeoX", "Phi")
LIKE_THEM = ("Mistral", "Qwen2", "Starcoder2", "Granite", "Cohere")
REFUSED = {"Qwen3": "replicated_with_grad_allreduce", "Phi3": "colwise_gather_output", "GPT2": "states no tensor"}


def foreign(kind: str) -> HFCausalLM:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    for name in ("attention_dropout", "residual_dropout", "embedding_dropout", "hidden_dropout", "resid_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return HFCausalLM(transformers.AutoModelForCausalLM.from_config(config).float(), 64)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = torch.randint(0, 64, (2, 2, 8), generator=torch.Generator().manual_seed(step))
    return tokens, targets


def gradients(model: torch.nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(*batch(0))
    loss.backward()
    found = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            found[name] = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
    return loss.item(), found


class Sums(TorchDispatchMode):
    """Counts sums over ranks."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.number += "all_reduce" in str(func)
        return func(*args, **(kwargs or {}))


def cut_models(rank: int, world_size: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor",))
    found: dict[str, Any] = {}
    for kind in kinds:
        model = foreign(kind)
        cut_over(model, mesh)
        found[f"{kind} vocabulary"] = vars(model)["whole_vocabulary"]
        num_cut = sum(isinstance(param, DTensor) for param in model.parameters())
        with Sums() as forward:
            model(*batch(0))
        with Sums() as both:
            found[kind] = num_cut, *gradients(model)
        found[f"{kind} sums"] = forward.number, both.number
    return found


def cut_and_trained(rank: int, world_size: int) -> dict[str, Any]:
    found = cut_models(rank, world_size, SERVED)
    # The same in stages, where a rank has a layer and half of its matrices.
    model = foreign("Llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stage = thinwire.pipeline(
        model, optimizer, thinwire.Zero(), stages=1, tensor=2, local_size=2, announce=False,
        options=thinwire.Pipeline(forward="fp32", backward="fp32"),
    )  # fmt: skip
    losses = []
    for step in range(3):
        stage.forward_backward([batch(step)])
        stage.step()
        losses.append(stage.optimizer.mean_loss)
    found["losses"] = losses
    stage.close()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_workers(cut_and_trained, 2)


@pytest.mark.parametrize("kind", SERVED)
def test_gradients_are_those_of_the_whole_model(kind: str, ranks: list[dict[str, Any]]) -> None:
    check_gradients(kind, ranks)


@pytest.mark.whole
def test_gradients_of_others_are_those_of_the_whole_model() -> None:
    ranks = run_workers(cut_models, 2, LIKE_THEM)
    for kind in LIKE_THEM:
        check_gradients(kind, ranks)


def check_gradients(kind: str, ranks: list[dict[str, Any]]) -> None:
    loss, expected = gradients(foreign(kind))
    for num_cut, loss_here, found in (rank[kind] for rank in ranks):
        assert num_cut >= 8
        assert loss_here == pytest.approx(loss, rel=1e-6)
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", SERVED)
def test_a_layer_sums_twice_each_way(kind: str, ranks: list[dict[str, Any]]) -> None:
    forward, both = ranks[0][f"{kind} sums"]
    # Attention and what follows it side by side have one input: then it is summed for each of the two.
    layers = SIZES["num_hidden_layers"]
    assert (forward, both) == (2 * layers, 4 * layers)


def test_rows_of_the_vocabulary_are_cut_unless_more_is_done_with_them(ranks: list[dict[str, Any]]) -> None:
    told = {kind: ranks[0][f"{kind} vocabulary"] for kind in SERVED}
    assert {kind for kind, why in told.items() if not why} == {"Llama", "GPTNeoX", "Phi"}
    # Its embedding scales what it looks up.
    assert told["Gemma2"] == "they are no plain nn.Embedding and nn.Linear"
    model = foreign("Llama")
    assert why_whole_vocabulary(model, 3) == "a vocabulary of 64 tokens does not divide among 3 ranks"
    embedding, head = ends_of(model)
    embedding.max_norm = 1.0
    assert "max_norm" in why_whole_vocabulary(model, 2)
    embedding.max_norm = None
    model.model.lm_head = torch.nn.Sequential(head, torch.nn.Identity())
    assert "no plain" in why_whole_vocabulary(model, 2)


def test_they_train_through_the_front(ranks: list[dict[str, Any]]) -> None:
    model, losses = foreign("Llama"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert ranks[0]["losses"] == ranks[1]["losses"] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(kind: str) -> None:
    sizes = {} if kind == "GPT2" else SIZES
    with pytest.raises(ConfigError, match=REFUSED[kind]):
        check_cut(getattr(transformers, f"{kind}Config")(**sizes), 2)


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="can't cut num_key_value_heads 2: must divide it; nearest: 2"):
        check_cut(transformers.LlamaConfig(**SIZES), 4)
    with pytest.raises(ConfigError, match="can't cut num_attention_heads 4: must divide it; nearest: 2"):
        check_cut(build_model("tiny", 64, 16).config, 3)
