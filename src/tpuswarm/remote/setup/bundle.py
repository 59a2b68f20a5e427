"""uv and a Python in one file, for machines that can download neither."""

import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tpuswarm.errors import RunFailed
from tpuswarm.remote.setup.python import UV

PLATFORM, BUILD = "manylinux_2_17_x86_64", "linux-x86_64-gnu"
"""All machines with TPUs that a TPU VM has are such."""


def bundle(python: str, cache: Path) -> Path:
    """The file, made once: `bin/uv`, and `python/` with what uv installs. Raises RunFailed where it cannot be made."""
    made = cache / f"python-{python}-uv-{UV}.tar"
    if made.exists():
        return made
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        folder = Path(name)
        (folder / "all" / "bin").mkdir(parents=True)
        uv = folder / "all" / "bin" / "uv"
        wanted = [f"uv=={UV}", "--no-deps", "--only-binary", ":all:", "--platform", PLATFORM, "--dest", name]
        has_pip = importlib.util.find_spec("pip") is not None  # an environment that uv has made has none
        pip = [sys.executable, "-m", "pip"] if has_pip else ["uv", "tool", "run", "pip"]
        _run([*pip, "download", "--quiet", *wanted], "uv cannot be downloaded here either")
        (wheel,) = folder.glob("uv-*.whl")
        with zipfile.ZipFile(wheel) as packed, uv.open("wb") as file:
            (member,) = (each for each in packed.namelist() if each.endswith("/scripts/uv"))
            shutil.copyfileobj(packed.open(member), file)
        uv.chmod(0o755)
        own = str(uv) if sys.platform == "linux" else "uv"
        into = ["--install-dir", str(folder / "all" / "python"), "--no-bin"]
        _run(
            [own, "python", "install", "--quiet", f"cpython-{python}-{BUILD}", *into],
            "Python cannot be had here either",
        )
        with tarfile.open(folder / "tar", "w") as tar:
            tar.add(folder / "all", ".")
        (folder / "tar").replace(made)
    return made


def _run(words: list[str], what: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RunFailed(f"{what}: there is no {words[0]}; install uv on this computer") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise RunFailed(f"{what}: {said[-1]}")
