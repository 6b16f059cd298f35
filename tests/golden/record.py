"""Writes golden.json: `python -m tests.golden.record [PREFIX ...]` records the entries that begin so, or all.

One line is one entry. Bits are kept by the fingerprint of the machine's arithmetic. An entry whose bits have changed
here forgets those of other machines, which must have changed too. On a processor with AVX-512, the bits of those
without are recorded under ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2.

Nothing is left out for its randomness: the rows and the runs repeat bit for bit. The model of the runs is too small
for two-way to compress anything by default; the rows of the suites hold that.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.golden import found
from tests.golden.arithmetic import description

FILE = Path(__file__).parent / "golden.json"


def read() -> dict[str, dict[str, Any]]:
    """`machines`: fingerprint to description; `entries`: name to what is recorded."""
    return json.loads(FILE.read_text()) if FILE.exists() else {"machines": {}, "entries": {}}


def write(record: dict[str, dict[str, Any]]) -> None:
    parts = []
    for part, rows in record.items():
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(rows[key])}" for key in sorted(rows))
        parts.append(f"{json.dumps(part)}: {{\n{lines}\n}}")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def merged(old: dict[str, Any] | None, new: found.Found, machine: str) -> dict[str, Any]:
    """The entry with this machine's bits."""
    others = old["bits"] if old and old["bits"].get(machine) in (None, new.bits) else {}
    # What lies within the bounds stays, so that recording again changes nothing.
    num_bytes = old["bytes"] if old and new.sends_as(old["bytes"]) else new.bytes
    return {"bytes": num_bytes, "bits": dict(sorted({**others, machine: new.bits}.items()))}


def main(prefixes: Sequence[str]) -> None:
    record, machine, started = read(), found.machine(), time.monotonic()
    names = set(found.everything())
    entries = record["entries"] = {name: entry for name, entry in record["entries"].items() if name in names}
    record["machines"][machine] = description()
    for group in found.groups():
        wanted = [name for name in group.names if name.startswith(tuple(prefixes) or "")]
        if not wanted:
            continue
        tell = group.compute(wanted)
        for name in wanted:
            old, entries[name] = entries.get(name), merged(entries.get(name), tell(name), machine)
            if old not in (None, entries[name]):
                print(f"changed: {name}", flush=True)
        print(f"{time.monotonic() - started:6.1f} s  {wanted[0]} and {len(wanted) - 1} more", flush=True)
        write(record)


if __name__ == "__main__":
    main(sys.argv[1:])
