"""The notebook in examples/ runs from top to bottom, and is stored without outputs."""

import re
from itertools import chain

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from tests.journeys.documents import ROOT

pytestmark = pytest.mark.long


def test_notebook_runs(tmp_path, monkeypatch):
    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    monkeypatch.delenv("XLA_FLAGS")  # a user's machine, not 8 virtual devices
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # Without ipywidgets, progress is plain lines.
    notebook.cells.insert(0, nbformat.v4.new_code_cell("import sys; sys.modules['ipywidgets'] = None"))
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute(cwd=tmp_path)
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    progress = "".join(output.get("text", "") for output in chain(*outputs) if output.get("name") == "stderr")
    assert "step 60 of 60: held-out loss" in progress and "ipywidgets" not in progress
    curves, sample, line = outputs[-3:]
    assert any("image/png" in output.get("data", {}) for output in curves)
    assert re.search(r"12 squared.{50}", sample[0].text, flags=re.DOTALL)
    found = [float(number) for number in re.findall(r"-?\d+\.\d+", line[-1].data["text/plain"])]
    np.testing.assert_allclose(found, [0.5, 1, -2, 3], atol=0.05)
