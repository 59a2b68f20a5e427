"""Build and send the files that set-up installs: our wheel, and a bundle of uv and Python."""

import asyncio
import base64
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from contextlib import suppress
from importlib.metadata import distribution, distributions
from pathlib import Path

import tpuswarm
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.copy import upload
from tpuswarm.remote.host import Host
from tpuswarm.remote.paths import STATE_FOLDER
from tpuswarm.remote.setup.python import OWN_PYTHON, UV, bundle_path
from tpuswarm.remote.setup.step import FileUnavailable, Send, Step

WHEEL_METADATA = "Wheel-Version: 1.0\nGenerator: tpuswarm\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
UV_PLATFORM, PYTHON_PLATFORM = "manylinux_2_17_x86_64", "linux-x86_64-gnu"
"""The platform of all TPU VMs, as pip and uv call it."""


def build_wheel(cache: Path) -> Path:
    """Build a wheel of the running tpuswarm, however it was installed; its version names its content."""
    root = Path(tpuswarm.__file__).parent
    sources = sorted(path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    files = {f"tpuswarm/{path.relative_to(root).as_posix()}": path.read_bytes() for path in sources}
    installed = distribution("tpuswarm")
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12]
    version = f"{installed.version.partition('+')[0]}+{digest}"
    wheel = cache / f"tpuswarm-{version}-py3-none-any.whl"
    if wheel.exists():
        return wheel
    metadata = re.sub(r"(?m)^Version: .*$", f"Version: {version}", installed.read_text("METADATA") or "", count=1)
    folder = f"tpuswarm-{version}.dist-info"
    files |= {
        f"{folder}/METADATA": metadata.encode(),
        f"{folder}/WHEEL": WHEEL_METADATA.encode(),
        f"{folder}/entry_points.txt": (installed.read_text("entry_points.txt") or "").encode(),
    }
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{folder}/RECORD"] = "\n".join([*lines, f"{folder}/RECORD,,", ""]).encode()
    cache.mkdir(parents=True, exist_ok=True)
    # Several processes may build it at the same time, each in its own file.
    with tempfile.NamedTemporaryFile(dir=cache, prefix=f"{wheel.name}.", suffix=".part", delete=False) as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files.items():
                archive.writestr(name, data)
        Path(file.name).replace(wheel)
    return wheel


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def installed_versions() -> str:
    """Return the packages installed here as constraints: a machine with our wheel gets the same."""
    versions = {package.metadata["Name"].lower(): package.version for package in distributions()}
    return "".join(
        f"{name}=={version}\n"
        for name, version in sorted(versions.items())
        if "+" not in version and name != "tpuswarm"
    )


def build_bundle(python: str, cache: Path) -> Path:
    """Build a tar file with `bin/uv` and, in `python/`, the Python that uv installs. Raise FileUnavailable."""
    bundle = cache / f"python-{python}-uv-{UV}.tar"
    if bundle.exists():
        return bundle
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        folder, root = Path(name), Path(name) / "all"
        (root / "bin").mkdir(parents=True)
        uv = root / "bin" / "uv"
        if own := _find_uv():
            shutil.copy(own, uv)
        else:
            _download_uv(folder, uv)
        uv.chmod(0o755)
        if installed := _find_python(python):
            shutil.copytree(installed, root / "python" / installed.name, symlinks=True)
        else:
            own_uv = str(uv) if sys.platform == "linux" else "uv"
            into = ["--install-dir", str(root / "python"), "--no-bin"]
            words = [own_uv, "python", "install", f"cpython-{python}-{PYTHON_PLATFORM}", *into]
            _run(words, "Python cannot be downloaded here either")
        with tarfile.open(folder / "tar", "w") as tar:
            tar.add(root, ".")
        (folder / "tar").replace(bundle)
    return bundle


def _find_uv() -> str | None:
    """Return this computer's uv if it is the wanted version for TPU VMs; on a head set-up has installed it."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return None
    for uv in (str(Path.home() / STATE_FOLDER / "bin" / "uv"), shutil.which("uv")):
        with suppress(OSError):
            if uv and subprocess.run([uv, "--version"], capture_output=True, text=True).stdout.split()[1:2] == [UV]:
                return uv
    return None


def _find_python(python: str) -> Path | None:
    """Return the folder of a Python that this computer's uv has installed for the platform of TPU VMs."""
    names = f"cpython-{python}.*-{PYTHON_PLATFORM}"
    found = (Path.home() / ".local/share/uv/python").glob(names)
    return max(found, key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)], default=None)


def _download_uv(folder: Path, uv: Path) -> None:
    options = [f"uv=={UV}", "--no-deps", "--only-binary", ":all:", "--platform", UV_PLATFORM, "--dest", str(folder)]
    has_pip = importlib.util.find_spec("pip") is not None  # environments created by uv have none
    pip = [sys.executable, "-m", "pip"] if has_pip else ["uv", "tool", "run", "pip"]
    _run([*pip, "download", "--quiet", *options], "uv cannot be downloaded here either")
    (wheel,) = folder.glob("uv-*.whl")
    with zipfile.ZipFile(wheel) as archive, uv.open("wb") as file:
        (member,) = (member for member in archive.namelist() if member.endswith("/scripts/uv"))
        shutil.copyfileobj(archive.open(member), file)


def _run(words: list[str], problem: str) -> None:
    try:
        whole_lines = {**os.environ, "UV_NO_WRAP": "1"}
        done = subprocess.run(words, capture_output=True, text=True, env=whole_lines, check=False)
    except FileNotFoundError:
        raise FileUnavailable(f"{problem}: there is no {words[0]}; install uv on this computer") from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise FileUnavailable(f"{problem}: {lines[-1]}")


def file_sender(folder: str, cache: Path, python: str = OWN_PYTHON) -> Send:
    """Return a function that sends a host the file that a step lacks: uv and a Python, or our wheel into `folder`."""

    async def send(connections: Connections, host: Host, step: Step) -> str:
        if step.id.endswith("python"):
            await upload(connections, host, await asyncio.to_thread(build_bundle, python, cache), bundle_path(python))
            return "uv and Python"
        wheel = await asyncio.to_thread(build_wheel, cache)
        await upload(connections, host, wheel, f"{folder}/{wheel.name}")
        return wheel.name

    return send
