"""The benchmark of one GPU keeps the results of a part that fails, and continues with the next."""

import json
import sys
from pathlib import Path

from benchmarks import gpu_all
from benchmarks.gpu_all import Part
from benchmarks.report import Settings

RESULT = {"columns": ["loss"], "rows": [["3.5"]]}


def test_a_failing_part_keeps_its_results_and_the_next_part_runs(monkeypatch):
    prints = f"print({json.dumps(json.dumps(RESULT))}, flush=True)"
    codes = {"fails": f"{prints}; raise SystemExit('out of memory')", "works": prints}
    monkeypatch.setattr(gpu_all, "parts", lambda quick: [Part(name, 1, name, {}) for name in codes])
    monkeypatch.setattr(gpu_all, "_command", lambda part, peers: [sys.executable, "-c", codes[part.kind]])
    tables = gpu_all.run(Settings(True, Path()))
    assert [(table.title, *table.rows) for table in tables] == [
        ("fails", ["3.5"]),
        ("fails", ("failed: out of memory",)),
        ("works", ["3.5"]),
    ]
