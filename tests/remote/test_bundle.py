"""uv and a Python for machines that can download neither, made by stand-ins for pip and uv."""

import importlib.util
import os
import stat
import tarfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tpuswarm.errors import RunFailed
from tpuswarm.remote.setup import artifacts
from tpuswarm.remote.setup.artifacts import build_bundle, build_wheel

PIP = """#!/bin/sh
while [ "$1" != --dest ]; do shift; done
cp "$WHEEL" "$2/uv-1-py3-none-any.whl"
"""
UV = """#!/bin/sh
case "$1" in
  tool) shift 3; exec "$(dirname "$0")/pip-of-uv" "$@" ;;
  python) while [ "$1" != --install-dir ]; do shift; done; mkdir -p "$2/cpython/bin"; : >"$2/cpython/bin/python3" ;;
esac
"""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder of the path with a uv that can run pip; the wheel that this pip downloads holds the same uv."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name, text in {"uv": UV, "pip-of-uv": PIP}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    with zipfile.ZipFile(tmp_path / "wheel", "w") as packed:
        packed.writestr("uv-1.data/scripts/uv", UV)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WHEEL", str(tmp_path / "wheel"))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return folder


def test_uv_downloads_where_there_is_no_pip(tools, tmp_path):
    made = build_bundle("3.12", tmp_path / "cache")
    with tarfile.open(made) as tar:
        files = {entry.name: entry for entry in tar if entry.isfile()}
    assert files.keys() == {"./bin/uv", "./python/cpython/bin/python3"}
    assert files["./bin/uv"].mode & stat.S_IXUSR
    (tools / "uv").unlink()
    assert build_bundle("3.12", tmp_path / "cache") == made  # made once


def test_service_of_a_head_sends_the_uv_of_its_own_set_up(tmp_path, monkeypatch):
    """Its environment has no pip, and its PATH is systemd's."""
    uv = tmp_path / ".tpuswarm/bin/uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(
        UV.replace('case "$1" in', f'case "$1" in\n  --version) echo "uv {artifacts.UV} (abc 2026-11-01)" ;;')
    )
    uv.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with tarfile.open(build_bundle("3.12", tmp_path / "cache")) as tar:
        assert tar.extractfile("./bin/uv").read() == uv.read_bytes()


def test_installed_python_is_sent_without_a_download(tools, tmp_path):
    """Its network may be closed like the machines'."""
    for version in ("3.12.9", "3.12.10", "3.13.1"):
        folder = tmp_path / f".local/share/uv/python/cpython-{version}-linux-x86_64-gnu/bin"
        folder.mkdir(parents=True)
        (folder / "python3").write_text(version)
    with tarfile.open(build_bundle("3.12", tmp_path / "cache")) as tar:
        assert [entry.name for entry in tar if entry.name.endswith("python3")] == [
            "./python/cpython-3.12.10-linux-x86_64-gnu/bin/python3"
        ]


def test_error_without_pip_and_uv_names_the_way_out(tools, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunFailed, match=r"uv cannot be downloaded here either: there is no uv; install uv on this"):
        build_bundle("3.12", tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_wheel_may_be_built_by_several_processes_at_once(tmp_path):
    """A keeper's seat, a router and another command of one computer, before it was ever made."""
    barrier = threading.Barrier(4)

    def make(_) -> Path:
        barrier.wait()
        return build_wheel(tmp_path / "machines")

    with ThreadPoolExecutor(4) as pool:
        (made,) = set(pool.map(make, range(4)))
    with zipfile.ZipFile(made) as packed:
        assert packed.testzip() is None and "tpuswarm/__init__.py" in packed.namelist()
    assert [path.name for path in made.parent.iterdir()] == [made.name]
