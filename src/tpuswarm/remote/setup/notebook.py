"""Steps that put Jupyter on a machine, in an environment of its own: programs' packages stay as they are."""

from tpuswarm.remote.places import NOTEBOOK
from tpuswarm.remote.setup.python import FIND_UV, environment_of
from tpuswarm.remote.setup.step import VERSIONS, Step

VENV = f"{NOTEBOOK}/venv"


def notebook(python: str) -> tuple[Step, Step]:
    """`python`: its version, that of the programs, whose packages notebooks see as well."""
    made = f"{VENV}/bin/python"
    install = Step(
        "notebook",
        f"""\
# for Python {python}: another one has none of it
{FIND_UV}
{{ grep -E '^[A-Za-z0-9._-]+==' {VERSIONS} || true; }} >{NOTEBOOK}/versions 2>/dev/null
"$uv" pip install --quiet --python {made} --constraint {NOTEBOOK}/versions jupyterlab ipykernel pip""",
        f"{made} -c 'import ipykernel, jupyterlab'",
    )
    return environment_of(python, VENV, "notebook-python"), install
