"""L-GreCo: chooses a setting per parameter, so that bytes are fewest and the error stays within a uniform setting's."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.codecs import Codec
from thinwire.collectives.gather import broadcast_
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.errors import ConfigError
from thinwire.methods.ddp import DDPMethod
from thinwire.methods.interface import PlannedByRun
from thinwire.methods.options import check_types
from thinwire.methods.plannable import Plannable, Tunable
from thinwire.methods.reduction import OPERATION, Bucket, Reduction, Step
from thinwire.state.memory import Merge, Place, State
from thinwire.table import Row

log = logging.getLogger("thinwire")
NUM_BINS = 10_000


def knapsack(
    errors: Sequence[Sequence[float]],
    sizes: Sequence[Sequence[int]],
    uniform: Sequence[int],
    *,
    alpha: float = 1.0,
    num_bins: int = NUM_BINS,
) -> list[int]:
    """Choose a candidate c_l for each layer l that minimises sum_l sizes[l][c_l] within an error bound.

    The bound is sum_l errors[l][c_l] <= E = alpha sum_l errors[l][uniform[l]]. Errors are counted in units of
    E / num_bins, rounded up, so that the bound holds for the errors themselves. Then
    D[l][b] = min_c D[l-1][b - bin(errors[l][c])] + sizes[l][c] is the least size of the first l layers within b units,
    in O(layers * candidates * num_bins). If rounding up leaves nothing smaller than `uniform`, `uniform` is returned.
    So the result is never larger than `uniform`, and for alpha >= 1 it is always within the bound.

    Args:
        errors: norms, >= 0, a list for each layer; layers may differ in their number of candidates.
        sizes: bytes, in the same form.
        uniform: candidate of the uniform choice, for each layer.

    Raises ValueError for errors that are not finite.
    Source: Alimohammadi et al., "L-GreCo" (MLSys 2024), algorithm 1.
    """
    budget = alpha * math.fsum(row[choice] for row, choice in zip(errors, uniform, strict=True))
    if not math.isfinite(budget + math.fsum(math.fsum(row) for row in errors)):
        raise ValueError("a compression error is not finite")
    least = np.zeros(num_bins + 1)
    picked = np.full((len(errors), num_bins + 1), -1, np.int16)
    for row_errors, row_sizes, row_picked in zip(errors, sizes, picked, strict=True):
        before, least = least, np.full(num_bins + 1, np.inf)
        for choice, (error, size) in enumerate(zip(row_errors, row_sizes, strict=True)):
            if (need := _bins(error, budget, num_bins)) <= num_bins:
                total = before[: num_bins + 1 - need] + size
                is_less = total < least[need:]
                least[need:][is_less] = total[is_less]
                row_picked[need:][is_less] = choice
    if not least[-1] < sum(row[choice] for row, choice in zip(sizes, uniform, strict=True)):
        return list(uniform)
    chosen, left = [], num_bins
    for row_errors, row_picked in zip(reversed(errors), picked[::-1], strict=True):
        chosen.append(int(row_picked[left]))
        left -= _bins(row_errors[chosen[-1]], budget, num_bins)
    return chosen[::-1]


def _bins(error: float, budget: float, num_bins: int) -> int:
    """Units of the budget that an error takes, rounded up; more than num_bins if it does not fit."""
    if error > budget:
        return num_bins + 1
    return math.ceil(error / budget * num_bins) if error else 0


@dataclass(frozen=True)
class LGreCo(DDPMethod):
    """One setting per parameter, planned again at intervals, instead of one for all.

    The base's own setting is the uniform one. Rank 0 measures and chooses, and sends its choice to the others. Where
    ranks share a node and the base compresses the node's mean, rank 0 measures on its slice of that mean. Measuring
    takes as long as compressing each gradient once for every candidate. While it samples, rank 0 holds the sum of the
    samples, 4 bytes per element.

    Raises ConfigError for a base that has nothing to plan, for alpha or span below 1, and for times that do not fit.
    Source: Alimohammadi et al., "L-GreCo: Layerwise-Adaptive Gradient Compression" (MLSys 2024), section 3.
    """

    base: Plannable
    """The method that compresses, which is planned."""
    alpha: float = 1.0
    """Error that a plan may make, in multiples of the uniform setting's error; at least 1."""
    span: float = 4.0
    """Candidates reach from the uniform setting / span to the uniform setting * span; at least 1."""
    start: int | None = None
    """Steps before the first plan; by default 20, or the least: what the base takes to settle and to be sampled."""
    every: int = 100
    """Steps from one plan to the next; at least the number of samples."""
    samples: int = 10
    """Steps before a plan whose gradients, error memory included, are added up to measure on; at least 1."""

    def __post_init__(self) -> None:
        if not isinstance(self.base, Plannable):
            raise ConfigError(
                f"lgreco can't plan {getattr(self.base, 'name', self.base)!r}: it must offer candidates, errors and "
                "sizes, as PowerSGD, EFTopK, EFInteger and DGC do"
            )
        check_types(self)
        self._check_least(alpha=1, span=1, samples=1, every=self.samples)
        if not isinstance(self.base, PlannedByRun):
            self._check_start()

    def _check_least(self, **lowest: int) -> None:
        for option, least in lowest.items():
            value = getattr(self, option)
            if not least <= value < math.inf:
                raise ConfigError(f"{option} {value} of {self.name}: must be at least {least}; nearest: {least}")

    def _check_start(self) -> None:
        """Raise ConfigError if the first plan comes before the base has settled, once that step is known."""
        if self.start is not None:
            self._check_least(start=self._earliest_plan)

    @property
    def _earliest_plan(self) -> int:
        return self.base.settled_after + self.samples

    @property
    def name(self) -> str:
        return f"lgreco-{self.base.name}"

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return self.base.codecs

    @property
    def single_bucket(self) -> bool:
        return self.base.single_bucket

    @property
    def find_unused_parameters(self) -> bool:
        return self.base.find_unused_parameters

    @property
    def whole_step(self) -> bool:
        return self.base.whole_step

    def sample(self) -> Sequence[Tensor]:
        return self.base.sample()

    @property
    def optimizers(self) -> tuple[str, ...]:
        return self.base.optimizers

    @property
    def optimizers_reason(self) -> str:
        return self.base.optimizers_reason

    @property
    def settled_after(self) -> int:
        """Step of the first plan."""
        return max(20, self._earliest_plan) if self.start is None else self.start

    def for_run(self, num_steps: int, num_warmup_steps: int) -> LGreCo:
        """The same method with its base as in such a run; see PlannedByRun."""
        if not isinstance(self.base, PlannedByRun):
            return self
        base = self.base.for_run(num_steps, num_warmup_steps)
        assert isinstance(base, Plannable)
        planned = replace(self, base=base)
        planned._check_start()
        return planned

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._check_start()
        self.base.check(model, optimizer)

    def bind(
        self,
        reduction: Reduction,
        trained: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        assert isinstance(reduction, LGreCoMean)
        self.base.bind(reduction.base, trained, optimizer)

    def reduction(self, place: Place, seed: int) -> LGreCoMean:
        return LGreCoMean(self, place, self.base.reduction(place, seed))

    def steps_to_plan(self, step: int) -> int:
        """Steps until the next plan; 0 for a step that ends with a plan. The first step is number 0."""
        ahead = self.settled_after - 1 - step
        return ahead if ahead >= 0 else ahead % self.every


@dataclass(frozen=True)
class ChosenSettings:
    """The settings chosen after a step, and their errors, all on the same samples.

    Args:
        settings: by parameter.
        error: the sum of norms over the parameters.
        uniform_error: the same with the uniform setting.
        previous_error: the same with the settings in effect until then.
    """

    step: int
    settings: dict[str, float]
    error: float
    uniform_error: float
    previous_error: float


class LGreCoMean(Reduction):
    """The base's reduction with planned settings. Rank 0 keeps the sum of compressed values since sampling began."""

    def __init__(self, method: LGreCo, place: Place, base: Tunable) -> None:
        super().__init__(place)
        self.method = method
        self.base = base
        self.is_metered = base.is_metered
        self.plan: ChosenSettings | None = None
        self.state.add_part("base", base.state)
        # Sums over different numbers of steps can't be compared.
        samples = State(place, together=True)
        self.samples = samples.add("sum", Merge.SAME, self._sampled, row="sampled gradients")
        self.state.add_part("samples", samples)
        self.state.add_attributes(self, "saved_plan")

    def _sampled(self, name: str, shape: torch.Size) -> torch.Size | None:
        return shape if self.method.base.candidates(shape, self.method.span) else None

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        steps_left = self.method.steps_to_plan(step.number)
        self.base.watch = self._sample if link.rank == 0 and steps_left < self.method.samples else None
        yield from self.base.run(link, bucket, step)
        # The jobs of all other buckets have begun and have read their settings.
        if bucket.last and steps_left == 0:
            yield from self._renew(link, step.number)

    def _sample(self, name: str, x: Tensor) -> None:
        """Add up the values that the base is about to compress."""
        if self._sampled(name, self.place.shapes[name]) is None:
            return
        held = self.samples.get(name)
        self.samples[name] = x.clone() if held is None else held.add_(x)

    def _renew(self, link: Link, number: int) -> Rounds[None]:
        """Plan on rank 0, send the plan to all ranks, and switch to it. Without finite samples nothing changes."""
        options = self._options()
        words = torch.full((len(options) + 3,), math.nan, dtype=torch.float64)
        if link.rank == 0:
            with link.timed("encode_s", OPERATION):
                self._choose(options, words)
        self.samples.replace({})
        yield from broadcast_(link, words, 0)
        settings, totals = words[:-3].tolist(), words[-3:].tolist()
        if options and math.isfinite(totals[0]):
            plan = ChosenSettings(number + 1, dict(zip(options, settings, strict=True)), *totals)
            if link.rank == 0:
                self._report(plan)
            self._switch(plan)
        elif link.rank == 0:
            log.warning("thinwire: step %d: no new plan of %s: no finite gradients", number + 1, self.method.name)

    def _options(self) -> dict[str, list[float]]:
        """Candidates of each parameter that has any, sorted by name, since the order of buckets may change."""
        shapes = self.place.shapes
        found = {name: self.method.base.candidates(shapes[name], self.method.span) for name in sorted(shapes)}
        return {name: candidates for name, candidates in found.items() if candidates}

    def _choose(self, options: Mapping[str, list[float]], words: Tensor) -> None:
        """Fill `words` with a setting per parameter and ChosenSettings' three errors, unless samples are not finite."""
        base = self.method.base
        sums = self.samples.tensors
        if not sums or not all(bool(torch.isfinite(total).all()) for total in sums.values()):
            return
        held = [self.base.settings.get(name, base.uniform) for name in options]
        rows = [base.errors(sums[name], [*options[name], one]) for name, one in zip(options, held, strict=True)]
        errors, previous = [row[:-1] for row in rows], math.fsum(row[-1] for row in rows)
        sizes = [
            [base.size(self.place.shapes[name], one) for one in candidates] for name, candidates in options.items()
        ]
        uniform = [candidates.index(base.uniform) for candidates in options.values()]
        chosen = knapsack(errors, sizes, uniform, alpha=self.method.alpha)
        settings = [candidates[choice] for candidates, choice in zip(options.values(), chosen, strict=True)]
        totals = [math.fsum(row[one] for row, one in zip(errors, choice, strict=True)) for choice in (chosen, uniform)]
        totals.append(previous)
        words.copy_(torch.tensor([*settings, *totals], dtype=torch.float64))

    def _report(self, plan: ChosenSettings) -> None:
        """Log the changes, one line each."""
        before = {name: self.base.settings.get(name, self.method.base.uniform) for name in plan.settings}
        log.warning("thinwire: step %d: %s: %s; %s", plan.step, self.method.name, *self._summary(plan))
        for name, setting in plan.settings.items():
            if setting != before[name]:
                log.info("thinwire: step %d: %s: %g -> %g", plan.step, name, before[name], setting)

    def _summary(self, plan: ChosenSettings) -> tuple[str, str]:
        """Number of gradients that have a setting of their own; bytes and error compared with the uniform setting's."""
        base = self.method.base
        uniform = dict.fromkeys(plan.settings, base.uniform)
        here, there = (
            sum(base.size(self.place.shapes[name], setting) for name, setting in settings.items()) / 1e6
            for settings in (plan.settings, uniform)
        )
        num_changed = sum(setting != base.uniform for setting in plan.settings.values())
        share = plan.error / plan.uniform_error if plan.uniform_error else 0.0
        return (
            f"{num_changed} of {len(uniform)} gradients not at {base.uniform:g}",
            f"{here:.3f} MB in place of {there:.3f} MB at {share:.3f} of its error",
        )

    def _switch(self, plan: ChosenSettings) -> None:
        self.plan = plan
        self.base.settings = dict(plan.settings)

    def sent_bytes(self) -> dict[str, int]:
        return self.base.sent_bytes()

    def rows(self) -> list[Row]:
        method, options = self.method, self._options()
        times = f"after {method.settled_after} steps, then every {method.every}"
        rows = [*self.base.rows(), ("plan", f"for {len(options)} of {len(self.place.shapes)} gradients", times)]
        if self.plan is None:
            return [*rows, ("plan in effect", f"none yet: {method.base.uniform:g} for all", "")]
        changed = {name: one for name, one in self.plan.settings.items() if one != method.base.uniform}
        rows.append((f"plan in effect since step {self.plan.step}", *self._summary(self.plan)))
        return [
            *rows,
            *((f"plan: {name}", f"{one:g}", f"not {method.base.uniform:g}") for name, one in changed.items()),
        ]

    @property
    def saved_plan(self) -> dict[str, Any] | None:
        """The plan in effect, as it is saved."""
        return None if self.plan is None else vars(self.plan) | {"settings": dict(self.plan.settings)}

    @saved_plan.setter
    def saved_plan(self, saved: dict[str, Any] | None) -> None:
        if saved is not None:
            self._switch(ChosenSettings(**saved))
