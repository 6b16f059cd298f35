"""A run as one self-contained HTML page, without scripts, and without fonts or pictures from elsewhere."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any

from thinwire.cost.drift import moved_s
from thinwire.errors import ConfigError
from thinwire.report.charts import Figure, figures
from thinwire.report.machine import machine
from thinwire.report.metrics import OF_MESSAGES, WAITED
from thinwire.report.planned import planned_figures
from thinwire.report.run import RunFiles, number, read_run
from thinwire.report.timeline import timeline_figures
from thinwire.report.units import MISSING, bytes_text, percent_text, seconds_text, short

PAYLOAD = "payload of rank 0"
# What a plan predicts, in words.
PREDICTED = {
    "step_s": "the step", "compute_s": "computing", "exposed_comm_s": "waiting for messages", "codec_s": "packing",
    "pipeline_s": "forwards and backwards of its stage, with waiting", "sent_bytes": "sent",
    "peak_rss_bytes": "memory at its peak",
}  # fmt: skip
# What a reader of a step's parts, predicted and measured, must know.
BORDER = (
    "Where ranks share the cores of a machine, read the step and not its parts: the border between computing and "
    "waiting is not predicted there."
)
UNDER_WAY = (
    "Under way: seconds in which a message of that name was on its way to or from rank 0, waiting for the other rank "
    "included, so a rank that comes late counts, and messages of different names may overlap. They are predicted where "
    "the run has measured its links."
)
# Formats of values in summary.json, by the suffix of their names; the first that matches is used.
UNITS = {
    "_per_s": short, "_s": seconds_text, "_bytes": bytes_text, "_bytes_per_step": bytes_text, "tokens": short,
    "parameters": short, "_loss": lambda value: f"{value:.4f}",
}  # fmt: skip


def write_report(run_dir: Path) -> Path:
    """Write RUN_DIR/report.html from metrics.jsonl, summary.json and config.toml, and return its path.

    Works on a run in any state, on the machine of its rank 0, which the page names. Raises ConfigError if the directory
    holds no run or can't be written.
    """
    run = read_run(run_dir)
    return write_page(run_dir / "report.html", f"{run.name} · thinwire", sections(run))


def write_page(target: Path, title: str, parts: Iterable[str]) -> Path:
    """Write a page of these parts, without empty ones. Return its path. Raises ConfigError if it can't be written."""
    style = files("thinwire.report").joinpath("style.css").read_text(encoding="utf-8")
    body = "\n".join(filter(None, parts))
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )
    draft = target.with_name(f".{target.name}.tmp")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        raise ConfigError(f"the report can't be written to {str(target)!r}: {error.strerror}") from error
    return target


def sections(run: RunFiles) -> Iterator[str]:
    """Yield the sections of the page from top to bottom; an empty string if the run has no data for one."""
    name = f"<p class=brand>thinwire train</p><h1>{text(run.name)}</h1>"
    yield f"<header>{name}<p>{text(subtitle(run))}</p>{facts(circumstances(run))}</header>"
    yield warning(run)
    yield headline(run)
    yield membership_table(run)
    yield plan_table(run)
    yield plots(figure(item) for item in planned_figures(run))
    yield plots(figure(item) for item in [*figures(run), *timeline_figures(run)])
    yield ways_table(run)
    yield sent_table(run)
    yield sample(run.summary.get("sample"))
    yield summary_table(run.summary)
    yield effects_table(run.summary.get("effects"))
    yield config(run.config)


def subtitle(run: RunFiles) -> str:
    """One line: strategy, ranks, steps."""
    summary = run.summary
    words = [str(summary["strategy"])] if "strategy" in summary else []
    if "world_size" in summary:
        words.append(f"{summary['world_size']} rank{'s' * (summary['world_size'] != 1)}")
    words.append(f"{len(run.steps)} step{'s' * (len(run.steps) != 1)}")
    if math.isfinite(tokens := run.last("tokens")):
        words.append(f"{short(tokens)} tokens")
    if math.isfinite(parameters := number(summary.get("parameters"))):
        words.append(f"{short(parameters)} parameters")
    return " · ".join(words)


def circumstances(run: RunFiles) -> Iterator[tuple[str, str]]:
    """Date, machine, and the command that repeats the run."""
    if run.changed is not None:
        yield "ended" if run.summary else "last written", date_text(run.changed)
    yield "host", host_text(machine())
    if run.config:
        other = str(unused_beside(run.path))
        train = shlex.join(["thinwire", "train", str(run.path / "config.toml"), "--run-dir", other])
        lab = run.summary.get("lab")
        yield "repeat with", f"{lab} -- {train}" if lab else train


def unused_beside(path: Path) -> Path:
    """A name of no folder yet: the path's, and the first number from 2 up."""
    path = path if path.name else path.resolve()
    return next(other for n in count(2) if not (other := path.with_name(f"{path.name}-{n}")).exists())


def host_text(values: Mapping[str, Any]) -> str:
    """A machine in one line."""
    return f"{values['host']} · {values['processor']} · {values['cores']} cores"


def date_text(when: datetime) -> str:
    """Date, minute and time zone."""
    return f"{when:%Y-%m-%d %H:%M} {when.tzname() or ''}".rstrip()


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """A list of short names with their values."""
    return f"<dl class=facts>{''.join(f'<dt>{text(name)}</dt><dd>{text(value)}</dd>' for name, value in rows)}</dl>"


def plots(parts: Iterable[str]) -> str:
    """Figures side by side if the window is wide enough."""
    body = "".join(parts)
    return f"<div class=plots>{body}</div>" if body else ""


def warning(run: RunFiles) -> str:
    """A box that says why a run is incomplete."""
    reasons = []
    if not run.steps:
        reasons.append("No step has finished.")
    if (last := run.broken_off) is not None:
        reasons.append(f"The run was broken off after step {last}, or goes on: it has written no summary.")
    elif (stopped := str(run.summary.get("stopped", "finished"))) != "finished":
        reasons.append(f"The run was stopped before its end: {stopped}.")
    return f"<p class=warning>{text(' '.join(reasons))}</p>" if reasons else ""


def beside_plain(sent: float, plain: float, of: str = "") -> str:
    """Bytes beside those of fp32: fewer with compression, more where an axis sends what is no gradient.

    of: what would send these in fp32; empty: the run itself.
    """
    name = f"{of} in fp32" if of else "fp32"
    return (
        f"{plain / sent:.2f} times less than {name}" if sent <= plain else f"{sent / plain:.2f} times as much as {name}"
    )


def headline(run: RunFiles) -> str:
    """The four figures that readers look for first."""
    sent, plain = run.typical("sent_bytes"), number(run.summary.get("uncompressed_bytes_per_step"))
    step_s, exposed = run.typical("step_s"), run.typical("exposed_comm_s")
    heldout = number(run.summary.get("heldout_loss"))
    loss = heldout if math.isfinite(heldout) else run.last("loss")
    spent_s = sum(value for _, value in run.series("step_s") if math.isfinite(value))
    so_far = run.last("tokens") / spent_s if spent_s else math.nan
    tokens_per_s = number(run.summary.get("tokens_per_s", so_far))
    less = beside_plain(sent, plain, run.uncompressed_of) if plain > 0 and run.is_typical and sent > 0 else PAYLOAD
    cards = [
        ("held-out loss" if math.isfinite(heldout) else "last training loss", _loss(loss), "nats per token"),
        ("sent in a median step", bytes_text(sent), less),
        ("step", seconds_text(step_s), f"median; {short(tokens_per_s)} tokens/s"),
        ("waiting", percent_text(exposed / step_s if step_s > 0 else math.nan), "of a step, for communication"),
    ]
    items = (
        f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd><dd class=note>{text(note)}</dd></div>"
        for name, value, note in cards
    )
    return f"<dl class=cards>{''.join(items)}</dl>" if run.steps else ""


def plan_table(run: RunFiles) -> str:
    """What the plan predicted, and what the run measured; then the links that have drifted."""
    rows = []
    for name, value in run.plan.get("predicted", {}).items():
        measured = run.typical(name) if any(name in row for row in run.steps) else number(run.summary.get(name))
        more = measured / value - 1 if value else math.nan
        words = f"{PREDICTED[name]} ({name})" if name in PREDICTED else name
        rows.append((words, value_text(name, value), value_text(name, measured), more_text(more)))
    if not rows:
        return ""
    note = f"{run.plan.get('flags', '')}; ranks in the order {' '.join(map(str, run.plan.get('order', ())))}"
    found = table("The plan against the run", ("a step of rank 0", "predicted", "measured", "than predicted"), rows)
    drift = [
        (
            f"{source} to {target}",
            f"{8e-6 * before:.3g} Mbit/s",
            f"{8e-6 * after:.3g} Mbit/s",
            percent_text(after / before - 1) + later,
        )
        for source, target, before, after, later in map(drift_of, run.plan.get("drifted", ()))
    ]
    if drift:
        found += table("Links that have drifted", ("link", "planned", "measured", "change"), drift)
    return f"{found}<p>{text(note)}</p><p>{text(BORDER)}</p>"


def more_text(more: float) -> str:
    """By how much a measured value is above a predicted one, as a share of it, in words."""
    if not math.isfinite(more):
        return MISSING
    return "the same" if round(100 * more) == 0 else percent_text(abs(more)) + (" more" if more > 0 else " less")


def drift_of(drifted: Sequence[Any]) -> tuple[Any, Any, float, float, str]:
    """A link that has drifted: its ranks, its rates, and words on its delays; plans of earlier versions have none."""
    source, target, before, after, *delays = drifted
    before_s, after_s = delays or (0.0, 0.0)
    words = f", {1e3 * before_s:.3g} to {1e3 * after_s:.3g} ms of delay" if moved_s(before_s, after_s) else ""
    return source, target, before, after, words


def ways_table(run: RunFiles) -> str:
    """The ways of rows to experts over the steps."""
    rows = []
    for line in run.ways:
        predicted, measured = (number(line.get(key)) or math.nan for key in ("predicted_s", "measured_s"))
        seconds = (seconds_text(each) if math.isfinite(each) else MISSING for each in (predicted, measured))
        rows.append((str(line.get("after_step")), str(line.get("way")), str(line.get("why")), *seconds))
    header = ("after step", "way", "why", "predicted, a layer", "measured, a layer")
    return table("Ways of rows to experts", header, rows) if rows else ""


def membership_table(run: RunFiles) -> str:
    """The islands, or stages, that were lost and joined over the steps."""
    rows = [
        (
            str(line.get("after_step")), *(numbers(line.get(key)) for key in ("lost", "joined", "members")),
            seconds_text(number(line.get("cost_s"))), str(line.get("how")),
        )
        for line in run.memberships
    ]  # fmt: skip
    noun = next((str(line.get("noun", "island")) for line in run.memberships), "")
    words = WAITED.get(noun, WAITED["island"]).format("the time shown")
    header = ("after step", "lost", "joined", "go on", "waited", "how")
    title = f"{noun.capitalize()}s that were lost or joined"
    return f"{table(title, header, rows)}<p>{text(words[:1].upper() + words[1:])}.</p>" if rows else ""


def numbers(value: Any) -> str:
    """Numbers of islands or stages in words."""
    return ", ".join(map(str, value)) if isinstance(value, list) else MISSING


def sent_table(run: RunFiles) -> str:
    """The messages of rank 0 in a step, by name and level: of each start of the run, up to its last checkpoint."""
    whole = {"first_step": run.summary.get("resumed_after", 0), "after_step": run.summary.get("steps")}
    rows = []
    for part in run.traffic or [whole | {name: run.summary.get(name) for name in OF_MESSAGES}]:
        sent, *seconds = (part[key] if isinstance(part.get(key), Mapping) else {} for key in OF_MESSAGES)
        steps = f"{number(part.get('first_step')) + 1:.0f} to {number(part.get('after_step')):.0f}"
        for name, value in sent.items():
            spans = [seconds_text(number(each[name])) if name in each else MISSING for each in seconds]
            rows.append((steps, *name.rsplit(", ", 1), bytes_text(number(value)), *spans))
    header = ("steps", "message", "level", "sent in a step", "under way, measured", "under way, predicted")
    return f"{table('Messages of rank 0', header, rows)}<p>{text(UNDER_WAY)}</p>" if rows else ""


def figure(item: Figure) -> str:
    """A plot with its title, legend and notes."""
    notes = f"<figcaption>{text(' '.join(item.notes))}</figcaption>" if item.notes else ""
    return f"<section><h2>{text(item.title)}</h2>{legend(item.legend)}<figure>{item.svg}{notes}</figure></section>"


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """The legend of a plot. entries: (style of the swatch, text)."""
    items = "".join(f'<li><span class="swatch {style}"></span>{text(words)}</li>' for style, words in entries)
    return f"<ul class=legend>{items}</ul>" if items else ""


def effects_table(rows: Any) -> str:
    """Table of the rows (asked for, in effect, why they differ)."""
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
        return ""
    cells = ([str(cell) for cell in row] if isinstance(row, (list, tuple)) else [str(row)] for row in rows)
    return table("What was asked for", ("asked for", "in effect", "why they differ"), cells)


def sample(value: Any) -> str:
    """Text that the trained model wrote."""
    return f"<section><h2>Written by the model</h2><pre>{text(str(value))}</pre></section>" if value else ""


def summary_table(summary: Mapping[str, Any]) -> str:
    """Every entry of summary.json under the name that scripts use, rounded. The pointer shows the exact value."""
    rows = [
        f'<tr><td>{text(name)}</td><td title="{text(exact(value))}">{text(value_text(name, value))}</td></tr>'
        for name, value in flat(summary)
        if name.split(".")[0] not in ("effects", "sample", *OF_MESSAGES, "expert_rows")
    ]
    return raw_table("Summary", ("key in summary.json", "value"), rows) if rows else ""


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of nested mappings."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def value_text(name: str, value: Any) -> str:
    """A value with about three digits, and the unit given by its name."""
    if value is None:
        return MISSING
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        unit = next((unit for ending, unit in UNITS.items() if name.endswith(ending)), None)
        return unit(value) if unit else str(value) if isinstance(value, int) else short(value)
    return exact(value)


def exact(value: Any) -> str:
    """A value in JSON form; text without its quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def config(toml: str) -> str:
    """config.toml, folded."""
    return f"<details><summary>config.toml</summary><pre>{text(toml)}</pre></details>" if toml else ""


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain text under a heading."""
    return raw_table(
        title, header, ("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    )


def raw_table(title: str, header: Sequence[str], rows: Iterable[str]) -> str:
    """A table of finished rows under a heading."""
    head = "".join(f"<th scope=col>{text(cell)}</th>" for cell in header)
    body = "".join(rows)
    return (
        f"<section><h2>{text(title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></section>"
    )


def text(words: str) -> str:
    """Text escaped for HTML. Control characters, which a page must not contain, become a replacement mark."""
    return escape("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in words))


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not finite"
