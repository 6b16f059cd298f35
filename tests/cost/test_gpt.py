"""Closed forms of a GPT, against a built one and published figures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinwire.cost.gpt import GPT, RECIPES
from thinwire.planner.command import run_explain

# What a rank of Frontier can do at most, in half precision.
PEAK = 191.5e12


@pytest.mark.parametrize("model", [GPT(4, 64, 1_000, 128), GPT(12, 768, 50_257, 1_024)])
def test_parameters_are_those_of_a_built_model(model: GPT) -> None:
    with torch.device("meta"):
        layers = [nn.TransformerEncoderLayer(model.hidden, 4, 4 * model.hidden) for _ in range(model.layers)]
        built = nn.ModuleList([*layers, nn.Embedding(model.vocab, model.hidden), nn.LayerNorm(model.hidden)])
        built.append(nn.Embedding(model.seq_len, model.hidden))
    assert model.parameters == pytest.approx(sum(param.numel() for param in built.parameters()), rel=1e-3)


def test_operations_are_those_of_the_products() -> None:
    model, num = GPT(4, 64, 1_000, 128), 3
    tokens = num * model.seq_len
    layer = 2 * tokens * 12 * model.hidden**2 + 4 * tokens * model.seq_len * model.hidden
    head = 2 * tokens * model.hidden * model.vocab
    assert model.operations(num, recompute=False) == pytest.approx(3 * (model.layers * layer + head))
    assert model.operations(num) == pytest.approx(4 * model.layers * layer + 3 * head)


@pytest.mark.parametrize(("name", "tokens", "ranks", "flops", "days"), [
    ("1t", 450e9, 3072, 163e12, 84), ("175b", 300e9, 1024, 140e12, 34),
])  # fmt: skip
def test_days_of_training_are_the_published_ones(
    name: str, tokens: float, ranks: int, flops: float, days: float
) -> None:
    model = RECIPES[name].model
    operations = model.operations(1) / model.seq_len * tokens
    assert operations / (8 * tokens * model.parameters) == pytest.approx(1, rel=0.03)
    assert operations / ranks / flops / 86_400 == pytest.approx(days, rel=0.03)


def test_recipes_are_those_of_frontier(capsys: pytest.CaptureFixture[str]) -> None:
    shares = {name: recipe.flops / PEAK for name, recipe in RECIPES.items()}
    assert shares == pytest.approx({"22b": 0.3838, "175b": 0.3614, "1t": 0.3196}, rel=1e-3)
    stated = {name: float(name.replace("b", "e9").replace("t", "e12")) for name in RECIPES}
    assert {name: recipe.model.parameters for name, recipe in RECIPES.items()} == pytest.approx(stated, rel=0.02)
    assert run_explain(["--recipe", "175b", "--nodes", "4"]) == 0
    out = capsys.readouterr().out
    assert "4 tensor ranks x 16 stages" in out and "43.7 GB to 10.9 GB" in out and " 2 %" in out
    assert "--nodes 4: no effect (a recipe states all of it)" in out
