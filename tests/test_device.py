"""The CPU and a GPU behind one module: which one is chosen, what is called of torch, and a run on a stand-in."""

from __future__ import annotations

import re
import resource
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.alone import small_config, trainer_of
from tests.workers import run_workers
from thinwire import device
from thinwire.device import Cuda, Device, choose, take
from thinwire.errors import ConfigError
from thinwire.launch.check_parts import device_of
from thinwire.launch.prepare import resolve
from thinwire.run.config import TrainConfig
from thinwire.run.run import Run


@pytest.mark.parametrize(
    ("asked", "gpus", "workers", "kind", "why"),
    [
        ("auto", 0, 1, "cpu", "this torch"),
        ("auto", 1, 1, "cuda", "1 of 1 GPU(s), one a worker"),
        ("auto", 8, 2, "cuda", "2 of 8 GPU(s), one a worker"),
        ("auto", 1, 4, "cpu", "4 workers need a GPU each, and torch sees 1; --workers 1 trains on the GPU"),
        ("cuda", 2, 2, "cuda", "2 of 2"),
        ("cpu", 2, 1, "cpu", "as asked, though torch sees 2"),
        ("cpu", 0, 1, "cpu", ""),
    ],
)
def test_a_kind_of_device_is_chosen(
    monkeypatch: pytest.MonkeyPatch, asked: str, gpus: int, workers: int, kind: str, why: str
) -> None:
    monkeypatch.setattr(device, "num_gpus", lambda: gpus)
    chosen, reason = choose(asked, workers)
    assert chosen == kind and reason.startswith(why)


@pytest.mark.parametrize(("gpus", "nearest"), [(0, "--device cpu"), (3, "--workers 3")])
def test_too_few_gpus_are_an_error_that_names_the_nearest_choice(
    monkeypatch: pytest.MonkeyPatch, gpus: int, nearest: str
) -> None:
    monkeypatch.setattr(device, "num_gpus", lambda: gpus)
    with pytest.raises(ConfigError, match=f"--device cuda: .*; nearest: {nearest}"):
        choose("cuda", 4)


def test_a_strategy_of_the_cpu_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "num_gpus", lambda: 1)
    config = TrainConfig(strategy="one-byte", optimizer="sgd")
    assert device_of(config, Run.of(config))[0] == "cpu"
    with pytest.raises(ConfigError, match="one-byte runs on the CPU alone; nearest: --device cpu"):
        device_of(replace(config, device="cuda"), Run.of(config))


def test_the_compute_type_is_left_to_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "num_gpus", lambda: 1)
    config = TrainConfig(model="tiny", workers=1)
    run, rows = resolve(Run.of(config), config, 1)
    assert (run.config.device, run.config.dtype) == ("cuda", "auto")
    assert rows[0] == ("--device auto", "cuda", "1 of 1 GPU(s), one a worker")
    run, _ = resolve(Run.of(config), replace(config, dtype="bf16"), 1)
    assert run.config.dtype == "bf16"


class Recorder:
    """Stands for a tensor or a module, and writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def pin_memory(self) -> Recorder:
        self.calls.append("pin_memory")
        return self

    def to(self, where: torch.device, **how: bool) -> Recorder:
        self.calls.append((str(where), how))
        return self


def test_what_a_gpu_asks_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    answers = {
        "set_device": None, "get_device_name": "A GPU", "synchronize": None, "max_memory_allocated": 7,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None, "manual_seed": None,
        "mem_get_info": (30, 80), "memory_reserved": 4, "memory_allocated": 2,
    }  # fmt: skip

    def asked(name: str, *given: Any) -> Any:
        calls.append((name, *given))
        return answers[name]

    for name in answers:
        monkeypatch.setattr(torch.cuda, name, partial(asked, name))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    gpu, second = take("cuda", 1), torch.device("cuda", 1)
    assert isinstance(gpu, Cuda) and gpu.torch == second and calls.pop() == ("set_device", 1)
    assert gpu.backend == "cpu:gloo,cuda:nccl" and gpu.fast_dtype == "bf16" and gpu.name == "A GPU"
    assert gpu.peak_bytes() == 7 and calls[-1] == ("max_memory_allocated", second)
    # All but what its driver and other processes hold; and what its own tensors hold.
    assert gpu.memory_bytes(8) == 34 and gpu.held_bytes() == 2 and Device().held_bytes() > 1e6
    gpu.synchronize()
    state = gpu.random_state()
    assert state is not None
    gpu.set_random_state(state)
    gpu.seed(3)
    assert [call[0] for call in calls[-4:]] == ["synchronize", "get_rng_state", "set_rng_state", "manual_seed"]
    assert calls[-2][1:] == (state, second)
    tensor, model = Recorder(), Recorder()
    assert gpu.take([tensor]) == (tensor,) and gpu.place(model) is model  # type: ignore[list-item, arg-type]
    assert tensor.calls == ["pin_memory", ("cuda:1", {"non_blocking": True})] and model.calls == [("cuda:1", {})]
    with gpu.autocast("bf16") as context:
        assert context.device == "cuda" and context.fast_dtype == torch.bfloat16
    assert not gpu.autocast("fp32")._enabled


class StandIn(Device):
    """A device in the CPU's memory, with a random generator and a memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_taken = 0
        self.rng = torch.full((8,), 1, dtype=torch.uint8)
        self.placed: list[nn.Module] = []

    @property
    def name(self) -> str:
        return "a stand-in"

    def place(self, model: nn.Module) -> nn.Module:
        self.placed.append(model)
        return model

    def take(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self.num_taken += 1
        self.rng = self.rng + 1
        return tuple(tensor.clone() for tensor in batch)

    def peak_bytes(self) -> int:
        return 1000 + self.num_taken

    def random_state(self) -> Tensor:
        return self.rng.clone()

    def set_random_state(self, state: Tensor) -> None:
        self.rng = state.clone()

    def seed(self, seed: int) -> None:
        self.rng = torch.full((8,), 255, dtype=torch.uint8)


def train(rank: int, world_size: int, config: TrainConfig, kinds: list[str]) -> list[Any]:
    """A run in as many sessions as there are kinds of device; what each left."""
    found = []
    for number, kind in enumerate(kinds):
        chosen = StandIn() if kind == "stand-in" else Device()
        part = replace(config, resume=number > 0, stop_at=2 * (number + 1))
        trainer = trainer_of(part, rank, world_size, chosen)
        begins_with = chosen.random_state()
        trainer.run()
        assert trainer.reporter is not None
        trainer.reporter.close()
        metrics = trainer.reporter.metrics.records
        own = torch.zeros(0) if begins_with is None else begins_with
        found.append((
            [record.loss for record in metrics], [record.peak_allocated_bytes for record in metrics],
            trainer.reporter.rows, getattr(chosen, "num_taken", 0), own.tolist(),
        ))  # fmt: skip
    return found


def test_a_run_moves_between_devices(tmp_path: Path) -> None:
    """From a stand-in to the CPU and back: the same losses as without moving; the device has its own state back."""
    config = small_config(tmp_path, tokens_per_step=64, steps=8, sample_tokens=0)
    (tmp_path / "run").mkdir()
    (moved,) = run_workers(train, 1, config, ["stand-in", "stand-in", "cpu", "stand-in"])
    (tmp_path / "stays").mkdir()
    (stays,) = run_workers(train, 1, replace(config, run_dir=str(tmp_path / "stays")), ["cpu"] * 4)
    assert moved[-1][0] == stays[-1][0] and len(moved[-1][0]) == 8
    # Two micro-batches a step, and as many for the loss of the step after the last.
    assert [session[3] for session in moved[:3]] == [6, 6, 0]
    peaks = moved[-1][1]
    assert peaks[:2] == [1002, 1004] and peaks[4:6] == [0, 0]
    first, second, on_cpu, back = (session[4] for session in moved)
    assert first == [1] * 8 and second == [5] * 8 and on_cpu == [] and back == [255] * 8
    rows = [{row[0]: row for row in session[2]} for session in moved]
    assert "sums in another order" in rows[1]["resume proof"][2]
    assert "computed by cpu and by a stand-in before" in rows[2]["resume proof"][2]
    assert rows[3]["random state of the GPU"][1] == "new" and "random state of the GPU" not in rows[1]


def test_two_files_alone_call_a_gpu() -> None:
    """`device.py` for training and `staging.py` for messages, so that a stand-in for them is one for a GPU."""
    package = Path(device.__file__).parent
    calls = re.compile(r"^[^#\"]*torch\.cuda\.", re.MULTILINE)
    users = {str(path.relative_to(package)) for path in package.rglob("*.py") if calls.search(path.read_text())}
    assert users == {"device.py", "collectives/staging.py"}


def test_tensors_of_the_cpu_wait_for_no_gpu() -> None:
    place = torch.device("cpu")
    device.check_current(place)
    device.wait_for(place)
    assert device.name_of(place) == "cpu" and device.random_state()[1] is None


@pytest.mark.parametrize(
    ("own", "group", "files"),
    [
        (
            "0::/pod/box", "pod",
            {"memory.max": "3000", "memory.current": "2500", "memory.stat": "anon 9\ninactive_file 300"},
        ),
        # In a container whose own path is outside of what it sees.
        ("0::/../box", "", {"memory.max": "3000", "memory.current": "2500", "memory.stat": "inactive_file 300"}),
        (
            "4:cpu,memory:/docker/box\n0::/", "memory",
            {
                "memory.limit_in_bytes": "3000", "memory.usage_in_bytes": "2500",
                "memory.stat": "inactive_file 1\ntotal_inactive_file 300",
            },
        ),
    ],
)  # fmt: skip
def test_a_container_s_limit_counts_where_it_has_less_than_the_machine(
    own: str, group: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "GROUPS", tmp_path)
    monkeypatch.setattr(device, "OWN_GROUPS", tmp_path / "own")
    cpu = torch.device("cpu")
    assert device.free_bytes(cpu, 1) > 1e6, "not Linux"
    (tmp_path / "own").write_text(own + "\n")
    (tmp_path / group / "box").mkdir(parents=True)
    (tmp_path / group / "box" / "memory.max").write_text("max\n")
    assert device.free_bytes(cpu, 1) > 1e6, "without a limit"
    for name, text in files.items():
        (tmp_path / group / name).write_text(text + "\n")
    assert device.free_bytes(cpu, 2) == 400 and Device().memory_bytes(2) == 1500


def test_a_process_s_own_limit_counts_where_it_has_less_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, room, (before, most) = torch.device("cpu"), 64 << 20, resource.getrlimit(resource.RLIMIT_DATA)
    limit = device.data_bytes() + room
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    try:
        # Each of two processes has a limit of its own, which they do not share.
        assert room / 2 < device.free_bytes(cpu, 2) <= room
        assert Device().memory_bytes(2) == limit
        monkeypatch.setattr(device, "data_bytes", lambda: limit + 1)
        assert device.free_bytes(cpu, 1) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def test_generators_are_seeded_as_by_torch() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    device.seed_generators(3)
    assert torch.equal(torch.rand(4), expected)
