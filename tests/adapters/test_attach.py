"""What the adapters find behind other libraries' wrappers, and what they refuse."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.workers import run_workers
from thinwire.adapters.titan import CompressedParallelize
from thinwire.errors import ConfigError


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another, as Accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))


def weights_after(model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[Tensor]:
    for step in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor().detach() for param in model.parameters() if isinstance(param, DTensor)]


def by_adapter(rank: int, world_size: int, way: str) -> tuple[list[Tensor], int]:
    model = small_model()
    method = thinwire.ZeroPP("fp32", "fp32", "fp32", "fp32")
    if way == "titan":
        mesh = init_device_mesh("cpu", (world_size,))

        def parallelize(model: nn.Module, *, parallel_dims: Any, dump_folder: str) -> nn.Module:
            fully_shard(next(model.children()), mesh=parallel_dims)
            fully_shard(model, mesh=parallel_dims)
            return model

        wrapper = CompressedParallelize(parallelize, method, local_size=1, announce=False)
        wrapper(model, parallel_dims=mesh, dump_folder="")
        (handle,) = wrapper.handles
        module: nn.Module = model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        fully_shard(model[0])
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        module = cast(nn.Module, torch.compile(model, backend="eager")) if way == "compiled" else model
        attached = thinwire.attach(module, Wrapped(optimizer), method, local_size=1, announce=False)
        assert isinstance(attached, thinwire.CompressedFSDP)
        handle = attached
    weights = weights_after(model, module, optimizer, rank)
    sent = handle.meter.snapshot().sent_bytes
    handle.close()
    return weights, sent


def plain(rank: int, world_size: int) -> list[Tensor]:
    model = small_model()
    fully_shard(model)
    return weights_after(model, model, torch.optim.SGD(model.parameters(), lr=0.1), rank)


def all_ways(rank: int, world_size: int) -> dict[str, tuple[list[Tensor], int]]:
    results = {way: by_adapter(rank, world_size, way) for way in ("wrapped", "compiled", "titan")}
    return results | {"plain": (plain(rank, world_size), 1)}


def test_exact_methods_train_as_plain_fsdp_through_every_adapter() -> None:
    for results in run_workers(all_ways, 2, local_size=1):
        expected, _ = results.pop("plain")
        for way, (weights, sent) in results.items():
            assert sent > 0, way
            for one, other in zip(weights, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def first_fsdp(model: nn.Module) -> nn.Module:
    """As far as anyone can tell without a GPU, on which alone it can be made."""
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped._fsdp_wrapped_module = model
    return wrapped


def refusals(rank: int, world_size: int) -> list[str]:
    messages = []
    for wrap in (nn.Sequential, DistributedDataParallel, first_fsdp):
        model = small_model()
        try:
            thinwire.attach(wrap(model), torch.optim.SGD(model.parameters(), lr=0.1), thinwire.ZeroPP())
        except ConfigError as error:
            messages.append(str(error))
    others = torch.optim.SGD(small_model().parameters(), lr=0.1)
    try:
        thinwire.attach(DistributedDataParallel(small_model()), others, thinwire.PowerSGD())
    except ConfigError as error:
        messages.append(str(error))
    return messages


def test_what_is_not_sharded_by_fsdp2_is_refused_with_the_way_out() -> None:
    for messages in run_workers(refusals, 2):
        assert len(messages) == 4
        assert "nothing of this Sequential is sharded" in messages[0]
        assert "ZeroPP does not average gradients in DistributedDataParallel" in messages[1]
        assert "fsdp_version=2" in messages[2]
        assert "holds no parameter of this model: make it from model.parameters(), after Distr" in messages[3]


def test_adapters_import_without_transformers() -> None:
    script = (
        "import sys; sys.modules['transformers'] = None\n"
        "import thinwire\n"
        "from thinwire.adapters.trainer import CompressionCallback\n"
        "try: CompressionCallback(thinwire.ZeroPP())\n"
        "except thinwire.ConfigError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install -e '.[hf]' in thinwire's folder" in done.stdout


@dataclasses.dataclass(frozen=True)
class Event:
    """What the Trainer hands its callbacks, as far as they read it."""

    output_dir: str = ""
    global_step: int = 0


def local_parts(model: nn.Module) -> list[Tensor]:
    """This rank's part of every parameter."""
    return [param.to_local().detach() for param in model.parameters() if isinstance(param, DTensor)]


def save_and_resume(rank: int, world_size: int, folder: str) -> list[list[Tensor]]:
    """Two steps, a checkpoint, two more; then again from the checkpoint."""
    from thinwire.adapters.trainer import CompressionCallback

    ends = []
    for begin in (0, 2):
        model = small_model()
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        callback = CompressionCallback(
            thinwire.ZeroPP(inter_gradients="int4", intra_gradients="int4", loco=True), local_size=1, announce=False
        )
        args, state = Event(output_dir=folder), Event(global_step=begin)
        if begin:
            saved = torch.load(f"{folder}/model-{rank}.pt")
            with torch.no_grad():
                for shard, value in zip(local_parts(model), saved, strict=True):
                    shard.copy_(value)
        callback.on_train_begin(args, state, None, model=model, optimizer=optimizer)
        for step in range(begin, 4):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                torch.save(local_parts(model), f"{folder}/model-{rank}.pt")
                callback.on_save(args, Event(global_step=2), None)
        logs: dict[str, Any] = {"loss": 1.0}
        callback.on_log(args, state, None, logs=logs)
        assert logs["sent_mb"] > 0
        callback.on_train_end(args, state, None)
        ends.append([shard.clone() for shard in local_parts(model)])
    return ends


def test_the_callback_saves_what_the_method_remembers(tmp_path: Any) -> None:
    for whole, resumed in run_workers(save_and_resume, 2, str(tmp_path), local_size=1):
        assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))
