"""Which files of a folder are sent: what git tracks, and what it would track; and which must not be."""

import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tpuswarm.errors import InputError, RunFailed

SECRET = re.compile(
    r"[\w-]*\.env(\.(?!example$|sample$|template$|dist$).*)?|\.envrc|id_(rsa|dsa|ecdsa|ed25519)|\.netrc|\.pgpass"
    r"|\.git-credentials|\.npmrc|\.pypirc|application_default_credentials\.json|.*\.(p12|pfx|ppk)"
)
"""Names of files that hold secrets."""
KEY = re.compile(
    rb'^-----BEGIN [A-Z ]*PRIVATE KEY-----|"private_key":\s*"-----BEGIN|"refresh_token":\s*"\S'
    rb"|^aws_secret_access_key\s*=",
    re.MULTILINE,
)
"""How a private key begins, and how files of clouds name theirs."""
LOOKED_AT = 1 << 16
"""Bytes at the beginning of a file in which a key is looked for."""
NEVER = ("__pycache__/", ".venv/")
"""What a folder without git has no need to say that it ignores."""


def listed(root: Path) -> list[str]:
    """Paths from `root` of what there is and is not ignored, sorted. Raises InputError."""
    if root in (Path.home(), Path(root.anchor)):
        raise InputError(f"{root} is no folder of a project: `sync` sends the folder it is given in; cd into yours")
    if (root / ".git").exists():
        names = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    else:
        with tempfile.TemporaryDirectory(prefix="tpuswarm-") as empty:
            _git(root, "init", "--quiet", "--bare", empty)
            ours = (word for each in NEVER for word in ("-x", each))
            names = _git(
                root, f"--git-dir={empty}", f"--work-tree={root}", "ls-files", "-z", "--others", "--exclude-standard",
                *ours,
            )  # fmt: skip
    found: set[str] = set()
    at = f"{root}{os.sep}"
    for name in names:
        try:
            mode = os.lstat(at + name).st_mode
        except OSError:
            continue  # one that was deleted is still tracked
        if stat.S_ISDIR(mode):  # a repository of its own within this one
            found.update(f"{name.rstrip('/')}/{each}" for each in listed(root / name))
        elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):
            found.add(name)
    return sorted(found)


def _git(root: Path, *words: str) -> list[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", "-C", str(root), *words], env=clean, capture_output=True, check=False)
    except FileNotFoundError:
        raise InputError("git says what is ignored in a folder, and there is none here: install git") from None
    if done.returncode != 0:
        raise RunFailed(f"git cannot list {root}: {os.fsdecode(done.stderr).strip()}")
    return [os.fsdecode(each) for each in done.stdout.split(b"\0") if each]


def refuse_secrets(root: Path, names: Iterable[str]) -> None:
    """Raises InputError for files that hold secrets, naming them and the ways out."""
    found = [name for name in names if SECRET.fullmatch(name.rpartition("/")[2]) or _is_key(root / name)]
    if found:
        raise InputError(
            f"{_some(found)} would leave this computer, and {'it holds' if len(found) == 1 else 'they hold'} secrets: "
            "name what is needed there under [setup] secrets, and have git ignore the rest (.gitignore; `git rm "
            "--cached` for what it tracks)"
        )


def _is_key(path: Path) -> bool:
    if path.is_symlink():
        return False
    with path.open("rb") as file:
        return KEY.search(file.read(LOOKED_AT)) is not None


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
