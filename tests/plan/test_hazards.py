"""Hazards planted on purpose, compiled by the real TPU compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.runs import made_once
from tpuswarm.plan.compile.hazards import OTHER, PARAMETER, find_collectives, gradient_sizes, shapes_from_parameters

PLANTED = Path(__file__).with_name("planted.py")
ALL_REDUCE = "  %sum.1 = f32[512,512]{1,0:T(8,128)} all-reduce(%y), channel_id=1, to_apply=%add"


def test_only_gradients_may_travel_between_replicas():
    gradients = gradient_sizes([(4, 512, 512), (512,)], devices=4)
    assert "1.0 MiB between devices in every step, although" in find_collectives(ALL_REDUCE, ())[0].sentence
    assert find_collectives(ALL_REDUCE, gradients) == []  # the gradient of one layer of a stack
    assert find_collectives(ALL_REDUCE.replace("512,512", "512,511"), gradients)
    assert find_collectives(ALL_REDUCE.replace("512,512", "64"), ()) == []  # a norm


def test_shapes_made_of_parameters_are_found_in_loops_and_branches():
    """Shapes with a batch axis are not among them."""

    def step(w, x):
        def layer(x, w):
            fold = jax.lax.cond(w[0, 0] > 0, lambda w: jnp.kron(w, np.eye(3)), lambda w: jnp.kron(np.eye(3), w), w)
            return x @ fold + jnp.broadcast_to(w[:1].repeat(3, 1), x.shape), None

        return jax.grad(lambda w: jnp.sin(jax.lax.scan(layer, x, w)[0]).sum())(w)

    jaxpr = jax.make_jaxpr(step)(jnp.ones((4, 6, 6)), jnp.ones((7, 18))).jaxpr
    shapes = shapes_from_parameters(jaxpr, [PARAMETER, OTHER])
    assert (18, 18) in shapes and not any(7 in shape for shape in shapes)
    assert shapes_from_parameters(jaxpr, [OTHER, OTHER]) == set()


@pytest.fixture(scope="module")
def found():
    """Case → its hazards, each [kind, sentence, [file, line]]."""
    pytest.importorskip("libtpu")
    return dict(made_once("hazards", lambda _: compile_planted())[1])


def compile_planted():
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env["XLA_FLAGS"] = ""
    done = subprocess.run([sys.executable, PLANTED], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def planted_hazards():
    """Function of planted.py → kind and line of its hazard."""
    name, found = "", {}
    for number, line in enumerate(PLANTED.read_text().splitlines(), 1):
        if line.startswith("def "):
            name = line.split("(")[0].removeprefix("def ")
        if "  # planted: " in line:
            found[name] = line.partition("  # planted: ")[2], number
    return found


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("case", planted_hazards())
def test_planted_hazard_is_found_with_its_line(found, case):
    kind, line = planted_hazards()[case]
    first = found[case][0]
    assert (first[0], first[2]) == (kind, [str(PLANTED), line]), found[case]
    assert {hazard[0] for hazard in found[case]} == {kind}, found[case]


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("case", ["clean", "scans", "repeats_little", "clean on four"])
def test_clean_program_has_no_hazard(found, case):
    assert found[case] == []
