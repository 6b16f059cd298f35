"""A budget that the kernel keeps, folders of other runs, and what is refused."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from tests.hosts.on_disk import View, Views
from tests.workers import run_workers
from thinwire import Residency
from thinwire.errors import ConfigError
from thinwire.hosts.offload.budget import fitted
from thinwire.hosts.offload.journal import locked
from thinwire.hosts.offload.residence import check_device, check_model
from thinwire.methods.memory import LENT_RATE, Setup
from thinwire.run.config import TrainConfig
from thinwire.run.places import residency_of


def without_a_folder(rank: int, world_size: int, folder: Path) -> list[Any]:
    """The limit of the process before, in and behind a training under a budget; and its start-up table."""
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    os.environ |= {"TMPDIR": str(folder), LENT_RATE: "4gb/s"}
    tempfile.tempdir = None
    model = Views()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
    residency = Residency(memory="3gb", weights="disk", optimizer="disk")
    _, optimizer = thinwire.zero(model, adamw, thinwire.SDP4Bit(), residency=residency, announce=False)
    model(torch.ones(4, 16)).backward()
    optimizer.step()
    limits = [before, resource.getrlimit(resource.RLIMIT_DATA)[0]]
    table = optimizer.describe()
    optimizer.close()
    resource.setrlimit(resource.RLIMIT_DATA, (2_000_000_000, most))
    adamw = torch.optim.AdamW(Views().parameters())
    unstated, rows = fitted(Residency(), Setup(thinwire.SDP4Bit(), Views(), optimizer.comm.topology))
    resource.setrlimit(resource.RLIMIT_DATA, (before, most))
    return [[*limits, resource.getrlimit(resource.RLIMIT_DATA)[0]], table, unstated.memory, rows]


def test_a_budget_is_kept_by_the_kernel_and_needs_no_folder(tmp_path: Path) -> None:
    ((limits, table, memory, rows),) = run_workers(without_a_folder, 1, tmp_path)
    assert limits == [limits[0], 3_000_000_000, limits[0]] and limits[0] != limits[1]
    told = {row[0]: row[1:] for row in table}
    assert told["store"][0].startswith(str(tmp_path)) and told["disk rate"][0] == "4gb/s"
    assert told["disk"][0] == "held to 4gb/s" and told["memory"][0] == "at most 3gb"
    assert "MB written in a step" in told["wear of the disk"][0] and "TB a day" in told["wear of the disk"][1]
    assert memory == "2000000000b" and [row[0] for row in rows] == ["memory", "store", "disk rate"]


def foreign(rank: int, world_size: int, folder: Path) -> list[str]:
    """What is told of a folder that another run has used: with other seeds, another optimizer, on the second rank."""
    found = []
    for number, (kind, seed) in enumerate([*[("adamw", 0)] * 2, *[("adamw", 1)] * 3, ("sgd", 1)]):
        model = Views()
        made = torch.optim.AdamW if kind == "adamw" else torch.optim.SGD
        inner = made(model.parameters(), lr=0.1)
        # The fourth run leaves a step of its own on one rank alone.
        store = folder / ("other" if number == 3 and rank else "store")
        residency = Residency(store=str(store), durable=True)
        _, optimizer = thinwire.zero(
            model, inner, thinwire.Zero(), seed=seed, residency=residency, local_size=1, announce=False
        )
        assert optimizer.journal is not None
        found.append(" ".join(optimizer.journal.row))
        model(torch.ones(4, 16)).backward()
        optimizer.step()
        optimizer.commit({})
        if number == 0 and rank == 0:
            other = os.fork()
            if not other:
                try:
                    locked(optimizer.journal.folder)
                except ConfigError as error:
                    told = f"process {os.getppid()} of a run that goes on is using it; nearest: wait until it has ended"
                    os._exit(42 if told in str(error) else 1)
                os._exit(0)
            found.append(str(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])))
        optimizer.close()
    return found


def test_a_durable_step_of_another_run_is_never_gone_on_from(tmp_path: Path) -> None:
    first, second = run_workers(foreign, 2, tmp_path)
    assert first.pop(1) == "42"
    for told in (first, second):
        assert "every step" in told[0] and "goes on behind step 1" in told[1]
        assert "begins anew a run of seed 0 has written it, and this one has 1" in told[2]
        # Both have a step of a run of this seed and optimizer, but not of the same run.
        assert "begins anew no step is on the disks of all ranks" in told[4]
        assert "begins anew a run of optimizer AdamW has written it, and this one has SGD" in told[5]


def refused(rank: int, world_size: int) -> list[str]:
    found = []
    cases: list[tuple[str, dict[str, Any]]] = [
        ("muon", {"store": "/var/tmp"}), ("adamw", {"store": "/dev/shm"}),
        ("adamw", {"durable": True}), ("adamw", {"memory": "300mb"}), ("adamw", {"memory": "800mb"}),
    ]  # fmt: skip
    for optimizer, options in cases:
        # Whole in memory already, and never written.
        num, size = (40, 2048) if options.get("memory") == "800mb" else (1, 4)
        layers = (torch.nn.utils.skip_init(torch.nn.Linear, size, size) for _ in range(num))
        model = torch.nn.Sequential(*layers)
        params = list(model.parameters())
        kinds: dict[str, Any] = {"muon": thinwire.Muon, "mfac": thinwire.MFAC, "adamw": torch.optim.AdamW}
        made = kinds[optimizer](params)
        with pytest.raises(ConfigError) as error:
            thinwire.zero(model, made, thinwire.Zero(), residency=Residency(**options))
        found.append(str(error.value))
    return found


def test_what_can_not_lie_on_a_disk_is_refused() -> None:
    (found,) = run_workers(refused, 1)
    for message, part in zip(
        found,
        (
            "nearest: adamw or apollo", "lies on tmpfs", "no store is stated, and a durable run",
            "below the floor of", "this process has",
        ),
        strict=True,
    ):  # fmt: skip
        assert part in message


def test_what_would_have_no_effect_is_refused() -> None:
    """Layers that there are not, and parts of what lies on a GPU; all that is wrong with a device at once."""
    flat, layers = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.nn.ModuleList([torch.nn.Tanh(), View("product")])
    for options in ({"activations": "recompute"}, {"activations": "recompute", "slices": 2}):
        with pytest.raises(
            ConfigError, match=r"Sequential has no ModuleList of layers .*; nearest: activations='keep'"
        ):
            check_model(Residency(**options), flat)
    with pytest.raises(ConfigError, match=r"linear layers keep samples, .* nearest: activations='keep'"):
        check_model(Residency(activations="sample:0.3"), torch.nn.Sequential(layers))
    check_model(Residency(activations="recompute"), torch.nn.Sequential(layers))
    all_away, cuda = Residency(weights="disk", gradients="disk", activations="offload"), torch.device("cuda")
    check_device(all_away, torch.device("cpu"), looks_across=True)
    check_device(Residency(), cuda, looks_across=False)
    with pytest.raises(ConfigError) as error:
        check_device(all_away, cuda, looks_across=True)
    for what in ("weights", "gradients", "activations", "matrices"):
        assert f"{what} that lie on cuda can't lie on a disk; nearest: " in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "2 gigs"}, "did you mean '2gb'"),
        ({"memory": "0"}, "did you mean '2gb'"),
        ({"memory": "0gb"}, "must be above 0; nearest: '1gb'"),
        ({"store": ""}, "must name a folder; nearest: '/var/tmp/thinwire', or none"),
        ({"tile": "1x1"}, "one part cuts nothing; nearest: '1x2'"),
        ({"disk_rate": "500MB"}, "did you mean '500MB/s'"),
        ({"sub_group": 0}, "nearest: 1024"),
        ({"sub_group": 2600}, "--residency.sub-group 2600: must be a multiple of 1024; nearest: 3072"),
        ({"optimizer": "tape"}, "one of auto, memory, disk"),
        ({"states": "imt8"}, "states 'imt8' of Residency: .*did you mean 'int8'"),
        ({"states": 8}, "states 8 of Residency: must be a string"),
        ({"states": "int4/64:nearest"}, "rounded at random, .*; nearest: 'int4/64'"),
        ({"states": "int8/64+zstd"}, "moments must be fp32, bf16, or integers .*; nearest: 'int8/64'"),
        ({"states": "int8/100"}, "in groups that divide 1024; nearest: 'int8/64'"),
        ({"states": "fp16"}, "moments must be fp32, bf16, or integers of 3 bits or more, .*; nearest: 'int8/64'"),
        ({"states": "int2/64"}, "of 3 bits or more"),
        ({"masters": "int8/100"}, "masters must be fp32, bf16, or integers .* in groups that divide 1024"),
        (
            {"masters": "int8/64", "optimizer": "memory"},
            "nearest: --residency.optimizer disk, or --residency.masters fp32",
        ),
        ({"gradients": "disk", "optimizer": "memory"}, "nearest: --residency.optimizer disk, or --residency.gradients"),
        ({"slices": 0}, "--residency.slices 0: must be at least 1; nearest: 1"),
        ({"slices": 2, "activations": "keep"}, "nearest: --residency.activations recompute"),
        ({"durable": True, "optimizer": "memory"}, "what lies on a disk, .*; nearest: --residency.optimizer disk"),
        ({"states": "int8", "optimizer": "memory"}, "nearest: --residency.optimizer disk, or --residency.states fp32"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Residency(**options)


def test_no_store_is_refused_by_the_options_that_need_one() -> None:
    table = {"weights": "disk", "optimizer": "auto", "gradients": "memory", "durable": True}
    needing = "--residency.weights disk and --residency.optimizer auto and --residency.durable true; nearest: a folder"
    with pytest.raises(ConfigError, match=f"--store none: .* needs one: {needing}"):
        residency_of(TrainConfig(store="none", tables={"residency": table}))


def test_torch_asks_for_huge_pages_under_a_budget() -> None:
    """It reads once whether it should, at its first tensor: no import of a run's may make one."""
    if not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pytest.skip("this kernel has no huge pages")
    code = """
import thinwire.cli, thinwire.launch.preload, thinwire.launch.line, torch
from thinwire.hosts.offload.room import give_pages_back
give_pages_back()
kept = torch.ones(1 << 23)
print(any(" hg " in f"{line.rstrip()} " for line in open("/proc/self/smaps") if line.startswith("VmFlags")))
"""
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
