"""The starter of real processes for tests: a failure ends a test with its error."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests import workers


def _sum(rank: int, world_size: int, name: str) -> float:
    if name == "one fails" and rank == 1:
        raise ValueError("it is rank 1 that fails")
    if name == "all fail":
        raise ValueError("each of them fails")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones)


def test_a_rank_that_fails_between_collectives_ends_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "GRACE_S", 1.0)
    with pytest.raises(workers.WorkerFailed, match=r"(?s)one fails.*rank 1 that fails.*\[0\] still running"):
        workers.run_rows(_sum, ["sound", "one fails", "never"], 2)


def test_rows_before_a_failure_of_all_have_results() -> None:
    told = workers.run_rows(_sum, ["sound", "all fail", "never"], 2)
    assert told.of("sound") == [2.0, 2.0]
    for name in ("all fail", "never"):
        with pytest.raises(workers.WorkerFailed, match=r"rank 1, all fail(?s:.)*each of them fails"):
            told.of(name)
