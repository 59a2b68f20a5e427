"""The gcloud commands that `tpuswarm init --dry-run` prints do what its steps do."""

import os
import shlex
import shutil
import subprocess

import pytest

from tests.fleet.test_init_rehearsed import done_steps
from tpuswarm.cloud.rehearsal.client import environment
from tpuswarm.cloud.rehearsal.connect import connect
from tpuswarm.cloud.rehearsal.place import Place

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")]


def test_printed_gcloud_commands_do_what_the_steps_do(init, cloud_folder):
    local = {**environment(Place(cloud_folder), connect(cloud_folder)), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    _, out, _ = init("--dry-run", "typed-1")
    lines = [line.strip() for line in out.splitlines() if line.strip().startswith("gcloud ")]
    assert len(lines) == 7
    for line in lines:
        ran = subprocess.run(shlex.split(line), env=os.environ | local, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, f"{line}\n{ran.stderr}"
    code, out, _ = init("--yes", "typed-1")
    assert code == 0 and done_steps(out) == ["8", "9"], "the steps that have a gcloud command are done already"
