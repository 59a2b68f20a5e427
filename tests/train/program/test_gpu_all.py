"""The benchmarks of one GPU keep the results of a part that fails, and continue with the next."""

import ast
import inspect
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks import gpu_all, gpu_decoder, gpu_sizes, gpu_step
from benchmarks.gpu_all import Part
from benchmarks.report import Settings

from tpuswarm.recipes.language import loss

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


def test_logits_in_bfloat16_stand_for_those_of_the_loss():
    random = np.random.default_rng(0)
    x, wte = (random.normal(size=size).astype(np.float32) for size in ((2, 3, 8), (6, 8)))
    ours, right = gpu_step._bf16_logits(x, wte, 5), loss.logits(x, wte, 5)
    assert inspect.signature(gpu_step._bf16_logits) == inspect.signature(loss.logits)
    assert ours.dtype == right.dtype and np.all(ours[..., 5:] < -1e29)
    np.testing.assert_allclose(ours[..., :5], right[..., :5], atol=0.05)


@pytest.mark.parametrize("benchmark", [gpu_all, gpu_sizes, gpu_decoder])
def test_every_part_can_start(benchmark):
    """Its function takes its options; those of peers are read without their torch."""
    path = Path(gpu_all.__file__).with_name("gpu_peers.py")
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    peers = {node.name: {argument.arg for argument in node.args.kwonlyargs} for node in functions}
    for quick in (False, True):
        parts = benchmark.parts(quick)
        assert {part.beside for part in parts} <= {"", *(part.name for part in parts)}
        for part in parts:
            if part.kind in gpu_all.PEERS:
                assert set(part.options) == peers[part.kind]
            else:
                inspect.signature(gpu_step.PARTS[part.kind]).bind(**part.options)
