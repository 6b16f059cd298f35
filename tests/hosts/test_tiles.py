"""Matrices in tiles train as whole ones do, are never whole in memory, and have the same names in what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.checkpoint.replicas import Replica, atoms
from tests.hosts.on_disk import STEPS, assert_same, cut_small, followed
from tests.workers import run_workers
from thinwire import Residency
from thinwire.errors import ConfigError
from thinwire.hosts.offload.tiling import tile
from thinwire.losses import cut_loss, head_of
from thinwire.models import FirstWeights, build_model, build_skeleton, first

TILE = "layers=3x5"
NAMES = ("zero", "sdp4bit-loco")


@pytest.mark.parametrize("grid", [(1, 4), (4, 1), (3, 5)])
def test_a_grid_of_tiles_computes_what_the_matrix_does(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(17, 22)), torch.randn(2, 3, 17, requires_grad=True)
    plain, before = model(x), {name: value.clone() for name, value in model.state_dict().items()}
    plain.square().sum().backward()
    wanted = [x.grad, *(param.grad for param in model.parameters())]
    x.grad = None
    tiling = tile(model, f"0={grid[0]}x{grid[1]}")
    tiled = model(x)
    tiled.square().sum().backward()
    torch.testing.assert_close(tiled, plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad, wanted[0], rtol=1e-5, atol=1e-5)
    for name, param in model.named_parameters():
        whole = wanted[1 if name.endswith("weight") else 2]
        assert whole is not None
        torch.testing.assert_close(param.grad, tiling.places[name].of(whole), rtol=1e-5, atol=1e-5)
    assert max(p.numel() for p in model.parameters()) == -(-17 // grid[0]) * -(-22 // grid[1])
    again = model.state_dict()
    assert again.keys() == before.keys() and all(torch.equal(again[name], before[name]) for name in before)
    model.load_state_dict({name: value + 1 for name, value in before.items()})
    assert all(torch.equal(value, before[name] + 1) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bias"):
        model.load_state_dict({"0.weight": before["0.weight"], "0.bias": torch.zeros(3)})


def ways(folder: Path) -> dict[str, Residency | None]:
    store: dict[str, Any] = {"store": str(folder / "store"), "sub_group": 1024}
    return {
        "whole": None,
        "memory": Residency(optimizer="memory", tile=TILE),
        "disk": Residency(**store, weights="disk", gradients="disk", tile=TILE),
    }


def trained(rank: int, world_size: int, folder: Path) -> dict[Any, Any]:
    """Every strategy and way: three steps, a checkpoint, two more steps; then two from what another way has saved."""
    cut_small()
    told: dict[Any, Any] = {}
    with pytest.raises(ConfigError, match="tile of rank 1 is 'layers=3x5', and of rank 0 None"):
        Replica.make("zero", rank, world_size, 0, 1, Residency(optimizer="memory", tile=TILE if rank else None))
    for name in NAMES:
        for way, residency in ways(folder).items():
            replica = Replica.make(name, rank, world_size, 0, 1, residency)
            before = followed(replica, 0, STEPS)
            replica.save(folder / name / way, STEPS)
            told[name, way] = before, followed(replica, STEPS, 2)
            with thinwire.whole(replica.model):
                told[name, way, "names"] = list(replica.model.state_dict())
            state = replica.optimizer.state_dict()
            replica.optimizer.load_state_dict(state)
            replica.optimizer.close()
        for origin, way in (("disk", "memory"), ("disk", "whole"), ("whole", "disk")):
            replica = Replica.make(name, rank, world_size, 9, 1, ways(folder)[way])
            source = replica.load(folder / name / origin / f"step-{STEPS:08d}")
            replica.save(folder / name / f"{origin}-{way}", STEPS)
            told[name, origin, way] = source.is_same, followed(replica, STEPS, 2)
            replica.optimizer.close()
    return told


def test_tiles_on_a_disk_are_those_of_memory_and_any_layout_loads_them(tmp_path: Path) -> None:
    for told in run_workers(trained, 2, tmp_path):
        for name in NAMES:
            for part in (0, 1):
                assert_same(told[name, "disk"][part], told[name, "memory"][part])
            assert told[name, "disk"][0][0] == pytest.approx(told[name, "whole"][0][0], rel=1e-3)
            assert told[name, "disk", "names"] == told[name, "whole", "names"]
            is_same, again = told[name, "disk", "memory"]
            assert is_same
            assert_same(again, told[name, "disk"][1])
            for origin, way in (("disk", "whole"), ("whole", "disk")):
                is_same, (losses, _) = told[name, origin, way]
                assert not is_same and losses == pytest.approx(told[name, "whole"][1][0], rel=1e-3)
    for name in NAMES:
        whole = atoms(tmp_path / name / "whole" / f"step-{STEPS:08d}")
        for origin, way in (("disk", "whole"), ("whole", "disk")):
            saved, again = (atoms(tmp_path / name / at / f"step-{STEPS:08d}") for at in (origin, f"{origin}-{way}"))
            assert saved.keys() == again.keys() == whole.keys()
            assert all(torch.equal(saved[key], again[key]) for key in saved), (origin, way)


LARGE = 300 * 64


class NoWhole(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the most elements of memory that any operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, Tensor):
                self.most = max(self.most, each.untyped_storage().nbytes() // each.itemsize)
        return found


def headed(rank: int, world_size: int, folder: Path) -> dict[Any, Any]:
    """Losses of a model with a cut loss: whole in memory, and from no weights at all with tiles on a disk."""
    cut_small()
    first.STRIP_NUMEL = 1024
    told: dict[Any, Any] = {}
    for ties in (False, True):
        sizes = "tiny", 300, 16
        for way in ("whole", "disk"):
            model: nn.Module = build_model(*sizes, 0, {"tie_word_embeddings": ties})
            residency, initial = None, None
            if way == "disk":
                skeleton: Any = build_skeleton(*sizes, {"tie_word_embeddings": ties})
                model, initial = thinwire.hollow(skeleton), FirstWeights(skeleton, 0)
                residency = Residency(store=str(folder), weights="disk", tile="lm_head|embed=1x10,mlp=1x4")
            cut_loss(model, model.lm_head)  # type: ignore[arg-type]
            adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
            options: dict[str, Any] = {"residency": residency, "initial": initial, "announce": False}
            _, optimizer = thinwire.zero(model, adamw, thinwire.Zero(), **options)
            losses, most, waiting = [], 0, list[int]()

            def count(_: Tensor, model: nn.Module = model, waiting: list[int] = waiting) -> None:
                waiting.append(sum(param.grad.numel() for param in model.parameters() if param.grad is not None))

            for param in model.parameters():
                param.register_post_accumulate_grad_hook(count)
            for step in range(3):
                # No strip but the first six has a row of the batch.
                tokens = torch.randint(0, 180, (2, 16), generator=torch.Generator().manual_seed(step))
                optimizer.synchronize()
                with NoWhole() as seen:
                    loss = model(tokens, tokens)
                    loss.backward()
                    most = max(most, seen.most)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            with thinwire.whole(model):
                table: Any = model.get_submodule("model.embed_tokens")
                told[ties, way] = losses, most, max(waiting), table.weight[200:].detach().clone()
            if optimizer._residence is not None:
                held = optimizer._residence.replicas
                assert held is not None and held.used_bytes <= held.capacity_bytes < 4 * LARGE
            optimizer.close()
    return told


def test_a_head_on_a_disk_is_never_whole(tmp_path: Path) -> None:
    (told,) = run_workers(headed, 1, tmp_path)
    for ties in (False, True):
        (plain, whole, _, wanted), (tiled, most, waiting, rows) = told[ties, "whole"], told[ties, "disk"]
        torch.testing.assert_close(rows, wanted, rtol=0, atol=5e-6)
        assert tiled == pytest.approx(plain, rel=1e-5)
        assert most < LARGE <= whole
        # A tied head's gradient is complete when the backward reaches the embedding.
        assert ties or waiting < LARGE / 4


def test_strips_give_the_loss_of_the_head() -> None:
    model = build_model("tiny", 300, 16).double()
    tokens, targets = (torch.randint(0, 300, (3, 16), generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    targets[0, :5] = -100
    plain = model(tokens, targets)
    plain.backward()
    wanted = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()
    tiling = tile(model, "lm_head=1x7,embed=1x3")
    cut_loss(model, head_of(model))
    loss = model(tokens, targets)
    loss.backward()
    # Plain logits are rounded to fp32.
    torch.testing.assert_close(loss.float(), plain.float())
    for name, param in model.named_parameters():
        place = tiling.places.get(name)
        whole = wanted[name if place is None else place.name]
        assert whole is not None
        whole = whole if place is None else place.of(whole)
        torch.testing.assert_close(param.grad, whole, rtol=1e-4, atol=1e-7)
    with pytest.raises(IndexError, match="none of the 300 rows"):
        model(tokens + 300)


def test_parts_of_the_first_weights_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "STRIP_NUMEL", 1000)
    # A matrix of 303 x 40 is no whole groups of random numbers.
    for vocab_size, width in ((300, 64), (303, 40)):
        model = build_model("tiny", vocab_size, 16, overrides={"hidden_size": width})
        skeleton = build_skeleton("tiny", vocab_size, 16, {"hidden_size": width})
        given = FirstWeights(skeleton, 0)  # type: ignore[arg-type]
        for name, param in reversed(list(model.named_parameters())):
            assert torch.equal(given(name), param)
            if param.dim() == 2:
                rows, columns = (slice(5, length - 4) for length in param.shape)
                assert torch.equal(given.part(name, rows, columns), param[rows, columns])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", "nearest: '1x8'"), ("0=1x0", "nearest: '1x8'"), ("(=1x2", "not a regular expression"),
        ("9=1x2", "nearest: 0=1x2"), ("1x2", "so large that it is cut unnamed; nearest: 0=1x2, of 48 elements"),
        ("0=1x9", "has 8 outputs, and can't be cut into 9; nearest: 8"), ("0=7x1", "6 inputs"),
    ],
)  # fmt: skip
def test_tiles_that_there_can_not_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        tile(nn.Sequential(nn.Linear(6, 8)), text)
    assert message in str(error.value)


def test_a_run_that_had_tiles_can_do_without() -> None:
    assert (
        Residency(tile="none").tile is None and Residency(tile="").tile is None and Residency(tile="1x8").tile == "1x8"
    )


def test_what_tiles_can_not_be_combined_with_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 8))
    tile(model, "0=2x4")
    with pytest.raises(ConfigError, match="lm_head=1x8"):
        model[0].strips  # noqa: B018


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.AdamW])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_tiles_take_over_the_state_of_an_optimizer(kind: Any, num_steps: int) -> None:
    """Adagrad has state before its first step."""
    told = []
    for grid in (None, "0=2x3"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8))
        optimizer = kind(model.parameters(), lr=0.1)
        for step in range(num_steps + 2):
            if step == num_steps and grid is not None:
                tile(model, grid, optimizer)
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, 6) + step).square().sum().backward()
            optimizer.step()
        told.append(model.state_dict())
    assert told[0].keys() == told[1].keys()
    for name, value in told[0].items():
        torch.testing.assert_close(told[1][name], value, rtol=1e-5, atol=1e-6)
