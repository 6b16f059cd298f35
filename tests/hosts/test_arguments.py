"""What the fronts are given: refused before anything is sent, by one rule for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from thinwire.adapters.attach import attach

model = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
FRONTS: dict[str, Any] = {
    "zero": lambda model, optimizer, method, **given: thinwire.zero(model, optimizer, method, **given),
    "compress_ddp": lambda model, optimizer, method, **given: thinwire.compress_ddp(model, method, optimizer, **given),
    "compress_fsdp": lambda model, optimizer, method, **given: thinwire.compress_fsdp(
        model, method, optimizer, **given
    ),
    "parallelize": lambda model, optimizer, method, **given: thinwire.parallelize(
        model,
        optimizer,
        None,  # type: ignore[arg-type]
        [method],
        **given,
    ),
    "pipeline": lambda model, optimizer, method, **given: thinwire.pipeline(
        model, optimizer, method, stages=1, **given
    ),
}


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"local_size": "1"}, "local_size '1': must be a whole number or None; nearest: 1"),
        ({"local_size": 0}, "local_size 0: must be a whole number or None, at least 1; nearest: 1"),
        ({"timeout_s": "60"}, "timeout_s '60': must be a number; nearest: 60"),
        ({"timeout_s": 0.0}, "timeout_s 0.0: must be a number, at least 0.001; nearest: 0.001"),
        ({"seed": "a"}, "seed 'a': must be a whole number; nearest: 0"),
        ({"checked": 1}, "checked 1: must be true or false; nearest: False"),
    ],
)
def test_a_value_is_refused_with_rule_and_nearest(front: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(thinwire.ConfigError) as caught:
        FRONTS[front](model, optimizer, thinwire.SDP4Bit(), **given)
    assert str(caught.value).startswith(f"{front}: {words}")


@pytest.mark.parametrize("front", FRONTS)
def test_swapped_and_wrong_objects_are_named(front: str) -> None:
    call, method = FRONTS[front], thinwire.SDP4Bit()
    wrong: list[tuple[Any, Any, str]] = [
        (optimizer, model, f"{front} got a AdamW as its model and a Linear as its optimizer: the model comes first"),
        (model.parameters(), optimizer, f"{front} got a generator as its model: must be a torch.nn.Module"),
        (model, [model.weight], f"{front} got a list as its optimizer: must be an optimizer over the model's"),
    ]
    for first, second, words in wrong:
        with pytest.raises(thinwire.ConfigError) as caught:
            call(first, second, method)
        assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (thinwire.SDP4Bit, "SDP4Bit is a class: give the method itself, as SDP4Bit()"),
        ("sdp4bit", "'sdp4bit' is a name: give the method itself, as thinwire.strategy_named('sdp4bit')"),
    ],
)
def test_a_class_or_a_name_in_place_of_a_method(method: Any, words: str) -> None:
    for front in ("zero", "compress_ddp", "compress_fsdp"):
        with pytest.raises(thinwire.ConfigError) as caught:
            FRONTS[front](model, optimizer, method)
        assert str(caught.value) == words


def test_other_values_are_refused() -> None:
    _, sharded = thinwire.zero(model, optimizer, thinwire.Zero(), announce=False)
    wrong: list[tuple[Any, str]] = [
        (lambda: thinwire.zero(model, optimizer, thinwire.Zero(), bucket_numel=0), "bucket_numel 0: must be"),
        (lambda: thinwire.parallelize(model, optimizer, None, []), "parallelize got None as its mesh"),  # type: ignore[arg-type]
        (lambda: sharded.clip_grad_norm_("1"), "max_norm '1': must be a number, at least 0; nearest: 1.0"),  # type: ignore[arg-type]
        (lambda: sharded.clip_grad_norm_(-1.0), "max_norm -1.0: must be"),
        (lambda: sharded.load_state_dict({"state": {}}), "holds 'state', without 'numbers', 'tensors'"),
        (lambda: thinwire.Integer(4.0, 64, "nearest"), "bits 4.0 of Integer: must be a whole number"),  # type: ignore[arg-type]
        (lambda: thinwire.Hadamard(block_size=True), "block_size True of Hadamard"),
        (lambda: attach(model, optimizer, thinwire.SDP4Bit()), "in a Trainer"),
    ]
    for call, words in wrong:
        with pytest.raises(thinwire.ConfigError) as caught:
            call()
        assert words in str(caught.value)
    sharded.close()
