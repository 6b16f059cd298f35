"""A race as one self-contained HTML page: the table, four plots, and everything it depends on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.report.page import table, text
from thinwire.report.race_charts import race_figures
from thinwire.report.run import number
from thinwire.report.units import MISSING, bytes_text, seconds_text, short

FIGURES = {
    "step_s": "step",
    "tokens_per_s": "tokens/s",
    "kernel_sent_bytes_per_step": "sent per step",
    "kernel_sent_bytes_per_step_worst_node": "worst node",
    "sent_bytes_per_step": "by the meter",
    "heldout_loss": "held-out loss",
    "minutes_to_target": "to the target",
    "peak_rss_bytes": "memory of a rank",
    "bound_s": "bound",
    "unhidden_s": "not to be hidden",
    "step_over_bound": "step / both",
}
BYTES_NOTE = (
    "Sent: bytes of one rank in a step; by the kernel's counters of its node's link, headers included, mean of the "
    "nodes; by the meter of rank 0, payload alone, with what stays inside a node."
)


def write_race_report(out: Path) -> Path:
    """Write OUT/compare.html from compare.json and the metrics of its runs, and return its path.

    Raises ConfigError where there is no race, or the page can't be written.
    """
    try:
        values = json.loads((out / "compare.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(out)!r} holds no race that can be read: {error}") from None
    target, draft = out / "compare.html", out / ".compare.html.tmp"
    try:
        draft.write_text(render(values, out), encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        raise ConfigError(f"the report can't be written to {str(target)!r}: {error.strerror}") from error
    return target


def render(values: Mapping[str, Any], out: Path) -> str:
    """The whole page as text."""
    room = files("thinwire.report")
    style = "".join(room.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "race.css"))
    body = "\n".join(part for part in sections(values, out) if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(out.resolve().name)} · thinwire compare</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def sections(values: Mapping[str, Any], out: Path) -> Iterator[str]:
    """The page from top to bottom; an empty string for what the race has no data for."""
    names = [row["name"] for row in values["contestants"]]
    yield (
        f"<header><p class=brand>thinwire compare</p><h1>{text(' · '.join(names))}</h1>"
        f"<p>{text(values['lab'])} · {values['steps']} steps of {short(values['tokens_per_step'])} tokens</p></header>"
    )
    if values["stopped"]:
        yield f"<p class=warning>The race was stopped by {text(values['stopped'])}: these are the figures so far.</p>"
    yield result_table(values)
    yield from race_figures(values, out)
    yield table("What was asked for", ("asked for", "in effect", "why they differ"), values["effects"])
    yield table("What it depends on", ("what", "value"), circumstances(values))
    settings = json.dumps(values["settings"], indent=2)
    yield f"<details><summary>settings</summary><pre>{text(settings)}</pre></details>"


def result_table(values: Mapping[str, Any]) -> str:
    """One row per contestant; below each figure its ratio to the reference's."""
    rows = values["contestants"]
    shown = shown_figures(rows)
    head = "".join(f"<th scope=col>{text(word)}</th>" for word in ("contestant", *(FIGURES[name] for name in shown)))
    body = "".join(f"<tr>{''.join(result_cells(row, shown, values['reference']))}</tr>" for row in rows)
    sentences = "".join(f"<p>{text(words)}</p>" for words in notes(values))
    return (
        f"<section><h2>Result</h2><div class=scroll><table class=result><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>{sentences}</section>"
    )


def result_cells(row: Mapping[str, Any], shown: Sequence[str], reference: str | None) -> Iterator[str]:
    """The cells of one contestant; one that failed has its reason instead of figures."""
    words = " ".join([row["strategy"] or row["command"], *(f"{k}={v}" for k, v in row["options"].items())])
    whole = "; ran whole, in the last round" if row["is_whole"] else ""
    about = f"<small>{text(words + whole)}</small>" if words + whole != row["name"] else ""
    yield f"<td>{text(row['name'])}{about}</td>"
    if row["status"] == "failed":
        yield f"<td class=reason colspan={max(1, len(shown))}>failed: {text(row['reason'])}</td>"
        return
    for name in shown:
        ratio = ratio_text(name, row, reference)
        yield f"<td>{text(figure_text(name, row))}{f'<small>{ratio}</small>' if ratio else ''}</td>"


def shown_figures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The figures that at least one contestant has."""
    return [name for name in FIGURES if any(row["mean"][name] is not None for row in rows)]


def figure_text(name: str, row: Mapping[str, Any]) -> str:
    """A figure with its unit."""
    value = number(row["mean"][name])
    if not math.isfinite(value):
        has_target = any(seed["target_loss"] is not None for seed in row["seeds"])
        missed = name == "minutes_to_target" and has_target and row["status"] == "finished"
        return "not reached" if missed else MISSING
    if name == "minutes_to_target":
        return f"{value:.2f} min"
    if name.endswith("_s") and name != "tokens_per_s":
        return seconds_text(value)
    if "_bytes" in name:
        return bytes_text(value)
    return short(value) if name == "tokens_per_s" else f"{value:.4f}" if name == "heldout_loss" else f"{value:.2f}"


def ratio_text(name: str, row: Mapping[str, Any], reference: str | None) -> str:
    """A figure's ratio to the reference's; empty for the reference itself and where one of the two is missing."""
    ratio = row["ratio"].get(name)
    return f"{ratio:.3f}x" if ratio is not None and row["name"] != reference else ""


def notes(values: Mapping[str, Any]) -> list[str]:
    """The sentences below the table."""
    sentences = (reference_note(values), seconds_note(values), BYTES_NOTE, bound_note(values))
    return [words for words in sentences if words]


def reference_note(values: Mapping[str, Any]) -> str:
    if not values["reference"]:
        return "No contestant finished, so there are no ratios."
    why = f" ({values['reference_why']})" if values["reference_why"] else ""
    seeds = values["settings"]["seeds"]
    means = f" Figures are means over the seeds {', '.join(map(str, seeds))}." if len(seeds) > 1 else ""
    return f"1.000x: ratio to {values['reference']}{why}.{means}"


def seconds_note(values: Mapping[str, Any]) -> str:
    """How many steps were timed, and what the minutes are computed from."""
    counts = {
        (seed["num_timed_steps"], seed["num_steps"])
        for row in values["contestants"]
        for seed in row["seeds"]
        if seed["num_steps"]
    }
    if not counts:
        return ""
    least, most = min(timed for timed, _ in counts), max(timed for timed, _ in counts)
    timed = f"{least}" if least == most else f"{least} to {most}"
    targets = [seed["target_loss"] for row in values["contestants"] for seed in row["seeds"]]
    stated = sorted({f"{target:.4f}" for target in targets if target is not None})
    to_target = (
        f" Minutes to the target {' / '.join(stated)}: steps until the mean training loss of {values['smooth']} steps "
        "is at most that, times that of a step."
    )
    return f"{timed} of {values['steps']} steps timed in the slow network, {values['average']}s." + (
        to_target if stated else ""
    )


def bound_note(values: Mapping[str, Any]) -> str:
    """What the bound is made of."""
    alone = values["compute_alone_s"]
    if values["compute_alone_failed"]:
        return f"Computation alone could not be measured: {values['compute_alone_failed']}"
    if alone is None:
        return ""
    return (
        f"Computation alone takes {seconds_text(alone)} a step, all ranks at once and nothing sent, the optimizer over "
        "all parameters on each. Bound: the larger of that and the busiest link's bytes over its rate. Not to be "
        "hidden: what comes on top, since weights can only travel until the forward has ended, and gradients after it."
    )


def circumstances(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Command, network, machine and versions."""
    yield "command", values["command"]
    yield "network", values["lab"]
    for name in ("machine", "versions"):
        yield from ((key, str(value)) for key, value in values[name].items())
