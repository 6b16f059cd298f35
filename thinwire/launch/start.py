"""The launcher's message to its workers, as one word of their command line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from thinwire.run.place import IslandPlace
from thinwire.table import Row


@dataclass(frozen=True)
class Start:
    """What the launcher found out for its workers.

    Attributes:
        dtype: the compute type that is fast on this machine.
        effects: rows of the start-up table.
        first_gpu: number of the first worker's GPU.
        began: when the command was started, as time.time(); None: the time until all machines have met does not count.
        meet: HOST:PORT where ranks meet again after a loss; empty: they do not.

    The others are as in TrainConfig.
    """

    dtype: str | None = None
    threads: int = 1
    effects: list[Row] = field(default_factory=list)
    stop_at: int | None = None
    inject: tuple[str, ...] = ()
    allow_resume_drift: bool = False
    island: IslandPlace | None = None
    first_gpu: int = 0
    began: float | None = None
    meet: str = ""

    def to_json(self) -> str:
        return json.dumps([
            self.dtype, self.threads, self.effects, self.stop_at, self.inject, self.allow_resume_drift, self.island,
            self.first_gpu, self.began, self.meet,
        ])  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> Start:
        dtype, threads, effects, stop_at, inject, allow_resume_drift, island, first_gpu, began, meet = json.loads(text)
        rows = [(asked, effect, reason) for asked, effect, reason in effects]
        place = IslandPlace(*island) if island else None
        return cls(dtype, threads, rows, stop_at, tuple(inject), allow_resume_drift, place, first_gpu, began, meet)
