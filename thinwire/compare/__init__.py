"""Races strategies against each other in one emulated slow network: same seeds, same tokens, in turns.

From Python:

    from thinwire.compare import RaceConfig, race
    from thinwire.run.config import TrainConfig

    result = race(RaceConfig(strategies="zero,sdp4bit", lab="nodes=4,rate=100mbit"), TrainConfig(steps=60))
    print(result.row("sdp4bit").mean.step_s, result.row("sdp4bit").ratio["step_s"])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.compare.measure import Figures, RaceRow, Result, SeedResult
    from thinwire.compare.options import RaceConfig
    from thinwire.compare.run import race

__all__ = ["Figures", "RaceConfig", "RaceRow", "Result", "SeedResult", "race"]


def __getattr__(name: str) -> Any:
    """Import a name when it is used: the command reads its flags without torch."""
    for place in ("options", "measure", "run") if name in __all__ else ():
        module = import_module(f"{__name__}.{place}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
