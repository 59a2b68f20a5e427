"""Compilations in processes of their own: what they answer, how they may end, and how long an answer holds."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tpuswarm import catalog
from tpuswarm.errors import InputError
from tpuswarm.plan import children
from tpuswarm.plan.cache import Cache, question
from tpuswarm.plan.children import Children, other_libtpu, workers
from tpuswarm.plan.order import Asked, Found, Order, described

RECIPE = """
import os, time
import jax.numpy as jnp
import numpy as np
import optax
from tpuswarm import RunFailed, supervised
from beside import WIDTH

def make(end: str = "well", width: int = WIDTH):
    print("what a recipe prints is no answer")
    if end == "killed":
        os.kill(os.getpid(), 9)
    if end == "exit":
        print("the disk is on fire", flush=True)
        os._exit(3)
    if end == "full":
        raise RunFailed("the cache could not be written: the disk is full; make room")
    if end == "interrupted":
        raise KeyboardInterrupt
    if end == "edits":
        open("notes.txt", "w").close()
        open("notes.txt").close()
    return supervised(
        lambda key: {"w": jnp.zeros((width, width))},
        lambda params, batch, key: jnp.mean((batch["x"] @ params["w"]) ** 2),
        optax.sgd(0.1),
        {"x": np.ones((len(np.loadtxt("rows.txt")), width), np.float32)},
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
    (tmp_path / "random.py").write_text("raise SystemError('not the one that is meant')\n")
    return tmp_path


def order(end: str = "well", tpu: str = "v5e-1") -> Order:
    return Order(Asked("recipe.py:make", {"end": end}, batch=16), described(catalog.find(tpu)))


def compiling(cache: Path, seconds: float = children.SECONDS) -> Children:
    return Children(Cache(cache), lambda order, text: None, seconds)


def cached(wanted: Order | None = None, **settings: str) -> Found | None:
    """The answer that the cache in the working folder still gives."""
    wanted = wanted or order()
    return Cache(Path("cache")).get(question(wanted, children._environment(wanted) | settings))


def test_failed_process_is_one_row_and_good_answers_hold_until_a_file_changes(folder):
    ends = ("killed", "exit", "full", "interrupted", "edits", "well")
    answers = compiling(folder / "cache").answers([order(end) for end in ends])
    found = {answered.asked.options["end"]: answer for answered, answer in answers}
    assert found["well"].fits and found["well"].program.batch == 16
    for end, words in (
        ("killed", ["killed (signal 9)", "memory"]),
        ("exit", ["status 3", "the disk is on fire"]),
        ("full", ["the cache could not be written: the disk is full; make room"]),
        ("interrupted", ["KeyboardInterrupt"]),
    ):
        assert found[end].fits is None and all(word in found[end].problem for word in words)
    assert "memory" not in found["interrupted"].problem

    assert cached() == found["well"] and cached(order("killed")) is None
    assert found["edits"].fits and cached(order("edits")) is None, "a file changed while it was read"
    assert cached(order(tpu="v6e-1")) is None
    assert cached(LIBTPU_INIT_ARGS="--other") is None and cached(PYTHONPATH="/elsewhere") is None
    for name, text in (("recipe.py", RECIPE + "\n"), ("beside.py", "WIDTH = 256\n"), ("rows.txt", "1\n" * 24)):
        before, text_before = (folder / name).stat(), (folder / name).read_text()
        (folder / name).write_text(text)
        assert cached() is None, f"{name} changed"
        (folder / name).write_text(text_before)
        os.utime(folder / name, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert cached() == found["well"]


def test_answer_depends_on_the_folder_unless_the_recipe_is_built_in(folder, tmp_path_factory, monkeypatch):
    """A recipe of the user's may read files of the working folder."""
    theirs = Order(Asked(f"{folder}/recipe.py:make", {"end": "well"}, batch=16), order().place)
    ours = Order(Asked("tpuswarm.recipes.gpt2:make"), order().place)
    before = question(theirs, {}), question(ours, {})
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert question(theirs, {}) != before[0] and question(ours, {}) == before[1]


def test_answer_depends_on_the_contents_of_named_files(folder):
    """A recipe may have what it made of the file in a cache of its own, and open only that."""
    named = Order(Asked("recipe.py:make", {"data": "rows.txt", "more": "texts"}), order().place)
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("a")
    questions = {question(named, {})}
    for name in ("rows.txt", "texts/a.txt", "texts/b.txt"):
        (folder / name).write_text(f"another text of {name}")
        questions.add(question(named, {}))
    assert len(questions) == 4


def test_cached_answer_holds_for_the_same_packages_and_only_whole(folder):
    cache, key = Cache(folder / "cache"), question(order(), {})
    found = replace(Found(True), seconds=3.0)
    cache.put(key, found, {"files": {}, "packages": {"numpy": "0.1"}})
    assert cache.get(key) is None
    cache.put(key, found, {"files": {}, "packages": {"no-such-package": ""}})
    assert cache.get(key) == found
    [path] = (folder / "cache").iterdir()
    for damaged in (path.read_text()[:-20], '{"found": {"fits": true}, "rests": {"files": {}, "packages": {}}}'):
        path.write_text(damaged)
        assert cache.get(key) is None


def test_hung_compilation_is_stopped(folder):
    compilation = compiling(folder / "cache", seconds=0.1)  # it takes longer to start
    [(_, found)] = compilation.answers([order()])
    assert found.fits is None and found.problem == "the compiler was stopped after 0 s"
    assert not compilation._running


def test_recipe_that_cannot_be_imported_ends_all_compilations(folder):
    (folder / "beside.py").write_text("WIDTH = 1 / 0\n")
    with pytest.raises(InputError, match=r"recipe.py cannot be imported: ZeroDivisionError.*beside.py:1\)"):
        list(compiling(folder / "cache").answers([order(), order(tpu="v6e-1")]))


FULL_DISK = """
import sys
from dataclasses import asdict
from pathlib import Path
from tpuswarm import catalog
from tpuswarm.plan.cache import Cache
from tpuswarm.plan.children import Children
from tpuswarm.plan.order import Asked, Found, Order, described
disk = Path(sys.argv[1])
(disk / "fill").write_bytes(b"0" * (4 * 2**20 - 8192))
class Answers(Children):
    def _listen(self, process, order):
        return {"found": asdict(Found(True)), "rests": {"files": {str(n): "x" * 99 for n in range(99)}, "packages": {}}}
compiling = Answers(Cache(disk / "plan"), lambda order, text: None)
order = Order(Asked("x:y"), described(catalog.find("v5e-1")))
print([found.fits for _, found in compiling.answers([order])], compiling.unkept, sep="|")
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
    assert words in children.no_compiler()


@pytest.mark.parametrize(("gib", "orders", "expected"), [(24, 100, 8), (24, 3, 3), (6, 100, 2), (1, 100, 1)])
def test_free_memory_limits_parallel_compilations(monkeypatch, gib, orders, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(64))
    monkeypatch.setattr("pathlib.Path.read_text", lambda path: f"MemAvailable: {gib * 2**20} kB\n")
    assert workers(orders) == expected
