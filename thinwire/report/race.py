"""A race as one self-contained HTML page: the verdict, the table, the plots, and the conditions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.report.frontier import frontier_sentence, race_outcomes
from thinwire.report.page import date_text, facts, host_text, plots, table, text, write_page
from thinwire.report.race_charts import race_figures
from thinwire.report.run import number
from thinwire.report.units import MISSING, bytes_text, seconds_text, short
from thinwire.report.verdict import FEW_TIMED, FINISHED, verdict

# The columns of the table.
FIGURES = {
    "step_s": "step",
    "tokens_per_s": "tokens/s",
    "minutes_to_target": "to the target",
    "kernel_sent_bytes_per_step": "sent per step",
    "heldout_loss": "held-out loss",
    "peak_rss_bytes": "memory of a rank",
    "disk_bytes_per_step": "disk per step",
    "step_over_bound": "step / least",
}
# Columns of the folded table below the main one.
DETAILS = {
    "compute_s": "computing",
    "exposed_comm_s": "waiting",
    "exposed_disk_s": "waiting for the disk",
    "codec_s": "packing",
    "kernel_sent_bytes_per_step_worst_node": "busiest node sent",
    "sent_bytes_per_step": "payload",
    "train_loss": "training loss",
    "bound_s": "computing or link",
    "unhidden_s": "can't overlap",
}
HIGHEST_IS_BEST = ("tokens_per_s",)
NO_BEST = ("step_over_bound",)
SENT_NOTE = (
    "Sent: bytes that one rank sends in a step, headers included. The kernel counts them on each node's link; shown is "
    "the mean over the nodes."
)
DETAILS_NOTE = (
    "Packing: the communication thread packs and unpacks, while the rank computes or waits. Payload: what rank 0 sent, "
    "without headers, and with what stays inside a node."
)


def write_race_report(out: Path) -> Path:
    """Write OUT/compare.html from compare.json and the metrics of its runs, and return its path.

    Raises ConfigError if there is no race, or if the page can't be written.
    """
    try:
        values = json.loads((out / "compare.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(out)!r} holds no race that can be read: {error}") from None
    return write_page(out / "compare.html", f"{out.resolve().name} · thinwire compare", sections(values, out))


def sections(values: Mapping[str, Any], out: Path) -> Iterator[str]:
    """Yield the sections of the page from top to bottom; an empty string if the race has no data for one."""
    names = " · ".join(row["name"] for row in values["contestants"])
    first, *others = sentences(values, out) or [names]
    yield (
        f"<header><p class=brand>thinwire compare</p><h1>{text(first)}</h1>"
        f"<p class=verdict>{text(' '.join(others))}</p>{facts(circumstances(values))}</header>"
    )
    if values["stopped"]:
        yield f"<p class=warning>The race was stopped by {text(values['stopped'])}: these are the figures so far.</p>"
    yield result_table(values)
    yield plots(race_figures(values, out))
    yield table("What was asked for", ("asked for", "in effect", "why they differ"), values["effects"])
    settings = json.dumps(values["settings"], indent=2)
    yield f"<details><summary>settings</summary><pre>{text(settings)}</pre></details>"


def sentences(values: Mapping[str, Any], out: Path) -> list[str]:
    """The verdict, and the sentence about the frontier of loss and bytes."""
    return [*verdict(values), *filter(None, [frontier_sentence(race_outcomes(values, out))])]


def result_table(values: Mapping[str, Any]) -> str:
    """The result table: one row per contestant, with its ratio to the reference and its spread below each figure."""
    below = "".join(f"<p>{text(words)}</p>" for words in notes(values))
    details = table_of(DETAILS, values)
    more = f"<details><summary>More figures</summary>{details}<p>{text(DETAILS_NOTE)}</p></details>" if details else ""
    return f"<section><h2>Result</h2>{table_of(FIGURES, values)}{below}{more}</section>"


def table_of(columns: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """The figures of all contestants, with the best of each column marked; empty if none is known."""
    rows = values["contestants"]
    shown = {name: columns[name] for name in shown_figures(columns, rows)}
    if not shown and columns is DETAILS:
        return ""
    head = "".join(f"<th scope=col>{text(word)}</th>" for word in ("contestant", *shown.values()))
    best = best_of(shown, rows) if columns is FIGURES else {}
    body = "".join(f"<tr>{''.join(result_cells(row, shown, values['reference'], best))}</tr>" for row in rows)
    return f"<table class=result><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def result_cells(
    row: Mapping[str, Any], shown: Mapping[str, str], reference: str | None, best: Mapping[str, str]
) -> Iterator[str]:
    """Cells of one contestant's row. A failed contestant has its reason instead of figures."""
    words = " ".join([row["strategy"] or row["command"], *(f"{k}={v}" for k, v in row["options"].items())])
    whole = "; in one piece, in the last round" if row["is_whole"] else ""
    about = f"<small>{text(words + whole)}</small>" if words + whole != row["name"] else ""
    yield f"<th scope=row>{text(row['name'])}{about}</th>"
    if row["status"] == "failed":
        yield f"<td class=reason colspan={max(1, len(shown))}>failed: {text(row['reason'])}</td>"
        return
    for name, column in shown.items():
        small = filter(None, (ratio_text(name, row, reference), spread_text(name, row)))
        about = "".join(f"<small>{text(words)}</small>" for words in small)
        figure = figure_text(name, row)
        is_best = ' class="best"' if best.get(name) == figure and row["status"] == FINISHED else ""
        yield f'<td{is_best} data-label="{text(column)}"><span>{text(figure)}</span>{about}</td>'


def shown_figures(columns: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The figures that at least one contestant has."""
    # A race of an earlier version lacks some.
    return [name for name in columns if any(row["mean"].get(name) is not None for row in rows)]


def best_of(names: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The best value of each figure, as shown, if contestants that finished differ in it."""
    best = {}
    for name in (name for name in names if name not in NO_BEST):
        known = [row["mean"][name] for row in rows if row["status"] == FINISHED and row["mean"][name] is not None]
        if len({value_text(name, value) for value in known}) > 1:
            best[name] = value_text(name, max(known) if name in HIGHEST_IS_BEST else min(known))
    return best


def figure_text(name: str, row: Mapping[str, Any]) -> str:
    """A figure with its unit."""
    value = number(row["mean"][name])
    if not math.isfinite(value):
        has_target = any(seed["target_loss"] is not None for seed in row["seeds"])
        missed = name == "minutes_to_target" and has_target and row["status"] == FINISHED
        return "not reached" if missed else MISSING
    return value_text(name, value)


def value_text(name: str, value: float) -> str:
    """A value of a figure with its unit."""
    if name == "minutes_to_target":
        return f"{value:.2f} min"
    if name.endswith("_s") and name != "tokens_per_s":
        return seconds_text(value)
    if "_bytes" in name:
        return bytes_text(value)
    return short(value) if name == "tokens_per_s" else f"{value:.4f}" if name.endswith("_loss") else f"{value:.2f}"


def ratio_text(name: str, row: Mapping[str, Any], reference: str | None) -> str:
    """Ratio of a figure to the reference's; empty for the reference itself and if one of the two is missing."""
    ratio = row["ratio"].get(name)
    return f"{ratio:.3f}x" if ratio is not None and row["name"] != reference else ""


def spread_text(name: str, row: Mapping[str, Any]) -> str:
    """The lowest and the highest value of a figure, if they differ in the digits shown."""
    ends = row["spread"].get(name)
    low, high = (value_text(name, value) for value in ends) if ends else ("", "")
    return f"{low} to {high}" if low != high else ""


def notes(values: Mapping[str, Any]) -> list[str]:
    """The sentences below the table."""
    found = (reference_note(values), seconds_note(values), SENT_NOTE, bound_note(values))
    return [words for words in found if words]


FEW_NOTE = (
    f"WARNING: with fewer than {FEW_TIMED} timed steps a busy moment decides; state more --steps or"
    " --timed-steps before you compare times."
)


def reference_note(values: Mapping[str, Any]) -> str:
    if not values["reference"]:
        return "No contestant finished, so there are no ratios."
    why = f" ({values['reference_why']})" if values["reference_why"] else ""
    seeds = values["settings"]["seeds"]
    means = f" Figures are means over the seeds {', '.join(map(str, seeds))}." if len(seeds) > 1 else ""
    spread = " Below a figure: its ratio to that, and the lowest and the highest value over rounds or seeds."
    return f"1.000x is {values['reference']}{why}.{spread}{means}"


def seconds_note(values: Mapping[str, Any]) -> str:
    """Note on the number of timed steps and the computation of the minutes."""
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
        f" To the target: the step time, times the steps until the mean training loss of {values['smooth']} steps is "
        f"at most {' / '.join(stated)}."
    )
    timed_text = (
        f"{timed} of {values['steps']} steps were timed in the slow network; step times are {values['average']}s."
    )
    few = f" {FEW_NOTE}" if least < FEW_TIMED else ""
    return timed_text + few + (to_target if stated else "")


def bound_note(values: Mapping[str, Any]) -> str:
    """Note on the parts of the bound."""
    alone = values["compute_alone_s"]
    if values["compute_alone_failed"]:
        return f"Computation alone could not be measured: {values['compute_alone_failed']}"
    if alone is None:
        return ""
    return (
        f"Computing alone takes {seconds_text(alone)} a step: all ranks at once, nothing sent, each updating all "
        "parameters. The least step is the longer of computing and sending on the busiest link, plus what can't "
        "overlap: weights must arrive before the forward ends, and gradients leave after it."
    )


def circumstances(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Network, steps, date, host, versions and command."""
    yield "network", values["lab"]
    seeds = values["settings"]["seeds"]
    num_seeds = f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"
    yield "length", f"{values['steps']} steps of {short(values['tokens_per_step'])} tokens, {num_seeds}"
    yield "ended", date_text(datetime.fromisoformat(values["measured_at"]))
    yield "host", host_text(values["machine"])
    yield "versions", ", ".join(f"{name} {version}" for name, version in values["versions"].items())
    if values["command"]:
        yield "command", values["command"]
