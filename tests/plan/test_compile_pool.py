"""Compiling processes: their answers, their ends, and the validity of cached results."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.recipes.hub import COMMIT, serving
from tests.web import serve_folder
from tpuswarm import catalog
from tpuswarm.errors import InputError
from tpuswarm.plan.compile import pool
from tpuswarm.plan.compile.cache import PlanCache, cache_key
from tpuswarm.plan.compile.pool import CompilePool, max_parallel, other_libtpu
from tpuswarm.plan.compile.request import CompileRequest, CompileResult, PlanOptions, describe_target

RECIPE = """
import jax.numpy as jnp
import numpy as np
import optax
from tpuswarm import supervised
from beside import WIDTH

def make(edits: bool = False):
    print("a recipe may print")
    if edits:
        open("notes.txt", "w").close()
        open("notes.txt").close()
    return supervised(
        lambda key: {"w": jnp.zeros((WIDTH, WIDTH))},
        lambda params, batch, key: jnp.mean((batch["x"] @ params["w"]) ** 2),
        optax.sgd(0.1),
        {"x": np.ones((len(np.loadtxt("rows.txt")), WIDTH), np.float32)},
    )
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a recipe, a module beside it, a file of data, and a name of Python's library."""
    pytest.importorskip("libtpu", reason="the plan extra is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "beside.py").write_text("WIDTH = 128\n")
    (tmp_path / "rows.txt").write_text("1\n" * 16)
    (tmp_path / "random.py").write_text("raise SystemError('this is not the library')\n")
    return tmp_path


def request(tpu: str = "v5e-1", batch: int = 16, **options: str) -> CompileRequest:
    return CompileRequest(PlanOptions("recipe.py:make", options, batch=batch), describe_target(catalog.find(tpu)))


def make_pool(cache: Path, timeout_s: float = pool.COMPILE_TIMEOUT_S) -> CompilePool:
    return CompilePool(PlanCache(cache), lambda request, text: None, timeout_s)


def cached(wanted: CompileRequest | None = None, **settings: str) -> CompileResult | None:
    """The result that the cache in the working folder still gives."""
    wanted = wanted or request()
    return PlanCache(Path("cache")).get(cache_key(wanted, pool._environment(wanted) | settings))


@pytest.mark.slow
def test_result_is_valid_until_a_file_changes(folder):
    requests = [request(), request(edits="true")]
    results = dict((made.options.options.get("edits", "false"), result)
                   for made, result in make_pool(folder / "cache").results(requests))  # fmt: skip
    found = results["false"]
    assert found.fits and found.program.batch == 16 and cached() == found
    assert results["true"].fits and cached(requests[1]) is None, "a file changed while it was read"
    assert cached(request("v6e-1")) is None
    assert cached(LIBTPU_INIT_ARGS="--other") is None and cached(PYTHONPATH="/elsewhere") is None
    for name, text in (("recipe.py", RECIPE + "\n"), ("beside.py", "WIDTH = 256\n"), ("rows.txt", "1\n" * 24)):
        before, text_before = (folder / name).stat(), (folder / name).read_text()
        (folder / name).write_text(text)
        os.utime(folder / name, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert cached() is None, f"{name} changed"
        (folder / name).write_text(text_before)
        os.utime(folder / name, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert cached() == found


FITS = json.dumps({"result": asdict(CompileResult(True)), "dependencies": {"files": {}, "packages": {}}})
ENDS = {
    "fits": (f"echo '{{\"progress\": \"at work\"}}'; echo '{FITS}'", ""),
    "killed": ("kill -9 $$", "the compiler was killed (signal 9), as Linux does when memory runs out"),
    "crashes": ("kill -SEGV $$", "the compiler crashed (SIGSEGV)"),
    "exits": ("echo the disk is on fire >&2; exit 3", "status 3 and no answer; its last output: the disk is on fire"),
    "failed": ('echo \'{"failed": "make room"}\'', "make room"),
    "hangs": ("exec sleep 100", "the compiler was stopped after 2 s"),
    "refused": ('echo \'{"refused": "there is no such option"}\'', "there is no such option"),
}


@pytest.mark.parametrize("end", ENDS)
def test_end_of_a_process_is_explained(end, tmp_path, monkeypatch):
    line, problem = ENDS[end]
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/bash\nread -r request\n{line}\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    pool = make_pool(tmp_path / "cache", 2.0 if end == "hangs" else 60.0)
    if end == "refused":
        with pytest.raises(InputError, match=problem):
            list(pool.results([request(), request("v6e-1")]))
    else:
        [(_, found)] = pool.results([request()])
        assert (found.fits, problem in found.problem) == (True if end == "fits" else None, True)
    assert not pool._running


def test_slice_that_does_not_divide_the_batch_leaves_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(CompilePool, "_compile", lambda pool, request, key: CompileResult(True))
    requests = [request("v5e-1", 4100), request("v5e-8", 4100)]
    found = {made.target.name: result for made, result in make_pool(tmp_path).results(requests)}
    assert found["v5e-1"].fits and "does not divide evenly over devices (8)" in found["v5e-8"].problem
    with pytest.raises(InputError, match=r"12 rows does not divide evenly over devices \(8\).*; use --batch 16"):
        list(make_pool(tmp_path).results([request("v5e-8", 12)]))


def test_key_depends_on_the_folder_unless_the_recipe_is_built_in(folder, tmp_path_factory, monkeypatch):
    """A user's recipe may read files of the working folder."""
    tpu = request().target
    theirs = CompileRequest(PlanOptions(f"{folder}/recipe.py:make", batch=16), tpu)
    ours = CompileRequest(PlanOptions("tpuswarm.recipes.gpt2:make"), tpu)
    before = cache_key(theirs, {}), cache_key(ours, {})
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert cache_key(theirs, {}) != before[0] and cache_key(ours, {}) == before[1]


def test_key_depends_on_the_contents_of_named_files(folder):
    """A recipe may open only its own cache of a file."""
    named = request(data="rows.txt", more="texts")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("a")
    keys = {cache_key(named, {})}
    for name in ("rows.txt", "texts/a.txt", "texts/b.txt"):
        (folder / name).write_text(f"another text of {name}")
        keys.add(cache_key(named, {}))
    before = (folder / "rows.txt").stat()
    (folder / "rows.txt").write_text("other" + (folder / "rows.txt").read_text()[5:])
    os.utime(folder / "rows.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert len({*keys, cache_key(named, {})}) == 5


def test_key_depends_on_the_versions_of_named_urls_and_models(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    headers = {"ETag": '"1"'}
    with serve_folder(tmp_path, headers) as url:
        asked = request(data=f"{url}/a.txt")
        key = cache_key(asked, {})
        assert key == cache_key(asked, {}) is not None
        headers["ETag"] = '"2"'
        assert cache_key(asked, {}) != key
        headers.clear()
        assert cache_key(asked, {}) is None, "nothing tells whether it has changed"
    asked = request(tokenizer=f"hf:{tmp_path}")
    key = cache_key(asked, {})
    (tmp_path / "tokenizer.json").write_text("{}")
    assert cache_key(asked, {}) != key is not None
    (tmp_path / "hub" / "org" / "model").mkdir(parents=True)
    (tmp_path / "hub" / "org" / "model" / "config.json").write_text("{}")
    with serving(tmp_path / "hub") as hub:
        for name, value in (
            ("ENDPOINT", hub.url),
            ("HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"),
            ("HF_HUB_CACHE", str(tmp_path / "hub-cache")),
        ):
            monkeypatch.setattr(constants, name, value)
        assert COMMIT in cache_key(request(tokenizer="hf:org/model"), {})


FILES_OPENED = """
import sys
from pathlib import Path
from tpuswarm.plan.compile.cache import DependencyTracker
tracker = DependencyTracker()
from tpuswarm.errors import InputError
from tpuswarm.recipes.language.tokenizer import read_gpt2_files
from tpuswarm.torch.graph import read
for call in (lambda: read(Path("line.safetensors")), lambda: read_gpt2_files(Path("vocab.json"), Path("merges.txt"))):
    try:
        call()
    except InputError:
        pass
print(*tracker.stamps(Path("cache"))["files"])
"""


def test_files_that_libraries_open_themselves_are_tracked(tmp_path):
    names = ("line.safetensors", "vocab.json", "merges.txt")
    for name in names:
        (tmp_path / name).write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", FILES_OPENED], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert {str(tmp_path / name) for name in names} <= set(done.stdout.split())


def test_cached_result_is_valid_for_the_same_packages_and_only_whole(tmp_path):
    cache, found = PlanCache(tmp_path / "cache"), replace(CompileResult(True), seconds=3.0)
    cache.put("key", found, {"files": {}, "packages": {"numpy": "0.1"}})
    assert cache.get("key") is None
    cache.put("key", found, {"files": {}, "packages": {"no-such-package": ""}})
    assert cache.get("key") == found
    [path] = (tmp_path / "cache").iterdir()
    for damaged in (
        path.read_text()[:-20],
        '{"result": {"fits": true}, "dependencies": {"files": {}, "packages": {}}}',
    ):
        path.write_text(damaged)
        assert cache.get("key") is None


FULL_DISK = """
import sys
from dataclasses import asdict
from pathlib import Path
from tpuswarm import catalog
from tpuswarm.plan.compile.cache import PlanCache
from tpuswarm.plan.compile.pool import CompilePool
from tpuswarm.plan.compile.request import CompileRequest, CompileResult, PlanOptions, describe_target
disk = Path(sys.argv[1])
(disk / "fill").write_bytes(b"0" * (4 * 2**20 - 8192))
class Answers(CompilePool):
    def _listen(self, process, request):
        files = {str(n): "x" * 99 for n in range(99)}
        return {"result": asdict(CompileResult(True)), "dependencies": {"files": files, "packages": {}}}
pool = Answers(PlanCache(disk / "plan"), lambda request, text: None)
request = CompileRequest(PlanOptions("x:y"), describe_target(catalog.find("v5e-1")))
print([found.fits for _, found in pool.results([request])], pool.cache_error, sep="|")
print([path.name for path in disk.rglob("*.part")])
"""


def test_full_disk_does_not_lose_the_answer(on_small_disk):
    answer, left = on_small_disk(FULL_DISK)
    assert answer.startswith("[True]|the answers could not be cached: ") and "No space left" in answer
    assert left == "[]"


def test_libtpu_of_another_version_than_jax_needs_is_named(monkeypatch):
    versions = {"libtpu": "0.0.42.1", "jax": "0.10.2"}
    monkeypatch.setattr("importlib.metadata.version", versions.get)
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["scipy", 'libtpu==0.0.42.*; extra == "tpu"'])
    assert other_libtpu() == ""
    for other in ("0.0.51", "0.0.421"):
        versions["libtpu"] = other
        assert f"libtpu {other} is installed but jax 0.10.2 needs 0.0.42.*" in other_libtpu()
        assert "pip install 'libtpu==0.0.42.*'" in other_libtpu()


@pytest.mark.parametrize(
    ("system", "machine", "words"),
    [("linux", "x86_64", "pip install 'tpuswarm[plan]'"), ("darwin", "arm64", "does not exist for Darwin on arm64")],
)
def test_missing_compiler_is_explained(monkeypatch, system, machine, words):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.system", system.capitalize)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert words in pool.no_compiler()


@pytest.mark.parametrize(("gib", "requests", "expected"), [(24, 100, 8), (24, 3, 3), (6, 100, 2), (1, 100, 1)])
def test_free_memory_limits_parallel_compilations(monkeypatch, gib, requests, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(64))
    monkeypatch.setattr("pathlib.Path.read_text", lambda path: f"MemAvailable: {gib * 2**20} kB\n")
    assert max_parallel(requests) == expected
