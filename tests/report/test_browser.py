"""Both pages in headless Chromium, on a wide screen and on a telephone, light and dark: all is inside and legible."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_race import FIGURES, UNKNOWN, row as contestant, write_race
from tests.report.test_report import PLAN, SUMMARY, row, write_run
from thinwire.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
WIDTHS = (1400, 480)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1500,900",
)  # fmt: skip
LOOK = """
const shown = (e) => e.getClientRects().length > 0;
const name = (e) => `${e.tagName} ${e.getAttribute('class') || ''}: ${e.textContent.trim().slice(0, 40)}`;
const apart = (a, b) => a.right <= b.left + 1 || b.right <= a.left + 1
  || a.bottom <= b.top + 3 || b.bottom <= a.top + 3;
const parts = (colour) => colour.match(/[0-9.]+/g).map(Number);
const light = (colour) => parts(colour).slice(0, 3).map((c) => c / 255)
  .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
function look(frame) {
  const page = frame.contentDocument, view = frame.contentWindow, root = page.documentElement;
  page.querySelectorAll('details').forEach((details) => details.open = true);
  const all = [...page.body.querySelectorAll('*')].filter(shown);
  const html = all.filter((e) => !e.closest('svg'));
  const texts = [...page.querySelectorAll('svg text')];
  const found = {dark: view.matchMedia('(prefers-color-scheme: dark)').matches, texts: texts.length, faults: []};
  if (root.scrollWidth > root.clientWidth) found.faults.push(`the page is ${root.scrollWidth} wide`);
  for (const e of html) {
    if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth) found.faults.push(`hidden behind a scrollbar: ${name(e)}`);
    if (e.getBoundingClientRect().right > root.clientWidth + 1) found.faults.push(`beyond the edge: ${name(e)}`);
  }
  for (const svg of page.querySelectorAll('svg')) {
    const own = [...svg.querySelectorAll('text')], edge = svg.getBoundingClientRect();
    const boxes = own.map((e) => e.getBoundingClientRect());
    own.forEach((e, i) => {
      if (boxes[i].left < edge.left - 1 || boxes[i].right > edge.right + 1) found.faults.push(`cut off: ${name(e)}`);
      if (boxes[i].height < 10) found.faults.push(`too small: ${name(e)}`);
      own.slice(i + 1).forEach((other, j) => {
        if (!apart(boxes[i], boxes[i + 1 + j])) found.faults.push(`${name(e)} lies on ${name(other)}`);
      });
    });
  }
  for (const e of [...texts, ...html.filter((e) => [...e.childNodes].some((n) => n.nodeType == 3 && n.data.trim()))]) {
    const style = view.getComputedStyle(e), colour = e.closest('svg') ? style.fill : style.color;
    let behind = e;
    while (behind && !(parts(view.getComputedStyle(behind).backgroundColor)[3] ?? 1)) behind = behind.parentElement;
    const ground = view.getComputedStyle(behind || page.body).backgroundColor;
    if (contrast(colour, ground) < 4) found.faults.push(`${colour} on ${ground}: ${name(e)}`);
  }
  return found;
}
window.onload = () => {
  const found = [...document.querySelectorAll('iframe')].map(look);
  document.body.innerHTML = '<pre id=found></pre>';
  document.querySelector('#found').textContent = JSON.stringify(found);
};
"""


def run_page(folder: Path) -> str:
    rows = [row(step, loss=5.0 / step, grad_norm=1e-5 * step, lr=2.5e-4 / step) for step in range(1, 201)]
    summary = {**SUMMARY, "parameters": 123_456_789, "a_long_name_of_some_figure_that_was_added_later": 0.123456789}
    (folder / "plan.json").write_text(json.dumps(PLAN))
    return write_report(write_run(folder, rows, summary)).read_text()


def race_page(folder: Path) -> str:
    """Ten contestants whose losses lie over one another, one of them failed, and one with a long name."""
    names = ["zero", *(f"strategy-{number}" for number in range(7)), "a-contestant-with-quite-a-long-name"]
    spread = {name: (0.9 * value, 1.1 * value) for name, value in FIGURES.items()}
    rows = [contestant(name, {**FIGURES, "step_s": 0.4 + 0.1 * n}, spread=spread) for n, name in enumerate(names)]
    failed = contestant("bad", UNKNOWN, status="failed", reason="rank 1 ended with 4: " + "no luck " * 30)
    return write_race(folder, *rows, failed)


PAGES = {"run": run_page, "race": race_page}


@cache
def seen(page: str, is_dark: bool, folder: Path) -> list[dict[str, Any]]:
    """What the browser measured of the page, once for each width."""
    frames = "".join(
        f'<iframe style="width:{width}px;height:900px" srcdoc="{escape(page)}"></iframe>' for width in WIDTHS
    )
    harness = folder / "harness.html"
    harness.write_text(f"<!doctype html><meta charset=utf-8><script>{LOOK}</script><body>{frames}")
    scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, scheme, f"--user-data-dir={folder / 'profile'}", "--dump-dom", harness.as_uri()]
    dom = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r'<pre id="found">(.*?)</pre>', dom, flags=re.DOTALL)
    assert found is not None, dom[-2000:]
    return json.loads(unescape(found[1]))


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_everything_is_inside_apart_and_legible(name: str, is_dark: bool, tmp_path: Path) -> None:
    for width, found in zip(WIDTHS, seen(PAGES[name](tmp_path), is_dark, tmp_path), strict=True):
        assert found["dark"] == is_dark and found["texts"] > 30
        assert not found["faults"], f"at {width} px: {found['faults'][:5]}"


def test_the_browser_sees_faults(tmp_path: Path) -> None:
    wide = '<p style="width:3000px">wide</p><div style="overflow:auto"><p style="width:2000px">far</p></div>'
    texts = '<text x="5" y="20">one</text><text x="8" y="22">two</text><text x="90" y="60">cut off here</text>'
    page = f'<!doctype html><body style="background:#fff;color:#eee">{wide}<svg viewBox="0 0 100 80">{texts}</svg>'
    for found in seen(page, False, tmp_path):
        faults = " / ".join(found["faults"])
        for fault in ("the page is", "behind a scrollbar", "beyond the edge", "one lies on", "cut off:", "rgb(238"):
            assert fault in faults
