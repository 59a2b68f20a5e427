"""Hazards planted on purpose, compiled by the real TPU compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpuswarm.plan.hlo import collectives, gradient_sizes

PLANTED = Path(__file__).with_name("planted.py")


ALL_REDUCE = "  %sum.1 = f32[512,512]{1,0:T(8,128)} all-reduce(%y), channel_id=1, to_apply=%add"


def test_a_program_of_one_device_has_no_collectives_and_a_replicated_one_only_its_gradients():
    gradients = gradient_sizes([(4, 512, 512), (512,)], devices=4)
    assert (
        "1.0 MiB between devices in every step, although the program is for one device"
        in collectives(ALL_REDUCE, ())[0].sentence
    )
    assert collectives(ALL_REDUCE, gradients) == []  # the gradient of one layer of a stack
    assert collectives(ALL_REDUCE.replace("512,512", "512,511"), gradients)
    assert collectives(ALL_REDUCE.replace("512,512", "64"), ()) == []  # a norm


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


@pytest.mark.parametrize("case", ["clean", "scans", "repeats_little", "clean on four", "gpt2 on four"])
def test_nothing_is_found_where_nothing_is_wrong(found, case):
    assert found[case] == []
