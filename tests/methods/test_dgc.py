"""DGC: its corrections against momentum SGD, what is conserved, what travels, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.hosts.alone import Alone, gradients, parameters
from tests.workers import run_workers
from thinwire import DGC, DGCSGD, ConfigError
from thinwire.collectives import Topology
from thinwire.models import build_model
from thinwire.state.memory import Place

EVERYTHING: dict[str, Any] = {"density": 1.0, "clip": 0.0, "warmup": ()}


def sgd(params: dict[str, nn.Parameter], momentum: float, nesterov: bool = False) -> dict[str, Tensor]:
    """Weights after ten steps of torch's SGD."""
    optimizer = torch.optim.SGD(params.values(), lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=0.1)
    for step in range(10):
        for name, grad in gradients(params, step).items():
            params[name].grad = grad
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}


@pytest.mark.parametrize(("nesterov", "masking"), [(False, False), (True, False), (False, True)])
def test_at_density_one_it_is_sgd_with_momentum_or_masked_without(nesterov: bool, masking: bool) -> None:
    """Masking clears the momentum of all that was sent, which is everything."""
    shapes = {"matrix": (9, 14), "conv": (3, 2, 5)}
    params = parameters(**shapes)
    momentum = 0.0 if masking else 0.9
    optimizer = DGCSGD(params.values(), lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=0.1)
    method = DGC(**EVERYTHING, nesterov=nesterov, factor_masking=masking)
    alone = Alone(method, params, optimizer)
    for step in range(10):
        alone.put(gradients(params, step))
    for name, weight in sgd(parameters(**shapes), momentum, nesterov).items():
        torch.testing.assert_close(params[name].detach(), weight, rtol=0, atol=1e-6)


def test_vectors_have_momentum_on_their_mean() -> None:
    params = parameters(bias=(5,), scalar=())
    alone = Alone(DGC(density=0.01, clip=0.0), params, torch.optim.SGD(params.values(), lr=0.1, weight_decay=0.0))
    start, pushed = params["bias"].detach().clone(), torch.zeros(5)
    velocity = torch.zeros(5)
    for step in range(6):
        alone.put(gradients(params, step))
        velocity = 0.9 * velocity + gradients(params, step)["bias"]
        pushed += velocity
    torch.testing.assert_close(params["bias"].detach(), start - 0.1 * pushed)


@pytest.mark.parametrize("values", ["fp32", "bf16"])
@pytest.mark.parametrize("stride", [1, 4])
def test_all_that_was_put_in_comes_out_or_is_still_held(values: str, stride: int) -> None:
    """(1 - m) (sum of outputs + v) + m u = sum of gradients, whatever travels and however it is rounded."""
    params = parameters(matrix=(40, 25))
    method = DGC(density=0.05, clip=0.0, factor_masking=False, warmup=(), values=values, stride=stride)
    alone = Alone(method, params)
    out, put_in = torch.zeros(1000), torch.zeros(1000)
    for step in range(12):
        out += alone.put(gradients(params, step))["matrix"].view(-1)
        put_in += gradients(params, step)["matrix"].view(-1)
    unsent, velocity = alone.reduction.unsent["matrix"], alone.reduction.velocity["matrix"]
    assert float(unsent.norm()) > float(out.norm()) / 10
    torch.testing.assert_close(0.1 * (out + unsent) + 0.9 * velocity, put_in, rtol=0, atol=1e-5)
    torch.testing.assert_close(alone.reduction.state.residuals()["matrix"].view(-1), unsent)


def test_what_is_sent_late_has_the_momentum_it_missed() -> None:
    """After T steps at home, sum_t g_t (1 - m^(T-t+1)) / (1 - m), where plain accumulation would send sum_t g_t."""
    params, quiet = parameters(matrix=(1, 2)), [0.5, -0.25, 1.0, 0.125, 2.0]
    alone = Alone(DGC(density=0.5, clip=0.0, warmup=(), stride=1), params)
    for t, value in enumerate(quiet, 1):
        loud = 1000.0 if t < len(quiet) else 0.0
        out = alone.put({"matrix": torch.tensor([[value, loud]])})["matrix"]
        assert (out[0, 0] == 0) == (t < len(quiet))
    expected = sum(g * (1 - 0.9 ** (len(quiet) - t)) / 0.1 for t, g in enumerate(quiet))
    assert float(out[0, 0]) == pytest.approx(expected, rel=1e-6)
    # Masking has cleared the loud one's momentum at every step: nothing of it is left to push.
    assert float(alone.reduction.velocity["matrix"][1]) == 0.0


def test_a_step_that_is_not_finite_leaves_memory_as_it_was() -> None:
    params = parameters(matrix=(20, 20), bias=(4,))
    alone = Alone(DGC(density=0.05, warmup=()), params)
    for step in range(3):
        alone.put(gradients(params, step))
    before = alone.reduction.state.state_dict()
    spoiled = gradients(params, 3)
    spoiled["matrix"][0, 0] = math.inf
    assert not torch.isfinite(alone.put(spoiled)["matrix"]).all()
    assert alone.reduction.state.forget() == []
    after = alone.reduction.state.state_dict()
    assert all(torch.equal(after[kind][name], before[kind][name]) for kind in before for name in before[kind])


def test_a_gradient_is_clipped_before_it_is_accumulated() -> None:
    params = parameters(matrix=(8, 8), bias=(8,))
    alone = Alone(DGC(density=1.0, warmup=(), clip=0.5), params)
    given = gradients(params, 0)
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in given.values()))
    for name, out in alone.put(given).items():
        torch.testing.assert_close(out, given[name] * 0.5 / norm)


def test_densities_fall_as_the_warm_up_says() -> None:
    method = DGC(warmup=(0.25, 0.0625), warmup_steps=3)
    assert [method.density_at(step) for step in range(8)] == [0.25] * 3 + [0.0625] * 3 + [0.001] * 2
    assert DGC().for_run(400, 40).settled_after == 40 and DGC().settled_after == 100
    assert DGC(warmup_steps=7).for_run(400, 40).settled_after == 28
    assert DGC(warmup=()).for_run(400, 40).settled_after == 0
    params = parameters(matrix=(50, 40))
    alone = Alone(DGC(density=0.01, warmup=(0.25, 0.1), warmup_steps=1, clip=0.0), params)
    sent = [int((alone.put(gradients(params, step))["matrix"] != 0).sum()) for step in range(4)]
    assert sent == [500, 200, 20, 20]


def demo_bytes(rank: int, world_size: int) -> tuple[int, int, int, float]:
    """For the demo model: (bytes of gradients in fp32, bytes sent, by formula, what scales a norm of 10)."""
    model = build_model("demo", 256, 256, 0)
    alone = Alone(DGC(warmup=()), dict(model.named_parameters()))
    before = alone.comm.meter.snapshot()
    alone.put(gradients(alone.params, 0, rank))
    sent = (alone.comm.meter.snapshot() - before).sent_bytes
    shapes = {name: param.shape for name, param in alone.params.items()}
    formula = sum(alone.reduction.sent_bytes().values())
    scale = alone.reduction.local_scale({"any": torch.tensor([6.0, 8.0])})
    return 4 * sum(map(torch.Size.numel, shapes.values())), sent, formula, scale


def test_a_thousandth_sends_270_to_600_times_less() -> None:
    for plain, sent, formula, scale in run_workers(demo_bytes, 2):
        assert sent == formula
        # c sqrt(P) over the norm: two such gradients that are independent have a mean of norm c.
        assert scale == pytest.approx(2**0.5 / 10)
        assert 270 <= plain / sent <= 600


def test_bytes_grow_with_the_number_of_nodes() -> None:
    shapes = {"matrix": torch.Size((1024, 1024))}

    def sent(shapes: dict[str, torch.Size], nodes: int) -> int:
        return DGC(density=0.01).reduction(Place(shapes, Topology(nodes, 1)), 0).sent_bytes()["inter"]

    two, four = (sent(shapes, nodes) - sent({}, nodes) for nodes in (2, 4))
    assert four == 3 * two
    # 10,486 entries: 4 bytes each, and about log2(1 / density) + 2 bits of index.
    assert 10_486 * 4 < two < 10_486 * 5.1


def refused(rank: int, world_size: int) -> str:
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
    with pytest.raises(ConfigError) as caught:
        thinwire.compress_ddp(ddp, DGC())
    return str(caught.value)


def test_what_can_not_work_is_refused() -> None:
    weights = [nn.Parameter(torch.zeros(2, 2))]
    for optimizer, words in (
        (torch.optim.SGD(weights, momentum=0.9), "momentum 0.9 of SGD.*applied twice.*DGCSGD"),
        (torch.optim.AdamW(weights), "which AdamW is not.*DGCSGD"),
    ):
        with pytest.raises(ConfigError, match=words):
            DGC().check(nn.Linear(2, 2), optimizer)
    options: dict[str, Any]
    for options, words in (
        ({"values": "fp61"}, "values 'fp61' of DGC: no codec is called 'fp61'"),
        ({"momentum": 1.0}, "momentum 1.0 of dgc"),
        ({"clip": -1.0}, "clip -1.0 of dgc"),
        ({"density": 0.0}, "density 0.0"),
        ({"warmup": (2.0,)}, "density 2.0"),
        ({"warmup_steps": 0}, "warmup_steps 0 of dgc"),
        ({"warmup_steps": 5, "warmup": ()}, "no effect without a warmup"),
        ({"momentum": 0.0, "nesterov": True}, "change nothing at momentum 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            DGC(**options)
    assert all("find_unused_parameters=False" in said for said in run_workers(refused, 2))


def test_the_start_table_says_what_is_in_effect() -> None:
    params = parameters(matrix=(8, 8), bias=(8,))
    rows = {asked: effect for asked, effect, _ in Alone(DGC(), params).reduction.rows()}
    assert rows["gradients"].startswith("1 of 2 as threshold0.1%/")
    assert rows["clip 1"].startswith("each rank's gradient to a norm of 1,")
    other = DGCSGD(params.values(), momentum=0.8)
    rows = {asked: effect for asked, effect, _ in Alone(DGC(), params, other).reduction.rows()}
    assert rows["momentum of weight decay"] == "0.8"
