"""Steps for Python, which comes from uv and never from the image, its packages, and the environment of programs."""

import shlex
from collections.abc import Iterator, Mapping

from tpuswarm.remote.places import ENVIRONMENT, OURS, VENV
from tpuswarm.remote.setup.step import FOLDER, SEND, VERSIONS, Step
from tpuswarm.remote.setup.table import Setup

UV = "0.13.9"
"""Of one version of uv, 3.12 is the same Python on all machines."""
SECRETS = f"{OURS}/secrets"
BUNDLE = f"{OURS}/python.tar"
"""uv and a Python, where they had to be sent."""
FIND_UV = f"""\
uv=$(command -v uv || true)
if [ -z "$uv" ]; then uv=~/{OURS}/bin/uv; fi
"""


def environment_of(python: str, folder: str, id: str = "python") -> Step:
    """An empty virtual environment, in that folder below the home."""
    return Step(
        id,
        f"""\
{FIND_UV}
if [ -e {BUNDLE} ]; then
  mkdir -p ~/.local/share/uv/python {OURS}/bin
  tar -xf {BUNDLE} -C {OURS} && rm -f {BUNDLE}
  cp -R {OURS}/python/. ~/.local/share/uv/python && rm -rf {OURS}/python
  uv=~/{OURS}/bin/uv
elif [ ! -x "$uv" ]; then
  curl --fail --silent --show-error --location --connect-timeout 10 https://astral.sh/uv/{UV}/install.sh >uv.sh &&
    UV_UNMANAGED_INSTALL=~/{OURS}/bin sh uv.sh || exit {SEND}
  rm -f uv.sh
fi
"$uv" venv --quiet --clear --managed-python --python {python} {folder} || {{
  grep -q "No interpreter found" {FOLDER}/{id}.log && exit {SEND}
  exit 1
}}""",
        f"{folder}/bin/python -c 'import sys; assert sys.version.startswith(\"{python}\")'",
    )


def python(table: Setup) -> Iterator[Step]:
    """A virtual environment of that Python, and what is in it."""
    yield environment_of(table.python, VENV)
    yield Step(
        "packages",
        f"""\
# for Python {table.python}: another one has none of them
{FIND_UV}
same=
if [ -s {FOLDER}/packages.given ]; then same="--constraint {FOLDER}/packages.given"; fi
if grep -q '[^[:space:]]' {OURS}/requirements; then
  "$uv" pip install --quiet --python {VENV}/bin/python --requirement {OURS}/requirements $same
fi
"$uv" pip freeze --python {VENV}/bin/python >{VERSIONS}.part
{VENV}/bin/python -c 'import platform; print("# Python", platform.python_version())' >>{VERSIONS}.part
mv {VERSIONS}.part {VERSIONS}""",
        f"[ -e {VERSIONS} ] && [ -x {VENV}/bin/python ]",
        {f"{OURS}/requirements": "\n".join(table.pip) + "\n"},
        settles=True,
    )


def environment(table: Setup, secrets: Mapping[str, str]) -> Iterator[Step]:
    """What programs find in their environment, and so do shells."""
    lines = [
        f'case ":$PATH:" in *":$HOME/{VENV}/bin:"*) ;; *) export PATH="$HOME/{VENV}/bin:$PATH" ;; esac',
        *(f"export {name}={shlex.quote(value)}" for name, value in table.env.items()),
        f"if [ -e ~/{SECRETS} ]; then . ~/{SECRETS}; fi",
    ]
    read = f"[ ! -e ~/{ENVIRONMENT} ] || . ~/{ENVIRONMENT}"
    # What is no secret of the table any more must not be one of programs.
    forget = "" if table.secrets else f"rm -f {SECRETS}\n"
    yield Step(
        "environment",
        f"""\
{forget}for each in ~/.profile ~/.bashrc; do
  touch $each; grep -qxF '{read}' $each || echo '{read}' >>$each
done""",
        f"[ -e {ENVIRONMENT} ] && grep -qxF '{read}' ~/.bashrc",
        {ENVIRONMENT: "\n".join(lines) + "\n"},
    )
    if table.secrets:
        held = "".join(f"export {name}={shlex.quote(secrets[name])}\n" for name in table.secrets)
        yield Step("secrets", "true", f"[ -e {SECRETS} ]", {SECRETS: held})
