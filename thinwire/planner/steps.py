"""Plans of long steps of a pipeline, and messages and memory of a step that do not grow with its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from thinwire.cost import Network
from thinwire.errors import ConfigError
from thinwire.methods.pipeline import Costs, Plan
from thinwire.methods.pipeline.cut import SPREAD
from thinwire.methods.pipeline.options import FITTED, Pipeline
from thinwire.methods.pipeline.recompute import fastest_within, mode_of
from thinwire.methods.pipeline.recover import NONE, neighbours
from thinwire.models import Llama

# Micro-batches of a simulated step at most, unless more may be in flight: from there on each one more costs the same.
LONGEST = 64


@dataclass(frozen=True)
class Steps:
    """The plans of steps of a pipeline with these costs."""

    options: Pipeline
    stages: int
    costs: Costs
    links: Network
    _made: dict[int, Plan] = field(default_factory=dict)

    def of(self, num: int) -> Plan:
        """The plan of so many micro-batches. Raises ConfigError for a number that the order does not take."""
        if num not in self._made:
            self._made[num] = self.options.plan_of(self.stages, num, self.costs, self.links)
        return self._made[num]

    @property
    def most(self) -> int:
        """Micro-batches of a simulated step at most. Twice those in flight show what a fitted order keeps."""
        return max(LONGEST, 2 * (self.options.in_flight or 2 * self.stages))

    def whole(self, num: int) -> Plan:
        """The plan whose stages keep as much as those of a step of `num`: of an order that is not fitted, its own."""
        return self.of(min(num, self.most) if self.options.plan == FITTED else num)

    def mode(self, num: int, memory: Sequence[float] | None) -> Literal["never", "except-last", "always"]:
        """What recompute "auto" takes. memory: bytes for the activations of each stage; None: no limit."""
        return mode_of(fastest_within(self.whole(num), self.costs, self.links, memory))

    def shorter(self, num: int) -> tuple[Plan, Plan | None]:
        """The plan to simulate for a step of `num`, and of half as many micro-batches; None: the first is the whole.

        Of numbers that the order takes, the largest.
        """
        if num > self.most and (short := self._largest(self.most)) is not None:
            half = self._largest(short.num_micro_batches // 2)
            if half is not None:
                return short, half
        return self.of(num), None

    def _largest(self, most: int) -> Plan | None:
        for num in range(most, 0, -1):
            with suppress(ConfigError):
                return self.of(num)
        return None


def tied_bytes(model: Llama, options: Pipeline, stages: int, tensor: int) -> int:
    """Bytes of the weight that the first and the last stage share; of tensor ranks each sends its rows, or its part."""
    head, home = model.lm_head.weight, options.home(stages)
    if head is not model.model.embed_tokens.weight or home[-1] == home[0] or options.head == SPREAD:
        return 0
    return -(-model.config.vocab_size * head.shape[1] * head.element_size() // tensor)


def copies_of(parts: Sequence[nn.ModuleDict], options: Pipeline) -> tuple[tuple[int, int, float], ...]:
    """(from, to, bytes) of what the ends have outside of layers, which a neighbour keeps for a recovery."""
    if options.recover == NONE or len(parts) < 2:
        return ()
    outside = [nn.ModuleList(part[name] for name in part if not name.startswith("layers")) for part in parts]
    ends = [set(modules.parameters()) for modules in outside]
    sent = [sum(param.nbytes for param in own - (ends[0] & ends[-1])) for own in ends]
    return tuple((rank, neighbours(rank, len(parts))[0], num) for rank, num in enumerate(sent) if num)
