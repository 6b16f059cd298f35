"""CheckFree+: half of the micro-batches pass the first two stages, and the last two, in the other order."""

from __future__ import annotations

from dataclasses import replace

from thinwire.errors import ConfigError
from thinwire.methods.pipeline.costs import Costs
from thinwire.methods.pipeline.fitted import fitted
from thinwire.methods.pipeline.plan import Plan
from thinwire.methods.pipeline.recover import SWAP, check_recovery


def swapped_paths(stages: int, micro_batches: int) -> list[tuple[int, ...]]:
    """Paths in which odd micro-batches swap the first two, and the last two, of chunks 1 to `stages`.

    Chunk 0 is the embedding, chunk stages + 1 the head. Source: CheckFree+, section on out-of-order training.
    """
    first, *middle, last = range(stages + 2)
    turned = [middle[1], middle[0], *middle[2:-2], middle[-1], middle[-2]]
    return [(first, *(turned if number % 2 else middle), last) for number in range(micro_batches)]


def swapping(stages: int, micro_batches: int, in_flight: int | None = None) -> Plan:
    """The plan of such a step, for equal stages and free links, so that the same seed gives the same bits.

    The embedding is on the first rank and the head on the last, beside their stages. Raises ConfigError for fewer
    than four stages or two micro-batches, and if in_flight is so small that ranks would wait for each other for ever.
    """
    check_recovery(SWAP, stages)
    if micro_batches < 2:
        raise ConfigError("recover 'swap' with 1 micro-batch: every other one is swapped; nearest: 2 micro-batches")
    home = (0, *range(stages), stages - 1)
    seconds = (0.0, *[1.0] * stages, 0.0)
    costs = replace(Costs.even(len(home)), forward_s=seconds, input_s=seconds, weight_s=seconds)
    paths, most = swapped_paths(stages, micro_batches), in_flight or 2 * stages
    while True:
        try:
            return fitted(home, paths, costs, in_flight=most)
        except ConfigError:
            # Paths that cross may wait for each other: the fewest that let all go on.
            if in_flight is not None or most >= micro_batches:
                raise
            most += 1
