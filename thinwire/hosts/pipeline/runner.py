"""Runs a plan: this rank's actions in their order, with real messages between ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.collectives import Expected, Mailbox
from thinwire.errors import ConfigError
from thinwire.hosts.pipeline.running import RunningStep
from thinwire.hosts.pipeline.statistics import counts_forwards, once, tracking
from thinwire.hosts.pipeline.tied import TiedWeights
from thinwire.hosts.pipeline.vocabulary import SpreadVocabulary
from thinwire.hosts.pipeline.wiring import ShapeAt, Wiring
from thinwire.methods.pipeline import Action, Plan
from thinwire.methods.pipeline.border import Crossing, LastMessages
from thinwire.methods.pipeline.plan import FORWARD, FORWARD_KINDS, PlanMessage, Shared


class Runner(Wiring):
    """Runs the forwards and backwards of a step over the ranks of a pipeline.

    Batch normalisation uses each micro-batch's own statistics, and moves the running statistics once a step. Every rank
    is given the same micro-batches; only the chunks and `shape` look inside them.

    Args:
        plan: must pass `check`.
        chunks: this rank's, by number: modules of (hidden state or None, micro-batch) that return the next hidden state
            or, at the end of a path, the mean loss of the micro-batch. With bridges in the plan: modules of (hidden
            state, micro-batch, *what earlier chunks give) that return a tuple of the next hidden state and of what they
            give, both in the plan's order of bridges; these tensors are shaped as their source's output.
        mailbox: over the plan's ranks in order.
        shape: (chunk, micro-batch) -> shape of the chunk's output.
        dtype: of all outputs when they travel.
        crossing: the codecs at borders between ranks.
        device: of the chunks.
        tied: see TiedWeights.
        last: for each chunk, the last messages over the border after it, if differences from them are sent.
        keys: micro-batch -> the keys of its sequences.
        vocabulary: this rank's rows of embedding and head, if the plan spreads them.

    Raises ConfigError for a plan that can't run; for chunks that are not this rank's; for other normalisation with
    running statistics if the plan computes forwards twice; and for plans in which the two sides of a border that sends
    differences would see micro-batches in different orders.
    """

    def __init__(
        self, plan: Plan, chunks: Mapping[int, nn.Module], mailbox: Mailbox, shape: ShapeAt, *,
        dtype: torch.dtype = torch.float32, crossing: Crossing | None = None,
        device: torch.device | str = "cpu", tied: TiedWeights | None = None,
        last: Mapping[int, LastMessages] | None = None, keys: Callable[[Any], Sequence[bytes]] | None = None,
        vocabulary: SpreadVocabulary | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            plan, chunks, mailbox, shape, dtype=dtype, crossing=crossing, device=device, last=last, keys=keys,
            vocabulary=vocabulary,
        )  # fmt: skip
        self.tied = tied or TiedWeights(mailbox, {})
        self._check_chunks()
        self._normalising = tracking(self.chunks.values())
        # Micro-batches that steps before had: codecs draw by the number of the micro-batch.
        self.num_before = 0
        # What this rank did in the last step, and when, in seconds from the step's start.
        self.spans: list[tuple[Action, float, float]] = []

    def run(self, micro_batches: Sequence[Any], shares: Sequence[float] | None = None) -> Tensor:
        """Add the gradients of sum_m shares[m] * loss_m to the weights' gradients. Return this rank's part of that sum.

        shares: the weight of each micro-batch; by default 1/M each, for micro-batches of unequal length their share of
        the tokens. The parts of all ranks add up to the loss; they are zero except on ranks at the end of a path.
        Raises ConfigError for a number of micro-batches other than the plan's, and where the vocabulary is spread, for
        ids that it does not have; PeerLostError and other errors of a mailbox.
        """
        gradients = self.tied.gradients_to_come(self.plan.num_micro_batches)
        with once(self._normalising, commits=True) as self.statistics:
            loss = self._play(self.order, micro_batches, shares, self.num_before, gradients)
        self.tied.add_gradients(self.plan.num_micro_batches)
        self.mailbox.finish()
        self.num_before += len(micro_batches)
        return loss

    @torch.no_grad()
    def evaluate(
        self, micro_batches: Sequence[Any], shares: Sequence[float] | None = None, first_number: int | None = None
    ) -> Tensor:
        """Run only the forwards of `run`. Here the last chunk may return any tensor in place of a loss.

        first_number: number of the first micro-batch, for the codecs' randomness; None: all count as the run's first.
        """
        order = [action for action in self.order if action.kind in FORWARD_KINDS]
        with once(self._normalising, commits=False) as self.statistics:
            output = self._play(order, micro_batches, shares, first_number, [])
        self.mailbox.finish()
        return output

    def sent_bytes(self, micro_batches: Sequence[Any]) -> int:
        """Payload bytes that this rank sends in `run`, by formula; an upper bound if packets vary in length."""
        own = map(self.mailbox.share_bytes, self.messages_of(self.mailbox.rank, micro_batches))
        return self.tied.sent_bytes + sum(own)

    def messages_of(self, rank: int, micro_batches: Sequence[Any]) -> Iterator[int]:
        """Bytes of each message that a rank sends in `run`, without those of tied weights."""
        for action in self.plan.orders[rank]:
            for given in self.plan.routes.gives(action):
                if self.target(given) != rank:
                    yield self.num_bytes(given, micro_batches)

    def border_bytes(self, direction: str, chunk: int, micro_batches: Sequence[Any]) -> float:
        """Mean bytes of a message with a chunk's output, or with its gradient; 0 after the last chunk of all paths."""
        routes = self.plan.routes
        crossing = [visit for visit, after in routes.after.items() if visit.chunk == chunk and after is not None]
        shapes = [torch.Size(self.shape(chunk, micro_batches[visit.micro_batch])) for visit in crossing]
        packets = [self.crossing.packet_bytes(direction, shape.numel(), self.dtype) for shape in shapes]
        sizes = list(map(self.mailbox.share_bytes, packets))
        return sum(sizes) / max(1, len(sizes))

    def shared_bytes(self, micro_batches: Sequence[Any]) -> dict[str, float]:
        """Mean bytes of a message between ranks that share the vocabulary, by kind."""
        found: dict[str, list[int]] = {}
        for rank in range(self.plan.num_ranks):
            for given in (given for action in self.plan.orders[rank] for given in self.plan.routes.gives(action)):
                if isinstance(given, Shared):
                    found.setdefault(given.kind, []).append(self.num_bytes(given, micro_batches))
        return {kind: sum(sizes) / len(sizes) for kind, sizes in found.items()}

    def _check_chunks(self) -> None:
        own = self.plan.chunks_of(self.mailbox.rank)
        if sorted(self.chunks) != own:
            raise ConfigError(f"rank {self.mailbox.rank} was given chunks {sorted(self.chunks)}: the plan's are {own}")
        counting = counts_forwards(self.chunks.values())
        if counting and self.recomputed:
            raise ConfigError(
                f"{counting} keeps statistics of each forward, and the plan computes forwards twice: "
                "use recompute 'never', or track_running_stats=False"
            )

        for chunk in self.chunks if self.last else ():
            numbers = [one.visit.micro_batch for one in self.order if one.kind == FORWARD and one.chunk == chunk]
            if numbers != sorted(numbers):
                raise ConfigError(
                    f"differences to last messages: chunk {chunk} takes micro-batches in the order {numbers}, other "
                    "chunks in another; nearest: a plan that takes them in order, such as 1f1b, or no delta"
                )

    def _play(
        self, order: Sequence[Action], micro_batches: Sequence[Any], shares: Sequence[float] | None,
        first_number: int | None, at_the_end: Sequence[Expected],
    ) -> Tensor:  # fmt: skip
        num = self.plan.num_micro_batches
        shares = [1.0 / num] * num if shares is None else shares
        if len(micro_batches) != num or len(shares) != num:
            raise ConfigError(
                f"{len(micro_batches)} micro-batches, {len(shares)} shares: the plan is for {num} of each"
            )
        if self._vocabulary is not None:
            # On all ranks alike, before any message.
            for micro_batch in micro_batches:
                self._vocabulary.check(micro_batch)
        expected = self._expected(order, micro_batches)
        self.mailbox.begin([*self.tied.weights_to_come(num), *expected, *at_the_end])
        step = RunningStep(self, micro_batches, shares, first_number)
        self.tied.take_weights(num)
        start_s = time.perf_counter()
        self.spans = []
        for action in order:
            arrived = step.arrived(action)
            begun_s = time.perf_counter()
            step.do(action, arrived)
            self.spans.append((action, begun_s - start_s, time.perf_counter() - start_s))
            if len(self.spans) == 1:
                self.tied.send_weights(num)
        return step.loss

    def _expected(self, order: Sequence[Action], micro_batches: Sequence[Any]) -> list[Expected]:
        return [
            Expected(self.label(need), sender, self.num_bytes(need, micro_batches))
            for action in order
            for need in self.plan.routes.needs(action)
            if isinstance(need, PlanMessage)
            and (sender := self.sender(need)) != self.mailbox.rank
            and self.num_bytes(need, micro_batches)
        ]
