"""Checks that need no torch: they report mistakes before torch loads, which takes seconds on a slow machine."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from thinwire.data.sources import place_of
from thinwire.errors import Problems
from thinwire.flags import Stated
from thinwire.layout.mesh import MeshShape
from thinwire.models.presets import check_preset
from thinwire.registry import check_name
from thinwire.run.config import TrainConfig, check_num_ranks, range_errors
from thinwire.run.run_dir import RunDir


def refuse_early(stated: Stated, problems: Problems) -> None:
    """Raise ConfigError with everything that is wrong with the flags alone.

    It does nothing if a file states values too, if stages or tensor ranks are asked for, or if torch is loaded already:
    later checks report all problems at once.
    """
    flags = stated[""]
    layers_are_cut = flags.keys() & {"stages", "tensor"}
    if "torch" in sys.modules or "config_file" in flags or flags.get("resume") or layers_are_cut:
        return
    config = replace(TrainConfig(), **flags)
    problems.messages += range_errors(config)
    for flag, name in (("--inner", config.inner), ("--strategy", config.strategy)):
        if name is not None and not (flag == "--strategy" and config.is_planned_late):
            problems.note(check_name, flag, name)
    if config.model != "auto":
        problems.note(check_preset, config.model)
    with problems.collect():
        RunDir(config.run_dir).check(config.node, resume=config.resume, overwrite=config.overwrite)
    problems.note(place_of, config.data)
    wrong = {message.split()[0].rstrip(":") for message in problems.messages}
    # torchrun states the number of ranks elsewhere.
    is_counted = wrong.isdisjoint(("--mesh", "--workers", "--nodes")) and "WORLD_SIZE" not in os.environ
    if config.mesh is not None:
        with problems.collect():
            MeshShape.parse(config.mesh)
            if is_counted:
                check_num_ranks(config)
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
