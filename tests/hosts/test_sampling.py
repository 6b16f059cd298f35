"""WTA-CRS: rows that are kept of activations make an estimate of the gradient of weights without bias."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import thinwire
from tests.workers import run_workers
from thinwire._compat import default_store
from thinwire.checkpoint import Disk, Keep, Saver, Source
from thinwire.codecs.random import uniform
from thinwire.collectives import Communicator
from thinwire.errors import ConfigError
from thinwire.hosts.offload.activations import kept_bytes, recompute
from thinwire.hosts.offload.norms import FLOOR, SeenNorms
from thinwire.hosts.offload.products import ProductRows, SampledProducts
from thinwire.hosts.offload.sampling import RowSampler
from thinwire.hosts.sharded.seeds import Seeds
from thinwire.methods.memory.sampling import chosen, num_certain, num_kept
from thinwire.models import build_model
from thinwire.models.hf import build_hf
from thinwire.tiers import TierMeter

ROWS, KEPT, DRAWS = 200, 60, 2000


def test_how_many_rows_are_certain() -> None:
    shares = torch.tensor([0.5, 0.3, 0.06] + [0.02] * 7, dtype=torch.float64)
    assert num_certain(shares, 4) == 2
    assert num_certain(torch.full((10,), 0.1, dtype=torch.float64), 4) == 0
    assert [num_kept(*given) for given in ((0.3, 4096), (0.3, 20), (0.3, 7), (1.0, 50))] == [1229, 10, 7, 50]


@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_an_estimate_has_no_bias_and_less_variance_than_plain_sampling(spread: float) -> None:
    """Rows whose sizes are log-normal: 2000 draws, against as many rows drawn by their shares alone."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.exp(spread * torch.randn(ROWS, generator=generator))
    h = torch.randn(ROWS, 8, generator=generator) * sizes[:, None]
    dz = torch.randn(ROWS, 6, generator=generator)
    weights, exact = h.norm(dim=1) * dz.norm(dim=1), h.T @ dz
    shares = weights.double() / weights.double().sum()
    plain_index = torch.searchsorted(shares.cumsum(0), uniform(1, 0, DRAWS * KEPT).double()).clamp(max=ROWS - 1)
    estimates: dict[str, list[Tensor]] = {"own": [], "plain": []}
    for draw in range(DRAWS):
        index, scales = chosen(weights, KEPT, draw)
        assert len(index) == len(scales) == KEPT
        estimates["own"].append((h[index] * scales[:, None]).T @ dz[index])
        at = plain_index[draw * KEPT :][:KEPT]
        estimates["plain"].append((h[at] / (KEPT * shares[at, None]).float()).T @ dz[at])
    own, plain = (torch.stack(found) for found in estimates.values())
    errors = [(found - exact).square().sum((1, 2)).mean() for found in (own, plain)]
    # The distance that chance alone leaves in the mean, and half of it more.
    assert float((own.mean(0) - exact).norm()) < 1.5 * float((errors[0] / DRAWS).sqrt())
    certain = num_certain(shares.sort(descending=True).values, KEPT)
    mass = float(shares.sort(descending=True).values[:certain].sum())
    assert (certain == 0) == (spread == 0)
    assert float(errors[0] / errors[1]) < 1.1 * (1 - mass) * KEPT / (KEPT - certain)


def test_rows_without_weight_are_never_kept_and_no_weights_at_all_are_equal() -> None:
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 1.0])
    for seed in range(20):
        index, scales = chosen(weights, 4, seed)
        assert not {0, 2} & set(index[scales > 0].tolist())
    for odd in (torch.zeros(5), torch.tensor([1.0, float("nan"), 1.0, 1.0, 1.0])):
        index, scales = chosen(odd, 3, 0)
        torch.testing.assert_close(scales, torch.full((3,), 5 / 3))
        assert int(index.max()) < 5


class Block(nn.Module):
    """q, k and v of one input, gate and up of another, and layers whose weights are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=bias) for bias in (True, False, False))
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.norm = nn.RMSNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = x + self.q(y) * self.k(y) + self.v(y) + self.base(y)
        z = self.norm(y)
        return y + self.down(torch.tanh(self.gate(z)) * self.up(z))


class Blocks(nn.Module):
    def __init__(self, run: Callable[..., Tensor] = lambda layer, x: layer(x)) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Block() for _ in range(2))
        self.run = run

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        return x


def gradients(model: nn.Module, x: Tensor, **given: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and all gradients."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x, **given)
    y.square().sum().backward()
    assert x.grad is not None
    found = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    return y.detach(), {"input": x.grad, **found}


def test_only_the_gradients_of_weights_are_estimates() -> None:
    """Of two micro-batches and two steps, with recomputation or without; all rows are exact."""
    x = torch.randn(4, 12, 16, generator=torch.Generator().manual_seed(1))
    plain, again = Blocks(), Blocks(lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    y, exact = gradients(plain, x)
    samplers = [RowSampler(model, 0.3) for model in (plain, again)]
    assert samplers[0].num_layers == 14
    seen = []
    for step in range(2):
        for sampler in samplers:
            sampler.seed = lambda step=step: step  # type: ignore[misc]
        for _ in range(2):
            (own, estimates), (_, others) = (gradients(model, x) for model in (plain, again))
            assert torch.equal(own, y) and estimates.keys() == exact.keys()
            for name, gradient in estimates.items():
                assert torch.equal(gradient, others[name]), name
                is_sampled = name.endswith("weight") and "norm" not in name
                assert torch.allclose(gradient, exact[name], rtol=1e-4, atol=1e-4) != is_sampled, name
            seen.append(estimates["layers.0.q.weight"])
    assert len({float(each.sum()) for each in seen}) == 4, "each micro-batch of each step draws anew"
    with torch.no_grad():
        assert torch.equal(plain(x), y)
    whole = Blocks()
    RowSampler(whole, 1.0)
    for name, gradient in gradients(whole, x)[1].items():
        torch.testing.assert_close(gradient, exact[name], rtol=1e-5, atol=1e-5, msg=name)


def single(bias: bool = True) -> tuple[nn.Module, nn.Linear]:
    """A model of one linear layer."""
    model = nn.Sequential(nn.ModuleList([nn.Linear(16, 6, bias=bias)]))
    model.forward = lambda x: model[0][0](x)  # type: ignore[method-assign, index]
    layer = model[0][0]  # type: ignore[index]
    assert isinstance(layer, nn.Linear)
    return model, layer


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_what_is_exact_has_the_bits_of_a_plain_layer(ratio: float) -> None:
    """Outputs, gradients of inputs and biases; with all rows, of weights too."""
    x = torch.randn(3, 40, 16, generator=torch.Generator().manual_seed(1))
    model, _ = single()
    y, exact = gradients(model, x)
    RowSampler(model, ratio)
    own, found = gradients(model, x)
    assert torch.equal(own, y)
    for name, gradient in found.items():
        assert torch.equal(gradient, exact[name]) == (ratio == 1.0 or "weight" not in name), name


def test_ranks_draw_apart_and_their_mean_has_no_bias() -> None:
    """Four ranks with the same rows: their mean has a quarter of one rank's variance, and the gradient as its mean."""
    # Of the layers' weights.
    torch.manual_seed(0)
    x = torch.randn(120, 16, generator=torch.Generator().manual_seed(1)).exp()
    ranks = [single(bias=False) for _ in range(4)]
    for _, layer in ranks:
        layer.load_state_dict(ranks[0][1].state_dict())
    exact, draws = gradients(ranks[0][0], x)[1]["0.0.weight"], 150
    samplers = [RowSampler(model, 0.2) for model, _ in ranks]
    found = torch.empty(draws, 4, *exact.shape)
    for draw in range(draws):
        for rank, (model, _) in enumerate(ranks):
            samplers[rank].seed = partial(Seeds(7, draw).activations, rank)
            found[draw, rank] = gradients(model, x)[1]["0.0.weight"]
    alone, mean = ((each - exact).square().sum((-2, -1)).mean() for each in (found, found.mean(1)))
    assert 0.15 < float(mean / alone) < 0.4
    assert float((found.mean((0, 1)) - exact).norm()) < 1.5 * float((mean / draws).sqrt())


def accuracy(seed: int, ratio: float | None) -> float:
    """Of a small classifier of four groups of points, on points that it has not seen."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, 16, generator=generator)

    def points(num: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, 4, (num,), generator=generator)
        return centres[labels] + 0.8 * torch.randn(num, 16, generator=generator), labels

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first, last = nn.Linear(16, 32), nn.Linear(32, 4)
    model = nn.Sequential(nn.ModuleList([first, last]))
    model.forward = lambda x: last(torch.tanh(first(x)))  # type: ignore[method-assign]
    if ratio is not None:
        sampler = RowSampler(model, ratio)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(60):
        if ratio is not None:
            sampler.seed = lambda step=step: step  # type: ignore[misc]
        x, labels = points(128)
        nn.functional.cross_entropy(model(x), labels).backward()
        adamw.step()
        adamw.zero_grad()
    x, labels = points(2000)
    with torch.no_grad():
        return float((model(x).argmax(1) == labels).float().mean())


def test_a_classifier_learns_as_well_from_a_sample() -> None:
    sampled, exact = (sum(accuracy(seed, ratio) for seed in range(5)) / 5 for ratio in (0.3, None))
    assert exact > 0.8 and sampled > exact - 0.01


def test_norms_that_say_nothing_leave_rows_their_own() -> None:
    """Gradients that were all zero count as never seen; sequences of another length begin anew."""
    seen, numbers = SeenNorms(Communicator(), None, TierMeter()), torch.tensor([4, 1])
    seen.begin(numbers)
    for length, norms in ((5, torch.zeros(10)), (5, torch.ones(10)), (3, torch.ones(6))):
        seen.weights("layer", 2 * length)
        seen.noting("layer")(norms)
        seen.begin(numbers)
        found = seen.weights("layer", 2 * length)
        assert (found is None) == (not norms.any())
        assert found is None or torch.equal(found, found[:1].expand(2 * length))
    assert seen.weights("layer", 10) is None
    model, _ = single()
    RowSampler(model, 0.3, seen)
    assert all(each.isfinite().all() for each in gradients(model, torch.zeros(2, 5, 16))[1].values())


def test_inputs_that_layers_share_are_kept_once() -> None:
    """Of 40 rows 12 of each distinct input: those of q, k and v, of gate and up, and of down."""
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))

    class Six(Block):
        def forward(self, x: Tensor) -> Tensor:
            found = torch.cat([self.q(x), self.k(x), self.v(x)], dim=1)
            inner = torch.cat([self.gate(x + 1), self.up(x + 2)], dim=1)
            return torch.cat([found, inner, self.down(torch.zeros(40, 24))], dim=1)

    model = nn.Sequential(nn.ModuleList([Six()]))
    model.forward = lambda x: model[0][0](x)  # type: ignore[method-assign, index]
    whole = kept_bytes(model, x)
    RowSampler(model, 0.3)
    assert whole == 4 * 40 * (16 + 16 + 16 + 24)
    assert kept_bytes(model, x) == 12 * (4 * (16 + 16 + 16 + 24) + 4 * 8)


def test_a_transposed_linear_layer_of_transformers_is_sampled_too() -> None:
    """All rows are kept as they are, so that gradients are exact; of 40 rows 12 are kept of what it is given."""
    transformers = pytest.importorskip("transformers")
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
    models = []
    for ratio in (None, 1.0, 0.3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.ModuleList([transformers.pytorch_utils.Conv1D(24, 16)]))
        model.forward = partial(nn.Module.__call__, model.get_submodule("0.0"))  # type: ignore[method-assign]
        if ratio is not None:
            assert RowSampler(model, ratio).num_layers == 1
        models.append(model)
    plain, whole, part = models
    found = []
    for model in (plain, whole):
        model(x).square().sum().backward()
        found.append([param.grad for param in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert kept_bytes(part, x) == 12 * (4 * 16 + 8)


def test_what_a_mask_leaves_out_is_neither_counted_nor_kept() -> None:
    """A third of the rows are padding: the estimate has no bias for what is left, of which 0.5 is kept."""
    x = torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 30)
    mask[:, 20:] = 0
    model = Blocks()
    sampler = RowSampler(model, 0.5)
    gradients(model, x, attention_mask=mask)
    kept = sampler._last
    assert kept is not None and len(kept.places) == 20 and not mask.flatten()[kept.places].eq(0).any()


def test_slices_of_a_batch_have_the_masks_and_norms_of_their_own_sequences() -> None:
    """Five sequences in two unequal slices, of which each has another mask and another gradient."""
    x = torch.randn(5, 12, 16, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 6).view(5, 1, 1)
    mask = (torch.arange(12) < torch.tensor([12, 3, 6, 9, 12]).view(5, 1)).float()
    found, weights = [], []
    for slices in (1, 2):
        model, seen = Blocks(), SeenNorms(Communicator(), None, TierMeter())
        sampler = RowSampler(model, 0.5, seen)
        recompute(model, slices)
        for _ in range(2):
            seen.begin(torch.arange(5))
            weights.append(gradients(model, x, attention_mask=mask)[0])
            kept = sampler._last
        assert kept is not None
        # The layer is computed again slice by slice; the first three sequences come last.
        own = mask if slices == 1 else mask[:3]
        assert not own.flatten()[kept.places].eq(0).any() and len(kept.places) == num_kept(0.5, int(own.sum()))
        found.append({group: norms.view(5, 12) for group, norms in seen._new.items()})
    assert found[0].keys() == found[1].keys()
    for group, norms in found[0].items():
        torch.testing.assert_close(found[1][group], norms)


def test_slices_have_draws_of_their_own_which_a_layer_that_is_computed_again_repeats() -> None:
    """Two slices with the same values keep other rows; each keeps in its backward what it kept in the forward."""
    model, drawn = Blocks(), list[tuple[int, ...]]()

    def noted(weights: torch.Tensor, num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn.append((seed, *weights.shape))
        return chosen(weights, num, seed)

    RowSampler(model, 0.5, chooses=noted)
    recompute(model, 2)
    gradients(model, torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(1)))
    times = Counter(drawn)
    # Of each layer two slices, in forward and in backward.
    assert set(times.values()) == {2} and len(times) % 2 == 0 and len({seed for seed, *_ in times}) == len(times)


def seen_twice(rank: int, world_size: int, folder: str | None) -> list[Any]:
    """Sequences 0 to 5, three on each rank; then those of the other rank, in another order, and one that is new."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        tokens = torch.randn(7, 12, 16)
    model = Blocks()
    residency = thinwire.Residency(store=folder, optimizer="memory", activations="sample:0.3")
    adamw = torch.optim.AdamW(model.parameters())
    wrapped, optimizer = thinwire.zero(model, adamw, thinwire.Zero(), residency=residency, announce=False)
    told = []
    for numbers in ([[0, 1, 2], [3, 4, 5]], [[5, 6, 3], [2, 0, 1]]):
        own = torch.tensor(numbers[rank])
        optimizer.note_sequences(own)
        residence = optimizer._residence
        assert residence is not None and residence.sampler is not None and residence.sampler.seen is not None
        seen = residence.sampler.seen
        told.append(seen.weights("layers.1.gate", 36))
        wrapped(tokens[own]).square().sum().backward()
        told.append(dict(seen._new)[seen._groups["layers.1.gate"]].view(3, 12))
        optimizer.step()
    optimizer.close()
    return told


@pytest.mark.parametrize("on_disk", [True, False])
def test_norms_of_gradients_follow_their_sequences_to_other_ranks(tmp_path: Path, on_disk: bool) -> None:
    one, other = run_workers(seen_twice, 2, str(tmp_path / "store") if on_disk else None)
    assert one[0] is None and other[0] is None, "nothing has been seen"
    before = torch.cat([one[1], other[1]]).bfloat16().float()
    mean = before[[5, 3]].mean()
    expected = torch.stack([before[5] + FLOOR * mean, mean.expand(12), before[3] + FLOOR * mean])
    torch.testing.assert_close(one[2].view(3, 12), expected)
    expected = before[[2, 0, 1]] + FLOOR * before[:3].mean()
    torch.testing.assert_close(other[2].view(3, 12), expected)


ORDER = ([[0, 1, 2], [3, 4, 5]], [[5, 3, 6], [2, 0, 1]], [[4, 1, 0], [6, 2, 5]], [[0, 6, 1], [5, 4, 3]])


class Epochs:
    """One rank of a training in which sequences come again."""

    def __init__(self, rank: int, world_size: int, store: Path | None, *, durable: bool = False) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.tokens = torch.randn(7, 12, 16)
        self.rank, self.model = rank, Blocks()
        residency = thinwire.Residency(
            store=None if store is None else str(store),
            optimizer="disk" if durable else "memory",
            weights="memory",
            activations="sample:0.3",
            durable=durable,
        )
        adamw = torch.optim.AdamW(self.model.parameters())
        self.wrapped, self.optimizer = thinwire.zero(
            self.model, adamw, thinwire.Zero(), residency=residency, announce=False
        )

    def steps(self, numbers: Sequence[Sequence[Sequence[int]]]) -> list[Tensor]:
        """The weights after these steps."""
        for each in numbers:
            own = torch.tensor(each[self.rank])
            self.optimizer.note_sequences(own)
            self.wrapped(self.tokens[own]).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.optimizer.journal is not None:
                self.optimizer.commit({})
        return [param.detach().clone() for param in self.model.parameters()]

    def known(self, numbers: Sequence[int]) -> dict[int, Tensor]:
        """What is known of these sequences; without seeing them."""
        self.optimizer.note_sequences(torch.tensor(numbers))
        residence = self.optimizer._residence
        assert residence is not None and residence.seen is not None and residence.seen._known is not None
        return dict(zip(numbers, residence.seen._known.clone(), strict=True))


def broken_off(rank: int, world_size: int, folder: Path, on_disk: bool) -> tuple[list[bool], dict[int, Tensor]]:
    """Whether runs that go on are bit for bit as the one that was not broken off; what that one knows in the middle."""
    store = folder / "store" if on_disk else None
    whole = Epochs(rank, world_size, store)
    whole.steps(ORDER[:2])
    comm = whole.optimizer.comm

    def gather(number: int) -> list[int]:
        return [int(n) for n in comm.wait(comm.all_gather_exact(torch.tensor([number])))]

    saver = Saver(folder, Disk.find(folder, rank, gather), default_store(), Keep(), 60.0)
    saver.save(2, whole.optimizer.snapshot(), loss=None, about={})
    saver.close()
    assert not saver.problems()
    held = whole.optimizer.state_dict()
    expected, same = whole.steps(ORDER[2:]), []
    for way in ("checkpoint", "state_dict", "nothing"):
        again = Epochs(rank, world_size, store)
        if way == "state_dict":
            again.optimizer.load_state_dict(held)
        else:
            source = Source(folder / "step-00000002", rank)
            if way == "nothing":
                source.common.pop("norms")
            again.optimizer.restore(source)
        found = again.steps(ORDER[2:])
        same.append(all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)))
        again.optimizer.close()
    for numbers in (ORDER[:2], ORDER[2:]):
        kept = Epochs(rank, world_size, folder / "durable", durable=True)
        found = kept.steps(numbers)
        kept.optimizer.close()
    same.append(all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)))
    # The run itself, behind a forward of a step, back to where its state was taken.
    whole.optimizer.load_state_dict(held)
    whole.model(whole.tokens[:3])
    whole.optimizer.load_state_dict(held)
    found = whole.steps(ORDER[2:])
    same.append(all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)))
    whole.optimizer.close()
    reader = Epochs(rank, world_size, store)
    reader.optimizer.restore(Source(folder / "step-00000002", rank))
    known = reader.known([[0, 1, 2, 3], [4, 5, 6, 0]][rank])
    reader.optimizer.close()
    return same, known


def on_other_ranks(rank: int, world_size: int, folder: Path) -> tuple[dict[int, Tensor], list[Any]]:
    run = Epochs(rank, world_size, None)
    source = Source(folder / "step-00000002", rank)
    run.optimizer.restore(source)
    known = run.known([number % 7 for number in range(3 * rank, 3 * rank + 7)])
    run.optimizer.close()
    return known, source.report()


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_run_that_goes_on_draws_the_same_rows(tmp_path: Path, on_disk: bool) -> None:
    told = run_workers(broken_off, 2, tmp_path, on_disk)
    assert [same for same, _ in told] == [[True, True, False, True, True]] * 2, "without norms other rows are drawn"
    known = told[0][1] | told[1][1]
    assert sorted(known) == list(range(7)) and all(each.any() for each in known.values())
    for world_size in (1, 3):
        for found, report in run_workers(on_other_ranks, world_size, tmp_path):
            assert all(torch.equal(found[number], known[number]) for number in range(7))
            assert ("resume: norms of seen sequences", "carried") in [row[:2] for row in report]
    untouched = Source(tmp_path / "step-00000002", 0).report()
    assert ("resume: norms of seen sequences", "dropped") in [row[:2] for row in untouched]


@pytest.mark.parametrize(
    ("activations", "message"),
    [
        ("sample:0", "activations 'sample:0': the share must be above 0 and at most 1; nearest: 0.1"),
        ("sample:1.5", "nearest: 1"),
        ("sample", "must be one of auto, keep, recompute, recompute:disk, offload, sample:0.3, recompute\\+sample:0.3"),
        ("offload+sample:0.3", "must be one of auto"),
        ("recompute+sample:3", "nearest: 1"),
        ("recomput", "did you mean 'recompute'"),
    ],
)
def test_options_are_checked(activations: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        thinwire.Residency(activations=activations)


def test_each_matrix_of_a_stack_has_a_sample_of_its_own() -> None:
    """Of one matrix the sample is that of the matrix alone; a matrix without weights, or with one, gets no NaN."""
    weights = torch.rand(4, 50, generator=torch.Generator().manual_seed(5)).pow(4)
    weights[1], weights[2, 1:] = 0, 0
    index, scales = chosen(weights, 12, 3)
    assert index.shape == scales.shape == (4, 12) and bool(torch.isfinite(scales).all())
    for one, many in zip(chosen(weights[0], 12, 3), (index[0], scales[0]), strict=True):
        assert torch.equal(one, many)
    # Without weights all count alike; the only one with weight counts once.
    assert float(scales[1].sum()) == pytest.approx(50) and float(scales[2].sum()) == 1
    assert int(index[2, 0]) == 0 and not torch.equal(index[0], index[3])


@pytest.mark.parametrize("adds", [False, True])
def test_the_product_of_two_activations_has_no_bias(adds: bool) -> None:
    """A B [2, 3 heads] and its gradient by A are exact; the mean of 400 gradients by B is what chance leaves of it."""
    generator = torch.Generator().manual_seed(6)
    a, b = (torch.randn(2, 3, *shape, generator=generator).requires_grad_() for shape in ((40, 5), (5, 7)))
    added, grad = torch.randn(6, 40, 7, generator=generator), torch.randn(2, 3, 40, 7, generator=generator)

    def gradients_of(seed: int | None) -> tuple[Tensor, Tensor, Tensor]:
        def keep(x: Tensor, number: int) -> ProductRows | None:
            assert number == 1
            if seed is None:
                return None
            index, scales = chosen(x.norm(dim=-1), 12, seed)
            rows = x.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1])) * scales.unsqueeze(-1)
            return ProductRows(rows, index)

        with SampledProducts(keep):
            flat = a.flatten(0, 1), b.flatten(0, 1)
            product = torch.baddbmm(added, *flat, alpha=0.3).view(grad.shape) if adds else a @ b
        by_a, by_b = torch.autograd.grad(product, (a, b), grad)
        return product.detach(), by_a, by_b

    product, by_a, by_b = gradients_of(None)
    found = [gradients_of(seed) for seed in range(400)]
    assert all(torch.equal(own, product) and torch.equal(exact, by_a) for own, exact, _ in found)
    errors = torch.stack([estimate - by_b for _, _, estimate in found])
    variance = errors.square().sum((1, 2, 3, 4)).mean()
    assert 0 < float(errors.mean(0).norm()) < 1.5 * float((variance / len(found)).sqrt())


class Heads(nn.Module):
    """Attention of four heads with 16 tokens each in bf16, as transformers' eager one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, 8)).transpose(1, 2).bfloat16() for each in (self.q, self.k, self.v))
        p = torch.matmul(q, k.transpose(2, 3)).softmax(-1, dtype=torch.float32).to(v.dtype)
        return x + self.out(torch.matmul(p, v).transpose(1, 2).flatten(-2).float())


class Attends(nn.Module):
    def __init__(self, run: Callable[..., Tensor] = lambda layer, x: layer(x)) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Heads() for _ in range(2))
        self.run = run

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        return x


def test_attention_keeps_rows_of_its_factors() -> None:
    """Outputs are exact; gradients of the upper layer's q too, and of k and v not. Recomputation draws the same."""
    x = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(1))
    plain, again = Attends(), Attends(lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    y, exact = gradients(plain, x)
    before = kept_bytes(plain, x)
    samplers = [RowSampler(model, 0.3) for model in (plain, again)]
    (own, estimates), (_, others) = (gradients(model, x) for model in (plain, again))
    assert torch.equal(own, y)
    for name, gradient in estimates.items():
        assert torch.equal(gradient, others[name]), name
    differs = {name for name in exact if not torch.equal(exact[name], estimates[name])}
    assert "layers.1.q.bias" not in differs and {"layers.1.k.bias", "layers.1.v.bias", "input"} <= differs
    # Of each layer's q and p, 12 of 40 rows stay, of 8 heads.
    saved = before - kept_bytes(plain, x)
    of_linears = 2 * (3 * (80 - 24) * 32 * 4 - 3 * 24 * 8)
    assert saved > of_linears / 3 + 2 * 8 * ((40 - 12) * (8 + 40) * 2 - 2 * 12 * 8)
    for sampler in samplers:
        sampler.seed = lambda: 1
    assert not torch.equal(gradients(plain, x)[1]["layers.1.v.bias"], estimates["layers.1.v.bias"])
    assert samplers[0].attention_row[1] == "0.3 of the rows of q and p, for each head"


def test_padding_is_not_kept_of_attention() -> None:
    """The gradient of v is unchanged by what stands at padded places."""
    x, mask = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(1)), torch.ones(2, 40)
    mask[:, 20:] = 0
    model, asked = Attends(), list[tuple[Tensor, int]]()

    def watch(weights: Tensor, num: int, seed: int) -> tuple[Tensor, Tensor]:
        asked.append((weights, num))
        return chosen(weights, num, seed)

    RowSampler(model, 0.6, chooses=watch)
    gradients(model, x, attention_mask=mask)
    of_products = [(weights, num) for weights, num in asked if weights.dim() == 3]
    assert len(of_products) == 4
    assert all(num == 12 and not weights[..., 20:].any() and weights[..., :20].all() for weights, num in of_products)


def test_products_of_fused_attention_are_not_sampled(tmp_path: Path) -> None:
    """Ours by the length of sequences, models of transformers by their attention; both say so."""
    transformers = pytest.importorskip("transformers")
    short, long = (build_model("tiny", vocab_size=64, seq_len=length) for length in (32, 1024))
    assert RowSampler(short, 0.3).attention_row[1].startswith("0.3 of the rows")
    assert RowSampler(long, 0.3).attention_row[2] == "sequences of more than 512 tokens take a fused kernel"
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    tokens = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(2))
    for kind in ("sdpa", "eager"):
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"attn_implementation": kind}))
        models = []
        for _ in range(2):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                models.append(build_hf(str(tmp_path), 64, 64, 0, {}))
        asked: list[int] = []

        def watch(weights: Tensor, num: int, seed: int, asked: list[int] = asked) -> tuple[Tensor, Tensor]:
            asked.append(weights.dim())
            return chosen(weights, num, seed)

        sampler = RowSampler(models[1], 0.3, chooses=watch)
        losses = [model(tokens, tokens) for model in models]
        assert torch.equal(*losses)
        losses[1].backward()
        # p in fp32 stays whole with its softmax.
        assert [dim for dim in asked if dim > 1] == ([3] if kind == "eager" else [])
        assert ("is fused" in sampler.attention_row[2]) == (kind == "sdpa")
