"""`thinwire calibrate` gives its own flags to the ranks of each machine, and torchrun takes none of them."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch.distributed.run

from thinwire.launch.calibrate import run_calibrate


def test_machines_that_join_give_their_number_to_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Namespace] = []
    monkeypatch.setattr(torch.distributed.run, "run", started.append)
    for name in ("RANK", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    words = ["--join", "127.0.0.1:29512", "--nodes", "4", "--node", "3", "--workers", "1", "--out", "machine.json"]
    assert run_calibrate(words) == 0
    (asked,) = started
    assert (asked.nnodes, asked.node_rank, asked.master_addr, asked.master_port) == ("4", 3, "127.0.0.1", 29512)
    assert asked.module and asked.training_script == "thinwire"
    assert asked.training_script_args == ["calibrate", *words]
