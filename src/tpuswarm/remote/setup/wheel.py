"""The tpuswarm that runs here as one file that a machine can install, however it was installed here."""

import base64
import hashlib
import re
import tempfile
import zipfile
from importlib.metadata import distribution, distributions
from pathlib import Path

import tpuswarm

BUILD = "Wheel-Version: 1.0\nGenerator: tpuswarm\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def wheel(cache: Path) -> Path:
    """The wheel, made once: its version names its content, so that another content is another version."""
    root = Path(tpuswarm.__file__).parent
    files = {f"tpuswarm/{each.relative_to(root).as_posix()}": each.read_bytes() for each in _sources(root)}
    about = distribution("tpuswarm")
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12]
    version = f"{about.version.partition('+')[0]}+{digest}"
    made = cache / f"tpuswarm-{version}-py3-none-any.whl"
    if made.exists():
        return made
    metadata = re.sub(r"(?m)^Version: .*$", f"Version: {version}", about.read_text("METADATA") or "", count=1)
    folder = f"tpuswarm-{version}.dist-info"
    files |= {
        f"{folder}/METADATA": metadata.encode(),
        f"{folder}/WHEEL": BUILD.encode(),
        f"{folder}/entry_points.txt": (about.read_text("entry_points.txt") or "").encode(),
    }
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{folder}/RECORD"] = "\n".join([*lines, f"{folder}/RECORD,,", ""]).encode()
    cache.mkdir(parents=True, exist_ok=True)
    # A keeper's seat, a router and another command may make it at the same time: each a file of its own.
    with tempfile.NamedTemporaryFile(dir=cache, prefix=f"{made.name}.", suffix=".part", delete=False) as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, data in files.items():
                packed.writestr(name, data)
        Path(file.name).replace(made)
    return made


def versions() -> str:
    """What is installed here, as constraints: a machine that gets our wheel gets what it runs with here."""
    here = {each.metadata["Name"].lower(): each.version for each in distributions()}
    return "".join(
        f"{name}=={version}\n" for name, version in sorted(here.items()) if "+" not in version and name != "tpuswarm"
    )


def _sources(root: Path) -> list[Path]:
    return sorted(each for each in root.rglob("*") if each.is_file() and "__pycache__" not in each.parts)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
