"""What lies on a disk trains as it does in memory, bit for bit, and goes to any layout and back."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from tests.checkpoint.replicas import STRATEGIES, Net, Replica, atoms, batch
from tests.workers import run_workers
from thinwire import Residency
from thinwire.compose import apply
from thinwire.errors import ConfigError
from thinwire.hosts.offload import replicas, spill
from thinwire.hosts.offload.budget import fitted
from thinwire.hosts.offload.journal import locked
from thinwire.hosts.offload.pieces import PiecesOnDisk, PieceSpot
from thinwire.hosts.offload.residence import check_device, check_model
from thinwire.layout import buckets
from thinwire.methods.memory import LENT_RATE, Setup, floor
from thinwire.models import FirstWeights
from thinwire.models.build import build_model, build_skeleton
from thinwire.optim import mfac
from thinwire.tiers import DiskFile

NAMES = ("zero", "sdp4bit-loco", "frontier")
STEPS = 3


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


def cut_small(num_held: int = 2) -> None:
    """Let every matrix be a bucket of its own, none of them too small for the disk, and few of them in memory."""
    floor.NUM_UNBOUNDED = num_held
    buckets.DEFAULT_BUCKET_NUMEL = buckets.MIN_BLOCKS_PER_SHARD = 1
    replicas.SMALL_NUMEL = spill.SMALL_BYTES = 0


def followed(replica: Replica, first: int, num: int) -> list[Any]:
    """Losses of some steps, and the weights after them."""
    losses = [replica.step(step) for step in range(first, first + num)]
    replica.optimizer.synchronize()
    replica.optimizer.check_replicas()
    with thinwire.whole(replica.model):
        return [losses, {name: param.detach().clone() for name, param in replica.model.named_parameters()}]


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
    write, count = DiskFile.write, 0

    def torn_write(self: DiskFile, place: int, memory: torch.Tensor) -> None:
        nonlocal count
        count += rank == 1 and self.path is not None
        if count == at:
            memory[len(memory) // 2 :] = 255
        write(self, place, memory)
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

    DiskFile.write = torn_write  # type: ignore[method-assign]
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


def across(
    kind: str, rank: int, world_size: int, residency: Residency | None, seed: int = 0, name: str = "sdp4bit-loco"
) -> Replica:
    """A replica whose optimizer looks across matrices."""
    model = Net(seed)
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    params = [param for _, param in named]
    optimizer: torch.optim.Optimizer = {
        "apollo": lambda: thinwire.Apollo(named, 3e-3, matrices="layers", rank=4, weight_decay=0.1),
        "apollo-mini": lambda: thinwire.ApolloMini(named, 3e-3, matrices="layers|embed", period=2),
        "mfac": lambda: thinwire.MFAC(params, 1e-3, window=16, weight_decay=0.1),
    }[kind]()
    options: Any = {"seed": 3, "timeout_s": 300, "checked": False, "overlap": True}
    options |= {"residency": residency} if residency is not None else {}
    wrapped, parallel = apply(STRATEGIES[name][0], model, optimizer, local_size=1, **options)
    return Replica(model, wrapped, parallel, rank, world_size)


def across_ways(folder: Path) -> dict[str, Residency | None]:
    """Memory; everything on the disk; and what fits stays in memory after the first steps."""
    store = str(folder / "across")
    return {
        "memory": None,
        "disk": Residency(store=store, weights="disk"),
        "stays": Residency(store=store, memory="100gb"),
        "budget": Residency(store=store, memory="100gb", optimizer="disk"),
    }


def note_reads_ahead(told: dict[Any, Any], key: tuple[str, str], states: PiecesOnDisk) -> None:
    """Note how often a piece is read while another one is used, and the most bytes in memory over what may be."""
    found, begin = told.setdefault((*key, "ahead"), [0, 0.0]), states._read_ahead

    def noted(spot: PieceSpot) -> None:
        begin(spot)
        there = {spot, *states._leaving, *(states._coming or ())[:1]}
        held = sum(each.memory_bytes for each in there if not each.stays)
        found[0] += states._coming is not None
        found[1] = max(found[1], held / states._most_bytes)

    states._read_ahead = noted  # type: ignore[method-assign]


def at_once_ways(folder: Path) -> dict[str, Residency | None]:
    """Gradients wait, and nothing is clipped; buckets are stepped as gradients arrive, in memory and on the disk."""
    store: dict[str, Any] = {"store": str(folder / "at_once"), "gradients": "step"}
    return {
        "memory": None,
        "step": Residency(optimizer="memory", gradients="step"),
        "disk": Residency(**store, weights="disk"),
        "stays": Residency(**store, memory="100gb"),
    }


def stepped_at_once(rank: int, world_size: int, folder: Path) -> dict[Any, Any]:
    """Apollo and Mini: three steps, of which the second has a bucket without a finite gradient on one rank."""
    cut_small()
    told: dict[Any, Any] = {}
    for kind in ("apollo", "apollo-mini"):
        for way, residency in at_once_ways(folder).items():
            replica = across(kind, rank, world_size, residency)
            losses, most, before = [], 0, replica.optimizer.comm.meter.snapshot().sent_bytes
            for step in range(STEPS):
                loss = replica.wrapped(batch(step)[rank * 12 : (rank + 1) * 12])
                loss.backward()
                replica.optimizer.reduce()
                assert residency is None or all(param.grad is None for param in replica.model.parameters())
                held = [bucket.shard_grad.untyped_storage().nbytes() for bucket in replica.optimizer.buckets]  # type: ignore[attr-defined]
                most = max(most, *held)
                replica.optimizer.step()
                replica.optimizer.zero_grad()
                losses.append(float(loss.detach()))
            replica.optimizer.synchronize()
            sent = replica.optimizer.comm.meter.snapshot().sent_bytes - before
            told[kind, way, "sent"] = sent, STEPS * replica.optimizer.bytes_per_step
            with thinwire.whole(replica.model):
                told[kind, way] = losses, {name: p.detach().clone() for name, p in replica.model.named_parameters()}
            told[kind, way, "held"] = most
            if residency is not None:
                with pytest.raises(ConfigError, match="before the norm of all is known"):
                    replica.optimizer.clip_grad_norm_(1.0)
                told[kind, way, "nan"] = with_a_nan(replica, rank)
            replica.optimizer.close()
    return told


def with_a_nan(replica: Replica, rank: int) -> list[str]:
    """The parameters that a step moves in which one rank's gradient of one matrix is not a number."""
    with thinwire.whole(replica.model):
        before = {name: param.detach().clone() for name, param in replica.model.named_parameters()}
    poisoned = replica.model.get_parameter("layers.0.weight").register_hook(lambda g: g * float("nan") if rank else g)
    replica.wrapped(batch(9)[rank * 12 : (rank + 1) * 12]).backward()
    replica.optimizer.step()
    replica.optimizer.zero_grad()
    poisoned.remove()
    assert replica.optimizer.skipped_steps == 1
    replica.wrapped(batch(10)[rank * 12 : (rank + 1) * 12]).backward()
    replica.optimizer.step()
    replica.optimizer.synchronize()
    replica.optimizer.check_replicas()
    with thinwire.whole(replica.model):
        after = dict(replica.model.named_parameters())
        assert all(bool(torch.isfinite(param).all()) for param in after.values())
        return [name for name, param in after.items() if not torch.equal(param, before[name])]


def looking_across(rank: int, world_size: int, folder: Path) -> dict[Any, Any]:
    """Each optimizer and way: three steps, a checkpoint, two more steps; and two from what another way has saved."""
    cut_small()
    # A page of M-FAC's window has so few elements that a piece has several.
    mfac.PAGE_NUMEL, mfac.PAGE_UNIT = 1, 64
    told: dict[Any, Any] = {}
    origins = {"memory": "stays", "disk": "memory", "stays": "disk", "budget": "budget"}
    for kind in ("apollo", "apollo-mini", "mfac"):
        for way, residency in across_ways(folder).items():
            replica = across(kind, rank, world_size, residency)
            if residency is not None:
                note_reads_ahead(told, (kind, way), replica.optimizer.states)  # type: ignore[attr-defined]
            before = followed(replica, 0, STEPS)
            replica.save(folder / kind / way, STEPS)
            told[kind, way] = before, followed(replica, STEPS, 2)
            replica.optimizer.close()
        for way, residency in across_ways(folder).items():
            replica = across(kind, rank, world_size, residency, seed=9)
            source = replica.load(folder / kind / origins[way] / f"step-{STEPS:08d}")
            told[kind, way, "again"] = source.is_same, followed(replica, STEPS, 2)
            replica.optimizer.close()
    coded: dict[str, Any] = {"masters": "int8/64", "store": str(folder / "coded")}
    for way, residency in {
        "disk": Residency(**coded, weights="disk"), "stays": Residency(**coded, memory="100gb")
    }.items():  # fmt: skip
        replica = across("apollo", rank, world_size, residency)
        before = followed(replica, 0, STEPS)
        replica.save(folder / "coded" / way, STEPS)
        told["coded", way] = before, followed(replica, STEPS, 2)
        replica.optimizer.close()
        replica = across("apollo", rank, world_size, residency, seed=9)
        replica.load(folder / "coded" / way / f"step-{STEPS:08d}")
        told["coded", way, "again"] = followed(replica, STEPS, 2)
        replica.optimizer.close()
    return told


def assert_same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    for key, weights in one[1].items():
        assert torch.equal(weights, other[1][key]), key


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
            assert told["read", name, "slices"] == pytest.approx(told["read", name, "recompute"], rel=0.05)
            (losses, weights), (plain, others) = told[name, "slices"][1], told[name, "memory"][1]
            assert losses == pytest.approx(plain, rel=1e-4)
            assert all(torch.allclose(weights[key], others[key], atol=2e-3) for key in weights)


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


def test_what_looks_across_matrices_passes_through_memory_bit_for_bit(tmp_path: Path) -> None:
    for told in run_workers(looking_across, 2, tmp_path):
        for kind in ("apollo", "apollo-mini", "mfac"):
            for way in ("memory", "disk", "stays", "budget"):
                for part in (0, 1):
                    assert_same(told[kind, way][part], told[kind, "memory"][part])
                is_same, again = told[kind, way, "again"]
                assert is_same
                assert_same(again, told[kind, "memory"][1])
            for way in ("disk", "stays", "budget"):
                num_ahead, share = told[kind, way, "ahead"]
                assert (num_ahead > 0 or way != "disk") and share <= 1, (kind, way, num_ahead, share)
        for part in (0, 1):
            assert_same(told["coded", "disk"][part], told["coded", "stays"][part])
        rounded, plain = told["coded", "disk"], told["apollo", "memory"]
        assert rounded[1][0] != plain[1][0] and rounded[1][0] == pytest.approx(plain[1][0], rel=0.02)
        # Updates smaller than a level add up: the masters have moved as those of fp32 have.
        start = Net(0).get_parameter("layers.0.weight").detach()
        moved, off = (
            found[1][1]["layers.0.weight"] - of
            for found, of in ((plain, start), (rounded, plain[1][1]["layers.0.weight"]))
        )
        assert off.abs().mean() < 0.5 * moved.abs().mean()
        for way in ("disk", "stays"):
            assert told["coded", way, "again"][0] == pytest.approx(rounded[1][0], rel=1e-3)


def test_apollo_steps_buckets_as_gradients_arrive_and_keeps_none(tmp_path: Path) -> None:
    for told in run_workers(stepped_at_once, 2, tmp_path):
        for kind in ("apollo", "apollo-mini"):
            assert told[kind, "memory", "held"] > 0
            for way in ("step", "disk", "stays"):
                assert_same(told[kind, way], told[kind, "memory"])
                assert told[kind, way, "held"] == 0
                sent, promised = told[kind, way, "sent"]
                assert sent == promised
                assert "layers.1.weight" in told[kind, way, "nan"]


def test_another_world_takes_what_lay_on_a_disk(first: list[dict[Any, Any]], folder: Path) -> None:
    (told,) = run_workers(later_runs, 1, folder, [("1024", "99328")])
    for name in NAMES:
        saved = atoms(folder / name / "1024" / f"step-{STEPS:08d}")
        again = atoms(folder / name / "1024-99328-1" / f"step-{STEPS:08d}")
        assert {key for key in saved if not key.startswith("replica/")} == again.keys()
        assert all(torch.equal(saved[key], again[key]) for key in again), name
        assert not told[name, "1024", "99328"][1]


class View(torch.nn.Module):
    """A matrix of which autograd saves a view, in one of three ways."""

    def __init__(self, way: str, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.way, self.weight = way, torch.nn.Parameter(torch.randn(16, 16, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "linear":
            return torch.nn.functional.linear(x, self.weight).tanh()
        return (x @ self.weight.t() if self.way == "product" else torch.einsum("bi,oi->bo", x, self.weight)).tanh()


class Views(torch.nn.Module):
    """Six matrices, of which the first is used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.views = torch.nn.ModuleList(View(way, generator) for way in ("linear", "product", "einsum") * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for view in self.views:
            x = view(x)
        first = self.views[0].weight
        assert isinstance(first, torch.Tensor)
        return (x @ first).square().mean()


def cut_from_nothing(rank: int, world_size: int) -> list[Any]:
    """Losses of weights that are cut over ranks, from a whole model and from none; the most that was whole then."""
    found, most, num_params = list[Any](), 0, 0
    for is_hollow in (False, True):
        model: Any = build_model("tiny", 300, 16)
        initial: Any = None
        if is_hollow:
            skeleton: Any = build_skeleton("tiny", 300, 16)
            model, first = thinwire.hollow(skeleton), FirstWeights(skeleton, 0)

            def initial(name: str, model: Any = model, first: Any = first) -> torch.Tensor:
                nonlocal most
                most = max(most, sum(param.untyped_storage().nbytes() > 0 for param in model.parameters()))
                return first(name)

        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        num_params = len(list(model.parameters()))
        method = thinwire.Frontier(weights_over=2, gradients_over=2)
        _, optimizer = thinwire.zero(model, adamw, method, local_size=2, initial=initial, announce=False)
        losses = []
        for step in range(3):
            tokens = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(step))
            losses.append(model(tokens, tokens))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([float(loss.detach()) for loss in losses])
        optimizer.close()
    return [*found, most, num_params]


def test_weights_that_are_cut_are_never_whole() -> None:
    for whole, cut, most, num_params in run_workers(cut_from_nothing, 2):
        assert cut == whole
        # Those of a layer, which is a bucket.
        assert most <= num_params / 2


def cut_ways(folder: Path) -> dict[str, Residency | None]:
    """Weights that are cut over ranks: in memory; on disks, with all else or alone, and layers computed again."""
    store = str(folder / "cut")
    return {
        "memory": None,
        "disk": Residency(store=store, weights="disk", gradients="disk", sub_group=1024),
        "again": Residency(store=store, weights="disk", optimizer="memory", activations="recompute"),
        "durable": Residency(store=str(folder / "kept"), weights="disk", durable=True, sub_group=1024),
    }


def edited_in_passing(replica: Replica) -> Any:
    """Bytes of whole weights before, in and behind a block in which a layer is edited; and a step after it."""

    def whole_bytes() -> int:
        return sum(bucket.live.untyped_storage().nbytes() for bucket in replica.optimizer.buckets)  # type: ignore[attr-defined]

    layer = replica.model.get_submodule("layers.0")
    replica.optimizer.synchronize()
    found = [whole_bytes()]
    with thinwire.whole(layer):
        found.append(whole_bytes())
        # No version is counted of what is written so.
        layer.get_parameter("weight").data.mul_(0.5)
    return [*found, whole_bytes()], followed(replica, STEPS + 2, 1)


def cut_over_disks(rank: int, world_size: int, folder: Path) -> dict[Any, Any]:
    """Each way: three steps, a checkpoint, two more; then two from what another way has saved, or has kept."""
    cut_small()
    told: dict[Any, Any] = {}

    def made(way: str, seed: int) -> Replica:
        model = Net(seed)
        adamw = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=3e-3)
        method = thinwire.Frontier(weights_over=2, gradients_over=2, weights="bf16")
        options: Any = {"seed": 3, "timeout_s": 300, "checked": False, "overlap": True}
        wrapped, parallel = apply(method, model, adamw, local_size=2, residency=cut_ways(folder)[way], **options)
        return Replica(model, wrapped, parallel, rank, world_size)

    for way in cut_ways(folder):
        replica = made(way, 0)
        before = followed(replica, 0, STEPS)
        replica.save(folder / way, STEPS)
        if way == "durable":
            replica.optimizer.commit({})
        else:
            told[way] = before, followed(replica, STEPS, 2)
            told[way, "edited"] = edited_in_passing(replica)
        if way == "disk":
            kept: Any = replica.optimizer._residence.replicas  # type: ignore[attr-defined]
            whole = sum(bucket.live.nbytes for bucket in kept.spots)
            told["held"] = kept.used_bytes, kept.capacity_bytes, kept.total_bytes, whole
        replica.optimizer.close()
    for way, origin in (("disk", "memory"), ("memory", "disk"), ("again", "disk")):
        replica = made(way, 9)
        source = replica.load(folder / origin / f"step-{STEPS:08d}")
        told[way, "again"] = source.is_same, followed(replica, STEPS, 2)
        replica.optimizer.close()
    replica = made("durable", 9)
    assert isinstance(replica.model, Net) and replica.optimizer.steps == STEPS
    replica.model.fixed.load_state_dict(Net(0).fixed.state_dict())
    told["durable"] = followed(replica, STEPS, 2)
    replica.optimizer.close()
    return told


def test_weights_that_are_cut_lie_on_all_disks_bit_for_bit(tmp_path: Path) -> None:
    for told in run_workers(cut_over_disks, 2, tmp_path):
        before, after = told["memory"]
        for way in ("disk", "again"):
            assert_same(told[way][0], before)
            assert_same(told[way][1], after)
        whole_bytes, edited = told["memory", "edited"]
        assert whole_bytes[0] == whole_bytes[1] == whole_bytes[2]
        # The edit has reached the masters, which a step moves little.
        assert torch.allclose(edited[1]["layers.0.weight"], 0.5 * after[1]["layers.0.weight"], atol=0.02)
        for way in ("disk", "again"):
            outside, inside, behind = told[way, "edited"][0]
            assert outside == behind == 0 < inside < whole_bytes[0]
            assert_same(told[way, "edited"][1], edited)
        for way in ("disk", "memory", "again"):
            assert told[way, "again"][0]
            assert_same(told[way, "again"][1], after)
        assert_same(told["durable"], after)
        used, capacity, total, whole = told["held"]
        # Each disk has a part, and so is read for a part.
        assert used <= capacity < total and 2 * total == whole


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
                    os._exit(42 if "another run" in str(error) else 1)
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


def edited(rank: int, world_size: int, folder: Path) -> list[list[Any]]:
    """Input gradients, weights after a step, and weights after an edit by hand and another one; memory, then disk."""
    cut_small()
    told = []
    for residency in (None, Residency(store=str(folder), weights="disk")):
        model = Views()
        adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
        _, optimizer = thinwire.zero(model, adamw, thinwire.Zero(), residency=residency, announce=False)
        found: list[Any] = []
        for _ in range(3):
            x = torch.linspace(-1, 1, 64).view(4, 16).requires_grad_()
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            with thinwire.whole(model), torch.no_grad():
                found += [x.grad, [param.clone() for param in model.parameters()]]
                model.get_parameter("views.1.weight").mul_(0.5)
            if optimizer._residence is not None:
                held = optimizer._residence.replicas
                assert held is not None and held.used_bytes <= held.capacity_bytes == held.total_bytes // 3
        told.append(found)
        optimizer.close()
    return told


def test_saved_views_and_edits_by_hand_are_those_of_memory(tmp_path: Path) -> None:
    (told,) = run_workers(edited, 1, tmp_path)
    for here, there in zip(*told, strict=True):
        for one, other in zip(here, there, strict=True):
            assert torch.equal(one, other)


class Tables(torch.nn.Module):
    """Three embeddings, of which two fit in memory, and a small layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(4096, 64, padding_idx=number) for number in range(3))
        self.layer = torch.nn.Linear(64, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = sum(table(tokens * (number + 3) % 4096) for number, table in enumerate(self.tables))
        assert isinstance(x, torch.Tensor)
        return self.layer(x.tanh()).square().mean()


def looked_up(rank: int, world_size: int, folder: Path) -> list[list[Any]]:
    """Losses and weights of three steps in memory, then on the disk; there, bytes read by forward and backward too."""
    cut_small()
    told = []
    for residency in (None, Residency(store=str(folder), weights="disk")):
        model = Tables()
        adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
        method = thinwire.SDP4Bit(embedding_rows="on")
        _, optimizer = thinwire.zero(model, adamw, method, residency=residency, announce=False)
        found: list[Any] = []
        for step in range(3):
            optimizer.synchronize()
            before = optimizer.tiers.snapshot() if optimizer.tiers is not None else None
            tokens = torch.randint(0, 4096, (2, 9), generator=torch.Generator().manual_seed(2 * step + rank))
            tokens[0, :3] = torch.tensor([0, 4095, 0])
            loss = model(tokens)
            loss.backward()
            if optimizer.tiers is not None and before is not None:
                assert 0 < (optimizer.tiers.snapshot() - before).read_bytes < 4096 * 64 * 4 // 2
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        with thinwire.whole(model), torch.no_grad():
            found += [param.clone() for param in model.parameters()]
        told.append(found)
        optimizer.close()
    return told


def test_an_embedding_on_the_disk_is_that_of_memory_and_only_its_rows_are_read(tmp_path: Path) -> None:
    for told in run_workers(looked_up, 2, tmp_path):
        for one, other in zip(*told, strict=True):
            assert torch.equal(one, other)


def refused(rank: int, world_size: int) -> list[str]:
    found = []
    cases: list[tuple[str, dict[str, Any]]] = [
        ("muon", {"store": "/var/tmp"}), ("adamw", {"store": "/dev/shm"}),
        ("adamw", {"durable": True}), ("adamw", {"memory": "300mb"}), ("adamw", {"memory": "800mb"}),
        ("mfac", {"store": "/var/tmp", "durable": True}),
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
            "below the floor of", "this process has", "one slot each",
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
        with thinwire.whole(model):
            told.append([losses, {name: param.detach().clone() for name, param in model.named_parameters()}])
        stage.optimizer.close()
    with pytest.raises(ConfigError) as error:
        method = thinwire.DiLoCo(inner=thinwire.SDP4Bit(), sync_every=2, fedspeed=1.0)
        residency, other = Residency(store=str(folder), durable=True), Net(0)
        adamw = torch.optim.AdamW([param for param in other.parameters() if param.requires_grad])
        thinwire.parallelize(other, adamw, mesh, [method, residency], announce=False)
    return [*told, str(error.value)]


def test_islands_have_a_disk_each(tmp_path: Path) -> None:
    first, second = run_workers(on_islands, 2, tmp_path)
    for plain, disk, refused in (first, second):
        assert_same(disk, plain)
        assert "without durable" in refused and "leave the correction out" in refused
    assert first[0][0] != second[0][0]
    assert all(torch.equal(value, second[1][1][name]) for name, value in first[1][1].items())
