"""Races strategies against each other in one emulated slow network: same seeds, same tokens, in turns.

From Python:

    from thinwire.compare import RaceConfig, race
    from thinwire.training.config import TrainConfig

    result = race(RaceConfig(strategies="zero,sdp4bit", lab="nodes=4,rate=100mbit"), TrainConfig(steps=60))
    print(result.row("sdp4bit").mean.step_s, result.row("sdp4bit").ratio["step_s"])
"""

from thinwire.compare.measure import Figures, Result, Row, SeedResult
from thinwire.compare.options import RaceConfig
from thinwire.compare.race import race

__all__ = ["Figures", "RaceConfig", "Result", "Row", "SeedResult", "race"]
