"""FedSpeed's ascent: the gradient of a step is also taken uphill, on every rank by itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from tests.workers import run_workers
from thinwire.collectives import Topology
from thinwire.cost import Work
from thinwire.errors import ConfigError
from thinwire.methods.outer.ascent import Ascent

RHO, ALPHA, LAM, LR, EVERY, STEPS = 0.3, 0.75, 10.0, 0.1, 3, 6
METHOD = thinwire.LocalSGD(sync_every=EVERY, fedspeed=LAM, ascent=RHO, ascent_share=ALPHA)


def made() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def micro_batches(step: int, rank: int) -> list[Tensor]:
    """Two for each rank, of other data on each."""
    return list(torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(10 * step + rank)) + 0.5 * rank)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :3].sin()).square().mean()


def gradient(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    losses = torch.stack([loss_of(model, batch) for batch in batches])
    return list(torch.autograd.grad(losses.mean(), list(model.parameters())))


def mixed(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """(1 - alpha) g1 + alpha g2, as the paper has it."""
    first = gradient(model, batches)
    norm = torch.cat([each.flatten() for each in first]).norm()
    uphill = copy.deepcopy(model)
    with torch.no_grad():
        for param, g1 in zip(uphill.parameters(), first, strict=True):
            param.add_(RHO * g1 / (norm + 1e-7))
    second = gradient(uphill, batches)
    return [(1 - ALPHA) * g1 + ALPHA * g2 for g1, g2 in zip(first, second, strict=True)]


def reference() -> list[Tensor]:
    """Two islands of two ranks in one process, fp64."""
    islands = [made().double() for _ in range(2)]
    x = [param.detach().clone() for param in islands[0].parameters()]
    h = [[torch.zeros_like(each) for each in x] for _ in islands]
    for step in range(STEPS):
        for number, model in enumerate(islands):
            of_ranks = [mixed(model, [b.double() for b in micro_batches(step, 2 * number + r)]) for r in range(2)]
            with torch.no_grad():
                for param, one, other, anchor, own in zip(model.parameters(), *of_ranks, x, h[number], strict=True):
                    param -= LR * ((one + other) / 2 + (param - anchor + own) / LAM)
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                for model, own in zip(islands, h, strict=True):
                    for param, each, anchor in zip(model.parameters(), own, x, strict=True):
                        each += param - anchor
                ends = zip(*(model.parameters() for model in islands), *h, strict=True)
                x = [(w0 + w1 + h0 + h1).detach() / 2 for w0, w1, h0, h1 in ends]
                for model in islands:
                    for param, anchor in zip(model.parameters(), x, strict=True):
                        param.copy_(anchor)
    return x


def climb(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """The weights after a run, and after one that goes on from the state that the first had in between."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "data"))
    found: dict[str, Any] = {}
    for name, inner in (("ddp", thinwire.DDP()), ("zero", thinwire.Zero())):
        state: dict[str, Any] = {}
        for first in (0, 4):
            model = made()
            stage = thinwire.parallelize(
                model, torch.optim.SGD(model.parameters(), lr=LR), mesh, [METHOD, inner], overlap=True, announce=False
            )
            if first:
                stage.optimizer.load_state_dict(state)
            for step in range(first, STEPS):
                if step == 4 and not first:
                    state = copy.deepcopy(stage.optimizer.state_dict())
                stage.optimizer.synchronize()
                before = [param.detach().clone() for param in model.parameters()]
                loss = stage.forward_backward(micro_batches(step, rank), loss_of)
                assert all(map(torch.equal, before, model.parameters())), "the weights are where they were"
                with torch.no_grad():
                    own = [float(loss_of(model, batch)) for batch in micro_batches(step, rank)]
                assert loss == pytest.approx(sum(own) / 2, rel=1e-6)
                stage.step()
            stage.finish()
            found[f"{name} from {first}"] = [param.detach().clone() for param in model.parameters()]
            assert any(asked == f"ascent {RHO:g}" for asked, _, _ in stage.describe())
            stage.close()
    return found


def test_islands_climb_as_one_process_would() -> None:
    for found in run_workers(climb, 4):
        for name in ("ddp", "zero"):
            for value, expected in zip(found[f"{name} from 0"], reference(), strict=True):
                torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-6)
            assert all(map(torch.equal, found[f"{name} from 0"], found[f"{name} from 4"])), "goes on bit for bit"


def test_the_arithmetic_in_fp64_and_the_way_back() -> None:
    model = made().double()
    batches = [batch.double() for batch in micro_batches(0, 0)]
    expected = mixed(model, batches)
    before = [param.detach().clone() for param in model.parameters()]
    for param, g1 in zip(model.parameters(), gradient(model, batches), strict=True):
        param.grad = g1
    with pytest.raises(KeyboardInterrupt), Ascent(RHO, ALPHA).uphill(model.parameters()):
        assert not any(map(torch.equal, before, model.parameters()))
        (ALPHA * torch.stack([loss_of(model, batch) for batch in batches]).mean()).backward()
        raise KeyboardInterrupt
    assert all(map(torch.equal, before, model.parameters()))
    for param, each in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, each, rtol=1e-12, atol=1e-15)


def test_it_computes_twice_as_much_and_keeps_a_copy_of_the_weights() -> None:
    model, grid = made(), Topology(2, 1)

    def computed(method: thinwire.LocalSGD) -> float:
        graph = method.schedule(model, grid, 2, Work("matmul", 1.0))
        works = [task.does for task in graph.tasks if isinstance(task.does, Work)]
        return sum(work.amount for work in works if work.kind == "matmul")

    assert computed(METHOD) == 2 * computed(thinwire.LocalSGD(sync_every=EVERY, fedspeed=LAM))
    kept = METHOD.plan(model, grid, 2).other["weights before the ascent"]
    assert kept == 4 * sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ascent": 0.0}, "above 0"),
        ({"ascent": 0.1, "ascent_share": 1.5}, "nearest: 1"),
        ({"ascent_share": 0.5}, "no effect without ascent"),
        ({"ascent": 0.1, "inner": thinwire.FSDP()}, "fsdp inside an island sums .* nearest: --inner sdp4bit"),
        ({"ascent": 0.1, "inner": thinwire.Frontier()}, "frontier inside an island sums"),
    ],
)
def test_what_can_not_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        thinwire.DiLoCo(**options)


def test_a_loop_with_one_backward_and_a_tensor_axis_are_refused() -> None:
    model = made()
    with pytest.raises(ConfigError, match="forward_backward takes both"):
        thinwire.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=LR), ascent=0.1)
    assert "leave ascent out" in thinwire.DiLoCo(ascent=0.1).not_on_mesh and not thinwire.DiLoCo().not_on_mesh
