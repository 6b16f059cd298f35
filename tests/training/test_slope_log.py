"""One-byte fine-tuning from the command line: a worker joins late, and catches up from the log alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.commands import CommandRunner, finish
from thinwire import ConfigError, SlopeLog
from thinwire.models import build_model
from thinwire.run.config import TrainConfig
from thinwire.state.replicas import ReplicaError
from thinwire.training.engine import build_optimizer

FLAGS: dict[str, Any] = {"strategy": "one-byte", "optimizer": "sgd", "lr": 1e-3}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandRunner]:
    runner = CommandRunner(tmp_path_factory.mktemp("one-byte"))
    yield runner
    runner.close()


def train(runner: CommandRunner, name: str, log: Path, num_ranks: int = 2) -> str:
    """What a run prints that keeps its log in this file."""
    return runner.ranks(name, "--onebyte.log", str(log), num_ranks=num_ranks, **FLAGS)


def shortened(log: SlopeLog, num_steps: int, file: Path) -> Path:
    """A file with the first steps of a log."""
    part = copy.copy(log)
    part.entries, part.seal_digest = log.entries[:num_steps], ""
    part.save(file)
    return file


def test_a_late_worker_catches_up_from_the_log_and_a_short_one_goes_on_bit_for_bit(runner: CommandRunner) -> None:
    folder = runner.folder
    assert "new: rank 0 writes it" in train(runner, "whole", folder / "logs" / "whole.log")
    whole = SlopeLog.load(folder / "logs" / "whole.log")
    assert [tuple(entry.codes.shape) for entry in whole.entries] == [(2, 1)] * 6 and whole.sealed_step == 6

    assert "goes on after step 3" in train(runner, "again", shortened(whole, 3, folder / "again.log"))
    same = ("step", "loss", "lr", "grad_norm", "tokens")
    lines = [[{key: line[key] for key in same} for line in runner.metrics(name)] for name in ("whole", "again")]
    assert lines[1] == lines[0][3:] and len(lines[1]) == 3
    again = SlopeLog.load(folder / "again.log")
    assert again.seal_digest == whole.seal_digest and again.sealed_step == 6
    assert runner.summary("again")["heldout_loss"] == runner.summary("whole")["heldout_loss"]

    train(runner, "joined", shortened(whole, 3, folder / "joined.log"), num_ranks=3)
    joined = SlopeLog.load(folder / "joined.log")
    assert [tuple(entry.codes.shape) for entry in joined.entries] == [(2, 1)] * 3 + [(3, 1)] * 3
    assert [line["step"] for line in runner.metrics("joined")] == [4, 5, 6]

    # Whoever has the original has the result, and another original is noticed.
    config = TrainConfig(optimizer="sgd", lr=1e-3)
    model = build_model("tiny", 256, 16)
    joined.replay(model, build_optimizer(config, model))
    other = build_model("tiny", 256, 16)
    with torch.no_grad():
        next(other.parameters()).view(-1)[5] += 1e-6
    with pytest.raises(ReplicaError, match="after step 6 of the log the weights are not those of the run"):
        joined.replay(other, build_optimizer(config, other))


def test_a_file_that_is_no_log_is_refused(runner: CommandRunner) -> None:
    broken = runner.folder / "broken.log"
    broken.write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="is not a readable log"):
        SlopeLog.load(broken)
    flags = runner.flags("broken", workers=1, **FLAGS)
    code, _, err = finish(runner.start("train", *flags, "--onebyte.log", str(broken)))
    assert code == 2 and "broken.log is not a readable log" in err and "Traceback" not in err
    assert broken.read_bytes() == b"nothing of the kind"
