"""Every program in examples/ runs on two processes, learns, and sends what it says."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from tests.workers import run_program

ROOT = Path(__file__).parents[2]
NEEDS = {"accelerate_loop": "accelerate", "hf_trainer": "transformers.distributed"}


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example_trains_compressed(example: Path, tmp_path: Path) -> None:
    needed = NEEDS.get(example.stem, "torch")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    out, err = run_program(Path(shutil.copy(example, tmp_path)), 2)
    # Plain programs print "loss 0.8", the Trainer prints a dict.
    losses = [float(loss) for loss in re.findall(r"loss'?:? '?([\d.]+)", out)]
    sent_mb = [
        float(sent) for pair in re.findall(r"'sent_mb': '?([\d.]+)|([\d.]+) MB sent", out) for sent in pair if sent
    ]
    assert losses[1] < 0.8 * losses[0], out
    assert sent_mb[1] > sent_mb[0] >= 0
    assert "strategy zeropp" in err or example.stem == "graph"


def test_ranks_that_share_the_vertices_of_a_stage_learn_what_one_rank_does(tmp_path: Path) -> None:
    example = Path(shutil.copy(ROOT / "examples" / "graph.py", tmp_path))
    losses = [re.findall(r"loss ([\d.]+)", run_program(example, num_ranks)[0]) for num_ranks in (2, 4)]
    assert len(losses[0]) == 2
    assert [*map(float, losses[1])] == pytest.approx([*map(float, losses[0])], abs=2e-4)
