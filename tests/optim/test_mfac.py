"""M-FAC against dense matrices: the inverse Fisher matrix, and steps along it in one process. Shards: conformance."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import thinwire
from thinwire.compose.checks import check_joint
from thinwire.errors import ConfigError
from thinwire.run.config import TrainConfig
from thinwire.run.run import Run

DAMPING, WINDOW, STEPS = 1e-2, 5, 13


def dense(rows: Tensor, count: int, damping: float = DAMPING) -> Tensor:
    """F [d, d] of `count` gradients."""
    return damping * torch.eye(rows.shape[-1], dtype=rows.dtype) + rows.mT @ rows / count


@pytest.mark.parametrize("page", [7, 1 << 16])
def test_the_inverse_equals_that_of_the_dense_matrix(page: int) -> None:
    """Three blocks of twelve gradients of 50 elements, fp64; one gradient; one block; a damping that outweighs all."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 12, 50, generator=generator, dtype=torch.float64)
    x = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    for given, damping in ((rows, DAMPING), (rows[:, :1], DAMPING), (rows[0], DAMPING)):
        fisher = thinwire.InverseFisher(given, damping, page=page)
        inverse, vector = dense(given, given.shape[-2], damping).inverse(), x if given.dim() == 3 else x[0]
        a, b = torch.tensor([0, 3, 3, 49]), torch.tensor([0, 3, 7, 1])
        found = {
            "product": (fisher.product(vector), (inverse @ vector.unsqueeze(-1)).squeeze(-1)),
            "diagonal": (fisher.diagonal(), inverse.diagonal(dim1=-2, dim2=-1)),
            "elements": (fisher.elements(a, b), inverse[..., a, b]),
            "row": (fisher.of_row(0), (inverse @ given[..., 0, :].unsqueeze(-1)).squeeze(-1)),
        }
        for what, (own, expected) in found.items():
            torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10, msg=what)
    torch.testing.assert_close(1e9 * thinwire.InverseFisher(rows, 1e9).product(x), x, rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match="damping 0: must be above 0"):
        thinwire.InverseFisher(rows, 0)


def test_a_product_costs_in_proportion_to_the_elements() -> None:
    """Multiplications for 4 times as many elements, beside those of the matrix of gradients alone."""
    flops = {}
    for num in (500, 2000):
        fisher = thinwire.InverseFisher(torch.randn(8, num, generator=torch.Generator().manual_seed(0)), DAMPING)
        with FlopCounterMode(display=False) as counter:
            fisher.product(torch.ones(num))
        flops[num] = counter.get_total_flops()
    assert 3 < flops[2000] / flops[500] < 6


class Vectors(nn.Module):
    """A matrix, a vector and a scalar; the vector has no gradient in every third step, the scalar none at first."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in {"matrix": (4, 6), "vector": (5,), "scalar": ()}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def give(self, step: int) -> Tensor:
        """Set the gradients of a step; all of them as one vector, fp64."""
        generator, flat = torch.Generator().manual_seed(100 + step), []
        for name, param in self.named_parameters():
            gradient = torch.randn(param.shape, generator=generator) + 0.5
            rests = (name == "vector" and step % 3 == 2) or (name == "scalar" and step == 0)
            param.grad = None if rests else gradient
            flat.append(torch.zeros_like(gradient).flatten() if rests else gradient.flatten())
        return torch.cat(flat).double()

    def moved(self) -> Tensor:
        """All weights as one vector."""
        return torch.cat([param.detach().flatten() for param in self.parameters()])


def made(model: nn.Module, **options: Any) -> thinwire.MFAC:
    given = {"lr": 0.05, "window": WINDOW, "damping": DAMPING, "momentum": 0.6, "weight_decay": 0.1}
    return thinwire.MFAC(model.parameters(), **{**given, **options})


@pytest.mark.parametrize("loads", [False, True])
def test_a_step_goes_along_the_inverse_of_the_last_gradients(loads: bool) -> None:
    """Thirteen steps with a window of five: the first ones count the gradients so far. One goes on from a load."""
    model = Vectors()
    optimizer, weights = made(model), model.moved().double()
    buffer, seen = torch.zeros_like(weights), list[Tensor]()
    for step in range(STEPS):
        if loads and step == 8:
            # The order of the rows is the ring's: K is summed anew from what was loaded.
            state = optimizer.state_dict()
            optimizer = made(model)
            optimizer.load_state_dict(state)
        gradient = model.give(step)
        seen = [*seen, gradient][-WINDOW:]
        moves = torch.cat([torch.full((p.numel(),), float(p.grad is not None)) for p in model.parameters()]).bool()
        direction = dense(torch.stack(seen), len(seen)).inverse() @ gradient
        buffer[moves] = 0.6 * buffer[moves] + 0.4 * direction[moves]
        weights[moves] = weights[moves] * (1 - 0.05 * 0.1) - 0.05 * buffer[moves]
        before = optimizer._gram.clone()
        optimizer.step()
        torch.testing.assert_close(model.moved().double(), weights, rtol=0, atol=1e-5)
        assert not torch.equal(optimizer._gram, before)
    expected = torch.stack(seen) @ torch.stack(seen).T
    order = [(STEPS - WINDOW + at) % WINDOW for at in range(WINDOW)]
    torch.testing.assert_close(optimizer._gram[order][:, order], expected, rtol=0, atol=1e-5)
    matrix = model.get_parameter("matrix")
    kept = sum(value.numel() for value in optimizer.state[matrix].values() if isinstance(value, Tensor))
    part = optimizer.part_of(matrix)
    assert part is not None and kept == (WINDOW + 1) * 24 == optimizer.num_kept(part)


def test_a_sum_is_made_again_bit_for_bit() -> None:
    """Behind a load, and in a copy that went on elsewhere, the bits are those of one run."""
    models = [Vectors()]
    optimizers = [made(models[0])]
    for step in range(7):
        models[0].give(step)
        optimizers[0].step()
    # Torch's load_state_dict takes the tensors that it is given.
    state = copy.deepcopy(optimizers[0].state_dict())
    models.append(copy.deepcopy(models[0]))
    optimizers.append(made(models[1]))
    optimizers[1].load_state_dict(state)
    models_of_copy = pickle.loads(pickle.dumps((models[0], optimizers[0])))
    models.append(models_of_copy[0])
    optimizers.append(models_of_copy[1])
    for step in range(7, STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            model.give(step)
            optimizer.step()
            assert torch.equal(model.moved(), models[0].moved()) and torch.equal(optimizer._gram, optimizers[0]._gram)


def test_it_needs_fewer_steps_than_gradient_descent_on_an_ill_conditioned_problem() -> None:
    """Least squares of condition number 1e4: M-FAC on a quarter of the samples, the best gradient descent on all."""
    generator, scale, most = torch.Generator().manual_seed(2), torch.logspace(0, -2, 8), 300
    inputs = torch.linalg.qr(torch.randn(64, 8, generator=generator)).Q * 8 * scale
    targets = inputs @ (torch.randn(8, generator=generator).sign() / scale)
    weights = nn.Parameter(torch.zeros(8))
    optimizer = thinwire.MFAC([weights], 0.6, window=64, momentum=0.0)

    def left() -> float:
        return float((inputs @ weights.detach() - targets).square().sum() / targets.square().sum())

    num_own = 0
    while left() > 1e-3 and num_own < most:
        rows = torch.randint(64, (16,), generator=generator)
        weights.grad = inputs[rows].T @ (inputs[rows] @ weights.detach() - targets[rows]) / 16
        optimizer.step()
        num_own += 1
    # Each of the directions begins with an eighth of the loss, and shrinks by (1 - rate h)^2 a step.
    steps, rates = torch.arange(1, 20_000).double(), (0.5, 1.0, 1.5, 1.99)
    remaining = [(1 - rate * scale.double().square()).pow(2 * steps[:, None]).mean(1) for rate in rates]
    num_plain = min(int((each > 1e-3).sum()) for each in remaining)
    assert num_own < most and num_plain > 30 * num_own, (num_own, num_plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "mfac window 0: must be at least 1; nearest: 1"),
        ({"damping": 0.0}, "mfac damping 0.0: must be above 0"),
        ({"momentum": 1.0}, "mfac momentum 1.0: must be at least 0 and below 1"),
        ({"lr": -1.0}, "mfac lr -1.0"),
        ({"weight_decay": -0.1}, "mfac weight_decay -0.1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(Vectors(), **options)


def test_who_takes_it() -> None:
    groups: list[dict[str, Any]] = [{"params": [torch.zeros(2)]}, {"params": [torch.zeros(3)], "window": 4}]
    with pytest.raises(ConfigError, match="mfac window 4: must be the same in all groups; nearest: 32"):
        thinwire.MFAC(groups)
    for strategy in ("sdp4bit", "fsdp", "ddp", "diloco"):
        assert Run.of(TrainConfig(strategy=strategy, optimizer="mfac")).config.optimizer == "mfac"
    for mesh, message in (
        ("data=1,tensor=2", "mfac needs whole tensors, which --mesh"),
        ("data=1,pipeline=2", "mfac looks across all parameters, of which ranks of the pipeline axis have others"),
    ):
        with pytest.raises(ConfigError, match=message):
            Run.of(TrainConfig(strategy="zero", optimizer="mfac", mesh=mesh, workers=2))
    with pytest.raises(ConfigError, match="MFAC looks across all parameters, of which ranks of the expert axis"):
        check_joint(made(Vectors()), {"data": 2, "expert": 2})
    check_joint(made(Vectors()), {"data": 2, "expert": 1})
