"""The benchmark of the exchange trains all variants alike and sends less with each. Nothing here looks at a time."""

from __future__ import annotations

import json
from pathlib import Path

from launching import run_script

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "exchange.py"


def test_exchange(tmp_path: Path) -> None:
    output = tmp_path / "exchange.json"
    options = ("--graph", "tiny", "--model", "gcn", "--rounds", "1", "--output", str(output))
    ended = run_script("ranks", 2, SCRIPT, *options)
    assert ended.codes == [0, 0], ended.stderr
    found = json.loads(output.read_text())
    assert str(tmp_path) not in found["command"]
    sent = [variant["bytes_sent"] for variant in found["variants"].values()]
    assert sent == sorted(sent, reverse=True)
    assert sent[-1] < sent[0]
    without, hidden = found["overlap_ms"]["without overlap"], found["overlap_ms"]["with overlap"]
    assert without["wait"] > 0 == hidden["wait"]
    assert min(without["exchange"], hidden["exchange"]) > 0
