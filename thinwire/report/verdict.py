"""The verdict of a race in sentences: the fastest contestant, its margin, and whether that exceeds the spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from thinwire.errors import counted
from thinwire.report.units import bytes_text, seconds_text

FINISHED = "finished"
# A held-out loss that is this much above the reference's is no matter of chance or of a few more steps.
FAR_BEHIND = 0.1
# Fewer timed steps are a matter of luck on a busy machine.
FEW_TIMED = 10


def verdict(values: Mapping[str, Any]) -> list[str]:
    """Sentences: the first names the winner, the others its costs. Empty if fewer than two finished."""
    rows = [row for row in values["contestants"] if row["status"] == FINISHED and row["mean"]["step_s"]]
    if len(rows) < 2:
        return []
    reached = [row for row in rows if row["mean"]["minutes_to_target"]]
    first, second, *_ = sorted(rows, key=step_s)
    if reached:
        winner, sentence = by_target(rows, reached, values["reference"])
    else:
        winner, sentence = first, by_step(first, rows, rival(first, second, rows, values["reference"]))
    sentences = [sentence]
    reference = next((row for row in rows if row["name"] == values["reference"]), None)
    if reference is not None and reference is not winner:
        sentences += [*filter(None, (bytes_sentence(winner, reference), loss_sentence(winner, reference)))]
    if reference is not None:
        sentences += far_behind(rows, reference)
    return sentences


def by_step(first: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], other: Mapping[str, Any]) -> str:
    """A sentence about the contestant with the shortest step, or about the two that may have it. other: see `rival`."""
    second = sorted(rows, key=step_s)[1]
    own, theirs = seconds_text(step_s(first)), seconds_text(step_s(second))
    if overlap(first, second):
        names = f"{first['name']} and {second['name']} have the shortest steps, {own} and {theirs}"
        return f"{names}, and are too close to call: they overlap from round to round."
    how = f"{faster(step_s(other), step_s(first))} {other['name']} ({seconds_text(step_s(other))})"
    return f"{first['name']} has the shortest step: {own}, {how}{luck(rows)}."


def by_target(
    rows: Sequence[Mapping[str, Any]], reached: Sequence[Mapping[str, Any]], reference: str | None
) -> tuple[Mapping[str, Any], str]:
    """The contestant that reached the target loss first, and a sentence about it."""
    winner, *others = sorted(reached, key=minutes)
    text = f"{winner['name']} reaches the target loss first, in {minutes(winner):.3g} minutes"
    if not others:
        return winner, f"{text}; no other contestant reaches it."
    other = rival(winner, others[0], reached, reference)
    how = f"{faster(minutes(other), minutes(winner))} {other['name']} ({minutes(other):.3g})"
    return winner, f"{text}: {how}{luck(rows)}."


def luck(rows: Sequence[Mapping[str, Any]]) -> str:
    """The tail of a sentence that compares times of too few steps; empty where they are enough."""
    counts = {seed["num_timed_steps"] for row in rows for seed in row["seeds"]}
    if min(counts) >= FEW_TIMED:
        return ""
    timed = counted(max(counts), "timed step")
    return f"; from {timed if len(counts) == 1 else f'{min(counts)} to {timed}'}, too few to tell"


def bytes_sentence(winner: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """A sentence that compares the winner's bytes with the reference's."""
    own, theirs = (row["mean"]["kernel_sent_bytes_per_step"] for row in (winner, reference))
    if not own or not theirs:
        return ""
    how = f"{theirs / own:.1f} times fewer" if theirs > own else f"{own / theirs:.1f} times more"
    return f"{winner['name']} sends {bytes_text(own)} a step, {how} bytes than {reference['name']}."


def loss_sentence(winner: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """The difference of held-out losses, paired by seed, with its standard error if there are several seeds."""
    theirs = {seed["seed"]: seed["figures"]["heldout_loss"] for seed in reference["seeds"]}
    pairs = [(seed["figures"]["heldout_loss"], theirs.get(seed["seed"])) for seed in winner["seeds"]]
    differences = [own - other for own, other in pairs if own is not None and other is not None]
    if not differences:
        return ""
    mean, name = fmean(differences), reference["name"]
    if len(differences) == 1:
        how = f"{abs(mean):.4f} {'above' if mean > 0 else 'below'} that of {name}"
        return f"The held-out loss of {winner['name']} is {how}; with one seed, chance is not ruled out."
    error = stdev(differences) / math.sqrt(len(differences))
    found = f"{mean:+.4f} ± {error:.4f} ({len(differences)} seeds)"
    sentence = f"The held-out loss of {winner['name']} minus that of {name}: {found}"
    return f"{sentence}, within twice the standard error." if abs(mean) <= 2 * error else f"{sentence}."


def far_behind(rows: Sequence[Mapping[str, Any]], reference: Mapping[str, Any]) -> list[str]:
    """A sentence for each contestant that has learnt much less than the reference from the same tokens."""
    exact, found = reference["mean"]["heldout_loss"], []
    for row in rows:
        own = row["mean"]["heldout_loss"]
        if exact and own is not None and own > (1 + FAR_BEHIND) * exact:
            found.append(
                f"{row['name']} has learnt far less from these tokens: its held-out loss is {own / exact - 1:.0%} "
                f"above that of {reference['name']}. Its bytes and seconds are no gain before it learns; it may need "
                "another learning rate, more steps, or more exchanges."
            )
    return found


def rival(
    winner: Mapping[str, Any], second: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], reference: str | None
) -> Mapping[str, Any]:
    """The contestant to compare the winner with: the reference, or the runner-up if the winner is the reference."""
    return next((row for row in rows if row["name"] == reference and row is not winner), second)


def overlap(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether the slowest round of the first took at least as long as the fastest of the second."""
    ends, others = (row["spread"].get("step_s") for row in (first, second))
    return bool(ends and others) and ends[1] >= others[0]


def step_s(row: Mapping[str, Any]) -> float:
    return row["mean"]["step_s"]


def minutes(row: Mapping[str, Any]) -> float:
    return row["mean"]["minutes_to_target"]


def faster(slow: float, fast: float) -> str:
    ratio = f"{slow / fast:.2f}"
    return "about as fast as" if ratio == "1.00" else f"{ratio} times as fast as"
