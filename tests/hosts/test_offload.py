"""What lies on a disk trains as it does in memory, bit for bit, and goes to any layout and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from tests.checkpoint.replicas import Net, Replica, atoms, batch
from tests.hosts.on_disk import STEPS, assert_same, cut_small, followed, tear_write
from tests.workers import run_workers
from thinwire import Residency
from thinwire.compose import apply
from thinwire.errors import ConfigError, ThinwireError

NAMES = ("zero", "sdp4bit-loco", "frontier")


def ways(folder: Path) -> dict[str, Residency | None]:
    """Memory; three sizes of sub-groups, of which one stays in memory after the first steps."""
    store = str(folder / "store")
    return {
        "memory": None,
        "1024": Residency(store=store, sub_group=1024),
        "99328": Residency(store=store, sub_group=99_328, gradients="disk"),
        "all": Residency(store=store, memory="100gb"),
        "weights": Residency(store=store, sub_group=1024, weights="disk", gradients="disk"),
        "int8": Residency(store=store, sub_group=1024, states="int8/64"),
        "int8, all": Residency(store=store, memory="100gb", states="int8/64"),
        "bf16": Residency(store=store, sub_group=1024, states="bf16"),
        "bf16, all": Residency(store=store, memory="100gb", states="bf16"),
        "masters": Residency(store=store, sub_group=1024, masters="int8/64"),
        "masters, all": Residency(store=store, memory="100gb", masters="int8/64"),
        "recompute": Residency(store=store, weights="disk", optimizer="memory", activations="recompute"),
        "slices": Residency(store=store, weights="disk", optimizer="memory", slices=2),
        "offload": Residency(store=store, optimizer="memory", activations="offload"),
        "inputs away": Residency(store=store, optimizer="memory", activations="recompute:disk"),
        "all away": Residency(store=store, weights="disk", activations="offload"),
    }


def sampled(folder: Path, weights: Any, activations: str = "sample:0.5") -> Residency:
    """Half of the rows of what linear layers are given are kept."""
    return Residency(store=str(folder / "store"), weights=weights, optimizer="memory", activations=activations)


def first_runs(rank: int, world_size: int, folder: Path) -> dict[Any, Any]:
    """Every strategy and way: three steps, a checkpoint, two more steps."""
    cut_small()
    told: dict[Any, Any] = {}
    for name in NAMES:
        for way, residency in ways(folder).items():
            replica = Replica.make(name, rank, world_size, 0, 1, residency)
            before = followed(replica, 0, STEPS)
            replica.save(folder / name / way, STEPS)
            told[name, way] = before, followed(replica, STEPS, 2)
            tiers = replica.optimizer.tiers
            told["read", name, way] = tiers.snapshot().read_bytes if tiers is not None else 0
            replica.optimizer.close()
    for way, weights, activations in (
        ("memory", "memory", "sample:0.5"), ("disk", "disk", "sample:0.5"),
        ("computed again", "memory", "recompute+sample:0.5"), ("from the disk", "disk", "recompute:disk+sample:0.5"),
    ):  # fmt: skip
        replica = Replica.make("zero", rank, world_size, 0, 1, sampled(folder, weights, activations))
        before = followed(replica, 0, STEPS)
        replica.save(folder / "sampled" / way, STEPS)
        told["sampled", way] = before, followed(replica, STEPS, 2)
        replica.optimizer.close()
    again = Replica.make("zero", rank, world_size, 9, 1, sampled(folder, "memory"))
    again.load(folder / "sampled" / "disk" / f"step-{STEPS:08d}")
    told["sampled", "again"] = before, followed(again, STEPS, 2)
    again.optimizer.close()
    return told


def later_runs(rank: int, world_size: int, folder: Path, pairs: list[tuple[str, str]]) -> dict[Any, Any]:
    """Each pair: go on, in the second way, from what the first one saved, after saving it anew."""
    cut_small()
    told: dict[Any, Any] = {}
    for name in NAMES:
        for before, after in pairs:
            replica = Replica.make(name, rank, world_size, 9, 1, ways(folder)[after])
            source = replica.load(folder / name / before / f"step-{STEPS:08d}")
            replica.save(folder / name / f"{before}-{after}-{world_size}", STEPS)
            told[name, before, after] = followed(replica, STEPS, 2), source.is_same
            replica.optimizer.close()
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offload")


@pytest.fixture(scope="module")
def first(folder: Path) -> list[dict[Any, Any]]:
    return run_workers(first_runs, 2, folder)


def durable(folder: Path) -> dict[str, Residency]:
    """Each with the way in `ways` whose bits it has."""
    common: dict[str, Any] = {"durable": True, "sub_group": 1024}
    return {
        "memory": Residency(store=str(folder / "plain"), **common),
        "weights": Residency(store=str(folder / "weights"), weights="disk", **common),
        "int8, all": Residency(store=str(folder / "int8"), memory="100gb", states="int8/64", **common),
    }


def killed(rank: int, world_size: int, folder: Path) -> None:
    """Every strategy and way: four steps, of which the second rank does not keep the last one."""
    cut_small()
    for name in NAMES:
        for residency in durable(folder / "durable" / name).values():
            replica = Replica.make(name, rank, world_size, 0, 1, residency)
            for step in range(STEPS + 1):
                replica.step(step)
                if (rank, step) != (1, STEPS):
                    replica.optimizer.commit({"number": step})
            replica.optimizer.comm.close()


def gone_on(rank: int, world_size: int, folder: Path) -> dict[Any, Any]:
    """The steps behind the last one that all have kept; then again, behind a file that was damaged."""
    cut_small()
    told: dict[Any, Any] = {}
    for name in NAMES:
        for way, residency in durable(folder / "durable" / name).items():
            replica = Replica.make(name, rank, world_size, 9, 1, residency)
            journal = replica.optimizer.journal
            assert journal is not None and journal.found is not None
            assert isinstance(replica.model, Net)
            replica.model.fixed.load_state_dict(Net(0).fixed.state_dict())
            assert (replica.optimizer.steps, journal.found.own("number")) == (STEPS, STEPS - 1)
            told[name, way] = followed(replica, STEPS, 2)
            replica.optimizer.commit({"number": STEPS + 1})
            replica.optimizer.close()
            if rank == 1:
                with (journal.folder / "master").open("r+b") as file:
                    for slot in (0, 1):
                        file.seek(slot * file.seek(0, 2) // 2)
                        file.write(b"damaged")
            replica = Replica.make(name, rank, world_size, 0, 1, residency)
            journal = replica.optimizer.journal
            assert journal is not None and (replica.optimizer.steps, journal.found) == (0, None)
            assert journal.row[1] == "begins anew"
            assert ("record 0 of master is not what was written" in journal.row[2]) == (rank == 1)
            told[name, way, "anew"] = followed(replica, 0, STEPS)
            replica.optimizer.close()
            journal.delete()
    return told


def torn(rank: int, world_size: int, folder: Path, at: int) -> str:
    """Steps that are kept, and one more, in whose write number `at` the second rank is killed: half is written."""
    cut_small()
    replica = Replica.make("zero", rank, world_size, 0, 1, durable(folder / str(at))["weights"])
    for step in range(STEPS):
        replica.step(step)
        replica.optimizer.commit({})
    tear_write(rank, at)
    try:
        replica.step(STEPS)
        replica.optimizer.commit({})
        replica.step(STEPS + 1)
    except RuntimeError as error:
        return str(error)
    return "nobody was killed"


def gone_on_from_torn(rank: int, world_size: int, folder: Path, places: list[int]) -> list[Any]:
    """What two more steps find of each run that was killed."""
    cut_small()
    found = []
    for at in places:
        replica = Replica.make("zero", rank, world_size, 9, 1, durable(folder / str(at))["weights"])
        assert replica.optimizer.journal is not None
        assert replica.optimizer.steps == STEPS, replica.optimizer.journal.row
        assert isinstance(replica.model, Net)
        replica.model.fixed.load_state_dict(Net(0).fixed.state_dict())
        found.append(followed(replica, STEPS, 2))
        replica.optimizer.close()
    return found


def test_a_process_killed_in_the_middle_of_a_write_goes_on_behind_the_step_before(
    first: list[dict[Any, Any]], tmp_path: Path
) -> None:
    """In the first write of a step, and in a later one."""
    places = [1, 5]
    for at in places:
        assert "rank 1" in run_workers(torn, 2, tmp_path, at, may_die=(1,))[0]
    for own, found in zip(first, run_workers(gone_on_from_torn, 2, tmp_path, places), strict=True):
        for each in found:
            assert_same(each, own["zero", "weights"][1])


def test_a_disk_changes_no_bit(first: list[dict[Any, Any]]) -> None:
    for told in first:
        for name in NAMES:
            for way in ("1024", "99328", "all", "weights", "recompute", "offload", "inputs away", "all away"):
                for part in (0, 1):
                    assert_same(told[name, way][part], told[name, "memory"][part])
            assert told["read", name, "inputs away"] > 0


def test_slices_of_a_micro_batch_read_weights_once(first: list[dict[Any, Any]]) -> None:
    for told in first:
        for name in NAMES:
            assert 0 < told["read", name, "slices"] <= 1.05 * told["read", name, "recompute"]
            (losses, weights), (plain, others) = told[name, "slices"][1], told[name, "memory"][1]
            assert losses == pytest.approx(plain, rel=1e-4)
            assert all(torch.allclose(weights[key], others[key], atol=2e-3) for key in weights)


class Blocks(torch.nn.Module):
    """Three layers of six matrices, more than fit in memory at a time."""

    def __init__(self) -> None:
        super().__init__()
        layers = [[torch.nn.Linear(16, 16) for _ in range(6)] for _ in range(3)]
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(*each) for each in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def many_matrices(rank: int, world_size: int, folder: Path) -> list[int]:
    """Bytes that a step reads of layers of many matrices: computed again whole, and in four slices."""
    cut_small()
    told = []
    for slices in (None, 4):
        torch.manual_seed(0)
        model = Blocks()
        residency = Residency(
            store=str(folder), weights="disk", optimizer="memory", activations="recompute", slices=slices
        )
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        module, optimizer = thinwire.zero(model, adamw, thinwire.Zero(), residency=residency, announce=False)
        tiers = optimizer.tiers
        assert tiers is not None
        for _ in range(3):
            before = tiers.snapshot().read_bytes
            module(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.synchronize()
        told.append(tiers.snapshot().read_bytes - before)
        optimizer.close()
    return told


def test_slices_read_a_layer_of_many_matrices_once(tmp_path: Path) -> None:
    """All of a layer's matrices stay while its slices take turns."""
    ((whole, sliced),) = run_workers(many_matrices, 1, tmp_path)
    # Forward and backward; of a layer that is computed again whole, most matrices are read twice in the backward.
    assert 0 < sliced < whole


def test_sampled_rows_are_the_same_wherever_weights_lie_and_behind_a_restart(first: list[dict[Any, Any]]) -> None:
    for told in first:
        before, after = told["sampled", "memory"]
        for way in ("disk", "again", "computed again", "from the disk"):
            assert_same(told["sampled", way][0], before)
            assert_same(told["sampled", way][1], after)
        exact = told["zero", "memory"][0]
        assert before[0][0] == exact[0][0] and before[0][1:] != exact[0][1:]


def test_what_is_rounded_at_random_is_the_same_wherever_it_lies_and_moves_weights_little(
    first: list[dict[Any, Any]], folder: Path
) -> None:
    for told in first:
        for name in NAMES:
            for kind in ("int8", "bf16", "masters"):
                for part in (0, 1):
                    assert_same(told[name, kind][part], told[name, f"{kind}, all"][part])
                rounded, exact = told[name, kind][1], told[name, "memory"][1]
                assert rounded[0] != exact[0] and rounded[0] == pytest.approx(exact[0], rel=0.02)
    pairs = [("int8", "memory"), ("memory", "int8"), ("bf16", "memory"), ("masters", "memory"), ("masters", "masters")]
    (gone_on, _) = run_workers(later_runs, 2, folder, pairs)
    for (name, before, _), (after, is_same) in gone_on.items():
        assert is_same
        # What is saved is what the numbers are rounded to.
        assert after[0][0] == pytest.approx(first[0][name, before][1][0][0], rel=1e-3)


def test_a_restart_goes_on_bit_for_bit_with_disk_or_without(first: list[dict[Any, Any]], folder: Path) -> None:
    pairs = [("1024", "weights"), ("weights", "memory"), ("memory", "99328")]
    for own, told in zip(first, run_workers(later_runs, 2, folder, pairs), strict=True):
        for (name, before, _), (after, is_same) in told.items():
            assert is_same
            assert_same(after, own[name, before][1])


def test_a_killed_run_goes_on_behind_the_last_step_that_all_have_kept(
    first: list[dict[Any, Any]], folder: Path
) -> None:
    run_workers(killed, 2, folder)
    for own, told in zip(first, run_workers(gone_on, 2, folder), strict=True):
        for name in NAMES:
            for way in durable(folder):
                assert_same(told[name, way], own[name, way][1])
                assert_same(told[name, way, "anew"], own[name, way][0])
    assert not list((folder / "durable").glob("*/*"))


def test_another_world_takes_what_lay_on_a_disk(first: list[dict[Any, Any]], folder: Path) -> None:
    (told,) = run_workers(later_runs, 1, folder, [("1024", "99328")])
    for name in NAMES:
        saved = atoms(folder / name / "1024" / f"step-{STEPS:08d}")
        again = atoms(folder / name / "1024-99328-1" / f"step-{STEPS:08d}")
        assert {key for key in saved if not key.startswith("replica/")} == again.keys()
        assert all(torch.equal(saved[key], again[key]) for key in again), name
        assert not told[name, "1024", "99328"][1]


def on_islands(rank: int, world_size: int, folder: Path) -> list[Any]:
    """Losses and weights of one of two islands, in memory and with all on a disk; what is refused there."""
    cut_small()
    told: list[Any] = []
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("island", "data"))
    for residency in (None, Residency(store=str(folder), weights="disk", gradients="disk", sub_group=1024)):
        model, method = Net(0), thinwire.DiLoCo(inner=thinwire.SDP4Bit(), sync_every=2)
        adamw = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
        methods: list[Any] = [method] if residency is None else [method, residency]
        stage = thinwire.parallelize(model, adamw, mesh, methods, announce=False)
        losses = []
        for step in range(5):
            loss = stage.module(batch(step)[rank * 12 : (rank + 1) * 12])
            loss.backward()
            stage.optimizer.step()
            stage.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        stage.optimizer.finish()
        if residency is not None:
            with pytest.raises(ThinwireError, match=r"lie on a disk .* nearest: .* `with thinwire.whole\(module\)"):
                model.state_dict()
        with thinwire.whole(model):
            told.append([losses, {name: value.clone() for name, value in model.state_dict().items()}])
        stage.optimizer.close()
    with pytest.raises(ConfigError) as error:
        method = thinwire.DiLoCo(inner=thinwire.SDP4Bit(), sync_every=2, fedspeed=1.0)
        residency, other = Residency(store=str(folder), durable=True), Net(0)
        adamw = torch.optim.AdamW([param for param in other.parameters() if param.requires_grad])
        thinwire.parallelize(other, adamw, mesh, [method, residency], announce=False)
    return [*told, str(error.value)]


def grouped(rank: int, world_size: int, folder: Path) -> None:
    """Groups of one optimizer that hold different state go to the disk, to memory and back bit for bit."""
    cut_small()
    made: dict[str, Any] = {
        "sgd": lambda a, b: torch.optim.SGD([{"params": a, "momentum": 0.0}, {"params": b}], 1e-2, momentum=0.9),
        "adamw": lambda a, b: torch.optim.AdamW([{"params": a}, {"params": b, "amsgrad": True}], 3e-3),
    }
    for kind in made:
        for turned in (False, True):
            told: dict[str, Any] = {}

            def replica(way: str, seed: int = 0, kind: str = kind, turned: bool = turned) -> Replica:
                model, residency = Net(seed), Residency(store=str(folder), weights="disk", sub_group=1024)
                params = [param for param in model.parameters() if param.requires_grad]
                halves = params[:2], params[2:]
                options: Any = {"seed": 3, "checked": False, "overlap": True, "timeout_s": 300}
                options |= {} if way == "memory" else {"residency": residency}
                inner = made[kind](*reversed(halves) if turned else halves)
                return Replica(model, *apply(thinwire.Zero(), model, inner, local_size=1, **options), rank, world_size)

            for way in ("memory", "disk"):
                one = replica(way)
                followed(one, 0, STEPS)
                one.save(folder / kind / str(turned) / way, STEPS)
                told[way] = followed(one, STEPS, 2)
                one.optimizer.close()
            assert_same(told["disk"], told["memory"])
            for origin, way in (("memory", "disk"), ("disk", "memory"), ("memory", "memory")):
                one = replica(way, 9)
                source = one.load(folder / kind / str(turned) / origin / f"step-{STEPS:08d}")
                assert not [row for row in source.report() if "anew" in " ".join(row)], (kind, turned, origin)
                assert_same(followed(one, STEPS, 2), told["memory"])
                one.optimizer.close()


def test_groups_that_hold_different_state_lie_on_a_disk(tmp_path: Path) -> None:
    run_workers(grouped, 1, tmp_path)


def test_islands_have_a_disk_each(tmp_path: Path) -> None:
    first, second = run_workers(on_islands, 2, tmp_path)
    for plain, disk, refused in (first, second):
        assert_same(disk, plain)
        assert "without durable" in refused and "leave the correction out" in refused
    assert first[0][0] != second[0][0]
    assert all(torch.equal(value, second[1][1][name]) for name, value in first[1][1].items())
