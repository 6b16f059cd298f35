"""`--loss cut` trains as `--loss plain`, on every axis that has a head."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training.commands import train_ranks

SMALL = (
    "--model", "tiny", "--seq-len", "22", "--micro-batch", "2", "--tokens-per-step", "176", "--lr", "0.003",
    "--llama.num-hidden-layers", "4", "--dtype", "fp32", "--eval-sequences", "6", "--sample-tokens", "0",
    "--timeout", "120", "--local-size", "1", "--steps", "3", "--strategy", "zero",
)  # fmt: skip
ROWS = {
    "plain": (1, "--loss auto"),
    "data": (2, "--loss cut"),
    "stages": (2, "--loss cut --stages 2 --pipeline.plan zbv --pipeline.forward fp32 --pipeline.backward fp32"),
    "sequence": (2, "--loss cut --sequence.parallel 2"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("losses")
    return {
        name: train_ranks(folder, name, ranks, [*SMALL, *flags.split()], "") for name, (ranks, flags) in ROWS.items()
    }


@pytest.mark.parametrize("name", ["data", "stages", "sequence"])
def test_cut_trains_as_plain(runs: dict[str, dict[str, Any]], name: str) -> None:
    own, plain = ([line["loss"] for line in runs[run]["steps"].values()] for run in (name, "plain"))
    assert own == pytest.approx(plain, rel=1e-5)
    assert own != plain
    assert runs[name]["heldout_loss"] == pytest.approx(runs["plain"]["heldout_loss"], rel=1e-5)
