"""Members of a machine compile a program once, and it reaches later machines through the run's bucket."""

import threading
import uuid

import jax
import pytest

from tpuswarm.swarm.engines.variables import COMPILED
from tpuswarm.swarm.member import compile_cache


@pytest.fixture
def use_cache(loopback, monkeypatch):
    """Make a folder the compilation cache of this process, as on another machine of the run."""
    monkeypatch.setenv(COMPILED, f"gs://bucket/{uuid.uuid4()}")

    def use(folder):
        folder.mkdir()
        jax.config.update("jax_compilation_cache_dir", str(folder))
        return folder

    before = jax.config.values["jax_compilation_cache_dir"]
    yield use
    jax.config.update("jax_compilation_cache_dir", before)


def test_next_machine_gets_what_the_first_has_compiled(use_cache, tmp_path):
    first = use_cache(tmp_path / "first")
    (first / "jit_step-abc-cache").write_bytes(b"code")
    (first / "jit_step-abc-atime").write_bytes(b"12")
    lines = []
    compile_cache.upload(lines.append, (0.0,))
    for thread in threading.enumerate():
        if thread.name == "compiled":
            thread.join(60)
    second = use_cache(tmp_path / "second")
    compile_cache.fetch(lines.append)
    assert {path.name: path.read_bytes() for path in second.iterdir()} == {"jit_step-abc-cache": b"code"}
    compile_cache.fetch(lines.append)
    assert lines == ["fetched 1 compiled programs"], "the second time nothing is missing"


def test_member_compiles_itself_without_a_bucket(use_cache, tmp_path, monkeypatch):
    use_cache(tmp_path / "first")
    lines = []
    monkeypatch.setenv(COMPILED, "gs://no-such-bucket/compiled")
    compile_cache.fetch(lines.append)
    assert len(lines) == 1 and lines[0].startswith("could not fetch compiled programs")
    monkeypatch.delenv(COMPILED)
    compile_cache.fetch(lines.append)
    compile_cache.upload(lines.append)
    assert len(lines) == 1


def test_members_of_a_machine_wait_for_the_first_and_then_go_on_together(use_cache, tmp_path):
    use_cache(tmp_path / "cache")
    order, both = [], threading.Barrier(2, timeout=60)

    def compile_later():
        with compile_cache.after_first("step"):
            order.append("later")
            both.wait()

    later = [threading.Thread(target=compile_later) for _ in range(2)]
    with compile_cache.after_first("step"):
        for thread in later:
            thread.start()
        with compile_cache.after_first("another step"):
            order.append("another")
        later[0].join(0.3)
        order.append("first")
    for thread in later:
        thread.join(60)
    assert order == ["another", "first", "later", "later"]


@pytest.mark.parametrize("hinder", ["busy", "no folder"])
def test_member_that_waits_too_long_or_cannot_lock_compiles(use_cache, tmp_path, monkeypatch, hinder):
    folder = use_cache(tmp_path / "cache")
    monkeypatch.setattr(compile_cache, "FIRST_TIMEOUT_S", 0.2)
    if hinder == "no folder":
        folder.rmdir()
        folder.write_text("a file")
    with compile_cache.after_first("step"), compile_cache.after_first("step"):
        pass
