"""Steps for Python from uv, packages, the environment of programs, Jupyter, and tpuswarm itself."""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping

from tpuswarm.remote.paths import ENVIRONMENT, NOTEBOOK, STATE_FOLDER, VENV
from tpuswarm.remote.setup.step import FOLDER, NEEDS_FILE, VERSIONS, Step
from tpuswarm.remote.setup.table import Setup

UV = "0.13.9"
"""One version of uv installs the same Python 3.12 everywhere."""
OWN_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""The version that runs here; our constraints fit it."""
SECRETS = f"{STATE_FOLDER}/secrets"
NOTEBOOK_VENV = f"{NOTEBOOK}/venv"
WHEELS = f"{STATE_FOLDER}/wheels"
"""Has our wheel, for `tpuswarm` among the packages: no index has this computer's version."""
OURS = re.compile(r"tpuswarm *(\[.*\])?")
FIND_UV = f"""\
uv=$(command -v uv || true)
if [ -z "$uv" ]; then uv=~/{STATE_FOLDER}/bin/uv; fi
"""


def bundle_path(python: str) -> str:
    """Return where uv and this Python are sent to on a machine that cannot download them."""
    return f"{STATE_FOLDER}/python-{python}.tar"


def venv(python: str, folder: str, id: str = "python") -> Step:
    """Return the step that creates an empty virtual environment of this Python version in a folder of the home."""
    bundle = bundle_path(python)
    return Step(
        id,
        f"""\
{FIND_UV}
if [ -e {bundle} ]; then
  mkdir -p ~/.local/share/uv/python {STATE_FOLDER}/bin
  tar -xf {bundle} -C {STATE_FOLDER} && rm -f {bundle}
  cp -R {STATE_FOLDER}/python/. ~/.local/share/uv/python && rm -rf {STATE_FOLDER}/python
  uv=~/{STATE_FOLDER}/bin/uv if_none=1
elif [ ! -x "$uv" ]; then
  installer=$(mktemp); trap 'rm -f "$installer"' EXIT
  curl --fail --silent --show-error --location --connect-timeout 10 https://astral.sh/uv/{UV}/install.sh \
    >"$installer" && UV_UNMANAGED_INSTALL=~/{STATE_FOLDER}/bin sh "$installer" || exit {NEEDS_FILE}
fi
"$uv" venv --clear --managed-python --python {python} {folder} || exit ${{if_none:-{NEEDS_FILE}}}
{folder}/bin/python -m ensurepip --default-pip >/dev/null""",
        f"{folder}/bin/python -c 'import sys; assert sys.version.startswith(\"{python}\")'",
    )


def names_ours(table: Setup) -> bool:
    """Return whether the packages name tpuswarm without a version, which means this computer's."""
    return any(OURS.fullmatch(line.strip()) for line in table.pip)


def python(table: Setup, wheel: str) -> Iterator[Step]:
    """Yield the steps of the programs' Python and its packages. `wheel`: file name of ours, for `tpuswarm`."""
    lines = [line.strip() for line in table.pip]
    need_wheel = ""
    if names_ours(table):
        lines = [f"{line} @ file://${{HOME}}/{WHEELS}/{wheel}" if OURS.fullmatch(line) else line for line in lines]
        need_wheel = f"mkdir -p {WHEELS}; [ -e {WHEELS}/{wheel} ] || exit {NEEDS_FILE}\n"
        need_wheel += f"find {WHEELS} -name '*.whl' ! -name '{wheel}' -delete\n"
    yield venv(table.python, VENV)
    yield Step(
        "packages",
        f"""\
# for Python {table.python}: another version lacks them
{need_wheel}{FIND_UV}
same=
if [ -s {FOLDER}/packages.given ]; then same="--constraint {FOLDER}/packages.given"; fi
if grep -q '[^[:space:]]' {STATE_FOLDER}/requirements; then
  "$uv" pip install --python {VENV}/bin/python --requirement {STATE_FOLDER}/requirements $same
fi
"$uv" pip freeze --python {VENV}/bin/python >{VERSIONS}.part
sed -i '/^tpuswarm @ /d' {VERSIONS}.part
{VENV}/bin/python -c 'import platform; print("# Python", platform.python_version())' >>{VERSIONS}.part
mv {VERSIONS}.part {VERSIONS}""",
        f"[ -e {VERSIONS} ] && [ -x {VENV}/bin/python ]",
        {f"{STATE_FOLDER}/requirements": "\n".join(lines) + "\n"},
        decides_versions=True,
    )


def environment(table: Setup, secrets: Mapping[str, str]) -> Iterator[Step]:
    """Yield the steps of the environment that programs and shells get."""
    lines = [
        f'case ":$PATH:" in *":$HOME/{VENV}/bin:"*) ;; '
        f'*) export PATH="$HOME/{VENV}/bin:$HOME/{STATE_FOLDER}/bin:$PATH" ;; esac',
        *(f"export {name}={shlex.quote(value)}" for name, value in table.env.items()),
        f"if [ -e ~/{SECRETS} ]; then . ~/{SECRETS}; fi",
    ]
    read = f"[ ! -e ~/{ENVIRONMENT} ] || . ~/{ENVIRONMENT}"
    delete_old_secrets = "" if table.secrets else f"rm -f {SECRETS}\n"
    yield Step(
        "environment",
        f"""\
{delete_old_secrets}# The first line, since Debian's .bashrc ends at once for a shell without a terminal.
files="$HOME/.profile $HOME/.bashrc"
if command -v zsh >/dev/null; then files="$files $HOME/.zshenv"; fi
for file in $files; do
  touch "$file"
  if [ "$(head -n 1 "$file")" != '{read}' ]; then
    file=$(readlink -f "$file")
    cp -p "$file" "$file.new"
    {{ echo '{read}'; grep -vxF '{read}' "$file" || true; }} >"$file.new"
    mv "$file.new" "$file"
  fi
done""",
        f"[ -e {ENVIRONMENT} ] && [ \"$(head -n 1 ~/.bashrc)\" = '{read}' ]",
        {ENVIRONMENT: "\n".join(lines) + "\n"},
    )
    if table.secrets:
        exports = "".join(f"export {name}={shlex.quote(secrets[name])}\n" for name in table.secrets)
        yield Step("secrets", "true", f"[ -e {SECRETS} ]", {SECRETS: exports})


def notebook(python: str) -> tuple[Step, Step]:
    """Return the steps that install Jupyter in its own environment, for the programs' Python version."""
    own_python = f"{NOTEBOOK_VENV}/bin/python"
    install = Step(
        "notebook",
        f"""\
# for Python {python}: another version lacks it
{FIND_UV}
{{ grep -E '^[A-Za-z0-9._-]+==' {VERSIONS} || true; }} >{NOTEBOOK}/versions 2>/dev/null
"$uv" pip install --python {own_python} --constraint {NOTEBOOK}/versions jupyterlab ipykernel pip""",
        f"{own_python} -c 'import ipykernel, jupyterlab'",
    )
    return venv(python, NOTEBOOK_VENV, "notebook-python"), install


def own_package(name: str, folder: str, wheel: str, constraints: str, extra: str = "") -> tuple[Step, Step]:
    """Return the steps `NAME-python`, which creates `folder`/venv, and `NAME-package`, which installs our wheel there.

    wheel: its file name. extra: such as `[gcloud]`.
    """
    own_python = f"{folder}/venv/bin/python"
    install = Step(
        f"{name}-package",
        f"""\
{FIND_UV}
[ -e {folder}/{wheel} ] || exit {NEEDS_FILE}
"$uv" pip install --python {own_python} --constraint {folder}/versions "{folder}/{wheel}{extra}"
find {folder} -maxdepth 1 -name '*.whl' ! -name '{wheel}' -delete""",
        f"{own_python} -c 'import tpuswarm'",
        {f"{folder}/versions": constraints},
    )
    return venv(OWN_PYTHON, f"{folder}/venv", f"{name}-python"), install
