"""What a machine has compiled reaches those that come later, and a bucket that is not there holds nobody up."""

import jax
import pytest

from tests.cloud.rehearsal.conftest import until
from tpuswarm.swarm.engines.variables import COMPILED
from tpuswarm.swarm.member import compile_cache


class Bucket:
    objects: dict[str, bytes] = {}  # noqa: RUF012
    broken = False

    def __init__(self, url):
        assert url == "gs://some/compiled"

    def listed(self, prefix):
        if self.broken:
            raise OSError("no network")
        return dict.fromkeys(self.objects)

    def fetch(self, name, path):
        path.write_bytes(self.objects[name])

    def create(self, name, data):
        self.objects[name] = data
        return True


@pytest.fixture
def machine(monkeypatch):
    """Makes this process one of a machine with that folder."""
    monkeypatch.setattr(compile_cache, "Bucket", Bucket)
    monkeypatch.setenv(COMPILED, "gs://some/compiled")
    monkeypatch.setattr(Bucket, "objects", {})

    def be(folder):
        folder.mkdir(exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        return folder

    before = jax.config.values["jax_compilation_cache_dir"]
    yield be
    jax.config.update("jax_compilation_cache_dir", before)


def test_what_is_compiled_is_there_for_the_next_machine(machine, tmp_path):
    first = machine(tmp_path / "first")
    (first / "jit_step-abc-cache").write_bytes(b"code")
    (first / "jit_step-abc-atime").write_bytes(b"12")
    said: list[str] = []
    compile_cache.send(said.append, (0.0,))
    assert until(lambda: Bucket.objects == {"jit_step-abc-cache": b"code"})

    second = machine(tmp_path / "second")
    compile_cache.bring(said.append)
    assert [path.name for path in second.iterdir()] == ["jit_step-abc-cache"]
    assert said == ["programs that others have compiled: 1"]
    compile_cache.bring(said.append)
    assert len(said) == 1, "all of it is there"


def test_without_its_bucket_a_member_compiles_as_ever(machine, tmp_path, monkeypatch):
    machine(tmp_path / "first")
    monkeypatch.setattr(Bucket, "broken", True)
    said: list[str] = []
    compile_cache.bring(said.append)
    assert said == ["what others have compiled could not be had: OSError: no network"]
    monkeypatch.delenv(COMPILED)
    compile_cache.bring(said.append)
    compile_cache.send(said.append)
    assert len(said) == 1
