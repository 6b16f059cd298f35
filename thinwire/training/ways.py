"""How rows travel from step to step: the first rank asks the dictionary, and its word of the step tells all ranks."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import torch

from thinwire.calibration.levels import measure_links
from thinwire.cost.links import ALL_TO_ALL, SCATTER
from thinwire.hosts.sharded.optimizer import ShardedOptimizer
from thinwire.methods.experts import MEASURE, Load, Rows, WayDictionary, choose_way, idle_s, room_bytes, way_text
from thinwire.methods.experts.options import AUTO
from thinwire.models.capacity import RowLoad, check_capacity
from thinwire.models.moe import MoELlama
from thinwire.models.seam import mixture_of
from thinwire.options import EXPERTS
from thinwire.report.metrics import TRIED, WayEvent
from thinwire.run.run import Run
from thinwire.training.engine import Engine

# Experts whose product is timed again.
TIMED_EXPERTS = 2
FASTEST, DRIFTED = "the fastest measured", "links measured again: steps have drifted"
# Layers whose rows are simulated, from the least to the most uneven one, in place of all.
MOST_LAYERS = 4
OPEN = ("move", "route", "chunks", "chunks_back", "once_a_step")


class WaysInUse:
    """The ways of a run's rows, of which some options are open. Every rank makes one, and calls it alike."""

    def __init__(self, run: Run, engine: Engine) -> None:
        experts, sizes = engine.stage.experts, mixture_of(engine.model)
        assert run.links is not None and experts is not None and sizes is not None
        self.engine, self.experts, self.sizes = engine, experts, sizes
        experts.watch.wait = engine.device.synchronize
        if isinstance(engine.model, MoELlama):
            # Whatever else needs them, the way does.
            engine.model.counts_rows = True
        stated = run.config.tables.get(EXPERTS, {})
        names = [name for name in OPEN if stated.get(name) == AUTO]
        way = replace(experts.options, release="auto") if stated.get("release") == AUTO else experts.options
        options = replace(way, **dict.fromkeys(names, AUTO))  # type: ignore[arg-type]
        numel = sizes.expert_numel * experts.placement.experts // experts.placement.ranks
        self.dictionary = WayDictionary(
            options, way, experts.placement, numel, experts.comm.topology.local_size,
            sizes.layers * engine.batch.accumulation, run.links,
        )  # fmt: skip
        self._known: Load | None = None
        self._event: WayEvent | None = None
        # Since the start.
        self.predicted_streams_s: Counter[tuple[str, str]] = Counter()
        self._holds = stated.get("release") == AUTO

    @classmethod
    def of(cls, run: Run, engine: Engine) -> WaysInUse | None:
        """The ways of a run whose ranks have measured links; None for any other."""
        return None if run.links is None or engine.stage.experts is None else cls(run, engine)

    @property
    def name(self) -> str:
        """The way in use."""
        return way_text(self.experts.options)

    def begun(self, step: int) -> WayEvent:
        """The way in use at the start, before anything was measured of it, with its simulated seconds."""
        experts, ways = self.experts, self.dictionary
        ranks = experts.placement.ranks
        seconds = choose_way(
            experts.options, experts.placement, even_rows(self.engine), ways.part_numel, ways.local_size, ways.links
        )  # fmt: skip
        why = f"at the start: {ranks} ranks share the experts"
        self._event = WayEvent(step, self.name, why, min(seconds.values()))
        return self._event

    def measured(self) -> WayEvent | None:
        """The last change with what has been measured of the way since, on the first rank; None: nothing yet."""
        seconds = 0.0 if self._known is None else self._known.typical(self.dictionary.now) / self.dictionary.passes
        return replace(self._event, measured_s=seconds) if self._event is not None and seconds else None

    def go_on(self, name: str) -> None:
        """Take the way that was in use when a checkpoint was written, if there is such a way here."""
        for number, way in enumerate(self.dictionary.ways):
            if way_text(way) == name and self.dictionary.take(number):
                self.experts.take(way)

    def note(self, load: RowLoad, seconds: float) -> float:
        """Note the rows and the seconds of a step's layers, before its word is sent. Return the predicted seconds."""
        if self.experts.everyone.rank:
            return 0.0
        rows = self._rows(load)
        self._known = self.dictionary.load(rows, load.needed)
        predicted_s = self._known.predicted.get(self.dictionary.now, 0.0)
        self.predicted_streams_s.update(self.dictionary.streams(self._known, rows))
        self.engine.optimizer.told = self.dictionary.note(seconds, rows, load.needed)
        return predicted_s

    def follow(self, step: int) -> WayEvent | None:
        """Do what the step's word says. Returns what has changed on the first rank. A collective."""
        change = self._follow(step)
        self._event = change or self._event
        return change

    def _follow(self, step: int) -> WayEvent | None:
        if self._holds:
            self._pace()
        told, known, passes = self.engine.optimizer.told, self._known, self.dictionary.passes
        if told == MEASURE:
            self._measure()
            return WayEvent(step, self.name, DRIFTED) if known is not None else None
        if not self.dictionary.take(told):
            return None
        self.experts.take(self.dictionary.ways[told])
        if known is None:
            return None
        why = TRIED if told in known.untried else FASTEST
        return WayEvent(step, self.name, why, known.predicted.get(told, 0.0) / passes, known.typical(told) / passes)

    def _pace(self) -> None:
        """Hold back the next step's gradients by what the link has time for, here and between two layers.

        Ranks need not agree: each sends the same messages in the same order.
        """
        experts, optimizer, ways = self.experts, self.engine.optimizer, self.dictionary
        assert isinstance(optimizer, ShardedOptimizer)
        asked = even_rows(self.engine), ways.part_numel, ways.local_size, ways.links
        free_s = idle_s(experts.options, experts.placement, *asked) + experts.watch.gap_s
        experts.hold(optimizer, room_bytes(free_s, ways.links))

    def _measure(self) -> None:
        """Measure the links and a product again."""
        start = time.perf_counter()
        self.engine.optimizer.synchronize()
        timed = TIMED_EXPERTS, self.sizes.inner, self.sizes.width
        asked = [ALL_TO_ALL, SCATTER]
        links = measure_links(
            self.experts.everyone, timed, asked, device=self.engine.device, dtype=self.engine.dtype
        )  # fmt: skip
        self.dictionary.renew(links, time.perf_counter() - start)

    def _rows(self, load: RowLoad) -> list[Rows]:
        """The rows of layers in a micro-batch, on average; of an even router, if they were not counted."""
        even = even_rows(self.engine)
        if load.counts is None:
            return [even]
        num_tokens, limit = tokens_and_limit(self.engine)
        layers = (load.counts[self.experts.members] / self.engine.batch.accumulation).transpose(0, 1)
        order = layers.sum(1).amax(-1).argsort().tolist()
        num = min(MOST_LAYERS, len(order))
        picked = [order[(2 * number + 1) * len(order) // (2 * num)] for number in range(num)]
        return [even.uneven(layers[layer].clamp(max=limit or num_tokens).round().long().tolist()) for layer in picked]


def on_each_rank(step: int) -> WayEvent:
    """What ranks have chosen that share no experts."""
    return WayEvent(step, "replicas", "at the start: every rank has all experts")


def even_rows(engine: Engine) -> Rows:
    """The rows of a layer and micro-batch of a run with experts over ranks, if its router is even."""
    experts, sizes, batch = engine.stage.experts, mixture_of(engine.model), engine.batch
    assert experts is not None and sizes is not None
    num_tokens, limit = tokens_and_limit(engine)
    dtype = torch.bfloat16 if engine.dtype == "bf16" else torch.float32
    nodes = experts.placement.ranks // experts.comm.topology.local_size
    rows = Rows.even(
        experts.placement, num_tokens, sizes.top_k, sizes.width, dtype, nodes, limit, batch.accumulation
    )  # fmt: skip
    moved = sizes.kept_numel * experts.placement.experts // experts.placement.ranks
    return replace(rows, forwards=engine.forwards, moved_numel=moved)


def tokens_and_limit(engine: Engine) -> tuple[int, int]:
    """Tokens of a rank in a micro-batch, and most rows of them for an expert in the next forward; 0: no limit."""
    sizes = mixture_of(engine.model)
    assert sizes is not None
    num_tokens = engine.batch.micro_batch * -(-engine.config.seq_len // engine.config.mesh_shape.sequence)
    return num_tokens, check_capacity(sizes.capacity_factor, num_tokens, sizes.experts, sizes.top_k)
