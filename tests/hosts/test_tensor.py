"""Tensor parallelism by torch's parallelize_module beside a method on the data axis, held to one process."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import thinwire
from tests.checkpoint.replicas import Replica
from tests.workers import run_rows, run_workers
from thinwire._compat import default_store
from thinwire.checkpoint import Disk, Keep, Saver, Source
from thinwire.compose import Stage, parallelize
from thinwire.state.replicas import digest

STEPS = 4
FP32: dict[str, Any] = {"weights": "fp32", "intra_gradients": "fp32", "inter_gradients": "fp32", "refresh": "fp32"}
EXACT: dict[str, Any] = {
    "zero": thinwire.Zero(),
    "ddp": thinwire.DDP(),
    "fsdp": thinwire.FSDP(),
    "zeropp-fp32": thinwire.ZeroPP(weights="fp32", intra_gradients="fp32", inter_gradients="fp32", vectors="fp32"),
    "frontier": thinwire.Frontier(**FP32),
    "frontier-cut": thinwire.Frontier(**FP32, weights_over=2, gradients_over=2),
}
LOSSY: dict[str, Any] = {
    "sdp4bit": thinwire.SDP4Bit(),
    "powersgd": thinwire.PowerSGD(rank=2, start_step=2, min_compression=1.0),
    "zero-bf16": thinwire.ZeroBF16(),
    "zeropp": thinwire.ZeroPP(),
}
# Of their weights a rank holds whole ones but for a while: they are looked at once, at the end.
PASSING = ("zeropp-fp32", "zeropp", "frontier-cut")
METHODS = EXACT | LOSSY


class Block(nn.Module):
    """Two matrices that are cut, a norm and a bias that every rank of the tensor axis holds whole."""

    def __init__(self, width: int, hidden: int, drop: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.inside, self.behind = nn.Dropout(drop), nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.behind(self.down(self.inside(torch.relu(self.up(self.norm(x))))))


class Stack(nn.Module):
    def __init__(self, seed: int, recompute: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.recompute = recompute
        self.blocks = nn.ModuleList(Block(12, 20, drop) for _ in range(2))
        self.head = nn.Linear(12, 5, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return nn.functional.cross_entropy(self.head(x), y)


PLAN: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def batches(step: int, share: int, num_shares: int, micro_batches: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 12, generator=generator)
    y = torch.randint(5, (16,), generator=generator)
    own = slice(share * 16 // num_shares, (share + 1) * 16 // num_shares)
    return list(zip(x[own].chunk(micro_batches), y[own].chunk(micro_batches), strict=True))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def alone(max_norm: float = 0.5) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and norms of one process that sees every batch."""
    model = Stack(0)
    optimizer, norms = adamw(model), []
    for step in range(STEPS):
        for x, y in batches(step, 0, 1, 4):
            (model(x, y) / 4).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


def train(
    rank: int, world_size: int, name: str, sizes: tuple[int, int], recompute: bool = False, drop: float = 0.0
) -> dict[str, Any] | None:
    if name == "frontier-cut" and sizes[0] == 1:
        return None
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
    # Ranks start from other weights: the first one's are taken, of what is cut as of what is not.
    model = Stack(0, recompute, drop)
    drawn = note_draws(model) if drop else {}
    if rank:
        with torch.no_grad():
            model.head.weight.add_(rank)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
    stage = parallelize(model, adamw(model), mesh, [METHODS[name]], local_size=1, checked=True, announce=False)
    norms, hashes = [], []
    # Frontier gathers weights in every micro-batch, and its promise is of one.
    micro_batches = 1 if name == "frontier-cut" else 2
    for step in range(STEPS):
        if step == 1:
            # FSDP2's first step has the gather of its own, and all have that of the next.
            before = stage.optimizer.meter.snapshot()
        stage.forward_backward(batches(step, mesh["data"].get_local_rank(), sizes[0], micro_batches))
        stage.reduce()
        norms.append(float(stage.update(0.5)))
        if name not in PASSING:
            stage.optimizer.synchronize()
            hashes.append(hashes_of(model))
    sent = (stage.optimizer.meter.snapshot() - before).sent_bytes
    stage.optimizer.synchronize()
    hashes.append(hashes_of(model))
    stage.optimizer.check_replicas()
    found = {
        "weights": {name: param.detach().clone() for name, param in model.named_parameters()},
        "norms": norms, "hashes": hashes, "sent": sent, "promised": stage.optimizer.bytes_per_step,
        "loss": stage.optimizer.mean_loss, "place": (mesh["data"].get_local_rank(), mesh["tensor"].get_local_rank()),
        "drawn": drawn,
    }  # fmt: skip
    stage.close()
    return found


def note_draws(model: nn.Module) -> dict[str, list[list[float]]]:
    """The first numbers that each dropout draws in each forward, by the dropout's name, as they come."""
    drawn: dict[str, list[list[float]]] = {}

    def note(name: str) -> None:
        with torch.random.fork_rng():
            drawn.setdefault(name, []).append(torch.rand(4).tolist())

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_pre_hook(lambda *_, name=name: note(name))
    return drawn


def hashes_of(model: nn.Module) -> dict[str, list[int]]:
    return {name: digest([param.detach()]).tolist() for name, param in model.named_parameters()}


def whole(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """A parameter from the parts of the ranks of the tensor axis."""
    if ".up." in name:
        return torch.cat(parts)
    return torch.cat(parts, dim=1) if name.endswith("down.weight") else parts[0]


@pytest.fixture(scope="module", params=[(2, 2), (1, 2)], ids=["2x2", "1x2"])
def runs(request: pytest.FixtureRequest) -> tuple[tuple[int, int], Any]:
    sizes = request.param
    return sizes, run_rows(train, list(METHODS), sizes[0] * sizes[1], sizes)


@pytest.mark.parametrize("name", METHODS)
def test_replicas_are_equal_and_bytes_are_those_of_the_formula(name: str, runs: tuple) -> None:
    sizes, rows = runs
    ranks = rows.of(name)
    if ranks[0] is None:
        pytest.skip("its weights are cut over two ranks")
    for tensor in range(sizes[1]):
        column = [found["hashes"] for found in ranks if found["place"][1] == tensor]
        assert all(hashes == column[0] for hashes in column)
    copies = [key for key in ranks[0]["hashes"][0] if ".up." not in key and not key.endswith("down.weight")]
    for step in range(len(ranks[0]["hashes"])):
        assert all(found["hashes"][step][key] == ranks[0]["hashes"][step][key] for found in ranks for key in copies)
    assert all(found["norms"] == ranks[0]["norms"] for found in ranks)
    if name != "powersgd":
        assert all(found["sent"] == (STEPS - 1) * found["promised"] for found in ranks)


@pytest.mark.parametrize("name", METHODS)
def test_equals_one_process(name: str, runs: tuple) -> None:
    sizes, rows = runs
    ranks, (expected, norms) = rows.of(name), alone()
    if ranks[0] is None:
        pytest.skip("its weights are cut over two ranks")
    parts = sorted((found for found in ranks if found["place"][0] == 0), key=lambda found: found["place"][1])
    if name in EXACT or sizes[0] == 1:
        assert ranks[0]["norms"] == pytest.approx(norms, rel=1e-5)
    start = dict(Stack(0).named_parameters())
    far = near = 0.0
    for key, value in expected.items():
        found = whole(key, [part["weights"][key] for part in parts])
        far += float((found - value).square().sum())
        near += float((value - start[key].detach()).square().sum())
        if name in EXACT:
            torch.testing.assert_close(found, value, rtol=0, atol=1e-6)
    assert math.sqrt(far / near) < 0.5


def recomputed(rank: int, world_size: int) -> list[Any]:
    return [train(rank, world_size, "zero", (1, 2), recompute, 0.5) for recompute in (False, True)]


def test_dropout_is_alike_where_tensors_are_whole_and_each_rank_s_own_where_they_are_cut() -> None:
    ranks = run_workers(recomputed, 2)
    # The same random numbers where activations are computed again in backward.
    for plain, again in ranks:
        assert plain["hashes"] == again["hashes"]
    for (name, first), second in zip(ranks[0][0]["drawn"].items(), ranks[1][0]["drawn"].values(), strict=True):
        # Two micro-batches a step, and no number comes twice.
        assert len(first) == len(second) == len(set(map(tuple, first))) == 2 * STEPS
        assert all((one == other) == name.endswith("behind") for one, other in zip(first, second, strict=True)), name
    for first, second in zip(ranks[0][0]["hashes"], ranks[1][0]["hashes"], strict=True):
        assert all(first[name] == second[name] for name in first if ".up." not in name and "down.weight" not in name)


def save(stage: Stage, folder: Path, step: int, store: Any = None) -> None:
    """A checkpoint of the ranks that take every step together."""
    comm = stage.optimizer.everyone

    def gather(value: int) -> list[int]:
        return [int(n) for n in comm.wait(comm.all_gather_exact(torch.tensor([value])))]

    saver = Saver(folder, Disk.find(folder, comm.rank, gather), store or default_store(), Keep(), 60.0)
    saver.save(step, stage.snapshot(), loss=None, about={})
    saver.close()
    assert not (problems := saver.problems()), problems


REMEMBER: dict[str, Any] = {
    "zero-compressed": thinwire.ZeroCompressed(),
    "powersgd": LOSSY["powersgd"],
}
WAY = [("mesh", (2, 2)), ("flat", (4, 1)), ("again", (2, 2))]


def move(rank: int, world_size: int, name: str, folder: Path) -> list[dict[str, Any]]:
    """The residuals of all ranks after some steps, and on each mesh that takes the checkpoint of the one before."""
    found = []
    for number, (key, sizes) in enumerate(WAY):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        model = Stack(0)
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], PLAN)
        stage = parallelize(model, adamw(model), mesh, [REMEMBER[name]], local_size=1, announce=False)
        if not number:
            for step in range(3):
                stage.forward_backward(batches(step, mesh["data"].get_local_rank(), sizes[0]))
                stage.step(0.5)
        else:
            source = Source(folder / name / WAY[number - 1][0] / f"step-{number:08d}", rank)
            stage.restore(source)
            assert not any("dropped" in row and "feedback" in row[0] for row in source.report()), source.report()
        place = (mesh["data"].get_local_rank(), mesh["tensor"].get_local_rank())
        shapes = {key: param.shape for key, param in model.named_parameters()}
        replica: Any = SimpleNamespace(optimizer=stage.optimizer, rank=stage.optimizer.comm.rank)
        residuals = {key: flat.view(shapes[key]) for key, flat in Replica.residuals(replica).items()}
        found.append({"residuals": residuals, "place": place})
        save(stage, folder / name / key, number + 1)
        stage.forward_backward(batches(9, place[0], sizes[0]))
        stage.step(0.5)
        stage.close()
    return found


@pytest.mark.parametrize("name", REMEMBER)
def test_error_feedback_moves_between_meshes(name: str, tmp_path: Path) -> None:
    ranks = run_workers(move, 4, name, tmp_path)
    means = []
    for number, (_, (num_data, num_tensor)) in enumerate(WAY):
        told = {found[number]["place"]: found[number]["residuals"] for found in ranks}
        mean: dict[str, torch.Tensor] = {}
        for key in told[0, 0]:
            parts = [sum(told[data, at][key] for data in range(num_data)) / num_data for at in range(num_tensor)]
            mean[key] = whole(key, parts)
        means.append(mean)
    assert any(value.any() for key, value in means[0].items() if ".up." in key)
    for mean in means[1:]:
        assert mean.keys() == means[0].keys()
        for key, value in mean.items():
            torch.testing.assert_close(value, means[0][key], rtol=1e-5, atol=1e-7)


def refusals(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    said = []

    def refused(make: Any, *args: Any) -> None:
        model = Stack(0)
        with pytest.raises(thinwire.ConfigError) as caught:
            make(model, *args)
        said.append(str(caught.value))

    def with_mesh(model: nn.Module, mesh: Any, methods: list) -> None:
        parallelize(model, adamw(model), mesh, methods, announce=False)

    refused(with_mesh, mesh, [thinwire.Zero()])
    refused(with_mesh, mesh, [])
    refused(with_mesh, init_device_mesh("cpu", (2,)), [thinwire.Zero()])
    refused(with_mesh, init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensr")), [thinwire.Zero()])
    refused(with_mesh, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)), [thinwire.Zero()])
    refused(with_mesh, init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), [thinwire.Zero()])
    uneven = copy.deepcopy(Stack(0))
    uneven.blocks[0].up = nn.Linear(12, 7)
    parallelize_module(uneven.blocks[0].up, mesh["tensor"], ColwiseParallel())
    with pytest.raises(thinwire.ConfigError) as caught:
        with_mesh(uneven, mesh, [thinwire.Zero()])
    said.append(str(caught.value))
    return [*said, *misused()]


def misused() -> list[str]:
    """What a Stage says of a step that is none."""
    mesh, model, said = init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), nn.Linear(4, 4), []
    stage = parallelize(model, adamw(model), mesh, [thinwire.Zero()], local_size=1, announce=False)

    def loss_of(module: Any, batch: Any) -> torch.Tensor:
        return module(batch).mean()

    def refused(call: Any, *args: Any) -> None:
        with pytest.raises((thinwire.ConfigError, RuntimeError)) as caught:
            call(*args)
        said.append(str(caught.value))

    refused(stage.forward_backward, torch.ones(8, 4), loss_of)
    refused(stage.forward_backward, [], loss_of)
    refused(stage.forward_backward, [torch.ones(8, 4)], lambda batch: model(batch).mean())
    refused(stage.forward_backward, [torch.ones(8, 4)], lambda module, batch: module(batch))
    stage.forward_backward([torch.ones(8, 4)], loss_of)
    refused(stage.forward_backward, [torch.ones(8, 4)], loss_of)
    stage.step()
    model.weight.register_hook(lambda grad: grad.reshape(2, 3))
    refused(stage.forward_backward, [torch.ones(8, 4)], loss_of)
    refused(stage.step)
    return said


def test_what_does_not_fit_is_refused_with_the_nearest_choice() -> None:
    uncut, missing, nameless, misspelt, dataless, short, uneven, *misuses = run_workers(refusals, 2)[0]
    tensor, empty, one_argument, many_numbers, second, _, after_failure = misuses
    assert "a Tensor of shape [8, 4], must be a list of at least one; nearest: [batch]" in tensor
    assert "an empty list, must be a list of at least one; nearest: [batch]" in empty
    assert "the loss takes (batch), and is called as loss(module, micro-batch)" in one_argument
    assert "the loss gives a tensor of shape [8, 4], must be a tensor of one number" in many_numbers
    assert "a second forward_backward in one step" in second
    assert "an earlier forward_backward failed in a backward" in after_failure
    assert "no parameter is cut over it" in uncut and "parallelize_module" in uncut
    assert "the data axis takes one method, not none; nearest: [thinwire.Zero()]" in missing
    assert "mesh_dim_names" in nameless
    assert "; nearest: tensor" in misspelt
    assert "has no data axis" in dataless
    assert "'dp': must be of" in short and "nearest: data" in short and "nearest: tensor" in short
    assert "'blocks.0.up.weight' of shape (7, 12)" in uneven and "multiple of 2" in uneven


class ScaledHeads(nn.Module):
    """A scale that all ranks hold whole, and that each applies to its own columns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 5)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = (self.up(x).unflatten(-1, (-1, 2)) * self.scale).flatten(-2)
        return self.down(scaled).square().mean()


def scaled_heads(rank: int, world_size: int) -> list[Any]:
    refused = [steps_of_scaled(method, False)[0] for method in (thinwire.Zero(), thinwire.FSDP())]
    return [*refused, steps_of_scaled(thinwire.Zero(), True)]


def steps_of_scaled(method: Any, is_summed: bool) -> tuple[str, torch.Tensor]:
    """What the first step whose gradients are finite is refused for, and the scale after two of them."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = ScaledHeads()
    if is_summed:
        model.scale.register_hook(lambda gradient: all_reduce(gradient, "sum", mesh["tensor"]))
    parallelize_module(model, mesh["tensor"], PLAN)
    stage = parallelize(model, adamw(model), mesh, [method], announce=False)
    x, told = torch.randn(6, 12, generator=torch.Generator().manual_seed(0)), ""
    # Gradients that are not finite tell nothing: the next step is compared.
    for factor in (math.nan, 1.0, 1.0):
        stage.forward_backward([x * factor], lambda model, x: model(x))
        try:
            stage.step()
        except thinwire.ConfigError as error:
            told = str(error)
            break
    scale = model.scale.detach().clone()
    stage.close()
    return told, scale


def test_a_whole_parameter_with_another_gradient_on_each_rank_is_refused_in_the_first_step() -> None:
    one = ScaledHeads()
    optimizer, x = adamw(one), torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        optimizer.zero_grad()
        one(x).backward()
        optimizer.step()
    for plain, fsdp, (told, scale) in run_workers(scaled_heads, 2):
        assert "scale: whole on all ranks of the tensor axis" in plain and plain.endswith("before parallelize")
        # FSDP2 would not run such a hook.
        assert plain.startswith(fsdp) and fsdp.endswith("in the plan of parallelize_module")
        assert not told
        torch.testing.assert_close(scale, one.scale.detach(), rtol=0, atol=1e-6)


def apart(rank: int, world_size: int) -> list[bool]:
    """Two meshes of two ranks each, which know nothing of each other: whether each keeps its own weights."""
    meshes = [DeviceMesh("cpu", ranks, mesh_dim_names=("data",)) for ranks in ([0, 1], [2, 3])]
    kept = []
    for method in (thinwire.Zero(), thinwire.DDP()):
        torch.manual_seed(rank // 2)
        model = nn.Linear(8, 8)
        before = model.weight.detach().clone()
        stage = thinwire.parallelize(model, adamw(model), meshes[rank // 2], [method], local_size=1, announce=False)
        kept.append(torch.equal(model.weight, before))
        stage.close()
    return kept


def test_a_mesh_of_some_ranks_leaves_the_others_alone() -> None:
    assert run_workers(apart, 4, local_size=1) == [[True, True]] * 4


def eager(rank: int, world_size: int) -> list[bool]:
    """Whether `overlap` is told to have no effect, by method."""
    mesh, told = init_device_mesh("cpu", (world_size,), mesh_dim_names=("data",)), []
    for method in (thinwire.Zero(), thinwire.DDP(), thinwire.FSDP()):
        model = nn.Linear(8, 8)
        stage = thinwire.parallelize(model, adamw(model), mesh, [method], overlap=True, announce=False)
        told.append(("overlap", "no effect") in [row[:2] for row in stage.describe()])
        stage.close()
    return told


def test_overlap_without_an_effect_is_told() -> None:
    assert run_workers(eager, 1) == [[False, True, False]]


def test_what_is_no_list_of_methods_is_refused() -> None:
    model, mesh = nn.Linear(2, 2), None
    with pytest.raises(thinwire.ConfigError, match="methods must be a list, such as"):
        thinwire.parallelize(model, adamw(model), mesh, thinwire.Zero())  # type: ignore[arg-type]


HOSTS: dict[str, Any] = {"zero": thinwire.Zero(), "ddp": thinwire.DDP(), "fsdp": thinwire.FSDP()}
MATRICES = [f"{host} {kind}" for host in HOSTS for kind in ("muon", "dion")]


def stepping_matrices(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    # With an eps that is not small, AdamW's part does not turn on rounding either.
    if kind == "dion":
        return thinwire.DionOptimizer(model.parameters(), lr=0.02, eps=1e-4, rank=4)
    return thinwire.Muon(model.parameters(), lr=0.02, eps=1e-4)


def train_matrices(rank: int, world_size: int, name: str, folder: Path) -> dict[str, Any]:
    """Four steps on two by two ranks, what both axes cut taken whole; the third on a data axis, by checkpoints."""
    (host, kind), step, found = name.split(), 0, dict[str, Any]()
    for number, (sizes, last) in enumerate([((2, 2), 2), ((4, 1), 3), ((2, 2), 4)]):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        model = Stack(0)
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], PLAN)
        options: dict[str, Any] = {"local_size": 1, "checked": True, "announce": False}
        stage = parallelize(model, stepping_matrices(kind, model), mesh, [HOSTS[host]], **options)
        if number:
            source = Source(folder / name / f"{number - 1}" / f"step-{step:08d}", rank)
            stage.restore(source)
            assert not any("anew" in row[1] or "dropped" in row[1] for row in source.report()), source.report()
        while step < last:
            before = stage.optimizer.meter.snapshot()
            num_shares = sizes[0]
            stage.forward_backward(batches(step, mesh["data"].get_local_rank(), num_shares, 4 // num_shares))
            stage.step()
            stage.optimizer.synchronize()
            step += 1
        sent = (stage.optimizer.meter.snapshot() - before).sent_bytes
        weights = {key: param.detach().clone() for key, param in model.named_parameters()}
        found = {"weights": weights, "sent": sent, "promised": stage.optimizer.bytes_per_step, "rank": rank}
        save(stage, folder / name / f"{number}", step)
        stage.close()
    return found


def test_muon_and_dion_take_matrices_that_both_axes_cut(tmp_path: Path) -> None:
    told = run_rows(train_matrices, MATRICES, 4, tmp_path)
    for kind in ("muon", "dion"):
        model = Stack(0)
        optimizer = stepping_matrices(kind, model)
        for step in range(4):
            for x, y in batches(step, 0, 1, 4):
                (model(x, y) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
        for host in HOSTS:
            ranks = told.of(f"{host} {kind}")
            for key, param in model.named_parameters():
                found = whole(key, [ranks[0]["weights"][key], ranks[1]["weights"][key]])
                # Muon rounds a direction to the next bf16 where its sum was taken in another order.
                atol = 5e-4 if kind == "muon" else 1e-5
                torch.testing.assert_close(found, param.detach(), rtol=0, atol=atol, msg=f"{host} {kind} {key}")
            if host != "fsdp":
                assert all(found["sent"] == found["promised"] for found in ranks), host
