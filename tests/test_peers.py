"""`benchmarks/peers.py` with the rows that need no environment of their own: what becomes of the judge's faults."""

import json
from importlib import import_module

from conftest import ROOT


def test_peers_counts_what_becomes_of_a_failed_judgment(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    words = "--rows rankbuffer-trl trl --queries 4 --steps 1 --malformed 0.03 --errors 0"
    words += " --latency 0.001 --token_seconds 0"
    monkeypatch.setattr("sys.argv", ["peers.py", *words.split()])
    import_module("peers").main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    theirs = [rows.pop(name) for name in ("TRL, one by one", "TRL, 64 threads")]
    for row in rows.values():
        assert row["open"] == row["lost"] == row["in_spite"] == 0 and not row["crashes"] and row["tau"] > 0.3
    assert sum(row["faulty"] for row in rows.values()) > 5, "each was asked again"
    for row in theirs:
        assert row["faulty"] == row["open"] == row["in_spite"] > 0 and row["lost"] == 0 and row["requests"] == 4 * 8
