"""Optimizers that look across matrices have the bits of memory on a disk, behind a kill too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from tests.checkpoint.replicas import STRATEGIES, Net, Replica, batch
from tests.hosts.on_disk import STEPS, assert_same, cut_small, followed, tear_write
from tests.workers import run_workers
from thinwire import Residency
from thinwire.compose import apply
from thinwire.errors import ConfigError
from thinwire.hosts.offload.moving import PieceSpot
from thinwire.hosts.offload.pieces import PiecesOnDisk
from thinwire.optim import mfac


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
    moving = states.moving
    found, begin = told.setdefault((*key, "ahead"), [0, 0.0]), moving.read_ahead

    def noted(spot: PieceSpot) -> None:
        begin(spot)
        held = sum(each.memory_bytes for each in {spot, *moving.under_way} if not each.stays)
        found[0] += moving._coming is not None
        found[1] = max(found[1], held / moving.most_bytes)

    moving.read_ahead = noted  # type: ignore[method-assign]


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
    told["behind a skip"] = behind_a_skip(rank, world_size, folder)
    return told


def with_a_nan(replica: Replica, rank: int) -> list[str]:
    """The parameters that a step moves in which one rank's gradient of one matrix is not a number."""
    with thinwire.whole(replica.model):
        before = {name: param.detach().clone() for name, param in replica.model.named_parameters()}
    skip(replica, rank)
    replica.wrapped(batch(10)[rank * 12 : (rank + 1) * 12]).backward()
    replica.optimizer.step()
    replica.optimizer.synchronize()
    replica.optimizer.check_replicas()
    with thinwire.whole(replica.model):
        after = dict(replica.model.named_parameters())
        assert all(bool(torch.isfinite(param).all()) for param in after.values())
        return [name for name, param in after.items() if not torch.equal(param, before[name])]


def skip(replica: Replica, rank: int) -> None:
    """A step in which one rank's gradient of one matrix is not a number."""
    poisoned = replica.model.get_parameter("layers.0.weight").register_hook(lambda g: g * float("nan") if rank else g)
    step_of(replica, "at once", 9)
    poisoned.remove()
    assert replica.optimizer.skipped_steps == 1


def behind_a_skip(rank: int, world_size: int, folder: Path) -> dict[str, list[Any]]:
    """By where things lie: steps behind a skipped one, and the same from a checkpoint of the skipped step."""
    told = {}
    for way in ("step", "disk"):
        residency, checkpoints = at_once_ways(folder)[way], folder / "skip" / way
        replica = across("apollo", rank, world_size, residency, name="zero")
        step_of(replica, "at once", 0)
        skip(replica, rank)
        replica.save(checkpoints, 2)
        told[way] = [followed_at_once(replica)]
        replica.optimizer.close()
        replica = across("apollo", rank, world_size, residency, seed=9, name="zero")
        replica.load(checkpoints / "step-00000002")
        told[way].append(followed_at_once(replica))
        replica.optimizer.close()
    return told


def followed_at_once(replica: Replica) -> list[Any]:
    """Losses of two steps, and the weights after them."""
    losses = [step_of(replica, "at once", number) for number in (2, 3)]
    replica.optimizer.synchronize()
    with thinwire.whole(replica.model):
        return [losses, {name: param.detach().clone() for name, param in replica.model.named_parameters()}]


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


# The optimizer of each run that is killed, how it differs, and the write of a step in which it is killed.
KILLS: dict[str, tuple[str, dict[str, Any], int]] = {
    "apollo": ("apollo", {"weights": "disk"}, 1),
    "masters": ("apollo", {"masters": "int8/64", "memory": "100gb"}, 3),
    "mfac": ("mfac", {}, 2),
    "mfac, stays": ("mfac", {"memory": "100gb"}, 20),
    "at once": ("apollo-mini", {"gradients": "step"}, 5),
}


def kept(name: str, rank: int, world_size: int, folder: Path, seed: int) -> Replica:
    """A replica of a run whose steps are kept."""
    cut_small()
    mfac.PAGE_NUMEL, mfac.PAGE_UNIT = 1, 64
    kind, options, _ = KILLS[name]
    return across(kind, rank, world_size, Residency(store=str(folder / name), durable=True, **options), seed)


def step_of(replica: Replica, name: str, number: int) -> float:
    """The loss of a step; nothing is clipped where gradients do not wait."""
    if name != "at once":
        return replica.step(number)
    loss = replica.wrapped(batch(number)[replica.rank * 12 : (replica.rank + 1) * 12])
    loss.backward()
    replica.optimizer.step()
    replica.optimizer.zero_grad()
    return float(loss.detach())


def steps_of(replica: Replica, name: str, first: int, num: int) -> list[Any]:
    """See `followed`; each step is kept."""
    losses = []
    for step in range(first, first + num):
        losses.append(step_of(replica, name, step))
        replica.optimizer.commit({})
    replica.optimizer.synchronize()
    with thinwire.whole(replica.model):
        return [losses, {key: param.detach().clone() for key, param in replica.model.named_parameters()}]


def killed_in_a_write(rank: int, world_size: int, folder: Path, name: str) -> str:
    """Steps that are kept, and one in whose write the second rank is killed: half of it is written."""
    replica = kept(name, rank, world_size, folder, 0)
    steps_of(replica, name, 0, STEPS)
    tear_write(rank, KILLS[name][2])
    try:
        steps_of(replica, name, STEPS, 2)
    except RuntimeError as error:
        return str(error)
    return "nobody was killed"


def undisturbed(rank: int, world_size: int, folder: Path, goes_on: bool) -> dict[str, list[Any]]:
    """Steps of each run behind the kill: without one, or by what the disk holds. Then again, behind damage."""
    told = {}
    for name in KILLS:
        replica = kept(name, rank, world_size, folder, 9 if goes_on else 0)
        journal = replica.optimizer.journal
        assert journal is not None
        if goes_on:
            assert replica.optimizer.steps == STEPS, (name, journal.row)
            assert isinstance(replica.model, Net)
            replica.model.fixed.load_state_dict(Net(0).fixed.state_dict())
        else:
            steps_of(replica, name, 0, STEPS)
        told[name] = steps_of(replica, name, STEPS, 2)
        replica.optimizer.close()
        if goes_on and rank == 1:
            with (journal.folder / "pieces").open("r+b") as file:
                for slot in (0, 1):
                    file.seek(slot * file.seek(0, 2) // 2)
                    file.write(bytes(range(256)) * 64)
        if goes_on:
            replica = kept(name, rank, world_size, folder, 0)
            assert replica.optimizer.steps == 0 and replica.optimizer.journal is not None
            row = replica.optimizer.journal.row
            assert row[1] == "begins anew" and ("not what was written" in row[2]) == (rank == 1), (name, row)
            told[name, "anew"] = steps_of(replica, name, 0, STEPS + 2)  # type: ignore[index]
            replica.optimizer.close()
    return told


def test_a_killed_run_that_looks_across_matrices_goes_on_behind_the_step_before(tmp_path: Path) -> None:
    for name in KILLS:
        assert "rank 1" in run_workers(killed_in_a_write, 2, tmp_path / "killed", name, may_die=(1,))[0], name
    plain = run_workers(undisturbed, 2, tmp_path / "plain", False)
    for own, told in zip(plain, run_workers(undisturbed, 2, tmp_path / "killed", True), strict=True):
        for name in KILLS:
            assert_same(told[name], own[name])
            assert told[name, "anew"][0][STEPS:] == own[name][0]


def with_other_options(rank: int, world_size: int, folder: Path) -> list[str]:
    """What becomes of a step that an Apollo with other options has kept, whose moments have other shapes."""
    told, saved = [], dict[str, Any]()
    for rank_of, channels in ((4, "larger"), (4, "larger"), (8, "larger"), (16, "rows")):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 32))
        named = model.named_parameters()
        inner = thinwire.Apollo(named, 1e-3, matrices="weight", rank=rank_of, channels=channels)
        store = Residency(store=str(folder), durable=True)
        _, optimizer = thinwire.zero(model, inner, thinwire.Zero(), residency=store, announce=False)
        assert optimizer.journal is not None
        told.append(" ".join(optimizer.journal.row[1:]))
        if channels == "rows":
            with pytest.raises(
                ConfigError, match=r"channels 'rows': the checkpoint has moments of '0\.weight' by channels 'larger'"
            ):
                optimizer.load_state_dict(saved)
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.commit({})
        saved = optimizer.state_dict()
        optimizer.close()
    return told


def test_a_step_of_other_shapes_is_not_gone_on_from(tmp_path: Path) -> None:
    ((first, same, *others),) = run_workers(with_other_options, 1, tmp_path)
    assert first.startswith("every step") and same.startswith("goes on behind step 1")
    # The last ones have as many numbers.
    for told, what in zip(others, ("pieces", "state"), strict=True):
        assert told.startswith(f"begins anew it holds other {what} than this run"), told


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
        for plain, resumed in told["behind a skip"].values():
            assert_same(resumed, plain)
