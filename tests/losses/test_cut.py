"""Cut cross-entropy against plain logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workers import run_workers
from thinwire.errors import ConfigError
from thinwire.losses import PRESETS, cut_cross_entropy, tiles
from thinwire.losses.fused import FusedCrossEntropy
from thinwire.losses.strips import strip_cross_entropy
from thinwire.losses.tiles import Tiles, Tiling

N, D, V = 67, 12, 1100


def problem(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    e, c, bias = (torch.randn(shape, generator=draw, dtype=dtype) for shape in ((N, D), (V, D), (V,)))
    targets = torch.randint(0, V, (N,), generator=draw)
    targets[::7] = -100
    return e, c, bias, targets


def plain(e: Tensor, c: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """The definition, by torch's own cross_entropy."""
    shift = options.get("shift", 0)
    if shift:
        e, targets = e[..., :-shift, :], targets[..., shift:]
    logits = F.linear(e, c, options.get("bias"))
    if cap := options.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    ignored, reduction = options.get("ignore_index", -100), options.get("reduction", "mean")
    flat, aims = logits.flatten(0, -2), targets.flatten()
    losses = F.cross_entropy(flat, aims, ignore_index=ignored, reduction="none")
    losses = losses + options.get("z_loss", 0.0) * torch.where(aims == ignored, 0, flat.logsumexp(1)).square()
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() / ((aims != ignored).sum() if reduction == "mean" else 1)


def with_grads(loss_of: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    loss = loss_of(*leaves)
    weights = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return loss.detach(), *torch.autograd.grad((loss * weights).sum(), leaves)


@pytest.mark.parametrize("impl", ["fused", "tiles", "plain", "cce_exact"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 3.0},
        {"z_loss": 0.1, "reduction": "sum"},
        {"ignore_index": 5, "softcap": 30.0, "z_loss": 0.01},
        {"reduction": "none", "softcap": 2.0, "z_loss": 0.1},
    ],
)
def test_equals_plain_logits(impl: str, options: dict[str, Any]) -> None:
    e, c, bias, targets = problem()
    if "ignore_index" in options:
        targets = targets.clamp(min=5)
    if impl == "fused" and options.get("reduction") == "none":
        with pytest.raises(ConfigError, match="nearest: impl 'tiles'"):
            cut_cross_entropy(e, c, targets, impl=impl, **options)
        return
    found = with_grads(lambda e, c, b: cut_cross_entropy(e, c, targets, bias=b, impl=impl, **options), e, c, bias)
    exact = with_grads(lambda e, c, b: plain(e, c, targets, bias=b, **options), e, c, bias)
    for own, true in zip(found, exact, strict=True):
        torch.testing.assert_close(own, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", ["fused", "tiles"])
def test_shifts_inside_of_sequences(impl: str) -> None:
    draw = torch.Generator().manual_seed(1)
    e, c = torch.randn(3, 9, D, generator=draw).double(), torch.randn(V, D, generator=draw).double()
    targets = torch.randint(0, V, (3, 9), generator=draw)
    found = with_grads(lambda e, c: cut_cross_entropy(e, c, targets, shift=2, impl=impl), e, c)
    for own, true in zip(found, with_grads(lambda e, c: plain(e, c, targets, shift=2), e, c), strict=True):
        torch.testing.assert_close(own, true, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    draw = torch.Generator().manual_seed(2)
    leaves = [torch.randn(shape, generator=draw).double().requires_grad_() for shape in ((3, 4), (7, 4), (7,))]

    def found(e: Tensor, c: Tensor, b: Tensor) -> Any:
        return Tiles.apply(e, c, b, torch.tensor([6, 0, 3]), Tiling(softcap=2.0, tokens=2, words=2))

    assert torch.autograd.gradcheck(found, leaves)


def test_gradcheck_of_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of tokens, a soft-cap, a z-loss and a bias."""
    monkeypatch.setattr("thinwire.losses.fused.TOKENS", 2)
    draw = torch.Generator().manual_seed(2)
    leaves = [torch.randn(shape, generator=draw).double().requires_grad_() for shape in ((3, 4), (7, 4), (7,))]

    def found(e: Tensor, c: Tensor, b: Tensor) -> Any:
        return FusedCrossEntropy.apply(e, c, b, torch.tensor([6, 0, 3]), 0.5, 2.0, 0.1, "fp32")

    assert torch.autograd.gradcheck(found, leaves)


def test_lse_has_a_gradient() -> None:
    e, c, _, targets = problem()

    def found(e: Tensor, c: Tensor) -> Tensor:
        loss, lse = cut_cross_entropy(e, c, targets, return_lse=True)
        return loss + lse.square().sum()

    def exact(e: Tensor, c: Tensor) -> Tensor:
        lse = (e @ c.T).logsumexp(1)
        return plain(e, c, targets) + lse[targets != -100].square().sum()

    for own, true in zip(with_grads(found, e, c), with_grads(exact, e, c), strict=True):
        torch.testing.assert_close(own, true, rtol=1e-12, atol=1e-12)


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that any operation returned."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.most = max(self.most, found.numel())
        return found


@pytest.mark.parametrize(("impl", "most"), [("fused", 128 * 4096), ("tiles", 256 * 1024)])
def test_never_has_all_logits(impl: str, most: int) -> None:
    draw = torch.Generator().manual_seed(3)
    e, c = (torch.randn(shape, generator=draw).requires_grad_() for shape in ((512, 8), (4096, 8)))
    targets = torch.randint(0, 4096, (512,), generator=draw)
    with Largest() as largest:
        cut_cross_entropy(e, c, targets, impl=impl).backward()
    assert largest.most <= most


@pytest.mark.parametrize("impl", ["fused", "tiles"])
def test_large_logits_and_no_tokens(impl: str) -> None:
    e, c = torch.tensor([[100.0], [-100.0]]).requires_grad_(), torch.tensor([[100.0], [-100.0], [1.0]])
    lse = cut_cross_entropy(e, c, torch.tensor([2, 2]), reduction="none", return_lse=True)[1]
    torch.testing.assert_close(lse, torch.full((2,), 1e4), rtol=1e-6, atol=0)
    loss = cut_cross_entropy(e, c, torch.full((2,), -100), impl=impl)
    loss.backward()
    assert loss == 0 and e.grad is not None and not e.grad.any()


@pytest.mark.parametrize("accumulation", ["fp32", "kahan", "plain"])
def test_bf16_sums(accumulation: str) -> None:
    e, c, _, targets = problem(torch.bfloat16)
    found = with_grads(lambda e, c: cut_cross_entropy(e, c, targets, impl="tiles", accumulation=accumulation), e, c)
    exact = with_grads(lambda e, c: plain(e, c, targets), e.double(), c.double())
    for own, true, bound in zip(found, exact, (2e-3, 2e-2, 2e-2), strict=True):
        assert float((own.double() - true).norm() / true.norm()) < bound


EPSILON = torch.finfo(torch.float32).eps


def filtered(kind: str | None, draw: int, unlikely: float) -> tuple[int, Tensor, Tensor]:
    """Rows of c that tiles have given a gradient, and both gradients, where few words are likely."""
    source = torch.Generator().manual_seed(4)
    e, c = (torch.randn(shape, generator=source).mul_(0.1).requires_grad_() for shape in ((128, 16), (2048, 16)))
    likely = torch.randperm(2048, generator=source)[:128]
    bias = torch.full((2048,), unlikely)
    bias[likely] = 0.0
    targets = likely[torch.randint(0, 128, (128,), generator=source)]
    # At bf16's epsilon, and computed in fp32: the filter's own error is what is seen.
    eps = torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps
    tiling = Tiling(filter_e=kind, filter_c=kind, tokens=32, words=128, generator=torch.Generator().manual_seed(draw))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("thinwire.losses.tiles.LEAST_SHARE", eps / 32)
        losses, _ = Tiles.apply(e, c, bias, targets, tiling)
        of_e, of_c = torch.autograd.grad(losses.sum(), (e, c))
    return int(of_c.any(1).sum()), of_e, of_c


def test_sorting_lets_drop_leave_out_unlikely_words() -> None:
    kept, of_e, of_c = filtered("drop", 0, -15.0)
    _, true_e, true_c = filtered(None, 0, -15.0)
    # One tile of likely words, of sixteen.
    assert kept == 128
    assert float((of_e - true_e).norm() / true_e.norm()) < 1e-3 and float((of_c - true_c).norm() / true_c.norm()) < 1e-3


def test_drop_loses_what_pushes_all_words_down_before_training() -> None:
    """With an untrained head no word is likely: tiles without a target go, and with them their whole gradient."""
    source = torch.Generator().manual_seed(0)
    e, c = (torch.randn(shape, generator=source).mul_(0.05).requires_grad_() for shape in ((64, 16), (8192, 16)))
    targets = torch.randint(0, 4, (64,), generator=source)
    found = {}
    for kind in (None, "drop"):
        losses, _ = Tiles.apply(e, c, None, targets, Tiling(filter_c=kind, tokens=32, words=128))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("thinwire.losses.tiles.LEAST_SHARE", torch.finfo(torch.bfloat16).eps / EPSILON / 32)
            (found[kind],) = torch.autograd.grad(losses.sum(), c)
    exact, dropped = found[None], found["drop"]
    kept = dropped.any(1)
    assert 4 <= int(kept.sum()) <= 4 * 128 and bool(exact.any(1).all())
    # Summed over words it is 0: what targets pull up, all words push down. Nearly all of that is lost.
    assert float(exact.sum(0).norm()) < 1e-4 * float(exact.norm())
    assert float(dropped.sum(0).norm()) > 0.9 * float(dropped[:4].sum(0).norm()) > 0.0


def test_unbiased_is_right_on_average() -> None:
    _, _, exact = filtered(None, 0, -5.0)
    _, _, dropped = filtered("drop", 0, -5.0)
    found = [filtered("unbiased", draw, -5.0) for draw in range(60)]
    mean = torch.stack([of_c for _, _, of_c in found]).mean(0)
    rare = exact.abs().sum(1) < exact.abs().sum(1).median()
    assert not dropped[rare].any()
    assert len({kept for kept, *_ in found}) > 1
    # Each gradient of the rare words is 0 or too large; their sum over words and draws is what it should be. The mean
    # of so many draws has a standard deviation of 0.03.
    share = float((mean[rare] * exact[rare]).sum() / exact[rare].square().sum())
    assert share == pytest.approx(1, abs=0.1)


def left_out(
    bias: Tensor, tokens: int, monkeypatch: pytest.MonkeyPatch, *, sorts: bool, spread: float = 0.1
) -> tuple[float, float, float]:
    """The share of tiles that "drop" keeps, and the relative errors of both gradients."""
    source, num_words = torch.Generator().manual_seed(5), len(bias)
    e, c = (torch.randn(n, 16, generator=source).mul_(spread).requires_grad_() for n in (512, num_words))
    targets = torch.multinomial(bias.exp(), 512, replacement=True, generator=source)
    plain_sums, plain_factors, kept = tiles._log_sums, tiles._factors, list[bool]()

    def log_sums(*given: Any) -> Any:
        lse, means = plain_sums(*given)
        return lse, means if sorts or means is None else -torch.arange(float(num_words))

    def factors(*given: Any) -> Any:
        found = plain_factors(*given)
        kept.append(found != (0.0, 0.0))
        return found

    monkeypatch.setattr(tiles, "_log_sums", log_sums)
    monkeypatch.setattr(tiles, "LEAST_SHARE", torch.finfo(torch.bfloat16).eps / EPSILON / 32)
    grads = {}
    for kind in (None, "drop"):
        monkeypatch.setattr(tiles, "_factors", plain_factors if kind is None else factors)
        tiling = Tiling(filter_e=kind, filter_c=kind, tokens=tokens, words=128)
        grads[kind] = torch.autograd.grad(Tiles.apply(e, c, bias, targets, tiling)[0].sum(), (e, c))
    monkeypatch.undo()
    off = [float((own - true).norm() / true.norm()) for own, true in zip(grads["drop"], grads[None], strict=True)]
    return sum(kept) / len(kept), off[0], off[1]


def test_without_sorting_no_tile_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sixteenth of the words, anywhere in the vocabulary, is likely: every tile has some, until they are sorted."""
    bias = torch.full((8192,), -15.0)
    bias[torch.randperm(8192, generator=torch.Generator().manual_seed(6))[:512]] = 0.0
    assert left_out(bias, 64, monkeypatch, sorts=False) == (1.0, 0.0, 0.0)
    kept, off_e, off_c = left_out(bias, 64, monkeypatch, sorts=True)
    assert kept == 1 / 16 and off_e < 1e-3 and off_c < 1e-5


def test_words_by_zipfs_law_are_left_out_and_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail is long: half of the tiles stay where logits spread by 1, and what is left out is missed."""
    bias = -1.2 * torch.arange(1.0, 8193).log()
    kept, off_e, off_c = left_out(bias, 16, monkeypatch, sorts=True, spread=0.5)
    assert 0.4 < kept < 0.7 and 3e-3 < off_e < 2e-2 and 5e-4 < off_c < 5e-3


def over_ranks(rank: int, world_size: int) -> None:
    e, c, bias, targets = problem()
    # Ranks have unequal numbers of rows, and no target is among the second rank's.
    targets = torch.where(targets >= 0, targets % 400, targets)
    own = slice(0, 400) if rank == 0 else slice(400, V)

    exact = with_grads(lambda e, c, b: plain(e, c, targets, bias=b, softcap=5.0, z_loss=0.1), e, c, bias)
    options: dict[str, Any] = {"softcap": 5.0, "z_loss": 0.1, "group": dist.group.WORLD}
    for impl, num_sums in (("tiles", 3), ("plain", 2)):
        told = partial(cut_cross_entropy, targets=targets, impl=impl, **options)
        with CommDebugMode() as sums:
            mine = with_grads(lambda e, c, b, told=told: told(e, c, bias=b), e, c[own], bias[own])
        for part, true in zip(mine, (*exact[:2], exact[2][own], exact[3][own]), strict=True):
            torch.testing.assert_close(part, true, rtol=1e-12, atol=1e-12)
        # And one of the gradient of e.
        assert sums.get_total_counts() == num_sums + 1
    mesh = init_device_mesh("cpu", (world_size,))
    placed = DTensor.from_local(c.chunk(world_size)[rank], mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(ConfigError, match="bias is a DTensor and c is not; nearest: c as a DTensor"):
        cut_cross_entropy(e, c, targets, bias=DTensor.from_local(bias, mesh))
    cut_cross_entropy(e, placed, distribute_tensor(targets, mesh, [Shard(0)])).backward()
    assert isinstance(placed.grad, DTensor)
    _, of_c = with_grads(lambda c: plain(e, c, targets), c)
    torch.testing.assert_close(placed.grad.full_tensor() * 0.5, of_c, rtol=1e-12, atol=1e-12)

    for found, nearest in ((V, V - 1), (-5, 0)):
        targets[1] = found
        for impl in ("tiles", "plain"):
            with pytest.raises(ConfigError, match=f"target {found}: .*nearest: {nearest}$"):
                cut_cross_entropy(e, c[own], targets, impl=impl, group=dist.group.WORLD)


def test_vocabulary_over_ranks() -> None:
    run_workers(over_ranks, 2)


def over_more_ranks_than_words(rank: int, world_size: int) -> None:
    e, c, bias, targets = problem()
    c, bias, targets = c[:2], bias[:2], torch.where(targets >= 0, targets % 2, targets)
    exact = with_grads(lambda e, c, b: plain(e, c, targets, bias=b, softcap=5.0, z_loss=0.1), e, c, bias)
    mesh = init_device_mesh("cpu", (world_size,))
    filters = {"filter_e": "drop", "filter_c": "unbiased"}
    for options in ({"impl": "tiles"}, {"impl": "tiles", **filters}, {"impl": "plain"}):
        told: Any = partial(cut_cross_entropy, targets=targets, softcap=5.0, z_loss=0.1, **options)
        in_group = partial(told, group=dist.group.WORLD)
        # The last rank has no rows; the first; all but one.
        for bounds in ((0, 1, 2, 2), (0, 0, 1, 2), (0, 0, 2, 2)):
            own = slice(*bounds[rank : rank + 2])
            mine = with_grads(lambda e, c, b, loss=in_group: loss(e, c, bias=b), e, c[own], bias[own])
            for part, true in zip(mine, (*exact[:2], exact[2][own], exact[3][own]), strict=True):
                torch.testing.assert_close(part, true, rtol=1e-12, atol=1e-12)
        leaves: list[Any] = [distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_() for whole in (c, bias)]
        loss = told(e, leaves[0], bias=leaves[1])
        loss.backward()
        assert len(leaves[0].to_local()) == (rank < 2)
        # The weight of the only loss in with_grads is 0.5.
        grads = [0.5 * leaf.grad.full_tensor() for leaf in leaves]
        for part, true in zip((loss.detach(), *grads), (exact[0], *exact[2:]), strict=True):
            torch.testing.assert_close(part, true, rtol=1e-12, atol=1e-12)


def test_a_rank_may_have_no_rows_of_the_vocabulary() -> None:
    run_workers(over_more_ranks_than_words, 3)


def over_unequal_data(rank: int, world_size: int) -> None:
    e, c, _, targets = problem()
    targets[: N // 2] = torch.where(torch.arange(N // 2) % 3 == 0, targets[: N // 2], -100)
    exact = with_grads(lambda c: plain(e, c, targets), c)
    own = (slice(0, N // 2), slice(N // 2, N), slice(0, 0))[rank]
    for impl in ("fused", "tiles", "plain"):
        told = partial(cut_cross_entropy, targets=targets[own], impl=impl, data_group=dist.group.WORLD)
        for part, whole in zip(with_grads(partial(told, e[own]), c), exact, strict=True):
            dist.all_reduce(part)
            torch.testing.assert_close(part / world_size, whole, rtol=1e-12, atol=1e-12)


def test_mean_over_the_tokens_of_all_ranks() -> None:
    """Ranks have unequal numbers of tokens, and the last one none."""
    run_workers(over_unequal_data, 3)


@pytest.mark.parametrize("found", [V, -5, 99999])
def test_refuses_targets_outside_of_the_vocabulary(found: int) -> None:
    e, c, _, targets = problem()
    targets[1] = found
    for impl in ("auto", "fused", "tiles", "plain", *PRESETS):
        with pytest.raises(ConfigError, match=f"target {found}: the vocabulary has ids from 0 to {V - 1}; nearest"):
            cut_cross_entropy(e, c, targets, impl=impl)
    strips = [nn.Linear(D, V - 100, dtype=e.dtype), nn.Linear(D, 100, dtype=e.dtype)]
    with pytest.raises(ConfigError, match=f"target {found}: the vocabulary has ids from 0 to {V - 1}; nearest"):
        strip_cross_entropy(e, strips, targets)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="before torch 2.13")
def test_torchs_own() -> None:
    e, c, bias, targets = problem()
    found = with_grads(lambda e, c, b: cut_cross_entropy(e, c, targets, bias=b, impl="torch"), e, c, bias)
    exact = with_grads(lambda e, c, b: plain(e, c, targets, bias=b), e, c, bias)
    for own, true in zip(found, exact, strict=True):
        torch.testing.assert_close(own, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"impl": "tile"}, "did you mean 'tiles'"),
        ({"impl": "fused", "filter_c": "drop"}, "does not support filters; nearest: impl 'tiles'"),
        ({"filter_e": "biased"}, "no such filter"),
        ({"softcap": 0.0}, "must be a number above 0"),
        *(({"softcap": wrong}, "must be a number above 0; nearest: None") for wrong in (math.nan, "x", math.inf)),
        *(({"z_loss": wrong}, "must be a number of at least 0; nearest: 0") for wrong in (math.nan, "a", None, -1)),
        *(({name: None}, f"{name} None: no such choice") for name in ("reduction", "accumulation", "impl")),
        ({"impl": "cce", "accumulation": "kahan"}, "has its own accumulation"),
        ({"impl": "torch", "softcap": 1.0}, "nearest: impl 'fused'"),
        ({"shift": -1}, "must be from 0 to the length of a sequence; nearest: 0"),
        ({"shift": 99}, "nearest: 67, the usual: 1"),
        ({"shift": 1.6}, "shift 1.6: must be an integer; nearest: 2"),
        ({"ignore_index": None}, "ignore_index None: must be an integer; nearest: -100"),
        ({"reduction": "sum", "data_group": object()}, "data_group is for a mean alone"),
    ],
)
def test_refuses(options: dict[str, Any], words: str) -> None:
    e, c, _, targets = problem()
    with pytest.raises(ConfigError, match=words):
        cut_cross_entropy(e, c, targets, **options)


def test_a_second_backward_gives_the_same() -> None:
    e, c, _, targets = problem()
    loss = cut_cross_entropy(e, c.requires_grad_(), targets)
    once, twice = (torch.autograd.grad(loss, c, torch.tensor(2.0).double(), retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, twice) and torch.equal(once, 2 * torch.autograd.grad(loss, c)[0])


def test_presets_are_known() -> None:
    e, c, _, targets = problem(torch.float32)
    losses = {name: float(cut_cross_entropy(e, c, targets, impl=name)) for name in PRESETS}
    assert max(losses.values()) == pytest.approx(min(losses.values()), rel=1e-6)
