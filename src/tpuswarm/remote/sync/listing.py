"""List the files of a folder that git does not ignore, and refuse those with secrets."""

import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tpuswarm.errors import InputError, RunFailed

SECRET_NAME = re.compile(
    r"[\w-]*\.env(\.(?!example$|sample$|template$|dist$).*)?|\.envrc|id_(rsa|dsa|ecdsa|ed25519)|\.netrc|\.pgpass"
    r"|\.git-credentials|\.npmrc|\.pypirc|application_default_credentials\.json|.*\.(p12|pfx|ppk)"
)
SECRET_TEXT = re.compile(
    rb'^-----BEGIN [A-Z ]*PRIVATE KEY-----|"private_key":\s*"-----BEGIN|"refresh_token":\s*"\S'
    rb"|^aws_secret_access_key\s*=",
    re.MULTILINE,
)
SEARCHED_BYTES = 1 << 16
"""Search the beginning of each file for secrets."""
IGNORED = ("__pycache__/", ".venv/")
"""In a folder without git, besides its .gitignore."""
MAX_NAMED_FILES = 5


def list_files(root: Path) -> list[str]:
    """Return the relative paths of all files and links that git does not ignore, sorted. Raise InputError."""
    if root in (Path.home(), Path(root.anchor)):
        raise InputError(f"{root} is not a project; `sync` sends the current folder, so cd into yours")
    options = ("--others", "--exclude-standard")
    if (root / ".git").exists():
        names = _git(root, "ls-files", "-z", "--cached", *options)
    else:
        with tempfile.TemporaryDirectory(prefix="tpuswarm-") as empty:
            _git(root, "init", "--quiet", "--bare", empty)
            ignored = (word for pattern in IGNORED for word in ("-x", pattern))
            names = _git(root, f"--git-dir={empty}", f"--work-tree={root}", "ls-files", "-z", *options, *ignored)
    files: set[str] = set()
    prefix = f"{root}{os.sep}"
    for name in names:
        try:
            mode = os.lstat(prefix + name).st_mode
        except OSError:
            continue  # deleted, but still tracked
        if stat.S_ISDIR(mode):  # a repository inside this one
            files.update(f"{name.rstrip('/')}/{inner}" for inner in list_files(root / name))
        elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):
            files.add(name)
    return sorted(files)


def _git(root: Path, *words: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", "-C", str(root), *words], env=environment, capture_output=True, check=False)
    except FileNotFoundError:
        raise InputError("`sync` needs git on this computer, to find ignored files: install git") from None
    if done.returncode != 0:
        raise RunFailed(f"git cannot list {root}: {os.fsdecode(done.stderr).strip()}")
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def refuse_secrets(root: Path, names: Iterable[str]) -> None:
    """Raise InputError if files hold secrets, by name or content."""
    if found := [name for name in names if _is_secret(root, name)]:
        more = f" and {len(found) - MAX_NAMED_FILES} more" if len(found) > MAX_NAMED_FILES else ""
        holds = "it holds" if len(found) == 1 else "they hold"
        raise InputError(
            f"{', '.join(found[:MAX_NAMED_FILES])}{more} would leave this computer, and {holds} secrets. List "
            "needed values under [setup] secrets, and let git ignore the rest (.gitignore; `git rm --cached` for "
            "tracked files)"
        )


def _is_secret(root: Path, name: str) -> bool:
    path = root / name
    if SECRET_NAME.fullmatch(path.name):
        return True
    if path.is_symlink():
        return False
    with path.open("rb") as file:
        return SECRET_TEXT.search(file.read(SEARCHED_BYTES)) is not None
