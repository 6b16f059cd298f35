"""`--documents`: a packed sequence trains as its documents do apart, however it lies on ranks."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.training.alone import small_config, trainer_of
from tests.training.commands import check_refused
from tests.workers import run_workers
from thinwire.data import load_tokenizer
from thinwire.data.loader import BatchLoader, documents_of
from thinwire.models import build_model
from thinwire.run.run import tokens_of

STEPS, LENGTH = 2, 16
END = 0xFF


def config_of(folder: str, world_size: int, **more: Any) -> Any:
    """A run whose documents have 1 to 12 tokens, 4 sequences a step."""
    path = Path(folder) / f"{world_size}{len(more)}"
    path.mkdir(exist_ok=True)
    lines = ["x" * (number * 7 % 12) for number in range(400)]
    (path / "data.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    config = small_config(
        path, workers=world_size, strategy="zero", steps=STEPS, sample_tokens=0, documents=True,
        tokens_per_step=4 * LENGTH,
    )  # fmt: skip
    return replace(config, data=str(path / "data.jsonl"), local_size=1, **more)


def train(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> tuple[list[float], list[float], float]:
    """Losses, norms, and the held-out loss."""
    trainer = trainer_of(config_of(folder, world_size, **options), rank, world_size)
    losses, norms = [], []
    for _ in range(STEPS):
        trainer.engine.set_lr(1e-3)
        trainer.engine.forward_backward()
        norms.append(float(trainer.stage.reduce()))
        losses.append(trainer.optimizer.mean_loss)
        trainer.engine.update()
    trainer.optimizer.synchronize()
    heldout = trainer.engine.evaluate()
    trainer.engine.close()
    return losses, norms, heldout


def apart(folder: str) -> tuple[float, float]:
    """The loss of the first step's documents, each by itself, and the norm of its gradient."""
    model = build_model("tiny", 256, LENGTH)
    config = config_of(folder, 1)

    text, _ = tokens_of(config, load_tokenizer("bytes")).split(LENGTH)
    tokens, targets = BatchLoader(text, seq_len=LENGTH, micro_batch=4).next_batch()
    total, num = torch.zeros(()), 0
    for row, aims in zip(tokens, targets, strict=True):
        ends = [0, *(1 + (row == END).nonzero().flatten()).tolist(), LENGTH]
        for begin, end in pairwise(sorted(set(ends))):
            # The token that ends a document has nothing to foretell.
            known = end - begin - int(row[end - 1] == END)
            logits = model(row[None, begin:end])[0, :known]
            total = total + F.cross_entropy(logits, aims[begin : begin + known], reduction="sum")
            num += known
    loss = total / num
    loss.backward()
    assert 0 < num <= tokens.numel() - 8
    return loss.item(), float(
        torch.nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
    )


def test_packed_documents_train_as_they_do_apart() -> None:
    with tempfile.TemporaryDirectory() as folder:
        loss, norm = apart(folder)
        (alone,) = run_workers(train, 1, folder, {})
        two = run_workers(train, 2, folder, {"micro_batch": 1})
        heads, ring = (
            run_workers(train, 2, folder, {"tables": {"sequence": {"parallel": 2, "method": method}}})
            for method in ("ulysses", "ring")
        )
    assert alone[0][0] == pytest.approx(loss, rel=1e-5) and alone[1][0] == pytest.approx(norm, rel=1e-4)
    for ranks in (two, heads, ring):
        assert ranks[0] == ranks[1]
        assert ranks[0][0] == pytest.approx(alone[0], rel=1e-5) and ranks[0][1] == pytest.approx(alone[1], rel=1e-4)
        assert ranks[0][2] == pytest.approx(alone[2], rel=1e-5)


def test_numbers_of_documents_and_targets() -> None:
    tokens = torch.tensor([[1, END, END, 2, 3, END, 4]])
    _, targets, documents = documents_of(tokens, torch.roll(tokens, -1, 1), END)
    assert documents.tolist() == [[0, 0, 1, 2, 2, 2, 3]]
    assert targets.tolist() == [[END, -100, -100, 3, END, -100, 1]]
    loaders = [
        BatchLoader(tokens[0].repeat(9).numpy(), seq_len=4, micro_batch=2, rank=rank, world_size=2) for rank in range(2)
    ]
    for _ in range(3):
        promised = {loader.count_followed(END) for loader in loaders}
        assert promised == {sum(int((loader.next_batch()[0] != END).sum()) for loader in loaders)}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--workers 2 --stages 2", "--documents beside stages"),
        ("--compile", "--documents beside --compile: every batch has other documents; leave one of both out"),
    ],
)
def test_what_can_not_keep_documents_apart_is_refused(
    flags: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--model", "tiny", "--seq-len", "16", "--strategy", "zero", "--documents", *flags.split()]
    check_refused(tmp_path, given, re.escape(words), monkeypatch)
