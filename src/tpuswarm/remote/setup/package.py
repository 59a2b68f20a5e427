"""Steps that put the tpuswarm that runs here on a machine."""

import sys

from tpuswarm.remote.setup.python import FIND_UV, environment_of
from tpuswarm.remote.setup.step import SEND, Step

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""The one that runs here: what is installed here fits it."""


def package(name: str, folder: str, wheel: str, versions: str, extra: str = "") -> tuple[Step, Step]:
    """`NAME-python`, a virtual environment in `folder`/venv, and `NAME-package`, which installs our wheel there.

    wheel: its file name; versions: constraints; extra: such as `[gcloud]`.
    """
    venv = f"{folder}/venv"
    install = Step(
        f"{name}-package",
        f"""\
{FIND_UV}
[ -e {folder}/{wheel} ] || exit {SEND}
"$uv" pip install --quiet --python {venv}/bin/python --constraint {folder}/versions "{folder}/{wheel}{extra}"
find {folder} -maxdepth 1 -name '*.whl' ! -name '{wheel}' -delete""",
        f"{venv}/bin/python -c 'import tpuswarm'",
        {f"{folder}/versions": versions},
    )
    return environment_of(PYTHON, venv, f"{name}-python"), install
