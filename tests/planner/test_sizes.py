"""Sizes of a step that can't be planned for are refused by their own names, with a value that is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.planner.machines import FAST, machine
from thinwire.compare.verify import run_plan
from thinwire.errors import ConfigError
from thinwire.planner.plan import plan


def test_arguments_of_a_plan_are_checked_like_flags() -> None:
    with pytest.raises(ConfigError) as error:
        plan(
            "tiny", cast(Any, "machine.json"), tokens_per_step=cast(Any, 2048.0), tensor=0, vocab_size=-3,
            axes=("tenser",), tables={"lama": {}}, residency={"stores": "none"}, reserved_bytes=cast(Any, float("nan")),
        )  # fmt: skip
    for part in (
        "machine 'machine.json': must be a Machine", "tokens_per_step 2048.0: must be a whole number", "tensor 0: must",
        "vocab_size -3: must be a whole number of at least 1; nearest: 1", "did you mean 'tensor'",
        "did you mean 'llama'", "did you mean 'store'", "reserved_bytes nan",
    ):  # fmt: skip
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--stages 4", "--stages 4: must divide the 4 ranks, and the model has 3 layers; nearest: 2"),
        ("--stages 0", "--stages 0: must divide the 4 ranks, and the model has 3 layers; nearest: 1"),
        ("--stages -1", "--stages -1: must divide the 4 ranks, and the model has 3 layers; nearest: 1"),
        ("--model moe-tiny --stages 2", "--stages 2: must divide the 4 ranks, and a mixture has one stage; nearest: 1"),
        ("--micro-batch 0", "--micro-batch 0: must be at least 1; nearest: 1"),
        ("--seq-len 0", "--seq-len 0: must be at least 1; nearest: 1"),
        ("--tokens-per-step 0", "--tokens-per-step 0: must be a multiple of --seq-len 64, and above 0; nearest: 256"),
        ("--experts.parallel 2", "--experts.parallel 2: the model has no experts; nearest: a mixture such as moe-tiny"),
        ("--stages 2 --pipeline.forward int99", "int99"),
        ("--mesh data=4", "unknown flag --mesh: a plan finds the mesh; nearest: --stages, --sequence.parallel or"),
        ("--order 0 1", "unknown flag --order: a plan finds the order of ranks, and writes it; nearest: leave it out"),
        ("--strategies diloco --stages 4 --model demo", "no mesh of 4 ranks has all of --strategies diloco --stages 4"),
    ],
)
def test_a_size_is_refused_by_its_own_name(flags: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(machine(FAST).to_json())
    files = ["--machine", str(file), "--out", str(tmp_path / "plan.toml")]
    with pytest.raises(ConfigError) as caught:
        run_plan([*files, "--model", "tiny", "--seq-len", "64", *flags.split()])
    assert said in str(caught.value) and caught.value.exit_code == 2
    if "--tokens-per-step" not in flags:
        assert "--tokens-per-step" not in str(caught.value)
