"""Tutel's dictionary: for each load of the experts, the way that was measured to be the fastest."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from thinwire.cost.links import Links
from thinwire.methods.experts.choice import choose_way, has_parts, layer_streams_s, near_to, ways_of
from thinwire.methods.experts.layout import ExpertPlacement
from thinwire.methods.experts.options import AUTO, MOST_CHUNKS, SAME, ExpertParallel
from thinwire.methods.experts.traffic import Rows, chunks_text
from thinwire.state.agreement import MOST_TOLD

# In place of a way: all ranks measure the links again.
MEASURE = MOST_TOLD
# A bucket of loads: the fourth root of 2 wide.
BUCKETS_OF_TWO = 4
# Ways whose prediction is within NEAR of the fastest are tried. Those that then took up to CLOSE times as long as the
# fastest measured one are tried until each has been ENOUGH times.
NEAR, CLOSE, ENOUGH = 2.0, 1.3, 3
# Of so many steps the median counts. Links whose steps take so much more, or less, are measured again, as long as that
# takes no more than a fiftieth of the seconds of experts.
WINDOW, DRIFT, SHARE = 8, 0.2, 0.02


@dataclass
class Load:
    """What is known of a bucket of loads, by the number of a way.

    Attributes:
        predicted: seconds of a step's layers.
        untried: numbers of the ways that are still to be tried, in this order.
        measured: the last seconds of each way that was in use.
        streams: of a step's layers, the predicted seconds of each message of a way, by (name, level).
    """

    predicted: dict[int, float]
    untried: list[int]
    measured: dict[int, deque[float]] = field(default_factory=dict)
    streams: dict[int, dict[tuple[str, str], float]] = field(default_factory=dict)

    def typical(self, way: int) -> float:
        """The median of the measured seconds of a way; 0: not measured."""
        return median(self.measured.get(way, [0.0]))

    def close(self) -> list[int]:
        """The ways that are too close to the fastest one, for as little as is known of them; none if it is alone."""
        most = CLOSE * self.typical(self.best)
        found = [way for way in self.measured if self.typical(way) <= most]
        return [way for way in found if len(self.measured[way]) < ENOUGH] if len(found) > 1 else []

    @property
    def best(self) -> int:
        """The way whose steps took the fewest seconds."""
        return min(self.measured, key=self.typical)


class WayDictionary:
    """The ways that options leave open; the first rank says which one is next, from what it has measured.

    A load is the busiest expert's rows in relation to an even router's. In a new bucket of loads each way that a
    simulation with the rows as they are takes for nearly the fastest is tried: in two steps, of which the first one
    warms up; ways that are close to each other are tried again. From then on the fastest measured one is taken, and
    goes on to be measured.

    Args:
        options: in use; `move`, `route`, `chunks` and `once_a_step` say auto where they are open.
        way: in use.
        part_numel, local_size: see `choose_way`.
        passes: layers times micro-batches of a step.
        links: as measured.

    Attributes:
        ways: all of them, the same on all ranks.
        now: number of the way in use.

    Source: Hwang et al., "Tutel" (MLSys 2023), section 3.3.
    """

    def __init__(
        self, options: ExpertParallel, way: ExpertParallel, placement: ExpertPlacement, part_numel: int,
        local_size: int, passes: int, links: Links,
    ) -> None:  # fmt: skip
        self.options, self.placement, self.part_numel, self.local_size = options, placement, part_numel, local_size
        self.passes, self.links = passes, links
        self.ways = every_way(options, placement, local_size)
        self._numbers = {each: number for number, each in enumerate(self.ways)}
        self.now = self._numbers[way]
        self.loads: dict[int, Load] = {}
        self._num_steps = 0
        # Since the links were measured.
        self._spent_s, self._cost_s = 0.0, 0.0
        self._ratios: deque[float] = deque(maxlen=WINDOW)
        self._usual: dict[int, float] = {}

    def note(self, seconds: float, rows: Rows | Sequence[Rows], factor: float) -> int:
        """Record the seconds of a step's layers, on the first rank. Return the number of the next way, or MEASURE.

        factor: the capacity factor that would drop no row; 0: unknown. rows: of layers, see `choose_way`, in a
        micro-batch, on average.
        """
        load = self.load(rows, factor)
        self._spent_s += seconds
        self._num_steps += 1
        if self._num_steps == 1:
            return self.now
        load.measured.setdefault(self.now, deque(maxlen=WINDOW)).append(seconds)
        if self.now in load.untried:
            load.untried.remove(self.now)
        if not load.untried:
            load.untried = load.close()
        if load.untried:
            return load.untried[0]
        return MEASURE if len(self.ways) > 1 and self._has_drifted(load, seconds) else load.best

    def take(self, number: int) -> bool:
        """Note the way of the steps that follow, on all ranks. Return whether it is another one."""
        is_other = number != self.now
        if is_other:
            self.now, self._num_steps = number, 0
            self._ratios.clear()
        return is_other

    def renew(self, links: Links, cost_s: float) -> None:
        """Forget what was measured on other links. cost_s: seconds that measuring them has taken."""
        self.links, self._cost_s, self._spent_s, self._num_steps = links, cost_s, 0.0, 0
        self.loads.clear()
        self._ratios.clear()
        self._usual.clear()

    def load(self, rows: Rows | Sequence[Rows], factor: float) -> Load:
        """What is known of a load; a new one is simulated."""
        bucket = round(BUCKETS_OF_TWO * math.log2(factor)) if factor > 0 else 0
        if bucket not in self.loads:
            found = choose_way(self.options, self.placement, rows, self.part_numel, self.local_size, self.links)
            predicted = {self._numbers[way]: each * self.passes for way, each in found.items() if way in self._numbers}
            self.loads[bucket] = Load(predicted, self._near(predicted))
        return self.loads[bucket]

    def streams(self, load: Load, rows: Rows | Sequence[Rows]) -> dict[tuple[str, str], float]:
        """The predicted seconds of each message of the way in use, in a step's layers, by (name, level)."""
        if self.now not in load.streams:
            how = self.placement, rows, self.part_numel, self.local_size, self.links
            found = layer_streams_s(self.ways[self.now], *how)
            load.streams[self.now] = {key: seconds * self.passes for key, seconds in found.items()}
        return load.streams[self.now]

    def _near(self, predicted: dict[int, float]) -> list[int]:
        """Of what travels, and by each route, the fastest number of chunks if it is near; and one chunk, always.

        A simulation knows the links better than what each message costs a processor.
        """
        kinds: dict[tuple[str, str, object], list[int]] = {}
        for way in predicted:
            one = self.ways[way]
            kinds.setdefault((one.move, one.route, one.once_a_step), []).append(way)
        least = min(predicted.values())
        near = [ways for ways in kinds.values() if predicted[ways[0]] <= NEAR * least]
        whole = [way for ways in near for way in ways if self.ways[way].num_chunks == self.ways[way].num_back == 1]
        return list(dict.fromkeys([*(ways[0] for ways in near), *whole]))

    def _has_drifted(self, load: Load, seconds: float) -> bool:
        """Whether the way in use takes another multiple of its prediction than it did at first."""
        if not load.predicted.get(self.now):
            return False
        self._ratios.append(seconds / load.predicted[self.now])
        if len(self._ratios) < WINDOW:
            return False
        now = median(self._ratios)
        usual = self._usual.setdefault(self.now, now)
        return abs(now / usual - 1) > DRIFT and SHARE * self._spent_s >= self._cost_s


def every_way(options: ExpertParallel, placement: ExpertPlacement, local_size: int) -> list[ExpertParallel]:
    """The ways that the options leave open: what travels, by each route, in each number of chunks.

    Where they are more than a word of the step can name, backward has as many chunks as forward.
    """
    found = []
    for way in ways_of(options, placement, local_size):
        sizes = [way.num_chunks]
        if options.chunks == AUTO and has_parts(way):
            sizes = [1 << power for power in range(MOST_CHUNKS.bit_length())]
        for size in sizes:
            backs = near_to(size) if options.chunks_back == AUTO and has_parts(way) else [way.num_back]
            backs = [size] if options.chunks == AUTO and options.chunks_back != AUTO else backs
            found += [replace(way, chunks=size, chunks_back=SAME if back == size else back) for back in backs]
    return found if len(found) < MEASURE else [way for way in found if way.num_back == way.num_chunks]


def way_text(way: ExpertParallel) -> str:
    """A way as text: what travels, by which route, in how many chunks."""
    often = " once a step" if way.once_a_step else ""
    return f"{way.move}{often}, {way.route}, {chunks_text(way) or '1 chunk'}"
