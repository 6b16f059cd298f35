"""A vocabulary on all ranks: gradients and forwards of one process, bytes of the formula, checkpoints that move."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import thinwire
from tests.hosts.pipeline.test_stage import EXACT, Alone, adamw, batches
from tests.workers import run_workers
from thinwire._compat import flattened
from thinwire.errors import ConfigError
from thinwire.hosts.pipeline.part import take_part
from thinwire.hosts.pipeline.stage import PipelineStage
from thinwire.hosts.pipeline.vocabulary import HeadPass, SpreadRows, SpreadVocabulary, VocabularyRows, spread_rows
from thinwire.hosts.ranks import Axis, open_ranks
from thinwire.methods.pipeline import Plan, cut, in_flight, token_shares
from thinwire.methods.pipeline.vocabulary import Own
from thinwire.models import build_model
from thinwire.models.hf import HFCausalLM

# Rows of the vocabulary: of 61 over 4 ranks 3 are padding, of 9 over 4 ranks the last holds nothing else.
# name: model, ranks of the pipeline, micro-batches, options.
GRADIENTS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "one": ("tied", 2, 1, {"plan": "1f1b"}),
    "two barriers": ("tied", 2, 3, {"plan": "1f1b", "barriers": 2}),
    "four": ("tied", 4, 5, {"plan": "1f1b"}),
    "four, two barriers": ("untied", 4, 5, {"plan": "1f1b", "barriers": 2}),
    "untied": ("untied", 4, 2, {"plan": "1f1b", "recompute": "always"}),
    "fitted": ("untied", 2, 5, {}),
    "fitted four": ("tied", 4, 6, {"in_flight": 3, "barriers": 2}),
    "v-half": ("tied 4", 2, 3, {"plan": "v-half"}),
    "v-half, two barriers": ("untied 8", 4, 5, {"plan": "v-half", "barriers": 2}),
    "few rows": ("few", 4, 2, {"plan": "1f1b"}),
    "gpt2": ("gpt2", 2, 3, {"plan": "1f1b"}),
    "gpt2 v-half": ("gpt2", 2, 3, {"plan": "v-half"}),
    "gpt2 four": ("gpt2", 4, 3, {"plan": "1f1b", "barriers": 2}),
}


def model(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    if kind == "gpt2":
        import transformers

        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=61, n_positions=16, n_embd=16, n_layer=4, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return HFCausalLM(transformers.GPT2LMHeadModel(config), 16).to(dtype)
    name, *layers = kind.split()
    overrides = {
        "tie_word_embeddings": name == "tied", "num_hidden_layers": int(layers[0]) if layers else 4, "hidden_size": 16,
        "intermediate_size": 24,
    }  # fmt: skip
    return build_model("tiny", 9 if name == "few" else 61, 16, overrides=overrides).to(dtype)


def few(kind: str, given: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Tokens that the model knows."""
    size = 9 if kind == "few" else 61
    return [(tokens % size, torch.where(targets < 0, targets, targets % size)) for tokens, targets in given]


def gradients(rank: int, name: str) -> Any:
    kind, stages, num, options = GRADIENTS[name]
    mesh = init_device_mesh("cpu", (stages, 4 // stages), mesh_dim_names=("pipeline", "data"))
    whole = model(kind)
    optimizer = adamw(whole)
    part = take_part(whole, optimizer, thinwire.Pipeline(**EXACT, **options, head="spread"), mesh["pipeline"])
    axis = Axis(mesh["data"], flattened(mesh), num_names=part.num_names)
    members = open_ranks(axis, local_size=1, timeout_s=60, checked=False)
    trained = Alone(whole, optimizer, members, dict(whole.named_parameters()), 0, [])
    own = PipelineStage(part, mesh["pipeline"], trained, seed=0, timeout_s=60, checked=False)
    stage = thinwire.PipelinedModel(whole, trained, [], own)
    given = few(kind, batches(0, num))
    before = own.mailbox.meter.snapshot().sent_bytes
    stage.forward_backward(given)
    sent = own.mailbox.meter.snapshot().sent_bytes - before
    assert part.rows is not None
    found = {
        key: (param.grad.numpy().copy(), part.rows.own if key in part.rows.shapes else None)
        for key, param in whole.named_parameters()
        if param.grad is not None
    }
    norm, loss = float(stage.reduce()), stage.optimizer.mean_loss
    tokens, targets = few(kind, batches(1, 1))[0]
    forward = float(whole(tokens, targets)), whole(tokens).numpy()
    runner = own.plans.runner(num)
    size = 9 if kind == "few" else 61
    refused(size, lambda batch: whole(*batch), lambda batch: runner.run([*given[:-1], batch]), (tokens, targets))
    told = (found, norm, loss, forward, (sent, own.sent_bytes(given)[own.number]), runner.plan)
    stage.close()
    return told


def refused(size: int, forward: Callable[[Any], Any], run: Callable[[Any], Any], batch: tuple[Tensor, Tensor]) -> None:
    """Ids for which no rank has a row, or only a padded one, are refused in steps and in evaluation."""
    for name, place, wrong, near in (("token", 0, size, size - 1), ("target", 1, -7, 0)):
        changed = [each.clone() for each in batch]
        changed[place][0, 0] = wrong
        for call in (forward, run):
            with pytest.raises(ConfigError, match=f"{name} {wrong}: .* ids from 0 to {size - 1}; nearest: {near}"):
                call(changed)


def formula(plan: Plan, kind: str, given: list[tuple[Tensor, Tensor]]) -> list[int]:
    """Bytes that each rank sends in a step, in fp64: of N tokens and width h, with n of the tokens in a rank's rows.

    Borders N h each way; the head's input (p - 1) N h from the last layer's rank, a part of its gradient N h from each
    other; 3 (p - 1) N scores from each; n h rows from each to the first layer's rank, and their gradients back.
    """
    p, h, (first, last) = plan.num_ranks, 16, (plan.home[0], plan.home[-1])
    rows = 2 * math.ceil((9 if kind == "few" else 61) / (2 * p))
    found = [0] * p
    for tokens, _ in given:
        num, here = tokens.numel(), [int((tokens // rows == rank).sum()) for rank in range(p)]
        for source, target in pairwise(plan.home):
            for rank in {source, target} if source != target else ():
                found[rank] += num * h
        for rank in range(p):
            found[rank] += 3 * (p - 1) * num + h * ((p - 1) * num if rank == last else num)
            found[rank] += h * (num - here[rank] if rank == first else here[rank])
    return [8 * each for each in found]


def everything(rank: int, world_size: int) -> dict[str, Any]:
    return {name: gradients(rank, name) for name in GRADIENTS}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_workers(everything, 4)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_and_forwards_are_those_of_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    kind, stages, num, options = GRADIENTS[name]
    whole, given, loss = model(kind), few(kind, batches(0, num)), torch.zeros((), dtype=torch.float64)
    for (tokens, targets), share in zip(given, token_shares(given), strict=True):
        # In fp64: the model itself computes its loss in fp32.
        loss = loss + share * F.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    expected = {key: param.grad for key, param in whole.named_parameters() if param.grad is not None}
    norm = float(nn.utils.get_total_norm(list(expected.values())))
    tokens, targets = few(kind, batches(1, 1))[0]
    with torch.no_grad():
        logits = whole(tokens)
        forward = float(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    for replica in range(4 // stages):
        told = [rank[name] for rank in ranks[replica :: 4 // stages]]
        found: dict[str, Tensor] = {}
        for part, *_ in told:
            for key, (gradient, own) in part.items():
                if own is None:
                    assert key not in found, "each layer has one home"
                    found[key] = torch.from_numpy(gradient)
                else:
                    # Where the rows are tied, one gradient is that of both.
                    rows = found.setdefault(key, torch.zeros_like(expected[key]))
                    rows[own.first : own.first + own.num_real] = torch.from_numpy(gradient[: own.num_real])
                    assert len(gradient) == own.size and not gradient[own.num_real :].any()
        assert found.keys() == expected.keys()
        for key, gradient in found.items():
            assert (gradient - expected[key]).abs().max() <= 1e-12, key
        for rank, (_, norm_here, loss_here, forward_here, (sent, promised), plan) in enumerate(told):
            assert norm_here == pytest.approx(norm, rel=1e-12)
            assert loss_here == pytest.approx(loss.item(), rel=1e-6)
            assert forward_here[0] == pytest.approx(forward, abs=1e-12)
            assert abs(forward_here[1] - logits.numpy()).max() <= 1e-12
            assert sent == promised == formula(plan, kind, given)[rank]
            if options.get("plan") == "1f1b":
                assert in_flight(plan)[rank] <= stages - rank + plan.barriers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("barriers", [1, 2])
def test_what_a_head_keeps_until_its_gradient_is_what_is_counted(barriers: int, dtype: torch.dtype) -> None:
    own = Own.of(0, 4, 61)
    rows = VocabularyRows(nn.Parameter(torch.randn(own.size, 16, dtype=dtype)))
    vocabulary = SpreadVocabulary(
        rows, rows, SpreadRows(own, {}), rank=0, num_ranks=4, features=16, padding=None
    )  # fmt: skip
    batch = batches(0, 1)[0]
    head = HeadPass(vocabulary, batch, 1.0, barriers)
    told = head.score(torch.randn(*batch[0].shape, 16, dtype=dtype))

    def kept() -> int:
        tensors = [head.x, *vars(head._found).values(), *(vars(head._agreed).values() if head._agreed else ())]
        return sum(each.nbytes for each in tensors if isinstance(each, Tensor))

    assert kept() == vocabulary.kept_bytes(batch, barriers) + told.nbytes
    head.agree([told] * 4)
    # Behind C no more than with two barriers, but for a few numbers of each token.
    assert kept() <= vocabulary.kept_bytes(batch, 2) + 2 * told.nbytes


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), label_smoothing=0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.embed_tokens": Scaled(61, 16)}, "more to tokens than to look them up"),
        ({"model.embed_tokens": nn.Embedding(61, 16, max_norm=1e9)}, "max_norm, scale_grad_by_freq or sparse"),
        ({"lm_head": nn.Linear(16, 61)}, "an nn.Linear without bias"),
        ({"lm_head": nn.Linear(16, 60, bias=False)}, "as many trained rows"),
        ({"lm_head": nn.Linear(16, 61, bias=False).requires_grad_(False)}, "as many trained rows"),
        (
            {"lm_head": nn.Sequential(nn.Linear(16, 61, bias=False), nn.Tanh())},
            "not give the output of an nn.Linear",
        ),
        ({}, "another loss than the mean cross-entropy"),
    ],
)
def test_a_model_whose_vocabulary_can_not_be_spread(
    change: dict[str, nn.Module], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model("untied", torch.float32)
    for name, module in change.items():
        whole.set_submodule(name, module)
    if not change:
        monkeypatch.setattr("thinwire.models.llama.next_token_loss", smoothed)
    with pytest.raises(ConfigError, match=message):
        cut(whole, 2, head="spread")


def test_an_optimizer_that_looks_across_the_rows_is_refused() -> None:
    whole = model("untied", torch.float32)
    made = cut(whole, 2, head="spread")
    with pytest.raises(ConfigError, match="Muon needs embedding and head as whole matrices"):
        spread_rows(made, thinwire.Muon(whole.parameters(), lr=1e-2), Own.of(0, 2, 61))
    ends = [param for name, param in whole.named_parameters() if "layers" not in name]
    inner = [param for name, param in whole.named_parameters() if "layers" in name]
    groups: list[dict[str, Any]] = [{"params": inner}, {"params": ends, "orthogonal": False}]
    optimizer = thinwire.Muon(groups, lr=1e-2)
    embedding, head, rows = spread_rows(made, optimizer, Own.of(1, 2, 61))
    assert set(rows.shapes) == {"model.embed_tokens.weight", "lm_head.weight"}
    assert [len(each.weight) for each in (embedding, head)] == [32, 32] and not head.weight[29:].any()
    assert any(param is head.weight for param in optimizer.param_groups[1]["params"])
