"""A language model cut over ranks trains as it does in one process, tied weights included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.workers import run_rows
from thinwire.collectives import Mailbox, Topology
from thinwire.hosts.pipeline import Runner, TiedWeights
from thinwire.methods.pipeline import Costs, Cut, Plan, cut, fitted, plan, token_shares
from thinwire.models import build_model

STEPS = 3
LENGTHS = (5, 9, 4, 7)
ORDERS = ("1f1b", "gpipe", "fitted")


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    """Ragged: of other lengths, and with targets that count for nothing."""
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randint(0, 64, (2, 2, length), generator=generator) for length in LENGTHS]
    for each in drawn:
        each[1, 0, :2] = -100
    # One counts for nothing at all: its mean loss is no number.
    drawn[2][1] = -100
    return [(each[0], each[1]) for each in drawn]


def model() -> nn.Module:
    return build_model("tiny", 64, 16, overrides={"tie_word_embeddings": True})


def returning(made: Cut) -> Plan:
    """Micro-batches go through all stages and back to the first, where the head is."""
    return fitted(made.home, [range(made.num_chunks)] * len(LENGTHS), Costs.even(made.num_chunks))


def trained(rank: int, world_size: int, order: str) -> tuple[list[float], dict[str, Any], int, int, list[float]]:
    made = cut(model(), world_size, head="first" if order == "fitted" else "last")
    made_plan = plan(order, world_size, len(LENGTHS)) if order != "fitted" else returning(made)
    chunks = {number: made.chunk(number) for number in made_plan.chunks_of(rank)}
    mailbox = Mailbox(None, Topology(world_size, 1))
    runner = Runner(made_plan, chunks, mailbox, made.shape, tied=TiedWeights(mailbox, made.tied(made_plan.home, rank)))
    weights = {name: param for chunk in chunks.values() for name, param in chunk.model.named_parameters()}
    trained = {id(param): param for param in weights.values()}.values()
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    losses, squares = [], []
    promised = 0
    for step in range(STEPS):
        micro_batches = batches(step)
        losses.append(runner.run(micro_batches, token_shares(micro_batches)).item())
        promised += runner.sent_bytes(micro_batches)
        squares.append(sum(float(param.grad.double().square().sum()) for param in trained if param.grad is not None))
        optimizer.step()
        optimizer.zero_grad()
    sent = mailbox.meter.snapshot().sent_bytes
    # Before a forward the copies of a tied weight are brought to the same bits.
    runner.evaluate(batches(0))
    mailbox.close()
    return losses, {name: param.detach().numpy() for name, param in weights.items()}, sent, promised, squares


def test_a_cut_model_trains_as_in_one_process() -> None:
    whole = model()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(STEPS):
        micro_batches = batches(step)
        shares = token_shares(micro_batches)
        parts = [share * whole(*batch) for batch, share in zip(micro_batches, shares, strict=True) if share]
        loss = torch.stack(parts).sum()
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.grad is not None]).item())
        optimizer.step()
        optimizer.zero_grad()
    told = run_rows(trained, ORDERS, 3, local_size=1)
    for order in ORDERS:
        found = told.of(order)
        for step, loss_of_one in enumerate(losses):
            assert abs(sum(row[0][step] for row in found) - loss_of_one) < 1e-6
            assert abs(sum(row[4][step] for row in found) ** 0.5 - norms[step]) < 1e-6
        for name, param in whole.named_parameters():
            holders = [row[1][name] for row in found if name in row[1]]
            assert holders, name
            assert all(abs(held - param.detach().numpy()).max() < 1e-6 for held in holders), name
        holders = [row[1].get("model.embed_tokens.weight", row[1].get("lm_head.weight")) for row in found]
        assert all((held == holders[0]).all() for held in holders if held is not None)
        assert all(row[2] == row[3] for row in found)
