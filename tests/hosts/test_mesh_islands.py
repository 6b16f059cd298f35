"""The island axis of a mesh: an outer method around data and tensor parallelism, held to its formula in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import thinwire
from tests.hosts.test_tensor import PLAN, Stack, adamw, batches, hashes_of, save, whole
from tests.workers import run_rows, run_workers
from thinwire._compat import default_store
from thinwire.checkpoint import Source
from thinwire.compose import Stage, parallelize
from thinwire.layout.fragments import cut

EVERY, STEPS = 2, 6
# Parameters become the mean of the islands'.
MEAN: dict[str, Any] = {"sync_every": EVERY, "outer_lr": 1.0, "outer_momentum": 0.0}
STREAM: dict[str, Any] = {
    "sync_every": EVERY, "num_fragments": 2, "overlap_steps": 1, "mix": 0.25, "outer_lr": 0.7, "outer_momentum": 0.9,
    "codec": "fp32",
}  # fmt: skip
EVERY_STEP = MEAN | {"sync_every": 1}
ISLANDS, DATA, TENSOR = "island", "data", "tensor"
# (methods, mesh); each island, whatever it is made of, sees its half of every batch.
ROWS: dict[str, tuple[list[Any], dict[str, int]]] = {
    "mean-data": ([thinwire.DiLoCo(**MEAN), thinwire.Zero()], {ISLANDS: 2, DATA: 2}),
    "mean-inner": ([thinwire.DiLoCo(**MEAN, inner=thinwire.FSDP())], {ISLANDS: 2, DATA: 2}),
    "mean-tensor": ([thinwire.DiLoCo(**MEAN), thinwire.DDP()], {ISLANDS: 2, DATA: 1, TENSOR: 2}),
    "step-data": ([thinwire.DiLoCo(**EVERY_STEP), thinwire.Zero()], {ISLANDS: 2, DATA: 2}),
    "stream-data": ([thinwire.StreamingDiLoCo(**STREAM), thinwire.Zero()], {ISLANDS: 2, DATA: 2}),
    "stream-tensor": ([thinwire.StreamingDiLoCo(**STREAM), thinwire.Zero()], {ISLANDS: 2, DATA: 1, TENSOR: 2}),
    "lossy-data": ([thinwire.DiLoCo(**MEAN, codec="int4"), thinwire.SDP4Bit()], {ISLANDS: 2, DATA: 2}),
    "lossy-tensor": ([thinwire.StreamingDiLoCo(**STREAM | {"codec": "e3m0"}), thinwire.SDP4Bit()],
                     {ISLANDS: 2, DATA: 1, TENSOR: 2}),
}  # fmt: skip
EXACT = [name for name in ROWS if not name.startswith("lossy")]


def make(name: str) -> tuple[Any, nn.Module, Stage]:
    methods, sizes = ROWS[name]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = Stack(0)
    if dist.get_rank():
        with torch.no_grad():
            model.head.weight.add_(1.0)
    if TENSOR in sizes:
        for block in model.blocks:
            parallelize_module(block, mesh[TENSOR], PLAN)
    stage = parallelize(model, adamw(model), mesh, methods, local_size=1, checked=True, announce=False)
    return mesh, model, stage


def take(mesh: Any, stage: Stage, step: int) -> float:
    island, num_data = mesh[ISLANDS].get_local_rank(), mesh[DATA].size()
    stage.forward_backward(batches(step, island * num_data + mesh[DATA].get_local_rank(), 2 * num_data))
    stage.reduce()
    return float(stage.update(0.5))


def train(rank: int, world_size: int, name: str) -> dict[str, Any]:
    mesh, model, stage = make(name)
    norms, hashes = [], []
    before = stage.optimizer.meter.snapshot()
    for step in range(STEPS):
        norms.append(take(mesh, stage, step))
        stage.optimizer.synchronize()
        hashes.append(hashes_of(model))
    optimizer: Any = stage.optimizer
    sent = (optimizer.meter.snapshot() - before).sent_bytes
    rounds = STEPS // optimizer.loop.method.sync_every
    promised = STEPS * optimizer.inner.bytes_per_step + rounds * optimizer.traffic.bytes_per_round
    optimizer.check_replicas()
    place = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
    left = {name: param.detach().clone() for name, param in model.named_parameters()}
    stage.finish()
    found = {
        "weights": left, "result": hashes_of(model), "norms": norms, "hashes": hashes, "sent": sent,
        "promised": promised, "place": place,
    }  # fmt: skip
    stage.close()
    return found


def island(share: int) -> Any:
    """Steps of one island in one process, with its half of every batch; gives the norm of each."""
    model = Stack(0)
    optimizer = adamw(model)

    def step(number: int) -> float:
        for x, y in batches(number, share, 2, 4):
            (model(x, y) / 4).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return model, step


@torch.no_grad()
def outer(mine: dict[str, Any], names: list[str], models: list[nn.Module], options: dict[str, Any]) -> None:
    """Note the islands' mean way from the outer parameters, of these parameters."""
    params = [dict(model.named_parameters()) for model in models]
    mine["under_way"] = {n: mine["x"][n] - (params[0][n] + params[1][n]) / 2 for n in names}


@torch.no_grad()
def arrive(mine: dict[str, Any], models: list[nn.Module], options: dict[str, Any]) -> None:
    """The outer Nesterov step, and what the islands go on with."""
    rate, mu, mix = options["outer_lr"], options["outer_momentum"], options.get("mix", 0.0)
    for name, way in mine.pop("under_way").items():
        mine["buf"][name] = mu * mine["buf"][name] + way
        mine["x"][name] = mine["x"][name] - rate * (way + mu * mine["buf"][name])
        for model in models:
            param = dict(model.named_parameters())[name]
            param.copy_(mix * param + (1 - mix) * mine["x"][name])


def reference(options: dict[str, Any]) -> tuple[list[dict[str, Tensor]], list[list[float]]]:
    """Both islands' weights and norms, in one process."""
    islands = [island(0), island(1)]
    models = [model for model, _ in islands]
    every, late, num = options["sync_every"], options.get("overlap_steps", 0), options.get("num_fragments", 1)
    fragments = []
    for fragment in cut(models[0], num, "strided", 1):
        start = {name: dict(models[0].named_parameters())[name].detach().clone() for name in fragment.names}
        fragments.append({"x": start, "buf": {name: torch.zeros_like(value) for name, value in start.items()}})
    norms: list[list[float]] = [[], []]
    for step in range(1, STEPS + 1):
        for number, (_, take_step) in enumerate(islands):
            norms[number].append(take_step(step - 1))
        for number, mine in enumerate(fragments):
            since = step - number * every // num
            if late and since - late > 0 and (since - late) % every == 0:
                arrive(mine, models, options)
            if since > 0 and since % every == 0:
                outer(mine, list(mine["x"]), models, options)
                if not late:
                    arrive(mine, models, options)
    return [{name: param.detach() for name, param in model.named_parameters()} for model in models], norms


@pytest.fixture(scope="module")
def runs() -> Any:
    return run_rows(train, list(ROWS), 4)


def ranks_of(rows: Any, name: str, **place: int) -> list[dict[str, Any]]:
    return [found for found in rows.of(name) if place.items() <= found["place"].items()]


@pytest.mark.parametrize("name", EXACT)
def test_equals_its_formula_in_one_process(name: str, runs: Any) -> None:
    options = {"mean": MEAN, "step": EVERY_STEP, "stream": STREAM}[name.split("-")[0]]
    weights, norms = reference(options)
    for number in range(2):
        first = ranks_of(runs, name, island=number, data=0)
        assert first[0]["norms"] == pytest.approx(norms[number], rel=1e-5)
        for key, value in weights[number].items():
            found = whole(key, [part["weights"][key] for part in first]) if len(first) > 1 else first[0]["weights"][key]
            torch.testing.assert_close(found, value, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ROWS)
def test_replicas_are_equal_and_bytes_are_those_of_the_formula(name: str, runs: Any) -> None:
    sizes = ROWS[name][1]
    for number in range(2):
        for tensor in range(sizes.get(TENSOR, 1)):
            place = {ISLANDS: number} | ({TENSOR: tensor} if TENSOR in sizes else {})
            column = ranks_of(runs, name, **place)
            assert all(found["hashes"] == column[0]["hashes"] for found in column)
    ranks = runs.of(name)
    copies = [key for key in ranks[0]["result"] if ".up." not in key and not key.endswith("down.weight")]
    if TENSOR not in sizes:
        copies = list(ranks[0]["result"])
    # The result is one model, whatever the islands went on with before.
    assert all(found["result"][key] == ranks[0]["result"][key] for found in ranks for key in copies)
    if not name.startswith("stream") and "tensor" not in name:
        assert all(found["hashes"][STEPS - 1] == ranks[0]["hashes"][STEPS - 1] for found in ranks)
    # A fragment's first turn comes later than a round; FSDP2's first step has a gather of its own.
    if name in ("mean-data", "mean-tensor", "step-data", "lossy-data"):
        assert all(found["sent"] == found["promised"] for found in ranks)


def saved_and_resumed(
    make: Callable[[], tuple[Any, nn.Module, Any]], take: Callable[[Any, Any, int], float], folder: Path
) -> tuple[list, list]:
    """Norms and hashes of the steps after a save, in the run itself and in one that takes the checkpoint."""
    mesh, model, stage = make()
    own = folder / f"island-{mesh[ISLANDS].get_local_rank()}"
    for step in range(3):
        take(mesh, stage, step)
    save(stage, own, 3, dist.PrefixStore(own.name, default_store()))

    def rest() -> list:
        found = []
        for step in range(3, STEPS):
            norm = take(mesh, stage, step)
            stage.optimizer.synchronize()
            found.append((norm, hashes_of(model)))
        stage.finish()
        return [*found, hashes_of(model)]

    one = rest()
    stage.close()
    mesh, model, stage = make()
    source = Source(own / "step-00000003", stage.optimizer.everyone.rank)
    stage.restore(source)
    assert source.is_same
    other = rest()
    stage.close()
    return one, other


def goes_on(rank: int, world_size: int, name: str, folder: Path) -> tuple[list, list]:
    return saved_and_resumed(lambda: make(name), take, folder / name)


@pytest.mark.parametrize("name", ["stream-data", "lossy-tensor"])
def test_a_checkpoint_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    for one, other in run_workers(goes_on, 4, name, tmp_path):
        assert one == other


def refused(rank: int, world_size: int) -> list[str]:
    said = []

    def with_mesh(names: tuple[str, ...], methods: list[Any]) -> None:
        mesh = init_device_mesh("cpu", (2,) + (1,) * (len(names) - 1), mesh_dim_names=names)
        model = Stack(0)
        with pytest.raises(thinwire.ConfigError) as caught:
            parallelize(model, adamw(model), mesh, methods, announce=False)
        said.append(str(caught.value))

    with_mesh(("island", "data"), [thinwire.Zero()])
    with_mesh(("data",), [thinwire.DiLoCo()])
    with_mesh(("data", "tensor"), [thinwire.DiLoCo(sync_every=5), thinwire.SDP4Bit()])
    with_mesh(("data",), [thinwire.SDP4Bit(), thinwire.Zero()])
    with_mesh(("island", "data"), [thinwire.DiLoCo(inner=thinwire.Zero()), thinwire.SDP4Bit()])
    with_mesh(("island", "data"), [thinwire.DiLoCo(), thinwire.OneByte()])
    with_mesh(("tensor", "data"), [thinwire.OneByte()])
    return said


def test_what_does_not_fit_is_refused_with_the_nearest_choice() -> None:
    bare, axisless, beside, two, twice, inner, both = run_workers(refused, 2)[0]
    assert "the island axis takes one method of islands, not Zero; nearest: [thinwire.DiLoCo(), " in bare
    assert "DiLoCo works on the island axis, and the mesh data=2 has none; nearest: island=1,data=2" in axisless
    none = "DiLoCo works on the island axis, and the mesh data=2,tensor=1 has none; nearest: island=1,data=2,tensor=1"
    assert none + ", or [thinwire.SDP4Bit()] alone" in beside
    assert "takes one method, not SDP4Bit, Zero; nearest: [thinwire.SDP4Bit()]" in two
    assert "two methods for the data axis, Zero as inner= and SDP4Bit" in twice
    assert "one-byte inside an island keeps a log" in inner
    # The true cause comes first, and nothing is told one at a time.
    assert both.index("one-byte can't share a mesh") < both.index("no parameter is cut over it")
