import os
import queue
import subprocess
import sys
from pathlib import Path

import pytest

from tpuswarm.errors import InputError
from tpuswarm.train.user_code import OUR_FOLDER, absolute_target, blame, build_recipe, describe_failure, user_line

GOOD = """
import jax.numpy as jnp, numpy as np, optax
from tpuswarm import supervised

def toy(width: int = 3, rate: float = 0.1, names: list[str] | None = None):
    return supervised(
        lambda key: {"w": jnp.zeros(width)},
        lambda params, batch, key: jnp.mean((batch["x"] @ params["w"]) ** 2),
        optax.sgd(rate),
        {"x": np.ones((8, width), np.float32)},
    )

def wrong(): return 5
def breaks(): return {}["key"]
def opens(): return open("no-such-table.csv")
value = 3
"""


@pytest.fixture
def build(tmp_path):
    def build(text=GOOD, name="toy", options=(), file="my_recipe.py"):
        (tmp_path / file).write_text(text)
        return build_recipe(f"{tmp_path / file}:{name}", dict(options))

    return build


def test_options_are_read_as_their_types(build, tmp_path):
    recipe = build(options={"width": "5"})
    assert recipe.data("train").rows(0, 2)["x"].shape == (2, 5)
    assert recipe.target == f"{tmp_path}/my_recipe.py:toy"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("toy", {"widht": "5"}, "no option widht; did you mean width"),
        ("toy", {"width": "five"}, "width must be a whole number, not 'five'"),
        ("tory", {}, "has no tory; did you mean toy"),
        ("wrong", {}, "makes a int, not a tpuswarm.Recipe"),
        ("breaks", {}, r"KeyError: 'key' \(.*my_recipe.py:14\)"),
        ("opens", {}, r"FileNotFoundError.*no-such-table.csv.*my_recipe.py:15\)"),
        ("value", {}, "is a int, not a class or function"),
    ],
)
def test_recipe_that_cannot_be_made_is_refused(build, name, options, words):
    with pytest.raises(InputError, match=words):
        build(name=name, options=options)


def test_recipe_in_the_place_of_its_function_is_answered_with_the_way_out(build):
    with pytest.raises(InputError, match=r"made is a Supervised, not .* a recipe: write `def made\(\): return …`"):
        build(f"{GOOD}\nmade = toy()\n", name="made")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(:\n", r"SyntaxError.*my_recipe.py:1\)"),
        ("\nimport no_such_thing\n", r"no_such_thing.*my_recipe.py:2\); install it where tpuswarm is, in /"),
        ("x = 1\ny = x / 0\n", r"ZeroDivisionError.*my_recipe.py:2\)"),
    ],
)
def test_file_that_cannot_be_imported_is_named_with_the_line(build, text, words):
    with pytest.raises(InputError, match=words):
        build(text)


@pytest.mark.parametrize("target", ["nowhere.py:toy", "no_such_module:toy", "only_a_name", ":x"])
def test_missing_targets_are_refused(target):
    with pytest.raises(InputError):
        build_recipe(target, {})


def test_file_may_have_the_name_of_a_library_and_import_its_neighbours(build, tmp_path):
    (tmp_path / "beside_it.py").write_text("WIDTH = 4\n")
    build(GOOD.replace("    return supervised(", "    import beside_it\n    return supervised("), file="queue.py")
    assert sys.modules["queue"] is queue


READ_BY_WORKERS = (
    GOOD
    + """
from tpuswarm import IndexedSource

class Rows:
    def __len__(self):
        return 8

    def __getitem__(self, number):
        return {"x": np.full(3, number)}

def read():
    return supervised(print, lambda params, batch, key: 0, optax.sgd(1), IndexedSource(Rows(), workers=2, seed=0))
"""
)


def test_data_of_a_file_is_read_by_workers(build):
    source = build(READ_BY_WORKERS, "read").data("train")
    assert (source.rows(0, 8)["x"][:, 0] == source.row_numbers(0, 8)).all()


def test_line_is_found_through_the_errors_of_libraries():
    """Python turns a StopIteration in a generator into another error, and a worker's traceback is a long message."""
    words = r"^it fails: RuntimeError: generator raised StopIteration \(.*user_code.py:"
    with pytest.raises(InputError, match=words), blame("it fails"):
        list(next(iter(())) for _ in range(1))
    circle = ValueError("x" * 5000 + "the reason")
    circle.__cause__ = KeyError()
    circle.__cause__.__cause__ = circle
    assert user_line(circle) is None
    assert describe_failure("it fails", circle).endswith("the reason")


def test_our_own_errors_are_not_blamed_on_the_user():
    names = {"blame": blame}
    text = "def broken():\n  with blame('something'):\n    {}['key']"
    exec(compile(text, str(OUR_FOLDER / "train" / "any.py"), "exec"), names)
    with pytest.raises(KeyError):
        names["broken"]()


def test_targets_of_files_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute_target("a.py:B") == f"{tmp_path}/a.py:B"
    assert absolute_target("module:B") == "module:B"


def test_jax_is_prepared_before_a_file_uses_it(tmp_path):
    (tmp_path / "mine.py").write_text("import jax\nfrom tests.train.toy import toy\nKEY = jax.random.key(0)\n")
    program = "import sys; from tpuswarm.train.user_code import build_recipe; build_recipe(sys.argv[1], {})"
    root = Path(__file__).resolve().parents[2]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "src")])
    words = [sys.executable, "-c", program, f"{tmp_path}/mine.py:toy"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")  # without a TPU an installed libtpu prints warnings
