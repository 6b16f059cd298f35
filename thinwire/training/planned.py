"""A run under a plan: its prediction beside the measurements, and the links on which it is based."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.calibration import measured_rates
from thinwire.calibration.reach import all_on_this_machine
from thinwire.collectives import Communicator
from thinwire.errors import ConfigError
from thinwire.run.config import TrainConfig
from thinwire.run.run_dir import RunDir

# A rate that is so many times as high or as low as planned is another one.
DRIFT = 1.5


def read_plan(config: TrainConfig, num_islands: int = 1) -> dict[str, Any]:
    """The prediction in plan.json. Raises ConfigError for any other file, and for a plan of other ranks.

    num_islands: that have as many ranks as the configuration.
    """
    path = Path(config.plan or "")
    try:
        found = json.loads(path.read_text())
        num_ranks = len(found["rates"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--plan {path}: no plan can be read there ({error}); thinwire plan writes one") from None
    # An island that its launcher has started knows its own ranks.
    if num_ranks not in (config.world_size, num_islands * config.world_size):
        raise ConfigError(
            f"--plan {path}: of {num_ranks} ranks, and the run has {config.world_size}; nearest: calibrate these and "
            "plan anew, or leave --plan out"
        )
    return found


class Planned:
    """The plan of a run, on every rank. is_fresh: it was made at this run's start, from links just measured.

    num_islands: of the run; the links between several are not measured again.
    """

    def __init__(
        self, config: TrainConfig, comm: Communicator, warn: Callable[[str], None], num_islands: int = 1
    ) -> None:
        self.config, self.comm, self.warn, self.num_islands = config, comm, warn, num_islands
        self.file = RunDir(config.run_dir).plan
        self.is_fresh = Path(config.plan or "").absolute() == self.file.absolute()
        self.content: dict[str, Any] = read_plan(config, num_islands) if comm.rank == 0 else {}
        if not self.is_fresh:
            self.compare_links("since it was made")

    def compare_links(self, when: str) -> None:
        """Measure the links again, warn of those that changed, and write the result beside the plan. A collective.

        Between processes of one machine the link is loopback, which is slow if the machine is busy; then nothing is
        reported.
        """
        is_network = self.num_islands == 1 and not all_on_this_machine(self.comm.world_size)
        now = measured_rates(self.comm) if is_network else None
        if self.comm.rank:
            return
        order = self.config.order or tuple(range(self.comm.world_size))
        drifted = []
        for place, rank in enumerate(order):
            for other_place, other in enumerate(order):
                if now is None or rank == other or (before := self.content["rates"][rank][other]) is None:
                    continue
                after = now.rates[place][other_place]
                if max(before, after) > DRIFT * min(before, after):
                    drifted.append([rank, other, before, after])
        for rank, other, before, after in drifted:
            rates = f"{8e-6 * before:.3g} Mbit/s planned, {8e-6 * after:.3g} now"
            self.warn(f"the link {rank} to {other} has drifted {when}: {rates}; thinwire calibrate measures anew")
        self.content["drifted"] = drifted
        self.file.write_text(json.dumps(self.content, indent=1) + "\n")
