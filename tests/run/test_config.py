from __future__ import annotations

from dataclasses import fields, replace

import pytest

from thinwire.errors import ConfigError
from thinwire.run.config import DEFAULTS, FIXED_ON_RESUME, PER_MACHINE, TrainConfig, derive, range_errors, with_derived


@pytest.mark.parametrize(
    ("tokens_per_step", "micro_batch", "world_size", "expected"),
    [
        (4096, 4, 4, (4096, 4, 1)),
        (4096, 3, 1, (4096, 2, 8)),
        (4096, 100, 2, (4096, 8, 1)),
        (None, 5, 2, (2560, 5, 1)),
        (1792, 4, 1, (1792, 1, 7)),
    ],
)
def test_batch_is_the_largest_micro_batch_that_divides(
    tokens_per_step: int | None, micro_batch: int, world_size: int, expected: tuple[int, int, int]
) -> None:
    config = TrainConfig(tokens_per_step=tokens_per_step, micro_batch=micro_batch, seq_len=256)
    batch = derive(config, world_size)
    assert (batch.tokens_per_step, batch.micro_batch, batch.accumulation) == expected
    assert batch.micro_batch * batch.accumulation * world_size * 256 == batch.tokens_per_step


def test_batch_that_does_not_divide_names_the_nearest() -> None:
    config = TrainConfig(tokens_per_step=4000, seq_len=256)
    with pytest.raises(ConfigError, match=r"4000.*256 \* 4 = 1024; nearest: 4096"):
        derive(config, 4)


def test_derived_numbers_are_a_fixed_point() -> None:
    once = with_derived(replace(DEFAULTS, steps=50, workers=2))
    assert (once.tokens_per_step, once.warmup_steps) == (2 * 8 * 256, 5)
    assert with_derived(once) == once


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 0}, "--workers 0: must be at least 1"),
        ({"stop_at": 0}, "--stop-at 0: must be at least 1"),
        ({"lr": 0.0}, "--lr 0.0: must be above 0"),
        ({"lr": float("nan")}, "--lr nan: must be finite"),
        ({"seq_len": -1}, "--seq-len -1"),
        ({"timeout": 0.0}, "--timeout 0.0"),
        ({"timeout": 1e300}, "--timeout 1e+300: must be at most 31,536,000; nearest: 31536000"),
        ({"nodes": 2}, "needs --join"),
        ({"nodes": 2, "node": 2, "join": "a:1"}, "--node 2: nodes are numbered 0 to 1"),
        ({"resume": True, "overwrite": True}, "contradict"),
    ],
)
def test_values_out_of_range(change: dict[str, float | str], message: str) -> None:
    errors = list(range_errors(replace(DEFAULTS, **change)))  # type: ignore[arg-type]
    assert len(errors) == 1 and message in errors[0]


def test_defaults_are_in_range() -> None:
    assert not list(range_errors(DEFAULTS))


def test_lists_of_field_names_name_fields() -> None:
    names = {item.name for item in fields(TrainConfig)} | {"world_size"}
    assert names >= PER_MACHINE and names >= set(FIXED_ON_RESUME)
