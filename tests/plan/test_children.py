"""Compilations in processes of their own: what they answer, how they may end, and how long an answer holds."""

import json
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
    if end == "never":
        time.sleep(600)
    rows = len(np.loadtxt("rows.txt")) if os.path.exists("rows.txt") else 8
    return supervised(
        lambda key: {"w": jnp.zeros((width, width))},
        lambda params, batch, key: jnp.mean((batch["x"] @ params["w"]) ** 2),
        optax.sgd(0.1),
        {"x": np.ones((rows, width), np.float32)},
    )
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a recipe, a module beside it and a file of data."""
    pytest.importorskip("libtpu", reason="the plan extra is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "beside.py").write_text("WIDTH = 128\n")
    (tmp_path / "rows.txt").write_text("1\n" * 16)
    return tmp_path


def order(end: str = "well", tpu: str = "v5e-1") -> Order:
    return Order(Asked("recipe.py:make", {"end": end}, batch=16), described(catalog.find(tpu)))


def silent(order, text):
    pass


def kept(asked: Order | None = None, **settings: str) -> Found | None:
    """The answer that the cache in the working folder still gives."""
    asked = asked or order()
    return Cache(Path("cache")).get(question(asked, children._environment(asked) | settings))


def test_a_process_that_ends_badly_is_one_row_and_the_others_stand(folder):
    compiling = Children(Cache(folder / "cache"), silent)
    answers = compiling.answers([order(end) for end in ("killed", "exit", "full", "interrupted", "well")])
    found = {answered.asked.options["end"]: answer for answered, answer in answers}
    assert found["well"].fits and found["well"].program.batch == 16
    assert "killed (signal 9)" in found["killed"].problem and "memory" in found["killed"].problem
    assert "status 3" in found["exit"].problem and "the disk is on fire" in found["exit"].problem
    assert found["full"].problem == "the cache could not be written: the disk is full; make room"
    assert "memory" not in found["interrupted"].problem and "KeyboardInterrupt" in found["interrupted"].problem
    assert found["killed"].fits is None
    assert kept(order("killed")) is None
    assert kept() == found["well"]
    assert kept(order(tpu="v6e-1")) is None
    assert kept(LIBTPU_INIT_ARGS="--other") is None and kept(PYTHONPATH="/elsewhere") is None
    for name, text in (("recipe.py", RECIPE + "\n"), ("beside.py", "WIDTH = 256\n"), ("rows.txt", "1\n" * 24)):
        before = (folder / name).stat()
        text_before = (folder / name).read_text()
        (folder / name).write_text(text)
        assert kept() is None, f"{name} changed"
        (folder / name).write_text(text_before)
        os.utime(folder / name, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert kept() == found["well"]


def test_the_answer_of_another_folder_is_of_other_files(folder, tmp_path_factory, monkeypatch):
    """The recipe reads `rows.txt` of the folder that it is asked for from."""
    here = Order(Asked(f"{folder}/recipe.py:make", {"end": "well"}, batch=16), order().place)
    key = question(here, {})
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert question(here, {}) != key
    ours = Order(Asked("tpuswarm.recipes.gpt2:make"), order().place)
    key = question(ours, {})
    monkeypatch.chdir(folder)
    assert question(ours, {}) == key


def test_a_file_that_is_named_is_known_by_what_is_in_it(folder):
    """A recipe may have what it made of the file in a cache of its own, and open only that."""
    named = Order(Asked("recipe.py:make", {"data": "rows.txt", "more": "texts"}), order().place)
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("a")
    asked = {question(named, {})}
    for name in ("rows.txt", "texts/a.txt", "texts/b.txt"):
        (folder / name).write_text(f"another text of {name}")
        asked.add(question(named, {}))
    assert len(asked) == 4


def test_an_answer_to_a_recipe_that_changed_meanwhile_is_not_kept(folder):
    (folder / "recipe.py").write_text(RECIPE + "open('beside.py', 'a').close()\nos.utime('beside.py')\n")
    [(_, found)] = Children(Cache(folder / "cache"), silent).answers([order()])
    assert found.fits
    assert kept() is None


def test_what_lies_beside_a_recipe_is_no_library(folder):
    (folder / "random.py").write_text("raise SystemError('not the one that is meant')\n")
    [(_, found)] = Children(Cache(folder / "cache"), silent).answers([order()])
    assert found.fits


def test_a_kept_answer_is_of_the_same_versions_and_whole(folder):
    cache, here = Cache(folder / "cache"), question(order(), {})
    found = replace(Found(True), seconds=3.0)
    cache.put(here, found, {"files": {}, "packages": {"numpy": "0.1"}})
    assert cache.get(here) is None
    cache.put(here, found, {"files": {}, "packages": {"no-such-package": ""}})
    assert cache.get(here) == found
    [path] = (folder / "cache").iterdir()
    path.write_text(path.read_text()[:-20])
    assert cache.get(here) is None
    path.write_text(json.dumps({"found": {"fits": True}, "rests": {"files": {}, "packages": {}}}))
    assert cache.get(here) is None


def test_one_that_hangs_is_stopped(folder):
    compiling = Children(Cache(folder / "cache"), silent, seconds=6)
    [(_, found)] = compiling.answers([order("never")])
    assert found.fits is None and found.problem == "the compiler was stopped after 6 s"
    assert not compiling._running


def test_what_is_wrong_with_all_of_them_ends_all(folder):
    (folder / "beside.py").write_text("WIDTH = 1 / 0\n")
    with pytest.raises(InputError, match=r"recipe.py cannot be imported: ZeroDivisionError.*beside.py:1\)"):
        list(Children(Cache(folder / "cache"), silent).answers([order(), order(tpu="v6e-1")]))


FULL = """
import sys
from pathlib import Path
from tpuswarm import catalog
from tpuswarm.plan.cache import Cache
from tpuswarm.plan.children import Children
from tpuswarm.plan.order import Asked, Found, Order, described
disk = Path(sys.argv[1])
(disk / "fill").write_bytes(b"0" * (4 * 2**20 - 8192))
class Answers(Children):
    def _listen(self, process, order):
        from dataclasses import asdict
        return {"found": asdict(Found(True)), "rests": {"files": {str(n): "x" * 99 for n in range(99)}, "packages": {}}}
compiling = Answers(Cache(disk / "plan"), lambda order, text: None)
order = Order(Asked("x:y"), described(catalog.find("v5e-1")))
print([found.fits for _, found in compiling.answers([order])], compiling.unkept, sep="|")
print([path.name for path in disk.rglob("*.part")])
"""


def test_without_room_for_the_cache_the_answer_is_given_and_the_reason_said(on_small_disk):
    said, left = on_small_disk(FULL)
    assert said.startswith("[True]|the answers could not be cached: ") and "No space left" in said
    assert left == "[]"


def test_another_libtpu_than_jax_asks_for_is_named(monkeypatch):
    versions = {"libtpu": "0.0.42.1", "jax": "0.10.2"}
    monkeypatch.setattr("importlib.metadata.version", versions.get)
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["scipy", 'libtpu==0.0.42.*; extra == "tpu"'])
    assert other_libtpu() == ""
    versions["libtpu"] = "0.0.51"
    assert "libtpu 0.0.51 is installed but jax 0.10.2 needs 0.0.42.*" in other_libtpu()
    assert "pip install 'libtpu==0.0.42.*'" in other_libtpu()
    versions["libtpu"] = "0.0.421"
    assert "0.0.421" in other_libtpu()


def test_the_compiler_is_missed_in_words(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert "pip install 'tpuswarm[plan]'" in children.no_compiler()
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert "does not exist for Darwin on arm64" in children.no_compiler()


def test_as_many_at_a_time_as_there_is_memory(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(64))

    def meminfo(gib):
        monkeypatch.setattr("pathlib.Path.read_text", lambda path: f"MemAvailable: {gib * 2**20} kB\n")

    meminfo(24)
    assert workers(100) == 8 and workers(3) == 3
    meminfo(6)
    assert workers(100) == 2
    meminfo(1)
    assert workers(100) == 1
