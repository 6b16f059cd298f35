"""Codecs at borders: a pipeline trains as one process with a Border behind the same layers, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hosts.pipeline import models
from tests.workers import run_rows
from thinwire import Border, ConfigError
from thinwire.collectives import Mailbox, Topology
from thinwire.hosts.pipeline import Runner
from thinwire.methods.pipeline import plan
from thinwire.methods.pipeline.border import Crossing, LastMessages, sequence_keys

STEPS, MICRO_BATCHES = 3, 4
# Forward and backward; one whose packets vary in length, and one that draws.
CODECS = {
    "int8": ("int8/8:nearest", "int4/8:stochastic+hadamard8"),
    "exact": ("fp32", "fp32"),
    "zstd": ("bf16+zstd", "int4/4"),
    "delta": ("int4/8:nearest", "int4/8"),
}
# The memory of a border, too little for all that crosses.
DELTA_MB = 7 * models.WIDTH * 8 / 1e6


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    return [models.micro_batches([3 + step, 2, 4, 3]) for step in range(STEPS)]


def trained(module: nn.Module) -> dict[str, Any]:
    return {name: param.detach().clone().numpy() for name, param in module.named_parameters()}


def _pipeline(rank: int, world_size: int, row: str) -> tuple[dict[str, Any], int, int, list[float]]:
    name, order = row.split()
    chunk = models.Stage(rank, world_size)
    optimizer = torch.optim.SGD(chunk.parameters(), lr=0.1)
    mailbox = Mailbox(None, Topology(world_size, 1), checked=True)
    runner = Runner(
        plan(order, world_size, MICRO_BATCHES), {rank: chunk}, mailbox, models.shape, dtype=torch.float64,
        crossing=Crossing(*CODECS[name], seed=5), keys=lambda micro_batch: sequence_keys(micro_batch[0]),
        last={border: LastMessages(1e6 * DELTA_MB) for border in range(2)} if name == "delta" else {},
    )  # fmt: skip
    losses = []
    promised = 0
    for step in batches():
        losses.append(runner.run(step).item())
        promised += runner.sent_bytes(step)
        # Evaluation draws nothing that training draws.
        before = mailbox.meter.snapshot().sent_bytes
        runner.evaluate(step)
        promised += mailbox.meter.snapshot().sent_bytes - before
        optimizer.step()
        optimizer.zero_grad()
    sent = mailbox.meter.snapshot().sent_bytes
    mailbox.close()
    return trained(chunk), sent, promised, losses


def one_process(name: str, num_chunks: int) -> tuple[list[dict[str, Any]], list[float]]:
    stages = [models.Stage(chunk, num_chunks) for chunk in range(num_chunks)]
    delta_mb = DELTA_MB if name == "delta" else 0
    borders = [Border(*CODECS[name], chunk=chunk, seed=5, delta_mb=delta_mb) for chunk in range(num_chunks - 1)]
    optimizer = torch.optim.SGD([param for stage in stages for param in stage.parameters()], lr=0.1)
    losses = []
    for step in batches():
        total = torch.zeros(())
        for micro_batch in step:
            hidden = stages[0](None, micro_batch)
            for border, stage in zip(borders, stages[1:], strict=True):
                border.tokens = micro_batch[0]
                hidden = stage(border(hidden), micro_batch)
            (hidden * 0.25).backward()
            total = total + 0.25 * hidden.detach()
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return [trained(stage) for stage in stages], losses


ROWS = ["int8 1f1b", "int8 gpipe", "exact 1f1b", "zstd 1f1b", "delta 1f1b", "delta gpipe"]


def test_a_pipeline_with_codecs_is_one_process_with_borders_bit_for_bit() -> None:
    told = run_rows(_pipeline, ROWS, 3, local_size=1)
    for row in ROWS:
        expected, losses = one_process(row.split()[0], 3)
        found = told.of(row)
        assert [sum(parts) for parts in zip(*(part[3] for part in found), strict=True)] == losses, row
        for stage, (weights, sent, promised, _) in zip(expected, found, strict=True):
            assert sent == promised if "zstd" not in row else sent <= promised
            assert weights.keys() == stage.keys()
            assert all((weights[name] == stage[name]).all() for name in weights), row


def test_codecs_change_what_crosses_and_by_how_much() -> None:
    border = Border("int8/8", "int2/8", chunk=1, seed=3)
    x = torch.randn(6, 8, requires_grad=True)
    y = border(x)
    assert 0 < (y - x).abs().max() < 0.05
    y.backward(torch.ones_like(y) * torch.randn(6, 8, generator=torch.Generator().manual_seed(0)))
    assert x.grad is not None and len(x.grad.abs().unique()) <= 7
    again = Border("int8/8", "int2/8", chunk=1, seed=3)
    assert torch.equal(again(x.detach()), y)
    # The second micro-batch draws anew, and so does another border.
    assert not torch.equal(again(x.detach()), y)
    assert not torch.equal(Border("int8/8", "int2/8", chunk=2, seed=3)(x.detach()), y)


def test_differences_shrink_where_sequences_return_and_only_there() -> None:
    tokens = torch.arange(6)
    border = Border("int4/8:nearest", "int4/8", delta_mb=4 * 8 * 4 / 1e6)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    errors = []
    for _ in range(3):
        border.tokens = tokens
        errors.append((border(x) - x).abs().amax(1))
    # Four rows fit into the memory.
    assert (errors[2][:4] < 0.02 * errors[0][:4]).all() and torch.equal(errors[2][4:], errors[0][4:])
    plain = border.eval()(x)
    assert torch.equal((plain - x).abs().amax(1), errors[0]), "evaluation changes and uses nothing"


def test_a_state_that_is_not_finite_is_not_kept() -> None:
    border, plain = (Border("int4/8:nearest", "int4/8", delta_mb=1) for _ in range(2))
    border.tokens = plain.tokens = torch.arange(3)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    once, twice = plain(x), plain(x)
    # When the first sequence has not crossed before, and when it has.
    for value, expected in ((float("nan"), once), (float("inf"), twice)):
        spoilt = x.clone()
        spoilt[0, 3] = value
        assert not border(spoilt)[0].isfinite().any()
        found = border(x)
        assert torch.equal(found[0], expected[0]) and found.isfinite().all()


def test_a_token_is_not_touched_by_its_neighbours() -> None:
    crossing = Crossing("int4/4")
    x = torch.randn(5, 8)
    louder = x.clone()
    louder[2] *= 1000
    quiet, loud = (crossing.cross("forward", given, 0, 0) for given in (x, louder))
    assert torch.equal(quiet[[0, 1, 3, 4]], loud[[0, 1, 3, 4]])


@pytest.mark.parametrize(
    ("codecs", "features", "message"),
    [
        (("int8", "fp32"), 96, "forward 'int8': its groups of 128 .* 96 features of a token; nearest: 'int8/96"),
        (("fp32", "int4+hadamard32"), 48, "backward .* nearest: a codec whose groups divide 48"),
        (("itn8", "fp32"), 8, "forward 'itn8' of Crossing: .*did you mean 'int8'"),
    ],
)
def test_codecs_that_do_not_fit_are_refused(codecs: tuple[str, str], features: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Crossing(*codecs).check(features)
