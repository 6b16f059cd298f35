"""Files that are no machine.json are refused, each with the key and the rule."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from thinwire.cost import Cores, Machine, Network
from thinwire.errors import ConfigError

LAYER = "layer 64 fp32"
MACHINE = Machine(("a",) * 4, Network.even(4, 1e6, 1e-3, local_size=2), Cores((0,) * 4, (2.0,)), {LAYER: 4e9})
WRONG: list[tuple[str, Any, str]] = [
    (f"rates/{LAYER}", math.nan, "rates.layer 64 fp32 nan: must be a number above 0"),
    (f"rates/{LAYER}", -1.0, "rates.layer 64 fp32 -1.0: must be a number above 0"),
    (f"rates/{LAYER}", 0, "rates.layer 64 fp32 0: must be a number above 0"),
    (f"rates/{LAYER}", None, "rates.layer 64 fp32 null: must be a number above 0"),
    (f"rates/{LAYER}", "4e9", "rates.layer 64 fp32 '4e9': must be a number above 0"),
    ("rates", [4e9], "rates [4000000000.0]: must be an object"),
    ("rates/layer fp32", 4e9, "rates.layer fp32: must be a kind of work with its width and type; nearest: layer 512"),
    ("names", ["a"] * 3, "network.nodes: has 4 entries, must have 3"),
    ("names", ["a"] * 5, "network.nodes: has 4 entries, must have 5"),
    ("names", [], "names []: must be a list of text"),
    ("cores/hosts", [0, 0, 0], "cores.hosts: has 3 entries, must have 4"),
    ("cores/hosts", [0, 0, 0, 1], r"cores.hosts [0, 0, 0, 1]: must be below 1"),
    ("cores", [2], "cores [2]: must be an object with the keys hosts, num"),
    ("speeds", [1.0, 1.0], "speeds: has 2 entries, must have 4"),
    ("speeds", [1.0, 0.0, 1.0, 1.0], "speeds[1] 0.0: must be a number above 0"),
    ("speeds", [1.0, 1.0, math.nan, 1.0], "speeds[2] nan: must be a number above 0"),
    ("threads", 0, "threads 0: must be a whole number of at least 1"),
    ("memory_bytes", math.nan, "memory_bytes nan: must be a number above 0, or null"),
    ("memory_bytes", "8gb", "memory_bytes '8gb': must be a number above 0, or null"),
    ("network/nodes", [0, 1, 0, 1], "must be side by side, as many on each; nearest: [0, 0, 1, 1]"),
    ("network/nodes", [0, 1, 1, 2], "must be side by side, as many on each; nearest: [0, 0, 1, 1]"),
    ("network/nodes", [0, 0, 1, 2], "must be side by side, as many on each; nearest: [0, 0, 1, 1]"),
    ("network/rates", [[1.0] * 4] * 3, "network.rates: has 3 entries, must have 4"),
    ("network/delays_s", [[-1.0] * 4] * 4, "network.delays_s[0][1] -1.0: must be a number of at least 0"),
    ("network/rate", 1.0, "network.rate: no such key; did you mean 'rates'?"),
    ("scater", [], "scater: no such key; did you mean 'scatter'?"),
    ("repeats", {LAYER: 0}, "repeats.layer 64 fp32 0: must be a whole number of at least 1"),
]


@pytest.mark.parametrize(("place", "value", "said"), WRONG)
def test_a_wrong_value_is_refused(place: str, value: Any, said: str, tmp_path: Path) -> None:
    values = json.loads(MACHINE.to_json())
    *above, key = place.split("/")
    (values[above[0]] if above else values)[key] = value
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as caught:
        Machine.read(file)
    assert caught.value.exit_code == 2
    assert said in str(caught.value) and f"{file}: " in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\xff\xfe{}", "no text in UTF-8"), (b"{", "is no JSON"), (b"[" * 10**5, "is no JSON"), (b"[]", "an object")],
)
def test_a_file_that_is_no_json_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        Machine.read(file)


def test_all_faults_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    values = json.loads(MACHINE.to_json())
    values |= {"threads": 0, "share": 0}
    del values["network"]["nodes"]
    with pytest.raises(ConfigError) as caught:
        Machine.from_json(json.dumps(values))
    assert len(caught.value.problems) == 3 and "network.nodes: is not there, and must be" in str(caught.value)
    assert Machine.from_json(MACHINE.to_json()) == MACHINE
