"""Models cut into chunks: the same logits and gradients, balanced, or a reason why not."""

from __future__ import annotations

from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from thinwire.errors import ConfigError
from thinwire.methods.pipeline import Cut, cut, token_shares
from thinwire.methods.pipeline.balance import balanced
from thinwire.models import build_model
from thinwire.models.hf import HFCausalLM
from thinwire.models.modes import follow

TOKENS = torch.randint(0, 48, (2, 12), generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(0, 48, (2, 12), generator=torch.Generator().manual_seed(1))
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
BLOOM = {"vocab_size": 64, "hidden_size": 32, "n_layer": 4, "n_head": 4}
GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "dropout": 0.0,
}
WITHOUT_END = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
# Masks of two kinds, learned positions, a norm behind the embedding, projections around the layers, no attention,
# windows, attention beside the MLP, positions as a bias, matrices in one piece, one key-value head.
FOREIGN: dict[str, dict[str, Any]] = {
    "LlamaConfig": SIZES,
    "Qwen3Config": {**SIZES, "head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "GPTNeoXConfig": {**SIZES, **WITHOUT_END},
    "MptConfig": {"vocab_size": 64, "d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 64},
    "Phi3Config": {**SIZES, **WITHOUT_END},
    "FalconConfig": {**BLOOM, "num_hidden_layers": 4, "num_attention_heads": 4, **WITHOUT_END},
    "Gemma3TextConfig": {**SIZES, "head_dim": 8, "sliding_window": 8},
    "GPT2Config": GPT2 | WITHOUT_DROPOUT,
    "BloomConfig": BLOOM,
    "OPTConfig": OPT | {"dropout": 0.0, "max_position_embeddings": 64, "word_embed_proj_dim": 16},
    "MambaConfig": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4},
    # Its balance loss would join layers of all stages.
    "MixtralConfig": {**SIZES, "num_local_experts": 4, "router_aux_loss_coef": 0.0},
}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return found


def in_chunks(made: Cut) -> Tensor:
    """Forward and backward of each chunk by itself; the loss."""
    passed: list[tuple[Tensor | None, Tensor]] = []
    hidden: Tensor | None = None
    for number in range(made.num_chunks):
        left = made.chunk(number)(hidden, (TOKENS, TARGETS))
        passed.append((hidden, left))
        hidden = left.detach().requires_grad_()
    gradient: Tensor | None = None
    for arrived, left in reversed(passed):
        left.backward(gradient)
        gradient = None if arrived is None else arrived.grad
    return passed[-1][1].detach()


def check_equal(model: nn.Module, stages: int, head: str = "last") -> Cut:
    model.train()
    loss = model(TOKENS, TARGETS)
    loss.backward()
    expected = gradients(model)
    made = cut(model, stages, head=head)
    assert torch.equal(in_chunks(made), loss)
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    return made


def test_our_model_is_cut_and_each_weight_has_one_home() -> None:
    model = build_model("tiny", 64, 64)
    made = check_equal(model, 3)
    chunks = [made.chunk(number) for number in range(3)]
    names = [name for chunk in chunks for name, _ in chunk.model.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert made.shape(0, (TOKENS, TARGETS)) == (2, 12, 64)
    assert made.tied(range(3), 0) == {}


def test_tied_weights_are_held_by_both_ends() -> None:
    model = build_model("tiny", 64, 64, overrides={"tie_word_embeddings": True})
    made = check_equal(model, 3)
    (first,), (last,) = made.tied((0, 1, 2), 0)[2], made.tied((0, 1, 2), 2)[0]
    assert first is last is model.get_parameter("lm_head.weight")
    assert made.tied((0, 1, 2), 1) == made.tied((0, 1, 0), 0) == {}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_models_are_cut_without_a_list_of_them(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**FOREIGN[kind]))
    check_equal(HFCausalLM(model.float(), 64), 3)


def test_micro_batches_may_come_back_to_the_first_stage_for_the_head() -> None:
    model = build_model("tiny", 8192, 64, overrides={"num_hidden_layers": 8, "tie_word_embeddings": True})
    made = check_equal(model, 2, "first")
    # Where the head is, fewer layers are.
    assert (made.sizes, made.home) == ((1, 7, 0), (0, 1, 0))
    assert made.tied(made.home, 0) == made.tied(made.home, 1) == {}
    embedding, layers, head = (made.chunk(number) for number in range(3))
    assert {name for name, _ in head.model.named_parameters()} == {"model.norm.weight", "lm_head.weight"}
    assert embedding.model.get_parameter("model.embed_tokens.weight") is head.model.get_parameter("lm_head.weight")
    assert not any("embed" in name or "head" in name for name, _ in layers.model.named_parameters())
    with pytest.raises(ConfigError, match="did you mean 'first'"):
        cut(model, 2, head="frist")


class Layered(nn.Module):
    """Layers that pass on a hidden state, and, if `secret`, the first one's output beside it."""

    def __init__(self, secret: bool = False, own_weight: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 64)
        self.secret, self.twice = secret, twice
        self.scale = nn.Parameter(torch.ones(8)) if own_weight else None

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden = first = self.embedding(tokens)
        for number, layer in enumerate([*self.layers, self.layers[0]] if self.twice else self.layers):
            hidden = layer(hidden)
            first = hidden if number == 0 else first
        logits = self.head(hidden + first if self.secret else hidden)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_what_can_not_be_cut_is_refused() -> None:
    cut(Layered(), 2, "1,3")
    for model, message in [
        (Layered(secret=True), "exchange more than a hidden state"),
        (Layered(twice=True), "don't run once each"),
        (Layered(own_weight=True), "has weights of its own around its layers"),
        (nn.Linear(2, 2), "has no nn.ModuleList"),
    ]:
        with pytest.raises(ConfigError, match=message):
            cut(model, 2)


class Named(Layered):
    """Returns what transformers' models do, or a tuple."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        return self.kind(logits=super().forward(tokens))


def test_a_model_that_returns_no_logits_is_told_what_wraps_it() -> None:
    wrap = r"^Named returns SimpleNamespace, .* HFCausalLM\(model, max_seq_len=\.\.\.\) from thinwire\.models\.hf$"
    with pytest.raises(ConfigError, match=wrap):
        cut(Named(SimpleNamespace), 2)
    with pytest.raises(ConfigError, match=r"^Named returns dict, .* nearest: return logits \[batch, seq, vocab\]"):
        cut(Named(dict), 2)


def test_a_mixture_with_a_balance_loss_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    stated = FOREIGN["MixtralConfig"] | {"router_aux_loss_coef": 0.25}
    model = transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(**stated))
    with pytest.raises(ConfigError, match=r"a balance loss .* weight 0\.25, .*; nearest: router_aux_loss_coef=0"):
        cut(HFCausalLM(model.float(), 64), 2)


class Swapped(nn.BatchNorm1d):
    """Over features of [batch, seq, features]."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.transpose(1, 2)).transpose(1, 2)


class InTraining(Layered):
    """Does something in training alone, or in its loss, that chunks can't do."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        if what == "in place":
            self.layers = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)) for _ in range(4))
        if what == "shared":
            self.layers.get_submodule("3.0").weight = self.layers.get_parameter("0.0.weight")
        if what == "with the head":
            self.head = nn.Linear(8, 8)
            self.head.weight = self.layers.get_parameter("3.0.weight")
            self.embedding = nn.Embedding(8, 8)
        if what == "dropout":
            self.layers.extend([nn.Dropout(0.5)])

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden = first = self.embedding(tokens)
        hidden = F.dropout(hidden, 0.5, training=self.training and self.what == "dropout")
        for layer in self.layers:
            if self.what == "layer drop" and self.training and torch.rand(()) < 0.05:
                continue
            if self.what.startswith("checkpoint") and self.training:
                hidden = checkpoint(layer, hidden, use_reentrant=self.what.endswith("reentrant"))
            else:
                hidden = layer(hidden)
        if (self.what == "connection" and self.training) or (self.what == "batch" and len(tokens) > 1):
            hidden = hidden + first
        logits = self.head(hidden)
        if targets is None:
            return logits
        penalty = self.embedding.weight.square().sum() if self.what == "penalty" else 0
        square = first.square().sum()
        # Its value is 0, and its gradient is not.
        aux = square - square.detach() if self.what == "balance" else 0
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + penalty + aux


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("penalty", "another loss in training"),
        ("connection", "another loss in training"),
        ("batch", "another loss in training"),
        ("balance", r"another gradient in training in front of layers\.0"),
        ("layer drop", r"in training layers\.0 does not run once.*nearest: a layer drop of 0"),
        ("checkpoint", r"computes layers again in the backward.*recompute=\"always\""),
        ("checkpoint, reentrant", "computes layers again in the backward"),
        ("in place", r"in training the chunk of layers\.3 changes its input in place"),
        ("shared", r"layers\.0\.0\.weight and layers\.3\.0\.weight are one weight"),
        ("with the head", r"layers\.3\.0\.weight and head\.weight are one weight"),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_what_trains_otherwise_in_chunks_is_refused_before_it_trains(what: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cut(InTraining(what), 2)


def test_dropout_is_no_reason_to_refuse_and_trying_changes_nothing() -> None:
    """Modes of modules, running statistics, gradients and random numbers are as before."""
    model = InTraining("dropout")
    added = nn.Sequential(Swapped(8), nn.GELU())
    for number, more in ((1, nn.Sequential(nn.Identity(), nn.Dropout(0.3).eval())), (2, added)):
        layer = model.layers[number]
        assert isinstance(layer, nn.Sequential)
        layer.append(more)
    before = {name: module.training for name, module in model.named_modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    made = cut(model, 2)
    chunks = [made.chunk(number) for number in range(2)]
    assert {name: module.training for name, module in model.named_modules()} == before
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    # And after a switch the chunks follow, module by module.
    model.eval().train()
    added[0].eval()
    for chunk in chunks:
        follow(chunk.model, model)
    modes = {name: module.training for chunk in chunks for name, module in chunk.model.named_modules()}
    assert not modes["layers.2.2.0"] and modes["layers.1.2.1"] and modes["layers.0"]


@pytest.mark.parametrize(
    ("chunks", "layers", "message"),
    [
        (5, "", "5 stages of 4 layers: nearest that works: 4"),
        (0, "", "nearest that works: 1"),
        (2, "1,2", "layers 1,2: must be 2 numbers .* 4 layers; nearest: 2,2"),
        (3, "2,2", "nearest: 2,1,1"),
        (2, "0,4", "nearest: 2,2"),
        (2, "a,4", "must be whole numbers"),
    ],
)
def test_layers_that_do_not_add_up_are_refused(chunks: int, layers: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cut(Layered(), chunks, layers)


def test_chunks_are_as_even_as_layers_allow() -> None:
    """Against all cuts of some rows: first the operations of the heaviest chunk, then its parameters."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        operations, sizes = torch.randint(0, 9, (2, 7), generator=generator).tolist()
        for chunks in range(1, 8):
            cuts = [(0, *inner, 7) for inner in combinations(range(1, 7), chunks - 1)]

            def cost(borders: tuple[int, ...], *rows: list[int]) -> tuple[int, ...]:
                return tuple(max(sum(row[a:b]) for a, b in pairwise(borders)) for row in rows)

            found = balanced(operations, sizes, chunks)
            borders = tuple(sum(found[:index]) for index in range(chunks + 1))
            assert cost(borders, operations, sizes) == min(cost(each, operations, sizes) for each in cuts)


def test_attention_weighs_by_the_square_of_a_sequence() -> None:
    model = build_model("tiny", 8192, 2048, overrides={"num_hidden_layers": 8})
    # By itself, of the sequences that the model takes.
    assert cut(model, 2, seq_len=8).sizes == (7, 1) and cut(model, 2).sizes == cut(model, 2, seq_len=2048).sizes
    assert cut(model, 2).sizes == (5, 3)


def test_a_heavy_head_leaves_its_chunk_fewer_layers() -> None:
    assert cut(build_model("tiny", 8192, 64, overrides={"num_hidden_layers": 8}), 2).sizes == (7, 1)
    assert cut(build_model("tiny", 64, 64, overrides={"num_hidden_layers": 8}), 2).sizes == (4, 4)


def test_shares_are_by_tokens_that_count() -> None:
    targets = [torch.tensor([[1, 2, -100]]), torch.tensor([[1, 1]])]
    assert token_shares([(each, each) for each in targets]) == [0.5, 0.5]
