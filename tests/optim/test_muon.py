"""Muon against torch's own, and AdamW's part against torch's AdamW."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.workers import run_workers
from thinwire.errors import ConfigError
from thinwire.hosts.sums import looking_across
from thinwire.hosts.tensor import cut_parameters
from thinwire.methods.sums import planned_with
from thinwire.optim import OPTIMIZERS, Muon, make_optimizer
from thinwire.optim.muon import orthogonalised
from thinwire.run.config import TrainConfig
from thinwire.run.run import Run
from thinwire.training.engine import build_optimizer

SHAPES = {"wide": (24, 50), "tall": (50, 24), "table": (37, 24), "vector": (24,)}


def some(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def drive(params: dict[str, Tensor], *optimizers: torch.optim.Optimizer) -> dict[str, Tensor]:
    for step in range(1, 9):
        for name, gradient in some(step).items():
            params[name].grad = gradient * 10.0 ** (step % 3)
        for optimizer in optimizers:
            optimizer.step()
    return params


def test_equals_torchs_muon_and_adamw() -> None:
    ours, theirs = some(0), some(0)
    groups: list[dict[str, Any]] = [
        {"params": [ours["table"]], "orthogonal": False},
        {"params": [ours[name] for name in ("wide", "tall", "vector")]},
    ]
    drive(ours, Muon(groups, lr=0.02))
    muon = torch.optim.Muon([theirs["wide"], theirs["tall"]], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    rest = [theirs["table"], theirs["vector"]]
    drive(theirs, muon, torch.optim.AdamW(rest, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-6, msg=name)
        assert float((value - some(0)[name]).abs().max()) > 0.01


def test_a_stack_of_matrices_is_its_matrices() -> None:
    stack = torch.randn(3, 10, 8, generator=torch.Generator().manual_seed(0))
    apart = [matrix.clone() for matrix in stack]
    for optimizer, params in ((Muon([stack]), [stack]), (Muon(apart), apart)):
        for step in range(3):
            gradient = torch.randn(3, 10, 8, generator=torch.Generator().manual_seed(step + 1))
            for param, grad in zip(params, gradient if len(params) > 1 else [gradient], strict=True):
                param.grad = grad
            optimizer.step()
    assert torch.equal(stack, torch.stack(apart))
    assert orthogonalised(torch.zeros(0, 4, 5)).shape == (0, 4, 5)


def test_singular_values_come_near_one_and_zero_stays() -> None:
    for shape in ((40, 16), (16, 40)):
        values = torch.linalg.svdvals(orthogonalised(torch.randn(shape)).float())
        assert float(values.min()) > 0.5 and float(values.max()) < 1.3
    assert not orthogonalised(torch.zeros(4, 5)).any()


def test_goes_on_from_its_state() -> None:
    params = some(0)
    optimizer = Muon(list(params.values()))
    drive(params, optimizer)
    again = {name: param.clone() for name, param in params.items()}
    resumed = make_optimizer("muon", [{"params": list(again.values())}], lr=1e-3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    drive(params, optimizer)
    drive(again, resumed)
    assert all(torch.equal(value, again[name]) for name, value in params.items())


def test_the_trainer_gives_it_the_matrices_of_layers() -> None:
    run = Run.of(TrainConfig(strategy="ddp", optimizer="muon"))
    model = torch.nn.Module()
    model.embed, model.head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7)
    model.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    optimizer = build_optimizer(run.config, model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    turned = [name for name, param in model.named_parameters() if "momentum_buffer" in optimizer.state[param]]
    assert turned == ["layers.0.weight", "layers.1.weight"]


class Held(nn.Module):
    """A matrix that four ranks cut, one that fits, a stack of experts, and a vector; each has a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, shape in {"wide": (24, 50), "tall": (50, 24), "stack": (3, 10, 8), "bias": (24,)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return sum((p * torch.randn(p.shape, generator=generator)).sum() for p in self.parameters())  # type: ignore


def stepped(model: nn.Module, optimizer: Any, steps: range) -> dict[str, Tensor]:
    """All ranks have the same gradients, of which the mean over two or four ranks is exact."""
    for step in steps:
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def shards(rank: int, world_size: int, local_size: int) -> dict[str, Any]:
    """Six steps, with small buckets where nodes have several ranks."""
    model, bucket_numel = Held(), 2048 if local_size > 1 else None
    model, optimizer = thinwire.zero(
        model, Muon(model.parameters(), 0.02), thinwire.Zero(), local_size=local_size,
        bucket_numel=bucket_numel,
    )  # fmt: skip
    grid, whole = optimizer.comm.topology, Held()
    muon = Muon(whole.parameters())
    across = looking_across(muon, dict(whole.named_parameters()))
    cuts = thinwire.Zero().cuts(whole, grid, across)
    plan = planned_with(thinwire.Zero().plan(whole, grid, 1), muon, cuts, across, grid)
    found: dict[str, Any] = {"formula": optimizer.bytes_per_step, "plan": sum(plan.sent.values())}
    before = optimizer.meter.snapshot()
    stepped(model, optimizer, range(1))
    found["sent"] = (optimizer.meter.snapshot() - before).sent_bytes
    found["weights"] = stepped(model, optimizer, range(1, 6))
    optimizer.close()
    return found


@pytest.mark.parametrize("world_size, local_size", [(4, 2), (2, 1), (3, 1)])
def test_shards_step_as_one_process_to_the_bit(world_size: int, local_size: int) -> None:
    alone = Held()
    expected = stepped(alone, Muon(alone.parameters(), 0.02), range(6))
    theirs = Held()
    muon = torch.optim.Muon([*theirs.parameters()][:2], 0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    reference = stepped(theirs, muon, range(6))
    ranks = run_workers(shards, world_size, local_size, local_size=local_size)
    # Thirds of gradients are rounded, and now and then a bf16 of the momentum with them.
    atol = 1e-4 if world_size == 3 else 1e-6
    for found in ranks:
        for name, value in expected.items():
            if world_size != 3:
                assert torch.equal(found["weights"][name], value), name
            torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=atol, msg=name)
        for name in ("wide", "tall"):
            torch.testing.assert_close(found["weights"][name], reference[name], rtol=0, atol=atol)
        assert found["sent"] == found["formula"]
    if local_size == 1:
        assert max(found["sent"] for found in ranks) == ranks[0]["plan"]


def test_who_cuts_tensors_refuses_it() -> None:
    with pytest.raises(ConfigError, match="lans does not fit strategy zero"):
        Run.of(TrainConfig(strategy="zero", optimizer="lans"))
    assert Run.of(TrainConfig(strategy="sdp4bit", optimizer="muon")).config.optimizer == "muon"
    with pytest.raises(ConfigError, match="mesh"):
        Run.of(TrainConfig(strategy="ddp", optimizer="lans", mesh="data=1,tensor=2", workers=2))
    model = torch.nn.Linear(4, 4)
    for optimizer in (OPTIMIZERS["lans"](model.parameters()), torch.optim.Muon([model.weight])):
        with pytest.raises(ConfigError, match="whole tensors"):
            cut_parameters(model, optimizer, None)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="can't be sharded"):
            thinwire.zero(model, optimizer, thinwire.Zero())
    with pytest.raises(ConfigError, match=r"muon momentum 1\.0"):
        Muon(model.parameters(), momentum=1.0)


def test_a_vector_that_is_asked_to_be_orthogonal_is_refused() -> None:
    params = some(0)
    named = [{"params": [*params.items()], "orthogonal": True}]
    for name, make in (("muon", Muon), ("dion", thinwire.DionOptimizer)):
        with pytest.raises(ConfigError, match=rf"{name}: parameter vector of group 0, of shape \(24,\), is no matrix"):
            make(named)
        with pytest.raises(ConfigError, match=r"2 problems:(.|\n)* number 0 of .* nearest: a group with orthogonal=F"):
            make([torch.zeros(3), torch.zeros(2, 3), torch.zeros(2, 2, 1, 1)], orthogonal=True)
        later = make([torch.zeros(2, 3)])
        with pytest.raises(ConfigError, match="parameter number 0 of group 1, of shape"):
            later.add_param_group({"params": [torch.zeros(3)], "orthogonal": True})
        vector = make([torch.zeros(3)])
        state = vector.state_dict()
        state["param_groups"][0]["orthogonal"] = True
        with pytest.raises(ConfigError, match="parameter number 0 of group 0"):
            vector.load_state_dict(state)
        # A depthwise convolution is a stack of no matrices.
        kernels = torch.zeros(64, 1, 4)
        with pytest.raises(ConfigError, match=r"of shape \(64, 1, 4\), is no matrix, .* of 8 rows and columns or more"):
            make([kernels], orthogonal=True)
        assert not make([kernels]).matrices
    # Without a word of it, each has its own step.
    assert len(Muon(list(params.values())).matrices) == 3
