"""Which files a plan writes, and whether it may."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import combinations
from pathlib import Path

from thinwire.errors import unusable_folder
from thinwire.planner.plan_options import PlanConfig

NAMES = {"--out": "plan.toml", "--trace": "trace.json"}


def prediction_of(config: PlanConfig) -> Path:
    """The file of the prediction, beside the plan."""
    return Path(config.out).with_suffix(".json")


def wrong_outputs(config: PlanConfig) -> Iterator[str]:
    """Yield why a file can't be written, or would take the place of another that is read or written."""
    written = {"--out": Path(config.out)} | ({"--trace": Path(config.trace)} if config.trace is not None else {})
    found = [fault for option, path in written.items() for fault in unwritable(option, path)]
    if not found and prediction_of(config).is_dir():
        found = [f"the prediction of --out {config.out}: {prediction_of(config)} is a folder; choose another name"]
    yield from found or overwritten(config, written)


def unwritable(option: str, path: Path, usual: str = "") -> Iterator[str]:
    """Yield why nothing can be written to the file of an option. usual: its usual name, if it is none of a plan's."""
    if not path.absolute().parent.is_dir():
        yield f"{option} {path}: its folder does not exist; nearest: {option} {path.name}"
    elif path.is_dir():
        yield f"{option} {path}: is a folder; nearest: {option} {path / (usual or NAMES[option])}"
    elif why := unusable_folder(path.absolute().parent):
        yield f"{option} {path}: {why}; choose another folder"


def overwritten(config: PlanConfig, written: dict[str, Path]) -> Iterator[str]:
    """Yield the pairs of files that are the same, of which at least one is written. written: by option."""
    names = {f"{option} {path}": path for option, path in written.items()}
    names[f"the prediction of --out {config.out}"] = prediction_of(config)
    read = {f"--machine {config.machine}": Path(config.machine)}
    read |= {f"--tokenizer {config.tokenizer}": path for path in [Path(config.tokenizer)] if path.is_file()}
    for (a, first), (b, second) in combinations([*names.items(), *read.items()], 2):
        if first.resolve() == second.resolve() and not {a, b} <= read.keys():
            option = "--trace" if any(each.startswith("--trace") for each in (a, b)) else "--out"
            others = [path for each, path in (written | read).items() if each != option]
            # The prediction moves with the plan.
            others += [prediction_of(config)] if option == "--trace" else []
            near = unlike(written[option], option, {path.resolve() for path in others})
            yield f"{a}: is the file of {b}, {second}; nearest: {option} {near}"


def unlike(path: Path, option: str, taken: Collection[Path]) -> Path:
    """The name nearest to this one that takes the place of no other file, nor does its prediction."""
    ending, more = Path(NAMES[option]).suffix, Path(NAMES[option]).stem
    # Each taken name rules out one of these.
    stems = [path.stem, f"{path.stem}-{more}", *(f"{path.stem}-{more}-{number}" for number in range(2, len(taken) + 3))]
    names = (path.with_name(f"{stem}{ending}") for stem in stems)
    return next(each for each in names if not {each.resolve(), each.with_suffix(".json").resolve()} & set(taken))
