"""Checks that need no torch: they report mistakes before torch loads, which takes seconds on a slow machine."""

from __future__ import annotations

import sys
from dataclasses import replace

from thinwire.data.sources import place_of
from thinwire.errors import Problems
from thinwire.flags import Stated
from thinwire.layout.mesh import MeshShape
from thinwire.models.presets import check_preset
from thinwire.registry import check_name
from thinwire.run.config import TrainConfig, range_errors
from thinwire.run.run_dir import RunDir


def refuse_early(stated: Stated, problems: Problems) -> None:
    """Raise ConfigError with everything that is wrong with the flags alone.

    If a file states values too, if ranks are laid out in words that can be read, or if torch is loaded already, it does
    nothing: later checks report all problems at once.
    """
    flags, unread = stated[""], Problems()
    if "torch" in sys.modules or "config_file" in flags or flags.get("resume"):
        return
    config = replace(TrainConfig(), **flags)
    if config.mesh is not None:
        unread.note(MeshShape.parse, config.mesh)
    if flags.keys() & {"mesh", "stages", "tensor"} and not unread.messages:
        return
    problems.messages += [*range_errors(config), *unread.messages]
    for flag, name in (("--inner", config.inner), ("--strategy", config.strategy)):
        if name is not None and not (flag == "--strategy" and config.is_planned_late):
            problems.note(check_name, flag, name)
    if config.model != "auto":
        problems.note(check_preset, config.model)
    with problems.collect():
        RunDir(config.run_dir).check(config.node, resume=config.resume, overwrite=config.overwrite)
    problems.note(place_of, config.data)
    if config.optimizer is not None and problems.messages:
        # It loads torch. A second mistake is worth that.
        from thinwire.run.optimizer import read_optimizer

        problems.note(read_optimizer, config.optimizer)
    if config.inject:
        # What injects faults reads them, and loads torch.
        from thinwire.collectives.faults import parse

        for text in config.inject:
            problems.note(parse, text)
    problems.raise_any()
