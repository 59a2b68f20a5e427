"""Hazards planted on purpose, compiled by the real TPU compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PLANTED = Path(__file__).with_name("planted.py")


@pytest.fixture(scope="module")
def found():
    """Case → its hazards, each [kind, sentence, [file, line]]."""
    pytest.importorskip("libtpu")
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env["XLA_FLAGS"] = ""
    done = subprocess.run([sys.executable, PLANTED], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


def marks():
    """Function of planted.py → kind and line of the hazard it is marked with."""
    name, found = "", {}
    for number, line in enumerate(PLANTED.read_text().splitlines(), 1):
        if line.startswith("def "):
            name = line.split("(")[0].removeprefix("def ")
        if "  # planted: " in line:
            found[name] = line.partition("  # planted: ")[2], number
    return found


@pytest.mark.parametrize("case", marks())
def test_a_planted_hazard_is_found_with_its_line(found, case):
    kind, line = marks()[case]
    first = found[case][0]
    assert (first[0], first[2]) == (kind, [str(PLANTED), line]), found[case]
    assert {each[0] for each in found[case]} == {kind}, found[case]


@pytest.mark.parametrize("case", ["clean", "scans", "clean on four", "gpt2 on four"])
def test_nothing_is_found_where_nothing_is_wrong(found, case):
    assert found[case] == []
